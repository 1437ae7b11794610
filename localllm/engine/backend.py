"""What an engine asks of what computes."""

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from typing import Any, Protocol

import numpy as np

from localllm.arch.layer_state import State
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.run import Span
from localllm.engine.trace.rope_shift import RopeShift


class Backend(Protocol):
    """What computes."""

    warning: str | None  # what the user should know about it
    place_bytes: int  # of memory for one token of a sequence

    def store(self) -> SequenceState:
        """What is kept for a new sequence."""
        ...

    def places(self) -> tuple[int, int]:
        """For how many tokens there are places in use, and at all; whole pages."""
        ...

    def run(self, spans: Ids[Span], precise: bool) -> np.ndarray:
        """The wanted logits, span by span: float32 [wanted, vocab]. Together, the spans have BATCH tokens at most.

        Raises ModelError if some are not numbers.
        """
        ...

    def encode(self, spans: Ids[Span], precise: bool) -> None:
        """Have the model's encoder read whole texts, as `run`, for what is decoded behind them."""
        ...

    def prepare_all(self) -> None:
        """Wait for kernels that are compiled behind the first runs. Raises LocalllmError."""
        ...

    def prepare_shift(self, turns: Mapping[State, RopeShift]) -> None:
        """Be able to turn keys, those of a layer each in its way. Raises LocalllmError."""
        ...

    def turn(self, store: Any, first: int, end: int, distance: int) -> None:
        """Keys at positions `first` to end - 1, which were `distance` further behind, become those of their places."""
        ...

    def close(self) -> None: ...
