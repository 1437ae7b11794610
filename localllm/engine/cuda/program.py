"""Run models on the GPU, with one program per size (a power of two of tokens), built on demand."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from localllm.arch.layer_state import KVType, RecurrentLayerState, State
from localllm.arch.weights import Weight
from localllm.engine.cuda.card import MAX_CHUNK_BYTES, Gpu, KernelLaunch
from localllm.engine.cuda.lowering import convert_step, list_kernels, lower_to_gpu
from localllm.engine.cuda.weights import GpuWeights
from localllm.engine.lower.header import RunHeader, SequenceSpan, TextSpan, allocate_int64
from localllm.engine.lower.steps import StepMemory
from localllm.engine.lower.tape import assign_stages, plan_offsets
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.recurrent import StateLayout
from localllm.engine.operations.operation import Crossing, MatrixOperation, Operation
from localllm.engine.options import EngineOptions
from localllm.engine.runs import BATCH
from localllm.errors import NOT_NUMBERS, ModelError
from localllm.kernels.build.objects import Progress
from localllm.kernels.cuda import compute_grid
from localllm.kernels.table import FETCH, PAGE

MAX_SEQUENCES = 64  # maximum number of sequences in a run; the header holds a page table for each


class PinnedHeader(RunHeader):
    """A header in pinned host memory, which one kernel copies to the GPU with the sequences' page tables.

    Attributes:
        words: the whole header, int64.  base: its GPU address.
    """

    def __init__(self, card: Gpu, tokens: int, table_words: int):
        """Allocate the header for at most `tokens` tokens, and `table_words` pages per sequence."""
        sequences = min(tokens, MAX_SEQUENCES)
        size = count_header_words(tokens) + sequences * table_words
        self.words, self._used = card.allocate_pinned(8 * size).view(np.int64), 0
        self.words[:] = 0
        super().__init__(tokens, self._allocate)
        self._tables = self._allocate((sequences, table_words))
        self.base = 0

    def _allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape))
        self._used += size
        return self.words[self._used - size : self._used].reshape(shape)

    def find_offset(self, array: np.ndarray) -> int | None:
        """Return the byte offset of an array that belongs to the header, None for any other."""
        offset = array.ctypes.data - self.words.ctypes.data
        return offset if 0 <= offset < self.words.nbytes else None

    def fill(self, spans: Sequence[SequenceSpan], precise: bool, logits: np.ndarray) -> None:
        super().fill(spans, precise, logits)
        for number, span in enumerate(spans):
            table = span.store.table
            self._tables[number, : len(table)] = table
            self.sequences[number, 3] = self.base + self._tables[number].ctypes.data - self.words.ctypes.data

    def describe_texts(self, texts: Sequence[TextSpan], pages: np.ndarray, rows: np.ndarray, precise: bool) -> None:
        super().describe_texts(texts, pages, rows, precise)
        first = 0
        for number, text in enumerate(texts):
            count = -(-len(text.ids) // PAGE)
            self._tables[number, :count] = pages[first : first + count]
            self.sequences[number, 3] = self.base + self._tables[number].ctypes.data - self.words.ctypes.data
            first += count


def count_header_words(tokens: int) -> int:
    """Return how many int64 words a header allocates."""
    arrays = list[np.ndarray]()

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        arrays.append(allocate_int64(shape))
        return arrays[-1]

    RunHeader(tokens, allocate)
    return sum(array.size for array in arrays)


class BufferArena:
    """The GPU memory of buffers, which programs share because only one runs at a time."""

    def __init__(self, card: Gpu):
        self._card, self._address, self._size = card, 0, -1

    def reserve(self, size: int) -> int:
        """Return the address of at least `size` bytes; earlier addresses stay valid. Raises MemoryLimitError."""
        if size > self._size:
            self._address, self._size = self._card.allocate(max(size, 1)), size
        return self._address


class GpuContext(NamedTuple):
    """The memory and settings that programs of all sizes share.

    imported: activations that the CPU computes, see `lower_operations`.
    """

    card: Gpu
    operations: list[Operation]
    cache: KVCache
    layout: StateLayout | None
    weights: GpuWeights
    context: int
    imported: Crossing
    arena: BufferArena


class SizedProgram:
    """A model on the GPU for up to `size` tokens and logits."""

    def __init__(self, model: GpuContext, size: tuple[int, int], progress: Progress | None):
        """Lower and record the program.

        size: maximum counts of tokens and of requested logits.
        """
        card = self._card = model.card
        self.header = PinnedHeader(card, size[0], -(-model.context // PAGE))
        self._constants: dict[int, tuple[int, np.ndarray]] = {}
        places = StepMemory(model.cache, model.layout, self.header)
        steps = lower_to_gpu(model.operations, places, model.weights, size, model.imported)
        assign_stages(steps)
        self._keep, memory = steps, model.arena.reserve(plan_offsets(steps))
        self.header.base = card.allocate(self.header.words.nbytes)
        self._flaws = card.allocate_pinned(8).view(np.int64)
        card.prepare(list_kernels(steps) | {"fetch"}, progress)
        fetch = {"source": self.header.words.ctypes.data, "target": self.header.base, "words": len(self.header.words)}
        first = KernelLaunch("fetch", compute_grid("fetch", fetch, 0), tuple(fetch[name] for name in FETCH._fields))
        works = [convert_step(step, self._place, memory) for step in steps]
        self._replay: Callable[[], None] = card.record([first, *works])

    def _place(self, array: np.ndarray) -> int:
        """Return the GPU address of an array, which is uploaded once unless it belongs to the header."""
        if array is self.header.flaws:
            return int(self._flaws.ctypes.data)
        offset = self.header.find_offset(array)
        if offset is not None:
            return self.header.base + offset
        if id(array) not in self._constants:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            address = self._card.allocate(max(len(data), 1))
            self._card.upload(address, data)
            self._constants[id(array)] = address, array
        return self._constants[id(array)][0]

    def run(self, fill: Callable[[PinnedHeader], None]) -> None:
        """Run the program on what `fill` writes into the header. Raises ModelError for NaN or infinite logits."""
        self._flaws[0] = 0
        fill(self.header)
        self._replay()
        self._card.synchronize()
        if self._flaws[0]:
            raise ModelError(NOT_NUMBERS)


class CudaProgram:
    """A model on the GPU, for runs of any size."""

    def __init__(
        self, card: Gpu, operations: list[Operation], cache: KVCache, layout: StateLayout | None, context: int,
        options: EngineOptions, crossing: Crossing,
    ):  # fmt: skip
        """Upload the matrices.

        crossing: activations that the CPU computes (`imported` of `lower_operations`).
        """
        matrices = [operation.weight for operation in operations if isinstance(operation, MatrixOperation)]
        weights = GpuWeights(card, matrices, options.on_upload)
        for weight in matrices:
            weights.get_address(weight)
        self._model = GpuContext(card, operations, cache, layout, weights, context, crossing, BufferArena(card))
        self._card, self._vocab_size = card, operations[-1].output.columns
        self._programs: dict[tuple[int, int], SizedProgram] = {}
        self._logits = np.zeros((0, self._vocab_size), np.float32)
        for size in ((BATCH, 1), (1, 1)):  # the largest first: its memory suffices for the others
            self._programs[size] = SizedProgram(self._model, size, options.progress)

    def run(self, spans: Sequence[SequenceSpan], precise: bool) -> np.ndarray:
        tokens, wanted = sum(len(span.ids) for span in spans), sum(span.wanted for span in spans)
        return self._run(tokens, wanted, lambda header, logits: header.fill(spans, precise, logits))

    def read(self, texts: Sequence[TextSpan], pages: np.ndarray) -> np.ndarray:
        tokens = sum(len(text.ids) for text in texts)
        return self._run(tokens, len(texts), lambda header, rows: header.describe_texts(texts, pages, rows, False))

    def _run(self, tokens: int, wanted: int, fill: Callable[[PinnedHeader, np.ndarray], None]) -> np.ndarray:
        """Return the output, float32 [wanted, vocab].

        fill(header, output): describes the run in the header.
        """
        self._card.use()
        if wanted > len(self._logits):
            size = 4 * round_program_size(wanted) * self._vocab_size
            self._logits = self._card.allocate_pinned(size).view(np.float32).reshape(-1, self._vocab_size)
        logits = self._logits[:wanted]
        self._get_program(round_program_size(tokens), round_program_size(max(wanted, 1))).run(
            lambda header: fill(header, logits)
        )
        return logits.copy()

    def _get_program(self, tokens: int, wanted: int) -> SizedProgram:
        """Return the program of this size, built on first use."""
        size = tokens, wanted
        if size not in self._programs:
            self._programs[size] = SizedProgram(self._model, size, None)
        return self._programs[size]


def compute_buffer_bytes(operations: list[Operation], states: Sequence[State], kv_type: KVType) -> int:
    """Return the bytes that a GPU needs besides weights and cache: buffers for BATCH tokens and for uploads."""
    paged = [state for state in states if not isinstance(state, RecurrentLayerState)]
    recurrent = [state for state in states if isinstance(state, RecurrentLayerState)]
    cache, layout = KVCache(paged, PAGE, kv_type, (1,)), StateLayout(recurrent) if recurrent else None
    steps = lower_to_gpu(operations, StepMemory(cache, layout, RunHeader()), UnplacedWeights(), (BATCH, 1), {})
    assign_stages(steps)
    return plan_offsets(steps) + 3 * MAX_CHUNK_BYTES


class UnplacedWeights(GpuWeights):
    """A stand-in for uploaded matrices, where only the sizes of buffers are computed."""

    capability = 8, 0

    def __init__(self) -> None:
        """Upload nothing."""

    def get_address(self, weight: Weight) -> int:
        return 0


def round_program_size(tokens: int) -> int:
    """Round a token count up to a power of two. Only runs of whole inputs have more than BATCH tokens."""
    return 1 << (tokens - 1).bit_length()
