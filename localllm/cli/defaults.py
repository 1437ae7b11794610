"""What holds for an option that was not typed: the environment's word, or config.toml's, or the program's default.

LOCALLLM_ and an option's long name in capitals is the variable: LOCALLLM_THREADS=4, LOCALLLM_MODEL for MODEL.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from localllm.errors import UsageError
from localllm.files.settings import Settings, settings

PREFIX = "LOCALLLM_"


class Chosen(NamedTuple):
    """A value, of the option's type, and where it is from."""

    value: Any
    source: str


def chosen_before(command: str, params: Sequence[Any], model: str | None, typed: set[str]) -> dict[str, Chosen]:
    """What the environment and the file say about a command's parameters, by their names; the model may be unknown yet.

    typed: parameters that were given on the command line, which silence those that would not go with them.
    Raises UsageError, which names the variable, or the file and the line.
    """
    known = {name: param for param in params for name in names(param)}
    if not known:
        return {}
    held = settings()
    model = model or model_by_default(known, held, command)
    found = {known[each.key].name: each for each in entries(held, command, model) if is_known(each, known, held)}
    chosen = {name: Chosen(each.converted(known[each.key], held), each.source(held)) for name, each in found.items()}
    for param in params:
        if variable := next((name for name in variables(param) if os.environ.get(name)), None):
            chosen[param.name] = Chosen(from_environment(variable, param), variable)
    silent = {other for name in typed for other in silenced(name)} - typed
    return {name: value for name, value in chosen.items() if name not in silent}


class Entry(NamedTuple):
    """A line of the file: the table, its name in [command.NAME] and [model.NAME], and the key as it is written."""

    tables: tuple[str, ...]
    written: str
    value: Any

    @property
    def key(self) -> str:
        return self.written.replace("_", "-")

    def error(self, held: Settings, message: str) -> UsageError:
        return held.error(message, *self.tables, self.written)

    def source(self, held: Settings) -> str:
        return f"{held.path.name}, line {held.line(*self.tables, self.written)}"

    def converted(self, param: Any, held: Settings) -> Any:
        """Raises UsageError."""
        try:
            return converted(param, texts_of(self.value, param))
        except ValueError as error:
            raise self.error(held, f"{self.written}: {error}") from None


def entries(held: Settings, command: str, model: str | None) -> Iterator[Entry]:
    """What the file says about a command and a model, the most special last."""
    yield from (Entry(("defaults",), key, value) for key, value in held.defaults.items())
    yield from (Entry(("command", command), key, value) for key, value in held.command.get(command, {}).items())
    for name in tables_of(held, model) if model else ():
        yield from (Entry(("model", name), key, value) for key, value in held.model[name].items())


def tables_of(held: Settings, model: str) -> list[str]:
    """The names under which the file speaks of a model: as it was typed, last; what that stands for; its aliases."""
    same = {model, held.aliases.get(model, model)}
    found = [name for name in held.model if os.path.expanduser(held.aliases.get(name, name)) in same or name == model]
    return sorted(found, key=lambda name: name == model)


def model_by_default(known: Mapping[str, Any], held: Settings, command: str) -> str | None:
    """MODEL when none was typed, if something says it."""
    if "model" not in known:
        return None
    told = held.command.get(command, {}).get("model", held.defaults.get("model"))
    return os.environ.get(f"{PREFIX}MODEL") or (told if isinstance(told, str) else None)


def names(param: Any) -> list[str]:
    """A parameter's names in the file: the long ones of an option; MODEL is the only argument that has one."""
    if param.param_type_name == "argument":
        return ["model"] if param.name == "model" else []
    return [] if param.is_eager else [name[2:] for name in param.opts if name.startswith("--")]


def variables(param: Any) -> list[str]:
    return [PREFIX + name.upper().replace("-", "_") for name in names(param)]


def is_known(entry: Entry, known: Mapping[str, Any], held: Settings) -> bool:
    """Whether it is about this command. Raises UsageError if it is about none."""
    if entry.key in known:
        return True
    if entry.tables[0] == "command":
        raise entry.error(held, f"{entry.tables[1]} has no option --{entry.key}")
    from localllm.cli.app import COMMANDS, params_of

    if not any(entry.key in names(param) for command in COMMANDS for param in params_of(command)):
        raise entry.error(held, f"no command has an option --{entry.key}")
    return False


def texts_of(value: Any, param: Any) -> Any:
    """A value of TOML as the text that would have been typed, or texts; a flag's is a bool. Raises ValueError."""
    is_flag = getattr(param, "is_flag", False)
    if is_flag or isinstance(value, bool):
        if is_flag and isinstance(value, bool):
            return value
        raise ValueError("should be true or false" if is_flag else "should have a value, not true or false")
    if getattr(param, "multiple", False):
        return [as_text(each) for each in (value if isinstance(value, list) else [value])]
    return as_text(value)


def as_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("should be a text or a number")
    return str(value)


def from_environment(variable: str, param: Any) -> Any:
    """Raises UsageError."""
    text = os.environ[variable]
    try:
        return converted(param, [text] if getattr(param, "multiple", False) else text)
    except ValueError as error:
        raise UsageError(f"{variable}: {error}") from None


def converted(param: Any, value: Any) -> Any:
    """Raises ValueError."""
    return param.get_runtime_param().convert(value, param)


def silenced(name: str) -> tuple[str, ...]:
    """Parameters that do not go with one that was typed: what is only a default for them is forgotten."""
    if name == "beams":
        from localllm.cli.options import Sampling, Steps

        return tuple(field.name for group in (Sampling, Steps) for field in fields(group))
    return {
        "system": ("system_file",),
        "system_file": ("system",),
        "raw": ("system", "system_file", "chat_template", "think", "think_budget", "template_var"),
        "json_schema": ("grammar", "regex"),
        "grammar": ("json_schema", "regex"),
        "regex": ("json_schema", "grammar"),
        "samplers": ("letters",),
        "letters": ("samplers",),
        "kv_type": ("keys", "values"),
        "keys": ("kv_type",),
        "values": ("kv_type",),
        "as_json": ("as_markdown",),
        "as_markdown": ("as_json",),
    }.get(name, ())
