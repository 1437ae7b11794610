"""The program with all its commands; importing it must be fast, since `localllm --help` does."""

from collections.abc import Iterator, MutableMapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from localllm.cli.command import Command, ParameterMixin
from localllm.cli.help_text import colour_help, format_help, get_help_width
from localllm.cli.registry import COMMANDS, HELP_NAMES, build_command, get_summary, load_function, require_command
from localllm.cli.terminal.output import write
from localllm.errors import UsageError


class LazyCommands(MutableMapping[str, Any]):
    """The commands by name, imported on first use: importing all takes 150 ms."""

    def __init__(self) -> None:
        self.made: dict[str, TyperCommand] = {}

    def __getitem__(self, name: str) -> TyperCommand:
        if name not in self.made:
            if name not in COMMANDS:
                raise KeyError(name)
            self.made[name] = build_command(load_function(name), Command)
        return self.made[name]

    def __setitem__(self, name: str, command: TyperCommand) -> None:
        self.made[name] = command

    def __delitem__(self, name: str) -> None:
        del self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class CommandGroup(ParameterMixin, TyperGroup):  # type: ignore[misc]
    """The Typer group of all commands, with the options before a command."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands = LazyCommands()

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return colour_help(self.format_plain_help(ctx, get_help_width()))

    def format_plain_help(self, ctx: typer.Context, width: int) -> str:
        """Format the program's help without colours, wrapped to `width` columns."""
        params: list[Any] = self.get_params(ctx)
        rows = [(name, get_summary(name)) for name in COMMANDS]
        usage = f"{ctx.command_path} [OPTIONS] COMMAND [ARGS]..."
        return format_help(usage, self.help or "", params, rows, width)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        own_names = {name for each in self.get_params(ctx) for name in each.opts}
        if args and args[0].startswith("-") and args[0] not in own_names:
            version = "; for the version, use --version" if args in (["-v"], ["-V"]) else ""
            raise UsageError(f"{args[0]} needs a command before it, as in `localllm run MODEL {args[0]} ...`{version}")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        require_command(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": HELP_NAMES},
)


@app.callback()
def run_without_command(
    context: typer.Context, version: Annotated[bool, typer.Option("-V", "--version", help="Show the version.")] = False
) -> None:
    """Large language models from GGUF files, on your own computer.

    \b
    Exit codes: 0 success, 1 other errors, 2 usage error, 3 model unreadable or
    invalid, 4 prompt too long for the context, 5 not enough memory, 6 some
    records failed, 7 answer cut off before it began or matched its schema or
    grammar, 130 interrupted.

    Examples:
      localllm chat
      localllm run model.gguf -p "Why is the sky blue?"
      localllm help run
    """
    if version:
        import localllm

        write(f"{localllm.__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


program: Any = typer.main.get_command(app)  # of the class Commands


def make_context(name: str | None = None) -> typer.Context:
    """Return the Typer context of a command, or of the program. Raises UsageError for an unknown command."""
    parent = typer.Context(program, info_name="localllm", help_option_names=HELP_NAMES)
    if name is None:
        return parent
    _, command, _ = program.resolve_command(parent, [name])
    return typer.Context(command, parent=parent, info_name=name)


def execute(arguments: list[str]) -> int:
    """Run the command line and return the exit code.

    Errors are raised, since Typer's own handling would hide Ctrl-C.
    """
    try:
        with program.make_context("localllm", arguments) as context:
            program.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0
