"""Ollama's environment variables: `serve` uses those with the same meaning, and names the counterparts of others.

Source: Ollama's FAQ and the help of its `serve`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from localllm.errors import UsageError
from localllm.values import parse_duration

if TYPE_CHECKING:
    from localllm.cli.parameters import Parameter, SourcedValue

# The parameter of `serve` that a variable sets, and the value that means the default.
USED = {
    "OLLAMA_KEEP_ALIVE": "idle", "OLLAMA_CONTEXT_LENGTH": "context", "OLLAMA_NUM_PARALLEL": "parallel",
    "OLLAMA_KV_CACHE_TYPE": "kv_type",
}  # fmt: skip
# By option: the expected value of a variable, and the consequence of an invalid one, for messages.
EXPECTED = {
    "idle": ("a time such as 5m", "models stay loaded, as without it"),
    "context": ("a number of tokens", "the model's own context is used"),
    "parallel": ("a number of requests", "16 at once are answered, as without it"),
    "kv_type": ("a type such as q8_0", "f16 is used"),
}
COUNTERPARTS = {
    "OLLAMA_ORIGINS": "--allow-origin ORIGIN", "OLLAMA_MAX_LOADED_MODELS": "--memory SIZE",
    "OLLAMA_GPU_OVERHEAD": "--gpu-layers N", "OLLAMA_LLM_LIBRARY": "--device", "OLLAMA_DEBUG": "LOCALLLM_DEBUG=1",
}  # fmt: skip


def read_ollama_defaults(params: "Sequence[Parameter]") -> "dict[str, SourcedValue]":
    """Return the defaults of `serve` from Ollama's variables; invalid values are left out."""
    from localllm.cli.parameters import SourcedValue

    values: dict[str, SourcedValue] = {}
    for variable, param in iter_used(params):
        with suppress(ValueError):
            if (value := convert_value(param, read_variable(variable))) is not None:
                values[param.name] = SourcedValue(value, variable)
    return values


def iter_used(params: "Iterable[Parameter]") -> "Iterator[tuple[str, Parameter]]":
    """Yield each variable that is set, with the parameter that it sets."""
    by_name = {param.name: param for param in params}
    for variable, name in USED.items():
        if name in by_name and read_variable(variable):
            yield variable, by_name[name]


def read_variable(variable: str) -> str:
    """Return a variable's value without the quotation marks that Ollama ignores."""
    return os.environ.get(variable, "").strip().strip("\"'")


def convert_value(param: "Parameter", text: str) -> object:
    """Convert a variable's value to an option's, None for one that means the default. Raises ValueError."""
    if param.name == "kv_type":
        from localllm.arch.layer_state import KVType

        try:
            KVType.parse(text.lower())
        except UsageError as error:
            raise ValueError(str(error)) from None
        return text.lower()
    number = parse_duration(text) if param.name == "idle" else float(text) if text.isdecimal() else None
    if number is None:
        raise ValueError(f"{text!r} is no number")
    return None if number < 0 or (number == 0 and param.name != "idle") else param.convert(f"{number:g}")


def iter_variable_notes(used: "Mapping[str, SourcedValue]", unset: "Iterable[Parameter]" = ()) -> Iterator[str]:
    """Yield a line about Ollama's variables in use, one for each invalid value, and one about those that are ignored.

    used: the defaults of the command, with their sources.  unset: the parameters that only a variable could set.
    """
    applied = [f"{each.source}={os.environ[each.source]}" for each in used.values() if each.source in USED]
    if applied:
        yield f"{', '.join(applied)} {'are' if applied[1:] else 'is'} used, as options of `serve` would be"
    for variable, param in iter_used(unset):
        try:
            convert_value(param, read_variable(variable))
        except ValueError:
            expected, instead = EXPECTED[param.name]
            yield f"{variable}={os.environ[variable]} is not understood: it must be {expected}; {instead}"
    ignored = [f"{variable} (use {way})" for variable, way in COUNTERPARTS.items() if os.environ.get(variable)]
    if ignored:
        yield f"ignored: {', '.join(ignored)}"
