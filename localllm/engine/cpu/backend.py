"""The CPU backend."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from localllm.arch.layer_state import Recurrent, State
from localllm.engine.cpu.program import Program, compile_program
from localllm.engine.cpu.rows import RowProgram
from localllm.engine.lower.steps import StepPlaces
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.page_table import CachePool
from localllm.engine.memory.recurrent import StateLayout
from localllm.engine.operations.operation import Operation
from localllm.engine.options import EngineOptions
from localllm.engine.run import BATCH, Header, Span
from localllm.engine.trace.image_rows import RowOperations
from localllm.engine.trace.rope_shift import RopeShift
from localllm.errors import UnsupportedError


class CpuBackend:
    """A localllm.engine.backend.Backend that runs a model on the CPU."""

    rotates_keys = True

    def __init__(
        self, operations: list[Operation], states: Sequence[State], context: int, options: EngineOptions,
        encoding: Sequence[Operation] = (), rows: Callable[[bool], RowOperations | None] | None = None,
    ):  # fmt: skip
        """Compile the operations; encoding: those of an encoder; rows: as in TracedModel.

        Raises ModelError, MemoryLimitError, LocalllmError.
        """
        recurrent = [state for state in states if isinstance(state, Recurrent)]
        self._states = [state for state in states if not isinstance(state, Recurrent)]
        self._cache = KVCache(self._states, context, options.kv_cache_type)
        layout = StateLayout(recurrent) if recurrent else None
        self.room, places = CachePool(self._cache, layout), StepPlaces(self._cache, layout, Header())
        program = compile_program(operations, places, options.thread_count, options.progress)
        self.store, self.cache_usage, self.bytes_per_token = (
            self.room.store,
            self.room.cache_usage,
            self.room.bytes_per_token,
        )
        self._run, self.warning, self._programs = program.run, program.warning, [program]
        self.kernel_limits = program.kernel_limits
        self._rows, self._places, self._options = rows, places, options
        self._row_programs: dict[bool, RowProgram] = {}
        if encoding:
            places = StepPlaces(self._cache, layout, Header(max(BATCH, context)))
            encoder = compile_program(encoding, places, options.thread_count, options.progress)
            self._programs.append(encoder)

    def run(self, spans: Sequence[Span], precise: bool) -> np.ndarray:
        if (image := spans[0].seen) is None:
            return self._run(spans, precise)
        (span,) = spans
        return self._row_program(image.is_whole).run(span, precise)

    def _row_program(self, is_whole: bool) -> RowProgram:
        """Return the program for image rows, built when the first image is read."""
        if is_whole not in self._row_programs:
            operations = self._rows(is_whole) if self._rows else None
            if operations is None:
                raise UnsupportedError("this kind of model does not accept images")
            self._row_programs[is_whole] = RowProgram(operations, self._places, self._options)
        return self._row_programs[is_whole]

    def encode(self, spans: Sequence[Span], precise: bool) -> None:
        self._programs[1].run(spans, precise)

    def become(self, operations: list[Operation]) -> None:
        """Replace the operations, keeping the cache. Raises LocalllmError."""
        program = compile_program(operations, self._places, self._options.thread_count, self._options.progress)
        self._programs[0].close()
        self._programs[0], self._run = program, program.run

    def beside(self, operations: list[Operation]) -> Program:
        """Compile another program over the same cache; `close` closes it, too. Raises LocalllmError."""
        places = self._places._replace(header=Header())
        self._programs.append(compile_program(operations, places, self._options.thread_count, self._options.progress))
        return self._programs[-1]

    def prepare_all(self) -> None:
        for program in self._programs:
            program.prepare_all()

    def close(self) -> None:
        for program in self._programs:
            program.close()
        for of_rows in self._row_programs.values():
            of_rows.close()

    def prepare_shift(self, turns: Mapping[State, RopeShift]) -> None:
        from localllm.engine.cpu.rope_shift import KeyRotator  # rarely needed

        self.rotate_keys = KeyRotator(self._cache, self._states, turns).rotate_keys
