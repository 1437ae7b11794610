"""Choose the scales that are folded into a model before its matrices are encoded.

engine.trace.scale_folding finds where that is possible. The inputs of matrices are divided by a scale for each column,
and the matrices' columns are multiplied by it. The model's outputs stay the same, but encoding does less harm: columns
with large inputs get larger weights than the others of their block, with a smaller relative error (AWQ, Lin et al.
2023, arXiv 2306.00978), and the inputs have no outlier columns (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438). The
latter matters because llama.cpp rounds inputs to 8 bits, with one scale for 256 values where weights are in
super-blocks: for SmolLM2's queries, keys and values this rounding has half the error of encoding the weights in Q4_K.

The scales are powers of the columns' mean squares in inputs and in weights. Both errors are measured on other documents
than the mean squares.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.trace.scale_folding import ScaleFold
from localllm.errors import ModelError
from localllm.files.cache.array_log import ArrayLog
from localllm.files.gguf.header import printable
from localllm.files.gguf.tensor_source import Source, count_rows
from localllm.kernels.build.objects import Progress
from localllm.kernels.dequantize_rows import RowDequantizer, can_dequantize
from localllm.quant.activation_rounding import round_activations
from localllm.quant.block_codes import dequantize
from localllm.quant.encode import encode
from localllm.quant.formats import BY_NAME
from localllm.quant.hessian import limit_outliers
from localllm.quantizing.calibrate import OUTPUT_NAMES, Calibration, is_calibrated
from localllm.quantizing.layerwise_runner import MatrixInputs, MatrixRows, StopCalibrationError
from localllm.quantizing.original_weights import OriginalWeights
from localllm.quantizing.plan import QuantizeRequest, TensorJob, make_plan
from localllm.quantizing.sources import FoldedSource

MEASURED_CHUNKS, CHUNK_TOKENS = 12, 256  # chunks, and tokens of each
SAMPLE_ROWS = 64  # rows of a matrix for measuring errors
SAMPLE_EXPERTS = 3  # matrices of a stack for measuring errors
SAMPLE_INPUTS = 512  # input rows for measuring errors
INPUT_POWERS, WEIGHT_POWERS = (0.25, 0.5, 0.75), (0.0, 0.25, 0.5)  # exponents of inputs' and of weights' mean squares
MAX_SCALE = 64.0  # scales are from 1 / WIDEST to WIDEST
MAX_ERROR_RATIO = 0.99  # scales are used if the error is below this fraction of the unscaled one

LOG_KEY = "scales folded away"  # the scales' key in the log; no tensor has this name

OnMatrix = Callable[[int, int, str], None]  # (done, total, name)


class FoldSample(NamedTuple):
    """A sample of a matrix that reads scaled columns, and of its inputs.

    Attributes:
        format: its new format.  weights: sampled rows, float32 [rows, columns].
        squares: mean squares of its inputs, float32 [columns].
        inputs: a sample from other documents, float32 [tokens, columns].
    """

    format: str
    weights: np.ndarray
    squares: np.ndarray
    inputs: np.ndarray

    def compute_error(self, scales: np.ndarray) -> float:
        """Return the relative squared output error with scales on the columns, float32 [columns]."""
        expected = self.inputs @ self.weights.T
        blocks = encode(self.format, self.weights * scales, self.squares / scales**2)
        actual = round_activations(self.inputs / scales, BY_NAME[self.format].block) @ dequantize(self.format, blocks).T
        return float(((actual - expected) ** 2).sum(dtype=np.float64) / (expected**2).sum(dtype=np.float64))


def search_scales(fold: ScaleFold, readers: Sequence[FoldSample], threads: int = 1) -> np.ndarray | None:
    """Return the scales with the smallest error, float32 [width]; None if no scales help."""
    met = fold.average(np.mean([reader.squares / reader.squares.mean() for reader in readers], axis=0))
    squares = [(reader.weights**2).mean(axis=0) for reader in readers]
    weighed = fold.average(np.mean([each / each.mean() for each in squares], axis=0))
    ones = np.ones(fold.width, np.float32)
    candidates = [compute_scales(met, weighed, *powers) for powers in product(INPUT_POWERS, WEIGHT_POWERS)]
    with ThreadPoolExecutor(threads) as pool:
        alone, *errors = pool.map(
            lambda scales: sum(reader.compute_error(fold.expand(scales)) for reader in readers), [ones, *candidates]
        )
    best = int(np.argmin(errors))
    return candidates[best] if errors[best] < MAX_ERROR_RATIO * alone else None


def compute_scales(met: np.ndarray, weighed: np.ndarray, up: float, down: float) -> np.ndarray:
    """Compute scales of columns, float32 with the geometric mean 1.

    met, weighed: mean squares of inputs and of weights. up, down: their exponents.
    """
    is_used = (met > 0) & (weighed > 0)
    logarithms = np.zeros(len(met))
    logarithms[is_used] = up / 2 * np.log(met[is_used]) - down / 2 * np.log(weighed[is_used])
    logarithms[is_used] -= logarithms[is_used].mean()
    limit = np.log(MAX_SCALE)
    return np.exp(np.clip(logarithms, -limit, limit)).astype(np.float32)


class FoldMeasurer(OriginalWeights):
    """Measures each fold once the inputs of all its matrices are known.

    Attributes:
        scales: by fold that reduces the error, float32 [width].
    """

    def __init__(
        self,
        jobs: Mapping[str, TensorJob],
        widener: RowDequantizer,
        folds: Sequence[ScaleFold],
        threads: int,
        on_fold: Callable[[int, str], None],
    ):
        super().__init__(jobs, widener)
        self._threads, self.scales = threads, dict[ScaleFold, np.ndarray]()
        self._folds = {name: fold for fold in folds for name in fold.multiplied}
        self._readers, self._met = dict[ScaleFold, list[FoldSample]](), set[str]()
        self._on_fold = on_fold

    def resolve(self, weight: Weight, inputs: MatrixInputs) -> MatrixRows:
        name, fold = weight.name, self._folds.get(weight.name)
        if fold and name not in self._met:
            self._met.add(name)
            self._readers.setdefault(fold, []).extend(self._read(self.jobs[name], inputs))
            if self._met.issuperset(fold.multiplied):
                self._measure(fold, name)
        if name in OUTPUT_NAMES:
            raise StopCalibrationError
        return super().resolve(weight, inputs)

    def _measure(self, fold: ScaleFold, name: str) -> None:
        readers = self._readers.pop(fold)
        scales = search_scales(fold, readers, self._threads) if readers else None
        if scales is not None:
            self.scales[fold] = scales
        self._on_fold(len(self._met), name)

    def _read(self, job: TensorJob, inputs: MatrixInputs) -> list[FoldSample]:
        """Sample a matrix, or some matrices of a stack.

        Every second document contributes to the mean squares; the others provide the inputs.
        """
        if not is_calibrated(job):
            return []
        shape = job.tensor.shape
        count = count_rows(shape) // (1, *shape)[-2]
        readers = []
        for n in np.unique(np.linspace(0, count - 1, min(count, SAMPLE_EXPERTS)).astype(int)):
            pieces = list(limit_outliers(list(inputs.iterate(n))))
            search_rows, check_rows = (np.concatenate(pieces[half::2]) for half in (0, 1))
            if len(search_rows) and len(check_rows):
                some, squares = (
                    check_rows[:: -(-len(check_rows) // SAMPLE_INPUTS)],
                    compute_input_squares(search_rows, job.tensor.name),
                )
                reader = FoldSample(job.format.name, self.sample_rows(job.tensor, n, SAMPLE_ROWS), squares, some)
                readers += [reader] if (some @ reader.weights.T).any() else []
        return readers


def compute_input_squares(x: np.ndarray, name: str) -> np.ndarray:
    """Return the mean squares of a tensor's inputs, float32 [columns]. Raises ModelError if they are not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        means: np.ndarray = (x**2).mean(axis=0)
    if not np.isfinite(means).all():
        raise ModelError(f"the input of tensor {printable(name)} is not finite")
    return means


def fold_scales(
    source: Source,
    request: QuantizeRequest,
    threads: int,
    on_matrix: OnMatrix,
    compiling: Progress | None = None,
    log: ArrayLog | None = None,
) -> FoldedSource:
    """Fold the scales that help with the formats of the request's type.

    Formats may still change later. log: has the scales of an earlier run, or stores these. Raises ModelError.
    """
    if isinstance(source, FoldedSource):
        return source
    plan = make_plan(source, replace(request, options=request.options._replace(formats={})))
    calibration = Calibration(plan, request.texts or ())
    widener = RowDequantizer({job.tensor.format for job in plan.jobs if can_dequantize(job.tensor.format)}, compiling)
    folds = find_foldable(calibration)
    if log is not None and LOG_KEY in log:
        scales = log.read(LOG_KEY, 0, 4 * sum(fold.width for fold in folds)).view(np.float32)
    else:
        scales = measure_scales(calibration, folds, widener, threads, on_matrix)
        if log is not None:
            log.add(LOG_KEY, scales)
    ends = np.cumsum([fold.width for fold in folds])
    parts = [scales[end - fold.width : end] for fold, end in zip(folds, ends, strict=True)]
    return FoldedSource(
        source, [(fold, part) for fold, part in zip(folds, parts, strict=True) if (part != 1).any()], widener
    )


def find_foldable(calibration: Calibration) -> list[ScaleFold]:
    """Return the folds whose tensors can be scaled and that have a matrix to encode."""
    jobs = calibration.jobs
    return [
        fold
        for fold in calibration.find_folds()
        if all(
            can_dequantize(jobs[name].tensor.format) for name in (*fold.multiplied, *(name for name, _ in fold.divided))
        )
        and any(is_calibrated(jobs[name]) for name in fold.multiplied)
    ]


def measure_scales(
    calibration: Calibration, folds: Sequence[ScaleFold], widener: RowDequantizer, threads: int, on_matrix: OnMatrix
) -> np.ndarray:
    """Return the scales of all folds in one array, float32; ones where folding does not help. Raises ModelError."""
    total = sum(len(fold.multiplied) for fold in folds)
    watched = FoldMeasurer(calibration.jobs, widener, folds, threads, lambda done, name: on_matrix(done, total, name))
    if folds:
        calibration.forward(watched, calibration.select_chunks(MEASURED_CHUNKS, CHUNK_TOKENS), threads)
    scales = [watched.scales.get(fold, np.ones(fold.width, np.float32)) for fold in folds]
    return np.concatenate([np.zeros(0, np.float32), *scales])
