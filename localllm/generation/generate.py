"""One answer: the prompt is read (prefill), then token follows token (decode) until there is a reason to stop."""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from localllm.engine.image_tokens import has_images, texts_only, whole_end
from localllm.engine.runs import LONG
from localllm.errors import ContextError, UsageError
from localllm.frozen import frozen
from localllm.generation.constraints.token_mask import AnswerState, ForcedTokensProposer
from localllm.generation.context_overflow import SINKS, ShiftedSequence, require_choice, require_shift
from localllm.generation.prefill import read_prompt
from localllm.generation.reasoning import ANSWER, TextPart, Thinking
from localllm.generation.reasoning import require_choice as require_thinking
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.sampling.sampler import Sampler
from localllm.generation.sequence_pool import PooledSequence, SequencePool
from localllm.generation.speculation.acceptance import Guesses, Proposer
from localllm.generation.speculation.draft_model import Drafter, DraftModel, account_of
from localllm.generation.speculation.ngram import from_text
from localllm.generation.transcript import Transcript
from localllm.text.tokenizer import StreamDecoder, Tokenizer
from localllm.values import require_text, whole_number

if TYPE_CHECKING:
    from localllm.engine.draft_head import DraftSequence
    from localllm.engine.image_tokens import ImageEmbedding
    from localllm.engine.sequence import Sequence as Tokens
    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.tools.tool_call import ToolCall
    from localllm.generation.tools.tool_grammar import ToolGrammar, ToolUse

SPECULATE = ("auto", "mtp", "ngram", "off")


@frozen
class GenerationOptions:
    """How long an answer may be and how its tokens are chosen."""

    max_tokens: int | None = None  # None: until the model ends or the context is full
    stop: Sequence[str] = ()  # strings that end a free answer and are not part of it; a constraint has its own end
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    on_progress: Callable[[int, int], None] | None = None  # called with (tokens read, tokens to read) during prefill
    # Where guesses come from: the text ("ngram"), the model's own layer besides ("mtp", or "auto" if it has one), a
    # smaller model besides, nowhere ("off").
    speculate: str | Drafter = "auto"
    on_overflow: str | None = None  # see generation.overflow; None: drop-turns where a Session asks, else error
    keep: int | None = None  # the first tokens that stay with "shift"; None: the system message, 4 at least
    think: str = "auto"  # whether the model thinks before it answers, or with which effort: see generation.thinking
    think_budget: int | None = None  # the most tokens of a thought, which is closed then; None: as many as it takes
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # for the chat template
    # Whether the answer goes on with the last message, an assistant's; None: if that has no calls. False: a new one.
    continue_final: bool | None = None
    constraint: "Constraint | None" = None  # what an answer must look like
    tools: "ToolUse | None" = None  # that an answer may call

    def __post_init__(self) -> None:
        """Raises UsageError for values that make no sense."""
        if self.max_tokens is not None:
            whole_number("max_tokens", self.max_tokens)
        if not isinstance(self.speculate, Drafter) and self.speculate not in SPECULATE:
            raise UsageError(f"speculate should be {' or '.join(SPECULATE)}, not {self.speculate!r}")
        if self.speculate == "mtp" and self.on_overflow == "shift":
            raise UsageError("a model's own guesses (mtp) know no text whose beginning is forgotten (shift)")
        require_choice(self.on_overflow, self.keep)
        require_thinking(self.think, self.think_budget)
        if isinstance(self.stop, str | bytes):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, Iterable):
            raise UsageError(f"stop should be a list of texts, not {self.stop!r}")
        for text in self.stop:
            if not require_text("stop", text):
                raise UsageError("stop should not be empty")

    @property
    def is_compact(self) -> bool:
        """Whether an answer is JSON whose white space is left out."""
        return self.constraint is not None and self.constraint.is_compact

    def limit(self, room: int) -> int:
        """The most tokens of an answer for which the context has this much room."""
        room = sys.maxsize if self.on_overflow == "shift" else room
        return room if self.max_tokens is None else min(room, self.max_tokens)


@frozen
class Task:
    """A prompt, as token ids, and how to answer it.

    Attributes:
        decoder: of the answer.  thinking: how the model's thoughts are marked.
        earlier: tokens that the conversation held in an earlier process, with which it ended there.
        calls: of tools, that the answer may make.  seen: what the ids of images among the prompt stand for.
        begun: what the prompt has of the answer already.
    """

    prompt: list[int]
    decoder: StreamDecoder
    options: GenerationOptions = field(default_factory=GenerationOptions)
    thinking: Thinking = field(default_factory=Thinking)
    earlier: int = 0
    calls: "ToolGrammar | None" = None
    seen: "Sequence[ImageEmbedding]" = ()
    begun: str = ""

    def require_room(self, context: int) -> None:
        """Raises UsageError for an empty prompt and ContextError for one that leaves no room for an answer."""
        if not self.prompt:
            raise UsageError("the prompt is empty")
        if len(self.prompt) >= context:
            length = len(self.prompt)
            raise ContextError(f"the prompt has {length} tokens, which leaves no room in a context of {context}")

    def guide(self, tokenizer: Tokenizer, vocab: int) -> AnswerState:
        """What follows an answer that has not begun; vocab: how many tokens. Raises UsageError for a bad constraint."""
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
            return AnswerState(transcript, self.thinking, calls.matcher(vocab), is_whole=calls.have_heads)
        if matcher is None or calls.have_heads:  # whose heads say what a message is
            return AnswerState(transcript, self.thinking, matcher, calls.matcher(vocab))
        from localllm.generation.constraints.union_matcher import UnionMatcher

        return AnswerState(transcript, self.thinking, UnionMatcher(matcher, calls.matcher(vocab, whole=True)))


class AnswerStoppedError(Exception):
    """Raised inside an answer that was told to stop."""


class Making:
    """What an answer in the making comes from, and what a Generation tells of it.

    It does not know the Generation: an answer that nobody wants any more gives its sequence back at once, not when
    Python looks for cycles.
    """

    def __init__(self, sequences: SequencePool, tokenizer: Tokenizer, task: Task):
        """As of Generation."""
        options, self.kept, self.dropped, self.is_full = task.options, None, 0, False
        if options.on_overflow == "shift":
            self.kept = whole_end(task.prompt, SINKS if options.keep is None else options.keep)
            require_shift(self.kept, sequences.context)
            sequences.engine.require_shift()
        task.require_room(sys.maxsize if self.kept is not None else sequences.context)
        self.prompt, self.seen, self.tokens, self.finish_reason = task.prompt, task.seen, list[int](), "interrupted"
        self.cached_tokens, self.prefill_s, self.ttft_s, self.decode_s = 0, 0.0, 0.0, 0.0
        self.steps = self.drafted = self.accepted = 0
        self._sequences, self._options, self._earlier = sequences, options, task.earlier
        self._stopped = False
        self._guide = task.guide(tokenizer, sequences.vocab_size)
        self._end_ids, self._ended = tokenizer.end_ids, False
        self._sampler = Sampler(options.sampling, sequences.vocab_size, tokenizer)
        self.seed = self._sampler.seed

    @property
    def text(self) -> str:
        return self._guide.transcript.text

    @property
    def thinking(self) -> str:
        return self._guide.transcript.thinking

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens)

    @property
    def calls(self) -> "list[ToolCall]":
        from localllm.generation.tools.tool_call import whole

        return whole(self._guide.transcript.calls) if self._guide.transcript.calls else []

    def stop(self) -> None:
        """End before the next step, whichever thread makes it."""
        self._stopped = True

    def collect(self) -> None:
        """Take back what was released when the generator was closed."""
        self._sequences.collect()

    def decode(self) -> Generator[TextPart]:
        """Text as tokens are chosen, until one ends the answer or there is no room for more.

        The garbage collector may close this generator anywhere: what its contexts do then takes no lock.
        """
        started = perf_counter()
        with (
            suppress(AnswerStoppedError),
            self._sequences.beginning_with(self.prompt, self.kept, self._earlier) as begun,
            self._counting(begun.sequence),
            ExitStack() as held,
        ):
            held.callback(self._remember)
            limit = self._options.limit(self._sequences.context - len(self.prompt))
            follower = self._follower(begun.sequence) if limit > 1 else None
            sequence, rows = begun.sequence, self._prefill(begun)
            self.prefill_s = perf_counter() - started
            if limit > 0:
                yield from self._drawn(rows, [], started)
            guesses = self._guesses(held, follower) if limit > 1 and not self._ended else None
            while len(self.tokens) < limit and not self._ended:
                self._require_running()
                before, draft = len(self.tokens), guesses.draft(limit - len(self.tokens) - 1) if guesses else []
                rows = self._step(sequence, draft, guesses)
                yield from self._drawn(rows, draft, started)
                if guesses:
                    self._learn(sequence, draft, before, guesses)
        if self._stopped and not self._ended:
            return
        self.finish_reason = "stop" if self._ended else "length"
        self.is_full = not self._ended and len(self.tokens) != self._options.max_tokens
        yield from self._guide.transcript.flush(self._ended)

    def _follower(self, sequence: "Tokens | ShiftedSequence") -> "DraftSequence | None":
        """The model's own layer that guesses, which reads what the sequence reads from now on, if that may pay."""
        speculate, engine = self._options.speculate, self._sequences.engine
        if isinstance(sequence, ShiftedSequence) or has_images(self.prompt):
            return None
        is_wanted = speculate == "mtp" or (speculate == "auto" and engine.has_guess_layer)
        if is_wanted and account_of(engine).may_lose:
            return engine.listen(sequence)
        if sequence.listener:
            sequence.no_listener()
        return None

    def _guesses(self, held: ExitStack, follower: "DraftSequence | None") -> Guesses | None:
        """What drafts come from, made when the first token is on its way; held: has what it needs."""
        speculate, tokens = self._options.speculate, texts_only([*self.prompt, *self.tokens])
        if speculate == "off":
            return None
        proposers: list[Proposer] = [ForcedTokensProposer(self._guide)] if self._guide.is_needed else []
        proposers += from_text(tokens, self._sequences.written)
        if isinstance(speculate, Drafter):
            proposers.append(held.enter_context(speculate.proposer(tokens, self._sampler, self._end_ids, self._guide)))
        if follower:
            known, vocab = tokens[follower.begin :], self._sequences.vocab_size
            account = account_of(self._sequences.engine)
            proposers.append(DraftModel(follower, known, self._sampler, vocab, self._end_ids, self._guide, account))
        return Guesses(proposers)

    def _remember(self) -> None:
        """What was written, for later guesses."""
        if self._sequences.written and self._options.speculate != "off":
            is_kept = len(self.prompt) > LONG
            self._sequences.written.add([*self.prompt, *self.tokens], self.cached_tokens, is_kept)

    @contextmanager
    def _counting(self, sequence: "Tokens | ShiftedSequence") -> Iterator[None]:
        """Know how many tokens are forgotten meanwhile."""
        before = sequence.dropped if isinstance(sequence, ShiftedSequence) else 0
        try:
            yield
        finally:
            self.dropped = sequence.dropped - before if isinstance(sequence, ShiftedSequence) else 0

    def _step(self, sequence: "Tokens | ShiftedSequence", draft: list[int], guesses: Guesses | None) -> np.ndarray:
        """Read the newest token and a draft behind it; the logits after each, float32 [1 + len(draft), vocab]."""
        started = perf_counter()
        rows = sequence.append([self.tokens[-1], *draft], "all")
        self.steps += 1
        if guesses:
            guesses.took(len(rows), perf_counter() - started)
        return rows

    def _drawn(self, rows: np.ndarray, draft: list[int], started: float) -> Iterator[TextPart]:
        """What the tokens say that are drawn, as far as the draft is right and one beyond."""
        self.drafted += len(draft)
        for row, guess in zip(rows, [*draft, None], strict=True):
            token = self._guide.choose(self._sampler, row)
            elapsed = perf_counter() - started
            self.ttft_s = self.ttft_s or elapsed
            self.decode_s = elapsed - self.ttft_s
            if token in self._end_ids:
                self._ended = True
                return
            self._sampler.accept(token)
            self.tokens.append(token)
            self.accepted += token == guess
            yield from self._guide.accept(token)
            self._ended = self._guide.has_ended
            if token != guess or self._ended:
                return

    def _learn(self, sequence: "Tokens | ShiftedSequence", draft: list[int], before: int, guesses: Guesses) -> None:
        """Take back what was wrong of the draft, and tell what came instead."""
        drawn = self.tokens[before:]
        right = sum(token == guess for token, guess in zip(drawn, draft, strict=False))
        if right < len(draft):
            sequence.truncate(len(self.prompt) + before + right)
        guesses.learn(drawn)

    def _prefill(self, begun: PooledSequence) -> np.ndarray:
        """Read what the sequence does not hold of the prompt; the logits after it, float32 [1, vocab]."""
        sequence, logits = begun
        self.cached_tokens = len(sequence.tokens)
        if logits is None:
            logits = read_prompt(sequence, self.prompt, self._on_progress)
            self._sequences.was_read(sequence, self.cached_tokens, logits)
        self._sampler.read(self.prompt)
        return logits

    def _on_progress(self, done: int, total: int) -> None:
        self._require_running()
        if self._options.on_progress:
            self._options.on_progress(done, total)

    def _require_running(self) -> None:
        if self._stopped:
            raise AnswerStoppedError


class Generation:
    """An answer in the making: iterate over it for pieces of text, str, as they come; then read what happened.

    Attributes:
        parts: to iterate over instead, for pieces of thoughts too: (kind, text), see generation.thinking.
        prompt: the prompt's token ids.  seen: what those of images stand for.
        tokens: ids chosen so far, without the token that ended the answer.
        text: what the pieces so far are together.  thinking: what was thought before, "" if nothing.
        calls: of tools, those that are whole.  prompt_tokens, completion_tokens: how many there are.
        finish_reason: "stop" (the model ended, or a stop string), "length" (max_tokens, or the context is full);
            "interrupted" as long as neither has happened.
        seed: with which the sampler gives the same answer again.
        cached_tokens: how many of the prompt's tokens were in the cache already.
        prefill_s, ttft_s, decode_s: seconds for the prompt, until the first token, and from the first to the last.
        dropped: how many tokens were forgotten to make room, with on_overflow "shift".  kept: those in front that stay.
        is_full: whether it ended because there was no room for more.
        steps: of the model, after the prompt.  drafted, accepted: tokens that were guessed, and those that were right,
            each of which has saved a step.
    """

    prompt: list[int]
    seen: "Sequence[ImageEmbedding]"
    tokens: list[int]
    text: str
    thinking: str
    calls: "list[ToolCall]"
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    seed: int
    cached_tokens: int
    prefill_s: float
    ttft_s: float
    decode_s: float
    dropped: int
    kept: int | None
    is_full: bool
    steps: int
    drafted: int
    accepted: int

    def __init__(self, sequences: SequencePool, tokenizer: Tokenizer, task: Task):
        """Raises UsageError for an empty prompt and ContextError for one that leaves no room for an answer."""
        self._making = Making(sequences, tokenizer, task)
        self.parts = self._making.decode()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._making, name)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        for kind, text in self.parts:
            if kind == ANSWER:
                return text
        raise StopIteration

    def message(self) -> dict[str, Any]:
        """As a conversation has it, with thoughts and calls if there are any."""
        more: dict[str, Any] = {"reasoning_content": self.thinking} if self.thinking else {}
        if self.calls:
            more["tool_calls"] = [call.told() for call in self.calls]
        return {"role": "assistant", "content": self.text, **more}

    def stop(self) -> None:
        """End the answer before the model's next step. Any thread may call it; whoever iterates sees the end."""
        self._making.stop()

    def close(self) -> None:
        """Stop here, and let others have the sequence. If another thread is iterating, it stops at its next step."""
        self._making.stop()
        with suppress(ValueError):  # a generator that is executing: its own thread ends it
            self.parts.close()
            self._making.collect()
