"""Reuse of chunks in the middle of a prompt: text that was read at another position is not read again.

After one more typed character an editor's prompt differs from the one before only in its middle: the text after the
cursor is at later positions. Its keys are copied and rotated to them, as llama-server's --cache-reuse does for texts
that have lost a part; its first tokens are read again. Such keys were computed with the old text before them, so an
answer may differ from that to a prompt that was read as a whole; sequences record how far they are exact
(localllm.engine.sequence).
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.engine.copied_chunk import append_from
from localllm.errors import MemoryLimitError

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.sequence import Sequence

# First tokens of a chunk that are read again: they saw the change most, the mark of the suffix above all. (EPIC, Hu et
# al. 2024, does so where chunks are put together.) Of 24 gaps of HumanEval with a few characters typed, Qwen2.5-Coder
# 0.5B filled 10 right with 8, as when all is read, 21 alike; 3 with none.
READ_AGAIN = 8
CANDIDATES = 4  # places of a block that occurs often, of which the longest chunk is taken
SOURCES = 8  # latest sequences to compare with


class Chunk(NamedTuple):
    """Tokens of a prompt from `place` on that another sequence holds from position `first` on."""

    place: int
    first: int
    length: int


def find_chunks(held: Ids[int], prompt: Ids[int], begin: int, least: int) -> list[Chunk]:
    """Find chunks of `least` tokens or more of a prompt, after its first `begin` and before its last, among others.

    Blocks of half that length are looked up, and extended to both sides; a block that occurs often, at its first
    CANDIDATES places only. The first READ_AGAIN tokens of each are left out.
    """
    ours, theirs, block = np.array(prompt[:-1], np.int64), np.array(held, np.int64), max(1, least // 2)
    places = dict[bytes, list[int]]()
    for first in range(0, len(theirs) - block + 1, block):
        known = places.setdefault(theirs[first : first + block].tobytes(), [])
        if len(known) < CANDIDATES:
            known.append(first)
    chunks, place, free = list[Chunk](), begin, begin
    while place + block <= len(ours):
        known = places.get(ours[place : place + block].tobytes(), [])
        found = [extend(ours, theirs, Chunk(place, first, block), free) for first in known]
        best = max(found, key=lambda one: one.length, default=None)
        if best is None or best.length < least:
            place += 1
            continue
        place = free = best.place + best.length
        if best.length > READ_AGAIN:
            chunks.append(Chunk(best.place + READ_AGAIN, best.first + READ_AGAIN, best.length - READ_AGAIN))
    return chunks


def extend(ours: np.ndarray, theirs: np.ndarray, chunk: Chunk, free: int) -> Chunk:
    """Return the longest chunk around one, from place `free` on at most; ours, theirs: int64."""
    place, first, _ = chunk
    back = min(place - free, first)
    before = same(ours[place - back : place][::-1], theirs[first - back : first][::-1])
    behind = min(len(ours) - place, len(theirs) - first)
    count = same(ours[place : place + behind], theirs[first : first + behind])
    return Chunk(place - before, first - before, before + count)


def same(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Return how many first tokens are equal in arrays of the same length."""
    differences = np.flatnonzero(ours != theirs)
    return int(differences[0]) if len(differences) else len(ours)


class ChunkReuse:
    """The chunks that a prompt takes from another sequence, in order; its state is kept as long as they are needed."""

    def __init__(self, engine: "Engine", source: "Sequence", chunks: Iterable[Chunk]):
        self._engine, self._source, self._chunks = engine, source.fork(), [*chunks]

    def end(self, held: int) -> int | None:
        """Return where reading from position `held` on has to end: where a chunk begins; None after the last one."""
        return next((chunk.place for chunk in self._chunks if chunk.place > held), None)

    def take(self, sequence: "Sequence") -> int:
        """Append the chunks that begin where the sequence ends; returns how many tokens that were.

        A chunk that does not fit into memory, or is incomplete, is left to be read.
        """
        before = len(sequence.tokens)
        while self._chunks and self._chunks[0].place <= len(sequence.tokens):
            _, first, count = chunk = self._chunks.pop(0)
            try:
                if chunk.place == len(sequence.tokens):
                    append_from(self._engine, sequence, self._source, first, count)
            except MemoryLimitError:
                self._chunks = []
        if not self._chunks:
            self._source.release()
        return len(sequence.tokens) - before

    def release(self) -> None:
        """Queue the state to be freed. Takes no lock: finalizers may call it."""
        self._chunks = []
        self._source.release()


def find_reuse(
    engine: "Engine", sequence: "Sequence", prompt: Ids[int], others: Iterator["Sequence"], least: int
) -> ChunkReuse | None:
    """Find the sequence that shares the most chunks with the unread part of a prompt; None if none shares any.

    others: the sequences to look at, the latest first; SOURCES of them at most.
    """
    begin, best, most = len(sequence.tokens), None, 0
    for source, _ in zip(others, range(SOURCES), strict=False):
        chunks = find_chunks(source.tokens, prompt, begin, least)
        if (count := sum(chunk.length for chunk in chunks)) > most:
            best, most = (source, chunks), count
    return ChunkReuse(engine, *best) if best else None
