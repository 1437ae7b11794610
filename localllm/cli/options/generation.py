"""Build GenerationOptions from the options of the command line."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from localllm.cli.open_model import is_draft_model
from localllm.cli.options.shared import Answers, GenerationGroup
from localllm.cli.terminal.output import say
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.generation.generate import GenerationOptions


CUTS = "head", "tail", "middle", "relevant", "chunks"  # of --on-overflow: what `run` does itself


def generation_options(on_progress: Callable[[int, int], None] | None, choices: Answers) -> "GenerationOptions":
    """Build and check GenerationOptions; `on_progress` is called during the prefill. Raises UsageError.

    They have no draft model until `with_draft_model`.
    """
    from localllm.generation.generate import GenerationOptions
    from localllm.generation.sampling.options import SamplingOptions

    sampling = SamplingOptions(**choices.drawing())
    limit, stop = None if choices.max_tokens == -1 else choices.max_tokens, tuple(choices.stop or ())
    more = {**choices.thoughts.as_fields(), "constraint": choices.shape.constraint()}
    more["ban"] = tuple(choices.ban or ())
    if not isinstance(choices, GenerationGroup):
        return GenerationOptions(limit, stop, sampling, on_progress, "auto", **more)
    keep = choices.keep
    if keep is not None and choices.on_overflow != "shift":
        say("localllm: --keep has no effect without --on-overflow shift")
        keep = None
    kind = "auto" if is_draft_model(choices.speculate) else choices.speculate
    how = None if choices.on_overflow in CUTS else choices.on_overflow
    return GenerationOptions(limit, stop, sampling, on_progress, kind, how, keep, **more)


def system_message(text: str | None, file: str | None) -> str | None:
    """Return the system message of -sys or of -sysf's file. Raises UsageError."""
    if file is None:
        return text
    if text is not None:
        raise UsageError("give either -sys or -sysf, not both")
    from localllm.files.text_file import read_text

    return read_text(file)
