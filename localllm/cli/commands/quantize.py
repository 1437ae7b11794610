"""localllm quantize: quantize a model file, or convert a checkpoint."""

import os
import re
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from localllm.cli import open_model as opening
from localllm.cli.argv import suggest_name
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_formats
from localllm.cli.options.quantizing import (
    CalibrationFlags,
    ImportanceFlags,
    MetadataFlags,
    SplitFlags,
    TensorFormatFlags,
    TypeSetFlags,
)
from localllm.cli.parameters import argument, option
from localllm.cli.quantize_set import MAX_GROWTH, QuantizeSetOptions, make_files
from localllm.cli.terminal.output import ProgressLine, exit_on_signals, say, write
from localllm.cli.terminal.quantize_progress import BY_SENSITIVITY, CALIBRATED, ENCODING, SIZED, StageProgress
from localllm.cli.terminal.render import format_count, format_size, format_table, to_one_line
from localllm.errors import UsageError
from localllm.quant.formats import RECIPES
from localllm.values import parse_scaled_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from localllm.files.gguf.tensor_source import Source
    from localllm.quantizing.plan import OnStage, QuantizePlan, QuantizeRequest, Recipe


def quantize(
    arguments: list[str] = argument(
        "IN [OUT] TYPE [TEXT...]",
        "Input, output and quantization type; with --calibrate, text files to calibrate on.",
        offer_formats,
    ),
    *,
    formats: TensorFormatFlags,
    importance: ImportanceFlags,
    calibration: CalibrationFlags,
    several_types: TypeSetFlags,
    split: SplitFlags,
    changes: MetadataFlags,
    override_kv: list[str] | None = option(
        "--override-kv", "Override metadata; TYPE is int, float, bool or str.  [repeatable]", "KEY=TYPE:VALUE"
    ),
    keep_split: bool = option("--keep-split", "Write the same number of split files as the input has."),
    lora: list[str] | None = option(
        "--lora",
        "Merge low-rank adapters (LoRA) before quantizing; GGUF files or PEFT folders.  [repeatable]",
        "FILE[:SCALE],...",
        parser=parse_scaled_files,
        typed_only=True,  # an adapter that config.toml gives to `run` must not be merged
    ),
    adapter: bool = option("--adapter", "IN is an adapter: write it as a GGUF adapter, TYPE F32, F16, BF16 or Q8_0."),
    mmproj: bool = option("--mmproj", "Convert the vision projector (mmproj) instead of the language model."),
    allow_requantize: bool = option(
        "--allow-requantize", "Allow quantizing tensors that are quantized already; this loses quality."
    ),
    strict: bool = option(
        "--strict",
        "Fail on a fallback format, weights too large for their format, or an option that matches no tensor.",
    ),
    force: bool = option("--force", "Overwrite any existing file, and allow an output larger than IN."),
    threads: options.Threads = None,
    dry_run: bool = option("--dry-run", "Print the plan without writing anything."),
) -> None:
    """Quantize a model, or convert a checkpoint to GGUF.

    IN is a GGUF file or the folder of a Hugging Face checkpoint. TYPE is a type of llama-quantize, by name or number,
    in upper or lower case. Without OUT, the output file is named after IN and TYPE.

    \b
    TYPES
    COPY           no quantization

    OUT is written to a temporary file and renamed when it is complete. With --types or --ladder, which replace TYPE,
    files of several types are made in one pass; OUT is a folder, or a name with {type} in it.

    Examples:
      localllm quantize big.gguf Q4_K_M
      localllm quantize checkpoint/ small.gguf Q8_0
      localllm quantize checkpoint/ mmproj-small.gguf Q8_0 --mmproj
      localllm quantize base.gguf merged.gguf Q4_K_M --lora my-adapter/
      localllm quantize my-adapter/ adapter.gguf F16 --adapter --base base.gguf
      localllm quantize big.gguf small.gguf IQ3_S --imatrix big.imatrix
      localllm quantize big.gguf Q4_K_M --calibrate
      localllm quantize big.gguf small.gguf Q4_K_M --calibrate prose.txt code.txt
      localllm quantize big.gguf small.gguf Q4_K_M --calibrate --size 3.5GB
      localllm quantize big.gguf Q4_K_M --dry-run
      localllm quantize checkpoint/ files/ --types Q8_0,Q5_K_M,Q4_K_M --imatrix big.imatrix --md
      localllm quantize big.gguf "files/My-Model-{type}.gguf" --ladder
    """
    from localllm.quantizing import quantize as service
    from localllm.quantizing.plan import QuantizeRequest, make_plan

    exit_on_signals()
    if adapter:
        convert_adapter(arguments, several_types.base, force)
        return
    progress = PhaseTimer(calibration)
    source_name, target, recipes, texts, last = read_arguments(tuple(arguments), importance, calibration, several_types)
    recipe = recipes[0]
    path = resolve_model_path(source_name)
    threads = last if threads is None else threads
    overrides = [service.parse_override(text) for text in override_kv or ()]
    source = service.open_source(path, mmproj)
    require_model(source, path)
    edits, limits = changes.edits(source.packed), split.limits()
    service.require_valid_source(source, overrides, edits)
    if formats.prune_layers is not None:
        source = service.prune_layers(source, formats.prune_layers)
    if lora:
        from localllm.quantizing.adapters import merge_adapters

        scales: Any = [each for some in lora for each in some]
        source = merge_adapters(source, scales)
    request = QuantizeRequest(
        recipe, formats.to_options(), importance.imatrix, tuple(importance.include_weights or ()),
        tuple(importance.exclude_weights or ()), overrides, edits, keep_split, limits, allow_requantize, strict,
        texts,
    )  # fmt: skip
    service.require_splittable(source, keep_split, limits)
    if several_types.has_several:
        make_files(source, [replace(request, recipe=each) for each in recipes], target, several_types,
                    QuantizeSetOptions(path, mmproj, threads, force, dry_run))  # fmt: skip
        return
    formats_file = calibration.formats_file
    is_by_need, is_named = calibration.has_size, target is not None or force
    target = service.derive_output(path, recipe, mmproj) if target is None else target
    if formats_file is not None and not is_by_need:
        from localllm.quantizing.mixed_precision.plan import read_formats, set_formats

        request = set_formats(request, read_formats(formats_file, source))
    plan = make_plan(source, request)
    nbytes_before = None if os.path.isdir(path) else plan.nbytes_before  # a checkpoint's folder has more than tensors
    if is_by_need:
        target_size = make_size_limit(calibration.file_size, calibration.bits, texts is not None)
        if not dry_run:
            require_consent(plan, target, target_size(plan), nbytes_before, is_named, force)
        source, request = plan_by_sensitivity(source, request, target_size, formats_file, threads, force, progress)
        plan = make_plan(source, request, plan.guard)
    for line in plan.warnings:
        say(f"localllm: warning: {line}")
    require_consent(plan, target, plan.nbytes, nbytes_before, is_named, force)
    require_writable(plan, target, request, threads, force)
    if dry_run:
        write(format_plan(plan, target))
    else:
        write_files(plan, target, request, threads, progress)


def require_model(source: "Source", path: str) -> None:
    """Raise UsageError for an adapter or a control vector."""
    from localllm.files.gguf.kinds import ADAPTER, get_kind

    if kind := get_kind(source.metadata):
        hint = "; add --adapter to write it in another type" if kind == ADAPTER else "; these files are always F32"
        raise UsageError(f"{path} must be a model, not {'an' if kind == ADAPTER else 'a'} {kind}{hint}")


def convert_adapter(arguments: list[str], base: str | None, force: bool) -> None:
    """Write an adapter as a GGUF file; arguments: IN [OUT] [TYPE]. Raises UsageError, ModelError."""
    from localllm.convert.adapters import open_adapter
    from localllm.quantizing import quantize as service
    from localllm.quantizing.adapters import FORMATS, describe_base, write_adapter
    from localllm.quantizing.rewrite import check_files

    path, *others = arguments
    type = others.pop().upper() if others and others[-1].upper() in FORMATS else "F32"
    if len(others) > 1:
        raise UsageError(f"the type of an adapter must be {', '.join(FORMATS)}, not {others[-1]!r}")
    if base is None and os.path.isdir(path):
        raise UsageError("a PEFT folder needs the model that it adapts: add --base MODEL")
    target = others[0] if others else f"{path.rstrip('/').removesuffix('.gguf')}-{type}.gguf"
    if not others and not force:
        service.require_absent([target])
    source = service.open_source(resolve_model_path(base)) if base is not None else None
    opened = open_adapter(path, *(describe_base(source) if source else ({}, {})))
    if source:
        opened.require_fit(describe_base(source)[1], str(source.metadata.get("general.architecture", "")))
    check_files([target], [*opened.files, *(source.files if source else ())], 0)
    nbytes = write_adapter(opened, target, type)
    say(f"localllm: {target}: {format_size(nbytes)}, {len(opened.low_ranks)} matrices")


def format_types() -> str:
    """Return the lines of the help that list the types, one line for each group."""
    groups: dict[str, list[str]] = {}
    for recipe in RECIPES.values():
        groups.setdefault(recipe.group, []).append(recipe.name)
    return "\n    ".join(f"{group:<14} {', '.join(names)}" for group, names in groups.items())


quantize.__doc__ = (quantize.__doc__ or "").replace("TYPES\n", f"{format_types()}\n", 1)


def read_arguments(
    arguments: tuple[str, ...], importance: ImportanceFlags, calibration: CalibrationFlags, several_types: TypeSetFlags
) -> "tuple[str, str | None, list[Recipe], tuple[str, ...] | None, int | None]":
    """Return IN, OUT, the types, the calibration files, and the threads. Raises UsageError."""
    if several_types.has_several:
        (source, target), texts = several_types.arguments(arguments, calibration)
        return (
            source,
            target,
            several_types.parse_recipes(importance.imatrix is not None or texts is not None),
            texts,
            None,
        )
    positional, texts = split_calibration_files(arguments) if calibration.calibrate else (arguments, None)
    source, target, recipe, threads = parse_positional(positional)
    return source, target, [recipe], texts, threads


def require_consent(
    plan: "QuantizePlan", target: str, nbytes: int, nbytes_before: int | None, is_named: bool, force: bool
) -> None:
    """Raise UsageError before replacing files, or writing a larger one, that the user did not ask for.

    nbytes, nbytes_before: size of the new files and of the old tensors; None skips their comparison.
    is_named: whether the user named the output or gave --force, so that existing files may be replaced.
    """
    from localllm.quantizing import quantize as service

    if not is_named:
        service.require_absent(plan.list_paths(target))
    if nbytes_before is not None and nbytes > MAX_GROWTH * nbytes_before and not force:
        sizes = f"{format_size(nbytes)}, from {format_size(nbytes_before)}"
        raise UsageError(f"the new file would be larger than the old one: {sizes}; use --force to write it anyway")


def make_size_limit(size: str | None, bits: float | None, is_calibrated: bool) -> "Callable[[QuantizePlan], int]":
    """Return a function from a type's plan to the size limit in bytes. Raises UsageError."""
    from localllm.quantizing.mixed_precision.plan import parse_bits, parse_size

    if not is_calibrated:
        raise UsageError("--size and --bpw choose formats by measuring the model, which needs --calibrate")
    if size is not None and bits is not None:
        raise UsageError("give either --size or --bpw, not both")
    if size is not None:
        return parse_size(size)
    assert bits is not None
    return parse_bits(bits)


def plan_by_sensitivity(
    source: "Source",
    request: "QuantizeRequest",
    size: "Callable[[QuantizePlan], int]",
    path: str | None,
    threads: int | None,
    force: bool,
    progress: "PhaseTimer",
) -> tuple["Source", "QuantizeRequest"]:
    """Choose formats by measured sensitivity; return source and request with them.

    The formats also go to the file `path`. They apply to the returned source, whose scales are folded. The progress is
    shown on stderr.
    """
    from localllm.files.safe_file import resolve_target
    from localllm.quantizing.mixed_precision.plan import choose_formats, require_possible, set_formats, write_formats
    from localllm.quantizing.scale_folding import fold_scales
    from localllm.system.cpu import count_usable_cores

    if path is not None and os.path.lexists(resolve_target(path, tuple(source.files))) and not force:
        raise UsageError(f"{path}: the file exists; overwrite it with --force, or leave out --size to use its formats")
    require_possible(source, request, size)
    line, count = progress.line, threads or count_usable_cores()
    with line, progress.progress as show:
        on_scales, on_formats, on_check = (partial(show, stage) for stage in BY_SENSITIVITY)
        source = fold_scales(source, request, count, on_scales, opening.make_compile_progress(line))
        progress.add("scales")
        choice = choose_formats(source, request, size, count, on_formats, on_check, opening.make_compile_progress(line))
    progress.add("choosing formats")
    predicted = f"{choice.predicted:.4f} ({choice.usual:.4f} with the formats of {request.recipe.name})"
    say(f"localllm: predicted KL divergence {predicted}; measured on held-out texts, weights only: {choice.found:.4f}")
    if path is not None:
        write_formats(path, choice.formats)
    return source, set_formats(request, choice.formats)


def parse_positional(arguments: tuple[str, ...]) -> tuple[str, str | None, "Recipe", int | None]:
    """Return IN, OUT, TYPE and threads from IN [OUT] TYPE [THREADS], as in llama-quantize. Raises UsageError."""
    from localllm.quantizing.quantize import find_type

    for index in (1, 2):
        recipe = find_type(arguments[index]) if index < len(arguments) else None
        extra = arguments[index + 1 :]
        if recipe and (not extra or (len(extra) == 1 and extra[0].isdecimal())):
            threads = int(extra[0]) if extra else None
            return arguments[0], arguments[1] if index == 2 else None, recipe, threads
    if len(arguments) in (2, 3):
        hint = suggest_type(arguments[-1]) or "localllm quantize --help lists the types"
        raise UsageError(f"unknown quantization type {to_one_line(arguments[-1])}; {hint}")
    raise UsageError(f"expected 2 or 3 arguments, IN [OUT] TYPE, found {len(arguments)}")


def split_calibration_files(arguments: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the arguments after TYPE, which is the second or third word; the rest are calibration files."""
    from localllm.quantizing.quantize import find_type

    ends = [index + 1 for index in (1, 2) if index < len(arguments) and find_type(arguments[index])]
    end = ends[0] if ends else len(arguments)
    return arguments[:end], arguments[end:]


def suggest_type(text: str) -> str:
    """Return "did you mean ...?" with the most similar type, or ""."""
    squeezed = {name.replace("_", ""): name for name in RECIPES}
    match = squeezed.get(re.sub("[^A-Z0-9]", "", text.upper()))
    return f"did you mean {match}?" if match else suggest_name(text.upper(), [*RECIPES])


def require_writable(
    plan: "QuantizePlan", target: str, request: "QuantizeRequest", threads: int | None, force: bool
) -> None:
    """Raise UsageError or LocalllmError if the files cannot be written."""
    from localllm.quantizing.quantize import check_output
    from localllm.services.outputs import is_model, require_replaceable

    if threads is not None and not 1 <= threads <= 1024:
        raise UsageError(f"threads must be from 1 to 1024, not {threads}")
    check_output(plan, target, request)
    for path in plan.list_paths(target):
        require_replaceable(path, is_model, "a model", force)


class PhaseTimer:
    """Measures the phases of a command, and shows their progress.

    Attributes:
        line: shows what happens before a stage, such as compiling.  progress: shows all stages.
    """

    def __init__(self, calibration: CalibrationFlags) -> None:
        self.line = ProgressLine()
        shares = SIZED if calibration.has_size else CALIBRATED if calibration.calibrate else {ENCODING: 1.0}
        self.progress = StageProgress(shares, self.line)
        self._start = self._last = perf_counter()
        self._parts = dict[str, float]()

    def add(self, name: str) -> None:
        """Add the time since the last call to a phase."""
        now = perf_counter()
        self._parts[name] = self._parts.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._parts.items())
        return f"{perf_counter() - self._start:.1f} s{f' ({parts})' if len(self._parts) > 1 else ''}"


def write_files(
    plan: "QuantizePlan", target: str, request: "QuantizeRequest", threads: int | None, progress: PhaseTimer
) -> None:
    """Write the files, with a progress bar on a terminal, and print the result."""
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.quantizing import quantize as service
    from localllm.system.cpu import count_usable_cores

    line, warnings = progress.line, list[str]()
    end_on_bus_error(plan.source.path)
    with line, progress.progress as show:
        service.quantize_model(
            plan, target, request, threads or count_usable_cores(), partial(show_weights, show, plan.weights),
            opening.make_compile_progress(line), warnings, show,
        )  # fmt: skip
    opening.warn(warnings)
    progress.add("encoding")
    paths = plan.list_paths(target)
    name = to_one_line(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    write(f"{name}: {format_summary(plan)}, {progress}\n")


def show_weights(show: "OnStage", total: int, done: int, name: str) -> None:
    """Show the count of quantized weights, if that is the only stage."""
    show(ENCODING, done, total, name)


def format_summary(plan: "QuantizePlan") -> str:
    original = f"before: {format_size(plan.nbytes_before)}, {plan.bits_per_weight_before:.2f}"
    return f"{format_size(plan.nbytes)}, {plan.bits_per_weight:.2f} bits per weight ({original})"


def format_plan(plan: "QuantizePlan", target: str) -> str:
    """Format the plan as text: one line per tensor, the totals, the output files, and the free disk space."""
    import shutil

    rows = [
        (
            to_one_line(job.tensor.name),
            " x ".join(map(str, job.tensor.shape)),
            job.tensor.format.name,
            job.format.name + (" (fallback)" if job.is_fallback else ""),
            format_size(job.output.nbytes),
        )
        for job in plan.jobs
    ]
    free = shutil.disk_usage(os.path.dirname(os.path.realpath(target))).free
    lines = [
        *format_table(("tensor", "shape", "from", "to", "size"), rows),
        "",
        f"{'weights':<14}{format_count(plan.weights)} in {len(plan.jobs)} tensors",
        f"{'output':<14}{', '.join(map(to_one_line, plan.list_paths(target)))}",
        f"{'size':<14}{format_summary(plan)}",
        f"{'free disk':<14}{format_size(free)}",
    ]
    return "\n".join(lines) + "\n"
