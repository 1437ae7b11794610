"""Define prompt tasks, requests to answer them n times, and the answers in progress."""

import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from copy import copy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from localllm.engine.adapter_scales import AdapterScales
from localllm.engine.image_tokens import skip_image_rows
from localllm.engine.runs import PRECISE_TOKENS
from localllm.errors import ContextError, LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.generation.answer_record import PicklableAnswer
from localllm.generation.answer_state import AnswerState, Transcript
from localllm.generation.chunked_prefill import PrefillSegment, PrefillSegments
from localllm.generation.context_overflow import SINK_TOKENS, ShiftedSequence, require_shift
from localllm.generation.logprobs import LikelyToken, compute_token_logprobs
from localllm.generation.options import GenerationOptions
from localllm.generation.reasoning import ANSWER, REASONING, TextPart, Thinking
from localllm.generation.sampling.sampler import Sampler, log_sum_exp, make_samplers
from localllm.renamed import RenamedAttribute
from localllm.text.tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.image_tokens import ImageEmbedding
    from localllm.engine.runs import RunPlan
    from localllm.engine.sequence import Sequence
    from localllm.generation.banned import AnswerSnapshot, BannedStrings
    from localllm.generation.chunk_reuse import ChunkReuse
    from localllm.generation.speculation.acceptance import DraftSelector
    from localllm.generation.tools.tool_call_parser import ToolCall
    from localllm.generation.tools.tool_grammar import ToolGrammar


@frozen
class PromptTask:
    """A prompt as token ids, and how to answer it.

    Attributes:
        decoder: converts the answer's tokens to text.  thinking: marks of reasoning.
        earlier: number of tokens of the stored conversation that the prompt continues; 0 if it continues none.
        calls: grammar of tool calls; None without tools.  seen: the images of the prompt's image tokens.
        begun: beginning of the answer, if the prompt already contains it.
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
        """Raise UsageError for an empty prompt, ContextError for one that leaves no room for an answer."""
        if not self.prompt:
            raise UsageError("the prompt is empty: it must have at least one token")
        if len(self.prompt) >= context:
            length = len(self.prompt)
            message = f"the prompt has {length} tokens, but the context holds only {context} with the answer"
            raise ContextError(message, length - context + 1)

    def resolve_keep(self, context: int) -> int | None:
        """Return the number of first tokens to keep when the context is full; None without context shift.

        Raises ContextError for a context that is too small to shift, and the errors of `require_room`.
        """
        if self.options.on_overflow != "shift":
            self.require_room(context)
            return None
        count = skip_image_rows(self.prompt, SINK_TOKENS if self.options.keep is None else self.options.keep)
        require_shift(count, context)
        self.require_room(sys.maxsize)
        return count

    def resolve_adapter_scales(self, engine: "Engine") -> AdapterScales:
        """Return the scales of the engine's adapters for the prompt and its answer.

        Raises UsageError for unknown adapters.
        """
        if not engine.adapters:
            if self.options.lora:
                raise UsageError(f"unknown adapter {next(iter(self.options.lora))!r}: the model was opened without one")
            return AdapterScales()
        from localllm.generation.adapters import resolve_scales  # seldom needed

        return resolve_scales(engine, self.options, self.prompt)

    def create_state(self, tokenizer: Tokenizer, vocab: int) -> AnswerState:
        """Return the state of an answer before its first token.

        vocab: size of the vocabulary. Raises UsageError for an invalid constraint.
        """
        matcher, calls = None, self.calls
        if self.options.constraint:
            from localllm.generation.constraints.constraint import get_matcher  # imports llguidance if it is needed

            matcher = get_matcher(self.options.constraint, tokenizer, vocab)
        form = self.options.constraint
        transcript = Transcript(self.decoder, () if form else self.options.stop, self.thinking, calls, form)
        if self.begun and matcher and (advanced := matcher.copy()).accept_text(self.begun):
            matcher = advanced  # otherwise the beginning does not match, and the constraint starts after it
            transcript.seed_answer(self.begun)
        if calls is None:
            if matcher and matcher.names_any_token(self.thinking.shown):  # a grammar that covers the reasoning, too
                return AnswerState(transcript, replace(self.thinking, budget=None), matcher, is_whole=True)
            return AnswerState(transcript, self.thinking, matcher)
        if calls.requires_call:
            return AnswerState(transcript, self.thinking, calls.make_matcher(vocab), is_whole=calls.wraps_whole_message)
        if matcher is None or calls.wraps_whole_message:  # the grammar of calls covers whole messages
            return AnswerState(transcript, self.thinking, matcher, calls.make_matcher(vocab))
        from localllm.generation.answer_state import UnionMatcher

        return AnswerState(transcript, self.thinking, UnionMatcher(matcher, calls.make_matcher(vocab, whole=True)))


# Called for each token with the answer, the token (None for one that ended it), the text parts that it completes, and
# the logits that it was drawn from, float32 [vocab], valid only during the call.
Listener = Callable[["Completion", int | None, list[TextPart], np.ndarray], None]


class AnswerSearch(Protocol):
    """Extends the answers of a request together, instead of sampling each.

    Attributes:
        results: finished answers, best first.
    """

    results: "list[Completion]"

    def expand(self, answers: "list[Completion]", rows: list[np.ndarray]) -> "list[tuple[Completion, Completion]]":
        """Return pairs of a continuation and the answer that it extends; an empty list when the search has ended.

        rows: logits after each answer, float32 [vocab].
        """
        ...


@dataclass(eq=False)
class Request:
    """A prompt to be answered n times.

    Attributes:
        key: the caller's name for the request.
        answers: in progress or finished; sorted best first once all are finished.
        begun: whether the prompt has been prefilled.  error: why the request failed, or None.
        listener: called for every token.  cached: number of prompt tokens that came from the prefix cache.
        is_scored: whether log probabilities of the answers are computed; with n > 1 they always are.
        is_measured: whether the prompt is prefilled with 16-bit activations, however long it is.
        search: extends the answers instead of sampling, or None.
    """

    task: PromptTask
    n: int = 1
    key: Any = None
    answers: list["Completion"] = field(default_factory=list)
    begun: bool = False
    error: LocalllmError | None = None
    listener: Listener | None = None
    cached: int = 0
    is_scored: bool = False
    is_measured: bool = False
    search: AnswerSearch | None = None

    @property
    def prompt(self) -> list[int]:
        return self.task.prompt

    @property
    def finished(self) -> bool:
        """Return whether the request has failed or all of its answers are finished."""
        return self.error is not None or (bool(self.answers) and all(answer.finish_reason for answer in self.answers))

    def create_answers(
        self, engine: "Engine", tokenizer: Tokenizer, runs: "RunPlan | None" = None
    ) -> list["Completion"]:
        """Create the answers, without tokens; their seeds are seed, seed + 1 and so on.

        runs: how to split the prompt into runs; None: as the engine does. Raises UsageError and ContextError.
        """
        task, vocab = self.task, min(engine.vocab_size, tokenizer.vocab_size)
        keep_count = task.resolve_keep(engine.context)
        if keep_count is not None or task.options.cache_reuse:
            engine.prepare_shift()
        samplers = make_samplers(task.options.sampling, task.prompt, vocab, self.n, tokenizer)
        runs = (runs or engine.runs)._replace(is_measuring=self.is_measured)
        guide, segments = task.create_state(tokenizer, vocab), PrefillSegments(task.prompt, runs)
        scales = task.resolve_adapter_scales(engine)
        self.answers = [
            Completion(self, sampler, guide.copy() if number else guide, engine.context, segments, number)
            for number, sampler in enumerate(samplers)
        ]
        for answer in self.answers:
            answer.kept, answer.end_ids, answer.adapter_scales = keep_count, tokenizer.end_ids, scales
            if task.options.ban:
                from localllm.generation.banned import BannedStrings  # seldom needed

                answer.banned = BannedStrings(task.options.ban, tokenizer)
        return self.answers


class DrawnToken(NamedTuple):
    """A token that was drawn for an answer; its id is None if it ends the answer.

    Attributes:
        parts: parts of text that it completes.
        logits: the logits that it was drawn from, float32 [vocab], valid until the next step.
    """

    answer: "Completion"
    token: int | None
    parts: list[TextPart]
    logits: np.ndarray


class Completion(PicklableAnswer):
    """An answer in progress, with its statistics.

    Attributes:
        ids: tokens of the prompt and the answer, without the token that ended it.
        text, thinking: the answer, and the reasoning before it.
        finish_reason: "stop" or "length"; "" while in progress.
        seed: reproduces the answer.  end_ids: tokens that end the answer.
        logprob: natural logarithm of its probability, including the token that ended it; 0 unless requested.
        logprobs: log probabilities of its tokens, if requested.
        sequence: KV cache of a prefix of `ids`, which may be a ShiftedSequence; None while the answer waits.
        number: index among the answers of the request.
        adapter_scales: scales of the adapters for its tokens.
        banned: finds banned strings, and holds back tokens that may become one; None without banned strings.
        guesses: source of drafts, in small batches.
        reuse: chunks that the prompt can copy from another sequence, or None.
        known: logits after the prompt, float32 [1, vocab], if the prefix cache has them and no token is drawn yet.
        segments: segments of the prompt, see chunked_prefill.
        kept: number of first tokens that stay when the context is full.  dropped: number of tokens dropped from it.
        skipped: number of dropped tokens that were never prefilled.
        has_ended: whether its last token ended it.  is_stopped: whether it must end before the next step.
        prefill_s, ttft_s, decode_s: seconds for the prompt, until the first token, and from the first to the last.
        steps: number of decode steps.  drafted, accepted: number of draft tokens, and of accepted ones.
    """

    def __init__(
        self, request: Request, sampler: Sampler, guide: AnswerState, context: int, segments: PrefillSegments,
        number: int = 0,
    ):  # fmt: skip
        self.request, self.prompt, self.ids = request, request.prompt, list(request.prompt)
        self.seed, self.number, self.options, self.seen = sampler.seed, number, request.task.options, request.task.seen
        self.finish_reason, self.logprob = "", 0.0
        self.sequence: Sequence | None = None
        self.guesses: DraftSelector | None = None
        self.cached_logits: np.ndarray | None = None
        self.reuse: ChunkReuse | None = None
        self.sampler, self.guide, self.segments = sampler, guide, segments
        self.kept: int | None = None
        self.adapter_scales = AdapterScales()
        self.banned: BannedStrings | None = None
        self._snapshot: AnswerSnapshot | None = None  # before the newest token, if that may begin a banned string
        self.end_ids = frozenset[int]()
        self.dropped = self.skipped = self.steps = self.drafted = self.accepted = 0
        self.prefill_s, self.ttft_s, self.decode_s, self.started = 0.0, 0.0, 0.0, perf_counter()
        self.has_ended = self.is_stopped = False
        self._limit = len(self.ids) + request.task.options.compute_limit(context - len(self.ids))
        self._drawn_count = 0  # tokens that were drawn, including one that ended the answer
        self._least = 0  # fewest ids since the step began
        self.logprobs = list[LikelyToken]()

    @property
    def text(self) -> str:
        return self._remove_held(self.guide.transcript.text, ANSWER)

    @property
    def thinking(self) -> str:
        return self._remove_held(self.guide.transcript.thinking, REASONING)

    def _remove_held(self, text: str, kind: str) -> str:
        """Return a text of one type without its end, if that may become a banned string."""
        held_tokens = self.banned.held if self.banned else ()
        return text[
            : len(text) - sum(len(part.text) for token in held_tokens for part in token.parts if part.kind == kind)
        ]

    @property
    def calls(self) -> "list[ToolCall]":
        from localllm.generation.tools.tool_call_parser import select_complete_calls

        return select_complete_calls(self.guide.transcript.calls) if self.guide.transcript.calls else []

    @property
    def tokens(self) -> list[int]:
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
        """The number of tokens that may still be generated."""
        return self._limit - len(self.ids)

    @property
    def is_complete(self) -> bool:
        """Return whether the answer has ended or reached its limit."""
        return self.has_ended or len(self.ids) == self._limit

    @property
    def is_full(self) -> bool:
        """Return whether the answer ended because the context was full."""
        return self.finish_reason == "length" and self.completion_tokens != self.options.max_tokens

    @property
    def max_draft_length(self) -> int:
        """The maximum number of tokens of a draft.

        With context shift it ends where the context is full, so that the shift happens at the same token as without a
        draft.
        """
        remaining, sequence = self._limit - len(self.ids) - 1, self.sequence
        return min(remaining, max(0, sequence.room - 1)) if isinstance(sequence, ShiftedSequence) else remaining

    @property
    def has_begun(self) -> bool:
        """Return whether the answer has a token."""
        return len(self.ids) > len(self.prompt)

    @property
    def is_decoding(self) -> bool:
        """Return whether the next step appends its newest token: prefill is done, and the answer is not stopped."""
        return not self.is_stopped and len(self.ids) > len(self.prompt) and not self.pending_tokens

    @property
    def computed_tokens(self) -> int:
        """The number of its tokens that the sequence holds."""
        return len(self.sequence.tokens) if self.sequence else 0

    @property
    def pending_tokens(self) -> int:
        """The number of tokens to prefill, without the newest token of the answer, which a decode step appends."""
        computed = len(self.sequence.tokens) if self.sequence else 0
        return len(self.ids) - (len(self.ids) > len(self.prompt)) - computed

    def prepare_prefill(self) -> None:
        """Append the reusable chunks that come next, if any, and call the progress callback."""
        if self.reuse and self.sequence:
            self.request.cached += self.reuse.append_chunks(self.sequence, self.prompt)
        if not self.request.begun and self.options.on_progress:
            cached = self.cached_tokens
            self.options.on_progress(max(self.computed_tokens - cached, 0), len(self.prompt) - cached)

    def get_next_segment(self) -> PrefillSegment:
        """Return the next segment of the prompt to prefill; a short one before a reused chunk is precise."""
        cached = self.computed_tokens
        segment, end = self.segments.find_segment(cached), self.reuse.find_pause(cached) if self.reuse else None
        if end is None or end >= segment.end:
            return segment
        return segment._replace(end=end, precise=segment.precise or end - cached <= PRECISE_TOKENS)

    @property
    def score(self) -> float:
        """The log probability per token, to compare answers of different lengths."""
        return self.logprob / max(self._drawn_count, 1)

    @property
    def width(self) -> int:
        """The number of answers that share its sequence: the request's n until the prompt is prefilled, then 1."""
        return 1 if self.request.begun else self.request.n

    def _draw_token(self, row: np.ndarray, processed: np.ndarray) -> DrawnToken:
        """Draw a token from processed logits and append it. Raises LocalllmError if no token is allowed.

        processed: logits after logits_processor, float32 [vocab]. row: the model's logits, float32 [vocab].
        """
        logprob, allowed = self.logprob, self.guide.compute_allowed_mask(self.sampler.vocab)
        if self.banned and self.banned.barred_tokens:
            allowed = self.banned.mask_barred(self.sampler.vocab, allowed)
        token = self.sampler.sample(processed, allowed)
        elapsed = perf_counter() - self.started
        self.ttft_s = self.ttft_s or elapsed
        self.decode_s = elapsed - self.ttft_s
        self._drawn_count += 1
        if self.request.n > 1 or self.request.is_scored:
            self.logprob += float(row[token]) - log_sum_exp(row)
        if token in self.end_ids:
            self.has_ended = True
            return DrawnToken(self, None, [], row)
        self._snapshot = None
        if self.banned and self.banned.may_be_undone(token):
            self._snapshot = self._take_snapshot(logprob, None if processed is row else processed)
        self.sampler.accept(token)
        self.ids.append(token)
        if (count := self.options.top_logprobs) is not None:
            self.logprobs.append(compute_token_logprobs(row, token, min(count, len(row))))
        parts = self.guide.accept(token)
        self.has_ended = self.guide.has_ended
        return DrawnToken(self, token, parts, row)

    def accept_logits(self, row: np.ndarray) -> list[DrawnToken]:
        """Draw the next token from logits, float32 [vocab]; if it completes a banned string, undo that and draw again.

        Returns the tokens that cannot be undone any more. Raises LocalllmError if no token is allowed.
        """
        options = self.options
        if options.stopping_criteria and options.ends_answer(self.ids, row):
            self.has_ended = True
            return [*self._release_tokens(), DrawnToken(self, None, [], row)]
        processed = options.process_logits(self.ids, row) if options.logits_processor else row
        if self.banned is None:
            return [self._draw_token(row, processed)]
        while True:
            output = self._draw_token(row, processed)
            if output.token is None:
                return [*self._release_tokens(), output]
            if (banned := self.banned.push(output.token, self._snapshot, row, output.parts)) is None:
                return self._release_tokens()
            assert banned.before  # a banned string begins in it
            self._rewind(banned.before)
            row = banned.row
            processed = row if banned.before.row is None else banned.before.row

    def _take_snapshot(self, logprob: float, row: np.ndarray | None) -> "AnswerSnapshot":
        """Return the state before a token that was drawn but is not appended yet.

        row: its logits after logits_processor, or None without a processor.
        """
        from localllm.generation.banned import AnswerSnapshot  # loaded already, see Request.begin

        return AnswerSnapshot(len(self.ids), self.sampler.undo_draw(), self.guide.copy(), logprob, row)

    def _release_tokens(self) -> list[DrawnToken]:
        """Return the tokens that cannot become a banned string any more: all if the answer is complete."""
        if self.banned is None:
            return []
        released = self.banned.flush() if self.is_complete else self.banned.release()
        return [DrawnToken(self, token.token, token.parts, token.row) for token in released]

    def _rewind(self, place: "AnswerSnapshot") -> None:
        """Undo the tokens after a snapshot; the sequence is truncated at the end of the step."""
        self._drawn_count -= len(self.ids) - place.length
        del self.logprobs[max(place.length - len(self.prompt), 0) :]
        del self.ids[place.length :]
        self.sampler.restore(place.sampler)
        self.guide.restore(place.guide)
        self.logprob, self.has_ended = place.logprob, False
        self._least = min(self._least, place.length)

    def copy_with_token(self, token: int, logprob: float) -> "Completion":
        """Return a copy of the answer that is one token longer, without a sequence.

        logprob: log probability of the token.
        """
        twin = copy(self)
        twin.ids, twin.guide, twin.logprob, twin.sequence = [*self.ids], self.guide.copy(), self.logprob + logprob, None
        if token in self.end_ids:
            twin.has_ended = True
            return twin
        twin.ids.append(token)
        twin.guide.accept(token)
        twin.has_ended = twin.guide.has_ended
        return twin

    def accept_draft(self, draft: Ids[int], rows: np.ndarray) -> Iterator[DrawnToken]:
        """Sample a token at each position of a draft, up to the first that differs from it; drop the rest of the draft.

        rows: logits after the newest token and after each draft token, float32 [1 + len(draft), vocab]. Yields the
        tokens that cannot be undone; the last one of a complete answer has the rest of its text.
        """
        length_before = self._least = len(self.ids)
        self.drafted += len(draft)
        for number, (row, guess) in enumerate(zip(rows, [*draft, None], strict=True)):
            outputs = self.accept_logits(row)
            is_right = len(self.ids) == length_before + number + 1 and self.ids[-1] == guess
            self.accepted += is_right
            is_last = self.is_complete or not is_right
            if is_last:
                self._drop_rejected(draft, length_before)
            for output in outputs:
                if self.is_complete and output is outputs[-1]:
                    output.parts.extend(self.finish())
                yield output
            if is_last:
                return

    def _drop_rejected(self, draft: Ids[int], length_before: int) -> None:
        """Remove rejected and undone tokens from the sequence.

        length_before: number of ids before the step.
        """
        begin = min(self._least, length_before)
        right = 0
        for token, guess in zip(self.ids[length_before:], draft, strict=False):
            right += token == guess
        if self.sequence and begin < length_before:
            self.sequence.truncate(begin)
        elif self.sequence and right < len(draft):
            self.sequence.truncate(length_before + right)
        if self.guesses:
            if begin < length_before:
                self.guesses.rewind(length_before - begin)
            self.guesses.push(self.ids[begin:])

    def close(self) -> None:
        """Free the sequence; it is prefilled again if the answer continues."""
        if self.sequence:
            self.sequence.close()
        self.release()

    def release(self) -> None:
        """Queue the sequence to be freed.

        Takes no lock, so finalizers may call it.
        """
        if self.reuse:
            self.reuse.release()
        if self.sequence:
            self.sequence.release()
        self.sequence = self.guesses = self.reuse = None

    def finish(self) -> list[TextPart]:
        """Set finish_reason, and return the text that was held back."""
        self.finish_reason = "stop" if self.has_ended else "length"
        return self.guide.transcript.flush(is_end=self.has_ended)

    if not TYPE_CHECKING:  # a name of 0.3
        known = RenamedAttribute("cached_logits")
