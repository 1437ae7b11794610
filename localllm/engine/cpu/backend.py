"""What computes: the CPU."""

from collections.abc import Mapping, Sequence

from localllm.arch.states import Recurrent, State
from localllm.engine.cpu.program import compiled
from localllm.engine.lower.steps import StepPlaces
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.recurrent import StateLayout
from localllm.engine.memory.room import Room
from localllm.engine.options import EngineOptions
from localllm.engine.record.operations import Operation
from localllm.engine.record.shift import Turn
from localllm.engine.run import BATCH, Header, Span


class CpuBackend:
    """A model as a tape for the CPU; as localllm.engine.backend.Backend."""

    def __init__(
        self, operations: list[Operation], states: Sequence[State], context: int, options: EngineOptions,
        encoding: Sequence[Operation] = (),
    ):  # fmt: skip
        """encoding: the operations of an encoder. Raises ModelError, MemoryLimitError, LocalllmError."""
        recurrent = [state for state in states if isinstance(state, Recurrent)]
        self._states = [state for state in states if not isinstance(state, Recurrent)]
        self._cache = KVCache(self._states, context, options.kept_as)
        layout = StateLayout(recurrent) if recurrent else None
        self.room, places = Room(self._cache, layout), StepPlaces(self._cache, layout, Header())
        program = compiled(operations, places, options.thread_count, options.progress)
        self.store, self.places, self.place_bytes = self.room.store, self.room.places, self.room.place_bytes
        self.run, self.warning, self._programs = program.run, program.warning, [program]
        if encoding:
            places = StepPlaces(self._cache, layout, Header(max(BATCH, context)))
            encoder = compiled(encoding, places, options.thread_count, options.progress)
            self._programs.append(encoder)

    def encode(self, spans: Sequence[Span], precise: bool) -> None:
        """As of Backend."""
        self._programs[1].run(spans, precise)

    def prepare_all(self) -> None:
        """As of Backend."""
        for program in self._programs:
            program.prepare_all()

    def close(self) -> None:
        """As of Backend."""
        for program in self._programs:
            program.close()

    def prepare_shift(self, turns: Mapping[State, Turn]) -> None:
        """Raises LocalllmError."""
        from localllm.engine.cpu.shift import KeyTurner  # seldom needed

        self.turn = KeyTurner(self._cache, self._states, turns).turn
