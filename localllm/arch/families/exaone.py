"""EXAONE 3 and 3.5 (LG AI Research 2024, arXiv 2408.03541, 2412.04862).

Unlike llama: rotated pairs are half a head apart. EXAONE 3.5 stretches the context by frequency factors, as Llama 3.
"""

from localllm.arch.attention import Transformer
from localllm.arch.families.llama import forward
from localllm.arch.metadata import Fields

__all__ = ["forward", "read"]


def read(fields: Fields) -> Transformer:
    """Read the hyperparameters. Raises ModelError."""
    return Transformer(**Transformer.shared_fields(fields, interleaved=False))
