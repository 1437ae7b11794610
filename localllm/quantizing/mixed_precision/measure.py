"""Measure each matrix's error in each format, and the harm of an error, for sensitivity.py."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from localllm.arch.weights import Weight
from localllm.files.gguf.tensor_source import SourceTensor, row_count
from localllm.kernels.dequantize_rows import Widener
from localllm.quant.activation_rounding import round_activations
from localllm.quant.block_codes import dequantize
from localllm.quant.formats import BY_NAME
from localllm.quant.gptq import Feedback, cost
from localllm.quant.hessian import add_own_errors, limit_outliers, mean_moments
from localllm.quantizing.calibrate import EMBEDDING, LOGITS, Calibration
from localllm.quantizing.layerwise_runner import BatchedActivations, Inputs, MatrixRows, StopCalibrationError
from localllm.quantizing.mixed_precision.sensitivity import Sensitivity, candidates, group_of
from localllm.quantizing.original_weights import OriginalWeights
from localllm.quantizing.plan import TensorJob
from localllm.services.evaluation.scores import divergence as of_token
from localllm.services.evaluation.scores import log_sum_exp

SAMPLE = 96  # rows of a matrix whose errors are measured
EXPERTS = 3  # matrices of a stack that are measured
COARSE = ("Q3_K", "Q4_0")  # formats for measuring harm; the first one that fits the rows is used
DAMPING = 0.3  # of the Hessian, see localllm.quant.gptq.shrink
INPUTS = 512  # input rows for measuring the rounding error
READ, TOKENS = 12, 128  # chunks whose inputs are collected; tokens of each chunk for measuring harm
PROBES = 4

T = TypeVar("T")
Result = TypeVar("Result")
OnMatrix = Callable[[int, int, str], None]  # (done, total, name)


class MatrixBlocks(NamedTuple):
    """An encoded matrix, or a stack of them.

    Attributes:
        format: its name.  rows: uint8 [rows, bytes].
    """

    format: str
    rows: np.ndarray


class ActivationCollector(OriginalWeights):
    """Collects the inputs of matrices in the unchanged model.

    Attributes:
        processed: names of the finished matrices.
    """

    def __init__(self, jobs: Mapping[str, TensorJob], widener: Widener, threads: int, on_matrix: Callable[[str], None]):
        super().__init__(jobs, widener)
        self._threads, self._on_matrix, self.processed = threads, on_matrix, set[str]()
        self._shared: object = None

    def resolve(self, weight: Weight, inputs: Inputs) -> MatrixRows:
        job = self.jobs[weight.name]
        if weight.name not in self.processed and is_adjustable(job):
            self.processed.add(weight.name)
            self.process(job, inputs)
            self._on_matrix(weight.name)
        if weight.name in LOGITS:
            raise StopCalibrationError
        return super().resolve(weight, inputs)

    def process(self, job: TensorJob, inputs: Inputs) -> None:
        """Process a tensor's matrix or stack with its inputs."""
        raise NotImplementedError

    def feedback_for(self, inputs: Inputs, n: int, name: str) -> Feedback:
        """Build the error feedback of matrix n from its inputs in every second chunk."""
        if inputs.shared is None or inputs.shared is not self._shared:
            self._feedback = Feedback(self._moments(list(inputs.of(n))[::2], name), DAMPING, self._threads)
            self._shared = inputs.shared
        return self._feedback

    def _moments(self, pieces: list[np.ndarray], name: str) -> np.ndarray:
        moments = mean_moments(pieces, pieces[0].shape[1], self._threads)
        if name == EMBEDDING:
            add_own_errors(moments)
        return moments

    def map_threads(self, of: Callable[[T], Result], several: Iterable[T]) -> list[Result]:
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(of, several))

    def encode_matrix(self, job: TensorJob, inputs: Inputs, format: str) -> MatrixBlocks:
        shape, pieces = job.tensor.shape, []
        for n in range(row_count(shape) // (1, *shape)[-2]):
            feedback = self.feedback_for(inputs, n, job.tensor.name)
            pieces += [feedback.encode(format, some) for some in self.iterate_rows(job.tensor, n)]
        return MatrixBlocks(format, np.concatenate(pieces))


class SensitivityCollector(ActivationCollector):
    """Measures the errors of each matrix in each format, and encodes it coarsely.

    Attributes:
        needs: each matrix's sensitivity, still without harm.
        coarse: each matrix in the first format of COARSE that fits.
    """

    def __init__(self, jobs: Mapping[str, TensorJob], widener: Widener, threads: int, on_matrix: Callable[[str], None]):
        super().__init__(jobs, widener, threads, on_matrix)
        self.needs, self.coarse = dict[str, Sensitivity](), dict[str, MatrixBlocks]()
        self._shared_others: object = None

    def process(self, job: TensorJob, inputs: Inputs) -> None:
        tensor, (rows, columns) = job.tensor, (1, *job.tensor.shape)[-2:]
        count, names = row_count(tensor.shape) // rows, candidates(columns)
        some = np.unique(np.linspace(0, count - 1, min(count, EXPERTS)).astype(int))
        sums, blocks = np.sum([self.costs(tensor, n, inputs) for n in some], axis=0), blocks_of(names)
        _, *costs = (sums / (sums[0] or 1.0)).tolist()
        self.needs[tensor.name] = Sensitivity(
            tensor.name,
            prod(tensor.shape),
            dict(zip(names, costs[: len(names)], strict=True)),
            dict(zip(blocks, costs[len(names) :], strict=True)),
        )
        self.coarse[tensor.name] = self.encode_matrix(job, inputs, next(name for name in COARSE if name in names))

    def costs(self, tensor: SourceTensor, n: int, inputs: Inputs) -> list[float]:
        """Compute the output error of matrix n with zeros (its norm), in each format, and with rounded inputs."""
        feedback, (moments, met) = self.feedback_for(inputs, n, tensor.name), self._held_out(inputs, n, tensor.name)
        weights, names = self.sample_rows(tensor, n, SAMPLE), candidates(tensor.shape[-1])

        def of(format: str) -> float:
            return cost(weights - dequantize(format, feedback.encode(format, weights)), moments)

        rounding = self.map_threads(lambda block: rounding_cost(weights, met, block), blocks_of(names))
        return [cost(weights, moments), *self.map_threads(of, names), *rounding]

    def _held_out(self, inputs: Inputs, n: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return second moments of matrix n's inputs in the other chunks than `feedback_for`, and a sample."""
        if inputs.shared is None or inputs.shared is not self._shared_others:
            pieces = list(inputs.of(n))[1::2]
            met = np.concatenate(list(limit_outliers(pieces)))
            self._last_others = self._moments(pieces, name), met[:: max(1, len(met) // INPUTS)]
            self._shared_others = inputs.shared
        return self._last_others


class CoarseWeights(OriginalWeights):
    """The model's matrices, some of them in coarse formats."""

    def __init__(self, jobs: Mapping[str, TensorJob], widener: Widener, coarse: Mapping[str, MatrixBlocks]):
        """Replace the matrices in `coarse`; the widener must support their formats, too."""
        super().__init__(jobs, widener)
        self._coarse = coarse

    def rows(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        if weight.name not in self._coarse:
            return super().rows(weight, ids)
        format, blocks = self._coarse[weight.name]
        return self._widener.widen(BY_NAME[format], blocks[ids + weight.first_row], weight.shape[-1]).copy()

    def resolve(self, weight: Weight, inputs: Inputs) -> MatrixRows:
        if weight.name not in self._coarse:
            return super().resolve(weight, inputs)
        format, blocks = self._coarse[weight.name]
        columns = weight.shape[-1]
        return self.matrix_rows(
            weight, lambda first, end: self._widener.widen(BY_NAME[format], blocks[first:end], columns)
        )


def blocks_of(formats: Sequence[str]) -> list[int]:
    """List the numbers of weights that share a scale in these formats."""
    return sorted({BY_NAME[name].block for name in formats})


def is_adjustable(job: TensorJob) -> bool:
    """Return whether a matrix may get another format than the recipe's."""
    return not job.is_copied and job.format.block > 1


def survey(calibration: Calibration, widener: Widener, threads: int, on_matrix: OnMatrix) -> Iterator[Sensitivity]:
    """Measure the matrices that may get another format."""
    jobs = calibration.jobs
    adjustable = sum(map(is_adjustable, jobs.values()))
    surveyed = SensitivityCollector(
        jobs, widener, threads, lambda name: on_matrix(len(surveyed.needs), 2 * adjustable, name)
    )
    chunks = calibration.select_chunks(READ)
    calibration.forward(surveyed, chunks, threads)
    probes = [chunk[:TOKENS] for chunk in chunks[:: max(1, len(chunks) // PROBES)]]
    groups: dict[str, list[Sensitivity]] = {}
    for need in surveyed.needs.values():
        groups.setdefault(group_of(need.name), []).append(need)
    filled, pasts = calibration.plan_reuse(probes, [[need.name for need in group] for group in groups.values()])
    base = calibration.logits(OriginalWeights(jobs, widener), probes, threads, filled)
    for number, ((name, group), past) in enumerate(zip(groups.items(), pasts, strict=True)):
        coarse = {need.name: surveyed.coarse[need.name] for need in group}
        logits = calibration.logits(CoarseWeights(jobs, widener, coarse), probes, threads, past)
        error = sum(need.errors[coarse[need.name].format] for need in group)
        harm = divergence(base, logits, threads) / max(error, 1e-30)
        for need in group:
            need.harm = harm
            yield need
        on_matrix(adjustable + adjustable * (number + 1) // len(groups), 2 * adjustable, name)


def rounding_cost(weights: np.ndarray, met: np.ndarray, block: int) -> float:
    """Compute the output error of rounding inputs, [tokens, columns], to 8 bits.

    The error is that of localllm.quant.gptq.cost. block: number of inputs that share a scale.
    """
    differences = (round_activations(met, block) - met) @ weights.T
    return float((differences**2).sum(dtype=np.float64)) / max(len(met), 1)


def divergence(base: BatchedActivations, changed: BatchedActivations, threads: int = 1) -> float:
    """Compute the mean Kullback-Leibler divergence per token.

    logits: float32 [tokens, vocab] per document.
    """

    def of(rows: np.ndarray, another: np.ndarray) -> float:
        total, (scratch, probabilities) = 0.0, np.empty((2, rows.shape[1]), np.float32)
        for p, q in zip(rows, another, strict=True):
            np.subtract(p, np.float32(log_sum_exp(p, scratch)), out=probabilities)
            total += of_token(probabilities, q, log_sum_exp(q, scratch), scratch)
        return total

    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(of, base, changed)) / sum(map(len, base)), 0.0)
