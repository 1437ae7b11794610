"""Ollama's environment variables: `serve` uses those with the same meaning, and names the counterparts of others.

Source: Ollama's FAQ and the help of its `serve`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from localllm.values import parse_duration

if TYPE_CHECKING:
    from localllm.cli.parameters import Parameter, SourcedValue

# The parameter of `serve` that a variable sets, and the value that means the default.
USED = {
    "OLLAMA_KEEP_ALIVE": "idle", "OLLAMA_CONTEXT_LENGTH": "context", "OLLAMA_NUM_PARALLEL": "parallel",
    "OLLAMA_KV_CACHE_TYPE": "kv_type",
}  # fmt: skip
COUNTERPARTS = {
    "OLLAMA_ORIGINS": "--allow-origin ORIGIN", "OLLAMA_MAX_LOADED_MODELS": "--memory SIZE",
    "OLLAMA_GPU_OVERHEAD": "--gpu-layers N", "OLLAMA_LLM_LIBRARY": "--device", "OLLAMA_DEBUG": "LOCALLLM_DEBUG=1",
}  # fmt: skip


def read_ollama_defaults(params: "Sequence[Parameter]") -> "dict[str, SourcedValue]":
    """Return the defaults of `serve` from Ollama's variables; invalid values are left out."""
    from localllm.cli.parameters import SourcedValue

    values: dict[str, SourcedValue] = {}
    for variable, name in USED.items():
        text = os.environ.get(variable, "").strip()
        if text and (option := to_option_text(name, text)):
            try:
                param = next(each for each in params if each.name == name)
                values[name] = SourcedValue(param.convert(option), variable)
            except ValueError:
                continue
    return values


def to_option_text(name: str, text: str) -> str:
    """Convert a variable's value to an option's; return "" for an invalid value, or one that means the default."""
    if name == "kv_type":
        return text.lower()
    number = parse_duration(text) if name == "idle" else float(text) if text.isdecimal() else None
    is_default = number is None or number < 0 or (number == 0 and name != "idle")
    return "" if is_default else f"{number:g}"


def iter_variable_notes(used: "Mapping[str, SourcedValue]") -> Iterator[str]:
    """Yield a line that lists Ollama's variables in use, and one that lists those that are set but ignored.

    used: the defaults of the command, with their sources.
    """
    applied = [f"{each.source}={os.environ[each.source]}" for each in used.values() if each.source in USED]
    if applied:
        yield f"{', '.join(applied)} {'are' if applied[1:] else 'is'} used, as options of `serve` would be"
    ignored = [f"{variable} (use {way})" for variable, way in COUNTERPARTS.items() if os.environ.get(variable)]
    if ignored:
        yield f"ignored: {', '.join(ignored)}"
