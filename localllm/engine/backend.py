"""The interface between an engine and a backend."""

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from typing import Protocol

import numpy as np

from localllm.arch.layer_state import State
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.run import Span
from localllm.engine.trace.rope_shift import RopeShift


class Backend(Protocol):
    """Computes a model's runs."""

    warning: str | None  # a line for the user, or None
    bytes_per_token: int  # memory of one token in all layers

    def store(self) -> SequenceState:
        """Create the state of a new sequence."""
        ...

    def cache_usage(self) -> tuple[int, int]:
        """Return the token places in use and in total, in whole pages."""
        ...

    def run(self, spans: Ids[Span], precise: bool) -> np.ndarray:
        """Compute the wanted logits, span by span: float32 [wanted, vocab]. The spans have at most BATCH tokens.

        Raises ModelError if some are not numbers.
        """
        ...

    def encode(self, spans: Ids[Span], precise: bool) -> None:
        """Run the model's encoder over whole texts, as `run`, for the tokens that are decoded later."""
        ...

    def prepare_all(self) -> None:
        """Wait for kernels that are compiled in the background. Raises LocalllmError."""
        ...

    def prepare_shift(self, turns: Mapping[State, RopeShift]) -> None:
        """Prepare to rotate keys, those of each layer by its RopeShift. Raises LocalllmError."""
        ...

    def rotate_keys(self, store: SequenceState, first: int, end: int, distance: int) -> None:
        """Rotate keys at positions `first` to end - 1, which were `distance` later, to their new positions."""
        ...

    def close(self) -> None: ...
