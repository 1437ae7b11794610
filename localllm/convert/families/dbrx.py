"""DBRX."""

from collections.abc import Sequence

from localllm.convert.family import Sizes
from localllm.convert.tensors import Shape, TensorSource, reshape, transpose


def turned(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Transpose experts' matrices, stored one below the other, into a stack."""
    return transpose(reshape(sources[0], (shape[0], shape[2], shape[1])))
