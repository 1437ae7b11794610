"""Compute importance matrices: sums of squared inputs of each matrix (`localllm imatrix`).

Documents are processed in chunks, as in llama-imatrix. Every SAVE_EVERY seconds the sums are written to a file next to
the output, so that an interrupted run resumes and gives the same bytes.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from time import monotonic
from typing import Self

import numpy as np

from localllm.api import open_with_options
from localllm.arch import load_architecture
from localllm.arch.hyperparameters import RANK
from localllm.engine.embedding_runner import EmbeddingRunner
from localllm.engine.options import EngineOptions
from localllm.engine.trace.imatrix_collector import ImatrixCollector as Observer
from localllm.errors import ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.imatrix_file import ImportanceMatrix, SquaredActivations, read_imatrix, write_imatrix
from localllm.files.safe_file import resolve_target
from localllm.files.text_file import read_text
from localllm.kernels.build.objects import Progress
from localllm.quant.recipes import EMBEDDING, OUTPUT, UNQUANTIZED, get_role
from localllm.services.bench import is_embedding_only
from localllm.services.evaluation.scores import add_bos, split_chunks
from localllm.text.tokenizer import Tokenizer

SAVE_EVERY = 10  # seconds
VERSION = 2  # of the collected data; part of the key by which interrupted work is found
CHUNK_TOKENS = 512  # tokens of a chunk
LAYER_PREFIX = "blk."  # prefix of a layer's tensors, after "enc." in an encoder of an encoder-decoder model


def merge_files(paths: Sequence[str | os.PathLike[str]]) -> ImportanceMatrix:
    """Merge the importance matrices in several files.

    Raises ModelError, and UsageError if they are of different models.
    """
    return reduce(ImportanceMatrix.merge, map(read_imatrix, paths))


def get_default_chunk_size(path: str | os.PathLike[str]) -> int:
    """Return the default number of tokens per chunk: 512, or an embedding model's context if that is shorter.

    Raises ModelError.
    """
    if not is_embedding_only(str(path)):
        return CHUNK_TOKENS
    return min(CHUNK_TOKENS, load_architecture(GGUFFile.open(path))[1].context)


def is_collected(name: str) -> bool:
    """Return whether a matrix gets an entry in the file.

    Matrices in layers always do, as in llama-imatrix; others do if they are quantized.
    """
    return name.startswith(LAYER_PREFIX) or not (get_role(name) in (OUTPUT, EMBEDDING) or UNQUANTIZED.search(name))


class DecoderCollector:
    """Sums the squared inputs of a model that generates text."""

    def __init__(self, path: str | os.PathLike[str], options: EngineOptions):
        """Open the model. Raises the errors of api.open_model, and UnsupportedError for a model with an encoder."""
        self._observer = Observer()
        with GGUFFile.open(path) as file:
            h = load_architecture(file)[1]
        if h.start_token is not None:
            raise UnsupportedError(
                f"{os.fsdecode(path)}: importance matrices of {h.arch} models, which have an encoder and a decoder, "
                "are not supported: quantize without one"
            )
        self._model = open_with_options(path, replace(options, observer=self._observer))
        self.path, self.files, self.warnings = self._model.path, self._model.files, self._model.warnings
        self.tokenizer, self._sequence = self._model.tokenizer, self._model.sequence()
        self.tensors = [*self._model.file.tensors.values()]

    def read(self, ids: Sequence[int], makes_logits: bool) -> dict[str, SquaredActivations]:
        """Run a chunk and return the sums of its matrices' squared inputs.

        makes_logits: compute the logits of all tokens, so that the output matrix gets sums, too.
        """
        discard_sums(self._observer)
        self._sequence.truncate(0)
        self._sequence.append(ids, "all" if makes_logits else "none")
        return pop_squares(self._observer, lambda name: len(ids))

    def close(self) -> None:
        self._model.close()


class EncoderCollector:
    """Sums the squared inputs of a model for embeddings or scores.

    Matrices after pooling get one row per chunk. The head of a reranker runs separately, because its pooling reads only
    some rows of the last layer.
    """

    def __init__(self, path: str | os.PathLike[str], options: EngineOptions):
        """Open the model. Raises ModelError, MemoryLimitError, UsageError."""
        file = GGUFFile.open(path)
        h = load_architecture(file)[1]
        context = h.context
        if options.context is not None and options.context > context:
            raise UsageError(f"context must be at most {context} for this model (found {options.context})")
        self.path, self.files, self.tensors = file.path, list(file.parts), [*file.tensors.values()]
        self.tokenizer = Tokenizer.from_metadata(file.metadata)
        self._observers = {pooling: Observer() for pooling in ("mean", *([RANK] if h.pooling == RANK else []))}
        self._runners = [
            EmbeddingRunner(file, pooling, replace(options, observer=observer))
            for pooling, observer in self._observers.items()
        ]
        self.warnings = [warning for warning in (*self.tokenizer.warnings, self._runners[0].warning) if warning]

    def read(self, ids: Sequence[int], makes_logits: bool) -> dict[str, SquaredActivations]:
        squares = dict[str, SquaredActivations]()
        for runner, observer in zip(self._runners, self._observers.values(), strict=True):
            discard_sums(observer)
            runner.read([ids])
            squares = pop_squares(observer, lambda name: len(ids) if LAYER_PREFIX in name else 1) | squares
        return squares

    def close(self) -> None:
        for runner in self._runners:
            runner.close()


def discard_sums(observer: Observer) -> None:
    observer.pop_sums(), observer.pop_counts()  # the sums of an interrupted chunk


def pop_squares(observer: Observer, rows: Callable[[str], int]) -> dict[str, SquaredActivations]:
    """Return the sums of all matrices and reset them.

    rows: returns the number of input rows of a matrix outside a mixture of experts.
    """
    squares, counts = observer.pop_sums(), observer.pop_counts()
    return {
        name: SquaredActivations(
            sums.reshape(-1, sums.shape[-1]),
            counts[name].astype(float) if name in counts else np.array([rows(name)], float),
        )
        for name, sums in squares.items()
    }


class ImportanceCollector:
    """Computes an importance matrix from documents, in a `with` block.

    Attributes:
        total: number of chunks.  done: chunks that are finished, including those of earlier runs.
        warnings: lines for the user.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        texts: Sequence[str | os.PathLike[str]],
        out: str | os.PathLike[str],
        size: int = 512,
        limit: int | None = None,
        special: bool = False,
        output: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
    ):
        """Tokenize the documents and open the model. Raises the errors of api.open_model and read_text.

        texts, out: paths of the documents and of the file. size: tokens per chunk. limit: maximum number of chunks.
        special: parse control tokens such as <|im_end|> in the documents. output: collect for the output matrix, too.
        progress(done, total): called while kernels are compiled.
        """
        self._part = Path(f"{os.fsdecode(out)}.part")
        for target in (out, self._part):
            resolve_target(target, tuple(map(os.fsdecode, (path, *texts))))
        contents = [read_text(text) for text in texts]
        options = EngineOptions(threads, size, "f16", "cpu", "auto", progress)
        self._model = (
            EncoderCollector(path, options) if is_embedding_only(str(path)) else DecoderCollector(path, options)
        )
        resolve_target(out, tuple(self._model.files))
        self.path, self.warnings, self._tokenizer = self._model.path, self._model.warnings, self._model.tokenizer
        tokens = [token for text in contents for token in self._tokenizer.encode(text, special, bos=True)]
        self._chunks, self._output = split_chunks(tokens, size, limit), output
        key = hashlib.sha256(self._chunks.tobytes())
        key.update(
            repr((VERSION, size, output, [(t.name, t.shape, t.format.name) for t in self._model.tensors])).encode()
        )
        self._matrix = ImportanceMatrix({}, list(map(os.fsdecode, texts)), 0, size, key.hexdigest())
        self._resume()

    @property
    def total(self) -> int:
        return len(self._chunks)

    @property
    def done(self) -> int:
        return self._matrix.chunks

    def _resume(self) -> None:
        """Load the sums that an interrupted run for the same matrix has saved."""
        try:
            saved = read_imatrix(self._part)
        except (ModelError, UsageError):
            return
        if saved.run == self._matrix.run and saved.chunks <= self.total:
            self._matrix = replace(self._matrix, squares=saved.squares, chunks=saved.chunks)

    def read(self) -> Iterator[int]:
        """Process the remaining chunks and yield the number of finished ones; an interruption saves the sums."""
        saved = self.done, monotonic()
        try:
            for chunk in self._chunks[self.done :]:
                squares = self._sum_squares(chunk)
                self._matrix = self._matrix.merge(ImportanceMatrix(squares, (), 1, self._matrix.chunk_size))
                yield self.done
                if monotonic() - saved[1] > SAVE_EVERY:
                    write_imatrix(self._part, self._matrix)
                    saved = self.done, monotonic()
        finally:
            if self.done > saved[0]:
                write_imatrix(self._part, self._matrix)

    def _sum_squares(self, chunk: np.ndarray) -> dict[str, SquaredActivations]:
        """Sum the squared inputs of all matrices over a chunk. Raises ModelError if they are not finite."""
        squares = self._model.read(add_bos(chunk, self._tokenizer), self._output)
        for name, sums in squares.items():
            if not np.isfinite(sums.sums).all():
                raise ModelError(f"{self.path}: the input of tensor {name} is not finite")
        return {name: sums for name, sums in squares.items() if self._output or is_collected(name)}

    def compute_matrix(self) -> ImportanceMatrix:
        """Return the importance matrix. Raises UsageError if no chunk is finished."""
        if not self.done:
            raise UsageError("no chunk has been processed yet: at least one is needed for an importance matrix")
        return replace(self._matrix, run="")

    def remove_part(self) -> None:
        """Remove the file of saved sums, once the importance matrix is written."""
        self._part.unlink(missing_ok=True)

    def close(self) -> None:
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
