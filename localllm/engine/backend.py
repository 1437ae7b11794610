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
    rotates_keys: bool  # whether prepare_shift and rotate_keys are supported

    @property
    def kernel_limits(self) -> Ids[int]:
        """Numbers of tokens, ascending, above which a matrix product uses other kernels: see localllm.engine.run."""
        ...

    def store(self) -> SequenceState:
        """Create the state of a new sequence."""
        ...

    def cache_usage(self) -> tuple[int, int]:
        """Return how many token slots of the cache are in use and how many there are, in whole pages."""
        ...

    def run(self, spans: Ids[Span], precise: bool) -> np.ndarray:
        """Compute the requested logits of all spans in order: float32 [wanted, vocab].

        spans: together at most BATCH tokens; precise: keep activations in 16 bits if there are few tokens. Raises
        ModelError if a logit is NaN or infinite.
        """
        ...

    def encode(self, spans: Ids[Span], precise: bool) -> None:
        """Run the encoder over whole texts, each in a span; decoding attends to its output.

        Raises the errors of `run`.
        """
        ...

    def prepare_all(self) -> None:
        """Wait until all kernels are compiled, which happens in the background. Raises LocalllmError."""
        ...

    def prepare_shift(self, turns: Mapping[State, RopeShift]) -> None:
        """Compile kernels that rotate cached keys; turns: how each layer's keys rotate. Raises LocalllmError."""
        ...

    def rotate_keys(self, store: SequenceState, first: int, end: int, distance: int) -> None:
        """Rotate the keys at positions [first, end), which were cached for positions `distance` later."""
        ...

    def close(self) -> None: ...
