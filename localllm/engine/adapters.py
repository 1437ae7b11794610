"""Add low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) to a model when it is traced.

An adapter has two small matrices, A [rank, columns] and B [rows, rank], for some of the model's matrices: the product x
W^T becomes x W^T + scale * (x A^T) B^T. Each token has its own scale, so that sequences with different adapters share a
run, and another scale needs no reloading. Families need no code for adapters: their verbs pass through an
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
    """A tensor of a model, of which only the shape matters."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@frozen
class Magnitude:
    """The lengths of the rows or columns of a merged matrix (DoRA: Liu et al. 2024, arXiv 2402.09353).

    values: float32 [..., rows] or [..., columns]; NaN leaves a row unchanged.
    """

    values: np.ndarray
    of_columns: bool


@frozen
class LowRankMatrices:
    """An adapter's two matrices for one matrix of the model.

    a is [rank, columns] and b [rows, rank], with one more dimension for experts and heads; for the embedding a is
    [vocab, rank]. Their product is multiplied by `factor`, alpha / rank. With a magnitude, they can only be merged.
    """

    a: Tensor
    b: Tensor
    factor: float
    magnitude: Magnitude | None = None

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    def list_stored(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the formats and shapes in which both matrices are kept in memory: the second one transposed."""
        second = self.b.format.name, self.b.shape
        if len(self.b.shape) == 2:
            rows = -(-self.b.shape[0] // 16) * 16  # as transpose_rows pads them
            second = self.b.format.name if self.b.format.name in PLAIN else "F32", (self.rank, rows)
        return [(self.a.format.name, self.a.shape), second]

    @property
    def nbytes(self) -> int:
        """The memory of both matrices in bytes."""
        return sum(prod(shape[:-1]) * BY_NAME[name].row_bytes(shape[-1]) for name, shape in self.list_stored())


@frozen
class Adapter:
    """A low-rank adapter.

    Attributes:
        path: its file or folder.  name: by which requests select it.
        low_ranks: its matrices, by the name of the model's tensor.  arch: the architecture that it is for.
        invocation: token ids that activate it (activated LoRA: Greenewald et al. 2025, arXiv 2504.12397); empty: it is
            active from the first token on.
        digest: a hash of its matrices, which keys of cached prompts contain.
    """

    path: str
    name: str
    low_ranks: Mapping[str, LowRankMatrices]
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
        """The memory of its matrices in bytes."""
        return sum(each.nbytes for each in self.low_ranks.values())

    def require_fit(self, tensors: Mapping[str, ShapedTensor], arch: str) -> None:
        """Raise ModelError unless the adapter fits a model with these tensors."""
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
    """Raise UnsupportedError for a DoRA adapter, whose magnitudes only merging can apply."""
    if any(each.magnitude for each in adapter.low_ranks.values()):
        raise UnsupportedError(
            f"{adapter.path}: is a DoRA adapter: merge it with `localllm quantize BASE OUT --lora {adapter.path}`"
        )


class AdaptedBuilder:
    """A builder (localllm.arch.verbs) that adds the products of adapters to those of the model's matrices.

    Attributes:
        applied: adapter index and tensor name of each product that was changed.
        steered: layers whose output was changed by a control vector.
    """

    def __init__(
        self, builder: Any, adapters: Sequence[Adapter], control: Mapping[int, np.ndarray] = {},
    ):  # fmt: skip
        """Wrap a builder.

        control: vectors that are added to the output of layers, float32 [width] by layer.
        """
        self._builder, self._adapters, self._control = builder, adapters, control
        self.applied, self.steered = set[tuple[int, str]](), set[int]()
        self._projected = dict[tuple[int, int, str], tuple[Activation, Activation]]()

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._builder, verb)

    def linear(self, x: Activation, weight: Weight) -> Activation:
        """Record the product with a matrix, plus those of its adapters."""
        low_ranks = [(n, each) for n, each in self._find_low_ranks(weight) if each.a.shape[1:] == weight.shape[1:]]
        narrow = [self._project(x, number, each, weight.name) for number, each in low_ranks]
        y = self._builder.linear(x, weight)
        for (number, each), h in zip(low_ranks, narrow, strict=True):
            last = transpose_rows(each.b, weight.first_row, weight.shape[0], number)
            y = self._builder.add_low_rank(y, h, last, number, each.factor)
            self.applied.add((number, weight.name))
        return y

    def _project(self, x: Activation, number: int, low_rank: LowRankMatrices, name: str) -> Activation:
        """Record x A^T, only once if several slices of a fused matrix need it."""
        key = id(x), number, name
        if key not in self._projected:
            self._projected[key] = x, self._builder.linear(x, rename_matrix(low_rank.a, number))
        return self._projected[key][1]

    def tap_layer_input(self, x: Activation, layer: int) -> Activation:
        """Add the control vector of the previous layer, then tap the input as the builder does."""
        if (vector := self._control.get(layer - 1)) is not None:
            x = self._builder.add_vector(x, vector)
            self.steered.add(layer - 1)
        return self._builder.tap_layer_input(x, layer)

    def embed(self, weight: Weight, ids: Numbers) -> Activation:
        """Record the embedding of tokens, plus those of adapters."""
        x = self._builder.embed(weight, ids)
        for number, each in self._find_low_ranks(weight):
            if each.a.shape[0] == weight.shape[0] and each.b.shape[0] == weight.shape[1]:
                h = self._builder.embed(rename_matrix(each.a, number), ids)
                last = transpose_rows(each.b, 0, weight.shape[1], number)
                x = self._builder.add_low_rank(x, h, last, number, each.factor)
                self.applied.add((number, weight.name))
        return x

    def expert_linear(self, x: Activation, weight: Weight, choice: Choice) -> Activation:
        """Record the product of each row with its expert's matrix, plus those of adapters."""
        y = self._builder.expert_linear(x, weight, choice)
        for number, each in self._find_stacks(weight):
            h = self._builder.expert_linear(x, rename_matrix(each.a, number), choice)
            last = slice_expert_rows(rename_matrix(each.b, number), weight.first_row, weight.shape[1])
            d = self._builder.expert_linear(h, last, choice)
            y = self._builder.add_scaled(y, d, number, each.factor, choice)
            self.applied.add((number, weight.name))
        return y

    def head_linear(self, x: Activation, weight: Weight) -> Activation:
        """Record the product of each head's columns with its matrix, plus those of adapters."""
        y = self._builder.head_linear(x, weight)
        for number, each in self._find_stacks(weight):
            h = self._builder.head_linear(x, rename_matrix(each.a, number))
            d = self._builder.head_linear(h, rename_matrix(each.b, number))
            y = self._builder.add_scaled(y, d, number, each.factor)
            self.applied.add((number, weight.name))
        return y

    def _find_stacks(self, weight: Weight) -> list[tuple[int, LowRankMatrices]]:
        """Return the adapters of a stack of matrices that the file also stores as one stack."""
        low_ranks = self._find_low_ranks(weight)
        return [(n, each) for n, each in low_ranks if (*weight.shape[:1], weight.shape[2]) == each.a.shape[::2]]

    def _find_low_ranks(self, weight: Weight) -> list[tuple[int, LowRankMatrices]]:
        found = enumerate(adapter.low_ranks.get(weight.name) for adapter in self._adapters)
        return [(number, low_rank) for number, low_rank in found if low_rank]


def require_opened(lora: Sequence[tuple[Adapter | str, float]]) -> tuple[Adapter, ...]:
    """Return the adapters of EngineOptions. Raises UsageError for a path, which only `open_with_options` opens."""
    adapters = tuple(each for each, _ in lora if isinstance(each, Adapter))
    if len(adapters) < len(lora):
        raise UsageError("an Engine takes opened adapters, not paths: open the model with localllm.open")
    return adapters


def rename_matrix(tensor: Tensor, number: int) -> Weight:
    """Return an adapter's matrix under a name that is unique among all adapters."""
    return Weight(replace(tensor, name=f"adapter {number}: {tensor.name}"))


def transpose_rows(b: Tensor, first: int, count: int, number: int) -> Weight:
    """Return `count` rows of B from `first` on, transposed: [rank, count], F32 unless B has 16-bit elements.

    Rows are padded with zeros to a multiple of 16 elements, because kernels read whole vectors.
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


def add_adapters_to_forward(
    forward: Callable[..., Activation], adapters: Sequence[Adapter], control: Mapping[int, np.ndarray],
    tensors: Mapping[str, Tensor], arch: str,
) -> Callable[..., Activation]:  # fmt: skip
    """Return a family's forward function with adapters, and control vectors on the outputs of layers.

    Raises ModelError if an adapter does not fit the model. The returned function raises UnsupportedError if an adapter
    is for a tensor that no product uses, or a control vector for a layer whose output is not exported.
    """
    if len(adapters) > MAX_ADAPTERS:
        raise UnsupportedError(f"a model can have at most {MAX_ADAPTERS} adapters (found {len(adapters)})")
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
