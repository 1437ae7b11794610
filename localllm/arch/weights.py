"""A model's tensors by the names they have in the file: weights.block(3).attn_q is blk.3.attn_q.weight."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from localllm.errors import ModelError
from localllm.files.gguf_file import Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix or vector of the model, and its bias if it has one."""

    tensor: Tensor
    bias: "Weight | None" = None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def vector(self) -> np.ndarray:
        """A 1-D tensor as float32. Raises ModelError if it is no vector of plain numbers."""
        kind = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(self.tensor.format.name)
        if kind is None or len(self.shape) != 1:
            raise ModelError(f"tensor {self.name} should be a vector of F32, is {self.tensor.format.name} {self.shape}")
        return self.tensor.data.reshape(-1).view(kind).astype(np.float32)


class Weights:
    """Attribute access to tensors below a prefix."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = ""):
        self._tensors, self._prefix = tensors, prefix

    def block(self, layer: int) -> "Weights":
        """The tensors of one layer."""
        return Weights(self._tensors, f"blk.{layer}.")

    def get(self, name: str) -> Weight | None:
        """The weight, or None if the file has none of that name."""
        tensor = self._tensors.get(f"{self._prefix}{name}.weight")
        if tensor is None:
            return None
        bias = self._tensors.get(f"{self._prefix}{name}.bias")
        return Weight(tensor, Weight(bias) if bias else None)

    def __getattr__(self, name: str) -> Weight:
        weight = self.get(name)
        if weight is None:
            raise ModelError(f"the model has no tensor {self._prefix}{name}.weight")
        return weight
