"""localllm launch: start a coding agent that uses a localllm server."""

import os
import shlex
import shutil

from localllm.cli.options.offers import make_offer
from localllm.cli.options.one_shot import KEY, read_api_key
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import say
from localllm.errors import LocalllmError, UsageError
from localllm.services.agents import AGENTS, NO_KEY, AgentSettings, find_provider
from localllm.system.processes import replace_process


def launch(
    agent: str = argument("AGENT", f"One of {', '.join(AGENTS)}.", make_offer(tuple(AGENTS))),
    arguments: list[str] | None = argument("[-- ARGUMENT...]", "Arguments for the agent itself."),
    *,
    model: str | None = option("--model", "Let the agent use this model.  [default: the server's first]", "NAME"),
    url: str = option(
        "--url",
        "Connect to the server at this address.  [default: http://127.0.0.1:11435]",
        "URL",
        default="http://127.0.0.1:11435",
    ),
    api_key_file: str | None = option(
        "--api-key-file", f"Read the server's API key from FILE.  [default: ${KEY}]", "FILE"
    ),
    dry_run: bool = option("--dry-run", "Only show the settings; do not start the agent."),
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
        raise UsageError(f"unknown agent {agent}; available: {', '.join(AGENTS)}")
    agent_settings = AGENTS[agent]
    key = read_api_key(api_key_file)
    settings = agent_settings.configure(find_provider(url, key, model))
    command = [agent_settings.program, *settings.arguments, *(arguments or ())]
    print_settings(settings, command, key or NO_KEY)
    if dry_run:
        return
    program = shutil.which(agent_settings.program)
    if program is None:
        raise LocalllmError(f"{agent_settings.program} is not installed; install it with: {agent_settings.install}")
    replace_process([program, *command[1:]], {**os.environ, **settings.variables})


def print_settings(settings: AgentSettings, command: list[str], key: str) -> None:
    """Print the variables and the command to stderr in shell syntax.

    A secret key is replaced by a reference to its variable.
    """
    for name, value in settings.variables.items():
        say(f"{name}={shlex.quote(value.replace(key, f'${KEY}') if key != NO_KEY else value)}")
    say(shlex.join(command))
