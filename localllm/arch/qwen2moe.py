"""Qwen 1.5 and 2 with experts (Yang et al. 2024, arXiv 2407.10671).

Unlike Qwen 2: experts, whose weights do not add up to 1, beside one with a gate of its own that every token goes to.
"""

from localllm.arch.attention import Transformer
from localllm.arch.experts import read_routing
from localllm.arch.fields import Fields
from localllm.arch.llama import forward

__all__ = ["forward", "read"]


def read(fields: Fields) -> Transformer:
    """The hyperparameters. Raises ModelError."""
    shared = Transformer.shared_fields(fields, interleaved=False)
    return Transformer(**shared, routing=read_routing(fields, normalized=False))
