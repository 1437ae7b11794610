"""Find weights that are too large for their new format and are clamped to its largest number."""

from threading import Lock

import numpy as np

from localllm.errors import ModelError
from localllm.files.gguf.header import printable
from localllm.quant.block_codes import dequantize
from localllm.quant.formats import Format

LARGEST = 65504.0  # the largest float16; scales of most blocks are float16, too
BEYOND = {"F16": 65520.0, "BF16": 3.3961775e38}  # the least magnitude that rounds to infinity
MOST_LOST = 0.25  # of the largest weight: a larger loss is no rounding error


class ClampedWeights:
    """The tensors with clamped weights; several threads add to them."""

    def __init__(self, is_strict: bool = False):
        """Start empty; is_strict: the first clamped weight is an error."""
        self._is_strict, self._lock = is_strict, Lock()
        self._counts = dict[
            tuple[str, str], tuple[int, float]
        ]()  # by (tensor, format): number of clamped weights, the largest weight

    def check(self, name: str, format: Format, weights: np.ndarray, rows: np.ndarray) -> None:
        """Compare a tensor's weights, float32 [rows, columns], with their blocks, uint8 [rows, bytes].

        Raises ModelError for a clamped weight if `is_strict`.
        """
        largest = max(float(weights.max()), -float(weights.min()))
        if largest <= LARGEST or not (count := count_clamped(format, weights, rows, largest)):
            return
        with self._lock:
            count_before, largest_before = self._counts.get((name, format.name), (0, 0.0))
            self._counts[name, format.name] = count_before + count, max(largest_before, largest)
        if self._is_strict:
            raise ModelError(f"--strict: {self.lines()[0]}")

    def lines(self) -> list[str]:
        """Describe each tensor in one sentence."""
        return [
            f"tensor {printable(name)}: {count} weight{'s are' if count > 1 else ' is'} too large for {format} and "
            f"became its largest number (the largest is {largest:.6g}): use BF16 or F32 for this tensor"
            for (name, format), (count, largest) in sorted(self._counts.items())
        ]


def count_clamped(format: Format, weights: np.ndarray, rows: np.ndarray, largest: float) -> int:
    """Count the clamped weights; largest: the largest magnitude of all weights."""
    if format.name == "F32":
        return 0
    if format.name in BEYOND:
        return int((np.abs(weights) >= BEYOND[format.name]).sum())
    largest_code = float(np.abs(dequantize(format.name, rows)).max())
    return int((np.abs(weights) > largest_code).sum()) if largest_code < (1 - MOST_LOST) * largest else 0
