"""Tokens of earlier texts, also from earlier processes, as a source of drafts.

So a revised text is drafted from its earlier version, even that of another day. Texts are kept in order, and repeated
passages only once; when there are too many, the oldest are dropped.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from localllm.engine.forks import lock_for
from localllm.engine.image_tokens import without_images
from localllm.files.cache.ngram_cache_file import read_texts, write_texts
from localllm.files.cache.prefix_files import size_limit
from localllm.generation.speculation.acceptance import SURE

GAP = -1  # after every text
GRAM = 4  # tokens of an n-gram in the index
MOST = 1 << 17  # tokens of all texts: about 500 KB of text, 1 MB of the disk, 3 MB of memory
LOOKED = 64  # latest positions of an n-gram that are compared
LEAST = 24  # fewest tokens of a passage that is kept
SAMPLES = 500  # tokens of a vocabulary that its name is computed from
FACTOR = 0x9E3779B97F4A7C15  # multiplier of the n-grams' hashes (odd)


class CorpusMatch(NamedTuple):
    """The position after an earlier occurrence of a text's end, and the match's length: 0 for none, at most SURE."""

    place: int
    agreed: int


class TokenCorpus:
    """Concatenated texts, and an index of their n-grams. Immutable.

    The key of a position is a hash of the GRAM tokens before it; the index is all positions, sorted stably by key.
    NumPy sorts 131 thousand in 10 ms; reading them sorted from a file takes 2 ms.

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
        """Find the longest earlier match of the end of a text, `ending`, at most SURE tokens.

        Of equally long matches, those with the most frequent next token are preferred, then the latest one.
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
        if longest < GRAM:  # no match, or another n-gram with the same hash
            return CorpusMatch(0, 0)
        places = places[agreed == longest]
        _, kinds, counts = np.unique(self.tokens[places], return_inverse=True, return_counts=True)
        return CorpusMatch(int(places[counts[kinds] == counts.max()][-1]), longest)

    def and_text(self, ids: np.ndarray) -> "TokenCorpus":
        """Return the corpus with the new passages of another text, int32."""
        new = self._new_in(ids)
        if not len(new):
            return self
        tokens = np.concatenate((self.tokens, new))
        if len(tokens) > MOST:
            latest_tokens = tokens[-MOST * 3 // 4 :]
            return TokenCorpus.of(latest_tokens[int(np.argmax(latest_tokens == GAP)) + 1 :])
        places = places_in(new) + len(self.tokens)
        added = keys(new)[places - len(self.tokens) - GRAM]
        order = np.argsort(added, kind="stable")
        places, added = places[order], added[order]
        at = np.searchsorted(self._keys, added, "right")
        return TokenCorpus(tokens, np.insert(self.places, at, places), np.insert(self._keys, at, added))

    def _new_in(self, ids: np.ndarray) -> np.ndarray:
        """Return the new passages of a text, int32: each has at least LEAST tokens, and a GAP after it.

        A passage begins with up to SURE tokens that are known already, so that it is found by them.
        """
        if len(ids) < LEAST:
            return ids[:0]
        windows = np.lib.stride_tricks.sliding_window_view(ids, SURE)
        is_known = np.zeros(len(windows), bool)
        if len(self.places):
            last = np.searchsorted(self._keys, keys(ids)[SURE - GRAM :], "right")
            for back in range(1, GRAM + 1):  # compare with the latest positions of the same n-gram
                is_known |= alike(self.tokens, self.places[np.maximum(last - back, 0)], windows) == SURE
        is_new = np.convolve(is_known, np.ones(SURE, int)) == 0
        with_before = np.convolve(is_new, np.ones(SURE + 1, int))[SURE:] > 0
        ends = np.flatnonzero(np.diff(np.concatenate(([0], with_before, [0]))))
        pieces = [(first, last) for first, last in ends.reshape(-1, 2).tolist() if last - first >= LEAST]
        gap = np.array([GAP], np.int32)
        return np.concatenate([ids[:0], *(part for first, last in pieces for part in (ids[first:last], gap))])


def keys(tokens: np.ndarray) -> np.ndarray:
    """Compute the hashes of all n-grams, uint64 [tokens - GRAM + 1]."""
    numbers, factor = (tokens + np.int32(1)).astype(np.uint64), np.uint64(FACTOR)
    count = max(0, len(tokens) - GRAM + 1)
    hashes = np.zeros(count, np.uint64)
    for first in range(GRAM):
        hashes = hashes * factor + numbers[first : first + count]
    return hashes


def places_in(tokens: np.ndarray) -> np.ndarray:
    """Return the positions with GRAM tokens before them and one after, int32."""
    gaps = np.concatenate(([0], np.cumsum(tokens == GAP)))
    ends = np.arange(GRAM, len(tokens), dtype=np.int32)
    result: np.ndarray = ends[gaps[ends + 1] == gaps[ends - GRAM]]
    return result


def alike(tokens: np.ndarray, places: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Return how many tokens before each position match the end of its window, int [places].

    windows: [places or 1, length].
    """
    at = places[:, None] - np.arange(1, windows.shape[1] + 1)
    matches = (tokens[np.maximum(at, 0)] == windows[:, ::-1]) & (at >= 0)
    result: np.ndarray = np.logical_and.accumulate(matches, 1).sum(1)
    return result


NOTHING = TokenCorpus(np.zeros(0, np.int32), np.zeros(0, np.int32))


def vocabulary_name(pieces: Sequence[str]) -> str | None:
    """Return the name of a vocabulary for the file of its texts; None if texts are not stored.

    Vocabularies that differ in few tokens may have the same name: wrong drafts are the only consequence.
    """
    if size_limit() == 0:
        return None
    some = [pieces[number] for number in range(0, len(pieces), max(1, len(pieces) // SAMPLES))]
    return hashlib.blake2b(repr((len(pieces), some)).encode(errors="replace"), digest_size=16).hexdigest()


def latest(texts: list[np.ndarray]) -> list[np.ndarray]:
    """Return the latest texts up to MOST tokens in all, or the last one."""
    length = sum(len(text) for text in texts)
    while length > MOST and len(texts) > 1:
        length -= len(texts.pop(0))
    return texts


class NgramCache:
    """The earlier texts of one vocabulary, in memory and in a file of the user's cache folder. Thread-safe.

    Nothing leaves the computer.
    """

    def __init__(self, vocab_size: int, pieces: Sequence[str] | None):
        """Open the cache of a vocabulary; pieces: its tokens' texts, which name its file, None for no file."""
        self._vocab_size, self._pieces = vocab_size, pieces
        self.lock = lock_for(self)
        self._corpus: TokenCorpus | None = None
        self._added = deque[tuple[np.ndarray, bool]]()  # since `collect`
        self._unsaved, self._waiting = list[np.ndarray](), list[np.ndarray]()  # texts for the file, and for _corpus

    @cached_property
    def _name(self) -> str | None:
        """The name of the file, None for no file."""
        return None if self._pieces is None else vocabulary_name(self._pieces)

    def add(self, ids: Sequence[int], known_count: int = 0, is_kept: bool = False) -> None:
        """Queue a text; its first `known_count` tokens were added before. is_kept: also add it to the file."""
        text = np.array(without_images(ids[0 if is_kept else max(0, known_count - SURE) :]), np.int32)
        self._added.append((text, is_kept))  # takes no lock: finalizers call this

    def collect(self) -> None:
        """Process the queued texts. Waits for the lock, so no finalizer may call it."""
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
            if self._corpus is None:
                self._corpus = self._read()
            while self._waiting:
                self._corpus = self._corpus.and_text(self._waiting.pop(0))
            return self._corpus

    def _read(self) -> TokenCorpus:
        texts = read_texts(self._name) if self._name else None
        if texts is None:
            return NOTHING
        tokens, places = texts
        is_sound = tokens.min(initial=GAP) >= GAP and tokens.max(initial=GAP) < self._vocab_size
        if not is_sound or places.min(initial=GRAM) < GRAM or places.max(initial=0) >= max(1, len(tokens)):
            return NOTHING
        return TokenCorpus(tokens, places)

    def save(self) -> None:
        """Add the new texts to the file, which other processes may have changed; errors of writing are ignored."""
        with self.lock:
            self._collect()
            texts, self._unsaved = self._unsaved, []
        if not texts or not self._name:
            return
        old_corpus = corpus = self._read()
        for ids in texts:
            corpus = corpus.and_text(ids)
        if corpus is not old_corpus:
            with suppress(OSError):
                write_texts(self._name, corpus.tokens, corpus.places)
