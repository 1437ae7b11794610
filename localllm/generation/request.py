"""A request, a prompt to be answered, and its answers in progress."""

import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from copy import copy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from localllm.engine.image_tokens import end_outside_images
from localllm.errors import ContextError, LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.generation.chunked_prefill import PrefillSegments
from localllm.generation.constraints.token_mask import AnswerState
from localllm.generation.context_overflow import SINKS, require_shift
from localllm.generation.logits_callables import ends_answer, processed_logits
from localllm.generation.logprobs import LikelyToken, token_logprobs
from localllm.generation.options import GenerationOptions
from localllm.generation.reasoning import TextPart, Thinking
from localllm.generation.sampling.sampler import Sampler, log_total, make_samplers
from localllm.generation.transcript import Transcript
from localllm.text.tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.image_tokens import ImageEmbedding
    from localllm.engine.run import Runs
    from localllm.engine.sequence import Sequence
    from localllm.generation.speculation.acceptance import Guesses
    from localllm.generation.tools.tool_call import ToolCall
    from localllm.generation.tools.tool_grammar import ToolGrammar

# Hears of a token at once: the answer, the token (None for one that ended it), the parts of text that it completes, and
# the logits that it was drawn from, float32 [vocab], good only until the call returns.
Listener = Callable[["Completion", int | None, list[TextPart], np.ndarray], None]


@frozen
class Task:
    """A prompt, as token ids, and how to answer it.

    Attributes:
        decoder: of the answer.  thinking: how the model's thoughts are marked.
        earlier: tokens that the conversation held in an earlier process, with which it ended there.
        calls: of tools, that the answer may make.  seen: the images of the prompt's image tokens.
        begun: what the prompt has of the answer already.
    """

    prompt: list[int]
    decoder: StreamDecoder
    options: GenerationOptions = field(default_factory=GenerationOptions)
    thinking: Thinking = field(default_factory=Thinking)
    earlier: int = 0
    calls: "ToolGrammar | None" = None
    seen: "Ids[ImageEmbedding]" = ()
    begun: str = ""

    def require_room(self, context: int) -> None:
        """Raise UsageError for an empty prompt and ContextError for one that leaves no room for an answer."""
        if not self.prompt:
            raise UsageError("the prompt is empty")
        if len(self.prompt) >= context:
            length = len(self.prompt)
            message = f"the prompt has {length} tokens, but the context holds only {context} with the answer"
            raise ContextError(message, length - context + 1)

    def resolve_keep(self, context: int) -> int | None:
        """Return how many first tokens stay when the context is full; None without context shift.

        Raises ContextError for a context that is too small for it, and as `require_room`.
        """
        if self.options.on_overflow != "shift":
            self.require_room(context)
            return None
        kept = end_outside_images(self.prompt, SINKS if self.options.keep is None else self.options.keep)
        require_shift(kept, context)
        self.require_room(sys.maxsize)
        return kept

    def guide(self, tokenizer: Tokenizer, vocab: int) -> AnswerState:
        """Make the state of an answer before its first token; vocab: its size. Raises UsageError."""
        matcher, calls = None, self.calls
        if self.options.constraint:
            from localllm.generation.constraints.constraint import matcher_of  # llguidance, where it is needed

            matcher = matcher_of(self.options.constraint, tokenizer, vocab)
        form = self.options.constraint
        transcript = Transcript(self.decoder, () if form else self.options.stop, self.thinking, calls, form)
        if self.begun and matcher and (behind := matcher.copy()).accept_text(self.begun):
            matcher = behind  # else what was said before is none of its form
            transcript.go_on_from(self.begun)
        if calls is None:
            if matcher and matcher.names_any(self.thinking.shown):  # a grammar with <think> in it, which says how long
                return AnswerState(transcript, replace(self.thinking, budget=None), matcher, is_whole=True)
            return AnswerState(transcript, self.thinking, matcher)
        if calls.must:
            return AnswerState(transcript, self.thinking, calls.matcher(vocab), is_whole=calls.wraps_whole_message)
        if matcher is None or calls.wraps_whole_message:  # whose heads say what a message is
            return AnswerState(transcript, self.thinking, matcher, calls.matcher(vocab))
        from localllm.generation.constraints.union_matcher import UnionMatcher

        return AnswerState(transcript, self.thinking, UnionMatcher(matcher, calls.matcher(vocab, whole=True)))


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
        """Make its answers, which have no token yet: with the seeds seed, seed + 1, and so on.

        runs: in which the prompt is read, if not as the engine says.

        Raises UsageError and ContextError.
        """
        task, vocab = self.task, min(engine.vocab_size, tokenizer.vocab_size)
        kept = task.resolve_keep(engine.context)
        if kept is not None:
            engine.require_shift()
        samplers = make_samplers(task.options.sampling, task.prompt, vocab, self.n, tokenizer)
        guide, segments = task.guide(tokenizer, vocab), PrefillSegments(task.prompt, runs or engine.runs)
        self.answers = [
            Completion(self, sampler, guide.copy() if number else guide, engine.context, segments, number)
            for number, sampler in enumerate(samplers)
        ]
        for answer in self.answers:
            answer.kept, answer.end_ids = kept, tokenizer.end_ids
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
        guesses: the source of drafts, in small batches.
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
        self.sampler, self.guide, self.segments = sampler, guide, segments
        self.kept: int | None = None
        self.end_ids = frozenset[int]()
        self.dropped = self.skipped = self.steps = self.drafted = self.accepted = 0
        self.prefill_s, self.ttft_s, self.decode_s, self.started = 0.0, 0.0, 0.0, perf_counter()
        self.has_ended = self.is_stopped = False
        self._limit = len(self.ids) + request.task.options.limit(context - len(self.ids))
        self._chosen = 0
        self.logprobs = list[LikelyToken]()

    @property
    def text(self) -> str:
        return self.guide.transcript.text

    @property
    def thinking(self) -> str:
        return self.guide.transcript.thinking

    @property
    def calls(self) -> "list[ToolCall]":
        from localllm.generation.tools.tool_call import whole

        return whole(self.guide.transcript.calls) if self.guide.transcript.calls else []

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
    def left(self) -> int:
        """Return how many tokens may still be generated."""
        return self._limit - len(self.ids)

    @property
    def is_complete(self) -> bool:
        """Return whether the answer is finished."""
        return self.has_ended or self.left == 0

    @property
    def is_full(self) -> bool:
        """Return whether it ended because the context was full."""
        return self.finish_reason == "length" and self.completion_tokens != self.options.max_tokens

    @property
    def has_begun(self) -> bool:
        """Return whether it has a token."""
        return len(self.ids) > len(self.prompt)

    @property
    def held(self) -> int:
        """Return how many of its ids have been read."""
        return len(self.sequence.tokens) if self.sequence else 0

    @property
    def unread(self) -> int:
        """Return how many tokens are to be read before a step; the newest of the answer is the step's."""
        count = len(self.ids)
        return count - (count > len(self.prompt)) - (len(self.sequence.tokens) if self.sequence else 0)

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
        if ends_answer(self.options, self.ids, row):
            self.has_ended = True
            return Output(self, None, [], row)
        token = self.guide.choose(self.sampler, processed_logits(self.options, self.ids, row))
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

        rows: logits float32 [1 + len(draft), vocab], after the newest token and each of the draft.
        """
        before = len(self.ids)
        self.drafted += len(draft)
        for row, guess in zip(rows, [*draft, None], strict=True):
            output = self.accept_logits(row)
            self.accepted += output.token is not None and output.token == guess
            is_last = self.is_complete or self.ids[-1] != guess
            if is_last:
                self._end_draft(draft, self.ids[before:])
            yield output
            if is_last:
                return

    def _end_draft(self, draft: Ids[int], drawn: list[int]) -> None:
        """Forget what was wrong in a draft."""
        right = sum(token == guess for token, guess in zip(drawn, draft, strict=False)) if draft else 0
        if self.sequence and right < len(draft):
            self.sequence.truncate(len(self.ids) - len(drawn) + right)
        if self.guesses:
            self.guesses.learn(drawn)

    def report_progress(self) -> None:
        """Report to the progress callback how much of the prompt has been read, before a run."""
        if not self.request.begun and self.options.on_progress:
            self.options.on_progress(self.held - self.cached_tokens, len(self.prompt) - self.cached_tokens)

    def close(self) -> None:
        """Free the sequence; it is read again if the answer continues."""
        if self.sequence:
            self.sequence.close()
        self.sequence = self.guesses = None

    def release(self) -> None:
        """Queue what has been read to be freed. Takes no lock: finalizers may call it."""
        if self.sequence:
            self.sequence.release()
        self.sequence = self.guesses = None

    def finish(self) -> list[TextPart]:
        """Say why it ends, and what was held back."""
        self.finish_reason = "stop" if self.has_ended else "length"
        return self.guide.transcript.flush(is_end=self.has_ended)
