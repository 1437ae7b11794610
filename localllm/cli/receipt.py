"""Writes the receipts of `run`, which `replay` reads."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from localllm.cli.terminal import output as terminal
from localllm.cli.terminal.output import ProgressLine

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.generate import GenerationOptions
    from localllm.services.receipts import Choices
    from localllm.text.messages import Message


def prepare_options(
    path: str, options: "GenerationOptions", model: "Model", inputs: Iterable[str | None], force: bool
) -> "GenerationOptions":
    """Return options that reproduce the answer. Raises UsageError for a receipt that cannot be written.

    inputs: files with the prompt; the receipt must not replace them, nor a model's file, nor, unless forced, any file
    that is not a receipt.
    """
    from localllm.files.safe_file import resolve_target
    from localllm.services import remote_receipts as remote
    from localllm.services.outputs import is_receipt, require_kind
    from localllm.services.receipts import fully_specified, plain_options

    resolve_target(path, (*(model.files if model.file else ()), *(name for name in inputs if name is not None)))
    require_kind(path, is_receipt, "a receipt", force)
    options = fully_specified(model, options) if model.file else remote.fully_specified(options)
    plain_options(options)
    return options


def keep(
    path: str,
    model: "Model",
    prompt: "str | list[Message]",
    options: "GenerationOptions",
    choices: "Choices",
    result: dict[str, object],
) -> None:
    """Write the receipt; choices: n, beams, speculate and chat_template."""
    from localllm.services import receipts
    from localllm.services import remote_receipts as remote

    if model.file is None:
        remote_model: object = model
        return receipts.write(path, remote.make(remote_model, prompt, options, choices["n"], result))
    terminal.end_output()  # hashing the model may take a while
    line = ProgressLine()
    try:
        receipts.write(path, receipts.make(model, prompt, options, choices, result, hashing(line)))
    finally:
        line.clear()


def hashing(line: ProgressLine) -> Callable[[int, int], None]:
    """Make a callback that shows the progress of hashing the model's files on the line."""
    return lambda done, total: line.show(f"hashing the model, once: {100 * done // total} %")
