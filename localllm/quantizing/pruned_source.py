"""A source without some of its layers, the others renumbered, as by llama-quantize --prune-layers."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from localllm.errors import UsageError
from localllm.files.gguf.header import ARRAY, SCALARS, printable
from localllm.files.gguf.tensor_source import Source, SourceTensor
from localllm.files.gguf.writer import Packed, pack_value

LAYER = re.compile(r"blk\.([0-9]+)\.")


def parse_layers(text: str) -> tuple[int, ...]:
    """Parse numbers of layers, separated by commas. Raises UsageError."""
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        raise UsageError(f"--prune-layers {printable(text)}: expected layer numbers separated by commas, e.g. 20,21,22")
    return tuple(sorted(set(map(int, text.split(",")))))


class RenamedTensor:
    """A tensor under another name."""

    def __init__(self, tensor: SourceTensor, name: str):
        self._tensor, self.name, self.name_before = tensor, name, tensor.name
        self.format, self.shape = tensor.format, tensor.shape

    def rows(self, first: int, last: int) -> np.ndarray:
        return self._tensor.rows(first, last)

    def release_rows(self, first: int, last: int) -> None:
        self._tensor.release_rows(first, last)


class PrunedSource:
    """A Source without some layers.

    Attributes:
        inner: the original source.  layers: how many are left.
    """

    def __init__(self, inner: Source, pruned: Sequence[int]):
        """Leave out layers. Raises UsageError for a layer that does not exist, and if none is left."""
        numbers = {int(match[1]) for tensor in inner.tensors if (match := LAYER.match(tensor.name))}
        if missing := sorted(set(pruned) - numbers):
            raise UsageError(f"--prune-layers: there is no layer {missing[0]}; the model has {len(numbers)}")
        kept_layers = sorted(numbers - set(pruned))
        if not kept_layers:
            raise UsageError("--prune-layers: no layer is left")
        new = {number: place for place, number in enumerate(kept_layers)}
        names = {tensor.name: renumbered(tensor.name, new) for tensor in inner.tensors}
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
        self.packed: Mapping[str, object] = {
            **inner.packed,
            **{key: pack_like(inner.packed[key], values) for key, values in shorter.items()},
        }


def renumbered(name: str, new: Mapping[int, int]) -> str | None:
    """Return a tensor's name with its layer's new number, None if its layer is left out."""
    match = LAYER.match(name)
    if not match:
        return name
    return f"blk.{new[int(match[1])]}.{name[match.end() :]}" if int(match[1]) in new else None


def pack_like(old: object, values: Sequence[object]) -> Packed:
    """Pack an array of numbers in its old type."""
    packed = pack_value(old)
    kind = int.from_bytes(packed[4:8], "little")
    if int.from_bytes(packed[:4], "little") == ARRAY and kind in SCALARS:
        return pack_value(np.array(values, np.dtype(SCALARS[kind].format)))
    return pack_value(list(values))
