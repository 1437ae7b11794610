"""Token sequences of earlier texts, of this process and earlier ones, as a source of drafts.

An edited text is thus drafted from its earlier version, even from another day. Texts are kept in order, and repeated
passages only once; when there are too many, the oldest are dropped.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Self

import numpy as np

from localllm.engine.forks import lock_for
from localllm.engine.image_tokens import without_images
from localllm.files.cache.ngram_cache_file import read_texts, write_texts
from localllm.files.cache.prefix_files import size_limit
from localllm.generation.speculation.acceptance import SURE

GAP = -1  # behind every text
GRAM = 4  # tokens in a row that make a place worth looking at
MOST = 1 << 17  # tokens of all texts: about 500 KB of text, 1 MB of the disk, 3 MB of memory
LOOKED = 64  # places that are compared, the latest
LEAST = 24  # tokens of a piece that is kept
SAMPLES = 500  # tokens that a vocabulary is known by
FACTOR = 0x9E3779B97F4A7C15  # of the keys, odd


class CorpusMatch(NamedTuple):
    """The place where a text with the same ending continues, and the match's length: 0 for none, SURE at most."""

    place: int
    agreed: int


class TokenCorpus:
    """Concatenated texts, and an index of their n-grams. Immutable.

    A position represents the GRAM tokens before it, from which its key is computed. The index is all positions sorted
    by key, stably. NumPy sorts 131 thousand in 10 ms, and a file that has them sorted is read in 2.

    Attributes:
        tokens: int32, with a GAP after each text.  places: int32, the index.
    """

    def __init__(self, tokens: np.ndarray, places: np.ndarray, sorted_keys: np.ndarray | None = None):
        self.tokens, self.places = tokens, places
        self._keys = keys(tokens)[places - GRAM] if sorted_keys is None else sorted_keys
        self._looked_up = self._keys.data

    @classmethod
    def of(cls, tokens: np.ndarray) -> Self:
        """Build the index."""
        places = places_in(tokens)
        return cls(tokens, places[np.argsort(keys(tokens)[places - GRAM], kind="stable")])

    def find(self, ending: Sequence[int]) -> CorpusMatch:
        """Find where the last SURE tokens of a text occurred before: the longest match.

        If several are equally long, choose the one whose next token followed most often, and the latest of those.
        """
        if len(ending) < GRAM:
            return CorpusMatch(0, 0)
        key = 0
        for token in ending[-GRAM:]:
            key = (key * FACTOR + token + 1) % (1 << 64)
        first = bisect_left(self._looked_up, key)
        last = bisect_right(self._looked_up, key, first)
        places = self.places[max(first, last - LOOKED) : last]
        agreed = alike(self.tokens, places, np.array(ending, np.int32)[None])
        longest = int(agreed.max(initial=0))
        if longest < GRAM:  # none, or another gram with the same key
            return CorpusMatch(0, 0)
        places = places[agreed == longest]
        _, kinds, counts = np.unique(self.tokens[places], return_inverse=True, return_counts=True)
        return CorpusMatch(int(places[counts[kinds] == counts.max()][-1]), longest)

    def and_text(self, ids: np.ndarray) -> "TokenCorpus":
        """Return the corpus with what is new in another text, int32."""
        new = self._new_in(ids)
        if not len(new):
            return self
        tokens = np.concatenate((self.tokens, new))
        if len(tokens) > MOST:
            rest = tokens[-MOST * 3 // 4 :]
            return TokenCorpus.of(rest[int(np.argmax(rest == GAP)) + 1 :])
        places = places_in(new) + len(self.tokens)
        added = keys(new)[places - len(self.tokens) - GRAM]
        order = np.argsort(added, kind="stable")
        places, added = places[order], added[order]
        at = np.searchsorted(self._keys, added, "right")
        return TokenCorpus(tokens, np.insert(self.places, at, places), np.insert(self._keys, at, added))

    def _new_in(self, ids: np.ndarray) -> np.ndarray:
        """Return the passages of a text that are new here, int32: LEAST tokens or more, with a GAP after each.

        A piece begins with SURE tokens that may be known, by which it is found again.
        """
        if len(ids) < LEAST:
            return ids[:0]
        windows = np.lib.stride_tricks.sliding_window_view(ids, SURE)
        known = np.zeros(len(windows), bool)
        if len(self.places):
            last = np.searchsorted(self._keys, keys(ids)[SURE - GRAM :], "right")
            for back in range(1, GRAM + 1):  # the latest of the places that may be alike
                known |= alike(self.tokens, self.places[np.maximum(last - back, 0)], windows) == SURE
        is_new = np.convolve(known, np.ones(SURE, int)) == 0
        with_before = np.convolve(is_new, np.ones(SURE + 1, int))[SURE:] > 0
        ends = np.flatnonzero(np.diff(np.concatenate(([0], with_before, [0]))))
        pieces = [(first, last) for first, last in ends.reshape(-1, 2).tolist() if last - first >= LEAST]
        gap = np.array([GAP], np.int32)
        return np.concatenate([ids[:0], *(part for first, last in pieces for part in (ids[first:last], gap))])


def keys(tokens: np.ndarray) -> np.ndarray:
    """Compute keys of all GRAM consecutive tokens, uint64 [tokens - GRAM + 1]."""
    numbers, factor = (tokens + np.int32(1)).astype(np.uint64), np.uint64(FACTOR)
    count = max(0, len(tokens) - GRAM + 1)
    found = np.zeros(count, np.uint64)
    for first in range(GRAM):
        found = found * factor + numbers[first : first + count]
    return found


def places_in(tokens: np.ndarray) -> np.ndarray:
    """Return the positions with GRAM tokens before them and one after, int32."""
    gaps = np.concatenate(([0], np.cumsum(tokens == GAP)))
    ends = np.arange(GRAM, len(tokens), dtype=np.int32)
    result: np.ndarray = ends[gaps[ends + 1] == gaps[ends - GRAM]]
    return result


def alike(tokens: np.ndarray, places: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Return how many tokens before each position match the end of its window; one window may serve all."""
    at = places[:, None] - np.arange(1, windows.shape[1] + 1)
    same = (tokens[np.maximum(at, 0)] == windows[:, ::-1]) & (at >= 0)
    result: np.ndarray = np.logical_and.accumulate(same, 1).sum(1)
    return result


NOTHING = TokenCorpus(np.zeros(0, np.int32), np.zeros(0, np.int32))


def vocabulary_name(pieces: Sequence[str]) -> str | None:
    """Name the vocabulary of the stored texts; None if texts are not stored.

    A vocabulary that differs in few tokens may have the same name: then drafts are wrong, with no other harm.
    """
    if size_limit() == 0:
        return None
    some = [pieces[number] for number in range(0, len(pieces), max(1, len(pieces) // SAMPLES))]
    return hashlib.blake2b(repr((len(pieces), some)).encode(errors="replace"), digest_size=16).hexdigest()


def latest(texts: list[np.ndarray]) -> list[np.ndarray]:
    """Return the latest texts up to MOST tokens in all, or the last one."""
    rest = sum(len(text) for text in texts)
    while rest > MOST and len(texts) > 1:
        rest -= len(texts.pop(0))
    return texts


class NgramCache:
    """Earlier texts of one vocabulary; it grows. Several threads may use it.

    Nothing leaves the computer. A file of the user's cache folder has it between processes.
    """

    def __init__(self, vocab_size: int, name: str | None):
        """Open the cache of a vocabulary; name: of its file, None for no file."""
        self._vocab_size, self._name = vocab_size, name
        self.lock = lock_for(self)
        self._earlier: TokenCorpus | None = None
        self._added = deque[tuple[np.ndarray, bool]]()  # since `collect`
        self._unsaved, self._waiting = list[np.ndarray](), list[np.ndarray]()  # texts for the file, and for _earlier

    def add(self, ids: Sequence[int], known: int = 0, is_kept: bool = False) -> None:
        """Add a text that was read or written, of which `known` tokens were there before; is_kept: to the file, too."""
        text = np.array(without_images(ids[0 if is_kept else max(0, known - SURE) :]), np.int32)
        self._added.append((text, is_kept))  # no lock: an answer that is garbage ends anywhere

    def collect(self) -> None:
        """Take in what was added, and no more than is kept. Never call it in a finalizer: it waits for the lock."""
        with self.lock:
            self._collect()

    def _collect(self) -> None:
        while self._added:
            text, is_kept = self._added.popleft()
            self._waiting = latest([*self._waiting, text])
            if is_kept:
                self._unsaved = latest([*self._unsaved, text])

    def earlier(self) -> TokenCorpus:
        """Return the whole corpus."""
        with self.lock:
            self._collect()
            if self._earlier is None:
                self._earlier = self._read()
            while self._waiting:
                self._earlier = self._earlier.and_text(self._waiting.pop(0))
            return self._earlier

    def _read(self) -> TokenCorpus:
        found = read_texts(self._name) if self._name else None
        if found is None:
            return NOTHING
        tokens, places = found
        is_sound = tokens.min(initial=GAP) >= GAP and tokens.max(initial=GAP) < self._vocab_size
        if not is_sound or places.min(initial=GRAM) < GRAM or places.max(initial=0) >= max(1, len(tokens)):
            return NOTHING
        return TokenCorpus(tokens, places)

    def save(self) -> None:
        """Merge into the file what other processes have added meanwhile; errors are ignored."""
        with self.lock:
            self._collect()
            texts, self._unsaved = self._unsaved, []
        if not texts or not self._name:
            return
        before = found = self._read()
        for ids in texts:
            found = found.and_text(ids)
        if found is not before:
            with suppress(OSError):
                write_texts(self._name, found.tokens, found.places)
