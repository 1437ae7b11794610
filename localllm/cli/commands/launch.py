"""localllm launch: start a coding agent that uses a localllm server."""

import os
import shlex
import shutil
from typing import Annotated

import typer

from localllm.cli.options.endpoint import KEY, key_of
from localllm.cli.options.offers import one_of
from localllm.cli.terminal.output import say
from localllm.errors import LocalllmError, UsageError
from localllm.services.agents import AGENTS, NO_KEY, Settings, find_provider
from localllm.system.processes import replace_process


def launch(
    agent: Annotated[
        str,
        typer.Argument(metavar="AGENT", help=f"One of {', '.join(AGENTS)}.", autocompletion=one_of(tuple(AGENTS))),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Arguments for the agent itself.")
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model to use.  [default: the server's first]")
    ] = None,
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Address of the server.  [default: http://127.0.0.1:11435]")
    ] = "http://127.0.0.1:11435",
    api_key_file: Annotated[
        str | None,
        typer.Option("--api-key-file", metavar="FILE", help=f"File with the server's API key.  [default: ${KEY}]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the settings; do not start the agent.")] = False,
) -> None:
    """Start a coding agent that uses a model of `localllm serve`.

    The agent gets its settings by environment variables and arguments, which are shown first; no file is changed. The
    server must be running. Agents send long prompts: serve the model with a context of 32768 tokens or more.

    Examples:
      localllm launch claude
      localllm launch codex --model qwen3-4b -- exec "run the tests"
      localllm launch opencode --dry-run
    """
    if agent not in AGENTS:
        raise UsageError(f"no settings for the agent {agent}; there are some for {', '.join(AGENTS)}")
    agent_settings = AGENTS[agent]
    key = key_of(api_key_file)
    settings = agent_settings.configure(find_provider(url, key, model))
    command = [agent_settings.program, *settings.arguments, *(arguments or ())]
    show(settings, command, key or NO_KEY)
    if dry_run:
        return
    program = shutil.which(agent_settings.program)
    if program is None:
        raise LocalllmError(f"{agent_settings.program} is not installed; install it by: {agent_settings.install}")
    replace_process([program, *command[1:]], {**os.environ, **settings.variables})


def show(settings: Settings, command: list[str], key: str) -> None:
    """Print the variables and the command to stderr in shell syntax; a secret key only by its variable's name."""
    for name, value in settings.variables.items():
        say(f"{name}={shlex.quote(value.replace(key, f'${KEY}') if key != NO_KEY else value)}")
    say(shlex.join(command))
