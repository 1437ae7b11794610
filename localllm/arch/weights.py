"""A model's tensors by the names they have in the file: weights.block(3).attn_q is blk.3.attn_q.weight."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from localllm.errors import ModelError
from localllm.files.gguf_file import Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix or vector of the model, or some of its rows; its bias, and the number that scales it, if there are."""

    tensor: Tensor
    bias: "Weight | None" = None
    scale: "Weight | None" = None
    first_row: int = 0  # of the matrix in the file

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

    def number(self) -> float:
        """The only number of a tensor. Raises ModelError."""
        if self.shape != (1,):
            raise ModelError(f"tensor {self.name} should be one number, has the shape {list(self.shape)}")
        return float(self.vector()[0])

    def flat(self) -> "Weight":
        """A matrix as the vector of its rows, one behind the other."""
        return replace(self, tensor=replace(self.tensor, shape=(math.prod(self.shape),)))

    def split(self, *counts: int) -> "list[Weight]":
        """A fused matrix as so many rows for each. Raises ModelError if it has more or fewer."""
        if sum(counts) != self.shape[0]:
            raise ModelError(f"tensor {self.name} should have {sum(counts)} rows, has {self.shape[0]}")
        ends = itertools.accumulate(counts)
        return [self._rows(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def halves(self) -> "list[Weight]":
        """The upper rows and the lower ones."""
        return self.split(self.shape[0] // 2, self.shape[0] - self.shape[0] // 2)

    def _rows(self, first: int, end: int) -> "Weight":
        bias = self.bias._rows(first, end) if self.bias else None
        data = self.tensor.data.reshape(self.shape[0], -1)[first:end]
        data = data.reshape(-1) if len(self.shape) == 1 else data
        tensor = replace(self.tensor, shape=(end - first, *self.shape[1:]), data=data)
        return replace(self, tensor=tensor, bias=bias, first_row=self.first_row + first)


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
        bias, scale = (self._tensors.get(f"{self._prefix}{name}.{kind}") for kind in ("bias", "scale"))
        return Weight(tensor, Weight(bias) if bias else None, Weight(scale) if scale else None)

    def bias(self, name: str) -> Weight | None:
        """A bias that belongs to no matrix, or None."""
        tensor = self._tensors.get(f"{self._prefix}{name}.bias")
        return Weight(tensor) if tensor else None

    def exactly(self, name: str) -> Weight:
        """A tensor whose name does not end in ".weight". Raises ModelError if there is none."""
        tensor = self._tensors.get(f"{self._prefix}{name}")
        if tensor is None:
            raise ModelError(f"the model has no tensor {self._prefix}{name}")
        return Weight(tensor)

    def all(self) -> list[Weight]:
        """Every tensor below the prefix."""
        return [Weight(tensor) for name, tensor in self._tensors.items() if name.startswith(self._prefix)]

    def __getattr__(self, name: str) -> Weight:
        weight = self.get(name)
        if weight is None:
            raise ModelError(f"the model has no tensor {self._prefix}{name}.weight")
        return weight
