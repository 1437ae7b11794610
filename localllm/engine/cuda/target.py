"""What a card chooses: grids have room for the most rows of a program, and kernels have memory of their own."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cuda.weights import CardWeights
from localllm.frozen import frozen


@frozen
class CudaTarget:
    """As localllm.engine.lower.steps.Target, for a program of so many tokens, and of those whose logits are wanted."""

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
        """Of a product of tensor cores: 16, or 8 with compute capability 7.5."""
        return 16 if self.weights.capability >= (8, 0) else 8

    def matrix(self, weight: Weight) -> int:
        """As of Target."""
        return self.weights.address(weight)

    def layout_of(self, weight: Weight) -> tuple[str, int]:
        """As of Target."""
        return CardWeights.format(weight), CardWeights.row_bytes(weight)

    def scratch(self, size: int) -> dict[str, Any]:
        """Kernels have memory of their own."""
        return {"scratch": 0, "scratch_bytes": 0}

    def share(self, rows: int, count: np.ndarray) -> tuple[int, np.ndarray | None]:
        """All rows there may be: how many there are is known to the card."""
        return rows, None

    def parts(self, wanted: int, rows: int) -> int:
        """As of `share`."""
        return rows
