"""Merge low-rank adapters into a model's matrices before they are quantized, and write adapters as GGUF files."""

import os
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from localllm.convert.adapters import open_adapters
from localllm.engine.adapters import Adapter, LowRank
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


class MergedTensor:
    """A SourceTensor plus the scaled products of adapters' matrices, float32."""

    format = BY_NAME["F32"]

    def __init__(self, tensor: SourceTensor, updates: Sequence[tuple[LowRank, float]], widener: RowDequantizer):
        self._tensor, self._widener = tensor, widener
        self.name, self.shape = tensor.name, tensor.shape
        pairs = [(scale * each.factor * dequantize(each.a), dequantize(each.b)) for each, scale in updates]
        if self.name == EMBEDDING:  # its rows are those of a
            pairs = [(b.T, a) for a, b in pairs]
        self._pairs = [(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, b.shape[-1])) for a, b in pairs]

    def rows(self, first: int, last: int) -> np.ndarray:
        stored = self._widener.dequantize(self._tensor.format, self._tensor.rows(first, last), self.shape[-1])
        weights = np.array(stored, np.float32).reshape(last - first, self.shape[-1])
        height = self.shape[-2]
        for a, b in self._pairs:
            for matrix in range(first // height, -(-last // height)):  # of a stack
                begin, end = max(first, matrix * height), min(last, (matrix + 1) * height)
                weights[begin - first : end - first] += b[begin:end] @ a[matrix]
        return weights.view(np.uint8)

    def release_rows(self, first: int, last: int) -> None:
        self._tensor.release_rows(first, last)


class MergedSource:
    """A Source with adapters merged into its tensors.

    Attributes:
        inner: the original source.
    """

    def __init__(self, inner: Source, adapters: Sequence[tuple[Adapter, float]], widener: RowDequantizer):
        """Merge adapters with these scales. Raises ModelError if one does not fit, UnsupportedError."""
        tensors = {tensor.name: tensor for tensor in inner.tensors}
        arch = str(inner.metadata.get("general.architecture", ""))
        updates = dict[str, list[tuple[LowRank, float]]]()
        for adapter, scale in adapters:
            adapter.require_fit(tensors, arch)
            for name, low_rank in adapter.low_ranks.items():
                updates.setdefault(name, []).append((low_rank, scale))
        if EMBEDDING in updates and "output.weight" not in tensors:
            raise UnsupportedError(f"an adapter of {EMBEDDING} cannot be merged: it is also the model's output matrix")
        self.inner, self.path = inner, inner.path
        self.files = [*inner.files, *(name for adapter, _ in adapters for name in adapter.files)]
        self.parts, self.warnings, self.ignored = inner.parts, inner.warnings, inner.ignored
        self.metadata, self.packed = inner.metadata, inner.packed
        self.tensors: list[SourceTensor] = [
            MergedTensor(tensor, updates[name], widener) if name in updates else tensor
            for name, tensor in tensors.items()
        ]


def merge(source: Source, lora: Sequence[tuple[str, float]]) -> Source:
    """Return a source with adapters merged; lora: their paths and scales. Raises ModelError, UsageError."""
    adapters = open_adapters(lora, *describe_base(source))
    return MergedSource(source, adapters, RowDequantizer({tensor.format for tensor in source.tensors}))


def describe_base(source: Source) -> tuple[Mapping[str, object], dict[str, SourceTensor]]:
    """Return a base model's metadata and tensors, as `open_adapter` takes them."""
    return source.metadata, {tensor.name: tensor for tensor in source.tensors}


# ---- writing adapters


def write_adapter(adapter: Adapter, path: str | os.PathLike[str], type: str) -> int:
    """Write an adapter as a GGUF file that llama.cpp reads; return the bytes of its matrices.

    type: one of FORMATS; a matrix whose rows are no multiple of 32 is F16 in place of Q8_0. Raises UsageError,
    ModelError, OSError.
    """
    if type not in FORMATS:
        raise UsageError(f"the type of an adapter must be {', '.join(FORMATS)}, not {printable(type)}")
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
    """Return a matrix in another format, multiplied by a scale."""
    name = "F16" if type == "Q8_0" and tensor.shape[-1] % 32 else type
    numbers = (np.float32(scale) * dequantize(tensor)).reshape(prod(tensor.shape[:-1]), -1)
    return OutputTensor(tensor.name, BY_NAME[name], tensor.shape, [encode(name, np.ascontiguousarray(numbers))])
