"""quantize --types and --ladder: files of several types, and a table of them."""

import json
import os
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from localllm.cli import open_model as opening
from localllm.cli.terminal.output import ProgressLine, say, write
from localllm.cli.terminal.quantize_progress import CALIBRATED, Progress, progress_of
from localllm.cli.terminal.render import columns, one_line, size
from localllm.errors import UsageError
from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.cli.options.quantizing import LadderGroup
    from localllm.files.gguf.tensor_source import Source
    from localllm.quantizing.ladder import Result, Rung
    from localllm.quantizing.plan import QuantizeRequest

ADDED = 1.02  # times as large is not larger: metadata may grow


@frozen
class LadderOptions:
    """Describe the files to make and the options for them."""

    path: str  # of the input
    mmproj: bool
    threads: int | None
    force: bool
    dry_run: bool


def make_ladder(
    source: "Source", requests: "Sequence[QuantizeRequest]", out: str | None, shown: "LadderGroup", how: LadderOptions
) -> None:
    """Make a file for each request, and print a table of them. Raises UsageError, ModelError, LocalllmError."""
    from localllm.quantizing.ladder import Rung, output_for
    from localllm.quantizing.plan import make_plan
    from localllm.services.outputs import is_model, require_kind

    rungs, warnings = list[Rung](), dict[str, None]()
    for request in requests:
        plan, name = make_plan(source, request), request.recipe.name
        warnings |= {line if line in source.warnings else f"{name}: {line}": None for line in plan.warnings}
        rungs.append(Rung(request.recipe, plan, plan.paths(output_for(how.path, out, request.recipe, how.mmproj))))
    for line in warnings:
        say(f"localllm: warning: {line}")
    for path in (path for rung in rungs for path in rung.paths):
        require_kind(path, is_model, "a model", how.force)
    if not how.force and not os.path.isdir(how.path):
        require_smaller(rungs, rungs[0].plan.nbytes_before)
    if how.dry_run:
        write(planned(rungs))
        return
    start, is_named = perf_counter(), out is not None or how.force
    make = one_by_one if requests[0].texts is not None else together
    results = make(rungs, requests, how, is_named)
    write(report(results, perf_counter() - start, shown))


def together(
    rungs: "Sequence[Rung]", requests: "Sequence[QuantizeRequest]", how: LadderOptions, is_named: bool
) -> "list[Result]":
    """Make all files in one pass. is_named: files that are there may be replaced."""
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.kernels.dequantize_rows import Widener
    from localllm.quantizing.ladder import Ladder
    from localllm.quantizing.quantize import require_absent
    from localllm.system.cpu import usable_cores

    plan, imatrix, line = rungs[0].plan, requests[0].imatrix, ProgressLine()
    inputs = [*plan.source.files, *([imatrix] if imatrix else [])]
    end_on_bus_error(plan.source.path)
    try:
        with progress_of(plan.weights, line) as on_progress:
            ladder = Ladder(rungs, inputs, how.threads or usable_cores(), on_progress, requests[0].strict)
            if not is_named and not ladder.resumes:
                require_absent([path for rung in rungs for path in rung.paths])
            ladder.check()
            results = ladder.run(Widener({job.tensor.format for job in plan.jobs}, opening.compiling(line)))
    finally:
        line.clear()
    opening.warn(ladder.warnings)
    return results


def one_by_one(
    rungs: "Sequence[Rung]", requests: "Sequence[QuantizeRequest]", how: LadderOptions, is_named: bool
) -> "list[Result]":
    """Calibrate and make each file, without those that an earlier run has finished."""
    from localllm.quantizing.ladder import Rung, Sequel
    from localllm.quantizing.quantize import require_absent, run
    from localllm.system.cpu import usable_cores

    by_name, line = {request.recipe.name: request for request in requests}, ProgressLine()

    def make(rung: Rung) -> None:
        warnings = list[str]()
        if not is_named:
            require_absent(rung.paths)
        say(f"localllm: {rung.recipe.name}: calibrating")
        with Progress(CALIBRATED, line) as show:
            threads, compiling = how.threads or usable_cores(), opening.compiling(line)
            run(rung.plan, rung.paths[0], by_name[rung.recipe.name], threads, ignore, compiling, warnings, show)
        opening.warn(warnings)

    try:
        return Sequel(rungs, requests[0].texts or ()).run(make)
    finally:
        line.clear()


def ignore(done: int, name: str) -> None:
    """Show nothing: stages are shown."""


def planned(rungs: "Sequence[Rung]") -> str:
    """Format what would be made."""
    rows = []
    for rung in rungs:
        names = ", ".join(map(one_line, rung.paths))
        rows.append((rung.recipe.name, size(rung.plan.nbytes), f"{rung.plan.bits_per_weight:.2f}", names))
    lines = columns(("type", "size", "bits per weight", "files"), rows, "<>><")
    return "\n".join([*lines, "", f"total  {size(sum(rung.plan.nbytes for rung in rungs))}"]) + "\n"


def report(results: "Sequence[Result]", seconds: float, shown: "LadderGroup") -> str:
    """Format the table of files: a text with the lines of sha256sum, JSON, or Markdown."""
    from localllm.quantizing.ladder_report import markdown, report_rows

    if shown.as_json:
        return json.dumps({"seconds": round(seconds, 2), "types": report_rows(results)}, ensure_ascii=False) + "\n"
    if shown.as_markdown:
        return markdown(results)
    rows = [
        (
            result.recipe.name,
            size(sum(file.nbytes for file in result.files)),
            f"{result.plan.bits_per_weight:.2f}",
            f"{result.seconds:.1f} s",
        )
        for result in results
    ]
    sums = [f"{file.sha256}  {one_line(file.path)}" for result in results for file in result.files]
    lines = columns(("type", "size", "bits per weight", "time"), rows, "<>>>")
    return "\n".join([*lines, "", f"total  {seconds:.1f} s", "", *sums]) + "\n"


def require_smaller(rungs: "Sequence[Rung]", before: int) -> None:
    """Raise UsageError for a type whose file would be larger than the input, of `before` bytes."""
    for rung in rungs:
        if rung.plan.nbytes > ADDED * before:
            sizes = f"{size(rung.plan.nbytes)}, from {size(before)}"
            problem = f"the new file would be larger than the old one: {sizes}; --force writes it anyway"
            raise UsageError(f"{rung.recipe.name}: {problem}")
