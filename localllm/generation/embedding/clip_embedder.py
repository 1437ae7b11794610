"""Embed text and images in one vector space (CLIP)."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from localllm.engine.clip_encoder import ClipEncoder
from localllm.errors import ContextError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.embedding.embedder import EmbedOptions, ShownImage, normalize_vectors
from localllm.images.opened import load_image
from localllm.text.clip_words import ClipTokenizer
from localllm.values import require_string

if TYPE_CHECKING:
    from localllm.engine.options import EngineOptions

Progress = Callable[[int], object]


class ClipEmbedder:
    """A CLIP model, which embeds text and images in one vector space. Must be closed.

    Attributes:
        width: length of a vector.  context: maximum number of tokens of a text.
        tokens: number of tokens read so far.  warnings: messages for the user.
    """

    chunk = 1  # number of texts or images to embed before their vectors are written

    def __init__(self, file: GGUFFile, options: "EngineOptions"):
        """Load both encoders. Raises ModelError for an invalid file."""
        self.reader, self._words = ClipEncoder(file, options), ClipTokenizer(file.metadata, file.path)
        self.width, self.context, self.tokens, self.warnings = self.reader.width, self.reader.context, 0, list[str]()
        if len(self._words.pieces) > self.reader.vocab_size:
            raise ModelError(f"{file.path}: {len(self._words.pieces)} tokens, but {self.reader.vocab_size} embeddings")

    def embed(
        self, inputs: Iterable[str | ShownImage], options: EmbedOptions | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        """Embed texts and images, float32 [inputs, width].

        progress: called after each input with the number of those done. Raises ContextError for a text that is too
        long, and UsageError for an invalid image or invalid options.
        """
        embed_options = options or EmbedOptions()
        embed_options.require_valid()
        if embed_options.dims is not None and embed_options.dims > self.width:
            raise UsageError(
                f"dims must be {self.width} or below, not {embed_options.dims}: that is the vectors' width"
            )
        if embed_options.role is not None:
            raise UsageError("CLIP models have no prompts for roles: omit role")
        rows = []
        for number, item in enumerate(inputs):
            rows.append(
                self.reader.encode_image(load_image(item.source))
                if isinstance(item, ShownImage)
                else self._embed_text(item, embed_options, f"text {number + 1}")
            )
            if progress:
                progress(len(rows))
        vectors = np.array(rows, np.float32).reshape(-1, self.width)[:, : embed_options.dims]
        return normalize_vectors(vectors) if embed_options.normalize else np.ascontiguousarray(vectors)

    def _embed_text(self, text: str, options: EmbedOptions, name: str) -> np.ndarray:
        """Embed a text, float32 [width]: the average of its chunks' vectors, weighted by their number of tokens."""
        pieces = self.tokenize(text, options, name)
        self.tokens += sum(map(len, pieces))
        weights = np.array([len(piece) for piece in pieces], np.float64)
        rows = np.stack([self.reader.encode_text(piece) for piece in pieces])
        result: np.ndarray = (rows * weights[:, None]).sum(axis=0) / weights.sum()
        return result

    def tokenize(self, text: str | ShownImage, options: EmbedOptions, name: str) -> list[list[int]]:
        """Return the token ids of a text: one list, several if it is split, none for an image.

        name: name of the text in error messages. Raises ContextError for a text that is too long.
        """
        if isinstance(text, ShownImage):
            return []
        start, *ids, end = self._words.encode(require_string("texts", text))
        room = self.context - 2
        if len(ids) > room and options.overflow == "refuse":
            advice = "shorten it or set overflow to cut or split"
            raise ContextError(f"{name} has {len(ids) + 2} tokens, the model's context is {self.context}: {advice}")
        starts: Sequence[int] = range(0, max(len(ids), 1), room) if options.overflow == "split" else (0,)
        return [[start, *ids[first : first + room], end] for first in starts]

    def get_usual_role(self, role: str) -> str | None:
        """Return None: CLIP models have no prompts for queries and documents."""
        return None

    def close(self) -> None:
        self.reader.close()
