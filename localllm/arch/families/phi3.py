"""Phi 3, 3.5 and 4 (Abdin et al. 2024, arXiv 2404.14219).

Unlike llama: fused projections; rotated pairs are half a head apart, or only a part of a head is rotated; LongRoPE.
Windows are ignored, as in llama.cpp, because files have wrong values.
"""

from localllm.arch.attention import Transformer
from localllm.arch.families.llama import forward
from localllm.arch.metadata import Fields

__all__ = ["forward", "read"]


def read(fields: Fields) -> Transformer:
    """Read the hyperparameters. Raises ModelError."""
    return Transformer(**Transformer.shared_fields(fields, interleaved=False))
