"""Typer's commands with other help, other conversions, more ways to name an option, and defaults from elsewhere."""

from typing import Any

from typer.core import TyperArgument, TyperCommand

from localllm.cli.conversion import Conversion
from localllm.cli.defaults import chosen_before
from localllm.cli.help_text import columns, command_help, finished
from localllm.cli.words import as_typed, read_words
from localllm.errors import UsageError

# What a context has under these names: the options that were typed, with their values; where others have theirs from.
TYPED, SOURCES = "localllm.typed", "localllm.sources"
ESCAPED = {"prompt", "system", "stop", "dry_sequence_breakers"}  # parameters in which -e has escape sequences read


class Light:
    """What commands and the group of them have in common: their help is drawn and their texts are converted without
    Rich and Pydantic.
    """

    def get_help(self, ctx: Any) -> str:
        return finished(self.plain_help(ctx, columns()))

    def plain_help(self, ctx: Any, width: int) -> str:
        usage = " ".join([ctx.command_path, *self.collect_usage_pieces(ctx)])  # type: ignore[attr-defined]
        return command_help(usage, self.help or "", self.get_params(ctx), self.behind(), width)  # type: ignore[attr-defined]

    def behind(self) -> list[tuple[str, str]]:
        """Commands that can stand behind this, and what they do."""
        return []

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param._runtime_param = param._runtime_param or Conversion(param)
        return params


class Command(Light, TyperCommand):
    """A command whose options may go without their value, if its name is in brackets ([ADDRESS])."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """[OPTIONS] and the arguments' names, in which brackets say what may be left out."""
        return ["[OPTIONS]", *(param.metavar or "" for param in self.params if isinstance(param, TyperArgument))]

    def invoke(self, ctx: Any) -> Any:
        """Errors say options as they were typed."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise UsageError(as_typed(str(error), self.params, ctx.meta[TYPED], ctx.meta[SOURCES])) from error

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        name, params = self.name or "", self.get_params(ctx)
        words = read_words(args, params, name)
        ctx.meta[TYPED] = words.options
        model = next(iter(words.placed()), None) if any(param.name == "model" for param in params) else None
        chosen = {} if "help" in words.given else chosen_before(name, params, model, words.given)
        ctx.default_map = {name: each.value for name, each in chosen.items()}
        ctx.meta[SOURCES] = {name: each.source for name, each in chosen.items()}
        rest = super().parse_args(ctx, words.for_typer())
        if ctx.params.get("escape"):
            self._unescape(ctx.params)
        return rest

    def _unescape(self, values: dict[str, Any]) -> None:
        """Texts with their escape sequences read."""
        from localllm.cli.escapes import unescaped

        for name in ESCAPED & values.keys():
            if (value := values[name]) is not None:
                values[name] = unescaped(value) if isinstance(value, str) else tuple(map(unescaped, value))
