"""Verify a model file: finite weights, sane scales, checksums, and its error relative to the source."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from math import prod
from typing import NotRequired, TypedDict

import numpy as np

from localllm.errors import LocalllmError, ModelError
from localllm.files.gguf.file import GUESSED, GGUFFile
from localllm.files.gguf.header import printable
from localllm.files.gguf.tensor_source import GGUFTensor, Source, SourceTensor, count_rows
from localllm.frozen import frozen
from localllm.kernels.build.library import Progress
from localllm.kernels.dequantize_rows import RowDequantizer, can_dequantize
from localllm.quant.formats import BY_NAME
from localllm.quant.recipes import find_recipe
from localllm.services.inspection.inspect import SCALED
from localllm.services.inspection.validate import check_validity

CHUNK_WEIGHTS = 1 << 20  # weights that are checked at once
GROUP_WEIGHTS = 32  # weights of a group; its mean square is compared with those of other groups
MAX_SPREAD = 1e4  # a group of more than this times its tensor's median has a damaged scale
MAX_WEIGHT = 1e5  # larger than the weights of any real model
MAX_ERROR_RATIO = 4.0  # a tensor of more than this times its format's median error is badly encoded

OnTensor = Callable[[int, int, str], None]  # (tensors done, all, name)


@frozen
class TensorReport:
    """The result of verifying a tensor.

    Attributes:
        problem: the defect, or None.
        error: root of (squared error / squares of the source's weights), None without a source.
        largest: the largest magnitude.  spread: the largest mean square of a group / the median one.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    problem: str | None = None
    error: float | None = None
    largest: float = 0.0
    spread: float = 1.0
    is_zero: bool = False


class FileChecksum(TypedDict):
    """A file's path, size in bytes, and SHA-256 in hexadecimal digits."""

    path: str
    size: int
    sha256: str


class FormatSummary(TypedDict):
    """The tensors of one format: their count and weights, and their errors if there is a source.

    error, worst: the median and the largest error.
    """

    format: str
    tensors: int
    weights: int
    error: NotRequired[float]
    worst: NotRequired[float | None]
    worst_tensor: NotRequired[str]


@frozen
class Verification:
    """The result of verifying a file; problems and warnings are sentences."""

    files: Sequence[FileChecksum]
    tensors: Sequence[TensorReport]
    problems: Sequence[str] = field(default_factory=list)
    warnings: Sequence[str] = field(default_factory=list)

    def summarize_formats(self) -> list[FormatSummary]:
        """Return the count, the weights and, with a source, the errors of the tensors of each format."""
        rows = []
        for name in sorted({tensor.format for tensor in self.tensors}):
            tensors = [tensor for tensor in self.tensors if tensor.format == name]
            compared = [tensor for tensor in tensors if tensor.error is not None]
            errors = [tensor.error for tensor in compared]
            weights = sum(prod(tensor.shape) for tensor in tensors)
            row: FormatSummary = {"format": name, "tensors": len(tensors), "weights": weights}
            if errors:
                worst = max(compared, key=lambda tensor: tensor.error or 0.0)
                median = float(np.median(np.array(errors, float)))
                row |= {"error": median, "worst": worst.error, "worst_tensor": worst.name}
            rows.append(row)
        return rows


def verify_file(
    path: str, against: Source | None, threads: int, on_tensor: OnTensor, compiling: Progress | None = None
) -> Verification:
    """Check a whole file, and compare it with its source if there is one.

    Raises ModelError if it is not a GGUF file.
    """
    file = GGUFFile.open(path)
    validity = check_validity(file)
    odd = file.oddities.format_lines()
    problems = [str(validity.problem)] if validity.problem and not validity.is_valid else []
    against_tensors = {tensor.name: tensor for tensor in against.tensors} if against else {}
    tensors = [GGUFTensor(tensor) for tensor in file.tensors.values()]
    formats = {each.format for each in (*tensors, *against_tensors.values()) if can_dequantize(each.format)}
    widener = RowDequantizer(formats, compiling)
    reports = list[TensorReport]()
    for number, tensor in enumerate(tensors):
        reports.append(check_tensor(tensor, against_tensors.get(tensor.name), widener, threads))
        on_tensor(number + 1, len(tensors), tensor.name)
    problems += [f"tensor {printable(report.name)}: {report.problem}" for report in reports if report.problem]
    odd += describe_oddities(reports, file) + (describe_differences(file, against_tensors) if against else [])
    return Verification([compute_checksum(part) for part in file.parts], reports, problems, odd)


def check_tensor(
    tensor: GGUFTensor, source: SourceTensor | None, widener: RowDequantizer, threads: int
) -> TensorReport:
    """Check a tensor, and compare it with the source's if there is one."""
    name, format, shape = tensor.name, tensor.format.name, tensor.shape
    if not can_dequantize(tensor.format):
        return TensorReport(name, format, shape)
    if source is not None and (source.shape != shape or not can_dequantize(source.format)):
        if source.shape != shape:
            return TensorReport(name, format, shape, f"the shape {list(shape)}; the source has {list(source.shape)}")
        source = None
    rows, step = count_rows(shape), max(1, CHUNK_WEIGHTS // shape[-1])
    ranges = [(first, min(first + step, rows)) for first in range(0, rows, step)]
    try:
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(lambda place: check_rows(tensor, source, widener, *place), ranges))
    except ModelError as problem:
        return TensorReport(name, format, shape, str(problem).partition(": ")[2] or str(problem))
    groups = np.concatenate([part.groups for part in parts])
    error_square, square = sum(part.lost for part in parts), sum(part.whole for part in parts)
    distance = None if source is None else float(np.sqrt(error_square / square)) if square else float(error_square > 0)
    median = float(np.median(groups[groups > 0])) if (groups > 0).any() else 0.0
    spread = float(np.sqrt(groups.max() / median)) if median else 1.0
    largest = max(part.largest for part in parts)
    return TensorReport(name, format, shape, None, distance, largest, spread, largest == 0)


@frozen
class RowStatistics:
    """Sums over some rows of a tensor.

    Attributes:
        lost, whole: squared errors, and squared weights of the source.
        groups: mean squares of groups.  largest: the largest magnitude.
    """

    lost: float
    whole: float
    groups: np.ndarray
    largest: float


def check_rows(
    tensor: GGUFTensor, source_tensor: SourceTensor | None, widener: RowDequantizer, first: int, last: int
) -> RowStatistics:
    """Compute the sums over rows of a tensor. Raises ModelError for a weight that is not finite."""
    columns = tensor.shape[-1]
    weights = widener.dequantize(tensor.format, tensor.read_rows(first, last), columns).astype(np.float64)
    tensor.release_rows(first, last)
    if not np.isfinite(weights).all():
        row, column = np.argwhere(~np.isfinite(weights))[0]
        raise ModelError(f"{tensor.name}: the weight in row {first + row}, column {column} is {weights[row, column]}")
    squares = weights**2
    each = GROUP_WEIGHTS if columns % GROUP_WEIGHTS == 0 else columns
    groups, error_square, square = squares.reshape(-1, each).mean(axis=1), 0.0, 0.0
    if source_tensor is not None:
        source = widener.dequantize(source_tensor.format, source_tensor.read_rows(first, last), columns).astype(
            np.float64
        )
        source_tensor.release_rows(first, last)
        error_square, square = float(((weights - source) ** 2).sum()), float((source**2).sum())
    return RowStatistics(error_square, square, groups, float(np.abs(weights).max()))


def describe_oddities(reports: Sequence[TensorReport], file: GGUFFile) -> list[str]:
    """Return a warning for each tensor with suspicious weights."""
    lines = []
    for report in reports:
        name, is_matrix = printable(report.name), len(report.shape) > 1
        if report.is_zero and is_matrix:
            lines.append(f"tensor {name}: all {prod(report.shape)} weights are zero")
        if report.largest > MAX_WEIGHT:
            lines.append(f"tensor {name}: a weight of {report.largest:.3g}")
        if is_matrix and report.spread > MAX_SPREAD:
            lines.append(
                f"tensor {name}: {GROUP_WEIGHTS} weights are {report.spread:.3g} times as large as others:"
                " a broken scale?"
            )
    lines += describe_large_errors(reports)
    if (line := check_file_type(file)) is not None:
        lines.append(line)
    return lines


def describe_large_errors(reports: Sequence[TensorReport]) -> Iterator[str]:
    """Yield a warning for each tensor whose error is too large for its format."""
    compared = [report for report in reports if report.error is not None and len(report.shape) > 1]
    for report in compared:
        errors = [each.error for each in compared if each.format == report.format and each.error is not None]
        usual, error = float(np.median(errors)), report.error or 0.0
        limit = BY_NAME[report.format].limit
        if error > limit or (len(errors) > 3 and error > MAX_ERROR_RATIO * usual and error > limit / 3):
            than = f"; {usual:.2g} is usual for {report.format} here" if error > MAX_ERROR_RATIO * usual else ""
            yield f"tensor {printable(report.name)}: the error is {error:.2g} of the weights{than}"


def check_file_type(file: GGUFFile) -> str | None:
    """Return a warning if no tensor has the format that general.file_type names, or None."""
    number = file.metadata.get("general.file_type")
    try:
        recipe = find_recipe(str(number & ~GUESSED)) if isinstance(number, int) else None
    except KeyError:
        return f"general.file_type is {number}, which is not a type"
    formats = {tensor.format.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if recipe is None or not formats or recipe.base in formats:
        return None
    return f"general.file_type says {recipe.name}, but no matrix is in {recipe.base}"


def describe_differences(file: GGUFFile, against: dict[str, SourceTensor]) -> list[str]:
    """Describe tensors that only the file or only the source has, and folded scales, which change weights."""
    missing, extra = [name for name in against if name not in file.tensors], file.tensors.keys() - against.keys()
    lines = []
    if missing:
        lines.append(f"the file has no {printable(missing[0])}{format_others(missing)}, which the source has")
    if extra:
        lines.append(f"the source has no {printable(min(extra))}{format_others(extra)}, which the file has")
    if file.metadata.get(SCALED):
        lines.append(
            "scales were folded into tensors while calibrating: their weights differ, what they compute does not"
        )
    return lines


def format_others(names: Collection[str]) -> str:
    return f" and {len(names) - 1} more tensors" if len(names) > 1 else ""


def compute_checksum(path: str) -> FileChecksum:
    size, sha256 = compute_sha256(path)
    return {"path": path, "size": size, "sha256": sha256}


def compute_sha256(path: str) -> tuple[int, str]:
    """Return a file's size in bytes and its SHA-256 in hexadecimal digits. Raises LocalllmError."""
    try:
        with open(path, "rb") as file:
            return os.path.getsize(path), hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise LocalllmError(f"{path}: cannot be read: {error.strerror or error}") from None
