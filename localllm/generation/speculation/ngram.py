"""Draft tokens from earlier text: prompt lookup by n-grams, and copies with edits.

Both proposers (see generation.speculation.acceptance) search the answer itself and earlier texts, at almost no cost. So
a revised document is drafted from its earlier version, even that of another day. Earlier texts, also from other
processes, are kept in order, and repeated passages only once; when there are too many, the oldest are dropped.
"""

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from localllm.engine.forks import create_lock
from localllm.engine.image_tokens import remove_images
from localllm.files.cache.ngram_cache_file import read_texts, write_texts
from localllm.files.cache.prefix_files import get_size_limit
from localllm.generation.speculation.acceptance import SURE, DraftToken

GAP = -1  # after every text
GRAM = 4  # tokens of an n-gram in the index
MAX_TOKENS = 1 << 17  # tokens of all texts: about 500 KB of text, 1 MB of the disk, 3 MB of memory
MAX_CANDIDATES = 64  # latest positions of an n-gram that are compared
MIN_PASSAGE_TOKENS = 24  # minimum tokens of a stored passage
SAMPLES = 500  # tokens of a vocabulary that its name is computed from
FACTOR = 0x9E3779B97F4A7C15  # multiplier of the n-grams' hashes (odd)


class CorpusMatch(NamedTuple):
    """An earlier occurrence of the last tokens of a text.

    Attributes:
        place: position after it.  agreed: number of tokens that match, at most SURE; 0 without a match.
    """

    place: int
    agreed: int


class TokenCorpus:
    """Concatenated texts with an index of their n-grams. Immutable.

    The key of a position is a hash of the GRAM tokens before it; the index is all positions, sorted stably by key.
    NumPy sorts 131 thousand in 10 ms; reading them sorted from a file takes 2 ms.

    Attributes:
        tokens: token ids with a GAP after each text, int32.  places: the index, int32.
    """

    def __init__(self, tokens: np.ndarray, places: np.ndarray, sorted_keys: np.ndarray | None = None):
        self.tokens, self.places = tokens, places
        self._keys = hash_ngrams(tokens)[places - GRAM] if sorted_keys is None else sorted_keys
        self._looked_up = self._keys.data

    @classmethod
    def from_tokens(cls, tokens: np.ndarray) -> Self:
        """Return the corpus of texts with a GAP after each, int32; computes the index."""
        places = find_positions(tokens)
        return cls(tokens, places[np.argsort(hash_ngrams(tokens)[places - GRAM], kind="stable")])

    def find(self, ending: Sequence[int]) -> CorpusMatch:
        """Find the longest earlier match of the last tokens, `ending`, at most SURE tokens long.

        Of equally long matches, the latest of those with the most frequent next token is returned.
        """
        if len(ending) < GRAM:
            return CorpusMatch(0, 0)
        key = 0
        for token in ending[-GRAM:]:
            key = (key * FACTOR + token + 1) % (1 << 64)
        first = bisect_left(self._looked_up, key)
        last = bisect_right(self._looked_up, key, first)
        places = self.places[max(first, last - MAX_CANDIDATES) : last]
        agreed = count_matches(self.tokens, places, np.array(ending, np.int32)[None])
        longest = int(agreed.max(initial=0))
        if longest < GRAM:  # no match, or another n-gram with the same hash
            return CorpusMatch(0, 0)
        places = places[agreed == longest]
        _, kinds, counts = np.unique(self.tokens[places], return_inverse=True, return_counts=True)
        return CorpusMatch(int(places[counts[kinds] == counts.max()][-1]), longest)

    def add_text(self, ids: np.ndarray) -> "TokenCorpus":
        """Return the corpus with the new passages of another text, int32."""
        new = self._find_new_passages(ids)
        if not len(new):
            return self
        tokens = np.concatenate((self.tokens, new))
        if len(tokens) > MAX_TOKENS:
            latest_tokens = tokens[-MAX_TOKENS * 3 // 4 :]
            return TokenCorpus.from_tokens(latest_tokens[int(np.argmax(latest_tokens == GAP)) + 1 :])
        places = find_positions(new) + len(self.tokens)
        added = hash_ngrams(new)[places - len(self.tokens) - GRAM]
        order = np.argsort(added, kind="stable")
        places, added = places[order], added[order]
        at = np.searchsorted(self._keys, added, "right")
        return TokenCorpus(tokens, np.insert(self.places, at, places), np.insert(self._keys, at, added))

    def _find_new_passages(self, ids: np.ndarray) -> np.ndarray:
        """Return the new passages of a text, int32.

        Each has at least MIN_PASSAGE_TOKENS tokens, and a GAP after it. It begins with up to SURE tokens that the
        corpus already has, by which it is found.
        """
        if len(ids) < MIN_PASSAGE_TOKENS:
            return ids[:0]
        windows = np.lib.stride_tricks.sliding_window_view(ids, SURE)
        is_known = np.zeros(len(windows), bool)
        if len(self.places):
            last = np.searchsorted(self._keys, hash_ngrams(ids)[SURE - GRAM :], "right")
            for back in range(1, GRAM + 1):  # compare with the latest positions of the same n-gram
                is_known |= count_matches(self.tokens, self.places[np.maximum(last - back, 0)], windows) == SURE
        is_new = np.convolve(is_known, np.ones(SURE, int)) == 0
        with_before = np.convolve(is_new, np.ones(SURE + 1, int))[SURE:] > 0
        ends = np.flatnonzero(np.diff(np.concatenate(([0], with_before, [0]))))
        pieces = [(first, last) for first, last in ends.reshape(-1, 2).tolist() if last - first >= MIN_PASSAGE_TOKENS]
        gap = np.array([GAP], np.int32)
        return np.concatenate([ids[:0], *(part for first, last in pieces for part in (ids[first:last], gap))])


def hash_ngrams(tokens: np.ndarray) -> np.ndarray:
    """Return the hashes of all n-grams, uint64 [tokens - GRAM + 1]."""
    numbers, factor = (tokens + np.int32(1)).astype(np.uint64), np.uint64(FACTOR)
    count = max(0, len(tokens) - GRAM + 1)
    hashes = np.zeros(count, np.uint64)
    for first in range(GRAM):
        hashes = hashes * factor + numbers[first : first + count]
    return hashes


def find_positions(tokens: np.ndarray) -> np.ndarray:
    """Return the positions in a text with GRAM tokens before them and one after, int32."""
    gaps = np.concatenate(([0], np.cumsum(tokens == GAP)))
    ends = np.arange(GRAM, len(tokens), dtype=np.int32)
    result: np.ndarray = ends[gaps[ends + 1] == gaps[ends - GRAM]]
    return result


def count_matches(tokens: np.ndarray, places: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Return how many tokens before each position match the end of its window, int [places].

    windows: the tokens to compare with, [places or 1, length].
    """
    at = places[:, None] - np.arange(1, windows.shape[1] + 1)
    matches = (tokens[np.maximum(at, 0)] == windows[:, ::-1]) & (at >= 0)
    result: np.ndarray = np.logical_and.accumulate(matches, 1).sum(1)
    return result


NOTHING = TokenCorpus(np.zeros(0, np.int32), np.zeros(0, np.int32))


def hash_vocabulary(pieces: Sequence[str]) -> str | None:
    """Return the name of the file with the texts of a vocabulary; None if texts are not stored.

    Vocabularies that differ in few tokens may have the same name, which only causes wrong drafts.
    """
    if get_size_limit() == 0:
        return None
    some = [pieces[number] for number in range(0, len(pieces), max(1, len(pieces) // SAMPLES))]
    return hashlib.blake2b(repr((len(pieces), some)).encode(errors="replace"), digest_size=16).hexdigest()


def select_latest_texts(texts: list[np.ndarray]) -> list[np.ndarray]:
    """Return the latest texts that have at most MAX_TOKENS tokens together, at least the last one."""
    length = sum(len(text) for text in texts)
    while length > MAX_TOKENS and len(texts) > 1:
        length -= len(texts.pop(0))
    return texts


class NgramCache:
    """The earlier texts of one vocabulary, in memory and in a file of the user's cache folder.

    Thread-safe. Nothing leaves the computer.
    """

    def __init__(self, vocab_size: int, pieces: Sequence[str] | None):
        """Open the cache of a vocabulary.

        pieces: strings of its tokens, which name its file; None: no file.
        """
        self._vocab_size, self._pieces = vocab_size, pieces
        self.lock = create_lock(self)
        self._corpus: TokenCorpus | None = None
        self._added = deque[tuple[np.ndarray, bool]]()  # since `collect`
        self._unsaved, self._waiting = list[np.ndarray](), list[np.ndarray]()  # texts for the file, and for _corpus

    @cached_property
    def _name(self) -> str | None:
        return None if self._pieces is None else hash_vocabulary(self._pieces)

    def add(self, ids: Sequence[int], known_count: int = 0, is_kept: bool = False) -> None:
        """Queue a text, whose first `known_count` tokens were added before.

        is_kept: whether it is also added to the file.
        """
        text = np.array(remove_images(ids[0 if is_kept else max(0, known_count - SURE) :]), np.int32)
        self._added.append((text, is_kept))  # takes no lock: finalizers call this

    def collect(self) -> None:
        """Process the queued texts.

        Waits for the lock, so finalizers must not call it.
        """
        with self.lock:
            self._collect()

    def _collect(self) -> None:
        while self._added:
            text, is_kept = self._added.popleft()
            self._waiting = select_latest_texts([*self._waiting, text])
            if is_kept:
                self._unsaved = select_latest_texts([*self._unsaved, text])

    def get_corpus(self) -> TokenCorpus:
        """Return the corpus with all texts so far, which is read from the file at first use."""
        with self.lock:
            self._collect()
            if self._corpus is None:
                self._corpus = self._read()
            while self._waiting:
                self._corpus = self._corpus.add_text(self._waiting.pop(0))
            return self._corpus

    def _read(self) -> TokenCorpus:
        """Return the corpus in the file; an empty one if it cannot be read."""
        texts = read_texts(self._name) if self._name else None
        if texts is None:
            return NOTHING
        tokens, places = texts
        is_sound = tokens.min(initial=GAP) >= GAP and tokens.max(initial=GAP) < self._vocab_size
        if not is_sound or places.min(initial=GRAM) < GRAM or places.max(initial=0) >= max(1, len(tokens)):
            return NOTHING
        return TokenCorpus(tokens, places)

    def save(self) -> None:
        """Add the new texts to the file, which other processes may have changed.

        Write errors are ignored.
        """
        with self.lock:
            self._collect()
            texts, self._unsaved = self._unsaved, []
        if not texts or not self._name:
            return
        old_corpus = corpus = self._read()
        for ids in texts:
            corpus = corpus.add_text(ids)
        if corpus is not old_corpus:
            with suppress(OSError):
                write_texts(self._name, corpus.tokens, corpus.places)


FOLLOWED = 4  # copied tokens in a row that start a copy
LEFT = 4  # positions of earlier copies that may be resumed


class NgramProposer:
    """Drafts the tokens that followed an earlier occurrence of the longest repeated suffix of the text.

    The suffix is found with a suffix automaton (Blumer et al. 1985) of all tokens so far: a state represents the
    substrings that end at the same positions, and the suffix link of the newest state is the longest suffix that
    occurred before. A longer match in earlier texts takes precedence.

    Attributes:
        tokens: the earlier texts, then the text.
        agreed: length of the longest suffix that occurred before.
        place: position of the token that followed its last occurrence.
    """

    account = None

    def __init__(self, corpus: TokenCorpus = NOTHING) -> None:
        self._corpus, self._begin = corpus, len(corpus.tokens)
        self.tokens = array("i", corpus.tokens.tobytes())
        self.place = self.agreed = 0
        self._elsewhere = CorpusMatch(0, 0)  # the longest match in earlier texts
        self._next: list[dict[int, int]] = [{}]  # transitions of each state, by token
        # Of each state: longest substring, suffix link, last end position.
        self._length, self._link, self._end = [0], [-1], [-1]
        self._last = 0

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens; each takes constant time on average."""
        for token in tokens:
            place = len(self.tokens)
            self.tokens.append(token)
            new = self._add(self._length[self._last] + 1, {}, place)
            state = self._last
            while state >= 0 and token not in self._next[state]:
                self._next[state][token] = new
                state = self._link[state]
            match = self._link[new] = self._find_suffix_link(state, token) if state >= 0 else 0
            self._last = new
            self.agreed, self.place = self._length[match], self._end[match] + 1
            self._end[match] = place
        if self._begin:
            self._search_corpus(tokens)

    def _search_corpus(self, tokens: Sequence[int]) -> None:
        """Update the match in earlier texts: extend it if the new tokens agree, else search again."""
        (place, agreed), count = self._elsewhere, len(tokens)
        goes_on = agreed and self.tokens[place : place + count] == self.tokens[-count:]
        if goes_on and self.tokens[place + count] != GAP:  # at the end of an earlier text, search again
            self._elsewhere = CorpusMatch(place + count, agreed + count)
        else:
            self._elsewhere = self._corpus.find(self.tokens[max(self._begin, len(self.tokens) - SURE) :])
        if self._elsewhere.agreed > self.agreed:
            self.place, self.agreed = self._elsewhere

    def _find_suffix_link(self, state: int, token: int) -> int:
        """Return the state of the longest suffix of the new text that occurred before."""
        following = self._next[state][token]
        if self._length[following] == self._length[state] + 1:
            return following
        split = self._add(self._length[state] + 1, dict(self._next[following]), self._end[following])
        self._link[split], self._link[following] = self._link[following], split
        while state >= 0 and self._next[state].get(token) == following:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add(self, length: int, following: dict[int, int], end: int) -> int:
        """Add a state; return its number."""
        self._next.append(following)
        for column, value in ((self._length, length), (self._link, 0), (self._end, end)):
            column.append(value)
        return len(self._length) - 1

    def rewind(self, count: int) -> None:
        """Do nothing: undone tokens remain a possible source of drafts."""

    def propose(self) -> Iterator[DraftToken] | None:
        """Return the tokens that followed the last occurrence; None without one.

        The trust of a token is the length of the match before it.
        """
        return propose_copy(self.tokens, self.place, self.agreed) if self.agreed else None


class CopyProposer:
    """Drafts the rest of a copied text after an edit.

    Where the answer differs from the original, it may have replaced one token, so that the copy continues after the
    next token of the original; or it has inserted or deleted text, and continues where a later token matches again.
    """

    account = None

    def __init__(self, grams: NgramProposer):
        """Start without a copy.

        grams: n-grams of the same texts, to which every token must be appended first.
        """
        self._grams = grams
        self._place: int | None = None  # position of the next token if the copy continues
        self._followed = 0  # latest tokens in a row that were copied
        self._ends: deque[int] = deque(maxlen=LEFT)  # positions where copies ended, the latest first

    def push(self, tokens: Sequence[int]) -> None:
        """Update the copy by tokens that `grams` already has."""
        for number in range(len(self._grams.tokens) - len(tokens), len(self._grams.tokens)):
            self._follow(number)
        if self._grams.agreed >= FOLLOWED and self._grams.agreed > self._followed:
            if self._grams.place != self._place:
                self._store_end()
            self._place, self._followed = self._grams.place, self._grams.agreed

    def _follow(self, number: int) -> None:
        """Update the copied position by the token with index `number` in the text."""
        text, place, followed = self._grams.tokens, self._place, self._followed
        if place is not None and text[place] == text[number]:
            self._place, self._followed = place + 1, followed + 1
            return
        replaced = resumed = None
        if place is not None:
            self._store_end()
            replaced = place + 1 if followed else None
        if self._ends:
            due = [waiting + skipped for waiting in self._ends for skipped in (0, 1)]
            resumed = next((at for at in due if at < number and text[at] == text[number]), None)
        self._place, self._followed = (replaced, 0) if resumed is None else (resumed + 1, 1)

    def _store_end(self) -> None:
        """Store the position at which the copy ends."""
        if self._place is not None and self._followed > 1 and self._place not in self._ends:
            self._ends.appendleft(self._place)

    def rewind(self, count: int) -> None:
        """Do nothing: `grams` keeps undone tokens."""

    def propose(self) -> Iterator[DraftToken] | None:
        """Return the next tokens of the original; None without a copy.

        The trust of a token is the number of copied tokens before it.
        """
        return None if self._place is None else propose_copy(self._grams.tokens, self._place, self._followed)


def propose_copy(tokens: Sequence[int], place: int, agreed: int) -> Iterator[DraftToken]:
    """Yield the tokens from a position on; at the end, repeat the draft itself.

    The first has trust `agreed`, each following one 1 more, at most SURE.
    """
    guesses = list[int]()
    while True:
        end = len(tokens)
        token = tokens[place] if place < end else guesses[place - end]
        if token == GAP:
            return
        guesses.append(token)
        yield DraftToken(token, min(agreed, SURE))
        place, agreed = place + 1, agreed + 1


def make_text_proposers(tokens: Sequence[int], cache: NgramCache | None = None) -> tuple[NgramProposer, CopyProposer]:
    """Return the proposers that search the tokens so far and earlier texts."""
    grams = NgramProposer(cache.get_corpus() if cache else NOTHING)
    grams.push(tokens)
    return grams, CopyProposer(grams)
