"""What computes: a graphics card, and the CPU for the first layers if the card has no room for all."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from localllm.arch.states import Recurrent, State
from localllm.arch.storage import KVType
from localllm.engine.cache import KVCache
from localllm.engine.cpu import compiled
from localllm.engine.cuda_cache import CudaCache
from localllm.engine.cuda_card import Card
from localllm.engine.cuda_program import MOST_SEQUENCES, CudaProgram
from localllm.engine.cuda_recurrent import CardLayout
from localllm.engine.joint_cache import JointCache
from localllm.engine.lowering import Crossing
from localllm.engine.page_table import PageTable
from localllm.engine.pages import Pages
from localllm.engine.program import BATCH, Program, Span
from localllm.engine.recorder import Operation
from localllm.engine.recurrent import RecurrentState
from localllm.engine.sequence import Store
from localllm.engine.shift import Turn
from localllm.engine.split import split
from localllm.engine.store import HybridStore
from localllm.engine.tape import row_bytes
from localllm.errors import UnsupportedError
from localllm.kernels.arguments import PAGE
from localllm.kernels.library import Progress


class CudaBackend:
    """A model on a card; as localllm.engine.model.Backend says."""

    def __init__(
        self, card: Card, operations: list[Operation], states: Sequence[State], context: int, kv_type: KVType,
        threads: int, progress: Progress | None, uploading: Progress | None = None, on_cpu: int = 0,
        spare: int = 0,
    ):  # fmt: skip
        """on_cpu: how many of the first layers the CPU computes; uploading(bytes, of all) hears of weights; spare:
        bytes that the card has besides weights, buffers and one context.

        Raises MemoryLimitError, UnsupportedError.
        """
        self._card, self.warning = card, None
        self._front: Program | None = None
        kept = [state for state in states if not isinstance(state, Recurrent)]
        recurrent = [state for state in states if isinstance(state, Recurrent)]
        self._cache = CudaCache(card, [state for state in kept if state.layer >= on_cpu], context, kv_type, spare)
        self._places: KVCache | JointCache = self._cache
        self._layout = CardLayout(card, recurrent) if recurrent else None
        taken: Crossing = {}
        if on_cpu:
            if recurrent:
                raise UnsupportedError("a model with recurrent layers has to be on the card whole, or not at all")
            halves = split(operations, on_cpu)
            taken = {x: pinned_rows(card, row_bytes(x.columns)) for x in halves.crossing}
            cache = KVCache([state for state in kept if state.layer < on_cpu], context, kv_type, self._cache.sequences)
            self._places = JointCache(cache, self._cache)
            self._front = compiled(halves.before, cache, None, threads, progress, taken)
            operations, self.warning = halves.behind, self._front.warning
        self._pages, self.place_bytes = Pages(self._cache.pages), self._places.place_bytes
        self._program = CudaProgram(card, operations, self._cache, self._layout, context, progress, taken, uploading)
        self.warning = self.warning or card.warning

    def store(self) -> Store:
        pages = PageTable(self._places, self._pages)
        return HybridStore(pages, RecurrentState(self._layout)) if self._layout else pages

    def places(self) -> tuple[int, int]:
        return PAGE * self._pages.used, PAGE * len(self._pages)

    def run(self, spans: Sequence[Span], precise: bool) -> np.ndarray:
        groups = [spans[i : i + MOST_SEQUENCES] for i in range(0, len(spans), MOST_SEQUENCES)]
        rows = [self._run(group, precise) for group in groups]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _run(self, spans: Sequence[Span], precise: bool) -> np.ndarray:
        """The same for no more spans than the card has tables for; what the CPU leaves is of these alone."""
        if self._front:
            self._front.run([span._replace(wanted=0) for span in spans], precise)
        return self._program.run(spans, precise)

    def prepare_all(self) -> None:
        if self._front:
            self._front.prepare_all()

    def prepare_shift(self, turns: Mapping[int, Turn]) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError("tokens in the middle cannot be forgotten on a card yet: use --on-overflow drop-turns")

    def turn(self, store: Any, first: int, end: int, distance: int) -> None:
        raise AssertionError

    def close(self) -> None:
        if self._front:
            self._front.close()
        self._card.close()


def pinned_rows(card: Card, size: int) -> np.ndarray:
    """Memory of the host for an activation, float32 [BATCH, size / 4]."""
    return card.pinned(BATCH * size).view(np.float32).reshape(BATCH, -1)
