"""Options that only `localllm run` has."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from localllm.cli.options import shared
from localllm.cli.options.choices import Choices
from localllm.cli.options.offers import offer_prompts
from localllm.cli.options.shared import HideThinking
from localllm.cli.parameters import group, option
from localllm.cli.prompt_input import Encoding, Prompt, content, require_decodable, text_of
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model


@group
class PromptGroup:
    """Prompt."""

    prompt: Prompt = None
    file: list[str] | None = option(
        "-f --file",
        "File, or folder of text files, to add to the prompt; - is stdin.  [repeatable; more may follow]",
        "FILE",
    )
    binary_file: str | None = option(
        "-bf --binary-file", "File to add to the prompt with its final line break.", "FILE"
    )
    system: shared.System = None
    system_file: shared.SystemFile = None
    chat_template: shared.ChatTemplate = None
    encoding: Encoding = None
    no_stdin: bool = option("--no-stdin", "Do not read stdin.")
    no_names: bool = option("--no-names", "Do not put file names before the texts of several files.")
    prompt_first: bool = option("--prompt-first", "Put the prompt before files and stdin, not after them.")
    raw: bool = option("--raw", "Continue the prompt as plain text, without the chat template.")
    no_cache: shared.NoCache = False


@group
class OutputGroup:
    """Output."""

    choices_given: Choices = None
    as_json: shared.AsJson = False
    stats: bool = option("--stats", "Print timings to stderr.")
    receipt: str | None = option(
        "--receipt", "Write a receipt, so that `localllm replay` can reproduce the answer.", "FILE"
    )
    force: shared.Force = False
    hide_thinking: HideThinking = False
    n: int = option(
        "--n", "Sample N answers, most likely first; -n is the length in tokens.  [default: 1]", "N", default=1
    )
    beams: int = option("--beams", "Beam search with N beams.  [default: 0, off]", "N", default=0)


@group
class FollowUpGroup:
    """Code blocks and follow-up questions."""

    extract: bool = option(
        "-x --extract", "Print only the first code block of the answer, without its fences, and stop there."
    )
    extract_last: bool = option("--extract-last", "Print only the last code block of the answer.")
    latest: bool = option(
        "--continue", "Follow up on the last answer of `run`, with its model if none is given.", typed_only=True
    )
    session: str | None = option(
        "--session",
        "Continue or start this session (see `localllm sessions`); the answer is saved in it.",
        "NAME",
        typed_only=True,
    )


@group
class TemplateGroup:
    """Named prompts."""

    template: str | None = option(
        "--template",
        "Named prompt, with its options: see `localllm templates`.",
        "NAME",
        autocompletion=offer_prompts,
        typed_only=True,
    )
    field: list[str] | None = option(
        "--field", "Set a field of the template.  [repeatable]", "NAME=TEXT", typed_only=True
    )


@group
class InfillGroup:
    """Fill in the middle, for code models."""

    suffix: str | None = option(
        "--suffix", "Text after the gap; the prompt is then the text before it, verbatim.", "TEXT", typed_only=True
    )
    suffix_file: str | None = option("-sf --suffix-file", "File with the text after the gap.", "FILE", typed_only=True)

    def text(self, encoding: str | None, most_bytes: Callable[[], int]) -> str | None:
        """Return the text after the gap, or None without these options. Raises UsageError, ContextError.

        most_bytes: see read_prompt.
        """
        if self.suffix_file is None:
            return None if self.suffix is None else require_decodable(self.suffix, "--suffix")
        if self.suffix is not None:
            raise UsageError("give either --suffix or -sf, not both")
        return text_of(content(self.suffix_file, most_bytes, encoding), self.suffix_file, encoding, whole=True)


def encode_infill(model: "Model", prefix: str, suffix: str) -> list[int]:
    """Return the prompt's token ids. Raises UsageError for a model without fill-in-the-middle tokens."""
    from localllm.generation.infill import Infill

    return Infill(prefix, suffix).encode(model.tokenizer)
