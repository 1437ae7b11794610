"""Defaults of options from the environment and config.toml.

The variable of an option is LOCALLLM_ and its long name in capitals: LOCALLLM_THREADS=4; LOCALLLM_MODEL is for MODEL.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from localllm.cli.argv import suggest_name
from localllm.cli.parameters import PREFIX, Parameter, SourcedValue
from localllm.cli.registry import COMMANDS, list_params
from localllm.errors import UsageError
from localllm.files.settings import Settings, load_settings

# Variables that set no option.
OTHER_VARIABLES = {f"{PREFIX}{name}" for name in ("API_KEY", "CACHE", "DEBUG", "MODELS", "PLAIN_START", "PREFIX_GB")}


def read_config_defaults(
    command: str, params: Sequence[Parameter], model: str | None, is_remote: bool = False
) -> dict[str, SourcedValue]:
    """Read a command's defaults from config.toml and Ollama's store, by parameter name.

    model: the name that was typed; None: use the default model.  is_remote: the model is on a server. Raises
    UsageError, which names the file and the line.
    """
    by_key = {key: param for param in params for key in param.keys}
    if not by_key:
        return {}
    settings = load_settings()
    model = model or get_default_model(by_key, settings, command)
    matches = {
        by_key[each.key].name: each
        for each in iter_entries(settings, command, model, is_remote)
        if is_option_of_command(each, by_key, settings)
    }
    values = {
        name: SourcedValue(each.convert(by_key[each.key], settings), each.describe_source(settings))
        for name, each in matches.items()
    }
    if command != "serve":
        return values
    from localllm.cli.ollama_variables import read_ollama_defaults  # other commands ignore them

    return read_ollama_defaults(params) | values


def load_defaults(command: str, params: Sequence[Parameter], model: str | None) -> dict[str, SourcedValue]:
    """Return a command's defaults from the environment and config.toml; the environment has priority.

    Raises UsageError, which names the variable, or the file and the line.
    """
    from_variables = ((param, param.find_variable()) for param in params)
    return read_config_defaults(command, params, model) | {
        param.name: SourcedValue(read_variable(name, param), name) for param, name in from_variables if name
    }


class SettingEntry(NamedTuple):
    """A setting from config.toml, or from a model in Ollama's store.

    Attributes:
        tables: the table, and its name in [command.NAME] and [model.NAME]; () for Ollama's store.
        written: the key as spelled in the file.  elsewhere: the source of a setting outside config.toml.
    """

    tables: tuple[str, ...]
    written: str
    value: object
    elsewhere: str = ""

    @property
    def key(self) -> str:
        return self.written.replace("_", "-")

    def make_error(self, settings: Settings, message: str) -> UsageError:
        if self.elsewhere:
            return UsageError(f"{self.elsewhere}: {message}")
        return settings.make_error(message, *self.tables, self.written)

    def describe_source(self, settings: Settings) -> str:
        return self.elsewhere or f"{settings.path.name}, line {settings.find_line(*self.tables, self.written)}"

    def convert(self, param: Parameter, settings: Settings) -> object:
        """Convert the entry's value. Raises UsageError."""
        try:
            return param.convert(to_typed_value(self.value, param))
        except ValueError as error:
            raise self.make_error(settings, f"{self.written}: {error}") from None


def iter_entries(
    settings: Settings, command: str, model: str | None, is_remote: bool = False
) -> Iterator[SettingEntry]:
    """Yield the entries for a command and a model, the most specific last; is_remote: see read_config_defaults."""
    yield from (SettingEntry(("defaults",), key, value) for key, value in settings.defaults.items())
    yield from (
        SettingEntry(("command", command), key, value) for key, value in settings.command.get(command, {}).items()
    )
    if model:
        yield from iter_name_entries(settings, model, is_remote)


def iter_name_entries(settings: Settings, model: str, is_remote: bool) -> Iterator[SettingEntry]:
    """Yield the entries of a model's name, the most specific last.

    Raises ModelError for a damaged layer of Ollama's store.
    """
    from localllm.services.hub.name_settings import find_stored_model, iter_settings

    for each in iter_settings(settings, model, None if is_remote else find_stored_model(model)):
        if each.table:
            yield SettingEntry(("model", each.table), each.written, each.value)
        else:
            yield SettingEntry((), each.written, each.value, each.source)


def get_default_model(by_key: Mapping[str, Parameter], settings: Settings, command: str) -> str | None:
    """Return the default MODEL from the environment or config.toml, or None."""
    if "model" not in by_key:
        return None
    configured = settings.command.get(command, {}).get("model", settings.defaults.get("model"))
    return os.environ.get(f"{PREFIX}MODEL") or (configured if isinstance(configured, str) else None)


def is_option_of_command(entry: SettingEntry, by_key: Mapping[str, Parameter], settings: Settings) -> bool:
    """Return whether a setting is an option of this command. Raises UsageError if no command has that option."""
    if entry.key in by_key:
        return True
    if entry.tables[:1] == ("command",):
        hint = f"localllm {entry.tables[1]} --help lists the options"
        raise entry.make_error(settings, f"{entry.tables[1]} has no option --{entry.key}; {hint}")
    if not any(entry.key in param.keys for command in COMMANDS for param in list_params(command)):
        raise entry.make_error(settings, f"no command has an option --{entry.key}")
    return False


def to_typed_value(value: object, param: Parameter) -> str | list[str] | bool:
    """Convert a TOML value to what the command line would have: strings, or a bool for a switch. Raises ValueError."""
    if param.is_switch or isinstance(value, bool):
        if param.is_switch and isinstance(value, bool):
            return value
        raise ValueError(
            f"must be true or false, not {value!r}"
            if param.is_switch
            else f"must be a string or a number, not {str(value).lower()}"
        )
    if param.takes_several:
        return [to_string(each) for each in (value if isinstance(value, list) else [value])]
    return to_string(value)


def to_string(value: object) -> str:
    """Convert a TOML string or number to a string. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be a string or a number, not {value!r}")
    return str(value)


def read_variable(variable: str, param: Parameter) -> object:
    """Convert an environment variable's value. Raises UsageError."""
    text = os.environ[variable]
    try:
        return param.convert([text] if param.takes_several else text)
    except ValueError as error:
        raise UsageError(f"{variable}: {error}") from None


def iter_unknown_settings(command: str, params: Sequence[Parameter], model: str | None) -> Iterator[str]:
    """Yield a warning for each unknown config key or LOCALLLM_ variable.

    This command's settings are skipped, since they have been converted. Importing all commands takes 30 ms.
    """
    variables = {variable for param in params for variable in param.variables} | OTHER_VARIABLES
    for variable in sorted({name for name in os.environ if name.startswith(PREFIX)} - variables):
        names = {name for param in iter_all_params() for name in param.variables} | OTHER_VARIABLES
        if variable not in names:
            yield f"unknown environment variable {variable}; {suggest_name(variable, sorted(names))}".rstrip("; ")
    settings, keys = load_settings(), {key for param in params for key in param.keys}
    for each in iter_all_entries(settings):
        about = each.tables[1] if each.tables[0] == "command" else ""
        if about == command or (not about and each.key in keys):
            continue
        try:
            require_valid_entry(each, settings, about)
        except UsageError as error:
            yield str(error)


def iter_all_entries(settings: Settings) -> Iterator[SettingEntry]:
    yield from (SettingEntry(("defaults",), key, value) for key, value in settings.defaults.items())
    for table, inner in (("command", settings.command), ("model", settings.model)):
        yield from (
            SettingEntry((table, name), key, value) for name, keys in inner.items() for key, value in keys.items()
        )


def require_valid_entry(entry: SettingEntry, settings: Settings, command: str) -> None:
    """Raise UsageError for an entry that is unknown or invalid for `command`; "" means all commands."""
    if command and command not in COMMANDS:
        raise settings.make_error(f"unknown command {command}; localllm --help lists them", "command", command)
    params = list_params(command) if command else iter_all_params()
    match = next((param for param in params if entry.key in param.keys), None)
    if match is None:
        is_option_of_command(entry, {}, settings)
        raise entry.make_error(settings, f"no command has an option --{entry.key}")
    entry.convert(match, settings)


def iter_all_params() -> "Iterator[Parameter]":
    return (param for name in COMMANDS for param in list_params(name))


def list_conflicts(name: str) -> tuple[str, ...]:
    """Return the parameters that conflict with a typed one, whose defaults are therefore ignored."""
    from localllm.cli.options.conflicts import ALTERNATIVES, DISABLED_BY_RAW

    if name == "beams":
        from localllm.generation.sampling.options import OPTIONS

        return (*OPTIONS, "letters")
    if name == "raw":
        return DISABLED_BY_RAW
    return tuple(other for names in ALTERNATIVES if name in names for other in names if other != name)
