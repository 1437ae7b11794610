"""Choose the formats of a whole plan by measured sensitivity, and store them in a file."""

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from localllm.errors import UsageError
from localllm.files.gguf.header import printable
from localllm.files.gguf.tensor_source import Source
from localllm.files.safe_file import SafeFile
from localllm.files.text_file import read_text
from localllm.kernels.build.objects import Progress
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.quant.formats import BY_NAME
from localllm.quantizing.calibrate import Calibration
from localllm.quantizing.layerwise_runner import MatrixInputs
from localllm.quantizing.mixed_precision.measure import (
    MEASURED_CHUNKS,
    PROBE_TOKENS,
    ActivationCollector,
    CoarseWeights,
    EncodedMatrix,
    OnMatrix,
    compute_divergence,
    is_adjustable,
    measure_sensitivities,
)
from localllm.quantizing.mixed_precision.sensitivity import (
    Sensitivity,
    choose_within_budget,
    get_measured_role,
    list_candidates,
    parse_layer,
    predict_divergence,
    sum_bytes,
)
from localllm.quantizing.original_weights import OriginalWeights
from localllm.quantizing.plan import QuantizePlan, QuantizeRequest, TensorJob, make_plan
from localllm.quantizing.quantize import create_widener
from localllm.quantizing.splitting import parse_bytes

OWN_SIZE = "own"  # value of --size for the size of the quantization type
MAX_ROUNDS = 3  # maximum number of rounds of measuring and choosing
HELD_OUT_CHUNKS = 8  # held-out chunks
DEPTH_GROUPS = 4  # groups of layers by depth
MAX_CORRECTION = 2.0  # largest correction factor, and the inverse of the smallest one: measurements are noisy


def parse_size(text: str) -> Callable[[QuantizePlan], int]:
    """Return a function from a plan to the size in bytes that --size states: 3.5GB, 800M, a number, or "own".

    "own" is the size of the plan's type. Raises UsageError.
    """
    if text.lower() == OWN_SIZE:
        return lambda plan: plan.nbytes
    number = parse_bytes(text, "--size")
    return lambda plan: number


def parse_bits(bits: float) -> Callable[[QuantizePlan], int]:
    """Return a function from a plan to the size in bytes for --bpw, bits per weight. Raises UsageError."""
    if not 1 <= bits <= 32:
        raise UsageError(f"--bpw must be from 1 to 32 (found {bits})")
    return lambda plan: int(bits * plan.weights / 8) + plan.nbytes - sum(job.output.nbytes for job in plan.jobs)


def list_candidate_formats(plan: QuantizePlan) -> set[str]:
    """Return the formats that matrices of the plan may get."""
    return {name for job in plan.jobs if is_adjustable(job) for name in list_candidates(job.tensor.shape[-1])}


def require_possible(source: Source, request: QuantizeRequest, size: Callable[[QuantizePlan], int]) -> None:
    """Raise UsageError, before anything is measured, if even the smallest formats exceed the size."""
    plan = make_plan(source, request)
    smallest = {job.tensor.name: list_candidates(job.tensor.shape[-1])[0] for job in plan.jobs if is_adjustable(job)}
    least = make_plan(source, set_formats(request, smallest)).nbytes
    if size(plan) < least:
        raise UsageError(f"the size must be at least {least} bytes (found {size(plan)})")


class MixedPrecision(NamedTuple):
    """The chosen formats and the divergence that they cause.

    Attributes:
        formats: by tensor.  found: divergence on held-out documents, measured without rounding inputs.
        predicted: expected divergence with rounded inputs.  usual: the same for the type's own formats.
    """

    formats: dict[str, str]
    found: float
    predicted: float
    usual: float


def choose_formats(
    source: Source,
    request: QuantizeRequest,
    size: Callable[[QuantizePlan], int],
    threads: int,
    on_matrix: OnMatrix,
    on_check: OnMatrix,
    compiling: Progress | None = None,
) -> MixedPrecision:
    """Choose formats for a file of `size` bytes. Raises ModelError, UsageError."""
    plan = make_plan(source, request)
    calibration, widener = (
        Calibration(plan, request.texts or ()),
        create_widener(plan, compiling, list_candidate_formats(plan)),
    )
    needs = list(measure_sensitivities(calibration, widener, threads, on_matrix))
    if not needs:
        raise UsageError("--size and --bpw need a matrix whose format can be chosen, but all are copied or unquantized")
    usual = {job.tensor.name: job.format.name for job in plan.jobs}
    rest = calibration.add_metadata(plan).nbytes - sum_bytes(needs, usual)

    def compute_size(formats: Mapping[str, str]) -> int:
        return calibration.add_metadata(make_plan(source, set_formats(request, formats))).nbytes

    choose = partial(choose_within_size, file_size=size(plan), other_bytes=rest, size_with=compute_size)
    formats, divergence = refine_formats(calibration, needs, choose, widener, threads, on_check)
    return MixedPrecision(formats, divergence, predict_divergence(needs, formats), predict_or_nan(needs, usual))


def choose_within_size(
    needs: Sequence[Sensitivity], file_size: int, other_bytes: int, size_with: Callable[[Mapping[str, str]], int]
) -> dict[str, str]:
    """Choose formats for a file of at most `file_size` bytes. Raises UsageError.

    other_bytes: about the size of everything but the matrices. size_with: returns the exact size of a file with given
    formats, whose padding depends on them.
    """
    budget = file_size - other_bytes
    while (over := size_with(formats := choose_within_budget(needs, budget)) - file_size) > 0:
        budget -= over
    return formats


def predict_or_nan(needs: list[Sensitivity], formats: Mapping[str, str]) -> float:
    """Predict the divergence, or return NaN if a matrix has a format that was not measured."""
    measured = [need for need in needs if formats[need.name] in need.errors]
    return predict_divergence(measured, formats) if len(measured) == len(needs) else float("nan")


# ---- corrections


def refine_formats(
    calibration: Calibration,
    needs: Sequence[Sensitivity],
    choose: Callable[[Sequence[Sensitivity]], dict[str, str]],
    widener: RowDequantizer,
    threads: int,
    on_matrix: OnMatrix,
) -> tuple[dict[str, str], float]:
    """Choose formats in a few rounds; return those that diverge least, and their divergence.

    sensitivity.py predicts a divergence as the sum of the matrices' separate ones. This function encodes all matrices
    in the chosen formats, and measures the divergence on held-out texts: once with all of them encoded, and once for
    each group of matrices with that group unencoded. The difference, relative to the group's predicted divergence,
    corrects the harm of its matrices, and formats are chosen again.

    choose: returns formats for sensitivities. The divergence is that of weights: inputs are not rounded.
    """
    number = 0
    checked = PlanEvaluator(
        calibration, widener, threads, lambda done, all, name: on_matrix(number * all + done, MAX_ROUNDS * all, name)
    )
    best, least = dict[str, str](), np.inf
    for number in range(MAX_ROUNDS):
        formats = choose(needs)
        if formats == best:
            break
        measured = checked.measure_divergence(formats)
        if best and measured >= least:
            break
        best, least = formats, measured
        if number + 1 < MAX_ROUNDS:
            needs = correct_harm(needs, formats, checked.measure_contribution)
    return best, least


def correct_harm(
    needs: Sequence[Sensitivity], formats: Mapping[str, str], contribution: Callable[[Collection[str]], float]
) -> list[Sensitivity]:
    """Scale the harm of matrices by the measured contributions of their groups, by role and by depth.

    contribution: returns the divergence that the matrices of these names cause in the formats.
    """
    layers = 1 + max((parse_layer(need.name) or 0) for need in needs)

    def find_depth(name: str) -> int:
        return (parse_layer(name) or 0) * DEPTH_GROUPS // layers

    factors = dict.fromkeys((need.name for need in needs), 1.0)
    for part_of in (get_measured_role, find_depth):
        parts: dict[str | int, list[Sensitivity]] = {}
        for need in needs:
            # Matrices outside layers have a role but no depth.
            if part_of is get_measured_role or parse_layer(need.name) is not None:
                parts.setdefault(part_of(need.name), []).append(need)
        contributions = {part: max(contribution([need.name for need in some]), 0.0) for part, some in parts.items()}
        predicted = {
            part: sum(need.harm * need.errors[formats[need.name]] for need in some) for part, some in parts.items()
        }
        usual = sum(contributions.values()) / max(sum(predicted.values()), 1e-30)
        for part, some in parts.items():
            ratio = contributions[part] / max(predicted[part] * usual, 1e-30)
            for need in some:
                factors[need.name] *= min(max(ratio, 1 / MAX_CORRECTION), MAX_CORRECTION)
    return [replace(need, harm=need.harm * factors[need.name]) for need in needs]


class MatrixEncoder(ActivationCollector):
    """Encodes the matrices whose chosen formats have changed.

    Attributes:
        formats: chosen formats, by name.  blocks: encoded matrices, by name.
    """

    def __init__(self, jobs: Mapping[str, TensorJob], widener: RowDequantizer, threads: int, on_matrix: OnMatrix):
        super().__init__(jobs, widener, threads, lambda name: on_matrix(len(self.processed), len(self.formats), name))
        self.formats, self.blocks = dict[str, str](), dict[str, EncodedMatrix]()

    def process(self, job: TensorJob, inputs: MatrixInputs) -> None:
        name = job.tensor.name
        self.blocks[name] = self.encode_matrix(job, inputs, self.formats[name])


class PlanEvaluator:
    """Measures the divergence of encoded models on held-out documents."""

    def __init__(self, calibration: Calibration, widener: RowDequantizer, threads: int, on_matrix: OnMatrix):
        self._calibration, self._widener, self._threads = calibration, widener, threads
        self._encoded = MatrixEncoder(calibration.jobs, widener, threads, on_matrix)
        self._texts = select_held_out(calibration)
        self._base = calibration.compute_logits(OriginalWeights(calibration.jobs, widener), self._texts, threads)

    def measure_divergence(self, formats: Mapping[str, str]) -> float:
        """Return the divergence with all matrices in these formats."""
        encoded, blocks = self._encoded, self._encoded.blocks
        encoded.formats = dict(formats)
        encoded.processed = {name for name in blocks if blocks[name].format == formats[name]}
        self._calibration.forward(encoded, self._calibration.select_chunks(MEASURED_CHUNKS), self._threads)
        self._found = self._measure(blocks)
        return self._found

    def measure_contribution(self, names: Collection[str]) -> float:
        """Return by how much the last divergence decreases with these matrices unencoded."""
        return self._found - self._measure(
            {name: blocks for name, blocks in self._encoded.blocks.items() if name not in names}
        )

    def _measure(self, blocks: Mapping[str, EncodedMatrix]) -> float:
        matrices = CoarseWeights(self._calibration.jobs, self._widener, blocks)
        return compute_divergence(
            self._base, self._calibration.compute_logits(matrices, self._texts, self._threads), self._threads
        )


def select_held_out(calibration: Calibration) -> list[np.ndarray]:
    """Return the beginnings of chunks that did not serve to choose formats, or of all if none are left."""
    read = {chunk.ctypes.data for chunk in calibration.select_chunks(MEASURED_CHUNKS)}  # views of them
    unread = [chunk for chunk in calibration.chunks if chunk.ctypes.data not in read] or calibration.chunks
    return [chunk[:PROBE_TOKENS] for chunk in unread[:: -(-len(unread) // HELD_OUT_CHUNKS)]]


# ---- files of formats


def write_formats(path: str, formats: Mapping[str, str]) -> None:
    """Write the format of each tensor on a line of its own, atomically. Raises LocalllmError."""
    lines = ["# Formats of tensors, for localllm quantize --plan. They may be changed.\n"]
    lines += [f'"{name}" = "{format}"\n' for name, format in formats.items()]
    with SafeFile(path) as file:
        file.write("".join(lines).encode())


def read_formats(path: str, source: Source) -> dict[str, str]:
    """Read a file that `write_formats` has written. Raises UsageError if it does not fit the source."""
    name, text = printable(path, 4096), read_text(path)
    try:
        formats = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name}: {error}") from None
    tensors = {tensor.name: tensor for tensor in source.tensors}
    for tensor, format in formats.items():
        if tensor not in tensors:
            raise UsageError(f"{name}: the model has no tensor {printable(tensor)}")
        if not isinstance(format, str) or format.upper() not in BY_NAME:
            raise UsageError(f"{name}: {printable(str(format))}, for {printable(tensor)}, is not a tensor format")
    return {tensor: format.upper() for tensor, format in formats.items()}


def set_formats(request: QuantizeRequest, formats: Mapping[str, str]) -> QuantizeRequest:
    return replace(request, options=request.options._replace(formats=formats))
