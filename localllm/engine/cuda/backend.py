"""Run models on a GPU, with the first layers on the CPU if the GPU lacks memory for all."""

from collections.abc import Mapping, Sequence

import numpy as np

from localllm.arch.layer_state import RecurrentLayerState, State
from localllm.engine.cpu.program import CpuProgram, compile_program
from localllm.engine.cuda import devices
from localllm.engine.cuda.cache import CudaCache, GpuStateLayout
from localllm.engine.cuda.card import Gpu
from localllm.engine.cuda.devices import split_at_layer
from localllm.engine.cuda.program import MAX_SEQUENCES, CudaProgram
from localllm.engine.lower.header import RunHeader, SequenceSpan, TextSpan
from localllm.engine.lower.steps import StepMemory
from localllm.engine.lower.tape import compute_row_bytes
from localllm.engine.memory.cache import JointCache, KVCache
from localllm.engine.memory.page_table import CachePool
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.operations.operation import Crossing, Operation
from localllm.engine.options import EngineOptions
from localllm.engine.runs import BATCH
from localllm.engine.trace.rope_shift import RopeShift
from localllm.errors import UnsupportedError
from localllm.kernels.table import PAGE


class CudaBackend:
    """A backend that runs a model on a GPU."""

    rotates_keys, kernel_limits = False, ()

    def __init__(
        self, card: Gpu, operations: list[Operation], states: Sequence[State], context: int, options: EngineOptions,
        on_cpu: int = 0, spare: int = 0,
    ):  # fmt: skip
        """Upload the model. Raises MemoryLimitError, UnsupportedError.

        on_cpu: number of first layers that the CPU computes. spare: bytes of GPU memory that are free for a second
        context.
        """
        self._card, self.warning, kv_type = card, None, options.kv_cache_type
        self._cpu_program: CpuProgram | None = None
        paged = [state for state in states if not isinstance(state, RecurrentLayerState)]
        recurrent = [state for state in states if isinstance(state, RecurrentLayerState)]
        cache = CudaCache(card, [state for state in paged if state.layer >= on_cpu], context, kv_type, spare)
        both: KVCache | JointCache = cache
        layout = GpuStateLayout(card, recurrent) if recurrent else None
        crossing: Crossing = {}
        if on_cpu:
            if recurrent:
                raise UnsupportedError(
                    "a model with recurrent layers cannot be split between GPU and CPU: use -ngl all or -ngl 0"
                )
            halves = split_at_layer(operations, on_cpu)
            pinned = {x: card.allocate_pinned(BATCH * compute_row_bytes(x.columns)) for x in halves.crossing}
            crossing = {x: memory.view(np.float32).reshape(BATCH, -1) for x, memory in pinned.items()}
            first = KVCache([state for state in paged if state.layer < on_cpu], context, kv_type, cache.sequences)
            both, places = JointCache(first, cache), StepMemory(first, None, RunHeader())
            self._cpu_program = compile_program(halves.before, places, options.thread_count, options.progress, crossing)
            operations, self.warning = halves.behind, self._cpu_program.warning
        room = CachePool(both, layout)
        self.create_state, self.get_cache_usage, self.bytes_per_token = (
            room.create_state,
            room.get_cache_usage,
            room.bytes_per_token,
        )
        self._program = CudaProgram(card, operations, cache, layout, context, options, crossing)
        self.warning = self.warning or card.warning

    def run(self, spans: Sequence[SequenceSpan], precise: bool) -> np.ndarray:
        groups = [spans[i : i + MAX_SEQUENCES] for i in range(0, len(spans), MAX_SEQUENCES)]
        rows = [self._run(group, precise) for group in groups]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _run(self, spans: Sequence[SequenceSpan], precise: bool) -> np.ndarray:
        if self._cpu_program:
            self._cpu_program.run([span._replace(wanted=0) for span in spans], precise)
        return self._program.run(spans, precise)

    def encode(self, spans: Sequence[SequenceSpan], precise: bool) -> None:
        """Fail, because encoders run on the CPU (localllm.engine.backend)."""
        raise AssertionError

    def prepare_all(self) -> None:
        if self._cpu_program:
            self._cpu_program.prepare_all()

    def prepare_shift(self, turns: Mapping[State, RopeShift]) -> None:
        raise AssertionError

    def rotate_keys(self, store: SequenceState, first: int, end: int, distance: int) -> None:
        raise AssertionError

    def close(self) -> None:
        if self._cpu_program:
            self._cpu_program.close()
        self._card.close()


class CudaEmbeddingRunner:
    """A model on a GPU that computes one vector per input.

    Attributes:
        name, warning: those of the GPU, see Gpu.
    """

    def __init__(self, operations: list[Operation], states: Sequence[State], context: int, options: EngineOptions):
        """Upload the model. Raises NoGpuError, MemoryLimitError, UnsupportedError.

        context: maximum number of tokens in an input.
        """
        self._card = card = devices.open_card(int(options.backend.partition(":")[2] or 0))
        try:
            self._pages = np.arange(-(-max(BATCH, context) // PAGE) + MAX_SEQUENCES)
            cache = CudaCache(card, states, len(self._pages) * PAGE, options.kv_cache_type, 0)
            self._program = CudaProgram(card, operations, cache, None, context, options, {})
        except BaseException:
            card.close()
            raise
        self.name, self.warning = card.name, card.warning

    def read(self, texts: Sequence[TextSpan]) -> np.ndarray:
        groups = [texts[i : i + MAX_SEQUENCES] for i in range(0, len(texts), MAX_SEQUENCES)]
        return np.concatenate([self._program.read(group, self._pages) for group in groups])

    def close(self) -> None:
        self._card.close()
