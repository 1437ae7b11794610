"""The options of an answer by name: change them with /set, print them with /show."""

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from localllm.cli.argv import suggest_name
from localllm.errors import UsageError
from localllm.generation.options import OPTIONS
from localllm.generation.sampling.options import OPTIONS as SAMPLING
from localllm.generation.sampling.options import OptionDeclaration, map_names

if TYPE_CHECKING:
    from localllm.generation.options import GenerationOptions

OLLAMA = {theirs: name for declared in (OPTIONS, SAMPLING) for theirs, name in map_names("ollama", declared).items()}
ANSWER_OPTIONS = map_names("chat", OPTIONS)  # fields of GenerationOptions itself
OTHER_NAMES = {other: name for name, option in {**OPTIONS, **SAMPLING}.items() for other in option.names}
DEFAULT_VALUE = "default"
COUNTERPARTS = {  # of Ollama's /set
    "format": "use --json-schema when you start the chat", "num_thread": "use -t when you start the chat",
    "num_gpu": "use --gpu-layers when you start the chat", "noformat": "start the chat without --json-schema",
    "wordwrap": "lines are always wrapped", "nowordwrap": "use `localllm run` in a pipe for unwrapped lines",
    "history": "questions are always remembered", "nohistory": "the history of questions cannot be switched off",
}  # fmt: skip


def list_names(options: "GenerationOptions") -> list[str]:
    return [*ANSWER_OPTIONS, *SAMPLING]


def list_settings(options: "GenerationOptions") -> Iterator[tuple[str, object, bool]]:
    """Yield each option's name, its value, and whether that is the default."""
    usual = type(options)()
    for name in list_names(options):
        holder, model = (options, usual) if name in ANSWER_OPTIONS else (options.sampling, usual.sampling)
        value = getattr(holder, name)
        yield name, list(value) if isinstance(value, tuple) else value, value == getattr(model, name)


def get_changed_settings(options: "GenerationOptions") -> dict[str, object]:
    """Return the options that differ from their defaults, for a session file."""
    return {name: value for name, value, is_usual in list_settings(options) if not is_usual}


def change_option(options: "GenerationOptions", name: str, text: str) -> "GenerationOptions":
    """Return the options with one changed. Raises UsageError for an unknown name or an invalid value."""
    typed, name = name, name.lstrip("-").replace("-", "_")
    name = OTHER_NAMES.get(name) or OLLAMA.get(name, name)
    if name not in list_names(options):
        near = suggest_name(name, [*list_names(options), *OTHER_NAMES])
        hint = COUNTERPARTS.get(name) or near or "press Tab after /set to list the options"
        raise UsageError(f"unknown option {name!r}; {hint}")
    if not text:
        raise UsageError(f"usage: /set {typed} VALUE; VALUE `default` resets it, /show prints it")
    if text == DEFAULT_VALUE:
        usual = type(options)()
        return replace_option(options, name, getattr(usual if name in ANSWER_OPTIONS else usual.sampling, name))
    value = parse_value(name, text, get_type(OPTIONS[name] if name in OPTIONS else SAMPLING[name]))
    return replace_option(options, name, None if (name, value) == ("max_tokens", -1) else value)


def get_type(option: OptionDeclaration) -> type:
    return type(option.default) if isinstance(option.default, tuple | dict) else option.kind


def replace_option(options: "GenerationOptions", name: str, value: object) -> "GenerationOptions":
    """Return the options with one replaced. Raises UsageError."""
    change: dict[str, Any] = {name: value}
    if name in ANSWER_OPTIONS:
        return replace(options, **change)
    return replace(options, sampling=replace(options.sampling, **change))


def parse_value(name: str, text: str, kind: type) -> object:
    """Parse a string as a value of this type. Raises UsageError."""
    if kind is bool:
        if text not in ("on", "off"):
            raise UsageError(f"{name} must be on or off, not {text!r}")
        return text == "on"
    if kind is tuple:
        return tuple(shlex.split(text)) if text.startswith('"') and text.count('"') % 2 == 0 else tuple(text.split(";"))
    if kind not in (int, float, str):
        raise UsageError(f"{name} cannot be set in a chat: start the chat with its option (localllm chat --help)")
    try:
        return kind(text)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise UsageError(f"{name} must be {expected}, not {text!r}") from None


def apply_settings(options: "GenerationOptions", settings: dict[str, object]) -> "GenerationOptions":
    """Replace defaults among the options by a session's settings; ignore invalid ones."""
    is_usual = {name: usual for name, _, usual in list_settings(options)}
    for name, value in settings.items():
        if is_usual.get(name):
            value = tuple(value) if isinstance(value, list) else value
            with suppress(UsageError, TypeError):
                options = replace_option(options, name, value)
    return options
