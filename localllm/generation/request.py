"""A request, a prompt to be answered, and its answers in progress."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from copy import copy
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from localllm.engine.run import PRECISE_TOKENS
from localllm.errors import LocalllmError, UsageError
from localllm.generation.chunked_prefill import PrefillSegment, PrefillSegments
from localllm.generation.constraints.token_mask import AnswerState
from localllm.generation.logprobs import LikelyToken, token_logprobs
from localllm.generation.reasoning import ANSWER, REASONING, TextPart
from localllm.generation.sampling.sampler import Sampler, log_total, make_samplers
from localllm.generation.task import Task
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.run import Runs
    from localllm.engine.sequence import Sequence
    from localllm.generation.banned import AnswerSnapshot, BannedStrings
    from localllm.generation.chunk_reuse import ChunkReuse
    from localllm.generation.speculation.acceptance import Guesses
    from localllm.generation.tools.tool_call import ToolCall

# Hears of a token at once: the answer, the token (None for one that ended it), the parts of text that it completes, and
# the logits that it was drawn from, float32 [vocab], good only until the call returns.
Listener = Callable[["Completion", int | None, list[TextPart], np.ndarray], None]


class Search(Protocol):
    """A search, such as beam search, that extends a request's answers together instead of sampling each.

    Attributes:
        results: what has been found so far, best first.
    """

    results: "list[Completion]"

    def expand(self, answers: "list[Completion]", rows: list[np.ndarray]) -> "list[tuple[Completion, Completion]]":
        """Return the continuations, each with the answer that it extends; an empty list ends the search.

        rows: logits after each of the answers, float32 [vocab].
        """
        ...


@dataclass(eq=False)
class Request:
    """A prompt to be answered n times.

    Attributes:
        key: the caller's name for it.
        answers: in progress, then finished; with n > 1 best first when all are.
        begun: whether the prompt has been read.  error: why there are no answers.
        listener: hears of every token.  cached: how many tokens of the prompt did not have to be read.
        is_scored: whether the answers' log probabilities are wanted; several have them anyway, to be compared.
        search: by which answers are found, if they are not drawn.
    """

    task: Task
    n: int = 1
    key: Any = None
    answers: list["Completion"] = field(default_factory=list)
    begun: bool = False
    error: LocalllmError | None = None
    listener: Listener | None = None
    cached: int = 0
    is_scored: bool = False
    search: Search | None = None

    @property
    def prompt(self) -> list[int]:
        return self.task.prompt

    @property
    def finished(self) -> bool:
        return self.error is not None or (bool(self.answers) and all(one.finish_reason for one in self.answers))

    def begin(self, engine: "Engine", tokenizer: Tokenizer, runs: "Runs | None" = None) -> list["Completion"]:
        """Create the answers, without any token yet, with the seeds seed, seed + 1, and so on.

        runs: how to split the prompt into runs, by default as the engine does.

        Raises UsageError and ContextError.
        """
        task, vocab = self.task, min(engine.vocab_size, tokenizer.vocab_size)
        kept = task.resolve_keep(engine.context)
        if kept is not None or task.options.cache_reuse:
            engine.require_shift()
        samplers = make_samplers(task.options.sampling, task.prompt, vocab, self.n, tokenizer)
        guide, segments = task.guide(tokenizer, vocab), PrefillSegments(task.prompt, runs or engine.runs)
        self.answers = [
            Completion(self, sampler, guide.copy() if number else guide, engine.context, segments, number)
            for number, sampler in enumerate(samplers)
        ]
        for answer in self.answers:
            answer.kept, answer.end_ids = kept, tokenizer.end_ids
            if task.options.ban:
                from localllm.generation.banned import BannedStrings  # seldom needed

                answer.banned = BannedStrings(task.options.ban, tokenizer)
        return self.answers


class Output(NamedTuple):
    """A token that was drawn for an answer, None for one that ends it, and what it completes.

    Attributes:
        parts: of text.  logits: from which it was drawn, float32 [vocab]; good only until the next one is asked for.
    """

    answer: "Completion"
    token: int | None
    parts: list[TextPart]
    logits: np.ndarray


class Completion:
    """An answer that is being generated, with its statistics.

    Attributes:
        ids: the tokens of the prompt and the answer, without the token that ended it.
        text, thinking: the answer, and the reasoning before it.  finish_reason: "stop" or "length", "" until then.
        seed: reproduces the answer.  end_ids: tokens that end it.
        logprob: the natural logarithm of its probability, including the token that ended it; 0 unless requested.
        logprobs: of each of its tokens, if requested.
        sequence: has read a prefix of `ids`; None while the answer waits. May be a ShiftedSequence.
        number: its index among the request's answers.
        banned: finds banned strings, and has the tokens that may become one; None if there are none.
        guesses: the source of drafts, in small batches.
        reuse: chunks that the prompt takes from another sequence, if it may and there are any.
        known: logits after the prompt, float32 [1, vocab], if the prefix cache has them; until the answer begins.
        segments: of the prompt, see chunked_prefill.
        kept, dropped: how many first tokens stay when the context is full, and how many others were dropped.
        skipped: how many of the dropped ones were never read.
        has_ended: whether its last token ended it. is_stopped: whether it must end before the next step.
        prefill_s, ttft_s, decode_s: seconds for the prompt, until the first token, and from the first to the last.
        steps: of the model, after the prompt.  drafted, accepted: draft tokens, and those that were accepted.
    """

    def __init__(
        self,
        request: Request,
        sampler: Sampler,
        guide: AnswerState,
        context: int,
        segments: PrefillSegments,
        number: int = 0,
    ):
        self.request, self.prompt, self.ids = request, request.prompt, list(request.prompt)
        self.seed, self.number, self.options, self.seen = sampler.seed, number, request.task.options, request.task.seen
        self.finish_reason, self.logprob = "", 0.0
        self.sequence: Sequence | None = None
        self.guesses: Guesses | None = None
        self.known: np.ndarray | None = None
        self.reuse: ChunkReuse | None = None
        self.sampler, self.guide, self.segments = sampler, guide, segments
        self.kept: int | None = None
        self.banned: BannedStrings | None = None
        self.end_ids = frozenset[int]()
        self.dropped = self.skipped = self.steps = self.drafted = self.accepted = 0
        self.prefill_s, self.ttft_s, self.decode_s, self.started = 0.0, 0.0, 0.0, perf_counter()
        self.has_ended = self.is_stopped = False
        self._limit = len(self.ids) + request.task.options.limit(context - len(self.ids))
        self._chosen = self._least = 0  # the fewest ids since the step began
        self.logprobs = list[LikelyToken]()

    @property
    def text(self) -> str:
        text = self.guide.transcript.text
        return text[: len(text) - len(self._held_text(ANSWER))] if self.banned else text

    @property
    def thinking(self) -> str:
        text = self.guide.transcript.thinking
        return text[: len(text) - len(self._held_text(REASONING))] if self.banned else text

    def _held_text(self, kind: str) -> str:
        """Return the text of one kind that may become a banned string."""
        held = self.banned.held if self.banned else ()
        return "".join(part.text for one in held for part in one.parts if part.kind == kind)

    @property
    def calls(self) -> "list[ToolCall]":
        from localllm.generation.tools.tool_call import complete_calls

        return complete_calls(self.guide.transcript.calls) if self.guide.transcript.calls else []

    @property
    def parsed(self) -> Any:
        """The answer as an object of its schema's type, or as JSON's plain values.

        Raises UsageError for an answer without a schema, and as parse_answer.
        """
        if self.options.constraint is None or self.options.constraint.kind != "schema":
            raise UsageError("the answer has no schema by which it could be parsed")
        from localllm.generation.constraints.python_types import parse_answer

        return parse_answer(self.text, self.finish_reason, self.options.result_type)

    @property
    def tokens(self) -> list[int]:
        """The token ids of the answer."""
        return self.ids[len(self.prompt) :]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def completion_tokens(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def cached_tokens(self) -> int:
        return self.request.cached

    @property
    def remaining_tokens(self) -> int:
        """Return how many tokens may still be generated."""
        return self._limit - len(self.ids)

    @property
    def is_complete(self) -> bool:
        """Return whether the answer is finished."""
        return self.has_ended or self.remaining_tokens == 0

    @property
    def is_full(self) -> bool:
        """Return whether it ended because the context was full."""
        return self.finish_reason == "length" and self.completion_tokens != self.options.max_tokens

    @property
    def has_begun(self) -> bool:
        """Return whether it has a token."""
        return len(self.ids) > len(self.prompt)

    @property
    def computed_tokens(self) -> int:
        """Return how many of its ids have been read."""
        return len(self.sequence.tokens) if self.sequence else 0

    @property
    def pending_tokens(self) -> int:
        """Return how many tokens are to be read before a step; the newest of the answer is the step's."""
        return len(self.ids) - self.has_begun - self.computed_tokens

    def take_chunks(self) -> None:
        """Take the chunks of another sequence that follow what has been read, if there are any."""
        if self.reuse and self.sequence:
            self.request.cached += self.reuse.take(self.sequence)

    def next_segment(self) -> PrefillSegment:
        """Return the segment of the prompt to read next; between chunks of another sequence it is precise."""
        held = self.computed_tokens
        segment, end = self.segments.at(held), self.reuse.end(held) if self.reuse else None
        if end is None or end >= segment.end:
            return segment
        return segment._replace(end=end, precise=segment.precise or end - held <= PRECISE_TOKENS)

    def _release_chunks(self) -> None:
        if self.reuse:
            self.reuse.release()
            self.reuse = None

    @property
    def score(self) -> float:
        """The log probability per token, by which answers of different lengths are compared."""
        return self.logprob / max(self._chosen, 1)

    @property
    def width(self) -> int:
        """Return how many answers it represents: all of the request until the prompt has been read."""
        return 1 if self.request.begun else self.request.n

    def accept_logits(self, row: np.ndarray) -> Output:
        """Go on with the token that is drawn from logits float32 [vocab]. Raises LocalllmError if there is none."""
        if self.options.ends_answer(self.ids, row):
            self.has_ended = True
            return Output(self, None, [], row)
        return self._draw(row, self.options.processed_logits(self.ids, row))

    def _draw(self, row: np.ndarray, processed: np.ndarray) -> Output:
        """Go on with the token that is drawn from processed logits, float32 [vocab]; row: the model's."""
        token = self.guide.choose(self.sampler, processed, self.banned)
        elapsed = perf_counter() - self.started
        self.ttft_s = self.ttft_s or elapsed
        self.decode_s = elapsed - self.ttft_s
        self._chosen += 1
        if self.request.n > 1 or self.request.is_scored:
            self.logprob += float(row[token]) - log_total(row)
        if token in self.end_ids:
            self.has_ended = True
            return Output(self, None, [], row)
        self.sampler.accept(token)
        self.ids.append(token)
        if (count := self.options.top_logprobs) is not None:
            self.logprobs.append(token_logprobs(row, token, min(count, len(row))))
        parts = self.guide.accept(token)
        self.has_ended = self.guide.has_ended
        return Output(self, token, parts, row)

    def _accept_certain(self, row: np.ndarray) -> list[Output]:
        """Go on as accept_logits, around banned strings; return what is certain now."""
        if self.banned is None:
            return [self.accept_logits(row)]
        from localllm.generation.banned import AnswerSnapshot  # loaded already, see Request.begin

        if self.options.ends_answer(self.ids, row):
            self.has_ended = True
            return [*self._released(), Output(self, None, [], row)]
        processed = self.options.processed_logits(self.ids, row)
        while True:
            sampler, guide = self.sampler.copy(), self.guide.copy()
            before = AnswerSnapshot(
                len(self.ids), sampler, guide, self.logprob, None if processed is row else processed
            )
            output = self._draw(row, processed)
            if output.token is None:
                return [*self._released(), output]
            if (banned := self.banned.push(output.token, before, row, output.parts)) is None:
                return self._released()
            self._rewind(banned.before)
            row = banned.row
            processed = row if banned.before.row is None else banned.before.row

    def _released(self) -> list[Output]:
        """Return the tokens that are held no more: all of them if the answer is complete."""
        assert self.banned
        released = self.banned.flush() if self.is_complete else self.banned.release()
        return [Output(self, one.token, one.parts, one.row) for one in released]

    def _rewind(self, place: "AnswerSnapshot") -> None:
        """Undo tokens; the sequence follows when the step ends."""
        self._chosen -= len(self.ids) - place.length
        del self.logprobs[max(place.length - len(self.prompt), 0) :]
        del self.ids[place.length :]
        self.sampler.restore(place.sampler)
        self.guide.restore(place.guide)
        self.logprob, self.has_ended = place.logprob, False
        self._least = min(self._least, place.length)

    def extend(self, token: int, logprob: float) -> "Completion":
        """Return another answer that is a token longer, which may end it, and has no sequence; logprob: the token's."""
        twin = copy(self)
        twin.ids, twin.guide, twin.logprob, twin.sequence = [*self.ids], self.guide.copy(), self.logprob + logprob, None
        if token in self.end_ids:
            twin.has_ended = True
            return twin
        twin.ids.append(token)
        twin.guide.accept(token)
        twin.has_ended = twin.guide.has_ended
        return twin

    def accept_draft(self, draft: Ids[int], rows: np.ndarray) -> Iterator[Output]:
        """Accept the drafted tokens that match the sampled ones, and one more; drop the rest of the sequence.

        Yields what is certain; the last output of a complete answer has the rest of its text.

        rows: logits float32 [1 + len(draft), vocab], after the newest token and each of the draft.
        """
        before = self._least = len(self.ids)
        self.drafted += len(draft)
        for number, (row, guess) in enumerate(zip(rows, [*draft, None], strict=True)):
            outputs = self._accept_certain(row)
            is_right = len(self.ids) == before + number + 1 and self.ids[-1] == guess
            self.accepted += is_right
            is_last = self.is_complete or not is_right
            if is_last:
                self._end_draft(draft, before)
            for output in outputs:
                if self.is_complete and output is outputs[-1]:
                    output.parts.extend(self.finish())
                yield output
            if is_last:
                return

    def _end_draft(self, draft: Ids[int], before: int) -> None:
        """Forget what was wrong in a draft, and in tokens before it: the answer had `before` ids then."""
        drawn = self.ids[before:]
        right = sum(token == guess for token, guess in zip(drawn, draft, strict=False)) if draft else 0
        if self._least < before:
            if self.sequence:
                self.sequence.truncate(self._least)
            if self.guesses:
                self.guesses.rewind(before - self._least)
                self.guesses.learn(self.ids[self._least :])
            return
        if self.sequence and right < len(draft):
            self.sequence.truncate(before + right)
        if self.guesses:
            self.guesses.learn(drawn)

    def report_progress(self) -> None:
        """Report to the progress callback how much of the prompt has been read, before a run."""
        if not self.request.begun and self.options.on_progress:
            cached = self.cached_tokens
            self.options.on_progress(max(self.computed_tokens - cached, 0), len(self.prompt) - cached)

    def close(self) -> None:
        """Free the sequence; it is read again if the answer continues."""
        self._release_chunks()
        if self.sequence:
            self.sequence.close()
        self.sequence = self.guesses = None

    def release(self) -> None:
        """Queue what has been read to be freed. Takes no lock: finalizers may call it."""
        self._release_chunks()
        if self.sequence:
            self.sequence.release()
        self.sequence = self.guesses = None

    def finish(self) -> list[TextPart]:
        """Say why it ends, and what was held back."""
        self.finish_reason = "stop" if self.has_ended else "length"
        return self.guide.transcript.flush(is_end=self.has_ended)
