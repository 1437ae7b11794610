"""Score pairs of a query and a text with rerankers: classification heads, and Qwen3's.

A pair is tokenized as in the model's training: [CLS] query [SEP] text [SEP] with two token types for BERT;
<s> query </s></s> text </s> for XLM-RoBERTa; a yes-no question for Qwen3, whose score is the probability of yes (Zhang
et al. 2025, arXiv 2506.05176). A Qwen3 reranker's file may lack the head, which is the rows of "yes" and "no" of the
output matrix.
"""

import os
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from localllm.arch import load_architecture
from localllm.arch.decoder import read_pooling
from localllm.arch.hyperparameters import RANK
from localllm.arch.metadata import HyperparameterReader
from localllm.errors import ContextError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.generation.embedding.embedder import Progress, has_head
from localllm.quant.formats import BY_NAME
from localllm.text.tokenizer import Tokenizer
from localllm.values import require_string

if TYPE_CHECKING:
    from localllm.engine.options import EngineOptions

ANSWERS = ["yes", "no"]
MIN_TEXT_TOKENS = 16  # minimum tokens that a query must leave for a text
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Reranker:
    """A model that scores how relevant texts are to a query. Must be closed.

    Attributes:
        context: maximum number of tokens of a pair.  tokens: number of tokens read so far.
        warnings: messages for the user.
        labels: names of the outputs of the classification head; a single output, or "yes", is the relevance.
    """

    def __init__(self, file: GGUFFile, tokenizer: Tokenizer, options: "EngineOptions"):
        """Load the model. Raises ModelError if it is not a reranker, MemoryLimitError and UsageError."""
        from localllm.engine.embedding_runner import EmbeddingRunner

        require_reranker(file)
        answers = None if has_head(file) else ANSWERS
        file = file if has_head(file) else add_answer_head(file, tokenizer)
        self.path, self._tokenizer, self.tokens = file.path, tokenizer, 0
        self.reader = EmbeddingRunner(file, RANK, options)
        self.context = self.reader.context
        named = file.metadata.get(f"{self.reader.hyperparameters.arch}.classifier.output_labels")
        self.labels = answers or (named if isinstance(named, list) else [])
        self._asks = not self.reader.hyperparameters.bidirectional
        self.warnings = [warning for warning in (*tokenizer.warnings, self.reader.warning) if warning]

    def rerank(
        self, query: str, texts: Iterable[str], cut: bool = False, progress: Progress | None = None
    ) -> np.ndarray:
        """Return the relevance of each text to the query, float32 [texts]; larger is better.

        cut: whether texts that are too long are cut; otherwise ContextError is raised, with the text's number from 1.
        Raises UsageError for a query that is too long.
        """
        pair = self._tokenize_question if self._asks else self._tokenize_pair
        query_ids = self._tokenizer.encode(require_string("query", query))
        pairs = [pair(query_ids, require_string("texts", text), cut, number) for number, text in enumerate(texts, 1)]
        self.tokens += sum(len(ids) for ids, _ in pairs)
        seconds = [second for _, second in pairs] if self._tokenizer.marks_pairs else None
        rows = self.reader.read([ids for ids, _ in pairs], seconds, progress)
        return self._select_relevance(rows)

    def _select_relevance(self, rows: np.ndarray) -> np.ndarray:
        """Return the relevance, float32 [texts], from the outputs of the head, float32 [texts, outputs]."""
        if rows.shape[1] == 1:
            return rows[:, 0]
        if self.labels[:2] not in (["yes", "no"], ["no", "yes"]) or rows.shape[1] != 2:
            classes = f"the head has {rows.shape[1]} classes, none of which is relevance"
            raise ModelError(f"{self.path}: {classes}; the tensor cls.output.weight may be missing")
        yes, no = rows[:, self.labels.index("yes")], rows[:, self.labels.index("no")]
        result: np.ndarray = (1 / (1 + np.exp(no.astype(np.float64) - yes))).astype(np.float32)
        return result

    def _tokenize_pair(self, query: list[int], text: str, cut: bool, number: int) -> tuple[list[int], int]:
        """Tokenize a pair for an encoder; return its tokens and the position of the second text."""
        t = self._tokenizer
        first = [t.bos_id] if t.bos_id is not None else []
        end = [t.eos_id] if t.eos_id is not None else []
        # WordPiece vocabularies have one separator, RoBERTa's byte-level and unigram ones two.
        between = end if t.marks_pairs else end * 2
        head = [*first, *query, *between]
        return [*head, *self._cut_to_context(t.encode(text), len(head) + len(end), cut, number), *end], len(head)

    def _tokenize_question(self, query: list[int], text: str, cut: bool, number: int) -> tuple[list[int], int]:
        """Tokenize a pair as a question for a decoder; return its tokens and their number."""
        t = self._tokenizer
        head = [
            *t.encode(QUESTION, special=True), *t.encode(f"<Instruct>: {INSTRUCTION}\n<Query>: "), *query,
            *t.encode("\n<Document>: "),
        ]  # fmt: skip
        tail = t.encode(ANSWER, special=True)
        ids = [*head, *self._cut_to_context(t.encode(text), len(head) + len(tail), cut, number), *tail]
        return ids, len(ids)

    def _cut_to_context(self, ids: list[int], other_tokens: int, cut: bool, number: int) -> list[int]:
        """Return the tokens of a text, cut to the context if `cut` is true.

        other_tokens: number of the pair's other tokens. Raises ContextError and UsageError.
        """
        room = self.context - other_tokens
        if room < min(MIN_TEXT_TOKENS, self.context // 2):
            raise UsageError(
                f"the query has {other_tokens} tokens with its special tokens; the model's context is {self.context}"
            )
        if len(ids) > room and not cut:
            length, advice = other_tokens + len(ids), "shorten it or set cut"
            raise ContextError(
                f"text {number} has {length} tokens with its query, the model's context is {self.context}: {advice}"
            )
        return ids[:room]

    def close(self) -> None:
        self.reader.close()


def require_reranker(file: GGUFFile) -> None:
    """Raise ModelError for a model without a classification head that is not named a reranker either."""
    load_architecture(file)
    pooling = read_pooling(HyperparameterReader.from_file(file))
    if not has_head(file) and not (is_named_reranker(file) and pooling in (None, RANK)):
        use = "generates text" if pooling in (None, RANK) else "computes embeddings (localllm embed)"
        raise ModelError(
            f"{file.path}: not a reranker: it must have the tensor cls.output.weight or cls.weight; without them the"
            f" model {use}, and no scores"
        )
    if pooling not in (None, RANK):
        raise ModelError(f"{file.path}: not a reranker: the model computes embeddings; use localllm embed")


def is_named_reranker(file: GGUFFile) -> bool:
    """Return whether a generating model is a reranker by its name, such as Qwen3-Reranker-0.6B."""
    names = (file.metadata.get("general.name"), file.metadata.get("general.basename"), os.path.basename(file.path))
    is_named = any(isinstance(name, str) and "rerank" in name.lower() for name in names)
    return is_named and not load_architecture(file)[1].bidirectional


def add_answer_head(file: GGUFFile, tokenizer: Tokenizer) -> GGUFFile:
    """Return the model with a head of the rows of ANSWERS in its output matrix. Raises ModelError."""
    from localllm.kernels.reference import dequantize  # seldom needed

    ids = [tokenizer.encode(answer) for answer in ANSWERS]
    matrix = file.tensors.get("output.weight") or file.tensors["token_embd.weight"]
    if any(len(each) != 1 for each in ids):
        raise ModelError(f'{file.path}: not a reranker: "yes" and "no" are not single tokens of its vocabulary')
    rows = [token for (token,) in ids]
    values = dequantize(replace(matrix, shape=(len(rows), *matrix.shape[1:]), data=matrix.data[rows]))
    head = Tensor("cls.output.weight", BY_NAME["F32"], values.shape, np.ascontiguousarray(values).view(np.uint8))
    extended = copy(file)
    extended.tensors = file.tensors | {head.name: head}
    return extended
