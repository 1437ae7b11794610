"""A runnable CPU model: the header of a run, the tape, and the threads that execute it."""

from collections.abc import Sequence

import numpy as np

from localllm.engine.cpu.kernel_variants import Loader, RunShape
from localllm.engine.cpu.lowering import optimize_graph, target_for_this_cpu
from localllm.engine.cpu.matmul import has_integers
from localllm.engine.cpu.streaming_run import StreamingRunner
from localllm.engine.cpu.target import CpuTarget
from localllm.engine.cpu.threads import Threads
from localllm.engine.lower.steps import StepPlaces
from localllm.engine.lower.tape import Tape
from localllm.engine.memory.cache import Reserved
from localllm.engine.operations.operation import Crossing, Operation, Product, lower_operations
from localllm.engine.run import PRECISE_TOKENS, Header, Span, TextSpan
from localllm.errors import NOT_NUMBERS, ModelError
from localllm.kernels.build.library import Library
from localllm.kernels.build.objects import Progress
from localllm.kernels.cpu import ALL_IN_TILES, FEW_IN_FLOAT32, LEAST_IN_TILES


class Program:
    """A model for the CPU.

    Attributes:
        warning: a line for the user about the kernels, or None.
        kernel_limits: see Backend.
        prepare_all: waits for all kernels that a run may need, which are otherwise compiled in the background.
    """

    def __init__(
        self, header: Header, threads: Threads, vocab_size: int, loader: Loader, memory: Sequence[Reserved] = (),
        streaming: StreamingRunner | None = None, kernel_limits: Sequence[int] = (),
    ):  # fmt: skip
        """Store the parts; memory: memory of a run's buffers; streaming: runs the tape in slices."""
        self.kernel_limits = kernel_limits
        self._memory, self._walk = memory, (streaming or threads).run
        self.warning, self.prepare_all = loader.library.warning, loader.prepare_all
        self._header, self._threads, self._vocab_size, self._loader = header, threads, vocab_size, loader

    def run(self, spans: Sequence[Span], precise: bool) -> np.ndarray:
        """Read the tokens of all spans, at most BATCH; return the requested logits: float32 [wanted, vocab].

        Raises ModelError for NaN or infinite logits, LocalllmError if a kernel cannot be compiled.
        """
        logits = np.empty((sum(span.wanted for span in spans), self._vocab_size), np.float32)
        self._header.fill(spans, precise, logits)
        return self._compute(logits)

    def read(self, texts: Sequence[TextSpan], pages: np.ndarray, precise: bool) -> np.ndarray:
        """Read whole texts; return a row for each: float32 [texts, width].

        pages, precise: see Header.fill_texts. Raises the errors of `run`.
        """
        rows = np.empty((len(texts), self._vocab_size), np.float32)
        self._header.fill_texts(texts, pages, rows, precise)
        return self._compute(rows)

    def rows(self, count: int, pages: np.ndarray, windows: np.ndarray | None = None) -> np.ndarray:
        """Compute a row for each of `count` tokens with bidirectional attention: float32 [count, width].

        The program must begin with external rows and return a row for each of them. With more than PRECISE_TOKENS,
        activations keep 8 bits. pages: see Header.fill_texts; windows: see Header.fill_windows. Raises the errors of
        `run`.
        """
        rows = np.empty((count, self._vocab_size), np.float32)
        self._header.fill_texts([TextSpan(np.zeros(count, np.int64), count)], pages, rows, False)
        if windows is not None:
            self._header.fill_windows(windows)
        return self._compute(rows)

    def _compute(self, logits: np.ndarray) -> np.ndarray:
        """Run the tape once, which writes into `logits`, and return them."""
        tokens, wanted, _, most_precise, *_ = self._header.numbers.tolist()
        kernel_tokens, kernel_wanted = self._header.kernel_tokens.tolist()
        self._loader.prepare(RunShape(tokens, wanted, kernel_tokens, kernel_wanted, most_precise))
        self._walk()
        if self._header.flaws[0]:
            raise ModelError(NOT_NUMBERS)
        return logits

    def give_back(self) -> None:
        """Return the run's memory to the system until the next one. Raises MemoryLimitError."""
        for region in self._memory:
            region.give_back(0, len(region.bytes))

    def close(self) -> None:
        """End the threads and stop compiling."""
        self._threads.close()
        self._loader.library.close()


def compile_program(
    operations: Sequence[Operation], places: StepPlaces, threads: int, progress: Progress | None,
    exported: Crossing | None = None, keeps: bool = True, streams: bool = False,
) -> Program:  # fmt: skip
    """Compile a program of recorded operations; the last one makes the logits, unless activations are exported.

    exported: see `lower_operations`; keeps: see CpuTarget; streams: release weights after each use (StreamingRunner);
    progress(done, total) is called while a caller waits for kernels, here or in the first run. Raises ModelError,
    LocalllmError.
    """
    target = target_for_this_cpu(threads, len(places.header.ids), keeps)
    tape = Tape(lower_operations(optimize_graph(operations, target), target, places, exported=exported).all)
    library = Library(tape.kernels | {"run", "work"}, progress, target.variants.all_names())
    rows = tape.finish(library.addresses, threads)
    memory = library, places, tape.memory  # must outlive the threads
    walkers = Threads(threads, library.addresses, rows, keep=memory)
    vocab_size = operations[-1].output.columns
    of_runs = [region for region in tape.memory if isinstance(region, Reserved)]
    streaming = StreamingRunner(walkers, tape.steps) if streams else None
    loader, limits = Loader(library, target.variants, progress), kernel_limits(operations, target)
    return Program(places.header, walkers, vocab_size, loader, of_runs, streaming, limits)


def kernel_limits(operations: Sequence[Operation], target: CpuTarget) -> list[int]:
    """Return the numbers of tokens above which some matrix product of a model uses other kernels, ascending."""
    weights = [operation.weight for operation in operations if isinstance(operation, Product)]
    limits = {PRECISE_TOKENS, *target.variants.limits}
    if not all(has_integers(weight) for weight in weights):
        limits.add(FEW_IN_FLOAT32)
    if target.in_tiles:
        limits |= {LEAST_IN_TILES.get(weight.tensor.format.name, ALL_IN_TILES) - 1 for weight in weights}
    return sorted(limit for limit in limits if limit <= PRECISE_TOKENS)
