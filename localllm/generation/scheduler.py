"""Answer requests by continuous batching: answers join and leave between any two steps (Orca, Yu et al. 2022).

A step prefills one chunk, so that decoding answers wait for a chunk and not for a whole prompt, and then decodes one
token of every answer, or several if its draft is accepted. Memory is in pages (vLLM, Kwon et al. 2023). All answers are
generated this way: a Generation is a Scheduler of one request.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Ids
from contextlib import ExitStack, suppress
from copy import copy
from inspect import GEN_CREATED, getgeneratorstate
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from localllm.engine.runs import BATCH, PRECISE_TOKENS
from localllm.errors import LocalllmError, MemoryLimitError, UsageError
from localllm.generation.answer_record import (
    AnswerRecord,
    TextIterator,
    describe_answer,
    reduce_answer,
    to_dict,
    to_message,
)
from localllm.generation.chunked_prefill import LIVE_CHUNK, compute_chunk_size, find_run_end
from localllm.generation.prefix_cache import PrefixCache, ReuseCandidate, find_longest_match
from localllm.generation.reasoning import TextPart
from localllm.generation.request import Completion, DrawnToken, PromptTask, Request
from localllm.generation.run_queue import QueuedStep
from localllm.generation.speculation.acceptance import Drafter
from localllm.generation.speculation.speculator import MAX_OTHERS, AnswerSpan, Speculator, make_span
from localllm.kernels.table import PAGE
from localllm.text.messages import Message
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

    from localllm.engine.engine import Engine
    from localllm.engine.image_tokens import ImageEmbedding
    from localllm.generation.logprobs import LikelyToken
    from localllm.generation.tools.tool_call_parser import ToolCall

PARALLEL = 16  # concurrent answers: with more, tokens per second hardly grow, and each answer gets slower


class Scheduler:
    """Answers requests in a batch, and starts the next request when resources suffice.

    Attributes:
        running: answers in progress that have a sequence, the oldest first.
        waiting: answers without a sequence: preempted ones, and then those of the next request.
        written: number of tokens generated so far.  preempted: number of preemptions.
    """

    def __init__(
        self, engine: "Engine", tokenizer: Tokenizer, requests: Iterable[Request], parallel: int = PARALLEL,
        chunk: int = BATCH, places: int = sys.maxsize, precise: bool = True, cache: PrefixCache | None = None,
    ):  # fmt: skip
        """Set up a scheduler.

        parallel: maximum number of concurrent answers; all n answers to one prompt run at once even if they are more.
        chunk: maximum number of prompt tokens per step, at least PAGE.
        places: approximate maximum number of tokens in all sequences.
        precise: whether each answer is computed as if it were alone; False: all activations have 8 bits.
        cache: prefix cache that provides the sequences; None: a new one that ends with the scheduler.
        """
        self.running, self.waiting = list[Completion](), deque[Completion]()
        self.written = self.preempted = 0
        self._engine, self._vocab = engine, min(engine.vocab_size, tokenizer.vocab_size)
        self._kernels = engine.runs.find_kernel_class
        self._tokenizer, self._requests, self._finished = tokenizer, iter(requests), list[Request]()
        self._parallel, self._chunk, self._places, self._precise = parallel, chunk, places, precise
        self._stopping, self._cache = False, cache or PrefixCache(engine, is_shared=True)
        self._resources = ExitStack()  # resources of drafters, such as a draft model's sequence
        self._speculator = Speculator(engine, self._cache.ngrams, None if self._cache.is_shared else self._resources)
        self._queue = self._cache.runs
        self._step: QueuedStep | None = None  # the step that runs or was submitted early, and its spans
        self._submitted = list[AnswerSpan]()
        self._refused: tuple[Completion, list[tuple[Completion, int]], int] | None = None  # see `_may_join`

    def __iter__(self) -> Iterator[list[Request]]:
        """Run step after step; yield the list of requests that each step has finished, which is often empty."""
        while self.has_work or self._finished:
            for _ in self.step():
                pass
            finished, self._finished = self._finished, []
            yield finished

    @property
    def has_work(self) -> bool:
        """Return whether an answer needs prefill or decode steps."""
        if self._stopping:
            self.waiting = deque(answer for answer in self.waiting if answer.request.begun)
        return bool(self.running) or self._get_next() is not None

    def step(self) -> Iterator[DrawnToken]:
        """Prefill a chunk, then decode a token of every answer whose prompt is prefilled.

        Unless `precise`, both happen in one run. The model runs, and tokens are drawn, as the caller iterates.
        """
        for answer in [*self.running]:
            if answer.is_stopped:
                self.cancel(answer.request)
            elif answer.cached_logits is not None:
                row, answer.cached_logits = answer.cached_logits[-1:], None
                yield from self._begin_answers(answer, row)
        prefill: list[AnswerSpan] = []
        if not self._precise:
            writing = self._select_decode()
            prefill, _ = self._select_prefill(max(PAGE, self._chunk - len(writing)), 0)
            yield from self._run([*prefill, *writing], precise=False)
            return
        is_busy = bool(self.running) and not self.waiting
        for answer in self.running:
            is_busy = is_busy and not answer.pending_tokens
        if not self._submitted and (self._cache.is_shared or not is_busy):
            # Short chunks while clients wait for the next tokens of their answers.
            is_streaming = self._cache.is_live and any(answer.has_begun for answer in self.running)
            rooms = (PAGE, LIVE_CHUNK) if is_streaming else (self._chunk, PRECISE_TOKENS)
            prefill, precise = self._select_prefill(*rooms)
            if prefill and not (
                is_streaming and precise and self._kernels(prefill[0].kernel_tokens) == self._kernels(1)
            ):
                yield from self._run(prefill, precise)
                prefill = []
        yield from self._run(self._submitted or [*prefill, *self._select_decode(with_drafts=not prefill)])

    def stop(self) -> None:
        """Start no new requests, and finish the running ones. A signal handler may call this."""
        self._stopping = True

    def close(self) -> None:
        """Cancel all answers and close the resources of drafters.

        Takes no lock, since the finalizer of a generator may call it anywhere.
        """
        self._resources.close()
        self._queue.unregister(self)
        self._cache.abandon(self.running)
        self.running = []
        self.waiting.clear()

    def cancel(self, request: Request) -> None:
        """Cancel a request. Must not be called during a step."""
        for completion in request.answers:
            if completion in self.running and (completion.computed_tokens > PAGE or not self._cache.is_shared):
                self._cache.give_back(completion)
        self._remove_request(request)

    def _get_next(self) -> Completion | None:
        """Return the next waiting answer; None if nothing waits. Requests that cannot begin fail."""
        while not self.waiting:
            request = None if self._stopping else next(self._requests, None)
            if request is None:
                return None
            try:
                runs = self._engine.runs if self._precise else self._engine.runs._replace(exact=0, kernel_limits=())
                answers = request.answers or request.create_answers(self._engine, self._tokenizer, runs)
                self.waiting.append(answers[0])
            except LocalllmError as error:
                request.error = error
                self._finished.append(request)
        return self.waiting[0]

    def _list_prefilling(self) -> Iterator[Completion]:
        """Yield the running answers that need prefill, the oldest first, then waiting answers that can start."""
        yield from [answer for answer in self.running if answer.pending_tokens]
        while (completion := self._get_next()) and self._may_join(completion):
            self.waiting.popleft()
            self._start_answer(completion)
            yield completion

    def _may_join(self, completion: Completion) -> bool:
        """Return whether a waiting answer may start.

        Memory must suffice, and no running answer may be prefilling a prefix of its prompt. A refused answer is tried
        again once an answer has started, been prefilled or left, or more memory is free.
        """
        if not self.running:
            return True
        if sum(answer.width for answer in self.running) + completion.width > self._parallel:
            return False
        progress = [(answer, answer.pending_tokens) for answer in self.running]
        if (
            self._refused
            and self._refused[:2] == (completion, progress)
            and self._count_free_positions() <= self._refused[2]
        ):
            return False
        best = self._cache.find_match(completion)
        prefilling = [answer for answer in self.running if answer.pending_tokens]
        unread = [ReuseCandidate(None, answer.ids, segments=answer.segments) for answer in prefilling]
        soon = find_longest_match(unread, completion.ids, self._engine.runs, completion.segments)
        if soon.length >= best.length + PAGE:
            self._refused = (completion, progress, self._count_free_positions())
            return False
        needed_places = len(completion.ids) - best.length + sum(answer.pending_tokens for answer in prefilling)
        needed_places += PAGE * (completion.width + len(self.running))
        self._cache.mark_used(best.source)
        while needed_places > self._count_free_positions() and self._cache.evict(spare=1):
            pass
        self._refused = (completion, progress, self._count_free_positions())
        return needed_places <= self._refused[2]

    def _start_answer(self, completion: Completion) -> None:
        """Start a waiting answer: give it a sequence."""
        self.running.append(completion)
        if completion.sequence is None:
            self._cache.acquire(completion)
        if self._precise and completion.remaining_tokens > 1 and not self._cache.hook:
            self._speculator.listen(completion, len(self.running) - 1)

    def _select_prefill(self, room: int, precise_room: int) -> tuple[list[AnswerSpan], bool]:
        """Return the prompt tokens to prefill next, at most `room`, and whether with 16-bit activations.

        precise_room: maximum number of tokens with 16-bit activations. The tokens of one run have the same precision
        and select the same kernels. A single request is prefilled in whole runs, and the engine chooses their
        precision.
        """
        work, exact, kernels = list[AnswerSpan](), False, 0
        for completion in self._list_prefilling():
            completion.prepare_prefill()
            cached = completion.computed_tokens
            if not self._cache.is_shared:
                end = min(
                    find_run_end(completion.prompt, cached, self._engine.runs), cached + completion.pending_tokens
                )
                is_read = cached == end or completion.is_stopped
                kernel_tokens = completion.segments.count_kernel_tokens(cached, end)
                return [] if is_read else [make_span(completion, end - cached, kernel_tokens)], True
            segment = completion.get_next_segment()
            end, precise = min(segment.end, cached + completion.pending_tokens), segment.precise and self._precise
            kernel_tokens = segment.kernel_tokens if self._precise else 0
            if not work:
                exact, room = precise, min(room, precise_room) if precise else room
                kernels = self._kernels(kernel_tokens)
            is_alike = precise == exact and self._kernels(kernel_tokens) == kernels
            count = compute_chunk_size(cached, segment._replace(end=end, precise=precise), room) if is_alike else 0
            if not work and not count:
                count = end - cached  # an image, or less than two pages, which are read at once
            if not count:
                break
            work.append(make_span(completion, count, kernel_tokens))
            room -= count
            if room <= 0:
                break
        return work, exact

    def _select_decode(self, with_drafts: bool = False) -> list[AnswerSpan]:
        """Return the newest token of every decoding answer, followed by a draft in small batches."""
        writing = [answer for answer in self.running if answer.is_decoding]
        if with_drafts and len(writing) == len(self.running):
            return self._speculator.add_drafts(writing, self._queue.count_others(self))
        return [AnswerSpan(answer, answer.ids[-1:]) for answer in writing]

    def _run(self, work: list[AnswerSpan], precise: bool = True) -> Iterator[DrawnToken]:
        """Append tokens in one run, and return an iterator over the next tokens of the answers.

        If memory does not suffice, drafts are dropped first; then the youngest answers are preempted. If other
        schedulers use the engine, the next step is submitted before the tokens are returned, so that these schedulers
        wait neither for the consumer of the text nor for that step.
        """
        while work := [span for span in work if span.completion.sequence]:
            try:
                step = self._step = self._step or self._make_step(work, precise)
                self._submitted = work
                is_shared = self._queue.register(self) or step.is_submitted
                rows = self._queue.run(step) if is_shared else step.run()
                break
            except MemoryLimitError as error:
                self._submitted, self._step = [], None
                if not any(span.draft for span in work):
                    self._make_room(error)
                work = [span._replace(ids=span.ids[: len(span.ids) - len(span.draft)], draft=()) for span in work]
        self._submitted, self._step = [], None
        if not work:
            return iter(())
        if len(work) <= MAX_OTHERS and work[0].completion.has_begun:
            self._speculator.costs.record(step.tokens, step.seconds)
        if step.logits == "none":
            return iter(())
        outputs = self._sample_outputs(work, rows)
        if not is_shared:
            return outputs
        if self._queue.count_others(self):
            outputs = iter([*outputs])
            writing = (
                [] if any(answer.pending_tokens for answer in self.running) else self._select_decode(with_drafts=True)
            )
            if writing:
                self._submitted, self._step = writing, self._make_step(writing, precise=True)
                self._queue.submit(self._step)
        self._queue.stop_waiting(self)
        return outputs

    def _make_step(self, work: list[AnswerSpan], precise: bool) -> QueuedStep:
        """Return the step that appends tokens. Raises MemoryLimitError if `places` do not suffice."""
        if self._places < sys.maxsize:
            cached = [each.completion.computed_tokens for each in work]
            pages = sum(-n // PAGE - (-n - len(each.ids)) // PAGE for n, each in zip(cached, work, strict=True))
            if pages and PAGE * pages > self._count_free_positions():
                raise MemoryLimitError(
                    "not enough memory for the prompt and its answer: shorten the prompt, lower --ctx-size, or use "
                    "--kv-type q8_0"
                )
        spans, kernel_tokens, logits = [], list[int](), "none"
        for completion, ids, draft, is_end, count in work:
            assert completion.sequence
            spans.append((completion.sequence, ids))
            kernel_tokens.append(count)
            if draft:  # each of its tokens is verified
                logits = "all"
            elif is_end and logits == "none":
                logits = "last"
        return QueuedStep(self, spans, logits, precise, kernel_tokens if self._precise else ())

    def _sample_outputs(self, work: list[AnswerSpan], logits: "list[np.ndarray]") -> Iterator[DrawnToken]:
        """Yield the next token of each answer whose prompt is complete."""
        searched: dict[Request, list[tuple[Completion, np.ndarray]]] = {}
        for (completion, _, draft, is_end, _), rows in zip(work, logits, strict=True):
            if not is_end:
                continue
            if completion.request.search and completion.has_begun:
                searched.setdefault(completion.request, []).append((completion, rows[-1]))
            elif completion.has_begun:
                completion.steps += 1
                yield from self._accept_tokens(completion, draft, rows[-1 - len(draft) :])
            elif completion.sequence:
                self._cache.record_prefill(completion.sequence, completion.cached_tokens, rows)
                yield from self._begin_answers(completion, rows[-1:])
        for request, group in searched.items():
            self._extend_search(request, group)

    def _begin_answers(self, first: Completion, row: "np.ndarray") -> Iterator[DrawnToken]:
        """Begin the answers to a prefilled prompt: each gets its first token and a sequence of its own.

        row: logits after the prompt, float32 [vocab].
        """
        request, place = first.request, self.running.index(first) + 1
        request.begun, first.prefill_s = True, perf_counter() - first.started
        if request.search and not first.is_complete:
            self._begin_search(first, row)
            return
        for completion in request.answers:
            if completion is not first:
                self.running.insert(place, completion)
                completion.sequence = first.sequence.fork() if first.sequence else None
        for completion in [*request.answers]:
            yield from self._accept_tokens(completion, [], row)

    def _begin_search(self, first: Completion, row: "np.ndarray") -> None:
        """Start a search in a fork of the prompt's sequence, and return the sequence to the cache.

        row: logits after the prompt, float32 [vocab].
        """
        root = copy(first)
        root.number, root.sequence = 1, None
        self.running.append(root)
        root.sequence = first.sequence.fork() if first.sequence else None
        self._cache.give_back(first)
        self.running.remove(first)
        self._extend_search(first.request, [(root, row[-1])])

    def _extend_search(self, request: Request, group: "list[tuple[Completion, np.ndarray]]") -> None:
        """Extend a search: the last continuation of an answer takes over its sequence, the others get forks.

        group: the answers, and the logits after each, float32 [vocab].
        """
        assert request.search
        parents = [completion for completion, _ in group]
        children = request.search.expand(parents, [row[: self._vocab] for _, row in group])
        users = Counter(id(parent) for _, parent in children)
        for parent in parents:
            if not users[id(parent)]:
                parent.close()
        self.running += [child for child, _ in children]
        for child, parent in children:
            users[id(parent)] -= 1
            if users[id(parent)]:
                child.sequence = parent.sequence.fork() if parent.sequence else None
            else:
                child.sequence, parent.sequence = parent.sequence, None
        self.running = [answer for answer in self.running if answer not in parents]
        request.answers = [child for child, _ in children] or request.search.results
        if not children:
            self._finished.append(request)

    def _accept_tokens(self, completion: Completion, draft: Ids[int], rows: "np.ndarray") -> Iterator[DrawnToken]:
        """Yield the next token of an answer, or several if its draft is accepted.

        rows: see Completion.accept_draft.
        """
        request = completion.request
        if request.error:
            return
        try:
            if completion.is_complete:  # max_tokens is 0
                completion.finish()
                self._remove_finished(completion)
                return
            for output in completion.accept_draft(draft, rows[:, : self._vocab]):
                self.written += output.token is not None
                if request.listener:
                    request.listener(*output)
                if completion.finish_reason:
                    self._remove_finished(completion)
                yield output
        except LocalllmError as error:
            self._fail_request(request, error)
        except Exception as error:  # caused by one client's options: the other answers go on
            if not self._cache.is_live:
                raise
            self._fail_request(request, LocalllmError(f"internal error: {type(error).__name__}"))

    def _remove_finished(self, completion: Completion) -> None:
        """Remove a finished answer; with its last answer, the request is finished, too."""
        request = completion.request
        self._cache.give_back(completion)
        self.running.remove(completion)
        if request.finished:
            request.answers.sort(key=lambda answer: -answer.score)
            self._finished.append(request)

    def _count_free_positions(self) -> int:
        """Return how many tokens fit into memory."""
        used_places, count = self._engine.get_cache_usage()
        return min(count, self._places) - used_places

    def _make_room(self, error: MemoryLimitError) -> None:
        """Close an idle sequence, or preempt the youngest answer, which is prefilled again later.

        If only one answer is running, its request fails with the error.
        """
        if self._cache.evict():
            return
        if len(self.running) > 1 and not self.running[-1].request.search:
            youngest = self.running.pop()
            youngest.close()
            self.waiting.appendleft(youngest)
            self.preempted += 1
        else:
            self._fail_request(self.running[0].request, error)

    def _fail_request(self, request: Request, error: LocalllmError) -> None:
        """Finish a request with an error."""
        self._remove_request(request)
        request.error = error
        self._finished.append(request)

    def _remove_request(self, request: Request) -> None:
        """Remove the answers of a request and their sequences."""
        for completion in request.answers:
            self._cache.discard(completion)
        self.running = [answer for answer in self.running if answer.request is not request]
        self.waiting = deque(answer for answer in self.waiting if answer.request is not request)


def generate_parts(scheduler: Scheduler, cache: PrefixCache, answer: Completion) -> Generator[TextPart]:
    """Yield the text of an answer as its tokens are drawn.

    The function has no reference to the Generation, so that an abandoned answer releases its sequence immediately, and
    not when Python collects cycles. The garbage collector may close it anywhere, so the cleanup takes no lock.
    """
    request, answer.started = answer.request, perf_counter()
    try:
        while scheduler.has_work:
            for output in scheduler.step():
                yield from output.parts
    finally:
        scheduler.close()
        request.answers = []  # breaks the reference cycle
    cache.collect()
    if isinstance(drafter := answer.options.speculate, Drafter):
        drafter.collect()
    if request.error:
        raise request.error


# Attributes of a Generation that exist before its first step.
INITIAL_ATTRIBUTES = frozenset(("prompt", "seen", "prompt_tokens", "seed", "kept"))


class Generation(TextIterator):
    """An answer in progress: an iterator over chunks of text, with attributes of the answer.

    Reading an attribute of the result, such as its text, generates the whole answer if iteration has not begun; during
    iteration, and after leaving it, attributes are those of the answer so far.

    Attributes:
        parts: iterator over (kind, text) that includes the reasoning, see generation.reasoning.
        prompt: token ids of the prompt.  seen: the images of image tokens.
        tokens: token ids of the answer so far, without the token that ended it.
        text: the text so far.  thinking: the reasoning before it; "" if the model did not reason.
        calls: the complete tool calls.
        prompt_tokens, completion_tokens: number of tokens of the prompt and of the answer.
        finish_reason: "stop" (the model ended, or a stop string), "length" (max_tokens, or the context is full);
            "interrupted" before.
        logprobs: log probability of each token, with alternatives, if logprobs or top_logprobs was given.
        seed: reproduces the answer.
        cached_tokens: number of prompt tokens that were in the prefix cache.
        prefill_s, ttft_s, decode_s: seconds for the prompt, until the first token, and from the first to the last.
        dropped: number of tokens dropped from the context, with on_overflow "shift".
        kept: number of first tokens that stay.
        skipped: number of dropped tokens that were never read, because the prompt alone exceeds the context.
        is_full: whether the answer ended because the context was full.
        steps: number of decode steps.
        drafted, accepted: number of draft tokens and of accepted ones, each of which saves a step.
    """

    prompt: list[int]
    seen: "Ids[ImageEmbedding]"
    tokens: list[int]
    text: str
    thinking: str
    calls: "list[ToolCall]"
    logprobs: "list[LikelyToken]"
    prompt_tokens: int
    completion_tokens: int
    seed: int
    cached_tokens: int
    prefill_s: float
    ttft_s: float
    decode_s: float
    dropped: int
    skipped: int
    kept: int | None
    is_full: bool
    steps: int
    drafted: int
    accepted: int

    receipt_maker: "Callable[[Generation], dict[str, Any]] | None" = None  # set by the method that made the answer

    def __init__(self, cache: PrefixCache, tokenizer: Tokenizer, task: PromptTask):
        """Prepare an answer.

        Raises UsageError for an empty prompt, and ContextError for one that leaves no room for an answer.
        """
        request = Request(task)
        (self._answer,) = request.create_answers(cache.engine, tokenizer)
        scheduler = Scheduler(cache.engine, tokenizer, [request], cache=cache)
        self._cache, self.parts = cache, generate_parts(scheduler, cache, self._answer)

    if not TYPE_CHECKING:  # type checkers see the attributes above, and report every other name

        def __getattr__(self, name: str) -> object:
            if name not in Generation.__annotations__:
                from localllm.foreign_names import GENERATION_NAMES, refuse_attribute  # seldom needed

                refuse_attribute(self, name, GENERATION_NAMES)
            if name not in INITIAL_ATTRIBUTES:
                self.generate_rest()
            return getattr(self._answer, name)

        def __getitem__(self, key: object) -> NoReturn:
            raise TypeError(f"an answer has no {key!r}: it is no dict; read answer.text, or answer.to_dict()")

    @property
    def finish_reason(self) -> str:
        self.generate_rest()
        return self._answer.finish_reason or "interrupted"

    @property
    def parsed(self) -> Any:
        """The complete answer converted to the type of its schema, or to plain JSON values.

        Generates the rest first. Raises UsageError without a schema, and CutError for an answer that was cut.
        """
        for _ in self:
            pass
        return self._answer.parsed

    def message(self) -> Message:
        """Return the answer as a message of the role assistant, with its reasoning and tool calls."""
        return to_message(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as values of JSON: its text, tokens, figures, tool calls and log probabilities."""
        return to_dict(self)

    def receipt(self) -> dict[str, Any]:
        """Return the answer's receipt, as `localllm run --receipt` writes it and `localllm replay` reads it.

        It hashes the model's files, once per file. Raises UsageError for an answer that was not made by `generate` or
        `chat` of a model from `localllm.open`, and for a prompt or options that cannot be stored.
        """
        if self.receipt_maker is None:
            raise UsageError("only answers of generate and chat of a model from localllm.open have receipts")
        return self.receipt_maker(self)

    def __repr__(self) -> str:
        """Describe the answer so far, without generating it."""
        if getgeneratorstate(self.parts) == GEN_CREATED:
            return "Generation(not begun: iterate over it, or read its text)"
        return describe_answer("Generation", self)

    def _repr_markdown_(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[AnswerRecord], tuple[dict[str, Any]]]:
        """Pickle and deepcopy as plain data; generate the answer first if iteration has not begun."""
        self.generate_rest()
        return reduce_answer(self._answer)

    def stop(self) -> None:
        """End the answer, and its iterator, before the model's next step. Any thread may call it."""
        self._answer.is_stopped = True

    def close(self) -> None:
        """Stop, and return the sequence to the cache.

        If another thread iterates over the answer, it stops at its next step.
        """
        self._answer.is_stopped = True
        with suppress(ValueError):  # a generator that is executing: its own thread ends it
            self.parts.close()
            self._cache.collect()
