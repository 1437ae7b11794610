"""A model's tensors, by their names in the file: Weights.block(3).attn_q is blk.3.attn_q.weight.

A language model's file may also have tensors of other modules, such as an image encoder in files of Ollama; they have
no effect on text.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.file import Tensor
from localllm.files.gguf.header import printable
from localllm.files.gguf.metadata import Irregularities


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix or vector of the model, or a range of its rows, with its optional bias and scale."""

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

    def read_vector(self) -> np.ndarray:
        """Return a 1-D tensor as float32. Raises ModelError for other shapes, formats or values."""
        kinds = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16}
        kind = kinds.get(self.tensor.format.name)
        if kind is None or len(self.shape) != 1:
            raise ModelError(
                f"tensor {self.name} must be a vector of F32 (found {self.tensor.format.name} {self.shape})"
            )
        numbers = self.tensor.data.reshape(-1).view(kind)
        is_upper_half = kind is np.uint16  # of a float32
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32) if is_upper_half else numbers.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise ModelError(f"tensor {self.name} must have finite values only")
        return numbers

    def read_integers(self) -> np.ndarray:
        """Return an I32 tensor as int64 of the same shape. Raises ModelError."""
        if self.tensor.format.name != "I32":
            raise ModelError(f"tensor {self.name} must have integers, I32 (found {self.tensor.format.name})")
        return self.tensor.data.view(np.int32).reshape(self.shape).astype(np.int64)

    def read_number(self) -> float:
        """Return the only element of a tensor of shape [1]. Raises ModelError."""
        if self.shape != (1,):
            raise ModelError(f"tensor {self.name} must have one element (found the shape {list(self.shape)})")
        return float(self.read_vector()[0])

    def require_shape(self, *shape: int) -> "Weight":
        """Return the weight. Raises ModelError if it has another shape."""
        if self.shape != shape:
            raise ModelError(f"tensor {self.name} must have the shape {list(shape)} (found {list(self.shape)})")
        return self

    def flatten(self) -> "Weight":
        """Return the tensor as one vector."""
        return replace(self, tensor=replace(self.tensor, shape=(math.prod(self.shape),)))

    def repeat(self, count: int) -> "Weight":
        """Repeat each element of a vector `count` times. Raises ModelError if it is quantized."""
        numbers = len(self.flatten().read_vector())
        data = np.repeat(self.tensor.data.reshape(numbers, -1), count, axis=0).reshape(-1)
        return replace(self, tensor=replace(self.tensor, shape=(numbers * count,), data=data))

    def to_row(self) -> "Weight":
        """Return a vector as a matrix of one row."""
        return replace(self, tensor=replace(self.tensor, shape=(1, math.prod(self.shape))))

    def split(self, *counts: int) -> "list[Weight]":
        """Split a fused matrix by rows.

        counts: row counts of the results. In a stack [experts, rows, columns], every matrix is split. Raises ModelError
        if they do not add up to the tensor's rows.
        """
        if sum(counts) != self._row_count:
            raise ModelError(f"tensor {self.name} must have {sum(counts)} rows (found {self._row_count})")
        if self.bias and len(self.shape) == 2:
            self.bias.require_shape(self._row_count)
        ends = itertools.accumulate(counts)
        return [self._slice_rows(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def split_stacks(self, count: int) -> "Weight":
        """Split a matrix into a stack of `count` matrices of equal height. Raises ModelError."""
        rows, remainder = divmod(self.shape[0], count)
        if len(self.shape) != 2 or remainder or self.bias:
            raise ModelError(f"tensor {self.name} must be {count} matrices (found the shape {list(self.shape)})")
        data = self.tensor.data.reshape(count, rows, -1)
        return replace(self, tensor=replace(self.tensor, shape=(count, rows, self.shape[1]), data=data))

    def split_halves(self) -> "list[Weight]":
        """Return the upper and the lower half of the rows."""
        return self.split(self._row_count // 2, self._row_count - self._row_count // 2)

    @property
    def _row_count(self) -> int:
        return self.shape[1] if len(self.shape) == 3 else self.shape[0]

    def _slice_rows(self, first: int, end: int) -> "Weight":
        if len(self.shape) == 3:
            return self._slice_expert_rows(first, end)
        bias = self.bias._slice_rows(first, end) if self.bias else None
        data = self.tensor.data.reshape(self.shape[0], -1)[first:end]
        data = data.reshape(-1) if len(self.shape) == 1 else data
        tensor = replace(self.tensor, shape=(end - first, *self.shape[1:]), data=data)
        return replace(self, tensor=tensor, bias=bias, first_row=self.first_row + first)

    def _slice_expert_rows(self, first: int, end: int) -> "Weight":
        if self.bias:
            raise UnsupportedError(f"tensor {self.bias.name}: biases of fused experts are not supported")
        shape = (self.shape[0], end - first, self.shape[2])
        tensor = replace(self.tensor, shape=shape, data=self.tensor.data[:, first:end])
        return replace(self, tensor=tensor, first_row=self.first_row + first)


class Weights:
    """The tensors with a prefix, as attributes.

    An optional tensor must be in all layers or in none, unless the caller asks for it `by_layer`, so that a file that
    lacks one is refused with its name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "", of_layers: Collection[str] | None = None):
        """Give access to the tensors whose names start with `prefix`.

        of_layers: the names, without "blk.N.", that occur in at least one layer.
        """
        self._tensors, self._prefix = tensors, prefix
        self._of_layers = collect_layer_names(tensors) if of_layers is None else of_layers

    def get_layer(self, layer: int) -> "Weights":
        """Return the tensors of one layer."""
        return Weights(self._tensors, f"{self._prefix}blk.{layer}.", self._of_layers)

    def get_submodel(self, prefix: str) -> "Weights":
        """Return the tensors of a submodel with layers, such as an encoder or a decoder."""
        by_layer = collect_layer_names(name.removeprefix(prefix) for name in self._tensors if name.startswith(prefix))
        return Weights(self._tensors, prefix, by_layer)

    def get(self, name: str, by_layer: bool = False) -> Weight | None:
        """Return the weight with its bias and scale, or None if the file lacks it.

        by_layer: the layer may lack it although others have it. Raises ModelError if that is so without `by_layer`.
        """
        tensor = self._find(f"{name}.weight", by_layer)
        if tensor is None:
            return None
        bias, scale = self._find(f"{name}.bias", by_layer), self._find(f"{name}.scale", by_layer)
        return Weight(tensor, Weight(bias) if bias else None, Weight(scale) if scale else None)

    def get_bias(self, name: str) -> Weight | None:
        """Return a bias without a matrix, or None. Raises ModelError if only other layers have it."""
        tensor = self._find(f"{name}.bias", by_layer=False)
        return Weight(tensor) if tensor else None

    def get_exact(self, name: str) -> Weight | None:
        """Return the tensor of exactly that name, or None. Raises ModelError if only other layers have it."""
        tensor = self._find(name, by_layer=False)
        return Weight(tensor) if tensor else None

    def _find(self, name: str, by_layer: bool) -> Tensor | None:
        tensor = self._tensors.get(self._prefix + name)
        if tensor is None and self._prefix and name in self._of_layers and not by_layer:
            raise ModelError(f"the model has no tensor {self._prefix}{name}, but other layers have it")
        return tensor

    def require_exact(self, name: str) -> Weight:
        """Return the tensor of exactly that name, without ".weight". Raises ModelError if it is missing."""
        tensor = self._tensors.get(f"{self._prefix}{name}")
        if tensor is None:
            raise ModelError(f"the model has no tensor {self._prefix}{name}")
        return Weight(tensor)

    def list_weights(self) -> list[Weight]:
        """Return every tensor with the prefix."""
        return [Weight(tensor) for name, tensor in self._tensors.items() if name.startswith(self._prefix)]

    def require(self, name: str) -> Weight:
        """Return the weight. Raises ModelError if the file lacks it."""
        weight = self.get(name)
        if weight is None:
            raise ModelError(f"the model has no tensor {self._prefix}{name}.weight")
        return weight

    def __getattr__(self, name: str) -> Weight:
        return self.require(name)

    def require_biases(self, *names: str) -> None:
        """Raise ModelError if one of these weights has no bias."""
        for name in names:
            if self.get_bias(name) is None:
                raise ModelError(f"the model has no tensor {self._prefix}{name}.bias")


def collect_layer_names(names: Iterable[str]) -> frozenset[str]:
    """Return the names of tensors without "blk." and the layer's index."""
    return frozenset(parts[2] for name in names if len(parts := name.split(".", 2)) == 3 and parts[0] == "blk")


def stack_matrices(matrices: Sequence[Weight]) -> Weight:
    """Return equally spaced matrices of a file as a stack [count, rows, columns].

    Raises ModelError if they are not.
    """
    first = matrices[0]
    kinds = {(m.shape, m.tensor.format.name, m.bias, m.scale) for m in matrices}
    places = [m.tensor.data.__array_interface__["data"][0] for m in matrices]
    distances = {after - before for before, after in itertools.pairwise(places)} or {0}
    if kinds != {(first.shape, first.tensor.format.name, None, None)} or len(distances) > 1 or len(first.shape) != 2:
        raise ModelError(f"tensor {first.name}: separate expert tensors must be alike and equally spaced")
    data, shape = first.tensor.data, (len(matrices), *first.shape)
    strides = distances.pop(), *data.strides
    stack = np.lib.stride_tricks.as_strided(data, (len(matrices), *data.shape), strides, writeable=False)
    return replace(first, tensor=replace(first.tensor, shape=shape, data=stack))


TABLES = ("token_embd.weight", "per_layer_token_embd.weight")  # whose rows are read by token id


def count_table_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size in bytes of the tables of which a run reads only the rows of its tokens.

    These are the embeddings, also those of each layer (Gemma 3n), unless they are the output matrix as well.
    """
    tables = TABLES if "output.weight" in tensors else TABLES[1:]
    return sum(tensors[name].nbytes for name in tables if name in tensors)


MODULES = {"v": "vision", "mm": "vision", "a": "audio", "mtp": "draft layers"}  # by the prefix of tensors' names


def find_module(name: str) -> str | None:
    """Return the name of the module that a tensor belongs to, None for the language model."""
    prefix, point, _ = name.partition(".")
    return MODULES.get(prefix) if point else None


def remove_other_modules(names: Iterable[str], oddities: Irregularities) -> list[str]:
    """Remove the tensors of other modules from names, and note them."""
    by_part = {name: part for name in names if (part := find_module(name))}
    if by_part:
        parts = " and ".join(sorted(set(by_part.values())))
        oddities.note(f"{len(by_part)} unused tensors of {parts} ({printable(next(iter(by_part)))})")
    return [name for name in names if name not in by_part]
