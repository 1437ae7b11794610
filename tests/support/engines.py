"""Engines for tests: opened with few arguments, or reading a single sequence."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.machine import has_tiles


def bound(exact: float, in_tiles: float) -> float:
    """Return the error bound of this CPU's products: BF16 tiles take 16 bits of an F32, in two planes."""
    return in_tiles if has_tiles() else exact


# How far a CPU's logits may be from what weights in float32 come to.
FAITHFUL = bound(1e-9, in_tiles=3e-8)


class SingleEngine(Engine):
    """An engine with one sequence."""

    def forward(self, ids: Sequence[int], position: int, logits: str = "last", precise: bool = True) -> np.ndarray:
        """Rewind to a position and append tokens there."""
        if not hasattr(self, "_sequence"):
            self._sequence = self.sequence()
        assert self._sequence.truncate(position) == position, "tokens are missing"
        return self._sequence.append(ids, logits, precise)


def open_engine(model: str | Path | GGUFFile, **options) -> SingleEngine:
    """Open an engine with EngineOptions; two threads unless set."""
    file = model if isinstance(model, GGUFFile) else GGUFFile.open(model)
    return SingleEngine(file, EngineOptions(**{"threads": 2, **options}))
