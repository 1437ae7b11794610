"""Choose the formats of a whole plan by measured sensitivity, and store them in a file."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from localllm.errors import UsageError
from localllm.files.gguf.header import printable
from localllm.files.gguf.tensor_source import Source
from localllm.files.safe_file import SafeFile
from localllm.files.text_file import read_text
from localllm.kernels.build.objects import Progress
from localllm.quant.formats import BY_NAME
from localllm.quantizing.calibrate import Calibration
from localllm.quantizing.mixed_precision.measure import OnMatrix, is_adjustable, survey
from localllm.quantizing.mixed_precision.refine import refine
from localllm.quantizing.mixed_precision.sensitivity import Sensitivity, candidates, cheapest_within, predict, total
from localllm.quantizing.plan import QuantizePlan, QuantizeRequest, make_plan
from localllm.quantizing.quantize import widener_of
from localllm.quantizing.splitting import parse_bytes

OWN = "own"  # value of --size for the size that the quantization type has by itself


def parse_size(text: str) -> Callable[[QuantizePlan], int]:
    """Parse --size into bytes for a plan: 3.5GB, 800M, a number, or "own", the type's size. Raises UsageError."""
    if text.lower() == OWN:
        return lambda plan: plan.nbytes
    number = parse_bytes(text, "--size")
    return lambda plan: number


def parse_bits(bits: float) -> Callable[[QuantizePlan], int]:
    """Parse --bpw, bits per weight, into bytes for a plan. Raises UsageError."""
    if not 1 <= bits <= 32:
        raise UsageError(f"--bpw should be from 1 to 32, not {bits}")
    return lambda plan: int(bits * plan.weights / 8) + plan.nbytes - sum(job.output.nbytes for job in plan.jobs)


def candidate_formats(plan: QuantizePlan) -> set[str]:
    """List the formats that the plan's matrices may get."""
    return {name for job in plan.jobs if is_adjustable(job) for name in candidates(job.tensor.shape[-1])}


def require_possible(source: Source, request: QuantizeRequest, size: Callable[[QuantizePlan], int]) -> None:
    """Raise UsageError, before anything is measured, if even the smallest formats take more."""
    plan = make_plan(source, request)
    smallest = {job.tensor.name: candidates(job.tensor.shape[-1])[0] for job in plan.jobs if is_adjustable(job)}
    least = make_plan(source, with_formats(request, smallest)).nbytes
    if size(plan) < least:
        raise UsageError(f"the smallest possible file has {least} bytes, more than {size(plan)}")


class MixedPrecision(NamedTuple):
    """The chosen formats and their divergence.

    Attributes:
        formats: by tensor.  found: measured divergence on held-out texts, inputs not rounded.
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
    """Choose formats for a file of at most `file_size` bytes, about `other_bytes` of them outside the matrices.

    size_with: returns the exact size of a file with given formats, whose padding depends on them. Raises UsageError.
    """
    budget = file_size - other_bytes
    while (over := size_with(formats := cheapest_within(needs, budget)) - file_size) > 0:
        budget -= over
    return formats


def predict_or_nan(needs: list[Sensitivity], formats: Mapping[str, str]) -> float:
    """Predict the divergence; NaN if a matrix has a format that was not measured."""
    measured = [need for need in needs if formats[need.name] in need.errors]
    return predict(measured, formats) if len(measured) == len(needs) else float("nan")


# ---- files


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
