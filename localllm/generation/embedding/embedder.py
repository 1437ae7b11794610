"""Embed text, with the prompts that embedding models expect before queries and documents."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from localllm.arch import load_architecture
from localllm.arch.decoder import KINDS, NONE, read_pooling
from localllm.arch.hyperparameters import RANK
from localllm.arch.metadata import HyperparameterReader
from localllm.errors import ContextError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.frozen import frozen
from localllm.text.tokenizer import Tokenizer
from localllm.values import require_integer, require_string, to_token_ids

if TYPE_CHECKING:
    from localllm.engine.options import EngineOptions


POOLINGS = KINDS[1:4]
OVERFLOWS = "refuse", "cut", "split"
ROLES = "query", "document"
Progress = Callable[[int], object]


@frozen
class EmbedOptions:
    """Options of embedding texts.

    Attributes:
        dims: number of first dimensions to keep, for Matryoshka models (Kusupati et al. 2022); None: all.
        normalize: whether vectors are scaled to length 1.
        role: "query" or "document": the model's prompt for it is put before each text; None: no prompt.
        overflow: what happens to a text that is too long: "refuse", "cut", or "split" and average.
        max_tokens: number of tokens, with special ones, to which texts are cut; None: no limit.
    """

    dims: int | None = None
    normalize: bool = True
    role: str | None = None
    overflow: str = "refuse"
    max_tokens: int | None = None

    def require_valid(self) -> None:
        """Raise UsageError for an invalid role, overflow or number."""
        if self.dims is not None:
            require_integer("dims", self.dims, 1)
        if self.max_tokens is not None:
            require_integer("max_tokens", self.max_tokens, 1)
        if self.role not in (None, *ROLES):
            raise UsageError(f"role must be query or document, not {self.role!r}")
        if self.overflow not in OVERFLOWS:
            raise UsageError(f"overflow must be refuse, cut or split, not {self.overflow!r}")


@frozen
class ShownImage:
    """An image to embed.

    Attributes:
        source: types as in localllm.images.opened.
    """

    source: object


class Embedder:
    """A model that embeds text. Must be closed.

    Attributes:
        width: length of a vector.  context: maximum number of tokens of a text.
        pooling: how the vectors of tokens become one vector.
        tokens: number of tokens read so far.  warnings: messages for the user.
    """

    chunk = 4096  # number of texts to embed before their vectors are written

    def __init__(self, file: GGUFFile, tokenizer: Tokenizer, options: "EngineOptions", pooling: str | None = None):
        """Open the model.

        pooling: one of POOLINGS in place of the file's. Raises ModelError, MemoryLimitError and UsageError.
        """
        from localllm.engine.embedding_runner import EmbeddingRunner

        self.pooling = select_pooling(file, pooling)
        self.path, self._metadata, self._tokenizer = file.path, file.metadata, tokenizer
        self.reader = EmbeddingRunner(file, self.pooling, options)
        self.width, self.context, self.tokens = self.reader.width, self.reader.context, 0
        self.warnings = [warning for warning in (*tokenizer.warnings, self.reader.warning) if warning]
        around = tokenizer.encode("", bos=True, eos=True)
        begins = len(tokenizer.encode("", bos=True))
        self._before, self._behind = around[:begins], around[begins:]

    def embed(
        self, texts: Iterable[str | list[int]], options: EmbedOptions | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        """Embed texts, or their token ids, float32 [texts, width].

        progress: called after each run of the model with the number of finished chunks. Raises UsageError for invalid
        options, and ContextError, with the text's number from 1, for a text that is too long.
        """
        embed_options = options or EmbedOptions()
        embed_options.require_valid()
        if embed_options.dims is not None and embed_options.dims > self.width:
            raise UsageError(
                f"dims must be {self.width} or below, not {embed_options.dims}: that is the vectors' width"
            )
        pieces, owners = list[list[int]](), list[int]()
        for number, text in enumerate(texts):
            of_text = self.tokenize(text, embed_options, f"text {number + 1}")
            pieces += of_text
            owners += [number] * len(of_text)
        self.tokens += sum(map(len, pieces))
        vectors = average_chunks(self.reader.read(pieces, progress=progress), pieces, owners)
        if embed_options.dims is not None and normalizes_before_cut(self._metadata):
            vectors = layer_norm(vectors)
        vectors = vectors[:, : embed_options.dims]
        return normalize_vectors(vectors) if embed_options.normalize else np.ascontiguousarray(vectors)

    def _get_ids(self, text: str | Iterable[int]) -> list[int]:
        """Return the token ids of a text, without special tokens.

        Raises UsageError for ids outside of the vocabulary.
        """
        if isinstance(text, str | bytes) or not isinstance(text, Iterable):
            return self._tokenizer.encode(require_string("texts", text))
        ids, begin, end = to_token_ids(text), len(self._before), len(self._behind)
        if unknown := [token for token in ids if not 0 <= token < self._tokenizer.vocab_size]:
            raise UsageError(f"token ids must be from 0 to {self._tokenizer.vocab_size - 1}, not {unknown[0]}")
        ids = ids[begin:] if begin and ids[:begin] == self._before else ids
        return ids[:-end] if end and ids[-end:] == self._behind else ids

    def tokenize(self, text: str | list[int], options: EmbedOptions, name: str) -> list[list[int]]:
        """Return the token ids of a text with special tokens: one list, or several if it is split.

        name: name of the text in error messages. Raises ContextError for a text that is too long, UsageError for an
        empty one.
        """
        if options.role and (prompt := find_prompt(self._metadata, options.role, self.path)):
            text = prompt + require_string("texts", text)
        ids = self._get_ids(text)
        around = len(self._before) + len(self._behind)
        room = self.context - around
        if room < 1:
            raise UsageError(f"a context of {self.context} tokens is too short for any text")
        if options.max_tokens is not None:
            ids = ids[: max(0, options.max_tokens - around)]
        if len(ids) > room:
            if options.overflow == "refuse":
                length, advice = len(ids) + self.context - room, "shorten it or set overflow to cut or split"
                raise ContextError(f"{name} has {length} tokens, the model's context is {self.context}: {advice}")
            starts = range(0, len(ids), room) if options.overflow == "split" else (0,)
            return [[*self._before, *ids[start : start + room], *self._behind] for start in starts]
        all_ids = [*self._before, *ids, *self._behind]
        if not all_ids:
            raise UsageError(f"{name} is empty, and the model adds no tokens to it")
        return [all_ids]

    def get_usual_role(self, role: str) -> str | None:
        """Return the role if the model has a known prompt for it, else None."""
        try:
            find_prompt(self._metadata, role, self.path)
        except UsageError:
            return None
        return role

    def close(self) -> None:
        self.reader.close()


def select_pooling(file: GGUFFile, requested: str | None = None) -> str:
    """Return the pooling type of a model: the requested one, or the file's.

    Raises UsageError for an unknown type, and ModelError for a model that is not an embedding model.
    """
    if requested not in (None, *POOLINGS):
        raise UsageError(f"pooling must be {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}, not {requested!r}")
    _, hyperparameters = load_architecture(file)
    declared = read_pooling(HyperparameterReader.from_file(file))
    is_ranker = declared == RANK or (declared is None and has_head(file))
    if is_ranker and requested is None:
        raise ModelError(f"{file.path}: this model is a reranker: use localllm rerank")
    pooling = requested or (hyperparameters.pooling if hyperparameters.bidirectional else declared)
    if pooling in (None, NONE):
        problem = "does not define how to pool token vectors: it is not an embedding model"
        raise ModelError(
            f'{file.path}: the model {problem}; use --pooling last (Python: pooling="last") to use it anyway'
        )
    return str(pooling)


def has_head(file: GGUFFile) -> bool:
    """Return whether a model has a classification head."""
    return any(name in file.tensors for name in ("cls.weight", "cls.output.weight"))


def average_chunks(rows: np.ndarray, pieces: Sequence[Sequence[int]], owners: Sequence[int]) -> np.ndarray:
    """Average the vectors of the chunks of each text, weighted by their number of tokens.

    rows: vectors of the chunks, float32 [chunks, width]. owners: index of each chunk's text.
    """
    if len(set(owners)) == len(owners):
        return rows
    counts = np.array([len(piece) for piece in pieces], np.float64)
    sums, total = np.zeros((owners[-1] + 1, rows.shape[1])), np.zeros(owners[-1] + 1)
    np.add.at(sums, np.array(owners), rows * counts[:, None])
    np.add.at(total, np.array(owners), counts)
    return (sums / total[:, None]).astype(np.float32)


def normalize_vectors(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors to length 1; zero vectors stay zero."""
    lengths = np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def normalizes_before_cut(metadata: Mapping[str, object]) -> bool:
    """Return whether a model's card asks for a layer norm before vectors are cut, as that of Nomic Embed 1.5 does.

    Source: https://huggingface.co/nomic-ai/nomic-embed-text-v1.5#adjusting-dimensionality
    """
    texts = [metadata.get(f"general.{key}") for key in ("name", "basename", "version")]
    name = " ".join(text for text in texts if isinstance(text, str)).lower()
    is_nomic = metadata.get("general.architecture") == "nomic-bert"
    return is_nomic and re.search(r"nomic.?embed.?text.*\bv?1\.5\b", name) is not None


def layer_norm(vectors: np.ndarray, epsilon: float = 1e-5) -> np.ndarray:
    """Apply PyTorch's layer norm without weights, float32: subtract the mean, divide by the standard deviation."""
    rows = vectors.astype(np.float64)
    centered = rows - rows.mean(axis=1, keepdims=True)
    result: np.ndarray = (centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + epsilon)).astype(np.float32)
    return result


PROMPT = "localllm.prompt."  # prefix of keys in converted files, from sentence-transformers' prompts
INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
# Prompts before queries and documents, from the model cards, by a pattern of the model's name.
KNOWN = {
    r"nomic": ("search_query: ", "search_document: "),
    r"\be5\b": ("query: ", "passage: "),
    r"bge.*(small|base|large).*en": ("Represent this sentence for searching relevant passages: ", ""),
    r"arctic.*embed.*v2": ("query: ", ""),
    r"arctic.*embed": ("Represent this sentence for searching relevant passages: ", ""),
    r"embedding.?gemma": ("task: search result | query: ", "title: none | text: "),
    r"qwen3.*embedding": (INSTRUCTION, ""),
    r"(all.)?minilm|bge.*m3|gte|jina": ("", ""),
}


def find_prompt(metadata: Mapping[str, object], role: str, path: str) -> str:
    """Return the text that a model expects before a query or a document.

    role: "query" or "document". Raises UsageError if it is not known.
    """
    prompt = metadata.get(PROMPT + role)
    if isinstance(prompt, str):
        return prompt
    if any(isinstance(metadata.get(PROMPT + other_role), str) for other_role in ("query", "document")):
        return ""
    names = [metadata.get(f"general.{key}") for key in ("name", "basename")]
    name = " ".join(text for text in names if isinstance(text, str)).lower().replace("_", "-")
    for pattern, prompts in KNOWN.items():
        if re.search(pattern, name):
            return prompts[role == "document"]
    raise UsageError(f"{path}: the model has no prompt for a {role}; add one to the texts yourself")
