"""Continuous batching: many prompts are answered at once, and answers join and leave between any two steps.

A turn reads a piece of what is to be read, so that those who write wait for a piece and not for a prompt; then a step
takes every answer one token further. As in Orca (Yu et al. 2022), with memory by pages (vLLM, Kwon et al. 2023).
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from localllm.engine.run import BATCH, PRECISE_TOKENS
from localllm.engine.runs import LONG
from localllm.errors import LocalllmError, MemoryLimitError
from localllm.frozen import frozen
from localllm.generation.chunked_prefill import HEARD, piece
from localllm.generation.prefix_match import PrefixMatch, ReuseCandidate, longest_match
from localllm.generation.request import Completion, Request
from localllm.generation.speculation.speculator import AnswerSpan, Speculator
from localllm.kernels.arguments import PAGE
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

    from localllm.engine.engine import Engine
    from localllm.engine.memory.prefix_cache import PrefixCache
    from localllm.generation.speculation.ngram_cache import NgramCache

LIVE_KEPT = 16  # conversations whose memory waits for their next turn
PARALLEL = 16  # answers at once: a step of 16 is nearly what arithmetic allows, and more wait longer for each other


@frozen
class LiveBatchOptions:
    """Requests come while others are answered: what LIVE_KEPT answers have read is kept for those that begin alike.

    Attributes:
        prefixes: what files have of long prompts. None is added: what is read beside others may be rounded otherwise.
        written: what was written before, for guesses.
    """

    prefixes: "PrefixCache | None" = None
    written: "NgramCache | None" = None


class Scheduler:
    """Answers requests, of which it takes the next when there is room for it. Close it, and its sequences are closed.

    Attributes:
        running: the answers in the making that have a sequence, the oldest first.
        waiting: those that have none: preempted ones, and then the next request.
        written: tokens of answers so far.  preempted: how often memory had to be taken back.
    """

    def __init__(
        self,
        engine: "Engine",
        tokenizer: Tokenizer,
        requests: Iterable[Request],
        parallel: int = PARALLEL,
        chunk: int = BATCH,
        places: int = sys.maxsize,
        precise: bool = True,
        live: "LiveBatchOptions | None" = None,
    ):
        """parallel: the most answers at once, or those to one prompt if they are more.

        chunk: tokens to read between two steps, PAGE at least.  places: about how many tokens to hold at most.
        precise: with the arithmetic that each prompt and answer would meet alone; without, all in 8 bits.
        live: of a batch whose requests come while others are answered.
        """
        self.running, self.waiting = list[Completion](), deque[Completion]()
        self.written = self.preempted = 0
        self._engine, self._tokenizer = engine, tokenizer
        self._vocab = min(engine.vocab_size, tokenizer.vocab_size)
        self._requests, self._finished = iter(requests), list[Request]()
        self._parallel, self._chunk, self._places, self._precise = parallel, chunk, places, precise
        self._stopping, self._live = False, live is not None
        self._prefixes, self._written = (live.prefixes, live.written) if live else (None, None)
        self._speculator = Speculator(engine, self._written)
        self._kept = deque[Completion]()  # that have finished, for the next that begin alike; the oldest first

    def __iter__(self) -> Iterator[list[Request]]:
        """Turn by turn, the requests that are finished with it; often none."""
        while self._work_left():
            if self._stopping:
                self.waiting = deque(one for one in self.waiting if one.request.begun)
                if not self._work_left():
                    break
            self._turn()
            yield self._take_finished()
        if self._finished:
            yield self._take_finished()

    def stop(self) -> None:
        """Begin nothing new; what has begun goes on to its end. A signal handler may call this."""
        self._stopping = True

    def close(self) -> None:
        """Leave everything as it is. Takes no lock: a generator that is garbage may do this anywhere."""
        for answering in (*self.running, *self._kept):
            if answering.sequence:
                answering.sequence.release()
            answering.sequence = None
        self.running = []
        self._kept.clear()
        self.waiting.clear()

    def drop(self, request: Request) -> None:
        """Nobody waits for this one any more. Not during a turn."""
        for answering in request.answers:
            if answering in self.running and answering.held > PAGE:
                self.running.remove(answering)
                self._keep(answering)
        self._remove(request)

    def _work_left(self) -> bool:
        return bool(self.running) or self._next() is not None

    def _take_finished(self) -> list[Request]:
        finished, self._finished = self._finished, []
        return finished

    # Who may begin.

    def _next(self) -> Completion | None:
        """Who waits longest."""
        while not self.waiting:
            request = None if self._stopping else next(self._requests, None)
            if request is None:
                return None
            try:
                runs = self._engine.runs if self._precise else self._engine.runs._replace(exact=0)
                for answer in request.answers or request.begin(self._engine, self._tokenizer, runs):
                    if answer.is_complete:
                        answer.finish()
            except LocalllmError as error:
                request.error = error
            if request.finished:
                self._finished.append(request)
            else:
                self.waiting.append(request.answers[0])
        return self.waiting[0]

    def _readers(self) -> Iterator[Completion]:
        """Who has something to read, the oldest first; then those that can join."""
        yield from [one for one in self.running if one.unread]
        while (answering := self._next()) and self._may_join(answering):
            self.waiting.popleft()
            self._join(answering)
            yield answering

    def _may_join(self, answering: Completion) -> bool:
        """Whether there is room for it, also to grow; and nobody is about to read what it begins with."""
        if not self.running:
            return True
        if sum(one.width for one in self.running) + answering.width > self._parallel:
            return False
        found = self._longest_match(answering)
        if self._match(answering, [(one, one.ids) for one in self.running if one.unread]).length >= found.length + PAGE:
            return False
        unread = len(answering.ids) - found.length + sum(one.unread for one in self.running)
        needed = unread + PAGE * (answering.width + len(self.running))
        if found.source in self._kept:
            self._kept.remove(found.source)
            self._kept.append(found.source)
        while needed > self._free_places() and len(self._kept) > 1:
            self._forget()
        return needed <= self._free_places()

    def _join(self, answering: Completion) -> None:
        if answering.sequence is None:
            self._give_sequence(answering)
        if self._precise:
            self._speculator.listen(answering, len(self.running))
        self.running.append(answering)

    def _give_sequence(self, answering: Completion) -> None:
        """One that has read what others, or an earlier program, have read of it."""
        donor, length, _ = self._longest_match(answering)
        found = self._prefixes.find(answering.ids, length) if self._prefixes and not answering.has_begun else None
        if found:
            answering.sequence, answering.known = found
            length = len(found.sequence.tokens)
        else:
            answering.sequence = donor.sequence.fork() if donor else self._engine.sequence()
        answering.request.cached = answering.sequence.truncate(length)

    def _longest_match(self, answering: Completion) -> PrefixMatch:
        """Who has read most of what it begins with, and how much of that."""
        others = (*self.running, *self._kept)
        return self._match(answering, [(one, one.sequence.tokens) for one in others if one.sequence])

    def _match(self, answering: Completion, others: list[tuple[Completion, list[int]]]) -> PrefixMatch:
        candidates = [ReuseCandidate(one, tokens, segments=one.segments) for one, tokens in others]
        return longest_match(candidates, answering.ids, self._engine.runs, answering.segments)

    # A turn.

    def _turn(self) -> None:
        """Read a piece, write a token of every answer that has nothing to read: in one run if all is in 8 bits."""
        for answering in [one for one in self.running if one.known is not None]:
            row, answering.known = answering.known, None
            if row is not None:
                self._begin(answering, row[-1:, : self._vocab])
        if self._precise:
            is_heard = self._live and any(one.has_begun for one in self.running)
            rooms = (PAGE, HEARD) if is_heard else (self._chunk, PRECISE_TOKENS)  # who listens waits for short pieces
            reading, precise = self._reading(*rooms)
            if not (is_heard and precise):
                self._advance(reading, precise)
                reading = []
            writing = self._writing()
            if reading or len(writing) < len(self.running) or not self._speculative_step():
                for one in writing:
                    one.answering.guesses = None
                self._advance(reading + writing, precise=True)
        else:
            writing = self._writing()
            reading, _ = self._reading(max(PAGE, self._chunk - len(writing)), 0)
            self._advance(reading + writing, precise=False)

    def _writing(self) -> list[AnswerSpan]:
        """The newest token of every answer whose others have been read."""
        return [AnswerSpan(one, one.ids[-1:]) for one in self.running if one.has_begun and not one.unread]

    def _reading(self, room: int, precise_room: int) -> tuple[list[AnswerSpan], bool]:
        """What to read next, so many tokens and all with the same arithmetic; and whether that is the precise one."""
        work, exact = list[AnswerSpan](), False
        for answering in self._readers():
            held, stretch = answering.held, answering.segments.at(answering.held)
            end, precise = min(stretch.end, held + answering.unread), stretch.precise and self._precise
            if not work:
                exact, room = precise, min(room, precise_room) if precise else room
            count = piece(held, stretch._replace(end=end, precise=precise), room) if precise == exact else 0
            if not work and not count:
                count = end - held  # less than two pages, which are not parted, or an image
            if not count:
                break
            work.append(AnswerSpan(answering, answering.ids[held : held + count]))
            room -= count
            if room <= 0:
                break
        return work, exact

    def _advance(self, work: list[AnswerSpan], precise: bool) -> None:
        """Read all that; who has then read all of its ids goes on with a token."""
        ends = any(one.held + len(ids) == len(one.ids) for one, ids in work)
        for answering, row in self._run(work, "last" if ends else "none", precise):
            if answering.held < len(answering.ids):
                continue
            if answering.has_begun:
                self._accept(answering, [], row)
            else:
                self._begin(answering, row)

    def _speculative_step(self) -> bool:
        """A step of the only answers with drafts behind their newest tokens; False if it cannot be made."""
        if not self._speculator.can_speculate(self.running):
            return False
        try:
            verified = self._speculator.step(self.running, self._read_drafts)
        except MemoryLimitError:
            return False
        for answering, draft, rows in verified:
            self._accept(answering, draft, rows[:, : self._vocab])
        return True

    def _read_drafts(self, work: list[AnswerSpan]) -> "list[np.ndarray]":
        self._require_places(work)
        return self._engine.run([(one.sequence, ids) for one, ids in work if one.sequence], "all", True)

    def _begin(self, first: Completion, row: "np.ndarray") -> None:
        """The prompt has been read: every answer to it gets its first token and a sequence of its own."""
        request, place = first.request, self.running.index(first) + 1
        request.begun = True
        for answering in request.answers:
            if answering is not first:
                answering.sequence = first.sequence.fork() if first.sequence else None
                self.running.insert(place, answering)
        for answering in request.answers:
            self._accept(answering, [], row)

    def _accept(self, answering: Completion, draft: list[int], rows: "np.ndarray") -> None:
        """Take one token further, or several if a draft is right; it may leave then. rows: as of accept_draft."""
        request = answering.request
        if request.error:
            return
        try:
            for token, parts, row in answering.accept_draft(draft, rows):
                self.written += token is not None
                if answering.is_complete:
                    parts += answering.finish()
                if request.listener:
                    request.listener(answering, token, parts, row)
                if answering.finish_reason:
                    self._leave(answering)
        except LocalllmError as error:
            self._fail(request, error)
        except Exception as error:  # whatever one caller's options lead to is not the others' trouble
            if not self._live:
                raise
            self._fail(request, LocalllmError(f"internal error: {type(error).__name__}"))

    def _leave(self, answering: Completion) -> None:
        """An answer is made."""
        request = answering.request
        self.running.remove(answering)
        self._keep(answering)
        if self._written and answering.options.speculate != "off":
            self._written.add(answering.ids, request.cached, len(request.prompt) > LONG)
            self._written.collect()
        if request.finished:
            request.answers.sort(key=lambda one: -one.score)
            self._finished.append(request)

    # Memory.

    def _run(self, work: list[AnswerSpan], logits: str, precise: bool) -> list[tuple[Completion, "np.ndarray"]]:
        """Read what there is memory for; the logits asked for, float32 [1, vocab]. The youngest make room."""
        while work := [one for one in work if one.answering.sequence]:
            try:
                self._require_places(work)
                requests = [(one.answering.sequence, one.ids) for one in work if one.answering.sequence]
                rows = self._engine.run(requests, logits, precise)
                return [(one.answering, row[-1:, : self._vocab]) for one, row in zip(work, rows, strict=True)]
            except MemoryLimitError as error:
                self._make_room(error)
        return []

    def _require_places(self, work: list[AnswerSpan]) -> None:
        """Raises MemoryLimitError if there are not enough."""
        pages = sum(pages_of(one.answering.held + len(one.ids)) - pages_of(one.answering.held) for one in work)
        if pages and PAGE * pages > self._free_places():
            raise MemoryLimitError("there is not enough memory for this prompt and its answer")

    def _free_places(self) -> int:
        used, count = self._engine.places()
        return min(count, self._places) - used

    def _make_room(self, error: MemoryLimitError) -> None:
        """Take back what is kept, or the youngest's memory; it reads again later. Who is alone fails."""
        if self._kept:
            self._forget()
        elif len(self.running) > 1:
            youngest = self.running.pop()
            self._release(youngest)
            self.waiting.appendleft(youngest)
            self.preempted += 1
        else:
            self._fail(self.running[0].request, error)

    def _fail(self, request: Request, error: LocalllmError) -> None:
        """Nothing comes of a request."""
        self._remove(request)
        request.error = error
        self._finished.append(request)

    def _remove(self, request: Request) -> None:
        for answering in request.answers:
            if answering not in self._kept:
                self._release(answering)
        self.running = [one for one in self.running if one.request is not request]
        self.waiting = deque(one for one in self.waiting if one.request is not request)

    def _keep(self, answering: Completion) -> None:
        """Have what this one has read for others, instead of what it goes on from and of the oldest."""
        answering.guesses = None
        read = answering.sequence.tokens if answering.sequence else []
        for one in [*self._kept]:
            if one.sequence and one.sequence.tokens == read[: len(one.sequence.tokens)]:
                self._kept.remove(one)
                self._release(one)
        self._kept.append(answering)
        while len(self._kept) > (LIVE_KEPT if self._live else 1):
            self._forget()

    def _forget(self) -> None:
        """Of what is kept, the oldest."""
        self._release(self._kept.popleft())

    def _release(self, answering: Completion) -> None:
        if answering.sequence:
            answering.sequence.close()
        answering.sequence = None


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)
