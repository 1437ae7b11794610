"""Read a file ahead of its use: slices of a tape in the order of a run, and experts as soon as they are chosen."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from localllm.errors import LocalllmError, ModelError
from localllm.system.direct_reads import BLOCK, DirectFile

CHUNK_BYTES = 1 << 22  # bytes of a read
FIRST_OWN_SLOT = 1 << 20  # this slot and the next one stand for the own memory of slices that are no longer held
READERS = 4  # reads at the same time; 8 and 16 were not faster on a virtual disk of 1.3 to 2.9 GB/s

Locate = Callable[[np.ndarray], "tuple[str, int] | None"]  # the file of a view of a mapped file, and its offset

Key = tuple[Any, int]  # what is read in several requests, such as an expert: its owner and index


class Read(NamedTuple):
    """A part of a file, and the memory that it is read into.

    needed: bytes that must exist; a file may end within its last block.
    """

    path: str
    offset: int
    target: memoryview
    needed: int


class ReadRequest(NamedTuple):
    """A read for somebody who waits until left[counter], the number of such reads that are not done, is 0.

    key: None for what cannot be withdrawn.
    """

    left: list[int]
    counter: int
    read: Read
    key: Key | None = None


class Slice(NamedTuple):
    """Steps of a tape, and the reads of their matrices.

    Attributes:
        end: index of the first step after the slice.
        reads: in the order of the file; empty without streamed or held matrices.
        slot: index of the slot that a streamed slice uses; None: the slice is held.
        memory: where a held slice's memory begins and ends, in bytes; (0, 0) for others.
    """

    end: int
    reads: list[Read]
    slot: int | None
    memory: tuple[int, int] = (0, 0)


def list_reads(path: str, offset: int, nbytes: int, memory: np.ndarray) -> Iterator[Read]:
    """Yield the reads of `nbytes` bytes from `offset` on; memory: for the whole blocks that they are in, uint8."""
    margin = offset % BLOCK
    size = round_to_blocks(margin + nbytes)
    for first in range(0, size, CHUNK_BYTES):
        end = min(first + CHUNK_BYTES, size)
        yield Read(path, offset - margin + first, memory[first:end].data, min(end, margin + nbytes) - first)


def round_to_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


class ReadAhead:
    """The slices that are loaded, and the threads that load the next ones.

    Attributes:
        bytes_read: so far.  waited: seconds that runs waited for the disk.
    """

    def __init__(self, slices: Sequence[Slice], free: Callable[[int, int], None] | None = None):
        """Begin to read. free: releases the memory of a slice, from a first byte up to another."""
        self._slices, self._changed, self._free = [*slices], threading.Condition(), free
        self._left = [len(each.reads) for each in slices]  # reads of each slice that are not done
        self._sizes = [sum(len(read.target) for read in each.reads) for each in slices]  # in bytes
        self._own_slot = FIRST_OWN_SLOT
        self._begun = set[int]()  # slices whose reads have begun, until their slot is released
        self._cursor, self._next_read, self._active, self._is_paused = 0, 0, 0, False
        self._urgent = deque[ReadRequest]()  # reads of experts, which a run waits for
        self._guessed = deque[ReadRequest]()  # of experts that it may need
        self._pending, self._begun_keys = Counter[Key](), set[Key]()  # reads by key; keys with a begun one
        self._error: LocalllmError | None = None
        self.is_closed, self.bytes_read, self.waited = False, 0, 0.0
        self._threads = [threading.Thread(target=self._read_all, daemon=True) for _ in range(READERS)]
        for thread in self._threads:
            thread.start()

    def wait(self, index: int) -> None:
        """Wait until a slice is loaded. Raises ModelError if it cannot be read."""
        self.wait_until_read(self._left, index)

    def request(self, requests: Iterable[ReadRequest], is_guess: bool = False) -> None:
        """Read before all slices, or when nothing else is urgent; the counters grow by the number of reads."""
        with self._changed:
            for request in requests:
                request.left[request.counter] += 1
                if request.key:
                    self._pending[request.key] += 1
                (self._guessed if is_guess else self._urgent).append(request)
            self._changed.notify_all()

    def withdraw_guesses(self) -> tuple[list[ReadRequest], set[Key]]:
        """Withdraw the guessed reads that have not begun.

        Returns them, and the keys that are partly read: their memory is in use, and they must be requested again.
        """
        with self._changed:
            withdrawn, partial = [*self._guessed], {key for key in self._pending if key in self._begun_keys}
            self._guessed.clear()
            for request in withdrawn:
                request.left[request.counter] -= 1
                if request.key:
                    self._pending[request.key] -= 1
            return withdrawn, partial

    def wait_until_read(self, left: list[int], index: int) -> None:
        """Wait until left[index] is 0. Raises ModelError if the file cannot be read."""
        with self._changed:
            if not left[index]:
                return
            start = perf_counter()
            while left[index] and self._error is None:
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
        """Discard a slice that is in memory; it is read again when its turn comes."""
        if self._free and self._slices[index].memory[1]:
            self._free(*self._slices[index].memory)
        self._left[index] = len(self._slices[index].reads)
        self._begun.discard(index)

    def stop_holding(self, nbytes: int, position: int) -> int:
        """Stream held slices of about `nbytes` bytes from now on; return the bytes of memory released.

        A slice keeps its addresses, and has memory for the time of its use only, as two of these can at a time.
        position: index of the slice that runs next. Those from there to the cursor are being read for this run, and
        slices larger than all streamed ones would fill the memory again; the others are chosen from evenly, so that the
        disk is always busy.
        """
        with self._changed:
            count, sizes = len(self._slices), self._sizes
            ahead = (self._cursor - position) % count
            order = [(position + step) % count for step in range(ahead + 1, count)]
            largest = max(
                (sizes[i] for i, each in enumerate(self._slices) if each.slot is not None), default=max(sizes)
            )
            held = [i for i in order if self._slices[i].slot is None and not self._left[i] and 0 < sizes[i] <= largest]
            total, released, seen = sum(sizes[index] for index in held), 0, 0
            for index in held:
                seen += sizes[index]
                if released < min(nbytes * seen / total, nbytes):
                    self._own_slot = FIRST_OWN_SLOT + (self._own_slot + 1) % 2
                    self._slices[index] = self._slices[index]._replace(slot=self._own_slot)
                    self._forget(index)
                    released += sizes[index]
            self._changed.notify_all()
            return released

    def hold_again(self, nbytes: int) -> int:
        """Hold slices of at most `nbytes` bytes that `stop_holding` made streamed ones; return their bytes."""
        with self._changed:
            kept = 0
            for index, each in enumerate(self._slices):
                size = self._sizes[index]
                if each.slot is not None and each.slot >= FIRST_OWN_SLOT and kept + size <= nbytes:
                    self._slices[index] = each._replace(slot=None)
                    kept += size
            self._changed.notify_all()
            return kept

    def restart(self) -> None:
        """Begin again with the first slice, after a run that did not end."""
        with self._changed:
            self._is_paused = True
            while self._active:
                self._changed.wait(0.1)
            self._urgent.clear()
            self._guessed.clear()
            self._pending.clear()
            self._begun_keys.clear()
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
        files = dict[str, DirectFile]()
        try:
            while (found := self._claim()) is not None:
                left, index, read, key = found
                error = read_part(read, files)
                with self._changed:
                    self._active -= 1
                    self._error = self._error or error
                    left[index] -= error is None  # a failed read stays undone, and `restart` repeats it
                    self.bytes_read += len(read.target)
                    if key and error is None:
                        self._end_read(key)
                    if not left[index] or error or self._is_paused:
                        self._changed.notify_all()
        finally:
            for file in files.values():
                file.close()

    def _end_read(self, key: Key) -> None:
        self._pending[key] -= 1
        if not self._pending[key]:
            del self._pending[key]
            self._begun_keys.discard(key)

    def _claim(self) -> ReadRequest | None:
        """Claim the next read, when its memory is free; return it with its counter, or None at the end."""
        with self._changed:
            while not self.is_closed:
                if not self._is_paused and self._error is None and (found := self._find_request()):
                    self._active += 1
                    if found.key:
                        self._begun_keys.add(found.key)
                    return found
                self._changed.wait()
        return None

    def _find_request(self) -> ReadRequest | None:
        if self._urgent:
            return self._urgent.popleft()
        return self._find_read() or (self._guessed.popleft() if self._guessed else None)

    def _find_read(self) -> ReadRequest | None:
        """Return the next read of a slice with its counter, or None if there is none now."""
        if (index := self._find_slice()) is None:
            return None
        read = self._slices[index].reads[self._next_read]
        self._next_read += 1
        if self._next_read == len(self._slices[index].reads):
            self._cursor, self._next_read = (index + 1) % len(self._slices), 0
        return ReadRequest(self._left, index, read)

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


def read_part(read: Read, files: dict[str, DirectFile]) -> LocalllmError | None:
    """Read a part of a file into memory; return an error. files: the open files of this thread, by path."""
    try:
        if read.path not in files:
            files[read.path] = DirectFile(read.path)
        count = files[read.path].read_into(read.target, read.offset)
    except OSError as error:
        return ModelError(f"{read.path}: cannot be read: {error.strerror or error}")
    return ModelError(f"{read.path}: the file became shorter while it was used") if count < read.needed else None
