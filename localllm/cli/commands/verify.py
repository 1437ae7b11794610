"""localllm verify: check a model file's weights and checksums."""

from typing import TYPE_CHECKING

from localllm.cli import open_model as opening
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import ProgressLine, say, to_json_line, write, write_paths
from localllm.cli.terminal.render import format_checksum, format_columns, format_count, to_one_line
from localllm.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localllm.quantizing.verify import Verification


def verify(
    model: str = argument("MODEL", "GGUF file or model name.", offer_models),
    against: str | None = option(
        "--against", "Compare with the original: a GGUF file or a checkpoint folder.", "SOURCE"
    ),
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Verify a model file: every weight, scales and checksums.

    All tensors are read. Weights that are not finite end with exit code 3; anything that is merely odd gets a one-line
    warning. With --against, the relative error of each tensor is measured, and the table shows the median and the worst
    for each format.

    Examples:
      localllm verify model-Q4_K_M.gguf
      localllm verify model-Q4_K_M.gguf --against model-F16.gguf
      localllm verify model-Q8_0.gguf --against checkpoint/ --json
    """
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.quantizing import verify as service
    from localllm.quantizing.quantize import open_source
    from localllm.system.cpu import count_usable_cores

    path, line = resolve_model_path(model), ProgressLine()
    source = open_source(against) if against is not None else None
    end_on_bus_error(path)
    with line:
        verification = service.verify_file(
            path,
            source,
            threads or count_usable_cores(),
            lambda done, of, name: line.show(f"verifying: {100 * done // of} %, {to_one_line(name)}"),
            opening.make_compile_progress(line),
        )
    for sentence in verification.warnings:
        say(f"localllm: warning: {sentence}")
    if as_json:
        write(format_json(verification))
    else:
        write_paths(format_text(verification))
    if verification.problems:
        raise ModelError(
            f"{path}: {verification.problems[0].removeprefix(f'{path}: ')}{format_more(verification.problems)}"
        )


def format_more(lines: "Sequence[str]") -> str:
    return f" (and {len(lines) - 1} more problems)" if len(lines) > 1 else ""


def format_text(verification: "Verification") -> str:
    """Format a table of the weight formats, and the checksums as sha256sum does."""
    rows = verification.summarize_formats()
    has_errors = any("error" in row for row in rows)
    header = ("format", "tensors", "weights", *(("error", "worst", "of") if has_errors else ()))
    cells = [
        (
            row["format"],
            str(row["tensors"]),
            format_count(row["weights"]),
            *(
                (f"{row['error']:.2g}", f"{row['worst']:.2g}", to_one_line(row["worst_tensor"]))
                if "error" in row
                else ()
            ),
            *(("", "", "") if has_errors and "error" not in row else ()),
        )
        for row in rows
    ]
    lines = format_columns(header, cells, "<>>>><"[: len(header)])
    sums = [format_checksum(file["sha256"], file["path"]) for file in verification.files]
    return "\n".join([*lines, "", *sums]) + "\n"


def format_json(verification: "Verification") -> str:
    tensors = [
        {
            "name": tensor.name,
            "format": tensor.format,
            "shape": list(tensor.shape),
            "problem": tensor.problem,
            "error": tensor.error,
            "largest": tensor.largest,
        }
        for tensor in verification.tensors
    ]
    facts = {
        "valid": not verification.problems, "problems": list(verification.problems), "odd": list(verification.warnings),
        "formats": verification.summarize_formats(), "files": list(verification.files), "tensors": tensors,
    }  # fmt: skip
    return to_json_line(facts)
