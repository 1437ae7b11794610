"""localllm help: what --help tells, of the program or of a command."""

from typing import Annotated

from localllm.cli.command import argument
from localllm.cli.terminal import write


def help(command: Annotated[str | None, argument("[COMMAND]", "Which one.  [default: what there is]")] = None) -> None:
    """Explain a command.

    Examples:
      localllm help
      localllm help run
    """
    from localllm.cli.app import context_of

    context = context_of(command)
    write(context.get_help() + "\n")
