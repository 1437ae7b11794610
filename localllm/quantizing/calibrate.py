"""Encode a model's matrices by their inputs on calibration texts (`localllm quantize --calibrate`).

The model runs over calibration documents matrix by matrix, in the order of its layers. Each matrix is encoded with the
second moments of its inputs (GPTQ, localllm.quant.gptq), and later matrices read the outputs of the encoded ones. Each
encoded matrix is written to a file next to the output, so that an interrupted run resumes and gives the same bytes.
"""

import hashlib
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from localllm.arch import load_architecture
from localllm.arch.weights import Weight, Weights
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.operation import Operation
from localllm.engine.trace.recorder import trace_model
from localllm.engine.trace.scale_folding import ScaleFold, find_folds
from localllm.errors import ModelError, UsageError
from localllm.files.cache.array_log import ArrayLog
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.files.gguf.header import printable
from localllm.files.gguf.metadata import Irregularities, Metadata
from localllm.files.gguf.tensor_source import GGUFModelSource, Source, SourceTensor, count_rows
from localllm.files.gguf.writer import pack_value
from localllm.files.text_file import read_text
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.quant.block_codes import dequantize
from localllm.quant.encode import encode
from localllm.quant.hessian import SAMPLE_ROWS, Hessian
from localllm.quantizing.layerwise_runner import (
    BatchedActivations,
    LastUseRecorder,
    LayerwiseRunner,
    MatrixInputs,
    MatrixReader,
    MatrixRows,
    RecordedActivations,
    StopCalibrationError,
    plan_reuse,
)
from localllm.quantizing.original_weights import OriginalWeights
from localllm.quantizing.plan import OnProgress, QuantizePlan, TensorJob
from localllm.quantizing.sources import FoldedSource
from localllm.services.evaluation.scores import add_bos, split_chunks
from localllm.services.inspection.inspect import make_calibration_metadata
from localllm.system.memory import lower_mmap_threshold
from localllm.text.templates import ChatTemplate
from localllm.text.tokenizer import Tokenizer

LOG_SUFFIX = ".calibration"
EMBEDDING = "token_embd.weight"
OUTPUT_NAMES = ("output.weight", EMBEDDING)  # possible names of the output matrix
FREED_BYTES = (
    4 << 20
)  # bytes of an activation: glibc would keep 1.7 GB of them between layers of a model with 1.2b weights
VERSION = 6  # of the procedure; part of the key by which interrupted work is found
CHUNK_TOKENS, MAX_CHUNKS = 512, 64  # tokens per chunk; maximum number of chunks
DATA = Path(__file__).resolve().parent.parent / "data" / "calibration"
# In an order that gives each half prose, code and other texts, see localllm.quant.hessian.
SAMPLE_TEXTS = (
    "prose.txt", "code.txt", "mathematics.txt", "languages.txt", "documentation.txt", "python.txt", "encyclopedia.txt",
    "chat.toml",
)  # fmt: skip


def view_as_gguf(source: Source) -> GGUFFile:
    """Return a source as a GGUF file in memory. Of a checkpoint, only vectors are loaded; matrices are zeros."""
    if isinstance(source, FoldedSource):
        file = view_as_gguf(source.inner)
        vectors = {name: load_vector(tensor) for name, tensor in source.folded.items() if len(tensor.shape) == 1}
        return UnwrittenFile(source.path, source.metadata, {**file.tensors, **vectors})
    if isinstance(source, GGUFModelSource):
        return source.file
    tensors = {}
    for tensor in source.tensors:
        width = tensor.format.row_bytes(tensor.shape[-1])
        if len(tensor.shape) == 1:
            tensors[tensor.name] = load_vector(tensor)
        else:
            data = np.broadcast_to(np.uint8(0), (*tensor.shape[:-1], width))
            tensors[tensor.name] = Tensor(tensor.name, tensor.format, tensor.shape, data)
    return UnwrittenFile(source.path, source.metadata, tensors)


def load_vector(tensor: SourceTensor) -> Tensor:
    return Tensor(tensor.name, tensor.format, tensor.shape, tensor.read_rows(0, 1).reshape(-1))


class UnwrittenFile(GGUFFile):
    """The metadata and tensors of a GGUF file that does not exist on disk."""

    def __init__(self, path: str, metadata: Mapping[str, object], tensors: dict[str, Tensor]):
        self.path, self.metadata, self.tensors = path, Metadata(metadata), tensors
        self.packed, self.parts = {}, {}
        self.oddities = Irregularities()


class Calibration:
    """The documents and the model by which a plan's matrices are encoded.

    Attributes:
        jobs: the plan's jobs, by tensor name.  chunks: token ids of the documents.
        key: identifies the procedure and its inputs, so that an interrupted run can resume.
    """

    def __init__(self, plan: QuantizePlan, texts: Sequence[str]):
        """Tokenize the documents and read the model's architecture. Raises ModelError, UsageError.

        texts: paths of documents; none for the built-in ones.
        """
        lower_mmap_threshold(FREED_BYTES)
        self._file, self.jobs = view_as_gguf(plan.source), {job.tensor.name: job for job in plan.jobs}
        self._model, self._hyperparameters = load_architecture(self._file)
        self.chunks = load_chunks(Tokenizer.from_metadata(plan.source.metadata), texts, self._hyperparameters.context)
        formats = [(job.tensor.name, job.tensor.shape, job.format.name) for job in plan.jobs]
        key = hashlib.sha256(repr((VERSION, plan.files[0][0].get("general.file_type"), formats)).encode())
        for path in plan.source.files:
            with suppress(OSError):
                status = os.stat(path)
                key.update(repr((status.st_size, status.st_mtime_ns)).encode())
        for chunk in self.chunks:
            key.update(chunk.astype("<i4").tobytes())
        self.key = key.hexdigest()
        names = [os.path.basename(text) for text in texts]
        metadata = make_calibration_metadata(names, sum(map(len, self.chunks)), version("localllm"))
        self._metadata = {name: pack_value(value) for name, value in metadata.items()}

    def copy_for_plan(self, plan: QuantizePlan) -> "Calibration":
        """Return a calibration with the same documents for another plan of the same model."""
        copied = copy(self)
        copied._file, copied.jobs = view_as_gguf(plan.source), {job.tensor.name: job for job in plan.jobs}
        return copied

    def add_metadata(self, plan: QuantizePlan) -> QuantizePlan:
        """Return the plan with a description of the calibration in the metadata of its first file."""
        (metadata, jobs), *other_files = plan.files
        return replace(plan, files=[({**metadata, **self._metadata}, jobs), *other_files])

    def select_chunks(self, count: int, tokens: int | None = None) -> list[np.ndarray]:
        """Select `count` evenly spaced chunks, each cut to its first `tokens` tokens."""
        places = np.unique(np.linspace(0, len(self.chunks) - 1, count).round().astype(int))
        return [self.chunks[place][:tokens] for place in places]

    def find_folds(self) -> list[ScaleFold]:
        """Find where scales can be moved between tensors without changing the model's outputs."""
        h = self._hyperparameters
        if h.encode:
            return []
        weights, context = Weights(self._file.tensors), max(map(len, self.chunks))
        traced = trace_model(self._file, self._model.forward, weights, h, context)
        return find_folds(traced.operations, self._file.tensors, OUTPUT_NAMES if h.mtp_layers else (EMBEDDING,))

    def list_encoded_jobs(self) -> list[TensorJob]:
        """List the matrices that `run` encodes: those that multiply activations."""
        multiplied = self._analyze(self.chunks)[0].multiplied
        return [job for name, job in self.jobs.items() if is_calibrated(job) and name in multiplied]

    def run(self, results: ArrayLog, widener: RowDequantizer, threads: int, on_progress: OnProgress) -> None:
        """Encode the matrices that `results` lacks. Raises ModelError if an input is not finite."""
        matrices = CalibratedMatrices(self.jobs, results, widener, threads, on_progress)
        self.forward(matrices, self.chunks, threads)

    def forward(
        self,
        matrices: MatrixReader,
        chunks: Sequence[np.ndarray],
        threads: int,
        past: RecordedActivations | None = None,
    ) -> BatchedActivations | None:
        """Run the model over chunks with these matrices; return the logits of all tokens.

        None if the matrices stopped the run. past: results of an earlier run to reuse or to record.
        """
        last, shared = self._analyze(chunks)
        builder: Any = LayerwiseRunner(chunks, shared, matrices, threads, last, past)
        try:
            weights = Weights(self._file.tensors)
            last_hidden: BatchedActivations | None = self._model.forward(builder, weights, self._hyperparameters)
            return last_hidden
        except StopCalibrationError:
            return None
        finally:
            builder.close()

    def compute_logits(
        self,
        matrices: MatrixReader,
        chunks: Sequence[np.ndarray],
        threads: int,
        past: RecordedActivations | None = None,
    ) -> BatchedActivations:
        """Return the logits of all tokens, as `forward` does with matrices that never stop the run."""
        logits = self.forward(matrices, chunks, threads, past)
        assert logits is not None
        return logits

    def plan_reuse(
        self, chunks: Sequence[np.ndarray], groups: Sequence[Collection[str]]
    ) -> tuple[RecordedActivations, list[RecordedActivations]]:
        return plan_reuse(*self._analyze(chunks), groups)

    def _analyze(self, chunks: Sequence[np.ndarray]) -> tuple[LastUseRecorder, set[object]]:
        """Trace the model's verbs; return them with the states whose keys and values several layers read."""
        last, weights, context = LastUseRecorder(), Weights(self._file.tensors), max(map(len, chunks))
        traced = trace_model(self._file, last.record(self._model.forward), weights, self._hyperparameters, context)
        return last, find_shared_states(traced.operations)


def find_shared_states(operations: Sequence[Operation]) -> set[object]:
    """Return the states whose keys and values several layers read."""
    states = [operation.state for operation in operations if isinstance(operation, Attend)]
    return {state for state in states if states.count(state) > 1}


class CalibratedMatrices(OriginalWeights):
    """The model's matrices, each encoded as soon as its inputs are known."""

    def __init__(
        self,
        jobs: Mapping[str, TensorJob],
        done: ArrayLog,
        widener: RowDequantizer,
        threads: int,
        on_progress: OnProgress,
    ):
        super().__init__(jobs, widener)
        self._results, self._threads, self._on_progress = done, threads, on_progress
        self._weight_counts = dict[str, int]()  # weights of the finished matrices, by name
        self._shared: object = None  # the activation whose moments are in self._moments

    def read_rows(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        """Return embedding rows as in the new file, but unencoded if the embedding is also the output matrix."""
        rows, job = super().read_rows(weight, ids), self.jobs[weight.name]
        is_encoded = is_calibrated(job) and not job.makes_logits
        return dequantize(job.format.name, encode(job.format.name, rows)) if is_encoded else rows

    def resolve(self, weight: Weight, inputs: MatrixInputs) -> MatrixRows:
        job = self.jobs[weight.name]
        if is_calibrated(job) and weight.name not in self._weight_counts:
            if weight.name not in self._results:
                self._encode(job, inputs)
            self._weight_counts[weight.name] = prod(job.tensor.shape)
            self._on_progress(sum(self._weight_counts.values()), weight.name)
        if weight.name in OUTPUT_NAMES:
            raise StopCalibrationError
        return self.build_matrix_rows(weight, lambda first, end: self._read_current_rows(job, first, end))

    def _encode(self, job: TensorJob, inputs: MatrixInputs) -> None:
        """Encode a matrix, or each matrix of a stack, by its inputs, and store the result."""
        (rows, columns), pieces = (1, *job.tensor.shape)[-2:], []
        for n in range(count_rows(job.tensor.shape) // rows):
            if inputs.shared is None or inputs.shared is not self._shared:
                self._moments = self._measure_hessian(job.tensor.name, list(inputs.iterate(n)), columns)
                self._shared = inputs.shared
            feedback = self._moments.build_encoder(job.format.name, self.sample_rows(job.tensor, n, SAMPLE_ROWS))
            pieces += [feedback.encode(job.format.name, weights) for weights in self.iterate_rows(job.tensor, n)]
        self._results.add(job.tensor.name, np.concatenate(pieces))

    def _measure_hessian(self, name: str, pieces: list[np.ndarray], columns: int) -> Hessian:
        moments = Hessian(pieces, columns, self._threads, is_read=name == EMBEDDING)
        if not all(np.isfinite(np.diagonal(half)).all() for half in moments.halves):
            raise ModelError(f"the input of tensor {printable(name)} is not finite")
        return moments

    def _read_current_rows(self, job: TensorJob, first: int, end: int) -> np.ndarray:
        """Read rows of a tensor, encoded if they are already; float32, valid until this thread's next call."""
        tensor, width = job.tensor, job.format.row_bytes(job.tensor.shape[-1])
        if tensor.name not in self._results:
            return self.read(tensor, first, end)
        rows = self._results.read(tensor.name, first * width, end * width).reshape(end - first, width)
        return self._widener.dequantize(job.format, rows, tensor.shape[-1])


def is_calibrated(job: TensorJob) -> bool:
    """Return whether a matrix is encoded by its inputs: its format changes to a block format."""
    return not job.is_copied and job.format.block > 1


# ---- calibration texts


def load_chunks(tokenizer: Tokenizer, texts: Sequence[str], context: int) -> list[np.ndarray]:
    """Tokenize documents into chunks of at most `context` tokens. Raises UsageError.

    texts: paths; none for the built-in documents. Of more than MAX_CHUNKS chunks, evenly spaced ones are used.
    """
    size = min(CHUNK_TOKENS, context)
    chunks: list[np.ndarray] = []
    for name in texts or SAMPLE_TEXTS:
        tokens = tokenizer.encode(read_text(name), bos=True) if texts else tokenize_sample(name, tokenizer)
        try:
            chunks.extend(np.array(add_bos(chunk, tokenizer)) for chunk in split_chunks(tokens, size))
        except UsageError as error:
            if texts:
                raise UsageError(f"{name}: {error}") from None
    if not chunks:
        raise UsageError(f"at least one document must have {size} tokens or more")
    places = np.unique(np.linspace(0, len(chunks) - 1, min(len(chunks), MAX_CHUNKS)).round().astype(int))
    return [chunks[place] for place in places]


def tokenize_sample(name: str, tokenizer: Tokenizer) -> list[int]:
    text = (DATA / name).read_text(encoding="utf-8")
    if not name.endswith(".toml"):
        return tokenizer.encode(text, bos=True)
    tokens: list[int] = []
    for conversation in tomllib.loads(text)["conversations"]:
        try:
            template = ChatTemplate.from_tokenizer(tokenizer)
            rendered = tokenizer.markers.render(template, conversation["messages"], add_generation_prompt=False)
        except ModelError:  # a template may refuse a conversation or be broken; the others suffice
            continue
        tokens += tokenizer.encode_rendered(rendered)
    return tokens
