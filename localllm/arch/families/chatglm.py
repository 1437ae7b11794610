"""ChatGLM 3 and GLM-4 9B of 2024 (Zeng et al. 2024, arXiv 2406.12793).

Unlike llama: of a head, the first half is rotated; queries, keys and values by one matrix, with biases; the gate's
matrix is above the other one.
"""

from localllm.arch.attention import Transformer
from localllm.arch.families.llama import forward
from localllm.arch.metadata import Fields

__all__ = ["forward", "read"]


def read(fields: Fields) -> Transformer:
    """Read the hyperparameters. Raises ModelError."""
    return Transformer(**Transformer.shared_fields(fields, interleaved=True))
