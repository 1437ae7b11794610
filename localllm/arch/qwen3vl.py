"""The text part of Qwen3-VL (2025). As Qwen 3, but that positions may be those of an image."""

from dataclasses import replace

from localllm.arch import qwen3
from localllm.arch.attention import Transformer
from localllm.arch.fields import Fields
from localllm.arch.sections import NAME, with_sections

__all__ = ["forward", "read"]

forward = qwen3.forward


def read(fields: Fields) -> Transformer:
    """The hyperparameters. Raises ModelError, also for a file without sections."""
    h = qwen3.read(fields)
    if fields.raw(NAME) is None:
        raise fields.error(f"no {fields.key(NAME)} in the metadata")
    return replace(h, attention=replace(h.attention, rope=with_sections(fields, h.attention.rope, mixed=True)))
