"""Resolve which scales of the adapters hold for the tokens of an answer, from the names in a request."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from localllm.engine.adapter_scales import AdapterScales, Scales
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.generation.options import GenerationOptions


def resolve_scales(engine: "Engine", options: "GenerationOptions", prompt: Sequence[int]) -> AdapterScales:
    """Return the scales of an engine's adapters for a prompt and its answer.

    An activated adapter (aLoRA) has a scale of 0 before the last occurrence of its invocation tokens, so that the
    prefix is that of the base model; if the prompt lacks these tokens, the adapter stays off. Raises UsageError for an
    unknown adapter, or an activated one with context shift.
    """
    scales = engine.adapter_scales if options.lora is None else order_scales(engine, options.lora)
    starts = {0}
    for adapter, scale in zip(engine.adapters, scales, strict=False):
        if adapter.invocation and scale:
            starts.add(find_last_start(prompt, adapter.invocation))
    result = AdapterScales()
    for start in sorted(starts - {len(prompt)}):
        result.set(start, [
            scale if not adapter.invocation or start >= find_last_start(prompt, adapter.invocation) else 0.0
            for adapter, scale in zip(engine.adapters, scales, strict=False)
        ])  # fmt: skip
    if len(result.changes) > 1 and options.on_overflow == "shift":
        raise UsageError(
            "activated adapters cannot be combined with on_overflow=shift: use on_overflow=error or drop-turns"
        )
    return result


def order_scales(engine: "Engine", lora: Mapping[str, float]) -> Scales:
    """Return the scale of each adapter in the engine's order.

    lora: scales by name or by index; adapters that it omits get 0. Raises UsageError for an unknown adapter or a scale
    that is not a number.
    """
    names = [adapter.name for adapter in engine.adapters]
    lora = {names[int(name)] if is_index(name, len(names)) else name: scale for name, scale in lora.items()}
    for name, scale in lora.items():
        if name not in names:
            raise UsageError(f"unknown adapter {name!r:.80}: the model has {', '.join(names)}")
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) < 1e6:
            raise UsageError(f"the scale of adapter {name!r} must be a number, not {scale!r:.40}")
    return tuple(float(lora.get(name, 0.0)) for name in names)


def is_index(name: str, count: int) -> bool:
    """Return whether a name is the decimal index of one of `count` adapters."""
    return name.isdecimal() and len(name) < 4 and int(name) < count


def find_last_start(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the last index at which `wanted` begins in `tokens`, or len(tokens) if it does not occur."""
    count = len(wanted)
    starts = (start for start in range(len(tokens) - count, -1, -1) if tuple(tokens[start : start + count]) == wanted)
    return next(starts, len(tokens))


def parse_scales(value: object) -> dict[str, float] | None:
    """Parse the JSON field `lora` of a request to scales by adapter; None if the field is null.

    Accepts an object of scales by name, or llama-server's array of objects with "id" or "name", and "scale" (default
    1). Raises UsageError for other values.
    """
    if value is None:
        return None
    shape = "lora must be an array of objects with id (or name) and scale, or an object of scales by name"
    pairs: list[tuple[object, object]] = [*value.items()] if isinstance(value, Mapping) else []
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        pairs = [(get_adapter_key(each), each.get("scale", 1.0)) for each in value]
    elif not isinstance(value, Mapping):
        raise UsageError(shape)
    scales = dict[str, float]()
    for key, scale in pairs:
        if not isinstance(key, str) or isinstance(scale, bool) or not isinstance(scale, int | float):
            raise UsageError(shape)
        scales[key] = scale  # a float, or an integer of any size, which order_scales checks
    return scales


def get_adapter_key(fields: Mapping[str, object]) -> str | None:
    """Return the name of an adapter in a request, or its id as a string; None if it has neither."""
    name, id = fields.get("name"), fields.get("id")
    return name if isinstance(name, str) else str(id) if type(id) is int and id >= 0 else None
