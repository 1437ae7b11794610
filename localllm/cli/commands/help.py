"""localllm help: show the help of the program or of a command."""

from typing import Annotated

import typer

from localllm.cli.options.offers import offer_commands


def help(
    command: Annotated[
        str | None,
        typer.Argument(
            metavar="[COMMAND]", autocompletion=offer_commands, help="Command to explain.  [default: list all commands]"
        ),
    ] = None,
) -> None:
    """Show the help of a command.

    Examples:
      localllm help
      localllm help run
    """
    from localllm.cli.app import context_of

    typer.echo(context_of(command).get_help())
