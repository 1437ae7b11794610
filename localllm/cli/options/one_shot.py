"""The options of run that say what is asked, and how its answers are given."""

from typing import Annotated

import typer

from localllm.cli.options import shared
from localllm.cli.options.choices import Choices
from localllm.cli.options.constraint import HideThinking
from localllm.cli.parameters import group
from localllm.cli.prompt_input import Encoding, Prompt


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
