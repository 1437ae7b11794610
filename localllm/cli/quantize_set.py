"""Implement quantize --types and --ladder: write files of several types, and print a table of them."""

import os
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from localllm.cli import open_model as opening
from localllm.cli.terminal.output import ProgressLine, say, to_json_line, write, write_paths
from localllm.cli.terminal.quantize_progress import CALIBRATED, StageProgress, show_weight_progress
from localllm.cli.terminal.render import format_checksum, format_columns, format_size, to_one_line
from localllm.errors import UsageError
from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.cli.options.quantizing import TypeSetFlags
    from localllm.files.gguf.tensor_source import Source
    from localllm.files.logits_file import LogitsFile
    from localllm.quantizing.plan import QuantizeRequest
    from localllm.quantizing.quantize_set import Divergence, SetMember, TypeResult

MAX_GROWTH = 1.02  # a file may exceed the input by this factor, since metadata may grow


@frozen
class QuantizeSetOptions:
    path: str  # path of the input
    mmproj: bool
    threads: int | None
    force: bool
    dry_run: bool


def make_files(
    source: "Source",
    requests: "Sequence[QuantizeRequest]",
    out: str | None,
    group: "TypeSetFlags",
    options: QuantizeSetOptions,
) -> None:
    """Write a file for each request, and print a table of them. Raises UsageError, ModelError, LocalllmError."""
    from localllm.quantizing.plan import make_plan
    from localllm.quantizing.quantize_set import SetMember, derive_set_output
    from localllm.services.outputs import is_model, require_replaceable

    base = None if group.base is None else open_base(group.base, source)
    members, warnings = list[SetMember](), dict[str, None]()
    for request in requests:
        plan, name = make_plan(source, request), request.recipe.name
        warnings |= {line if line in source.warnings else f"{name}: {line}": None for line in plan.warnings}
        members.append(
            SetMember(
                request.recipe,
                plan,
                plan.list_paths(derive_set_output(options.path, out, request.recipe, options.mmproj)),
            )
        )
    for line in warnings:
        say(f"localllm: warning: {line}")
    for path in (path for member in members for path in member.paths):
        require_replaceable(path, is_model, "a model", options.force)
    if not options.force and not os.path.isdir(options.path):
        require_smaller(members, members[0].plan.nbytes_before)
    if options.dry_run:
        write(format_plan(members))
        return
    start, is_named = perf_counter(), out is not None or options.force
    make = write_one_by_one if requests[0].texts is not None else write_together
    results = make(members, requests, options, is_named)
    seconds = perf_counter() - start
    write_paths(
        format_report(results, seconds, group, measure_divergences(results, base, options.threads) if base else {})
    )


def write_together(
    members: "Sequence[SetMember]", requests: "Sequence[QuantizeRequest]", options: QuantizeSetOptions, is_named: bool
) -> "list[TypeResult]":
    """Write all files in one pass; is_named: the user named them, so that existing files may be replaced."""
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.kernels.dequantize_rows import RowDequantizer
    from localllm.quantizing.quantize import require_absent
    from localllm.quantizing.quantize_set import QuantizeSet
    from localllm.system.cpu import count_usable_cores

    plan, imatrix, line = members[0].plan, requests[0].imatrix, ProgressLine()
    inputs = [*plan.source.files, *([imatrix] if imatrix else [])]
    end_on_bus_error(plan.source.path)
    with line, show_weight_progress(plan.weights, line) as on_progress:
        files = QuantizeSet(members, inputs, options.threads or count_usable_cores(), on_progress, requests[0].strict)
        if not is_named and not files.resumes:
            require_absent([path for member in members for path in member.paths])
        files.check()
        results = files.run(
            RowDequantizer({job.tensor.format for job in plan.jobs}, opening.make_compile_progress(line))
        )
    opening.warn(files.warnings)
    return results


def write_one_by_one(
    members: "Sequence[SetMember]", requests: "Sequence[QuantizeRequest]", options: QuantizeSetOptions, is_named: bool
) -> "list[TypeResult]":
    """Calibrate and write each file that no earlier run has finished."""
    from localllm.quantizing.quantize import quantize_model, require_absent
    from localllm.quantizing.quantize_set import SequentialSet, SetMember
    from localllm.system.cpu import count_usable_cores

    by_name, line = {request.recipe.name: request for request in requests}, ProgressLine()

    def write_member(member: SetMember) -> None:
        warnings = list[str]()
        if not is_named:
            require_absent(member.paths)
        say(f"localllm: {member.recipe.name}: calibrating")
        with StageProgress(CALIBRATED, line) as show:
            threads, compiling = options.threads or count_usable_cores(), opening.make_compile_progress(line)
            quantize_model(
                member.plan,
                member.paths[0],
                by_name[member.recipe.name],
                threads,
                ignore_progress,
                compiling,
                warnings,
                show,
            )
        opening.warn(warnings)

    with line:
        return SequentialSet(members, requests[0].texts or ()).run(write_member)


def ignore_progress(done: int, name: str) -> None:
    """Ignore the progress within a stage."""


def open_base(path: str, source: "Source") -> "LogitsFile":
    from localllm.files.logits_file import LogitsFile

    base, shapes = LogitsFile.open(path), {tensor.name: tensor.shape for tensor in source.tensors}
    rows = next((shapes[name][0] for name in ("output.weight", "token_embd.weight") if name in shapes), None)
    if rows != base.vocab_size:
        sizes = f"their vocabulary has {base.vocab_size} tokens, the model's {rows or 'none'}"
        hint = "save this model's with `localllm perplexity --save-logits`"
        raise UsageError(f"{to_one_line(path)}: the logits are from another model: {sizes}; {hint}")
    return base


def measure_divergences(
    results: "Sequence[TypeResult]", base: "LogitsFile", threads: int | None
) -> "dict[str, Divergence]":
    """Measure the divergence of each file from the base logits, by type. Raises PerplexityRunner's errors."""
    from localllm.quantizing.quantize_set import Divergence
    from localllm.services.evaluation.perplexity import PerplexityRunner
    from localllm.services.evaluation.scores import compute_mean_with_error

    line, divergences = ProgressLine(), dict[str, Divergence]()
    with line:
        for result in results:
            name, (count, size) = result.recipe.name, base.chunks.shape
            with PerplexityRunner(result.files[0].path, size, threads, opening.make_compile_progress(line)) as reader:
                for comparison in reader.compare(base):
                    line.show(f"{name}: measuring the divergence, {comparison.chunks} of {count} chunks")
            kld, error = compute_mean_with_error(comparison.kld)
            divergences[name] = Divergence(kld, error, compute_mean_with_error(comparison.same_top)[0])
    return divergences


def format_plan(members: "Sequence[SetMember]") -> str:
    rows = []
    for member in members:
        names = ", ".join(map(to_one_line, member.paths))
        rows.append((member.recipe.name, format_size(member.plan.nbytes), f"{member.plan.bits_per_weight:.2f}", names))
    lines = format_columns(("type", "size", "bits per weight", "files"), rows, "<>><")
    return "\n".join([*lines, "", f"total  {format_size(sum(member.plan.nbytes for member in members))}"]) + "\n"


def format_report(
    results: "Sequence[TypeResult]", seconds: float, group: "TypeSetFlags", measured: "Mapping[str, Divergence]"
) -> str:
    """Format the table of files as text with lines of sha256sum, JSON or Markdown.

    measured: divergences by type.
    """
    from localllm.quantizing.quantize_set import build_report, format_markdown

    if group.as_json:
        rows = build_report(results, measured)
        return to_json_line({"seconds": round(seconds, 2), "types": rows})
    if group.as_markdown:
        return format_markdown(results, measured)
    sums = [format_checksum(file.sha256, file.path) for result in results for file in result.files]
    return "\n".join([*format_table(results, measured), "", f"total  {seconds:.1f} s", "", *sums]) + "\n"


def format_table(results: "Sequence[TypeResult]", measured: "Mapping[str, Divergence]") -> list[str]:
    titles: tuple[str, ...] = ("type", "size", "bits per weight", "time")
    rows = list[tuple[str, ...]]()
    for result in results:
        name, nbytes = result.recipe.name, sum(file.nbytes for file in result.files)
        row = (name, format_size(nbytes), f"{result.plan.bits_per_weight:.2f}", f"{result.seconds:.1f} s")
        rows.append((*row, *(measured[name].cells if measured else ())))
    if measured:
        titles = (*titles, "KL divergence", "same top token")
    return format_columns(titles, rows, "<" + ">" * (len(titles) - 1))


def require_smaller(members: "Sequence[SetMember]", nbytes_before: int) -> None:
    """Raise UsageError for a type whose file would exceed the input's `nbytes_before`."""
    for member in members:
        if member.plan.nbytes > MAX_GROWTH * nbytes_before:
            sizes = f"{format_size(member.plan.nbytes)}, from {format_size(nbytes_before)}"
            problem = f"the new file would be larger than the old one: {sizes}; use --force to write it anyway"
            raise UsageError(f"{member.recipe.name}: {problem}")
