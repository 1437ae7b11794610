"""The adapters of an answer: which scales its tokens have, by the names that a request gives."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from localllm.engine.adapter_scales import AdapterScales, Scales
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.generation.options import GenerationOptions


def resolve_scales(engine: "Engine", options: "GenerationOptions", prompt: Sequence[int]) -> AdapterScales:
    """Return the scales of an engine's adapters for the tokens of a prompt and its answer.

    An activated adapter (aLoRA) has a scale of 0 before the last occurrence of its invocation tokens, so that the
    prefix is that of the base model; without them it is not active. Raises UsageError.
    """
    scales = engine.adapter_scales if options.lora is None else order_scales(engine, options.lora)
    starts = {0}
    for adapter, scale in zip(engine.adapters, scales, strict=False):
        if adapter.invocation and scale:
            starts.add(find_last(prompt, adapter.invocation))
    result = AdapterScales()
    for start in sorted(starts - {len(prompt)}):
        result.set(start, [
            scale if not adapter.invocation or start >= find_last(prompt, adapter.invocation) else 0.0
            for adapter, scale in zip(engine.adapters, scales, strict=False)
        ])  # fmt: skip
    if len(result.changes) > 1 and options.on_overflow == "shift":
        raise UsageError("activated adapters cannot be combined with on_overflow=shift")
    return result


def order_scales(engine: "Engine", lora: Mapping[str, float]) -> Scales:
    """Return the scale of each adapter, by its name or index. Raises UsageError for one that the model lacks."""
    names = [adapter.name for adapter in engine.adapters]
    lora = {names[int(name)] if is_index(name, len(names)) else name: scale for name, scale in lora.items()}
    for name, scale in lora.items():
        if name not in names:
            raise UsageError(f"unknown adapter {name!r:.80}: the model has {', '.join(names)}")
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) < 1e6:
            raise UsageError(f"the scale of adapter {name!r} must be a number, not {scale!r:.40}")
    return tuple(float(lora.get(name, 0.0)) for name in names)


def is_index(name: str, count: int) -> bool:
    return name.isdecimal() and len(name) < 4 and int(name) < count


def find_last(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the position where `wanted` begins for the last time; the number of tokens if it does not occur."""
    count = len(wanted)
    starts = (start for start in range(len(tokens) - count, -1, -1) if tuple(tokens[start : start + count]) == wanted)
    return next(starts, len(tokens))


def parse_scales(value: object) -> dict[str, float] | None:
    """Parse a field `lora`: an object of scales by name, or llama-server's array of objects with id and scale.

    A name may replace the id; a scale that is not given is 1. Raises UsageError.
    """
    if value is None:
        return None
    shape = "lora must be an array of objects with id (or name) and scale, or an object of scales by name"
    pairs: list[tuple[object, object]] = [*value.items()] if isinstance(value, Mapping) else []
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        pairs = [(get_key(each), each.get("scale", 1.0)) for each in value]
    elif not isinstance(value, Mapping):
        raise UsageError(shape)
    scales = dict[str, float]()
    for key, scale in pairs:
        if not isinstance(key, str) or isinstance(scale, bool) or not isinstance(scale, int | float):
            raise UsageError(shape)
        scales[key] = scale  # a float, or an integer of any size, which order_scales checks
    return scales


def get_key(fields: Mapping[str, object]) -> str | None:
    """Return the name or the id of an adapter in a request, None without a valid one."""
    name, id = fields.get("name"), fields.get("id")
    return name if isinstance(name, str) else str(id) if type(id) is int and id >= 0 else None
