"""Run models on the CPU: the backend, its program for image rows, and the rotation of cached keys."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from localllm.arch.layer_state import LatentState, PagedState, RecurrentLayerState, State
from localllm.engine.cpu.lowering import CpuTarget
from localllm.engine.cpu.program import CpuProgram, RunnerFactory, TapeThreads, compile_program
from localllm.engine.lower.header import RunHeader, SequenceSpan
from localllm.engine.lower.steps import StepMemory, locate_stream
from localllm.engine.lower.tape import Buffer, KernelStep, Tape, compute_row_bytes
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.page_table import CachePool
from localllm.engine.memory.recurrent import StateLayout
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.operations.operation import Operation
from localllm.engine.options import EngineOptions
from localllm.engine.runs import BATCH
from localllm.engine.trace.recorder import ImageRowOperations
from localllm.engine.trace.rope_shift import RopeShift
from localllm.errors import UnsupportedError
from localllm.kernels.build.library import KernelLibrary

if TYPE_CHECKING:
    from localllm.engine.cpu.weight_stream import WeightStorage
    from localllm.engine.hooks import HookedOperations, HookPoints, LayerHook


class CpuBackend:
    """A backend that runs a model on the CPU."""

    rotates_keys = True

    def __init__(
        self, operations: list[Operation], states: Sequence[State], context: int, options: EngineOptions,
        encoding: Sequence[Operation] = (), rows: Callable[[bool], ImageRowOperations | None] | None = None,
        storage: "WeightStorage | None" = None, hooks: "Callable[[bool], HookedOperations] | None" = None,
    ):  # fmt: skip
        """Compile the operations. Raises ModelError, MemoryLimitError, LocalllmError.

        encoding: operations of an encoder. rows, hooks: as in TracedModel. storage: as in compile_program.

        encoding: operations of an encoder. rows: as in TracedModel. storage: as for compile_program.
        """
        recurrent = [state for state in states if isinstance(state, RecurrentLayerState)]
        self._states = [state for state in states if not isinstance(state, RecurrentLayerState)]
        self._cache = KVCache(self._states, context, options.kv_cache_type)
        layout = StateLayout(recurrent) if recurrent else None
        self.room, places = CachePool(self._cache, layout), StepMemory(self._cache, layout, RunHeader())
        if storage:
            storage.reserve_cache(self.room.bytes_per_token * context)
        program = compile_program(operations, places, options.thread_count, options.progress, storage=storage)
        self.storage = storage
        self.create_state, self.get_cache_usage = self.room.create_state, self.room.get_cache_usage
        self.bytes_per_token = self.room.bytes_per_token
        self._run, self.warning, self._programs = program.run, program.warning, [program]
        self.kernel_limits = program.kernel_limits
        self._rows, self._places, self._options = rows, places, options
        self._row_programs: dict[bool, ImageRowProgram] = {}
        self._hooks = hooks
        self._hooked: dict[bool, tuple[HookPoints, CpuProgram]] = {}  # by `with_attention`
        if encoding:
            places = StepMemory(self._cache, layout, RunHeader(max(BATCH, context)))
            encoder = compile_program(encoding, places, options.thread_count, options.progress)
            self._programs.append(encoder)

    def run(self, spans: Sequence[SequenceSpan], precise: bool) -> np.ndarray:
        if (image := spans[0].seen) is None:
            hooks = [span.hook for span in spans if span.hook]
            return self._run_hooked(spans, precise, hooks) if hooks else self._run(spans, precise)
        (span,) = spans
        if span.hook:
            raise UnsupportedError("hidden states of images cannot be read: leave the images out")
        return self._build_row_program(image.is_whole).run(span, precise)

    def _build_row_program(self, is_whole: bool) -> "ImageRowProgram":
        """Return the program for image rows, built on first use. Raises UnsupportedError without image input."""
        if is_whole not in self._row_programs:
            operations = self._rows(is_whole) if self._rows else None
            if operations is None:
                raise UnsupportedError("the model does not accept images")
            self._row_programs[is_whole] = ImageRowProgram(operations, self._places, self._options)
        return self._row_programs[is_whole]

    def _run_hooked(self, spans: Sequence[SequenceSpan], precise: bool, hooks: "Sequence[LayerHook]") -> np.ndarray:
        points, program = self._build_hooked_program(any(hook.attention_layer is not None for hook in hooks))
        points.spans = spans
        try:
            return program.run(spans, precise)
        finally:
            points.spans = ()

    def _build_hooked_program(self, with_attention: bool) -> "tuple[HookPoints, CpuProgram]":
        """Return the program that calls hooks, which is compiled on first use."""
        if with_attention not in self._hooked:
            if self._hooks is None:
                raise UnsupportedError("hidden states of this model cannot be read")
            operations, points = self._hooks(with_attention)
            self._hooked[with_attention] = points, self.compile_second(operations, points.make_runner)
        return self._hooked[with_attention]

    def get_hook_points(self, with_attention: bool) -> "HookPoints":
        """Return the points at which hooks are called. Raises UnsupportedError, LocalllmError."""
        return self._build_hooked_program(with_attention)[0]

    def encode(self, spans: Sequence[SequenceSpan], precise: bool) -> None:
        self._programs[1].run(spans, precise)

    def replace_operations(self, operations: list[Operation]) -> None:
        """Compile other operations in place of the present ones, over the same cache. Raises LocalllmError."""
        threads, progress = self._options.thread_count, self._options.progress
        program = compile_program(operations, self._places, threads, progress, storage=self.storage)
        self._programs[0].close()
        self._programs[0], self._run = program, program.run

    def compile_second(self, operations: list[Operation], make_runner: RunnerFactory | None = None) -> CpuProgram:
        """Compile a second program over the same cache, which `close` closes, too. Raises LocalllmError.

        make_runner: see compile_program.
        """
        places, options = self._places._replace(header=RunHeader()), self._options
        program = compile_program(operations, places, options.thread_count, options.progress, make_runner=make_runner)
        self._programs.append(program)
        return program

    def get_disk_statistics(self) -> dict[str, float]:
        """Return the statistics of CpuProgram.get_disk_statistics."""
        return self._programs[0].get_disk_statistics()

    def prepare_all(self) -> None:
        for program in self._programs:
            program.prepare_all()

    def close(self) -> None:
        for program in self._programs:
            program.close()
        for of_rows in self._row_programs.values():
            of_rows.close()

    def prepare_shift(self, turns: Mapping[State, RopeShift]) -> None:
        self.rotate_keys = KeyRotator(self._cache, self._states, turns, self._options.thread_count).rotate_keys


class ImageRowProgram:
    """A program of the model that takes image rows in place of tokens."""

    def __init__(self, operations: ImageRowOperations, places: StepMemory, options: EngineOptions):
        """Compile the program over the model's cache, with a header of its own. Raises ModelError, LocalllmError."""
        self._operations = operations
        places = places._replace(header=RunHeader())
        self._program = compile_program(operations.operations, places, options.thread_count, options.progress)

    def run(self, span: SequenceSpan, precise: bool) -> np.ndarray:
        assert span.seen is not None
        count, rows = len(span.ids), span.seen.select_rows(span.ids)
        self._operations.rows[:count, : rows.shape[1]] = rows
        turns = span.seen.compute_mrope_positions(span.ids, span.position - span.ahead)
        for angles in self._operations.angles:
            angles.fill(turns)
        return self._program.run([span], precise)

    def close(self) -> None:
        self._program.close()


PLACEHOLDER_IDS = np.zeros(BATCH, np.int64)  # placeholders: only their count matters
BUFFER_ROWS = CpuTarget(1, False, {}).buffer_rows
NO_LOGITS = np.zeros((0, 0), np.float32)


class KeyRotator:
    """Rotates the cached keys of sequences.

    Layers with the same frequencies share a table of angles: 500 tokens of Qwen2.5-Coder 1.5B take 1.7 ms on two
    threads of a Zen 4; with a table for each layer and one thread 11.4.
    """

    def __init__(
        self, cache: KVCache, states: Sequence[PagedState | LatentState], turns: Mapping[State, RopeShift], threads: int
    ):
        self._header, self._tape, self._threads = RunHeader(), Tape(), threads
        self._distances, self._tables = np.zeros(BATCH, np.int64), dict[bytes, Buffer]()
        for state in states:
            if state in turns:
                self._add(cache, state, turns[state])
        library = KernelLibrary({step.kernel for step in self._tape.steps} | {"run", "work"})
        tape = self._tape.finish(library.addresses, threads)
        self._walker = TapeThreads(
            threads, library.addresses, tape, keep=(library, self._header, self._tape.memory, cache)
        )

    def _add(self, cache: KVCache, state: PagedState | LatentState, turn: RopeShift) -> None:
        side, block = cache.get_sides(state)[0], state.find_rotation_sizes(cache.kv_type)[0]
        columns = side.heads * state.key_dim
        x = Buffer(BUFFER_ROWS, compute_row_bytes(columns))
        heads = {"x": x, "stride": x.stride, "head_dim": state.key_dim}
        in_cache = heads | locate_stream(cache, side, self._header)
        hadamard = {"x": x, "y": x, "stride": x.stride, "columns": columns, "block": block}
        pairs, table = len(turn.frequencies), self._add_table(turn)
        rope = heads | {"y": x, "heads": side.heads, "table": table, "pairs": pairs}
        self._append_step(f"recall-{side.kind.upper()}", in_cache, [], [x])
        if block > 1:
            self._append_step("hadamard", hadamard, [x], [x])
        self._append_step("rope", rope | {"step": turn.step, "apart": turn.apart}, [x, table], [x])
        if block > 1:
            self._append_step("hadamard", dict(hadamard), [x], [x])
        self._append_step(f"store-{side.kind.upper()}", dict(in_cache), [x], [])

    def _add_table(self, turn: RopeShift) -> Buffer:
        """Return the table of a rotation's angles, which a step fills; the same for equal frequencies."""
        table = self._tables.get(key := turn.frequencies.tobytes())
        if table is None:
            pairs = len(turn.frequencies)
            self._tables[key] = table = Buffer(BATCH, pairs * 8)
            angles = {"positions": self._distances, "before": 0, "frequencies": turn.frequencies, "pairs": pairs}
            self._append_step("angles", angles | {"table": table, "factor": 1.0}, [], [table])
        return table

    def _append_step(
        self, kernel: str, arguments: dict[str, object], reads: list[Buffer], writes: list[Buffer]
    ) -> None:
        count = self._header.token_count
        step = KernelStep(kernel, {"count": count, **arguments}, 4 * self._threads, count, reads, writes)
        self._tape.append(step)

    def rotate_keys(self, store: SequenceState, first: int, end: int, distance: int) -> None:
        self._distances[:] = -distance
        for position in range(first, end, BATCH):
            count = min(BATCH, end - position)
            self._header.fill([SequenceSpan(store, position, PLACEHOLDER_IDS[:count], 0)], True, NO_LOGITS)
            self._walker.run()
