"""The backend in plain NumPy: slow, plain to read, what the others are compared with."""

import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids

import numpy as np

from localllm.arch.kv_cache_types import KVType
from localllm.arch.layer_state import State
from localllm.engine.operations.reference import Reference
from localllm.engine.run import Span
from localllm.engine.trace.imatrix_collector import ImatrixCollector
from localllm.engine.trace.rope_shift import RopeShift
from localllm.errors import NOT_NUMBERS, ModelError
from localllm.kernels.reference_cache import Remembered


class ReferenceBackend:
    """A model in plain NumPy, in full precision always."""

    warning: str | None = None
    place_bytes = 0  # Python has the memory

    def __init__(
        self,
        forward: Callable[[Reference], np.ndarray],
        kv_type: KVType,
        context: int,
        observer: ImatrixCollector | None,
        encoding: Callable[[Reference], np.ndarray] | None = None,
    ):
        """forward, encoding: say the architecture's verbs to a builder; context: the most tokens of a sequence."""
        self._forward, self._encoding, self._kv_type, self._context, self._observer = (
            forward,
            encoding,
            kv_type,
            context,
            observer,
        )
        self._matrices: dict[tuple[str, int], np.ndarray] = {}

    def store(self) -> Remembered:
        return Remembered(self._kv_type)

    def places(self) -> tuple[int, int]:
        """None are reserved, and there is no limit."""
        return 0, sys.maxsize

    def run(self, spans: Ids[Span], precise: bool) -> np.ndarray:
        logits = self._forward(Reference(spans, self._matrices, self._context, self._observer))
        if not np.isfinite(logits).all():
            raise ModelError(NOT_NUMBERS)
        return logits

    def encode(self, spans: Ids[Span], precise: bool) -> None:
        assert self._encoding
        self._encoding(Reference(spans, self._matrices, self._context, None))

    def prepare_all(self) -> None: ...

    def prepare_shift(self, turns: Mapping[State, RopeShift]) -> None:
        """Have something to turn keys by."""
        self._turns = turns

    def turn(self, store: Remembered, first: int, end: int, distance: int) -> None:
        """As of Backend."""
        for state, turn in self._turns.items():
            store.turn(state, turn, first, end, distance)

    def close(self) -> None:
        """Nothing to end."""
