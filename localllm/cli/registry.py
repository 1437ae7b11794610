"""What commands there are, and what each takes."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Annotated

from localllm.cli.argv import did_you_mean
from localllm.cli.compat import meant_command, no_command
from localllm.cli.parameters import Parameter, option, parameters
from localllm.errors import UsageError

COMMANDS = (
    "run", "chat", "map", "serve", "embed", "rerank", "inspect", "tokenize", "quantize", "imatrix", "perplexity",
    "bench", "warmup", "cache", "replay", "list", "pull", "rm", "fit", "sessions", "config", "completion", "help",
)  # fmt: skip
COMPLETE = "_LOCALLLM_COMPLETE"  # in the environment: a shell asks, see completion.py
HELP = Parameter("help", Annotated[bool, option("-h", "--help", help="Show this message and exit.")], False)


def function(name: str) -> Callable[..., None]:
    return getattr(import_module(f"localllm.cli.commands.{name}"), name)


def summary(name: str) -> str:
    """The first line of a command's docstring."""
    return (function(name).__doc__ or "").partition("\n")[0]


@cache
def params_of(name: str) -> list[Parameter]:
    """A command's parameters. Raises UsageError if there is no such command."""
    require_command(name)
    return [*parameters(function(name)), HELP]


def require_command(name: str) -> None:
    """Raise UsageError, with what may have been meant, if there is no such command."""
    if name in COMMANDS:
        return
    if name.endswith(".gguf"):
        raise UsageError(f"there is no command {name}; to talk with that model: localllm chat {name}")
    if reason := no_command(name):
        raise UsageError(f"there is no command {name}: {reason}")
    harmless = [each for each in COMMANDS if each != "rm"]  # nobody should remove by a slip of the finger
    other = meant_command(name)
    meant = f"did you mean {other}?" if other else did_you_mean(name, harmless) or "localllm --help lists them"
    raise UsageError(f"there is no command {name}; {meant}")
