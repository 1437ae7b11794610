"""Formats by measured need for a whole plan, and the file that says them."""

import re
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
from localllm.kernels.build.library import Progress
from localllm.quant.formats import BY_NAME
from localllm.quantizing.calibrate import Calibration
from localllm.quantizing.mixed_precision.measure import OnMatrix, is_free, survey
from localllm.quantizing.mixed_precision.refine import corrected
from localllm.quantizing.mixed_precision.sensitivity import Need, candidates, chosen, predicted, total
from localllm.quantizing.plan import QuantizePlan, QuantizeRequest, make_plan
from localllm.quantizing.quantize import widener_of

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
OWN = "own"  # the size that the type has


def size_of(text: str) -> Callable[[QuantizePlan], int]:
    """What --size means, in bytes, for the plan of the type: 3.5GB, 800M, a number, or "own". Raises UsageError."""
    if text.lower() == OWN:
        return lambda plan: plan.nbytes
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)b?", text.lower())
    if not match:
        raise UsageError(f"--size {printable(text)}: expected one as 3.5GB or 800MB, or own, the type's")
    number = int(float(match[1]) * UNITS[match[2]])
    return lambda plan: number


def bits_of(bits: float) -> Callable[[QuantizePlan], int]:
    """What --bpw means. Raises UsageError."""
    if not 1 <= bits <= 32:
        raise UsageError(f"--bpw should be from 1 to 32 bits, not {bits}")
    return lambda plan: int(bits * plan.weights / 8) + plan.nbytes - sum(job.output.nbytes for job in plan.jobs)


def offered(plan: QuantizePlan) -> set[str]:
    """Names of the formats that its matrices may get."""
    return {name for job in plan.jobs if is_free(job) for name in candidates(job.tensor.shape[-1])}


def require_possible(source: Source, request: QuantizeRequest, size: Callable[[QuantizePlan], int]) -> None:
    """Raises UsageError, before anything is measured, if even the smallest formats take more."""
    plan = make_plan(source, request)
    smallest = {job.tensor.name: candidates(job.tensor.shape[-1])[0] for job in plan.jobs if is_free(job)}
    least = make_plan(source, with_formats(request, smallest)).nbytes
    if size(plan) < least:
        raise UsageError(f"no formats are so small: the file has {least} bytes at least, not {size(plan)}")


class ByNeed(NamedTuple):
    """What was chosen.

    Attributes:
        formats: by tensor.  found: the divergence with them on texts held back, what meets matrices not rounded.
        predicted: with that.  usual: predicted with the formats that the type has.
    """

    formats: dict[str, str]
    found: float
    predicted: float
    usual: float


def by_need(
    source: Source,
    request: QuantizeRequest,
    size: Callable[[QuantizePlan], int],
    threads: int,
    on_matrix: OnMatrix,
    on_check: OnMatrix,
    compiling: Progress | None = None,
) -> ByNeed:
    """Formats for a file of that size. Raises ModelError, UsageError."""
    plan = make_plan(source, request)
    calibration, widener = Calibration(plan, request.texts or ()), widener_of(plan, compiling, offered(plan))
    needs = list(survey(calibration, widener, threads, on_matrix))
    if not needs:
        raise UsageError("there is no matrix whose format could be chosen")
    usual = {job.tensor.name: job.format.name for job in plan.jobs}
    rest = calibration.with_metadata(plan).nbytes - total(needs, usual)

    def size_with(formats: Mapping[str, str]) -> int:
        return calibration.with_metadata(make_plan(source, with_formats(request, formats))).nbytes

    choose = partial(fitting, most=size(plan), rest=rest, size_with=size_with)
    formats, found = corrected(calibration, needs, choose, widener, threads, on_check)
    return ByNeed(formats, found, predicted(needs, formats), predicted_of(needs, usual))


def fitting(
    needs: Sequence[Need], most: int, rest: int, size_with: Callable[[Mapping[str, str]], int]
) -> dict[str, str]:
    """Formats for a file of at most `most` bytes, about `rest` of which are not the matrices'.

    size_with: of the file, to the byte: paddings come and go with formats. Raises UsageError.
    """
    budget = most - rest
    while (over := size_with(formats := chosen(needs, budget)) - most) > 0:
        budget -= over
    return formats


def predicted_of(needs: list[Need], formats: Mapping[str, str]) -> float:
    """As `predicted`, of formats that may not have been measured: those count by their bits."""
    known = [need for need in needs if formats[need.name] in need.errors]
    return predicted(known, formats) if len(known) == len(needs) else float("nan")


# ---- files


def write_formats(path: str, formats: Mapping[str, str]) -> None:
    """A line for each tensor. Raises LocalllmError."""
    lines = ["# Formats of tensors, for localllm quantize --plan. They may be changed.\n"]
    lines += [f'"{name}" = "{format}"\n' for name, format in formats.items()]
    with SafeFile(path) as file:
        file.write("".join(lines).encode())


def read_formats(path: str, source: Source) -> dict[str, str]:
    """What such a file says. Raises UsageError for one that does not fit the source."""
    name, text = printable(path, 4096), read_text(path)
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name}: {error}") from None
    tensors = {tensor.name: tensor for tensor in source.tensors}
    for tensor, format in said.items():
        if tensor not in tensors:
            raise UsageError(f"{name}: the model has no tensor {printable(tensor)}")
        if not isinstance(format, str) or format.upper() not in BY_NAME:
            raise UsageError(f"{name}: {printable(str(format))}, for {printable(tensor)}, is no format of a tensor")
    return {tensor: format.upper() for tensor, format in said.items()}


def with_formats(request: QuantizeRequest, formats: Mapping[str, str]) -> QuantizeRequest:
    """The request, with these."""
    return replace(request, options=request.options._replace(formats=formats))
