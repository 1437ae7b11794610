"""Run models in plain NumPy: slow and simple, the oracle that other backends are tested against."""

import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids

import numpy as np

from localllm.arch.layer_state import KVType, State
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.engine.trace.imatrix_collector import ImatrixCollector
from localllm.engine.trace.rope_shift import RopeShift
from localllm.errors import NOT_NUMBERS, ModelError
from localllm.kernels.reference import ReferenceCache


class ReferenceBackend:
    """A backend in plain NumPy, always in full precision."""

    warning: str | None = None
    bytes_per_token = 0  # memory is managed by Python
    rotates_keys, kernel_limits = True, ()

    def __init__(
        self, forward: Callable[[ReferenceBuilder], np.ndarray], kv_type: KVType, context: int,
        observer: ImatrixCollector | None, encoding: Callable[[ReferenceBuilder], object] | None = None,
    ):  # fmt: skip
        """Set what runs need.

        forward, encoding: call the architecture's verbs on a builder.
        """
        self._forward, self._encoding, self._kv_type = forward, encoding, kv_type
        self._context, self._observer = context, observer
        self._matrices: dict[tuple[str, int], np.ndarray] = {}

    def create_state(self) -> ReferenceCache:
        return ReferenceCache(self._kv_type)

    def get_cache_usage(self) -> tuple[int, int]:
        """Return 0 and no limit, because arrays grow as needed."""
        return 0, sys.maxsize

    def run(self, spans: Ids[SequenceSpan], precise: bool) -> np.ndarray:
        logits = self._forward(ReferenceBuilder(spans, self._matrices, self._context, self._observer))
        if not np.isfinite(logits).all():
            raise ModelError(NOT_NUMBERS)
        return logits

    def encode(self, spans: Ids[SequenceSpan], precise: bool) -> None:
        assert self._encoding
        self._encoding(ReferenceBuilder(spans, self._matrices, self._context, None))

    def prepare_all(self) -> None: ...

    def prepare_shift(self, turns: Mapping[State, RopeShift]) -> None:
        self._turns = turns

    def rotate_keys(self, store: SequenceState, first: int, end: int, distance: int) -> None:
        assert isinstance(store, ReferenceCache)
        for state, turn in self._turns.items():
            store.rotate_keys(state, turn, first, end, distance)

    def close(self) -> None: ...
