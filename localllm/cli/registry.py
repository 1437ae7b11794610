"""The commands and their parameters."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from keyword import iskeyword
from typing import TypeVar, cast

import typer
from typer.core import TyperCommand

from localllm.cli.argv import suggest_name
from localllm.cli.compat import explain_missing_command, suggest_command
from localllm.cli.parameters import Parameter, convert_parameters, flatten
from localllm.errors import UsageError

COMMANDS = (
    "run", "chat", "map", "serve", "launch", "search", "ask", "embed", "rerank", "inspect", "tokenize", "quantize",
    "imatrix", "control-vector", "split", "merge", "edit", "verify", "perplexity", "eval", "bench", "warmup", "cache",
    "replay", "list", "pull", "import", "create", "cp", "rm", "stop", "fit", "sessions", "templates", "config",
    "completion", "help",
)  # fmt: skip
COMPLETE = "_LOCALLLM_COMPLETE"  # variable that shells set to request completions, see completion.py
HELP_NAMES = ["-h", "--help"]
LIST_COMMANDS = "localllm --help lists the commands"
C = TypeVar("C", bound=TyperCommand)


def load_function(name: str) -> Callable[..., None]:
    module = name.replace("-", "_") + "_" * iskeyword(name)
    command: Callable[..., None] = getattr(import_module(f"localllm.cli.commands.{module}"), module)
    return command


def get_summary(name: str) -> str:
    return (load_function(name).__doc__ or "").partition("\n")[0]


def build_command(function: Callable[..., None], kind: type[C]) -> C:
    """Convert a function with annotated parameters to a Typer command of class `kind`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(function.__name__.rstrip("_"), cls=kind, context_settings={"help_option_names": HELP_NAMES})(
        flatten(function)
    )
    return cast(C, typer.main.get_command(app))


@cache
def list_params(name: str) -> list[Parameter]:
    require_command(name)
    command = build_command(load_function(name), TyperCommand)
    return convert_parameters(command.get_params(typer.Context(command, help_option_names=HELP_NAMES)))


def require_command(name: str) -> None:
    if name in COMMANDS:
        return
    if name.endswith(".gguf"):
        raise UsageError(f"unknown command {name}; to chat with that model: localllm chat {name}")
    if " " in name.strip():
        raise UsageError(f"a question needs a command: localllm run MODEL {name!r}")
    if reason := explain_missing_command(name):
        raise UsageError(f"unknown command {name}: {reason}")
    harmless = [each for each in COMMANDS if each != "rm"]  # never suggest it for a typo
    suggestion = suggest_command(name)
    hint = f"did you mean {suggestion}?" if suggestion else suggest_name(name, harmless) or LIST_COMMANDS
    raise UsageError(f"unknown command {name}; {hint}")
