"""The language models of vision models: Qwen2-VL and Qwen2.5-VL (arXiv 2409.12191, 2502.13923), PaddleOCR-VL (2025).

They are computed as Qwen 2 (PaddleOCR-VL without biases), with M-RoPE.
"""

from dataclasses import replace

from localllm.arch.attention import Transformer
from localllm.arch.families import llama, qwen2
from localllm.arch.metadata import Fields
from localllm.arch.mrope import NAME, with_sections

__all__ = ["forward", "read"]

forward = llama.forward


def read(fields: Fields) -> Transformer:
    """Read the hyperparameters. Raises ModelError, also for a file without sections."""
    h = qwen2.read(fields)
    if fields.raw(NAME) is None:
        raise fields.error(f"no {fields.key(NAME)} in the metadata")
    return replace(h, attention=replace(h.attention, rope=with_sections(fields, h.attention.rope)))
