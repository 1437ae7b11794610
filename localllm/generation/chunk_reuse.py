"""Reuse chunks from the middle of earlier prompts at new positions.

When a character is typed in an editor, only the middle of its prompt changes; the text after the cursor moves to later
positions. Its keys and values are copied, and the keys rotated to the new positions, as llama-server's --cache-reuse
does; only the first tokens of the chunk are read again. The copied ones were computed with the old text before them, so
the answer may differ from one without reuse; a sequence records how many of its tokens are exact
(localllm.engine.sequence). The few tokens before a chunk and those after it are computed in one run.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.errors import MemoryLimitError

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.sequence import Sequence

# First tokens of a chunk that are read again: the change affects them most, above all the suffix token (as in EPIC, Hu
# et al. 2024). Of 40 gaps of HumanEval with one to five typed characters, Qwen2.5-Coder 0.5B filled 12 correctly with
# 2, 4 or 8 tokens, as without reuse; 33, 34 and 34 answers were the same. The divergence of the first token's
# probabilities was 0.0131, 0.0115 and 0.0107 on average; with none 4.4, and no answer of 20 was right.
READ_AGAIN = 4
# Tokens before a chunk that are computed in one run with those after it, by the kernels for few tokens. More get a run
# before the chunk is copied: from here on, kernels for many tokens save more than the second run costs.
MAX_GAP = 24
CANDIDATES = 4  # positions of a repeated block to try for the longest chunk
SOURCES = 8  # latest sequences to search


class ReusedChunk(NamedTuple):
    """Tokens of a prompt that another sequence holds at other positions.

    Attributes:
        place: position in the prompt.  first: position in the other sequence.  length: number of tokens.
    """

    place: int
    first: int
    length: int


def find_chunks(cached: Ids[int], prompt: Ids[int], begin: int, least: int) -> list[ReusedChunk]:
    """Find chunks of at least `least` tokens that a prompt shares with the tokens of another sequence.

    Only tokens after the first `begin` ones and before the last one are searched. Blocks of half the minimum length are
    looked up and extended in both directions; of a repeated block, the first CANDIDATES positions are tried. The first
    READ_AGAIN tokens of each chunk are left out.
    """
    ours, cached_ids, block = np.array(prompt[:-1], np.int64), np.array(cached, np.int64), max(1, least // 2)
    places = dict[bytes, list[int]]()
    for first in range(0, len(cached_ids) - block + 1, block):
        starts = places.setdefault(cached_ids[first : first + block].tobytes(), [])
        if len(starts) < CANDIDATES:
            starts.append(first)
    chunks, place, free = list[ReusedChunk](), begin, begin
    while place + block <= len(ours):
        starts = places.get(ours[place : place + block].tobytes(), [])
        extended = [extend_chunk(ours, cached_ids, ReusedChunk(place, first, block), free) for first in starts]
        best = max(extended, key=lambda chunk: chunk.length, default=None)
        if best is None or best.length < least:
            place += 1
            continue
        place = free = best.place + best.length
        if best.length > READ_AGAIN:
            chunks.append(ReusedChunk(best.place + READ_AGAIN, best.first + READ_AGAIN, best.length - READ_AGAIN))
    return chunks


def extend_chunk(ours: np.ndarray, cached_ids: np.ndarray, chunk: ReusedChunk, free: int) -> ReusedChunk:
    """Extend a chunk in both directions, to the left at most to position `free` of the prompt.

    ours, cached_ids: token ids of the prompt and of the other sequence, int64.
    """
    place, first, _ = chunk
    back = min(place - free, first)
    matched_before = count_equal_prefix(ours[place - back : place][::-1], cached_ids[first - back : first][::-1])
    after = min(len(ours) - place, len(cached_ids) - first)
    count = count_equal_prefix(ours[place : place + after], cached_ids[first : first + after])
    return ReusedChunk(place - matched_before, first - matched_before, matched_before + count)


def count_equal_prefix(ours: np.ndarray, cached_ids: np.ndarray) -> int:
    """Return how many first elements of two arrays of equal length are equal."""
    differences = np.flatnonzero(ours != cached_ids)
    return int(differences[0]) if len(differences) else len(ours)


class ChunkReuse:
    """The chunks that a prompt copies from a fork of another sequence, in order."""

    def __init__(self, engine: "Engine", source: "Sequence", chunks: Iterable[ReusedChunk]):
        self._engine, self._source, self._chunks = engine, source.fork(), [*chunks]

    def find_pause(self, cached_tokens: int) -> int | None:
        """Return where prefill pauses: the position of the first chunk after `cached_tokens`; None without one."""
        return next((chunk.place for chunk in self._chunks if chunk.place > cached_tokens), None)

    def append_chunks(self, sequence: "Sequence", prompt: list[int]) -> int:
        """Append the chunks that begin at most MAX_GAP tokens after a sequence; return the number of tokens copied.

        The next run computes the tokens in the gaps. Chunks that do not fit into memory, or whose position has been
        passed, are prefilled like other tokens.
        """
        copied = 0
        while self._chunks and self._chunks[0].place <= len(sequence.tokens) + MAX_GAP:
            place, first, count = self._chunks[0]
            skipped = prompt[len(sequence.tokens) : place]
            try:
                if place >= len(sequence.tokens):
                    is_copied = self._engine.append_copies(sequence, self._source, first, count, skipped)
                    if skipped and not is_copied:
                        break  # these tokens are computed first
                    copied += count if is_copied else 0
                del self._chunks[0]
            except MemoryLimitError:
                self._chunks = []
        if not self._chunks:
            self._source.release()
        return copied

    def release(self) -> None:
        """Queue the fork to be freed.

        Takes no lock, so finalizers may call it.
        """
        self._chunks = []
        self._source.release()


def find_reuse(
    engine: "Engine", sequence: "Sequence", prompt: Ids[int], sources: Iterator["Sequence"], least: int
) -> ChunkReuse | None:
    """Find the sequence whose chunks cover the most uncached tokens of a prompt; None if no sequence shares a chunk.

    sources: sequences, the latest first; the first SOURCES are searched. least: minimum length of a chunk, in tokens.
    """
    begin, best, best_count = len(sequence.tokens), None, 0
    for source, _ in zip(sources, range(SOURCES), strict=False):
        chunks = find_chunks(source.tokens, prompt, begin, least)
        if (count := sum(chunk.length for chunk in chunks)) > best_count:
            best, best_count = (source, chunks), count
    return ChunkReuse(engine, *best) if best else None
