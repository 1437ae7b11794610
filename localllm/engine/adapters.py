"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685), added to a model when it is traced.

An adapter has two small matrices, A [rank, columns] and B [rows, rank], for some of the model's matrices: the product x
W^T becomes x W^T + scale * (x A^T) B^T. The scale is a number of each token, so that sequences with different adapters
share a run, and another scale needs no reloading. A family does not know of adapters: its verbs pass through an
AdaptedBuilder.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import numpy as np

from localllm.arch.verbs import Activation, Choice, Numbers
from localllm.arch.weights import Weight
from localllm.errors import ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import Tensor
from localllm.files.gguf.header import printable
from localllm.frozen import frozen
from localllm.kernels.table import MAX_ADAPTERS
from localllm.quant.formats import BY_NAME

PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # formats of B that kernels read


class ShapedTensor(Protocol):
    """A tensor of a model, whose shape an adapter must fit."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@frozen
class Magnitude:
    """The lengths that the rows of a merged matrix get (DoRA: Liu et al. 2024, arXiv 2402.09353), or its columns.

    values: float32 [..., rows] or [..., columns]; NaN leaves a row as it is.
    """

    values: np.ndarray
    of_columns: bool


@frozen
class LowRank:
    """An adapter's two matrices for one of the model's.

    a is [rank, columns] and b [rows, rank], for experts and heads both with a dimension more; for the embedding a is
    [vocab, rank]. The product is multiplied by `factor`, alpha / rank. Those with a magnitude can only be merged.
    """

    a: Tensor
    b: Tensor
    factor: float
    magnitude: Magnitude | None = None

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    def list_stored(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the format and shape of both matrices as they are computed with: the second one is transposed."""
        second = self.b.format.name, self.b.shape
        if len(self.b.shape) == 2:
            rows = -(-self.b.shape[0] // 16) * 16  # as transpose_rows pads them
            second = self.b.format.name if self.b.format.name in PLAIN else "F32", (self.rank, rows)
        return [(self.a.format.name, self.a.shape), second]

    @property
    def nbytes(self) -> int:
        """The memory of both matrices, in bytes."""
        return sum(prod(shape[:-1]) * BY_NAME[name].row_bytes(shape[-1]) for name, shape in self.list_stored())


@frozen
class Adapter:
    """A low-rank adapter.

    Attributes:
        path: its file or folder.  name: what requests call it.
        low_ranks: its matrices, by the name of the model's tensor.  arch: the architecture that it is for.
        invocation: token ids that activate it (activated LoRA: Greenewald et al. 2025, arXiv 2504.12397); empty: it is
            active from the first token on.
        digest: a hash of its matrices, which keys of cached prompts contain.
    """

    path: str
    name: str
    low_ranks: Mapping[str, LowRank]
    arch: str = ""
    invocation: tuple[int, ...] = ()
    digest: str = ""

    @property
    def files(self) -> list[str]:
        """The paths of its files."""
        is_folder = os.path.isdir(self.path)
        return [os.path.join(self.path, name) for name in os.listdir(self.path)] if is_folder else [self.path]

    @property
    def nbytes(self) -> int:
        """The memory of its matrices, in bytes."""
        return sum(each.nbytes for each in self.low_ranks.values())

    def require_fit(self, tensors: Mapping[str, ShapedTensor], arch: str) -> None:
        """Raise ModelError if the adapter is for another model than one with these tensors."""
        if self.arch and self.arch != arch:
            raise ModelError(f"{self.path}: the adapter is for {printable(self.arch)}, the model is {arch}")
        for name, low_rank in self.low_ranks.items():
            a, b, tensor = low_rank.a, low_rank.b, tensors.get(name)
            if tensor is None:
                raise ModelError(f"{self.path}: is for another model: this one has no tensor {printable(name)}")
            fits_rows = (*tensor.shape[:-1], low_rank.rank) == b.shape
            is_product = fits_rows and (*tensor.shape[:-2], low_rank.rank, tensor.shape[-1]) == a.shape
            is_embedding = b.shape == (tensor.shape[-1], low_rank.rank) and a.shape == (tensor.shape[0], low_rank.rank)
            if not is_product and not (is_embedding and name == "token_embd.weight"):
                shapes = f"{list(a.shape)} and {list(b.shape)} do not fit {printable(name)} {list(tensor.shape)}"
                raise ModelError(f"{self.path}: is for another model: its matrices {shapes}")


def refuse_dora(adapter: Adapter) -> None:
    """Raise UnsupportedError for an adapter with magnitudes, which matrices of low rank alone do not replace."""
    if any(each.magnitude for each in adapter.low_ranks.values()):
        raise UnsupportedError(
            f"{adapter.path}: is a DoRA adapter: merge it with `localllm quantize BASE OUT --lora {adapter.path}`"
        )


class AdaptedBuilder:
    """A builder (localllm.arch.verbs) that adds adapters' products to those of the model's matrices.

    Attributes:
        applied: the index of each adapter and the name of each tensor whose product was changed.
        steered: the layers whose output was changed by a control vector.
    """

    def __init__(
        self, builder: Any, adapters: Sequence[Adapter], control: Mapping[int, np.ndarray] = {},
    ):  # fmt: skip
        """Wrap a builder; control: vectors that are added to the output of layers, float32 [width] by layer."""
        self._builder, self._adapters, self._control = builder, adapters, control
        self.applied, self.steered = set[tuple[int, str]](), set[int]()
        self._projected = dict[tuple[int, int, str], tuple[Activation, Activation]]()

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._builder, verb)

    def linear(self, x: Activation, weight: Weight) -> Activation:
        """Compute the product with a matrix, and add those of its adapters."""
        low_ranks = [(n, each) for n, each in self._find_low_ranks(weight) if each.a.shape[1:] == weight.shape[1:]]
        narrow = [self._project(x, number, each, weight.name) for number, each in low_ranks]
        y = self._builder.linear(x, weight)
        for (number, each), h in zip(low_ranks, narrow, strict=True):
            last = transpose_rows(each.b, weight.first_row, weight.shape[0], number)
            y = self._builder.add_low_rank(y, h, last, number, each.factor)
            self.applied.add((number, weight.name))
        return y

    def _project(self, x: Activation, number: int, low_rank: LowRank, name: str) -> Activation:
        """Compute x A^T, once for all parts of a fused matrix."""
        key = id(x), number, name
        if key not in self._projected:
            self._projected[key] = x, self._builder.linear(x, rename_matrix(low_rank.a, number))
        return self._projected[key][1]

    def tap_layer_input(self, x: Activation, layer: int) -> Activation:
        """Add the control vector of the layer before, and export the input as the builder does."""
        if (vector := self._control.get(layer - 1)) is not None:
            x = self._builder.add_vector(x, vector)
            self.steered.add(layer - 1)
        return self._builder.tap_layer_input(x, layer)

    def embed(self, weight: Weight, ids: Numbers) -> Activation:
        """Look up the embeddings of tokens, and add those of adapters."""
        x = self._builder.embed(weight, ids)
        for number, each in self._find_low_ranks(weight):
            if each.a.shape[0] == weight.shape[0] and each.b.shape[0] == weight.shape[1]:
                h = self._builder.embed(rename_matrix(each.a, number), ids)
                last = transpose_rows(each.b, 0, weight.shape[1], number)
                x = self._builder.add_low_rank(x, h, last, number, each.factor)
                self.applied.add((number, weight.name))
        return x

    def expert_linear(self, x: Activation, weight: Weight, choice: Choice) -> Activation:
        """Compute the product of each row with its expert's matrix, and add those of adapters."""
        y = self._builder.expert_linear(x, weight, choice)
        for number, each in self._find_stacks(weight):
            h = self._builder.expert_linear(x, rename_matrix(each.a, number), choice)
            last = slice_expert_rows(rename_matrix(each.b, number), weight.first_row, weight.shape[1])
            d = self._builder.expert_linear(h, last, choice)
            y = self._builder.add_scaled(y, d, number, each.factor, choice)
            self.applied.add((number, weight.name))
        return y

    def head_linear(self, x: Activation, weight: Weight) -> Activation:
        """Compute the product of each head's columns with its matrix, and add those of adapters."""
        y = self._builder.head_linear(x, weight)
        for number, each in self._find_stacks(weight):
            h = self._builder.head_linear(x, rename_matrix(each.a, number))
            d = self._builder.head_linear(h, rename_matrix(each.b, number))
            y = self._builder.add_scaled(y, d, number, each.factor)
            self.applied.add((number, weight.name))
        return y

    def _find_stacks(self, weight: Weight) -> list[tuple[int, LowRank]]:
        """Return the adapters of a stack of matrices that is one in the file, too."""
        low_ranks = self._find_low_ranks(weight)
        return [(n, each) for n, each in low_ranks if (*weight.shape[:1], weight.shape[2]) == each.a.shape[::2]]

    def _find_low_ranks(self, weight: Weight) -> list[tuple[int, LowRank]]:
        found = enumerate(adapter.low_ranks.get(weight.name) for adapter in self._adapters)
        return [(number, low_rank) for number, low_rank in found if low_rank]


def require_opened(lora: Sequence[tuple[Adapter | str, float]]) -> tuple[Adapter, ...]:
    """Return the adapters of EngineOptions. Raises UsageError for a path, which `open_with_options` opens."""
    adapters = tuple(each for each, _ in lora if isinstance(each, Adapter))
    if len(adapters) < len(lora):
        raise UsageError("an Engine takes opened adapters, not paths: open the model with localllm.open")
    return adapters


def rename_matrix(tensor: Tensor, number: int) -> Weight:
    """Return a matrix of an adapter under a name that no other adapter's has."""
    return Weight(replace(tensor, name=f"adapter {number}: {tensor.name}"))


def transpose_rows(b: Tensor, first: int, count: int, number: int) -> Weight:
    """Return `count` rows of B from `first` on, transposed: [rank, count], F32 unless B has 16-bit elements.

    Its rows are padded with zeros to a multiple of 16 elements, since kernels read whole vectors.
    """
    from localllm.kernels.reference import dequantize  # seldom needed

    if kind := PLAIN.get(b.format.name):
        numbers, format = b.data.reshape(b.shape[0], -1).view(kind), b.format
    else:
        numbers, format = dequantize(b), BY_NAME["F32"]
    padded = np.pad(numbers[first : first + count].T, ((0, 0), (0, -count % 16)))
    data = np.ascontiguousarray(padded).view(np.uint8)
    name = f"adapter {number}: {b.name} from row {first}"
    return Weight(Tensor(name, format, padded.shape, data))


def slice_expert_rows(weight: Weight, first: int, count: int) -> Weight:
    rows = weight.shape[1]
    return weight if count == rows else weight.split(first, count, rows - first - count)[1]


def adapt(
    forward: Callable[..., Activation], adapters: Sequence[Adapter], control: Mapping[int, np.ndarray],
    tensors: Mapping[str, Tensor], arch: str,
) -> Callable[..., Activation]:  # fmt: skip
    """Return a family's forward function with adapters added, and a control vector to the output of layers.

    Raises ModelError if an adapter does not fit the model; the function raises UnsupportedError if it changes a tensor
    that this architecture does not multiply by, or a layer's output that it does not export.
    """
    if len(adapters) > MAX_ADAPTERS:
        raise UnsupportedError(f"{len(adapters)} adapters exceed the limit of {MAX_ADAPTERS}")
    for adapter in adapters:
        refuse_dora(adapter)
        adapter.require_fit(tensors, arch)

    def adapted_forward(builder: Any, w: Any, h: Any) -> Activation:
        adapted = AdaptedBuilder(builder, adapters, control)
        y = forward(adapted, w, h)
        for number, adapter in enumerate(adapters):
            if left := [name for name in adapter.low_ranks if (number, name) not in adapted.applied]:
                raise UnsupportedError(f"{adapter.path}: adapters of {printable(left[0])} are not supported for {arch}")
        if control.keys() - adapted.steered:
            raise UnsupportedError(f"control vectors are not supported for {arch} models")
        return y

    return adapted_forward
