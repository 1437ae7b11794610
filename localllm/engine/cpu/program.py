"""A model for the CPU as something that runs: the header of a run, the tape, the threads that walk it."""

from collections.abc import Sequence

import numpy as np

from localllm.engine.cpu.kernel_variants import Loader
from localllm.engine.cpu.lowering import prepared, target_for_this_cpu
from localllm.engine.cpu.streaming_run import StreamingRunner
from localllm.engine.cpu.threads import Threads
from localllm.engine.lower.lowering import Crossing, lower_operations
from localllm.engine.lower.steps import StepPlaces
from localllm.engine.lower.tape import Tape
from localllm.engine.memory.reserved import Reserved
from localllm.engine.operations.operation import Operation
from localllm.engine.run import Header, Span, TextSpan
from localllm.errors import NOT_NUMBERS, ModelError
from localllm.kernels.build.library import Library, Progress


class Program:
    """A model for the CPU.

    Attributes:
        warning: what the user should know about the kernels, in one line, or None.
        prepare_all: has all kernels ready that a run may need, which are compiled behind the first runs otherwise.
    """

    def __init__(
        self, header: Header, threads: Threads, vocab_size: int, loader: Loader, memory: Sequence[Reserved] = (),
        passing: StreamingRunner | None = None,
    ):  # fmt: skip
        """memory: what steps write and read in a run, and nobody behind it; passing: what runs the tape instead."""
        self._memory, self._walk = memory, (passing or threads).run
        self.warning, self.prepare_all = loader.library.warning, loader.prepare_all
        self._header, self._threads, self._vocab_size, self._loader = header, threads, vocab_size, loader

    def run(self, spans: Sequence[Span], precise: bool) -> np.ndarray:
        """Read the tokens of all spans, BATCH at most; the wanted logits, span by span: float32 [wanted, vocab].

        Raises ModelError if some are not numbers, LocalllmError if a kernel cannot be compiled.
        """
        logits = np.empty((sum(span.wanted for span in spans), self._vocab_size), np.float32)
        self._header.fill(spans, precise, logits)
        return self._computed(logits)

    def read(self, texts: Sequence[TextSpan], pages: np.ndarray, precise: bool) -> np.ndarray:
        """Read whole texts; a row of each: float32 [texts, width]. pages: int64, of the cache, to use; precise: as of
        Header.fill_texts.

        Raises as `run`.
        """
        rows = np.empty((len(texts), self._vocab_size), np.float32)
        self._header.fill_texts(texts, pages, rows, precise)
        return self._computed(rows)

    def rows(self, count: int, pages: np.ndarray, windows: np.ndarray | None = None) -> np.ndarray:
        """A row for each of so many tokens, which see each other and no others: float32 [count, width]. For a program
        that begins with rows that are given, and selects none. Above PRECISE_TOKENS activations keep 8 bits. pages: as
        of `read`; windows: as of Header.fill_windows. Raises as `run`."""
        rows = np.empty((count, self._vocab_size), np.float32)
        self._header.fill_texts([TextSpan(np.zeros(count, np.int64), count)], pages, rows, False)
        if windows is not None:
            self._header.fill_windows(windows)
        return self._computed(rows)

    def _computed(self, logits: np.ndarray) -> np.ndarray:
        """Walk the tape once, which writes them."""
        tokens, wanted, _, most_precise, *_ = self._header.numbers.tolist()
        self._loader.prepare(tokens, wanted, most_precise)
        self._walk()
        if self._header.flaws[0]:
            raise ModelError(NOT_NUMBERS)
        return logits

    def give_back(self) -> None:
        """The memory of a run goes to the system until the next one. Raises MemoryLimitError."""
        for one in self._memory:
            one.give_back(0, len(one.bytes))

    def close(self) -> None:
        """End the threads, and compile no more."""
        self._threads.close()
        self._loader.library.close()


def compiled(
    operations: Sequence[Operation], places: StepPlaces, threads: int, progress: Progress | None,
    given: Crossing | None = None, keeps: bool = True, passes: bool = False,
) -> Program:  # fmt: skip
    """A program of what a Recorder has written down; the last operation makes the logits, unless others go on.

    given: see `lower_operations`; keeps: see CpuTarget; passes: whether weights are released after use
    (StreamingRunner);
    progress(done, total) is called while somebody waits for kernels, here or in the program's first run. Raises
    ModelError, LocalllmError.
    """
    target = target_for_this_cpu(threads, len(places.header.ids), keeps)
    tape = Tape(lower_operations(prepared(operations, target), target, places, exported=given).all)
    library = Library(tape.kernels | {"run", "work"}, progress, target.pieces.all_names())
    rows = tape.finish(library.addresses, threads)
    memory = library, places, tape.memory  # as long as the threads live
    walkers = Threads(threads, library.addresses, rows, keep=memory)
    vocab_size = operations[-1].output.columns
    of_runs = [one for one in tape.memory if isinstance(one, Reserved)]
    passing = StreamingRunner(walkers, tape.steps) if passes else None
    return Program(places.header, walkers, vocab_size, Loader(library, target.pieces, progress), of_runs, passing)
