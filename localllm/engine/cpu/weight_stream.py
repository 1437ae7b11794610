"""Weights larger than memory: some matrices are held, others are read from the disk ahead of the steps that use them.

A run needs every matrix once, in the order of the tape, so the order of reads is known. The system's file cache evicts
what is needed next, and reads only after a thread has waited for a page. Here the tape is divided into slices: whole
stages with their matrices. A slice is held, in memory of its own from the first run on, or streamed: read into one of a
few slots, which a later slice uses when the steps are done. Threads read slices ahead, past the end of a run to the
beginning of the next one, so that the disk reads while the CPU computes. Held and streamed slices alternate for the
same reason. Files are read past the system's cache (O_DIRECT) where that is possible: the cache would need the memory
that the held matrices use.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from localllm.engine.lower.tape import Step, assign_stages, get_product_arguments, slice_steps
from localllm.errors import LocalllmError, MemoryLimitError, ModelError
from localllm.system.memory import allocate_large

BLOCK = 4096  # bytes: offsets, sizes and addresses of reads past the cache are multiples of it
CHUNK_BYTES = 1 << 22  # bytes of a read
READERS = 4  # reads at the same time
SLOTS = 4  # slices that are read ahead or in use, at most
MEASURED_BYTES = 1 << 26  # bytes that are read to measure the disk
MIN_STREAMED_BYTES = 1 << 16  # smaller matrices stay mapped

Locate = Callable[[np.ndarray], "tuple[str, int] | None"]  # the file of a view of a mapped file, and its offset


class StepRunner(Protocol):
    """Runs whole stages of a tape."""

    def run_steps(self, first: int, end: int) -> None: ...


class Read(NamedTuple):
    """A part of a file, and the memory that it is read into.

    needed: bytes that must exist; a file may end within its last block.
    """

    path: str
    offset: int
    target: memoryview
    needed: int


class Slice(NamedTuple):
    """Steps of a tape, and the reads of their matrices.

    Attributes:
        end: index of the first step after the slice.
        reads: in the order of the file; empty without streamed or held matrices.
        slot: index of the slot that a streamed slice uses; None: the slice is held.
    """

    end: int
    reads: list[Read]
    slot: int | None


class StreamPlan(NamedTuple):
    """How many bytes of matrices are held, and how many are read in each run."""

    held: int
    streamed: int


class ReadAhead:
    """The slices that are loaded, and the threads that load the next ones.

    Attributes:
        bytes_read: so far.  waited: seconds that runs waited for the disk.
    """

    def __init__(self, slices: Sequence[Slice]):
        self._slices, self._changed = slices, threading.Condition()
        self._left = [len(each.reads) for each in slices]  # reads of each slice that are not done
        self._begun = set[int]()  # slices whose reads have begun, until their slot is released
        self._cursor, self._next_read, self._active, self._is_paused = 0, 0, 0, False
        self._error: LocalllmError | None = None
        self.is_closed, self.bytes_read, self.waited = False, 0, 0.0
        self._threads = [threading.Thread(target=self._read_all, daemon=True) for _ in range(READERS)]
        for thread in self._threads:
            thread.start()

    def wait(self, index: int) -> None:
        """Wait until a slice is loaded. Raises ModelError if it cannot be read."""
        with self._changed:
            if not self._left[index]:
                return
            start = perf_counter()
            while self._left[index] and self._error is None:
                self._changed.wait(0.1)  # with a timeout, Ctrl-C interrupts it on Windows, too
            self.waited += perf_counter() - start
            if self._error is not None:
                raise self._error

    def release(self, index: int) -> None:
        """Let another slice use the slot of a slice."""
        if self._slices[index].slot is not None:
            with self._changed:
                self._forget(index)
                self._changed.notify_all()

    def _forget(self, index: int) -> None:
        self._left[index] = len(self._slices[index].reads)
        self._begun.discard(index)

    def restart(self) -> None:
        """Begin again with the first slice, after a run that did not end."""
        with self._changed:
            self._is_paused = True
            while self._active:
                self._changed.wait(0.1)
            for index in [*self._begun]:
                if self._left[index] or self._slices[index].slot is not None:
                    self._forget(index)
            self._cursor, self._next_read, self._error, self._is_paused = 0, 0, None, False
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _read_all(self) -> None:
        """Read what comes next until the stream is closed; runs in each reader's thread."""
        files = dict[str, int]()
        try:
            while (found := self._claim()) is not None:
                index, read = found
                error = read_part(read, files)
                with self._changed:
                    self._active -= 1
                    self._error = self._error or error
                    self._left[index] -= 1
                    self.bytes_read += len(read.target)
                    if not self._left[index] or error or self._is_paused:
                        self._changed.notify_all()
        finally:
            for file in files.values():
                os.close(file)

    def _claim(self) -> tuple[int, Read] | None:
        """Claim the next read, when its slice may be loaded; return it with the slice's index, or None at the end."""
        with self._changed:
            while not self.is_closed:
                if not self._is_paused and self._error is None and (index := self._find_slice()) is not None:
                    read = self._slices[index].reads[self._next_read]
                    self._next_read += 1
                    if self._next_read == len(self._slices[index].reads):
                        self._cursor, self._next_read = (index + 1) % len(self._slices), 0
                    self._active += 1
                    return index, read
                self._changed.wait()
        return None

    def _find_slice(self) -> int | None:
        """Return the slice to read from now; None if a slot must be released before, or all slices are loaded."""
        if self._next_read:
            return self._cursor
        used = {self._slices[index].slot for index in self._begun}
        for index in range(self._cursor, self._cursor + len(self._slices)):
            index %= len(self._slices)
            each = self._slices[index]
            if each.reads and index not in self._begun:
                self._cursor = index
                if each.slot is not None and each.slot in used:
                    return None
                self._begun.add(index)
                return index
        return None


def read_part(read: Read, files: dict[str, int]) -> LocalllmError | None:
    """Read a part of a file into memory; return an error. files: the open files of this thread, by path."""
    try:
        if read.path not in files:
            files[read.path] = open_direct(read.path)
        count = read_at(files[read.path], read.target, read.offset)
    except OSError as error:
        return ModelError(f"{read.path}: cannot be read: {error.strerror or error}")
    return ModelError(f"{read.path}: the file became shorter while it was used") if count < read.needed else None


def open_direct(path: str) -> int:
    """Open a file for reads past the system's cache, if that is possible. Raises OSError."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT)
        except OSError:  # a file system without it, such as tmpfs
            pass
    file = os.open(path, flags)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    return file


def read_at(file: int, target: memoryview, offset: int) -> int:
    """Read until the target is full or the file ends; return the number of bytes. Raises OSError."""
    done = 0
    while done < len(target):
        if sys.platform == "win32":
            os.lseek(file, offset + done, os.SEEK_SET)
            some = os.read(file, len(target) - done)
            target[done : done + len(some)] = some
            count = len(some)
        else:
            count = os.preadv(file, [target[done:]], offset + done)
        done += count
        if not count or done % BLOCK:  # the end of the file
            break
    return done


class WeightStream:
    """Runs a tape slice by slice, each when its matrices are in memory.

    Attributes:
        plan: bytes of matrices that are held and streamed.
    """

    def __init__(self, threads: StepRunner, slices: Sequence[Slice], plan: StreamPlan, memory: np.ndarray):
        """Begin to load slices; memory: what their reads write to."""
        self.plan, self._threads, self._slices, self._memory = plan, threads, slices, memory
        self._ahead, self._is_whole = ReadAhead(slices), True
        self._end = weakref.finalize(self, self._ahead.close)

    def run(self) -> None:
        """Run the tape once. Raises ModelError if the file cannot be read."""
        if not self._is_whole:
            self._ahead.restart()
        self._is_whole, first = False, 0
        for index, each in enumerate(self._slices):
            self._ahead.wait(index)
            self._threads.run_steps(first, each.end)
            self._ahead.release(index)
            first = each.end
        self._is_whole = True

    @property
    def bytes_read(self) -> int:
        """Bytes read from the disk so far."""
        return self._ahead.bytes_read

    @property
    def seconds_waited(self) -> float:
        """Seconds that runs have waited for the disk."""
        return self._ahead.waited

    def close(self) -> None:
        """End the reading threads."""
        self._end()
        self._ahead.join()


@dataclass(eq=False)
class Matrix:
    """A matrix of a step, in a mapped file.

    Attributes:
        arguments: the kernel's arguments, whose "weights" it is.
        size: bytes of the whole blocks of the file that it is in.
    """

    arguments: dict[str, object]
    view: np.ndarray
    path: str
    offset: int

    @property
    def size(self) -> int:
        return -(-(self.offset % BLOCK + self.view.nbytes) // BLOCK) * BLOCK

    def move(self, memory: np.ndarray, position: int) -> list[Read]:
        """Replace the matrix by one at a position in memory; return the reads that fill it."""
        margin = self.offset % BLOCK
        moved = memory[position + margin : position + margin + self.view.nbytes]
        self.arguments["weights"] = moved.view(self.view.dtype).reshape(self.view.shape)
        return [
            Read(
                self.path, self.offset - margin + first, memory[position + first : position + end].data,
                min(end, margin + self.view.nbytes) - first,
            )
            for first in range(0, self.size, CHUNK_BYTES)
            for end in (min(first + CHUNK_BYTES, self.size),)
        ]  # fmt: skip


@dataclass
class WeightStorage:
    """The memory for a model's matrices.

    Attributes:
        locate: finds a matrix in its file.
        budget: bytes for matrices.
        plan: what is held and streamed; None before `place`, and if all matrices fit.
        disk_rate: bytes per second; 0 if it was not measured.
    """

    locate: Locate
    budget: int
    plan: StreamPlan | None = None
    disk_rate: float = 0.0

    def place(self, steps: Sequence[Step]) -> "PlacedSlices | None":
        """Replace the matrices of steps by views of new memory, or return None if all matrices fit.

        Raises MemoryLimitError.
        """
        assign_stages(list(steps))
        if (placed := place_slices(steps, self.locate, self.budget)) is not None:
            self.plan, self.disk_rate = placed.plan, measure_disk(placed.slices)
        return placed

    def describe(self, nbytes: int) -> str:
        """Return one line for the user about the weights, of `nbytes` bytes."""
        text = f"the weights take {nbytes / 1e9:.2f} GB, and only {self.budget / 1e9:.2f} GB of memory are available"
        if self.plan is None:
            return f"{text}: some are read from the disk again and again"
        rate = f", which takes {self.plan.streamed / self.disk_rate:.1f} s" if self.disk_rate else ""
        return f"{text}: {self.plan.streamed / 1e9:.2f} GB are read from the disk for each token{rate}"


def measure_disk(slices: Sequence[Slice]) -> float:
    """Return the bytes per second of reading the first matrices that a run reads; 0 if they cannot be read."""
    reads = [read for each in slices if each.slot is not None for read in each.reads][: MEASURED_BYTES // CHUNK_BYTES]
    ahead, start = ReadAhead([Slice(0, reads, None)]), perf_counter()
    try:
        ahead.wait(0)
        return ahead.bytes_read / (perf_counter() - start)
    except ModelError:  # the first run reports it
        return 0.0
    finally:
        ahead.close()
        ahead.join()


class PlacedSlices(NamedTuple):
    """The slices of a tape, and the memory that their reads write to."""

    slices: list[Slice]
    plan: StreamPlan
    memory: np.ndarray

    def make_stream(self, threads: StepRunner) -> "WeightStream":
        return WeightStream(threads, self.slices, self.plan, self.memory)


def place_slices(steps: Sequence[Step], locate: Locate, budget: int) -> PlacedSlices | None:
    """Place matrices in at most `budget` bytes: replace those of the steps by views of new memory.

    steps: with stages; locate: finds a matrix in its file. Returns None if all matrices fit in the budget. Raises
    MemoryLimitError.
    """
    pieces, first, matrices = slice_steps(steps), 0, list[list[Matrix]]()
    for piece in pieces:
        matrices.append([each for step in steps[first : piece.end] if (each := find_matrix(step, locate))])
        first = piece.end
    sizes = [sum(each.size for each in some) for some in matrices]
    if sum(sizes) <= budget:
        return None
    slot_bytes = choose_slot_bytes(sizes)
    held = choose_held(sizes, budget - SLOTS * slot_bytes, slot_bytes)
    room = SLOTS * slot_bytes
    memory = allocate(room + sum(size for size, stays in zip(sizes, held, strict=True) if stays))
    slices, end_of_held, streamed = list[Slice](), room, 0
    for piece, some, stays in zip(pieces, matrices, held, strict=True):
        slot = None if stays or not some else streamed % SLOTS
        position, reads = end_of_held if slot is None else slot * slot_bytes, list[Read]()
        for each in some:
            reads += each.move(memory, position)
            position += each.size
        slices.append(Slice(piece.end, reads, slot))
        end_of_held, streamed = (position, streamed) if slot is None else (end_of_held, streamed + 1)
    return PlacedSlices(slices, StreamPlan(end_of_held - room, sum(sizes) - (end_of_held - room)), memory)


def choose_slot_bytes(sizes: Sequence[int]) -> int:
    """Return the size of a slot that takes least memory, together with the larger slices, which are held.

    An output matrix may be ten times as large as the next slice: slots of its size would leave no memory for others.
    """
    return min(sorted(set(sizes)), key=lambda slot: SLOTS * slot + sum(size for size in sizes if size > slot))


def choose_held(sizes: Sequence[int], room: int, slot_bytes: int) -> list[bool]:
    """Return which slices are held in `room` bytes: the larger ones than a slot, and an even share of the others."""
    large = sum(size for size in sizes if size > slot_bytes)
    room, total, held, seen, chosen = max(room - large, 0), sum(sizes) - large, 0, 0, list[bool]()
    for size in sizes:
        is_large = size > slot_bytes
        seen += 0 if is_large else size
        chosen.append(is_large or held + size <= room * seen // max(total, 1))
        held += size if chosen[-1] and not is_large else 0
    return chosen


def allocate(size: int) -> np.ndarray:
    """Allocate memory for matrices, uint8 [size]. Raises MemoryLimitError."""
    try:
        return np.frombuffer(memoryview(allocate_large(size)), np.uint8)
    except (OSError, ValueError, OverflowError):
        raise MemoryLimitError(f"{size / 1e9:.2f} GB of memory for weights cannot be allocated") from None


def find_matrix(step: Step, locate: Locate) -> Matrix | None:
    """Return the matrix of a step that is a dense product; None for other steps and for small matrices."""
    if not step.kernel.startswith(("linear", "adapted_linear")):
        return None
    arguments = get_product_arguments(step)
    weights = arguments["weights"]
    if not isinstance(weights, np.ndarray) or weights.nbytes < MIN_STREAMED_BYTES:
        return None
    place = locate(weights)
    return Matrix(arguments, weights, *place) if place else None
