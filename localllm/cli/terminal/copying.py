"""Prints the plan and progress of commands that copy tensors."""

import os
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from localllm.cli.terminal.output import ProgressLine, exit_on_signals, write
from localllm.cli.terminal.render import one_line, size

if TYPE_CHECKING:
    from localllm.files.gguf.file import GGUFFile
    from localllm.quantizing.rewrite import NewFile


def copy_files(source: "GGUFFile", files: "Sequence[NewFile]", force: bool) -> None:
    """Write the files, with a progress line, and print their names and sizes. Raises UsageError, LocalllmError."""
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.quantizing.rewrite import write_files
    from localllm.services.outputs import is_model, require_kind

    exit_on_signals()
    for file in files:
        require_kind(file.path, is_model, "a model", force)
    start, line, total = perf_counter(), ProgressLine(), sum(file.nbytes(source) for file in files)
    end_on_bus_error(source.path)
    try:
        write_files(source, files, lambda done, name: line.show(f"copying: {100 * done // total} %, {one_line(name)}"))
    finally:
        line.clear()
    more_files = f" and {len(files) - 1} more" if len(files) > 1 else ""
    write(f"{one_line(files[0].path)}{more_files}: {size(total)}, {perf_counter() - start:.1f} s\n")


def describe_plan(source: "GGUFFile", files: "Sequence[NewFile]") -> str:
    """Format the files that would be written."""
    return "".join(
        f"{one_line(os.fspath(file.path))}: {len(file.names)} tensors, {size(file.nbytes(source))}\n" for file in files
    )
