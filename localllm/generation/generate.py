"""One answer: prefill of the prompt, then decode, token by token, as an iterator of text."""

from collections.abc import Generator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from localllm.generation.answer_record import AnswerRecord, as_message, record_of
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.reasoning import TextPart
from localllm.generation.request import Completion, Request
from localllm.generation.scheduler import Scheduler
from localllm.generation.speculation.drafter import Drafter
from localllm.generation.task import Task
from localllm.generation.text_iterator import TextIterator
from localllm.text.messages import Message
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.engine.image_tokens import ImageEmbedding
    from localllm.generation.logprobs import LikelyToken
    from localllm.generation.tools.tool_call import ToolCall

__all__ = ["Generation", "GenerationOptions", "Task"]


def text_parts(scheduler: Scheduler, cache: PrefixCache, answer: Completion) -> Generator[TextPart]:
    """Yield the text of an answer as its tokens are drawn.

    This function has no reference to the Generation, so that an abandoned answer releases its sequence immediately, and
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


# Attributes of a Generation that are there before its first step.
KNOWN_BEFORE = frozenset(("prompt", "seen", "prompt_tokens", "seed", "kept"))


class Generation(TextIterator):
    """An answer that is being generated: an iterator of pieces of text, with attributes about the answer.

    Reading an attribute of the result, such as its text, generates the whole answer if iterating has not begun; during
    the iteration, and after it was left, attributes are those of the answer so far.

    Attributes:
        parts: an iterator over (kind, text) that includes the reasoning, see generation.reasoning.
        prompt: the prompt's token ids.  seen: the images of image tokens.
        tokens: the answer's token ids so far, without the token that ended it.
        text: the text so far.  thinking: the reasoning before it, "" if there is none.
        calls: the complete tool calls.  prompt_tokens, completion_tokens: numbers of tokens.
        finish_reason: "stop" (the model ended, or a stop string), "length" (max_tokens, or the context is full);
            "interrupted" before.
        logprobs: log probability of each token, with alternatives, if logprobs or top_logprobs was given.
        seed: reproduces the answer.
        cached_tokens: number of the prompt's tokens that were in the prefix cache.
        prefill_s, ttft_s, decode_s: seconds for the prompt, until the first token, and from the first to the last.
        dropped: number of tokens dropped from the context, with on_overflow "shift".  kept: first tokens that stay.
        skipped: number of dropped tokens that were never read, because the prompt alone exceeds the context.
        is_full: whether the answer ended because the context was full.
        steps: decode steps.  drafted, accepted: numbers of draft tokens and of accepted ones, each of which saves a
            step.
    """

    prompt: list[int]
    seen: "Sequence[ImageEmbedding]"
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

    def __init__(self, cache: PrefixCache, tokenizer: Tokenizer, task: Task):
        """Check the prompt. Raises UsageError if it is empty and ContextError if it leaves no room for an answer."""
        request = Request(task)
        (self._answer,) = request.begin(cache.engine, tokenizer)
        scheduler = Scheduler(cache.engine, tokenizer, [request], cache=cache)
        self._cache, self.parts = cache, text_parts(scheduler, cache, self._answer)

    if not TYPE_CHECKING:  # type checkers see the attributes above, and report every other name

        def __getattr__(self, name: str) -> object:
            if name not in Generation.__annotations__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            if name not in KNOWN_BEFORE:
                self.finish_unread()
            return getattr(self._answer, name)

    @property
    def finish_reason(self) -> str:
        self.finish_unread()
        return self._answer.finish_reason or "interrupted"

    @property
    def parsed(self) -> Any:
        """The complete answer as an object of its schema's type, or as plain JSON values; generates the rest first.

        Raises UsageError without a schema, and CutError for an answer that was cut.
        """
        for _ in self:
            pass
        return self._answer.parsed

    def message(self) -> Message:
        """Return the answer as a message, with reasoning and tool calls if there are any."""
        return as_message(self)

    def __reduce__(self) -> tuple[type[AnswerRecord], tuple[dict[str, Any]]]:
        """Pickle and deepcopy as plain data, generated first if nobody has begun to iterate."""
        self.finish_unread()
        return record_of(self._answer)

    def stop(self) -> None:
        """End the answer before the model's next step. Any thread may call it; the iterator then ends."""
        self._answer.is_stopped = True

    def close(self) -> None:
        """Stop, and return the sequence to the cache. If another thread iterates, it stops at its next step."""
        self._answer.is_stopped = True
        with suppress(ValueError):  # a generator that is executing: its own thread ends it
            self.parts.close()
            self._cache.collect()
