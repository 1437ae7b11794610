"""Measure the error of each matrix in each format, and the harm of an error, for sensitivity.py."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from localllm.arch.weights import Weight
from localllm.files.gguf.tensor_source import SourceTensor, count_rows
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.quant.activation_rounding import round_activations
from localllm.quant.block_codes import dequantize
from localllm.quant.formats import BY_NAME
from localllm.quant.gptq import GptqEncoder, compute_cost
from localllm.quant.hessian import add_weight_errors, compute_moments, limit_outliers
from localllm.quantizing.calibrate import EMBEDDING, OUTPUT_NAMES, Calibration
from localllm.quantizing.layerwise_runner import BatchedActivations, MatrixInputs, MatrixRows, StopCalibrationError
from localllm.quantizing.mixed_precision.sensitivity import Sensitivity, get_group, list_candidates
from localllm.quantizing.original_weights import OriginalWeights
from localllm.quantizing.plan import TensorJob
from localllm.services.evaluation.scores import compute_kl_divergence as of_token
from localllm.services.evaluation.scores import log_sum_exp

SAMPLE_ROWS = 96  # rows of a matrix whose errors are measured
SAMPLE_EXPERTS = 3  # matrices of a stack that are measured
COARSE_FORMATS = ("Q3_K", "Q4_0")  # formats for measuring harm; the first one that fits the rows is used
DAMPING = 0.3  # of the Hessian, see localllm.quant.gptq.shrink
SAMPLE_INPUTS = 512  # input rows for measuring the rounding error
MEASURED_CHUNKS, PROBE_TOKENS = 12, 128  # chunks whose inputs are collected; tokens of each chunk for measuring harm
PROBE_COUNT = 4

T = TypeVar("T")
Result = TypeVar("Result")
OnMatrix = Callable[[int, int, str], None]  # (done, total, name)


class EncodedMatrix(NamedTuple):
    """An encoded matrix, or a stack of them.

    Attributes:
        format: name of the format.  rows: uint8 [rows, bytes].
    """

    format: str
    rows: np.ndarray


class ActivationCollector(OriginalWeights):
    """Processes each matrix with its inputs, in a run of the unchanged model.

    Attributes:
        processed: names of the finished matrices.
    """

    def __init__(
        self, jobs: Mapping[str, TensorJob], widener: RowDequantizer, threads: int, on_matrix: Callable[[str], None]
    ):
        super().__init__(jobs, widener)
        self._threads, self._on_matrix, self.processed = threads, on_matrix, set[str]()
        self._shared: object = None

    def resolve(self, weight: Weight, inputs: MatrixInputs) -> MatrixRows:
        job = self.jobs[weight.name]
        if weight.name not in self.processed and is_adjustable(job):
            self.processed.add(weight.name)
            self.process(job, inputs)
            self._on_matrix(weight.name)
        if weight.name in OUTPUT_NAMES:
            raise StopCalibrationError
        return super().resolve(weight, inputs)

    def process(self, job: TensorJob, inputs: MatrixInputs) -> None:
        """Process a matrix or stack with its inputs; subclasses say how."""
        raise NotImplementedError

    def build_feedback(self, inputs: MatrixInputs, n: int, name: str) -> GptqEncoder:
        """Build GPTQ's encoder for matrix n from its inputs in every second chunk."""
        if inputs.shared is None or inputs.shared is not self._shared:
            self._feedback = GptqEncoder(
                self._compute_moments(list(inputs.iterate(n))[::2], name), DAMPING, self._threads
            )
            self._shared = inputs.shared
        return self._feedback

    def _compute_moments(self, pieces: list[np.ndarray], name: str) -> np.ndarray:
        moments = compute_moments(pieces, pieces[0].shape[1], self._threads)
        if name == EMBEDDING:
            add_weight_errors(moments)
        return moments

    def map_threads(self, of: Callable[[T], Result], several: Iterable[T]) -> list[Result]:
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(of, several))

    def encode_matrix(self, job: TensorJob, inputs: MatrixInputs, format: str) -> EncodedMatrix:
        shape, pieces = job.tensor.shape, []
        for n in range(count_rows(shape) // (1, *shape)[-2]):
            feedback = self.build_feedback(inputs, n, job.tensor.name)
            pieces += [feedback.encode(format, some) for some in self.iterate_rows(job.tensor, n)]
        return EncodedMatrix(format, np.concatenate(pieces))


class SensitivityCollector(ActivationCollector):
    """Measures the error of each matrix in each format, and encodes it in a coarse format.

    Attributes:
        needs: sensitivity of each matrix; the harm of its formats is added later.
        coarse: each matrix in the first format of COARSE_FORMATS that fits.
    """

    def __init__(
        self, jobs: Mapping[str, TensorJob], widener: RowDequantizer, threads: int, on_matrix: Callable[[str], None]
    ):
        super().__init__(jobs, widener, threads, on_matrix)
        self.needs, self.coarse = dict[str, Sensitivity](), dict[str, EncodedMatrix]()
        self._shared_others: object = None

    def process(self, job: TensorJob, inputs: MatrixInputs) -> None:
        tensor, (rows, columns) = job.tensor, (1, *job.tensor.shape)[-2:]
        count, names = count_rows(tensor.shape) // rows, list_candidates(columns)
        some = np.unique(np.linspace(0, count - 1, min(count, SAMPLE_EXPERTS)).astype(int))
        sums, blocks = np.sum([self.measure_costs(tensor, n, inputs) for n in some], axis=0), list_scale_sizes(names)
        _, *costs = (sums / (sums[0] or 1.0)).tolist()
        self.needs[tensor.name] = Sensitivity(
            tensor.name,
            prod(tensor.shape),
            dict(zip(names, costs[: len(names)], strict=True)),
            dict(zip(blocks, costs[len(names) :], strict=True)),
        )
        self.coarse[tensor.name] = self.encode_matrix(
            job, inputs, next(name for name in COARSE_FORMATS if name in names)
        )

    def measure_costs(self, tensor: SourceTensor, n: int, inputs: MatrixInputs) -> list[float]:
        """Return output errors of matrix n: with zeros (its norm), in each format, and with rounded inputs."""
        feedback, (moments, met) = (
            self.build_feedback(inputs, n, tensor.name),
            self._measure_held_out(inputs, n, tensor.name),
        )
        weights, names = self.sample_rows(tensor, n, SAMPLE_ROWS), list_candidates(tensor.shape[-1])

        def of(format: str) -> float:
            return compute_cost(weights - dequantize(format, feedback.encode(format, weights)), moments)

        rounding = self.map_threads(lambda block: compute_rounding_cost(weights, met, block), list_scale_sizes(names))
        return [compute_cost(weights, moments), *self.map_threads(of, names), *rounding]

    def _measure_held_out(self, inputs: MatrixInputs, n: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return second moments of matrix n's inputs in the chunks that `build_feedback` skips, and some inputs."""
        if inputs.shared is None or inputs.shared is not self._shared_others:
            pieces = list(inputs.iterate(n))[1::2]
            met = np.concatenate(list(limit_outliers(pieces)))
            self._last_others = self._compute_moments(pieces, name), met[:: max(1, len(met) // SAMPLE_INPUTS)]
            self._shared_others = inputs.shared
        return self._last_others


class CoarseWeights(OriginalWeights):
    """The model's matrices, some of them replaced by coarsely encoded ones."""

    def __init__(self, jobs: Mapping[str, TensorJob], widener: RowDequantizer, coarse: Mapping[str, EncodedMatrix]):
        """Replace the matrices in `coarse`, whose formats the widener must support, too."""
        super().__init__(jobs, widener)
        self._coarse = coarse

    def read_rows(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        if weight.name not in self._coarse:
            return super().read_rows(weight, ids)
        format, blocks = self._coarse[weight.name]
        return self._widener.dequantize(BY_NAME[format], blocks[ids + weight.first_row], weight.shape[-1]).copy()

    def resolve(self, weight: Weight, inputs: MatrixInputs) -> MatrixRows:
        if weight.name not in self._coarse:
            return super().resolve(weight, inputs)
        format, blocks = self._coarse[weight.name]
        columns = weight.shape[-1]
        return self.build_matrix_rows(
            weight, lambda first, end: self._widener.dequantize(BY_NAME[format], blocks[first:end], columns)
        )


def list_scale_sizes(formats: Sequence[str]) -> list[int]:
    """Return how many weights share a scale in each of these formats, without duplicates, sorted."""
    return sorted({BY_NAME[name].block for name in formats})


def is_adjustable(job: TensorJob) -> bool:
    """Return whether a matrix may get another format than the recipe's."""
    return not job.is_copied and job.format.block > 1


def measure_sensitivities(
    calibration: Calibration, widener: RowDequantizer, threads: int, on_matrix: OnMatrix
) -> Iterator[Sensitivity]:
    """Yield the sensitivity of each matrix that may get another format."""
    jobs = calibration.jobs
    adjustable = sum(map(is_adjustable, jobs.values()))
    surveyed = SensitivityCollector(
        jobs, widener, threads, lambda name: on_matrix(len(surveyed.needs), 2 * adjustable, name)
    )
    chunks = calibration.select_chunks(MEASURED_CHUNKS)
    calibration.forward(surveyed, chunks, threads)
    probes = [chunk[:PROBE_TOKENS] for chunk in chunks[:: max(1, len(chunks) // PROBE_COUNT)]]
    groups: dict[str, list[Sensitivity]] = {}
    for need in surveyed.needs.values():
        groups.setdefault(get_group(need.name), []).append(need)
    filled, pasts = calibration.plan_reuse(probes, [[need.name for need in group] for group in groups.values()])
    base = calibration.compute_logits(OriginalWeights(jobs, widener), probes, threads, filled)
    for number, ((name, group), past) in enumerate(zip(groups.items(), pasts, strict=True)):
        coarse = {need.name: surveyed.coarse[need.name] for need in group}
        logits = calibration.compute_logits(CoarseWeights(jobs, widener, coarse), probes, threads, past)
        error = sum(need.errors[coarse[need.name].format] for need in group)
        harm = compute_divergence(base, logits, threads) / max(error, 1e-30)
        for need in group:
            need.harm = harm
            yield need
        on_matrix(adjustable + adjustable * (number + 1) // len(groups), 2 * adjustable, name)


def compute_rounding_cost(weights: np.ndarray, met: np.ndarray, block: int) -> float:
    """Return the output error of rounding inputs to 8 bits, in the unit of localllm.quant.gptq.compute_cost.

    met: inputs, [tokens, columns]. block: number of inputs that share a scale.
    """
    differences = (round_activations(met, block) - met) @ weights.T
    return float((differences**2).sum(dtype=np.float64)) / max(len(met), 1)


def compute_divergence(base: BatchedActivations, changed: BatchedActivations, threads: int = 1) -> float:
    """Return the mean Kullback-Leibler divergence per token.

    base, changed: logits, float32 [tokens, vocab] for each document.
    """

    def sum_texts(rows: np.ndarray, another: np.ndarray) -> float:
        total, (scratch, probabilities) = 0.0, np.empty((2, rows.shape[1]), np.float32)
        for p, q in zip(rows, another, strict=True):
            np.subtract(p, np.float32(log_sum_exp(p, scratch)), out=probabilities)
            total += of_token(probabilities, q, log_sum_exp(q, scratch), scratch)
        return total

    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(sum_texts, base, changed)) / sum(map(len, base)), 0.0)
