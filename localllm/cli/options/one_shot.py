"""The options of `localllm run` that other commands do not have."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.options import shared
from localllm.cli.options.choices import Choices
from localllm.cli.options.constraint import HideThinking
from localllm.cli.options.offers import offer_prompts
from localllm.cli.parameters import TYPED_ONLY, group
from localllm.cli.prompt_input import Encoding, Prompt, content, require_decodable, text_of
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model


@group
class PromptGroup:
    """Prompt."""

    prompt: Prompt = None
    file: Annotated[
        list[str] | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="File, or folder of text files, to add to the prompt; - is stdin.  [repeatable; more may follow]",
        ),
    ] = None
    binary_file: Annotated[
        str | None,
        typer.Option(
            "-bf", "--binary-file", metavar="FILE", help="File to add to the prompt with its final line break."
        ),
    ] = None
    system: shared.System = None
    system_file: shared.SystemFile = None
    chat_template: shared.ChatTemplate = None
    encoding: Encoding = None
    no_stdin: Annotated[bool, typer.Option("--no-stdin", help="Do not read stdin.")] = False
    no_names: Annotated[
        bool, typer.Option("--no-names", help="Do not put file names before the texts of several files.")
    ] = False
    prompt_first: Annotated[
        bool, typer.Option("--prompt-first", help="Put the prompt before files and stdin, not after them.")
    ] = False
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")
    ] = False
    no_cache: shared.NoCache = False


@group
class OutputGroup:
    """Output."""

    choices_given: Choices = None
    as_json: shared.AsJson = False
    stats: Annotated[bool, typer.Option("--stats", help="Print timings to stderr.")] = False
    receipt: Annotated[
        str | None,
        typer.Option(
            "--receipt",
            metavar="FILE",
            help="Write a receipt, with which `localllm replay` can generate the answer again.",
        ),
    ] = None
    force: shared.Force = False
    hide_thinking: HideThinking = False
    n: Annotated[
        int,
        typer.Option(
            "--n", metavar="N", help="Sample N answers, most likely first; -n is the length in tokens.  [default: 1]"
        ),
    ] = 1
    beams: Annotated[int, typer.Option("--beams", metavar="N", help="Beam search with N beams.  [default: 0, off]")] = 0


@group
class FollowUpGroup:
    """Code blocks and follow-up questions."""

    extract: Annotated[
        bool,
        typer.Option(
            "-x", "--extract", help="Print only the first code block of the answer, without its fences, and stop there."
        ),
    ] = False
    extract_last: Annotated[
        bool, typer.Option("--extract-last", help="Print only the last code block of the answer.")
    ] = False
    latest: Annotated[
        bool,
        typer.Option("--continue", help="Follow up on the last answer of `run`, with its model if none is given."),
        TYPED_ONLY,
    ] = False
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="NAME",
            help="Continue or start this session (see `localllm sessions`); the answer is saved in it.",
        ),
        TYPED_ONLY,
    ] = None


@group
class TemplateGroup:
    """Named prompts."""

    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="NAME",
            autocompletion=offer_prompts,
            help="Named prompt, with its options: see `localllm templates`.",
        ),
        TYPED_ONLY,
    ] = None
    field: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="NAME=TEXT", help="Set a field of the template.  [repeatable]"),
        TYPED_ONLY,
    ] = None


@group
class InfillGroup:
    """Fill in the middle, for code models."""

    suffix: Annotated[
        str | None,
        typer.Option(
            "--suffix", metavar="TEXT", help="Text after the gap; the prompt is then the text before it, verbatim."
        ),
        TYPED_ONLY,
    ] = None
    suffix_file: Annotated[
        str | None,
        typer.Option("-sf", "--suffix-file", metavar="FILE", help="File with the text after the gap."),
        TYPED_ONLY,
    ] = None

    def text(self, encoding: str | None, most_bytes: Callable[[], int]) -> str | None:
        """Return the text after the gap, None without these options. Raises UsageError, ContextError.

        most_bytes: see read_prompt.
        """
        if self.suffix_file is None:
            return None if self.suffix is None else require_decodable(self.suffix, "--suffix")
        if self.suffix is not None:
            raise UsageError("give either --suffix or -sf, not both")
        return text_of(content(self.suffix_file, most_bytes, encoding), self.suffix_file, encoding, whole=True)


def encode_infill(model: "Model", prefix: str, suffix: str) -> list[int]:
    """Return the prompt's token ids. Raises UsageError for a model that cannot fill in."""
    from localllm.generation.infill import Infill

    return Infill(prefix, suffix).encode(model.tokenizer)
