"""Reuse the sequences of earlier prompts for prompts with the same prefix.

The longest prefix that a prompt shares with a sequence in memory or in a file is not prefilled again, so a new turn of
a conversation costs its own tokens only. Single answers share the cache of their model; each batch, whose prompts are
prefilled in chunks, has its own.

Reuse changes no bit of the answer. A cached prefix can be reused up to the end of a whole run (localllm.engine.runs) or
an image, because the rest of the prompt is then prefilled in the same runs as without the cache. A conversation can
also continue at the end of each of its turns. Prompts of up to PRECISE_TOKENS tokens are read with 16-bit activations,
so prefixes of any length can be reused between them if they select the same kernels. In a batch, a prefix can be reused
as long as both prompts are computed with the same arithmetic (localllm.generation.chunked_prefill).
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from localllm.engine.adapter_scales import AdapterScales
from localllm.engine.forks import create_lock
from localllm.engine.image_tokens import find_last_end, has_images, is_worth_caching
from localllm.engine.memory.sequence_state import StoredPrefix
from localllm.engine.runs import MIN_CACHED_TOKENS, PRECISE_TOKENS, RunPlan
from localllm.generation.chunked_prefill import PrefillSegments, count_reusable_tokens
from localllm.generation.context_overflow import ShiftedSequence, wrap_sequence
from localllm.generation.run_queue import RunQueue

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.hooks import LayerHook
    from localllm.engine.memory.sequence_state import StoredPrefix
    from localllm.engine.prefix_store import PrefixStore
    from localllm.engine.sequence import Sequence
    from localllm.generation.chunk_reuse import ChunkReuse
    from localllm.generation.context_overflow import ShiftedSequence
    from localllm.generation.request import Completion
    from localllm.generation.speculation.ngram import NgramCache

    Source = Sequence | ShiftedSequence | StoredPrefix


class TurnBoundary(NamedTuple):
    """The end of a turn's prompt and of its answer in a sequence, as numbers of tokens.

    Attributes:
        end: None while the answer is in progress.
    """

    prompt: int
    end: int | None = None


class ReuseCandidate(NamedTuple):
    """A sequence or file whose prefix a prompt may reuse.

    Attributes:
        source: the sequence or file; None if only the length matters.  tokens: the cached token ids.
        turns: the boundaries of the conversation's turns.
        aligned: number of first tokens that were read in whole runs and images; None if any prefix can be reused.
        has_logits: whether the logits after the last token are cached, so that the same prompt needs no prefill.
        segments: segments of the prompt with which the tokens begin, if it was prefilled in a batch.
    """

    source: "Source | None"
    tokens: Ids[int]
    turns: Ids[TurnBoundary] = ()
    aligned: int | None = None
    has_logits: bool = False
    segments: PrefillSegments | None = None


class PrefixMatch(NamedTuple):
    """A source whose first `length` tokens a prompt can reuse.

    Attributes:
        source: None if nothing can be reused.
        is_run: whether the prefix ends where a whole run or an image ends, so that the rest is read as without a cache.
    """

    source: "Source | None"
    length: int
    is_run: bool = False


NOTHING = PrefixMatch(None, 0)


def find_longest_match(
    candidates: Iterable[ReuseCandidate], ids: Ids[int], runs: RunPlan, segments: PrefillSegments | None = None
) -> PrefixMatch:
    """Return the longest reusable prefix, the first of several equally long ones; NOTHING if none can be reused.

    segments: segments of the prompt, if it is prefilled in a batch.
    """
    matches = (match_prefix(candidate, ids, runs, segments) for candidate in candidates)
    best = max(matches, key=lambda match_here: match_here.length, default=NOTHING)
    return best if best.length else NOTHING


def match_prefix(
    candidate: ReuseCandidate, ids: Ids[int], runs: RunPlan, segments: PrefillSegments | None = None
) -> PrefixMatch:
    """Return the part of a candidate that a prompt can reuse; its length may be 0."""
    source, tokens, turns, aligned, has_logits, read_in = candidate
    find_common_length = count_common(tokens, ids)
    if read_in and segments:
        return PrefixMatch(
            source, count_reusable_tokens(find_common_length, segments, read_in) if find_common_length else 0
        )
    if has_logits and len(tokens) == len(ids) == find_common_length + 1 and tokens[-1] == ids[-1]:
        return PrefixMatch(source, len(ids))
    if aligned is None:
        return PrefixMatch(source, find_common_length)
    ended = max(
        (
            find_common_length if end is None else min(end, find_common_length)
            for prompt, end in turns
            if prompt <= find_common_length
        ),
        default=0,
    )
    length = max(ended, find_last_end(ids, min(find_common_length, aligned), runs))
    left = next((turn.prompt for turn in turns if turn.prompt > find_common_length), 0)  # the prompt that differs
    if left and max(len(ids), left) <= PRECISE_TOKENS and runs.uses_same_kernels(len(ids), left):
        length = find_common_length
    is_run = length < find_common_length and length == find_last_end(ids, min(length, aligned), runs)
    return PrefixMatch(source, length, is_run)


def count_common(tokens: Ids[int], ids: Ids[int]) -> int:
    """Return the length of the common prefix of two prompts, at most len(ids) - 1."""
    count = 0
    for ours, cached in zip(tokens, ids[:-1], strict=False):
        if ours != cached:
            break
        count += 1
    return count


PARKED = 4  # conversations besides the latest that can be resumed
LIVE_IDLE = 16  # idle conversations of a live batch that are kept for their next turn


class PrefixQuery(NamedTuple):
    """A search for the longest cached prefix of a prompt.

    Attributes:
        ids: the token ids of the prompt.
        keep: number of first tokens that stay when the context is full; None: no context shift.
        earlier: number of tokens of the stored conversation that the prompt continues; 0 if it continues none.
        segments: segments of the prompt, if it is prefilled in chunks or measured; None: in whole runs.
        most: maximum number of tokens of a prefix from files.
        reuse: minimum number of tokens of a chunk from the middle of another prompt; 0: only prefixes are reused.
        adapter_scales: scales of the adapters for the tokens.
    """

    ids: Ids[int]
    keep: int | None = None
    earlier: int = 0
    segments: PrefillSegments | None = None
    most: int = sys.maxsize
    reuse: int = 0
    adapter_scales: AdapterScales = AdapterScales()


class CachedSequence(NamedTuple):
    """A sequence that holds a prefix of a prompt.

    Attributes:
        logits: logits after the prompt, float32 [1, vocab], if the sequence holds it completely; else None.
    """

    sequence: "Sequence | ShiftedSequence"
    logits: np.ndarray | None = None


class PromptEnd(NamedTuple):
    """A sequence that holds one prompt and nothing more, with the logits after it, float32 [1, vocab]."""

    sequence: "Sequence"
    logits: np.ndarray


class PrefixCache:
    """The sequences of an engine that prompts can continue: in use, idle, parked, and stored in files.

    Several answers may be generated at the same time, each with a sequence of its own.

    Attributes:
        engine: runs the model.  context: maximum number of tokens of a sequence.
        store: the files of the prefix cache, or None.
        ngrams: earlier texts as a source of drafts, or None.
        runs: joins the steps of concurrent answers into common runs of the model.
        is_shared: whether the cache belongs to a batch, whose prompts are prefilled in chunks. Then no files are
            written, because they may only contain prompts that were read in whole runs.
        is_live: whether requests arrive while others are answered.
        idle: unused sequences, the latest last.
        hook: of all its sequences, or None; with one, nothing is reused, so that it is called for every token.
    """

    def __init__(
        self, engine: "Engine", store: "PrefixStore | None" = None, ngrams: "NgramCache | None" = None,
        is_shared: bool = False, is_live: bool = False, hook: "LayerHook | None" = None,
    ):  # fmt: skip
        self.hook = hook
        self.engine, self.context, self.store, self.ngrams = engine, engine.context, store, ngrams
        self.is_shared, self.is_live, self.runs = is_shared, is_live, RunQueue()
        self.idle: deque[Sequence | ShiftedSequence] = deque()
        self._busy: WeakSet[Sequence | ShiftedSequence] = WeakSet()
        self._parked: deque[Sequence | ShiftedSequence] = deque()  # conversations to resume
        self._turns: WeakKeyDictionary[Sequence | ShiftedSequence, list[TurnBoundary]] = WeakKeyDictionary()
        self._segments: WeakKeyDictionary[Sequence | ShiftedSequence, PrefillSegments] = WeakKeyDictionary()
        self._end: PromptEnd | None = None  # of the latest prompt of more than PRECISE_TOKENS
        self._is_new = False  # whether _end is not in a file yet
        self._released: deque[Sequence | ShiftedSequence] = deque()  # returned by answers: see `collect`
        self.lock = create_lock(self)

    # ---- lookup ----

    def acquire(self, answer: "Completion") -> None:
        """Give an answer the sequence with the longest cached prefix, and the logits after its prompt if cached."""
        query = self._make_query(answer)
        acquired = self.acquire_sequence(query)
        sequence = acquired.sequence
        self._segments[sequence] = answer.segments
        if isinstance(sequence, ShiftedSequence):
            sequence.prepare_prompt(query.ids)
        elif query.reuse and len(query.ids) - len(sequence.tokens) > query.reuse:
            answer.reuse = self._find_reuse(sequence, query)
        answer.sequence, answer.cached_logits = acquired  # type: ignore[assignment]
        answer.request.cached = len(sequence.tokens)

    def _find_reuse(self, sequence: "Sequence", query: PrefixQuery) -> "ChunkReuse | None":
        """Find chunks of the prompt's uncached tokens in the latest other sequences; None without any."""
        from localllm.generation.chunk_reuse import find_reuse  # for serve only

        # A draft head needs the hidden states, which are not cached.
        if self.engine.has_draft_head or has_images(query.ids) or query.adapter_scales.changes:
            return None
        with self.lock:
            latest = (each for each in (*self._busy, *reversed(self.idle)) if each is not sequence and not each.closed)
            plain = (e for e in latest if not isinstance(e, ShiftedSequence) and not e.adapter_scales.changes)
            return find_reuse(self.engine, sequence, query.ids, plain, query.reuse)

    def find_match(self, answer: "Completion") -> PrefixMatch:
        """Return the longest prefix of an answer in memory."""
        with self.lock:
            return self._find_match(self._make_query(answer)._replace(most=0))

    def acquire_sequence(self, query: PrefixQuery) -> CachedSequence:
        """Return a sequence with the longest cached prefix, from memory, or from files if theirs is longer."""
        with self.lock:
            self._collect()
            self._drop_end(query.ids)
            while (acquired := self._acquire_from(best := self._find_match(query), query)) is None:
                query = query._replace(most=best.length - 1)
            acquired.sequence.adapter_scales = AdapterScales(query.adapter_scales.changes)
            while self.idle and not self.is_shared:  # a single answer may need all memory
                self.idle.popleft().close()
            self._busy.add(acquired.sequence)
            turns = [
                turn
                for turn in self._list_boundaries(acquired.sequence)
                if turn.prompt <= len(acquired.sequence.tokens)
            ]
            self._turns[acquired.sequence] = [*turns, TurnBoundary(len(query.ids))]
            return acquired

    def _make_query(self, answer: "Completion") -> PrefixQuery:
        """Return the query for an answer; that of a preempted answer matches only sequences in memory."""
        is_measured = answer.segments.runs.is_measuring
        in_pieces = self.is_shared or answer.has_begun or is_measured
        stored_limit = 0 if answer.has_begun or is_measured else sys.maxsize
        keep = None if in_pieces else answer.kept
        reuse = (answer.options.cache_reuse or 0) if self.is_shared and not answer.has_begun else 0
        return PrefixQuery(
            answer.ids, keep, answer.request.task.earlier, answer.segments if in_pieces else None, stored_limit, reuse,
            answer.adapter_scales,
        )  # fmt: skip

    def _find_match(self, query: PrefixQuery) -> PrefixMatch:
        """Return the longest reusable prefix in memory and in files; NOTHING for answers with hooks."""
        if self.hook:
            return NOTHING
        candidates = [*self._list_in_memory(query), *self._find_stored(query)]
        return find_longest_match(candidates, query.ids, self.engine.runs, query.segments)

    def _list_in_memory(self, query: PrefixQuery) -> Iterator[ReuseCandidate]:
        """Yield the sequences in memory: the latest long prompt, then those idle, in use and parked."""
        if self._end and query.keep is None and not query.segments:
            yield self._make_candidate(self._end.sequence, query)._replace(has_logits=True)
        for sequence in (*self.idle, *self._busy, *self._parked):
            candidate = self._make_candidate(sequence, query, query.reuse)
            is_alike = candidate.segments if query.segments else not self._is_measured(sequence)
            if not sequence.closed and (query.reuse or is_alike):
                yield candidate

    def _is_measured(self, sequence: "Sequence | ShiftedSequence") -> bool:
        """Return whether all activations of a sequence had 16 bits, so that other prompts must not continue it."""
        segments = self._segments.get(sequence)
        return segments is not None and segments.runs.is_measuring

    def _make_candidate(
        self, sequence: "Sequence | ShiftedSequence", query: PrefixQuery, reuse: int = 0
    ) -> ReuseCandidate:
        """Return the candidate of a sequence; reuse: see PrefixQuery."""
        tokens, scales = sequence.tokens, sequence.adapter_scales
        if scales.changes or query.adapter_scales.changes:
            tokens = tokens[: scales.find_common_length(query.adapter_scales, len(tokens))]
        if reuse:
            return ReuseCandidate(sequence, tokens)
        turns, segments = self._turns.get(sequence, []), self._segments.get(sequence)
        if isinstance(sequence, ShiftedSequence):
            return ReuseCandidate(sequence, tokens, turns, segments=segments)
        tokens = tokens if sequence.exact > len(tokens) else tokens[: sequence.exact]
        return ReuseCandidate(sequence, tokens, turns, sequence.aligned, segments=segments)

    def _find_stored(self, query: PrefixQuery) -> Iterator[ReuseCandidate]:
        """Yield the prefixes in files: of the prompt, and of the conversation that it continues."""
        ids, keep, earlier_tokens, _, limit, _, scales = query
        if self.store is None or keep is not None or not limit:
            return
        if prompt := self.store.find_prefix(ids, limit, scales=scales):
            yield ReuseCandidate(prompt, prompt.ids, (), len(prompt.ids), prompt.has_logits)
        # The last token of an answer may not have been read.
        for length in () if self.is_shared else (earlier_tokens - 1, earlier_tokens):
            beginning = ids[: max(length, 0)]
            if length < len(ids) and (
                talk := self.store.find_prefix(beginning, limit, is_conversation=True, scales=scales)
            ):
                yield ReuseCandidate(talk, talk.ids, restore_turns(talk), 0)

    def _acquire_from(self, best: PrefixMatch, query: PrefixQuery) -> CachedSequence | None:
        """Return the sequence of a match, for one answer; None if its files do not exist any more."""
        source = best.source
        if isinstance(source, StoredPrefix):
            assert self.store is not None
            loaded = self.store.load(source)
            if loaded and source.is_conversation:
                self._turns[loaded.sequence] = restore_turns(source)
            return loaded and CachedSequence(*loaded)
        if source is None:
            new = self.engine.sequence(self.hook) if self.hook else self.engine.sequence()
            return CachedSequence(new if query.keep is None else ShiftedSequence(new, query.keep))
        if source in self.idle and not self.is_shared:
            self.idle.remove(source)
        elif source in self._parked:
            self._parked.remove(source)
        else:
            source = self._fork(source)
        if best.length == len(query.ids):
            return CachedSequence(source, self._end and self._end.logits)
        sequence = wrap_sequence(source, query.keep)
        again = match_prefix(
            self._make_candidate(sequence, query, query.reuse), query.ids, self.engine.runs, query.segments
        )
        if query.reuse and not isinstance(sequence, ShiftedSequence):
            exact = match_prefix(self._make_candidate(sequence, query), query.ids, self.engine.runs, query.segments)
            if exact.length < again.length:
                sequence.exact = min(sequence.exact, exact.length)
        if again.is_run and not isinstance(sequence, ShiftedSequence):
            sequence.rewind(again.length)
        else:
            sequence.truncate(again.length)
        return CachedSequence(sequence)

    def _fork(self, sequence: "Sequence | ShiftedSequence") -> "Sequence | ShiftedSequence":
        """Fork a sequence together with what is known about it."""
        twin = sequence.fork()
        self._turns[twin] = self._list_boundaries(sequence)
        if sequence in self._segments:
            self._segments[twin] = self._segments[sequence]
        return twin

    def _list_boundaries(self, sequence: "Sequence | ShiftedSequence") -> list[TurnBoundary]:
        """Return the boundaries of a sequence's turns; the answer in progress ends at its last token."""
        cached, turns = len(sequence.tokens), self._turns.get(sequence, [])
        return [TurnBoundary(prompt, cached if end is None else min(end, cached)) for prompt, end in turns]

    # ---- return and storage ----

    def record_prefill(self, sequence: "Sequence | ShiftedSequence", begin: int, logits: np.ndarray) -> None:
        """Keep a fork of a sequence that has just prefilled a long prompt from position `begin` on.

        Does nothing if the prompt was split into runs (engine.runs) differently from a prefill of all its tokens.
        logits: logits after the prompt, float32 [1, vocab].
        """
        tokens, runs = sequence.tokens, self.engine.runs
        if self.is_shared or isinstance(sequence, ShiftedSequence) or len(tokens) <= PRECISE_TOKENS:
            return
        if self._is_measured(sequence):
            return
        if begin != find_last_end(tokens, begin, runs) or sequence.aligned != find_last_end(tokens, len(tokens), runs):
            return
        with self.lock:
            previous, self._end, self._is_new = self._end, PromptEnd(sequence.fork(), logits.copy()), True
        if previous:
            previous.sequence.close()

    def give_back(self, answer: "Completion") -> None:
        """Take back the sequence of a finished answer, and add the text to `ngrams` for later drafts.

        Takes a lock only in a batch, since the finalizer of a single answer may call it anywhere.
        """
        sequence, answer.guesses = answer.sequence, None
        if sequence is None:
            return
        if isinstance(sequence, ShiftedSequence):
            answer.dropped, answer.skipped = sequence.dropped, sequence.skipped
        if self.ngrams and answer.options.speculate != "off":
            self.ngrams.add(answer.ids, answer.cached_tokens, len(answer.prompt) > MIN_CACHED_TOKENS)
        self._segments[sequence] = answer.segments
        if answer.number and not self.is_shared:  # a fork of the first answer's
            sequence.release()
        else:
            self.queue_release(sequence)
        if self.is_shared:
            self.collect()
        answer.sequence = None  # last: after Ctrl-C in any line above, this method is called again

    def discard(self, answer: "Completion") -> None:
        """Close the sequence of an answer that failed."""
        if self.is_shared:
            answer.close()
        else:
            self.give_back(answer)

    def abandon(self, answers: "Iterable[Completion]") -> None:
        """Take back the sequences of cancelled answers, and free those of a batch.

        Takes no lock, so finalizers may call it.
        """
        for answer in answers:
            if self.is_shared:
                answer.release()
            else:
                self.give_back(answer)
        while self.is_shared and self.idle:
            self.idle.popleft().release()

    def queue_release(self, sequence: "Sequence | ShiftedSequence") -> None:
        """Queue a sequence that no answer uses any more.

        Takes no lock, since the garbage collector may call it anywhere, even while this thread holds one.
        """
        self._released.append(sequence)

    def collect(self) -> None:
        """Process the sequences that answers have returned: keep the latest, and store a new long prompt.

        Waits for locks, so finalizers must not call it.
        """
        with self.lock:
            self._collect()
        if self.ngrams:
            self.ngrams.collect()

    def mark_used(self, source: "Source | None") -> None:
        """Mark an idle sequence as the latest used one."""
        if source and not isinstance(source, StoredPrefix) and source in self.idle:
            self.idle.remove(source)
            self.idle.append(source)

    def evict(self, spare: int = 0) -> bool:
        """Close the oldest idle sequence, unless it is among the `spare` latest; return whether one was closed."""
        if len(self.idle) <= spare:
            return False
        self.idle.popleft().close()
        return True

    def write_conversation(self) -> None:
        """Write the cache of the latest conversation to disk, for a later process that resumes it."""
        with self.lock:
            self._collect()
            if not self.idle or self._is_measured(self.idle[-1]):
                return
            latest = self.idle[-1]
            if self.ngrams:
                self.ngrams.add(latest.tokens, is_kept=True)
            if self.store and not isinstance(latest, ShiftedSequence) and is_worth_caching(latest.tokens):
                self.store.keep(latest.fork(), None, is_conversation=True)

    def park(self) -> None:
        """Keep the cache of the current conversation so that it can be resumed.

        The PARKED latest ones are kept, as long as there is memory for another whole sequence.
        """
        with self.lock:
            self._collect()
            used_places, places = self.engine.get_cache_usage()
            if not self.idle or isinstance(self.idle[-1], ShiftedSequence) or used_places + self.context > places:
                return
            self._parked.append(self._fork(self.idle[-1]))
            oldest = self._parked.popleft() if len(self._parked) > PARKED else None
        if oldest:
            oldest.close()

    def _collect(self) -> None:
        """Process all returned sequences. The caller holds the lock."""
        while self._released:
            sequence = self._released.popleft()
            self.runs.withdraw(sequence)
            if sequence.closed or sequence in self.idle:  # collected with its answer, or put back twice after Ctrl-C
                continue
            self._busy.discard(sequence)
            self._turns[sequence] = self._list_boundaries(sequence)
            self._write_end()
            self._retain(sequence)

    def _retain(self, sequence: "Sequence | ShiftedSequence") -> None:
        """Add a sequence to `idle`; close idle ones that are prefixes of it, and the oldest ones."""
        for parked in [*self.idle]:
            is_prefix = parked.tokens == sequence.tokens[: len(parked.tokens)]
            is_prefix = is_prefix and parked.adapter_scales.changes == sequence.adapter_scales.changes
            if is_prefix and self._is_measured(parked) == self._is_measured(sequence):
                self.idle.remove(parked)
                parked.close()
        self.idle.append(sequence)
        while self.evict(LIVE_IDLE if self.is_live else 1):
            pass

    def _drop_end(self, ids: Ids[int]) -> None:
        """Store and close the fork of the latest long prompt, unless this prompt continues it."""
        if self._end and self._end.sequence.tokens != list(ids[: len(self._end.sequence.tokens)]):
            self._write_end()
            self._end.sequence.close()
            self._end = None

    def _write_end(self) -> None:
        """Queue the latest long prompt to be written to its file, once."""
        if self._is_new and self.store and self._end and is_worth_caching(self._end.sequence.tokens):
            self.store.keep(self._end.sequence.fork(), self._end.logits)
        self._is_new = False


def restore_turns(conversation: StoredPrefix) -> list[TurnBoundary]:
    """Return the turns of a stored conversation: only the last one, since only its end is stored."""
    return [TurnBoundary(len(conversation.ids), len(conversation.ids))]
