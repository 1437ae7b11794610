"""Change the tensors of a source (fold scales, remove layers), and notice files that change meanwhile."""

import os
import re
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from localllm.engine.trace.scale_folding import ScaleFold
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.header import ARRAY, SCALARS, printable
from localllm.files.gguf.tensor_source import Source, SourceTensor, count_rows
from localllm.files.gguf.writer import PackedValue, pack_value
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.quant.formats import BY_NAME
from localllm.services.inspection.inspect import SCALED

LAYER = re.compile(r"blk\.([0-9]+)\.")


class FoldedTensor:
    """A source's tensor, float32, with its columns multiplied or its rows divided by scales."""

    format = BY_NAME["F32"]

    def __init__(self, tensor: SourceTensor, widener: RowDequantizer):
        self._tensor, self._widener = tensor, widener
        self.name, self.shape = tensor.name, tensor.shape
        self._of_columns = np.ones(self.shape[-1], np.float32)
        self._of_rows = np.ones((count_rows(self.shape), 1), np.float32)

    def multiply(self, scales: np.ndarray) -> None:
        self._of_columns = self._of_columns * scales

    def divide(self, scales: np.ndarray, first: int) -> None:
        """Divide rows from `first` on, in each matrix of a stack, or elements of a vector."""
        places = slice(first, first + len(scales))
        if len(self.shape) == 1:
            self._of_columns[places] /= scales
        else:
            self._of_rows.reshape(prod(self.shape[:-2]), -1)[:, places] /= scales

    def read_rows(self, first: int, last: int) -> np.ndarray:
        weights = self._widener.dequantize(self._tensor.format, self._tensor.read_rows(first, last), self.shape[-1])
        return (weights * self._of_columns * self._of_rows[first:last]).view(np.uint8)

    def release_rows(self, first: int, last: int) -> None:
        self._tensor.release_rows(first, last)


class FoldedSource:
    """A source with scales folded into its tensors, so that the model's outputs stay the same.

    See engine.trace.scale_folding.

    Attributes:
        inner: the source without folded scales.  folded: the changed tensors, by name.
    """

    def __init__(self, inner: Source, scales: Sequence[tuple[ScaleFold, np.ndarray]], widener: RowDequantizer):
        """Fold scales into the tensors of `inner`.

        scales: of each fold, float32 [width], all positive.
        """
        tensors = {tensor.name: tensor for tensor in inner.tensors}
        self.folded = dict[str, FoldedTensor]()
        for fold, numbers in scales:
            for name, first in fold.divided:
                self.folded.setdefault(name, FoldedTensor(tensors[name], widener)).divide(numbers, first)
            for name in fold.multiplied:
                self.folded.setdefault(name, FoldedTensor(tensors[name], widener)).multiply(fold.expand(numbers))
        self.inner, self.path, self.files = inner, inner.path, inner.files
        self.parts, self.warnings, self.ignored = inner.parts, inner.warnings, inner.ignored
        self.tensors: list[SourceTensor] = [self.folded.get(name, tensor) for name, tensor in tensors.items()]
        says: dict[str, object] = {SCALED: len(scales)} if scales else {}
        self.metadata: Mapping[str, object] = {**inner.metadata, **says}
        packed = {name: pack_value(value) for name, value in says.items()}
        self.packed: Mapping[str, object] = {**inner.packed, **packed}


# ---- removed layers


def parse_layers(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of layer indices. Raises UsageError."""
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        raise UsageError(
            f"--prune-layers {printable(text)}: the value must be layer indices separated by commas, such as 20,21,22"
        )
    return tuple(sorted(set(map(int, text.split(",")))))


class RenamedTensor:
    """A source's tensor under another name."""

    def __init__(self, tensor: SourceTensor, name: str):
        self._tensor, self.name, self.old_name = tensor, name, tensor.name
        self.format, self.shape = tensor.format, tensor.shape

    def read_rows(self, first: int, last: int) -> np.ndarray:
        return self._tensor.read_rows(first, last)

    def release_rows(self, first: int, last: int) -> None:
        self._tensor.release_rows(first, last)


class PrunedSource:
    """A source without some layers, the others renumbered, as by llama-quantize --prune-layers.

    Attributes:
        inner: the source with all layers.  layers: count of the remaining ones.
    """

    def __init__(self, inner: Source, pruned: Sequence[int]):
        """Remove layers. Raises UsageError if one does not exist, or if none would remain."""
        numbers = {int(match[1]) for tensor in inner.tensors if (match := LAYER.match(tensor.name))}
        if missing := sorted(set(pruned) - numbers):
            raise UsageError(f"--prune-layers: layer {missing[0]} does not exist; the model has {len(numbers)} layers")
        kept_layers = sorted(numbers - set(pruned))
        if not kept_layers:
            raise UsageError("--prune-layers: at least one layer must remain")
        new = {number: place for place, number in enumerate(kept_layers)}
        names = {tensor.name: renumber_tensor(tensor.name, new) for tensor in inner.tensors}
        self.inner, self.layers = inner, len(kept_layers)
        self.path, self.files, self.warnings, self.ignored = inner.path, inner.files, inner.warnings, inner.ignored
        self.tensors: list[SourceTensor] = [
            RenamedTensor(tensor, name) for tensor in inner.tensors if (name := names[tensor.name]) is not None
        ]
        parts = [[name for old in part if (name := names[old]) is not None] for part in inner.parts]
        self.parts = [part for part in parts if part] if any(parts) else parts
        arch, total = str(inner.metadata.get("general.architecture", "")), max(numbers) + 1
        self.count_key = f"{arch}.block_count"
        shorter = {
            key: [values[number] for number in kept_layers]
            for key, values in inner.metadata.items()
            if key.startswith(f"{arch}.") and isinstance(values, list | np.ndarray) and len(values) == total
        }
        self.metadata: Mapping[str, object] = {**inner.metadata, **shorter, self.count_key: self.layers}
        packed = {key: pack_like(inner.packed[key], values) for key, values in shorter.items()}
        self.packed: Mapping[str, object] = {**inner.packed, **packed}


def renumber_tensor(name: str, new: Mapping[int, int]) -> str | None:
    """Return a tensor's name with the new index of its layer, or None if the layer is removed."""
    match = LAYER.match(name)
    if not match:
        return name
    return f"blk.{new[int(match[1])]}.{name[match.end() :]}" if int(match[1]) in new else None


def pack_like(old: object, values: Sequence[object]) -> PackedValue:
    """Pack an array of values in the type of another array."""
    packed = pack_value(old)
    kind = int.from_bytes(packed[4:8], "little")
    if int.from_bytes(packed[:4], "little") == ARRAY and kind in SCALARS:
        return pack_value(np.array(values, np.dtype(SCALARS[kind].format)))
    return pack_value(list(values))


# ---- files that change while they are read


class SourceGuard:
    """Remembers the sizes and times of files when reading began.

    Attributes:
        identity: (path, bytes, time of the last change in ns) of each file, None for a missing one.
    """

    def __init__(self, files: Sequence[str]):
        self._files = [*files]
        self.identity = [compute_identity(path) for path in files]

    def check(self) -> None:
        """Raise ModelError if a file has changed since then."""
        for path, identity in zip(self._files, self.identity, strict=True):
            if identity != compute_identity(path):
                raise ModelError(f"{path}: this file changed while it was read; nothing was written")


def compute_identity(path: str) -> tuple[str, int, int] | None:
    """Return values that change when a file's content does; None if the file does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return os.path.abspath(path), status.st_size, status.st_mtime_ns
