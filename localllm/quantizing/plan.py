"""Plan how a model is quantized: the format of each tensor, and the metadata of the new files."""

import struct
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from localllm.arch.vision import CLIP
from localllm.arch.weights import find_module
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.header import SCALARS, printable
from localllm.files.gguf.tensor_source import Source, SourceTensor, count_rows
from localllm.files.gguf.writer import OutputTensor, PackedValue, build_header, get_alignment, pack_value
from localllm.files.imatrix_file import ImportanceMatrix, read_imatrix
from localllm.frozen import frozen
from localllm.kernels.dequantize_rows import can_dequantize
from localllm.quant.encode import ENCODERS
from localllm.quant.formats import BY_NAME, Format
from localllm.quant.formats import Recipe as Recipe
from localllm.quant.recipes import (
    FormatPlanner,
    ModelProperties,
    RecipeOptions,
    get_role,
    is_quantized,
    needs_importance,
    sort_like_llama,
)
from localllm.quantizing import splitting
from localllm.quantizing.metadata_edits import NO_EDITS, MetadataEdits, unpack_edits
from localllm.quantizing.sources import PrunedSource, RenamedTensor, SourceGuard

# Architectures without logits. Their embedding is only looked up, so all of its columns have the same importance.
ENCODERS_ONLY = ("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert",
                 "neo-bert", "nomic-bert", "nomic-bert-moe", "t5encoder")  # fmt: skip
COPY = Recipe(-1, "COPY", "")
CHUNK_WEIGHTS = 1 << 20  # weights that are converted and encoded at once: 4 MB in float32
QUANTIZATION_VERSION = 2
OnProgress = Callable[[int, str], None]  # (weights done so far, tensor)
OnStage = Callable[[str, int, int, str], None]  # (stage, steps done so far, all of its steps, tensor)


@frozen
class QuantizeRequest:
    """A user's settings of a quantization: the type, and the options that change single tensors or files."""

    recipe: Recipe
    options: RecipeOptions = field(default_factory=RecipeOptions)
    imatrix: str | None = None  # path of an importance matrix
    include: Sequence[str] = ()  # substrings of names of tensors that use the importance matrix; none: all
    exclude: Sequence[str] = ()  # substrings of names of tensors that do not use it
    overrides: Sequence[tuple[str, object]] = ()  # metadata keys and values
    edits: MetadataEdits = NO_EDITS  # further changes, applied after `overrides`
    keep_split: bool = False
    split: splitting.SplitLimits | None = None
    allow_requantize: bool = False
    strict: bool = False
    # Files of calibration texts; empty: the built-in ones; None: no calibration.
    texts: Sequence[str] | None = None

    def selects(self, name: str) -> bool:
        """Return whether a tensor uses the importance matrix, judging by its name."""
        is_included = not self.include or any(part in name for part in self.include)
        return is_included and not any(part in name for part in self.exclude)


@dataclass(frozen=True, eq=False)
class TensorJob:
    """The conversion of one tensor to its new format."""

    tensor: SourceTensor
    format: Format  # of the new tensor
    wanted: str  # the recipe's format; `format` differs if the rows do not fit it
    importance: np.ndarray | None = None  # float32 [matrices, columns]
    makes_logits: bool = False  # whether it is the output matrix; its weights replace a missing importance

    @property
    def is_copied(self) -> bool:
        return self.format == self.tensor.format

    @property
    def is_fallback(self) -> bool:
        return self.format.name != self.wanted

    @property
    def output(self) -> OutputTensor:
        return OutputTensor(self.tensor.name, self.format, self.tensor.shape)

    def divide_rows(self) -> list[tuple[int, int]]:
        """Divide the rows into chunks (first, end), each within one matrix of a stack."""
        matrix = self.tensor.shape[-2] if len(self.tensor.shape) > 1 else 1
        step = min(matrix, max(1, CHUNK_WEIGHTS // self.tensor.shape[-1]))
        return [
            (start + row, start + min(row + step, matrix))
            for start in range(0, count_rows(self.tensor.shape), matrix)
            for row in range(0, matrix, step)
        ]


@dataclass(frozen=True, eq=False)
class QuantizePlan:
    """The files to write, each with its metadata and its tensors."""

    source: Source
    files: Sequence[tuple[Mapping[str, object], Sequence[TensorJob]]]
    warnings: Sequence[str]
    guard: SourceGuard = field(default_factory=lambda: SourceGuard(()))  # the source's files at the time of planning

    @property
    def jobs(self) -> list[TensorJob]:
        return [job for _, jobs in self.files for job in jobs]

    @property
    def weights(self) -> int:
        return sum(prod(job.tensor.shape) for job in self.jobs)

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes, with headers and padding."""
        return sum(
            len(build_header(metadata, [job.output for job in jobs], get_alignment(metadata)))
            + sum(-(-job.output.nbytes // get_alignment(metadata)) * get_alignment(metadata) for job in jobs)
            for metadata, jobs in self.files
        )

    @property
    def nbytes_before(self) -> int:
        """The size of the source's tensors in bytes."""
        return sum(
            count_rows(job.tensor.shape) * job.tensor.format.row_bytes(job.tensor.shape[-1]) for job in self.jobs
        )

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(job.output.nbytes for job in self.jobs) / self.weights

    @property
    def bits_per_weight_before(self) -> float:
        return 8 * self.nbytes_before / self.weights

    def list_paths(self, path: str) -> list[str]:
        """Return the paths of the files for an output path; those of a split model are numbered."""
        return splitting.list_split_paths(path, len(self.files))


def make_plan(source: Source, request: QuantizeRequest, guard: SourceGuard | None = None) -> QuantizePlan:
    """Choose the format and the file of every tensor. Raises ModelError, UsageError.

    guard: of an earlier plan, if the source has been read since then.
    """
    imatrix = load_importance(request)
    overridden = ChainMap(unpack_edits(request.edits), dict(request.overrides), source.metadata)  # type: ignore[arg-type]
    facts = ModelProperties.from_metadata(overridden, imatrix is not None or request.texts is not None)
    tensors = {tensor.name: tensor for tensor in source.tensors}
    if not tensors:
        raise ModelError(f"{printable(source.path, 4096)}: the file must have at least one tensor")
    parts = source.parts if request.keep_split else [sort_like_llama(tensors)]
    planner = FormatPlanner(request.recipe, facts, tensors, request.options)
    jobs = [[plan_tensor(tensors[name], planner, request, imatrix) for name in names] for names in parts]
    flat, order = [job for part in jobs for job in part], splitting.SPLIT_KEYS
    sizes = {job.tensor.name: job.output.nbytes for job in flat}
    if request.split:
        jobs, order = divide_jobs(flat, sizes, request.split), splitting.SPLIT_KEY_ORDER
    if request.strict and any(job.is_fallback for job in flat):
        raise ModelError(f"--strict: {'; '.join(describe_fallbacks(flat))}")
    idle = [*find_idle_options(flat, planner, request), *request.edits.warnings]
    if request.strict and idle:
        raise UsageError(f"--strict: {'; '.join(idle)}")
    metadata = build_metadata(source, request, imatrix)
    return QuantizePlan(
        source,
        [*zip(splitting.split_metadata(metadata, [len(part) for part in jobs], order), jobs, strict=True)],
        [*source.warnings, *idle, *list_warnings(flat, request), *splitting.describe_oversized(sizes, request.split)],
        guard or SourceGuard(source.files),
    )


def divide_jobs(
    jobs: Sequence[TensorJob], sizes: Mapping[str, int], limits: splitting.SplitLimits
) -> list[list[TensorJob]]:
    """Divide the tensors among files within the limits. Raises UsageError."""
    by_name = {job.tensor.name: job for job in jobs}
    return [[by_name[name] for name in names] for names in splitting.divide_tensors(sizes, limits)]


def find_idle_options(jobs: Sequence[TensorJob], planner: FormatPlanner, request: QuantizeRequest) -> list[str]:
    """Return a line for each option that selects tensors by name and matches none."""
    tensors = [job.tensor for job in jobs]
    names = [tensor.name for tensor in tensors if is_quantized(tensor.name, tensor.shape, planner.model.arch)]
    is_plain = request.recipe == COPY or request.recipe.base in ("F32", "F16", "BF16")  # types that ignore patterns
    lines = [
        f"--tensor-type {printable(pattern.pattern)}={format} matches no tensor that is quantized"
        for pattern, format in request.options.patterns
        if is_plain or not any(pattern.search(name) for name in names)
    ]
    for option, parts in (("include", request.include), ("exclude", request.exclude)):
        lines += [
            f"--{option}-weights {printable(part)} matches no tensor that is quantized"
            for part in parts
            if not any(part in name for name in names)
        ]
    return lines


def plan_tensor(
    tensor: SourceTensor, planner: FormatPlanner, request: QuantizeRequest, imatrix: ImportanceMatrix | None
) -> TensorJob:
    """Choose the format of a tensor. Raises ModelError if there is none, UsageError if an option prevents it."""
    is_other = planner.model.arch != CLIP and find_module(tensor.name) is not None  # it is copied
    try:
        choice = None if request.recipe == COPY or is_other else planner.choose(tensor.name, tensor.shape)
    except ValueError as error:
        raise ModelError(str(error)) from None
    format = BY_NAME[choice.format] if choice else tensor.format
    if format == tensor.format:
        return TensorJob(tensor, format, choice.wanted if choice else format.name)
    name = f"tensor {printable(tensor.name)}"
    if tensor.format.block > 1 and not request.allow_requantize:
        raise UsageError(
            f"{name} is {tensor.format.name} already; --allow-requantize converts it to {format.name} and loses quality"
        )
    if not can_dequantize(tensor.format):
        raise ModelError(
            f"{name}: {tensor.format.name} cannot be converted to {format.name}: choose a type with --tensor-type"
        )
    if format.name not in ENCODERS:
        raise UsageError(f"{name} would become {format.name}, which localllm cannot encode yet: choose another format")
    assert choice
    importance = find_importance(tensor, imatrix, request.selects) if format.block > 1 else None
    is_blind = importance is None and request.texts is None
    if is_blind and format.name.startswith("IQ") and needs_importance(request.recipe, tensor.name, format.name):
        raise UsageError(
            f"{name} would become {format.name}, which needs an importance matrix with this tensor (--imatrix)"
        )
    makes_logits = format.block > 1 and planner.model.arch not in ENCODERS_ONLY and planner.makes_logits(tensor.name)
    return TensorJob(tensor, format, choice.wanted, importance, makes_logits)


def load_importance(request: QuantizeRequest) -> ImportanceMatrix | None:
    """Load the importance matrix with the entries that --include-weights or --exclude-weights select.

    Raises UsageError.
    """
    if request.imatrix and request.texts is not None:
        raise UsageError("give either --calibrate or --imatrix, not both: --calibrate measures importance itself")
    if request.imatrix is None:
        if request.include or request.exclude:
            raise UsageError("--include-weights and --exclude-weights need --imatrix")
        return None
    if request.include and request.exclude:
        raise UsageError("give either --include-weights or --exclude-weights, not both")
    matrix = read_imatrix(request.imatrix)
    squares = {name: value for name, value in matrix.squares.items() if request.selects(name)}
    if not squares:
        raise UsageError(f"{request.imatrix}: no entry of the importance matrix is selected")
    return ImportanceMatrix(squares, matrix.datasets, matrix.chunks, matrix.chunk_size)


def find_importance(
    tensor: SourceTensor, imatrix: ImportanceMatrix | None, selects: Callable[[str], bool] = lambda name: True
) -> np.ndarray | None:
    """Return the importance of a tensor's columns, float32 [matrices, columns], or None.

    selects: returns whether a tensor's entry may be used. Raises ModelError if the shape differs.
    """
    name = tensor.old_name if isinstance(tensor, RenamedTensor) else tensor.name
    if imatrix is None or not selects(name):
        return None
    entry = next((each for each in (name, *list_same_inputs(name)) if each in imatrix.squares), None)
    if entry is None:
        return None
    mean = imatrix.squares[entry].average()
    expected = (prod(tensor.shape[:-2]), tensor.shape[-1])
    if mean.size == prod(expected):
        return np.ascontiguousarray(mean, np.float32).reshape(expected)
    if get_role(tensor.name) == "embedding":  # an entry belongs to a product, but rows are only looked up
        return None
    raise ModelError(
        f"tensor {printable(tensor.name)}: the importance matrix has the shape {list(mean.shape)}, "
        f"expected {list(expected)}"
    )


def list_same_inputs(name: str) -> Iterator[str]:
    """Yield the names of matrices that have the same inputs as a gate or up matrix.

    Programs that compute both in one operation record the activations for one of them.
    """
    pair = ("ffn_up", "ffn_gate")
    for one, other in (pair, pair[::-1]):
        if f".{one}" in name:
            yield from (name.replace(f".{one}", f".{each}", 1) for each in (other, "ffn_gate_up", "ffn_up_gate"))


def describe_fallbacks(jobs: Sequence[TensorJob]) -> list[str]:
    """Return a line for each format that replaces another because of the row length."""
    by_formats: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        if job.is_fallback:
            by_formats.setdefault((job.wanted, job.format.name), []).append(job.tensor.name)
    return [
        f"{printable(names[0])}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: "
        f"{format} instead of {requested}, because the row length is not a multiple of {BY_NAME[requested].block}"
        for (requested, format), names in by_formats.items()
    ]


def list_warnings(jobs: Sequence[TensorJob], request: QuantizeRequest) -> list[str]:
    lines = [f"fallback format: {line}" for line in describe_fallbacks(jobs)]
    blind = [job for job in jobs if not job.is_copied and job.format.block > 1 and job.importance is None]
    poor = [job for job in blind if needs_importance(request.recipe, job.tensor.name, job.format.name)]
    if poor and request.texts is None:
        lines.append(f"{request.recipe.name} is poor without an importance matrix: give --imatrix")
    missing = [job.tensor.name for job in blind if get_role(job.tensor.name) not in ("embedding", "output")]
    if request.imatrix and not request.include and not request.exclude and missing:
        lines.append(f"the importance matrix does not have {printable(missing[0])} and {len(missing) - 1} more")
    return lines


# ---- the new file's metadata


def build_metadata(source: Source, request: QuantizeRequest, imatrix: ImportanceMatrix | None) -> dict[str, object]:
    """Return the metadata of the new file: the source's, and the keys that llama-quantize adds, in its order."""
    left_out = {*splitting.SPLIT_KEYS, *source.ignored}
    metadata = {key: value for key, value in source.packed.items() if key not in left_out}
    kind = source.packed.get("general.file_type") if request.recipe == COPY else request.recipe.number
    additions: list[tuple[str, object]] = [("general.quantization_version", QUANTIZATION_VERSION)]
    additions += [("general.file_type", kind)] if kind is not None else []
    additions += [(key, match_type(source.packed.get(key), value)) for key, value in request.overrides]
    if imatrix:
        additions.append(("quantize.imatrix.file", request.imatrix))
        additions += [("quantize.imatrix.dataset", imatrix.datasets[0])] if imatrix.datasets else []
        additions.append(("quantize.imatrix.entries_count", len(imatrix.squares)))
        additions += [("quantize.imatrix.chunks_count", imatrix.chunks)] if imatrix.chunks else []
    if isinstance(source, PrunedSource):
        additions.append((source.count_key, np.uint32(source.layers)))
    for key, value in additions:
        metadata.pop(key, None)
        metadata[key] = pack_value(value)
    return request.edits.apply(metadata)


def match_type(old: object, value: object) -> object:
    """Pack a number in the type of the value that it replaces, because readers require that type.

    A number that does not fit gets its own type.
    """
    if not isinstance(old, bytes) or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    kind = int.from_bytes(old[:4], "little")
    is_float = kind in (6, 12)
    if kind not in SCALARS or kind == 7 or is_float != isinstance(value, float):
        return value
    try:
        return PackedValue(old[:4] + SCALARS[kind].pack(value))
    except struct.error:
        return value
