"""A source with scales folded into its tensors; the model's outputs stay the same (engine.trace.scale_folding)."""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from localllm.engine.trace.scale_folding import ScaleFold
from localllm.files.gguf.tensor_source import Source, SourceTensor, row_count
from localllm.files.gguf.writer import pack_value
from localllm.kernels.dequantize_rows import Widener
from localllm.quant.formats import BY_NAME
from localllm.services.inspection.inspect import SCALED


class FoldedTensor:
    """A SourceTensor with scaled columns or rows, float32."""

    format = BY_NAME["F32"]

    def __init__(self, tensor: SourceTensor, widener: Widener):
        self._tensor, self._widener = tensor, widener
        self.name, self.shape = tensor.name, tensor.shape
        self._of_columns = np.ones(self.shape[-1], np.float32)
        self._of_rows = np.ones((row_count(self.shape), 1), np.float32)

    def multiply(self, scales: np.ndarray) -> None:
        """Multiply all columns by scales, float32 [columns]."""
        self._of_columns = self._of_columns * scales

    def divide(self, scales: np.ndarray, first: int) -> None:
        """Divide rows from `first` on, of each matrix of a stack, or elements of a vector."""
        places = slice(first, first + len(scales))
        if len(self.shape) == 1:
            self._of_columns[places] /= scales
        else:
            self._of_rows.reshape(prod(self.shape[:-2]), -1)[:, places] /= scales

    def rows(self, first: int, last: int) -> np.ndarray:
        weights = self._widener.widen(self._tensor.format, self._tensor.rows(first, last), self.shape[-1])
        return (weights * self._of_columns * self._of_rows[first:last]).view(np.uint8)

    def release_rows(self, first: int, last: int) -> None:
        self._tensor.release_rows(first, last)


class FoldedSource:
    """A Source with folded scales.

    Attributes:
        inner: the original source.  folded: the tensors that changed, by name.
    """

    def __init__(self, inner: Source, scales: Sequence[tuple[ScaleFold, np.ndarray]], widener: Widener):
        """Fold scales, float32 [width], all positive, into the tensors of `inner`."""
        tensors = {tensor.name: tensor for tensor in inner.tensors}
        self.folded = dict[str, FoldedTensor]()
        for fold, numbers in scales:
            for name, first in fold.divided:
                self.folded.setdefault(name, FoldedTensor(tensors[name], widener)).divide(numbers, first)
            for name in fold.multiplied:
                self.folded.setdefault(name, FoldedTensor(tensors[name], widener)).multiply(fold.read(numbers))
        self.inner, self.path, self.files = inner, inner.path, inner.files
        self.parts, self.warnings, self.ignored = inner.parts, inner.warnings, inner.ignored
        self.tensors: list[SourceTensor] = [self.folded.get(name, tensor) for name, tensor in tensors.items()]
        says: dict[str, object] = {SCALED: len(scales)} if scales else {}
        self.metadata: Mapping[str, object] = {**inner.metadata, **says}
        self.packed: Mapping[str, object] = {
            **inner.packed,
            **{name: pack_value(value) for name, value in says.items()},
        }
