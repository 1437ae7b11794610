"""One answer: the prompt is read (prefill), then token follows token (decode) until there is a reason to stop."""

from collections.abc import Generator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.reasoning import TextIterator, TextPart
from localllm.generation.request import Completion, Request
from localllm.generation.scheduler import Scheduler
from localllm.generation.speculation.drafter import Drafter
from localllm.generation.task import Task
from localllm.text.marker_escaping import Message
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.engine.image_tokens import ImageEmbedding
    from localllm.generation.logprobs import LikelyToken
    from localllm.generation.tools.tool_call import ToolCall

__all__ = ["Generation", "GenerationOptions", "Task"]


def text_parts(scheduler: Scheduler, cache: PrefixCache, answer: Completion) -> Generator[TextPart]:
    """Yield text as tokens are chosen, until one ends the answer or the context is full.

    It does not know the Generation: an abandoned answer releases its sequence immediately, not when Python collects
    cycles. The garbage collector may close this generator anywhere: what it does then takes no lock.
    """
    request, answer.started = answer.request, perf_counter()
    try:
        while scheduler.has_work:
            for output in scheduler.step():
                yield from output.parts
    finally:
        scheduler.close()
        request.answers = []  # no circle: what an answer has is forgotten with it
    cache.collect()
    if isinstance(drafter := answer.options.speculate, Drafter):
        drafter.collect()
    if request.error:
        raise request.error


class Generation(TextIterator):
    """An answer that is being generated: an iterator of pieces of text, with attributes about the answer.

    Attributes:
        parts: an iterator that also has the reasoning: (kind, text), see generation.thinking.
        prompt: the prompt's token ids.  seen: the images of image tokens.
        tokens: ids chosen so far, without the token that ended the answer.
        text: the text so far.  thinking: the reasoning before it, "" if there is none.
        calls: of tools, those that are whole.  prompt_tokens, completion_tokens: how many there are.
        finish_reason: "stop" (the model ended, or a stop string), "length" (max_tokens, or the context is full);
            "interrupted" as long as neither has happened.
        logprobs: of each token, with likely alternatives, if logprobs or top_logprobs asked for them.
        seed: with which the sampler gives the same answer again.
        cached_tokens: how many of the prompt's tokens were in the cache already.
        prefill_s, ttft_s, decode_s: seconds for the prompt, until the first token, and from the first to the last.
        dropped: how many tokens were forgotten to make room, with on_overflow "shift".  kept: those in front that stay.
        skipped: how many of the dropped tokens were never read, because the prompt alone exceeds the context.
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
            return getattr(self._answer, name)

    @property
    def finish_reason(self) -> str:
        return self._answer.finish_reason or "interrupted"

    @property
    def parsed(self) -> Any:
        """Run to the end, and return the answer as an object of its schema's type, or as JSON's plain values.

        Raises UsageError without a schema, and CutError for an answer that was cut.
        """
        for _ in self:
            pass
        return self._answer.parsed

    def message(self) -> Message:
        """Return the answer as a message, with reasoning and tool calls if there are any."""
        more: Message = {"reasoning_content": self.thinking} if self.thinking else {}
        if self.calls:
            more["tool_calls"] = [call.to_message() for call in self.calls]
        return {"role": "assistant", "content": self.text, **more}

    def stop(self) -> None:
        """End the answer before the model's next step. Any thread may call it; the iterator then ends."""
        self._answer.is_stopped = True

    def close(self) -> None:
        """Stop here, and let others have the sequence. If another thread is iterating, it stops at its next step."""
        self._answer.is_stopped = True
        with suppress(ValueError):  # a generator that is executing: its own thread ends it
            self.parts.close()
            self._cache.collect()
