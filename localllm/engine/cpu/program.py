"""Run a compiled model on the CPU: the header of a run, the tape, and the threads that execute it."""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from localllm.arch.layer_state import KVType, State
from localllm.engine.cpu.kernel_variants import RunShape, VariantLoader
from localllm.engine.cpu.lowering import CpuTarget, create_target, optimize_graph, uses_integers
from localllm.engine.cpu.row_prefetch import RowPrefetch
from localllm.engine.lower.header import RunHeader, SequenceSpan, TextSpan
from localllm.engine.lower.steps import StepMemory
from localllm.engine.lower.tape import KernelStep, Tape, slice_steps
from localllm.engine.memory.cache import HeadStreams, KVCache, ReservedMemory
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.operation import Crossing, MatrixProduct, Operation, lower_operations
from localllm.engine.runs import PRECISE_TOKENS
from localllm.errors import NOT_NUMBERS, ModelError
from localllm.files.gguf.file import release_pages
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.build.objects import Progress
from localllm.kernels.cpu import MAX_FLOAT_ROW_TOKENS, MIN_ALL_TILES, MIN_TILE_TOKENS
from localllm.kernels.cpu.shared_job import JOB, JOB_WORDS
from localllm.kernels.table import PAGE
from localllm.system.cpu import CACHE_LINE
from localllm.system.processes import get_waiting_functions, init_waiting

if TYPE_CHECKING:
    from localllm.engine.cpu.weight_stream import WeightStorage

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class WorkerGroup:
    """The state that worker threads share.

    It has no reference to `TapeThreads`, which can therefore be garbage-collected while threads sleep.
    """

    def __init__(self, addresses: dict[str, int], tape: np.ndarray, keep: object):
        """Allocate the shared job.

        tape: int64 [steps, len(STEP)]. keep: objects that must outlive the tape.
        """
        self.keep = keep, tape
        self.run, self.work = KERNEL(addresses["run"]), KERNEL(addresses["work"])
        self.cells, self.job = allocate_aligned(len(tape) * CACHE_LINE), allocate_aligned(JOB_WORDS * 8)
        for place, value in ((JOB.tape, tape.ctypes.data), (JOB.steps, len(tape)), (JOB.cells, self.cells.ctypes.data)):
            self.job[place] = value
        self.prepare_system_calls()
        self.threads: list[threading.Thread] = []
        self.process = os.getpid()

    def prepare_system_calls(self) -> None:
        """Write the addresses of the system's waiting functions, mutexes and condition into the job."""
        self.job[JOB.offer : JOB.wake + 1] = get_waiting_functions()
        run, sleep, wake = (
            self.job.ctypes.data + 8 * place for place in (JOB.run_mutex, JOB.sleep_mutex, JOB.wake_condition)
        )
        init_waiting((run, sleep), wake)

    def select_steps(self, first: int, end: int) -> None:
        """Set the steps of the next runs. A late thread sees that its run is over, and executes no step."""
        tape = self.keep[1]
        self.job[JOB.tape], self.job[JOB.steps] = tape[first:].ctypes.data, end - first

    def start(self, count: int) -> None:
        for i in range(1, count):
            thread = threading.Thread(target=self._work, args=(i,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _work(self, thread: int) -> None:
        self.work(self.job.ctypes.data, thread, 0, 0)

    def stop(self) -> None:
        """Make the threads end after the current run, without waiting; do nothing in a forked process.

        A finalizer that waited could hold a lock of `threading` that they need to end.
        """
        if os.getpid() == self.process:
            self.run(self.job.ctypes.data, 1, 0, 0)

    def join(self) -> None:
        if os.getpid() == self.process:
            for thread in self.threads:
                thread.join()


class TapeThreads:
    """Threads that run a tape (see localllm.kernels.cpu.tape_runner for the rules).

    They end with `close`, with the last reference, or when Python ends, whichever comes first.
    """

    def __init__(self, count: int, addresses: dict[str, int], tape: np.ndarray, keep: object = None):
        self._workers = WorkerGroup(addresses, tape, keep)
        self._end = weakref.finalize(self, self._workers.stop)
        self._workers.start(count)

    def close(self) -> None:
        self._end()
        self._workers.join()

    def run(self) -> None:
        """Run the tape once; after `close`, on the caller's thread alone. Concurrent calls are serialized.

        Ctrl-C takes effect after the run. Memory that the tape reads may change only between runs.
        """
        self._workers.run(self._workers.job.ctypes.data, 0, 0, 0)

    def run_steps(self, first: int, end: int) -> None:
        """Run only steps [first, end), which must be whole stages; `run` then repeats these steps.

        Only a single caller may use it, and must run the other steps later.
        """
        self._workers.select_steps(first, end)
        self.run()


def allocate_aligned(size: int) -> np.ndarray:
    """Allocate `size` bytes of zeros, int64, aligned to a cache line."""
    memory = np.zeros((size + CACHE_LINE) // 8, np.int64)
    start = -memory.ctypes.data % CACHE_LINE // 8
    return memory[start : start + size // 8]


class TapeRunner(Protocol):
    """Runs a tape in slices of whole stages."""

    def run(self) -> None:
        """Run the tape once."""
        ...

    def get_statistics(self) -> dict[str, float]:
        """Return what was read from the disk; empty if the system reads the weights."""
        ...

    def close(self) -> None: ...


class StreamingRunner:
    """Runs a tape in slices, and releases the memory of each slice's weights afterwards.

    A vision encoder reads each weight once per image, and images are rare: with all weights mapped a process holds 950
    MB for SigLIP-400M's shape in F16, with slices 235 MB. Releasing 0.8 GB takes one thread 40 ms, and mapping it again
    for the next image takes all threads 80 ms, of 3.5 s per image.
    """

    def __init__(self, threads: TapeThreads, steps: Sequence[KernelStep]):
        self._threads, self._pieces = threads, slice_steps(steps)

    def run(self) -> None:
        first = 0
        for end, weights in self._pieces:
            self._threads.run_steps(first, end)
            first = end
            for some in weights:
                release_pages(some)

    def get_statistics(self) -> dict[str, float]:
        """Return nothing, because the system reads the weights."""
        return {}

    def close(self) -> None:
        """Do nothing, because there are no reader threads to end as in a WeightStream."""


class RunCache(KVCache):
    """A KV cache that is valid during one run only, so that all layers can use the same memory."""

    def __init__(self, states: Sequence[State], pages: int, kv_type: KVType, operations: Sequence[Operation]):
        """Allocate `pages` pages.

        Layers share no memory if an operation reads the keys of an earlier layer.
        """
        attends = [operation for operation in operations if isinstance(operation, Attend)]
        self._is_shared = all(len(operation.inputs) > 1 for operation in attends)
        super().__init__(states, pages * PAGE, kv_type, (1,))

    def _reserve(self, size: int) -> ReservedMemory:
        """Reserve memory that is usable as a whole, because runs do not announce their pages."""
        return ReservedMemory(size, is_context=True)

    def _lay_out(self, states: Sequence[State]) -> tuple[dict[State, tuple[HeadStreams, HeadStreams]], int]:
        if not self._is_shared:
            return super()._lay_out(states)
        arranged = [super(RunCache, self)._lay_out([state]) for state in states]
        layers = {layer: sides for of_one, _ in arranged for layer, sides in of_one.items()}
        return layers, max(size for _, size in arranged)


class CpuProgram:
    """A model compiled for the CPU.

    Attributes:
        warning: one line for the user about the kernels, or None.
        kernel_limits: see Backend.
        prepare_all: waits for all kernels that a run may need, which are otherwise compiled in the background.
    """

    def __init__(
        self, header: RunHeader, threads: TapeThreads, vocab_size: int, loader: VariantLoader,
        memory: Sequence[ReservedMemory] = (),
        streaming: "TapeRunner | None" = None, kernel_limits: Sequence[int] = (), tables: RowPrefetch | None = None,
    ):  # fmt: skip
        """Set what runs need.

        memory: the memory of a run's buffers. streaming: runs the tape in slices, or None.
        """
        self._tables = tables
        self.kernel_limits = kernel_limits
        self._memory, self._walk, self._streaming = memory, (streaming or threads).run, streaming
        self.warning, self.prepare_all = loader.library.warning, loader.prepare_all
        self._header, self._threads, self._vocab_size, self._loader = header, threads, vocab_size, loader

    def run(self, spans: Sequence[SequenceSpan], precise: bool) -> np.ndarray:
        """Process the tokens of all spans, at most BATCH; return requested logits, float32 [wanted, vocab].

        Raises ModelError for NaN or infinite logits, LocalllmError if a kernel cannot be compiled.
        """
        wanted = 0
        for span in spans:
            wanted += span.wanted
        logits = np.empty((wanted, self._vocab_size), np.float32)
        self._header.fill(spans, precise, logits)
        return self._compute(logits)

    def read(self, texts: Sequence[TextSpan], pages: np.ndarray, precise: bool) -> np.ndarray:
        """Process whole inputs; return a row for each, float32 [inputs, width].

        pages, precise: see RunHeader.describe_texts. Raises the errors of `run`.
        """
        rows = np.empty((len(texts), self._vocab_size), np.float32)
        self._header.describe_texts(texts, pages, rows, precise)
        return self._compute(rows)

    def compute_rows(self, count: int, pages: np.ndarray, windows: np.ndarray | None = None) -> np.ndarray:
        """Compute a row for each of `count` tokens with bidirectional attention, float32 [count, width].

        The program must begin with external rows and return a row for each of them. With more than PRECISE_TOKENS,
        activations keep 8 bits. pages: see RunHeader.describe_texts. windows: see RunHeader.describe_windows. Raises
        the errors of `run`.
        """
        rows = np.empty((count, self._vocab_size), np.float32)
        self._header.describe_texts([TextSpan(np.zeros(count, np.int64), count)], pages, rows, False)
        if windows is not None:
            self._header.describe_windows(windows)
        return self._compute(rows)

    def _compute(self, logits: np.ndarray) -> np.ndarray:
        """Run the tape once, which writes into `logits`, and return them."""
        tokens, wanted, _, most_precise, *_ = self._header.numbers.tolist()
        kernel_tokens, kernel_wanted = self._header.kernel_tokens.tolist()
        if self._tables:
            self._tables.request(tokens)
        self._loader.prepare(RunShape(tokens, wanted, kernel_tokens, kernel_wanted, most_precise))
        self._walk()
        if self._header.flaws[0]:
            raise ModelError(NOT_NUMBERS)
        return logits

    def get_disk_statistics(self) -> dict[str, float]:
        """Return what was read of weights that are larger than memory (WeightStream); empty if they fit."""
        if self._streaming is None:
            return {}
        tables = {"table_bytes": self._tables.resident_bytes} if self._tables else {}
        return self._streaming.get_statistics() | tables

    def give_back(self) -> None:
        """Return the memory of buffers to the system until the next run. Raises MemoryLimitError."""
        for region in self._memory:
            region.give_back(0, len(region.bytes))

    def close(self) -> None:
        if self._streaming:
            self._streaming.close()
        self._threads.close()
        self._loader.library.close()


RunnerFactory = Callable[[TapeThreads, Sequence[KernelStep]], TapeRunner]


def compile_program(
    operations: Sequence[Operation], places: StepMemory, threads: int, progress: Progress | None,
    exported: Crossing | None = None, keeps: bool = True, make_runner: RunnerFactory | None = None,
    storage: "WeightStorage | None" = None,
) -> CpuProgram:  # fmt: skip
    """Compile recorded operations, of which the last computes the logits unless activations are exported.

    exported: see `lower_operations`. keeps: see CpuTarget.keeps_cache. make_runner: makes what runs the tape in slices,
    such as StreamingRunner. storage: of weights that are larger than memory. progress(done, total): called while a
    caller waits for kernels, in this call or in the first run. Raises ModelError, MemoryLimitError, LocalllmError.
    """
    target = create_target(threads, len(places.header.ids), keeps)
    tape = Tape(lower_operations(optimize_graph(operations, target), target, places, exported=exported).all)
    library = KernelLibrary(tape.kernels | {"run", "work"}, progress, target.variants.list_all_names())
    placed = storage.place(tape.steps) if storage else None
    rows = tape.finish(library.addresses, threads)
    memory = library, places, tape.memory  # must outlive the threads
    walkers = TapeThreads(threads, library.addresses, rows, keep=memory)
    vocab_size = operations[-1].output.columns
    of_runs = [region for region in tape.memory if isinstance(region, ReservedMemory)]
    runner: TapeRunner | None = placed.make_stream(walkers) if placed else None
    if make_runner:
        runner = make_runner(walkers, tape.steps)
    loader, limits = VariantLoader(library, target.variants, progress), find_kernel_limits(operations, target)
    tables = RowPrefetch(tape.steps, places.header.ids)
    return CpuProgram(places.header, walkers, vocab_size, loader, of_runs, runner, limits, tables)


def find_kernel_limits(operations: Sequence[Operation], target: CpuTarget) -> list[int]:
    """Return the ascending token counts above which some matrix product of a model uses other kernels."""
    weights = [operation.weight for operation in operations if isinstance(operation, MatrixProduct)]
    limits = {PRECISE_TOKENS, *target.variants.limits}
    if not all(uses_integers(weight) for weight in weights):
        limits.add(MAX_FLOAT_ROW_TOKENS)
    if target.uses_tiles:
        limits |= {MIN_TILE_TOKENS.get(weight.tensor.format.name, MIN_ALL_TILES) - 1 for weight in weights}
    return sorted(limit for limit in limits if limit <= PRECISE_TOKENS)
