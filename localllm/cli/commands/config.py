"""localllm config: show the default options and their sources."""

import os
from collections.abc import Iterator
from typing import Any

from localllm.cli.defaults import load_defaults
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_config_arguments, offer_models
from localllm.cli.parameters import Parameter, SourcedValue, argument
from localllm.cli.terminal.output import write
from localllm.cli.terminal.render import format_columns, format_size, get_terminal_width, to_one_line
from localllm.files.settings import CACHE_SIZE, Settings, get_config_path, load_settings

Row = tuple[str, str, str]


def config(
    command: str | None = argument(
        "[COMMAND]", "Show all options of this command; `path` prints the path of config.toml.", offer_config_arguments
    ),
    model: str | None = argument(
        "[MODEL]", "Show the options for this model.", offer_models, also=options.NAMED, typed_only=True
    ),
) -> None:
    """Show the defaults of options and where they come from.

    An option that is not on the command line takes its value from the environment, else from config.toml (the section
    of the model, of the command, then [defaults]), else it has the program's default. Without COMMAND, `config` shows
    everything that config.toml and the environment set, and checks the whole file.

    \b
    cache_gb = 2                    # size limit of the prefix cache
    [aliases]
    small = "~/models/small.gguf"   # another name for a model
    [defaults]                      # options by their long names
    threads = 4
    [command.run]                   # for one command
    temp = 0.2
    [model.small]                   # for one model
    context = 8192

    Every option also has an environment variable: LOCALLLM_THREADS=4, LOCALLLM_MODEL=small.

    Examples:
      localllm config
      localllm config run small
      LOCALLLM_TEMP=0 localllm config run
    """
    if command == "path":
        return write(f"{get_config_path()}\n")
    settings = load_settings()
    rows = [*list_general(settings), *(list_command_options(command, model) if command else list_all_options(settings))]
    write("".join(f"{line}\n" for line in format_columns(rows[0], rows[1:], "<<<", get_terminal_width())))


def list_general(settings: Settings) -> Iterator[Row]:
    from localllm.files.cache import prefix_files
    from localllm.files.models_folder import find_models_folder

    yield "config file", str(settings.path), "" if settings.text else "does not exist"
    variable, default = (
        prefix_files.SIZE_VARIABLE,
        "" if settings.cache_gb is None else format_location(settings, CACHE_SIZE),
    )
    yield (
        "prompts kept",
        format_size(prefix_files.get_size_limit()),
        variable if os.environ.get(variable) else default or "default",
    )
    folder, chosen_by = find_models_folder()
    yield "models", str(folder), chosen_by or "default"
    for name, target in settings.aliases.items():
        yield f"alias {name}", target, format_location(settings, "aliases", name)


def format_location(settings: Settings, *keys: str) -> str:
    return f"{settings.path.name}, line {settings.find_line(*keys)}"


def list_command_options(command: str, model: str | None) -> Iterator[Row]:
    from localllm.cli.registry import list_params

    params = list_params(command)
    defaults = load_defaults(command, params, model)
    for param in params:
        if keys := param.keys:
            name = "MODEL" if keys == ["model"] else f"--{keys[0]}"
            value = SourcedValue(model, "typed") if name == "MODEL" and model else defaults.get(param.name)
            yield (
                (name, format_value(value.value), value.source)
                if value
                else (name, get_documented_default(param), "default")
            )


def list_all_options(settings: Settings) -> Iterator[Row]:
    from localllm.cli.registry import COMMANDS, list_params

    for command in settings.command:
        if command not in COMMANDS:
            raise settings.make_error(f"unknown command {command}; localllm --help lists them", "command", command)
    users: dict[Row, list[str]] = {}
    for command in COMMANDS:
        params = list_params(command)
        takes_model = any(param.name == "model" for param in params)
        for model in (None, *settings.model) if takes_model else (None,):
            for param in params:
                if default := load_defaults(command, params, model).get(param.name):
                    row = f"--{param.keys[0]}", format_value(default.value), default.source
                    users.setdefault(row, []).append(command)
    for (name, value, source), commands in users.items():
        yield name, value, f"{source}: {', '.join(dict.fromkeys(commands))}"


def get_documented_default(param: Parameter) -> str:
    """Return the default that the help text names."""
    shown_default = (param.help or "").partition("[default: ")[2].partition("]")[0]
    return shown_default or ("off" if param.is_switch else "-")


def format_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple) and any(isinstance(each, list | tuple) for each in value):
        return ", ".join(map(format_scaled_files, value))
    return to_one_line(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def format_scaled_files(pairs: Any) -> str:
    """Format one or several files with their scales as typed: FILE:SCALE,..."""
    rows = pairs if isinstance(pairs, list) else [pairs]
    return ",".join(to_one_line(f"{path}:{scale:g}") for path, scale in rows)
