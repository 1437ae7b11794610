"""Quantizing with what a model's matrices meet: the service behind `localllm quantize --calibrate`.

The model reads texts, matrix by matrix, in the order of its layers. Of what a matrix meets the second moments are
taken; with them it is encoded (localllm.quant.gptq), and what comes after it meets what the encoded one makes. Each
encoded matrix goes to a file beside the one that is wanted, so that an interrupted run goes on from there, to the same
bytes.
"""

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from importlib.metadata import version
from math import prod
from typing import Any

import numpy as np

from localllm.arch import architecture
from localllm.arch.weights import Weight, Weights
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.operation import Operation
from localllm.engine.trace.recorder import recorded
from localllm.engine.trace.scale_folding import ScaleFold, folds
from localllm.errors import ModelError
from localllm.files.cache.array_log import ArrayLog
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.files.gguf.header import printable
from localllm.files.gguf.tensor_source import GGUFSource, Source, SourceTensor, row_count
from localllm.files.gguf.writer import pack_value
from localllm.files.oddities import Oddities
from localllm.kernels.dequantize_rows import Widener
from localllm.quant.block_codes import dequantize
from localllm.quant.encode import encode
from localllm.quant.hessian import SAMPLE, Hessian
from localllm.quantizing.calibration_texts import chunks_of
from localllm.quantizing.folded_source import FoldedSource
from localllm.quantizing.layerwise_runner import (
    BatchedActivations,
    Inputs,
    Matrices,
    MatrixRows,
    RecordedActivations,
    Sequential,
    StopCalibrationError,
    pasts,
)
from localllm.quantizing.liveness import LastReads
from localllm.quantizing.original_weights import Originals
from localllm.quantizing.plan import OnProgress, QuantizePlan, TensorJob
from localllm.services.quantization_info import calibration
from localllm.system.memory import return_freed_from
from localllm.text.tokenizer import Tokenizer

SUFFIX = ".calibration"
EMBEDDING = "token_embd.weight"
LOGITS = ("output.weight", EMBEDDING)  # what makes them
LARGE = 4 << 20  # bytes of an activation: of a model with 1.2b weights glibc would keep 1.7 GB of them between layers
VERSION = 6  # of what is done: part of the key of work to go on with


def as_file(source: Source) -> GGUFFile:
    """A source as a file whose tensors are there, but for matrices of what is no GGUF file, which are hollow."""
    if isinstance(source, FoldedSource):
        file = as_file(source.inner)
        vectors = {name: as_vector(tensor) for name, tensor in source.folded.items() if len(tensor.shape) == 1}
        return HeaderOnlyFile(source.path, source.metadata, {**file.tensors, **vectors})
    if isinstance(source, GGUFSource):
        return source.file
    tensors = {}
    for tensor in source.tensors:
        width = tensor.format.row_bytes(tensor.shape[-1])
        if len(tensor.shape) == 1:
            tensors[tensor.name] = as_vector(tensor)
        else:
            data = np.broadcast_to(np.uint8(0), (*tensor.shape[:-1], width))
            tensors[tensor.name] = Tensor(tensor.name, tensor.format, tensor.shape, data)
    return HeaderOnlyFile(source.path, source.metadata, tensors)


def as_vector(tensor: SourceTensor) -> Tensor:
    """A vector with its numbers."""
    return Tensor(tensor.name, tensor.format, tensor.shape, tensor.rows(0, 1).reshape(-1))


class HeaderOnlyFile(GGUFFile):
    """What a file is made of that is not written yet."""

    def __init__(self, path: str, metadata: Any, tensors: dict[str, Tensor]):
        self.path, self.metadata, self.tensors, self.packed, self.parts = path, metadata, tensors, {}, {}
        self.oddities = Oddities()


class Calibration:
    """What has to be known to encode a plan's matrices.

    Attributes:
        jobs: the plan's, by name.  chunks: token ids.  key: says what is done, to go on with it.
    """

    def __init__(self, plan: QuantizePlan, texts: Sequence[str]):
        """Raises ModelError, UsageError."""
        return_freed_from(LARGE)
        self._file, self.jobs = as_file(plan.source), {job.tensor.name: job for job in plan.jobs}
        self._model, self._hyperparameters = architecture(self._file)
        self.chunks = chunks_of(Tokenizer.from_metadata(plan.source.metadata), texts, self._hyperparameters.context)
        key = hashlib.sha256(
            repr(
                (
                    VERSION,
                    plan.files[0][0].get("general.file_type"),
                    [(j.tensor.name, j.tensor.shape, j.format.name) for j in plan.jobs],
                )
            ).encode()
        )
        for path in plan.source.files:
            with suppress(OSError):
                status = os.stat(path)
                key.update(repr((status.st_size, status.st_mtime_ns)).encode())
        for chunk in self.chunks:
            key.update(chunk.astype("<i4").tobytes())
        self.key = key.hexdigest()
        made = calibration([os.path.basename(text) for text in texts], sum(map(len, self.chunks)), version("localllm"))
        self._metadata = {name: pack_value(value) for name, value in made.items()}

    def planned(self, plan: QuantizePlan) -> "Calibration":
        """The same, of another plan for the model."""
        other = copy(self)
        other._file, other.jobs = as_file(plan.source), {job.tensor.name: job for job in plan.jobs}
        return other

    def with_metadata(self, plan: QuantizePlan) -> QuantizePlan:
        """A plan whose file says of it what was calibrated on."""
        (metadata, jobs), *others = plan.files
        return replace(plan, files=[({**metadata, **self._metadata}, jobs), *others])

    def some(self, count: int, tokens: int | None = None) -> list[np.ndarray]:
        """The beginnings of so many chunks, evenly spread."""
        places = np.unique(np.linspace(0, len(self.chunks) - 1, count).round().astype(int))
        return [self.chunks[place][:tokens] for place in places]

    def folds(self) -> list[ScaleFold]:
        """Where the model may be scaled and stay the same."""
        h = self._hyperparameters
        if h.encode:
            return []
        weights, context = Weights(self._file.tensors), max(map(len, self.chunks))
        said = recorded(self._file, self._model.forward, weights, h, context)
        return folds(said.operations, self._file.tensors, LOGITS if h.guessing else (EMBEDDING,))

    def run(self, done: ArrayLog, widener: Widener, threads: int, on_progress: OnProgress) -> None:
        """Encode what has not been encoded, to `done`. Raises ModelError for what is not finite."""
        matrices = CalibratedMatrices(self.jobs, done, widener, threads, on_progress)
        self.forward(matrices, self.chunks, threads)

    def forward(
        self, matrices: Matrices, chunks: Sequence[np.ndarray], threads: int, past: RecordedActivations | None = None
    ) -> BatchedActivations | None:
        """What the model makes of chunks, with such matrices: logits of all tokens, None if nobody wants them."""
        last, shared = self._said(chunks)
        builder = Sequential(chunks, shared, matrices, threads, last, past)
        try:
            return self._model.forward(builder, Weights(self._file.tensors), self._hyperparameters)
        except StopCalibrationError:
            return None
        finally:
            builder.close()

    def logits(
        self, matrices: Matrices, chunks: Sequence[np.ndarray], threads: int, past: RecordedActivations | None = None
    ) -> BatchedActivations:
        """The same with matrices that go on to the end."""
        logits = self.forward(matrices, chunks, threads, past)
        assert logits is not None
        return logits

    def pasts(
        self, chunks: Sequence[np.ndarray], groups: Sequence[Collection[str]]
    ) -> tuple[RecordedActivations, list[RecordedActivations]]:
        """See localllm.quantizing.layerwise_runner.pasts."""
        return pasts(*self._said(chunks), groups)

    def _said(self, chunks: Sequence[np.ndarray]) -> tuple[LastReads, set[Any]]:
        """Which verbs the model says, and the states whose keys and values more than one layer reads."""
        last, weights, context = LastReads(), Weights(self._file.tensors), max(map(len, chunks))
        said = recorded(self._file, last.watching(self._model.forward), weights, self._hyperparameters, context)
        return last, read_again(said.operations)


def read_again(operations: Sequence[Operation]) -> set[Any]:
    """States whose keys and values more than one layer reads."""
    states = [operation.state for operation in operations if isinstance(operation, Attend)]
    return {state for state in states if states.count(state) > 1}


class CalibratedMatrices(Originals):
    """Matrices that become encoded ones as soon as it is known what they meet."""

    def __init__(
        self, jobs: Mapping[str, TensorJob], done: ArrayLog, widener: Widener, threads: int, on_progress: OnProgress
    ):
        super().__init__(jobs, widener)
        self._done, self._threads, self._on_progress = done, threads, on_progress
        self._counted = dict[str, int]()  # weights of the matrices that are done
        self._shared: Any = None  # what self._moments are of

    def rows(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        """As they will be, but those of a matrix that makes logits, too, as they are."""
        rows, job = super().rows(weight, ids), self.jobs[weight.name]
        is_encoded = is_calibrated(job) and not job.makes_logits
        return dequantize(job.format.name, encode(job.format.name, rows)) if is_encoded else rows

    def met(self, weight: Weight, inputs: Inputs) -> MatrixRows:
        """As of Matrices."""
        job = self.jobs[weight.name]
        if is_calibrated(job) and weight.name not in self._counted:
            if weight.name not in self._done:
                self._encode(job, inputs)
            self._counted[weight.name] = prod(job.tensor.shape)
            self._on_progress(sum(self._counted.values()), weight.name)
        if weight.name in LOGITS:
            raise StopCalibrationError
        return self.taken(weight, lambda first, end: self._now(job, first, end))

    def _encode(self, job: TensorJob, inputs: Inputs) -> None:
        """Encode a matrix, or each of a stack with what that one meets."""
        (rows, columns), pieces = (1, *job.tensor.shape)[-2:], []
        for n in range(row_count(job.tensor.shape) // rows):
            if inputs.shared is None or inputs.shared is not self._shared:
                self._moments = self._moments_of(job.tensor.name, list(inputs.of(n)), columns)
                self._shared = inputs.shared
            feedback = self._moments.feedback(job.format.name, self.sampled(job.tensor, n, SAMPLE))
            pieces += [feedback.encode(job.format.name, weights) for weights in self.in_pieces(job.tensor, n)]
        self._done.add(job.tensor.name, np.concatenate(pieces))

    def _moments_of(self, name: str, pieces: list[np.ndarray], columns: int) -> Hessian:
        moments = Hessian(pieces, columns, self._threads, is_read=name == EMBEDDING)
        if not all(np.isfinite(np.diagonal(half)).all() for half in moments.halves):
            raise ModelError(f"what meets the tensor {printable(name)} is not finite")
        return moments

    def _now(self, job: TensorJob, first: int, end: int) -> np.ndarray:
        """Rows of a tensor, encoded if that has been done, float32; good until this thread's next ones."""
        tensor, width = job.tensor, job.format.row_bytes(job.tensor.shape[-1])
        if tensor.name not in self._done:
            return self.read(tensor, first, end)
        rows = self._done.read(tensor.name, first * width, end * width).reshape(end - first, width)
        return self._widener.widen(job.format, rows, tensor.shape[-1])


def is_calibrated(job: TensorJob) -> bool:
    """Whether a matrix is encoded with what it meets."""
    return not job.is_copied and job.format.block > 1
