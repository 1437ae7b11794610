"""Merge LoRA adapters into a model before it is quantized, and write adapters as GGUF files."""

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from localllm.convert.adapters import open_adapters
from localllm.engine.adapters import Adapter, LowRankMatrices, refuse_dora
from localllm.errors import UnsupportedError, UsageError
from localllm.files.gguf.file import Tensor
from localllm.files.gguf.header import printable
from localllm.files.gguf.tensor_source import Source, SourceTensor
from localllm.files.gguf.writer import OutputTensor, pack_value, write_gguf
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.kernels.reference import dequantize
from localllm.quant.encode import encode
from localllm.quant.formats import BY_NAME

FORMATS = ("F32", "F16", "BF16", "Q8_0")  # of adapters' matrices
EMBEDDING = "token_embd.weight"
ROWS_AT_ONCE = 4096  # rows whose squares are summed together


class MatrixUpdate(NamedTuple):
    """The change that an adapter makes to a stack of matrices: scale * B A.

    Attributes:
        a: float32 [count, rank, columns], times the scale.  b: float32 [count * rows, rank].
        magnitude: of rows, [count * rows], or of columns, [count, columns]; None without DoRA.
    """

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None
    of_columns: bool

    @classmethod
    def make(cls, low_rank: LowRankMatrices, scale: float, is_embedding: bool) -> "MatrixUpdate":
        """Build the change for an adapter's scale.

        is_embedding: A and B are exchanged, because rows of A belong to tokens.
        """
        a, b, magnitude = dequantize(low_rank.a), dequantize(low_rank.b), low_rank.magnitude
        a, b = (b.T, a) if is_embedding else (a, b)
        a = np.float32(scale * low_rank.factor) * a.reshape(-1, *a.shape[-2:])
        if magnitude is None:
            return cls(a, b.reshape(-1, b.shape[-1]), None, False)
        values = magnitude.values.reshape(len(a), -1) if magnitude.of_columns else magnitude.values.reshape(-1)
        return cls(a, b.reshape(-1, b.shape[-1]), values, magnitude.of_columns)


class MergedTensor:
    """A source's tensor, float32, with adapters merged into it.

    DoRA sets the lengths of the rows or columns of W + scale B A. As in PEFT, they are relative to the lengths in W
    without other adapters.
    """

    format = BY_NAME["F32"]

    def __init__(self, tensor: SourceTensor, updates: Sequence[tuple[LowRankMatrices, float]], widener: RowDequantizer):
        self._tensor, self._widener = tensor, widener
        self.name, self.shape = tensor.name, tensor.shape
        self._updates = [MatrixUpdate.make(each, scale, self.name == EMBEDDING) for each, scale in updates]
        self._norms = dict[tuple[int, int], np.ndarray]()  # of columns, by update and matrix

    def read_rows(self, first: int, last: int) -> np.ndarray:
        merged, height = np.empty((last - first, self.shape[-1]), np.float32), self.shape[-2]
        for matrix in range(first // height, -(-last // height)):  # of a stack
            begin, end = max(first, matrix * height), min(last, (matrix + 1) * height)
            merged[begin - first : end - first] = self._merge_rows(matrix, begin, end)
        return merged.view(np.uint8)

    def _merge_rows(self, matrix: int, first: int, last: int) -> np.ndarray:
        """Return rows of one matrix with all adapters merged, one after another."""
        stored = self._read(first, last)
        merged = stored.copy()
        for number, update in enumerate(self._updates):
            product = update.b[first:last] @ update.a[matrix]
            merged += product
            if update.magnitude is None:
                continue
            if update.of_columns:
                merged *= compute_row_factors(update.magnitude[matrix], self._compute_column_norms(number, matrix))
            else:
                merged *= compute_row_factors(update.magnitude[first:last], compute_norms(stored + product, axis=1))[
                    :, None
                ]
        return merged

    def _read(self, first: int, last: int) -> np.ndarray:
        stored = self._widener.dequantize(self._tensor.format, self._tensor.read_rows(first, last), self.shape[-1])
        return np.array(stored, np.float32).reshape(last - first, self.shape[-1])

    def _compute_column_norms(self, number: int, matrix: int) -> np.ndarray:
        """Return the norms of a matrix's columns with one adapter merged, computed once."""
        if (number, matrix) not in self._norms:
            update, height, squares = self._updates[number], self.shape[-2], np.zeros(self.shape[-1])
            for first in range(matrix * height, (matrix + 1) * height, ROWS_AT_ONCE):
                last = min(first + ROWS_AT_ONCE, (matrix + 1) * height)
                added = self._read(first, last) + update.b[first:last] @ update.a[matrix]
                squares += compute_norms(added, axis=0) ** 2
            self._norms[number, matrix] = np.sqrt(squares)
        return self._norms[number, matrix]

    def release_rows(self, first: int, last: int) -> None:
        self._tensor.release_rows(first, last)


def compute_norms(numbers: np.ndarray, axis: int) -> np.ndarray:
    return np.asarray(np.linalg.norm(numbers.astype(np.float64), axis=axis))


def compute_row_factors(magnitudes: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Return the factors that give vectors of these norms their magnitudes, float32.

    1 for a vector without a magnitude (NaN) or with the norm 0.
    """
    is_changed = ~np.isnan(magnitudes) & (norms > 0)
    return np.where(is_changed, magnitudes / np.where(is_changed, norms, 1), 1).astype(np.float32)


class MergedSource:
    """A source with adapters merged into its tensors.

    Attributes:
        inner: the source without adapters.
    """

    def __init__(self, inner: Source, adapters: Sequence[tuple[Adapter, float]], widener: RowDequantizer):
        """Merge adapters with their scales. Raises ModelError if one does not fit, UnsupportedError."""
        tensors = {tensor.name: tensor for tensor in inner.tensors}
        arch = str(inner.metadata.get("general.architecture", ""))
        updates = dict[str, list[tuple[LowRankMatrices, float]]]()
        for adapter, scale in adapters:
            adapter.require_fit(tensors, arch)
            for name, low_rank in adapter.low_ranks.items():
                updates.setdefault(name, []).append((low_rank, scale))
        if EMBEDDING in updates and "output.weight" not in tensors:
            raise UnsupportedError(
                f"an adapter of {EMBEDDING} cannot be merged, because it is also the output matrix: use it with --lora"
            )
        self.inner, self.path = inner, inner.path
        self.files = [*inner.files, *(name for adapter, _ in adapters for name in adapter.files)]
        self.parts, self.warnings, self.ignored = inner.parts, inner.warnings, inner.ignored
        self.metadata, self.packed = inner.metadata, inner.packed
        self.tensors: list[SourceTensor] = [
            MergedTensor(tensor, updates[name], widener) if name in updates else tensor
            for name, tensor in tensors.items()
        ]


def merge_adapters(source: Source, lora: Sequence[tuple[str, float]]) -> Source:
    """Return a source with adapters merged into it. Raises ModelError, UsageError.

    lora: paths of the adapters, with their scales.
    """
    adapters = open_adapters(lora, *describe_base(source))
    return MergedSource(source, adapters, RowDequantizer({tensor.format for tensor in source.tensors}))


def describe_base(source: Source) -> tuple[Mapping[str, object], dict[str, SourceTensor]]:
    """Return the metadata and the tensors of a base model, as `open_adapter` takes them."""
    return source.metadata, {tensor.name: tensor for tensor in source.tensors}


# ---- writing adapters


def write_adapter(adapter: Adapter, path: str | os.PathLike[str], type: str) -> int:
    """Write an adapter as a GGUF file that llama.cpp reads; return the size of its matrices in bytes.

    type: one of FORMATS. A matrix whose row length is not a multiple of 32 becomes F16 instead of Q8_0. Raises
    UsageError, ModelError, OSError.
    """
    if type not in FORMATS:
        raise UsageError(f"the type of an adapter must be {', '.join(FORMATS)} (found {printable(type)})")
    refuse_dora(adapter)
    alphas = {each.factor * each.rank for each in adapter.low_ranks.values()}
    alpha = alphas.pop() if len(alphas) == 1 else None
    tensors = list[OutputTensor]()
    for each in adapter.low_ranks.values():
        scale = 1.0 if alpha is not None else each.factor  # without one alpha for all, B is scaled
        tensors += [encode_matrix(each.a, 1.0, type), encode_matrix(each.b, scale, type)]
    metadata: dict[str, object] = {
        "general.type": "adapter", "adapter.type": "lora", "general.architecture": adapter.arch,
        "general.name": adapter.name, "adapter.lora.alpha": float(alpha or 0.0),
    }  # fmt: skip
    if adapter.invocation:
        metadata["adapter.alora.invocation_tokens"] = pack_value(np.array(adapter.invocation, np.uint32))
    write_gguf(path, metadata, tensors)
    return sum(tensor.nbytes for tensor in tensors)


def encode_matrix(tensor: Tensor, scale: float, type: str) -> OutputTensor:
    """Encode a matrix, multiplied by a scale, in another format."""
    name = "F16" if type == "Q8_0" and tensor.shape[-1] % 32 else type
    numbers = (np.float32(scale) * dequantize(tensor)).reshape(prod(tensor.shape[:-1]), -1)
    return OutputTensor(tensor.name, BY_NAME[name], tensor.shape, [encode(name, np.ascontiguousarray(numbers))])
