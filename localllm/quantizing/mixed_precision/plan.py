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
from localllm.kernels.dequantize_rows import Widener
from localllm.quant.formats import BY_NAME
from localllm.quantizing.calibrate import Calibration
from localllm.quantizing.layerwise_runner import Inputs
from localllm.quantizing.mixed_precision.measure import (
    READ,
    TOKENS,
    ActivationCollector,
    CoarseWeights,
    MatrixBlocks,
    OnMatrix,
    divergence,
    is_adjustable,
    survey,
)
from localllm.quantizing.mixed_precision.sensitivity import (
    Sensitivity,
    candidates,
    cheapest_within,
    layer_of,
    predict,
    role_group,
    total,
)
from localllm.quantizing.original_weights import OriginalWeights
from localllm.quantizing.plan import QuantizePlan, QuantizeRequest, TensorJob, make_plan
from localllm.quantizing.quantize import widener_of
from localllm.quantizing.splitting import parse_bytes

OWN = "own"  # value of --size for the size of the quantization type
ROUNDS = 3  # maximum number of rounds of measuring and choosing
TEXTS = 8  # held-out chunks
DEPTHS = 4  # groups of layers by depth
MOST = 2.0  # largest correction factor, and the inverse of the smallest one: measurements are noisy


def parse_size(text: str) -> Callable[[QuantizePlan], int]:
    """Parse --size into bytes for a plan: 3.5GB, 800M, a number, or "own", the type's size.

    Raises UsageError.
    """
    if text.lower() == OWN:
        return lambda plan: plan.nbytes
    number = parse_bytes(text, "--size")
    return lambda plan: number


def parse_bits(bits: float) -> Callable[[QuantizePlan], int]:
    """Parse --bpw, bits per weight, into bytes for a plan. Raises UsageError."""
    if not 1 <= bits <= 32:
        raise UsageError(f"--bpw must be from 1 to 32, not {bits}")
    return lambda plan: int(bits * plan.weights / 8) + plan.nbytes - sum(job.output.nbytes for job in plan.jobs)


def candidate_formats(plan: QuantizePlan) -> set[str]:
    """List the formats that the plan's matrices may get."""
    return {name for job in plan.jobs if is_adjustable(job) for name in candidates(job.tensor.shape[-1])}


def require_possible(source: Source, request: QuantizeRequest, size: Callable[[QuantizePlan], int]) -> None:
    """Raise UsageError, before anything is measured, if even the smallest formats exceed the size."""
    plan = make_plan(source, request)
    smallest = {job.tensor.name: candidates(job.tensor.shape[-1])[0] for job in plan.jobs if is_adjustable(job)}
    least = make_plan(source, with_formats(request, smallest)).nbytes
    if size(plan) < least:
        raise UsageError(f"the smallest possible file has {least} bytes, more than {size(plan)}")


class MixedPrecision(NamedTuple):
    """The chosen formats and their divergence.

    Attributes:
        formats: by tensor.  found: measured divergence on held-out documents, inputs not rounded.
        predicted: divergence with rounded inputs.  usual: the same prediction for the type's own formats.
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
    calibration, widener = Calibration(plan, request.texts or ()), widener_of(plan, compiling, candidate_formats(plan))
    needs = list(survey(calibration, widener, threads, on_matrix))
    if not needs:
        raise UsageError("there is no matrix whose format could be chosen")
    usual = {job.tensor.name: job.format.name for job in plan.jobs}
    rest = calibration.with_metadata(plan).nbytes - total(needs, usual)

    def size_with(formats: Mapping[str, str]) -> int:
        return calibration.with_metadata(make_plan(source, with_formats(request, formats))).nbytes

    choose = partial(fit_to_size, file_size=size(plan), other_bytes=rest, size_with=size_with)
    formats, divergence = refine(calibration, needs, choose, widener, threads, on_check)
    return MixedPrecision(formats, divergence, predict(needs, formats), predict_or_nan(needs, usual))


def fit_to_size(
    needs: Sequence[Sensitivity], file_size: int, other_bytes: int, size_with: Callable[[Mapping[str, str]], int]
) -> dict[str, str]:
    """Choose formats for a file of at most `file_size` bytes, about `other_bytes` outside the matrices.

    size_with: returns the exact size of a file with given formats, whose padding depends on them. Raises UsageError.
    """
    budget = file_size - other_bytes
    while (over := size_with(formats := cheapest_within(needs, budget)) - file_size) > 0:
        budget -= over
    return formats


def predict_or_nan(needs: list[Sensitivity], formats: Mapping[str, str]) -> float:
    """Predict the divergence; return NaN if a matrix has a format that was not measured."""
    measured = [need for need in needs if formats[need.name] in need.errors]
    return predict(measured, formats) if len(measured) == len(needs) else float("nan")


# ---- corrections


def refine(
    calibration: Calibration,
    needs: Sequence[Sensitivity],
    choose: Callable[[Sequence[Sensitivity]], dict[str, str]],
    widener: Widener,
    threads: int,
    on_matrix: OnMatrix,
) -> tuple[dict[str, str], float]:
    """Choose formats in a few rounds; return those that diverge least, and their divergence.

    sensitivity.py predicts a divergence as the sum of the matrices' separate ones. This function encodes all matrices
    in the chosen formats, and measures the divergence on held-out texts: once with all of them encoded, and once for
    each group of matrices with that group unencoded. The difference, relative to the group's predicted divergence,
    corrects the harm of its matrices, and formats are chosen again.

    choose: formats by sensitivities. The divergence is that of weights: inputs are not rounded.
    """
    number = 0
    checked = PlanCheck(
        calibration, widener, threads, lambda done, all, name: on_matrix(number * all + done, ROUNDS * all, name)
    )
    best, least = dict[str, str](), np.inf
    for number in range(ROUNDS):
        formats = choose(needs)
        if formats == best:
            break
        measured = checked.divergence(formats)
        if best and measured >= least:
            break
        best, least = formats, measured
        if number + 1 < ROUNDS:
            needs = correct_harm(needs, formats, checked.contribution)
    return best, least


def correct_harm(
    needs: Sequence[Sensitivity], formats: Mapping[str, str], contribution: Callable[[Collection[str]], float]
) -> list[Sensitivity]:
    """Scale the harm of matrices by the measured contributions of groups, by role and by depth.

    contribution: divergence that the matrices of these names cause in the formats.
    """
    layers = 1 + max((layer_of(need.name) or 0) for need in needs)

    def depth_of(name: str) -> int:
        return (layer_of(name) or 0) * DEPTHS // layers

    factors = dict.fromkeys((need.name for need in needs), 1.0)
    for part_of in (role_group, depth_of):
        parts: dict[str | int, list[Sensitivity]] = {}
        for need in needs:
            # Matrices outside layers have a role but no depth.
            if part_of is role_group or layer_of(need.name) is not None:
                parts.setdefault(part_of(need.name), []).append(need)
        contributions = {part: max(contribution([need.name for need in some]), 0.0) for part, some in parts.items()}
        predicted = {
            part: sum(need.harm * need.errors[formats[need.name]] for need in some) for part, some in parts.items()
        }
        usual = sum(contributions.values()) / max(sum(predicted.values()), 1e-30)
        for part, some in parts.items():
            ratio = contributions[part] / max(predicted[part] * usual, 1e-30)
            for need in some:
                factors[need.name] *= min(max(ratio, 1 / MOST), MOST)
    return [replace(need, harm=need.harm * factors[need.name]) for need in needs]


class MatrixEncoder(ActivationCollector):
    """Encodes the matrices whose chosen formats changed.

    Attributes:
        formats: the chosen formats, by name.  blocks: the encoded matrices.
    """

    def __init__(self, jobs: Mapping[str, TensorJob], widener: Widener, threads: int, on_matrix: OnMatrix):
        super().__init__(jobs, widener, threads, lambda name: on_matrix(len(self.processed), len(self.formats), name))
        self.formats, self.blocks = dict[str, str](), dict[str, MatrixBlocks]()

    def process(self, job: TensorJob, inputs: Inputs) -> None:
        name = job.tensor.name
        self.blocks[name] = self.encode_matrix(job, inputs, self.formats[name])


class PlanCheck:
    """Measures the divergence of encoded models on held-out documents."""

    def __init__(self, calibration: Calibration, widener: Widener, threads: int, on_matrix: OnMatrix):
        self._calibration, self._widener, self._threads = calibration, widener, threads
        self._encoded = MatrixEncoder(calibration.jobs, widener, threads, on_matrix)
        self._texts = held_out_texts(calibration)
        self._base = calibration.logits(OriginalWeights(calibration.jobs, widener), self._texts, threads)

    def divergence(self, formats: Mapping[str, str]) -> float:
        """Measure the divergence with all matrices in these formats."""
        encoded, blocks = self._encoded, self._encoded.blocks
        encoded.formats = dict(formats)
        encoded.processed = {name for name in blocks if blocks[name].format == formats[name]}
        self._calibration.forward(encoded, self._calibration.select_chunks(READ), self._threads)
        self._found = self._with(blocks)
        return self._found

    def contribution(self, names: Collection[str]) -> float:
        """Measure the decrease of the last divergence with these matrices unencoded."""
        return self._found - self._with(
            {name: blocks for name, blocks in self._encoded.blocks.items() if name not in names}
        )

    def _with(self, blocks: Mapping[str, MatrixBlocks]) -> float:
        matrices = CoarseWeights(self._calibration.jobs, self._widener, blocks)
        return divergence(self._base, self._calibration.logits(matrices, self._texts, self._threads), self._threads)


def held_out_texts(calibration: Calibration) -> list[np.ndarray]:
    """Return the beginnings of chunks that were not used for choosing formats, or of all if none are left."""
    read = {chunk.ctypes.data for chunk in calibration.select_chunks(READ)}  # views of them
    unread = [chunk for chunk in calibration.chunks if chunk.ctypes.data not in read] or calibration.chunks
    return [chunk[:TOKENS] for chunk in unread[:: -(-len(unread) // TEXTS)]]


# ---- files of formats


def write_formats(path: str, formats: Mapping[str, str]) -> None:
    """Write one line per tensor. Raises LocalllmError."""
    lines = ["# Formats of tensors, for localllm quantize --plan. They may be changed.\n"]
    lines += [f'"{name}" = "{format}"\n' for name, format in formats.items()]
    with SafeFile(path) as file:
        file.write("".join(lines).encode())


def read_formats(path: str, source: Source) -> dict[str, str]:
    """Read a file of `write_formats`. Raises UsageError if it does not fit the source."""
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


def with_formats(request: QuantizeRequest, formats: Mapping[str, str]) -> QuantizeRequest:
    return replace(request, options=request.options._replace(formats=formats))
