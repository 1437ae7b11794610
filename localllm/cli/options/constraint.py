"""Options for constrained output and for reasoning."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from localllm.cli.options.sampling import flags_of
from localllm.cli.parameters import group, number_or_default
from localllm.cli.terminal.output import say
from localllm.errors import CutError, UsageError
from localllm.generation.options import OPTIONS

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.generate import GenerationOptions
    from localllm.services.remote.dialect import Form

HideThinking = Annotated[
    bool, typer.Option("--hide-thinking", "--hidethinking", help="Do not show the model's thinking on the terminal.")
]


@group
class Shape:
    """Constrained output. Thinking is not constrained."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            "-j",
            "--json-schema",
            "-jf",
            "--json-schema-file",
            metavar="FILE|TEXT",
            help="Constrain the answer to JSON that matches this schema.",
        ),
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(
            "--grammar", "--grammar-file", metavar="FILE|TEXT", help="Constrain the answer to this GBNF grammar."
        ),
    ] = None
    regex: Annotated[
        str | None, typer.Option("--regex", metavar="TEXT", help="Constrain the answer to this regular expression.")
    ] = None

    json_whitespace: Annotated[
        bool,
        typer.Option("--json-whitespace", help="Allow spaces and line breaks between the parts of JSON."),
    ] = False
    additional_properties: Annotated[
        bool,
        typer.Option(
            "--additional-properties", help="Allow properties that the schema does not list, unless it forbids them."
        ),
    ] = False

    @property
    def forms(self) -> list[str]:
        """Return which forms are given; an answer can have one."""
        return [name for name in ("json_schema", "grammar", "regex") if getattr(self, name) is not None]

    def constraint(self) -> "Constraint | None":
        """Build the constraint from the options. Raises UsageError."""
        if not self.forms:
            return None
        from localllm.generation.constraints.constraint import constraint_of

        if len(self.forms) > 1:
            names = (f"--{name.replace('_', '-')}" for name in self.forms)
            raise UsageError(f"{' and '.join(names)} cannot be combined")
        schema, grammar = text_of("json_schema", self.json_schema, "{"), text_of("grammar", self.grammar, "::=")
        return constraint_of(schema, grammar, self.regex, self.json_whitespace, self.additional_properties)

    def form(self) -> "Form":
        """Return the output format for a server. Raises UsageError."""
        from localllm.services.remote.dialect import Form

        schema = text_of("json_schema", self.json_schema, "{")
        grammar = text_of("grammar", self.grammar, "::=")
        parsed = None if schema is None else json.loads(schema)
        return Form(parsed, grammar, self.regex, self.additional_properties)


def text_of(name: str, argument: str | None, sign: str) -> str | None:
    """Return an option's text if it contains the sign, else the text of the file that it names. Raises UsageError."""
    if argument is None or sign in argument:
        return argument
    if not argument.strip():
        raise UsageError(f"{name} is empty: give a text or a file name")
    try:
        return Path(argument).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"cannot read {argument}: {reason}") from None


@group
class Thoughts:
    """Thinking and chat template variables."""

    think: Annotated[Literal["auto", "on", "off", "low", "medium", "high"], flags_of(OPTIONS["think"])] = "auto"
    think_budget: Annotated[int | None, flags_of(OPTIONS["think_budget"], number_or_default("-1"))] = None
    template_var: Annotated[
        list[str] | None,
        typer.Option(
            "--template-var",
            "--chat-template-kwargs",
            metavar="NAME=VALUE",
            help="Set a chat template variable; VALUE may be JSON. A JSON object sets several.  [repeatable]",
        ),
    ] = None

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of GenerationOptions. Raises UsageError."""
        variables = dict[str, object]()
        if self.template_var:
            from localllm.services.hub.name_values import variables_of  # seldom needed

            for text in self.template_var:
                variables |= variables_of(text)
        return {"think": self.think, "think_budget": self.think_budget, "template_variables": variables}


def require_whole(options: "GenerationOptions", finish_reasons: Iterable[str]) -> None:
    """Raise CutError if an answer was cut off before it matched its constraint."""
    if options.constraint and "length" in finish_reasons:
        raise CutError(f"the answer was cut off before it was {options.constraint.promise}; raise -n or the context")


def tell_cut(options: "GenerationOptions", finish_reasons: Iterable[str]) -> None:
    """Warn if an answer was cut off before it matched its constraint."""
    try:
        require_whole(options, finish_reasons)
    except CutError as error:
        say(f"localllm: warning: {error}")
