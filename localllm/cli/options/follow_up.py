"""The options of run for code blocks, for questions that follow an answer, and for named prompts."""

from typing import Annotated

import typer

from localllm.cli.options.offers import offer_prompts
from localllm.cli.parameters import TYPED_ONLY, group


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
