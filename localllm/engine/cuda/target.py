"""The GPU's choices: grids cover the most rows of a program, and kernels have their own scratch memory."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cuda.weights import CardWeights
from localllm.frozen import frozen


@frozen
class CudaTarget:
    """A localllm.engine.lower.steps.Target for a program of at most `tokens` tokens and `wanted_rows` logits."""

    tokens: int
    wanted_rows: int
    weights: CardWeights
    verbs: Mapping[str, Callable[..., None]]
    expert_rows: ClassVar[int] = 1
    threads: ClassVar[int] = 1

    @property
    def buffer_rows(self) -> int:
        return self.tokens

    @property
    def depth(self) -> int:
        """Depth of a tensor core product: 16, or 8 with compute capability 7.5."""
        return 16 if self.weights.capability >= (8, 0) else 8

    def matrix(self, weight: Weight) -> int:
        return self.weights.address(weight)

    def layout_of(self, weight: Weight) -> tuple[str, int]:
        return CardWeights.format(weight), CardWeights.row_bytes(weight)

    def scratch(self, size: int) -> dict[str, object]:
        """Return no arguments: kernels have scratch memory of their own."""
        return {"scratch": 0, "scratch_bytes": 0}

    def share(self, rows: int, count: np.ndarray) -> tuple[int, np.ndarray | None]:
        """Return parts for the most rows: only the GPU knows the actual number."""
        return rows, None

    def parts(self, wanted: int, rows: int) -> int:
        return rows
