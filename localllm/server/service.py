"""What stands behind all interfaces: a question to a model by name, and the events of its answers."""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeGuard, TypeVar

from localllm.errors import ContextError, UsageError
from localllm.frozen import frozen
from localllm.generation.generate import GenerationOptions
from localllm.generation.request import Request
from localllm.images.parts import texts_of
from localllm.server.http import Limits, RequestTimeoutError
from localllm.server.images import with_files
from localllm.server.metrics import Metrics
from localllm.server.model_pool import ModelPool
from localllm.server.response_stream import Subscriber, TokenEvent
from localllm.server.worker import Worker
from localllm.text.tokenizer import Tokenizer

T = TypeVar("T")
Asked = str | list[int] | list[dict[str, Any]]  # a text, token ids, messages


@frozen
class GenerateRequest:
    """What a client asks.

    Attributes:
        model: its name, None for the first.  prompts: each gets n answers.
        most_likely: how many tokens to tell in place of each, None for no probabilities.
    """

    model: str | None
    prompts: Sequence[Asked]
    options: GenerationOptions
    n: int = 1
    most_likely: int | None = None


@dataclass
class Usage:
    """Tokens that a question has cost: of prompts, those that had been read before, of answers, thoughts among them."""

    prompt: int = 0
    cached: int = 0
    written: int = 0
    thought: int = 0

    def count(self, request: Request) -> None:
        self.prompt += len(request.prompt)
        self.cached += request.cached
        self.written += sum(len(answering.tokens) for answering in request.answers)
        self.thought += sum(answering.guide.thoughts for answering in request.answers)


class ResponseStream:
    """A question that is being answered. Close it when nobody listens any more.

    Attributes:
        model: that answers.  name: as it was asked for, or the first one's.  usage: complete when all was told.
        dropped: how many of the oldest turns were left out, to fit the context.
    """

    def __init__(self, name: str, worker: Worker, question: GenerateRequest, limits: Limits, stack: AsyncExitStack):
        self.name, self.model, self.usage, self.dropped = name, worker.model, Usage(), 0
        self._worker, self._question, self._stack = worker, question, stack
        self._seconds, self._drops, self._folders = limits.answer_seconds, limits.drops_turns, limits.folders
        self._hearers = list[Subscriber]()

    async def begin(self) -> None:
        """Raises LocalllmError for what can be known before anything is computed."""
        requests = await asyncio.to_thread(self._prepared)
        for request in requests:
            hearer = Subscriber(request, self._question.most_likely, self._worker.leave)
            self._worker.ask(hearer)
            self._hearers.append(hearer)

    def _prepared(self) -> list[Request]:
        """What the batch gets. Templates, vocabularies and grammars take their time: not in the event loop."""
        question, requests = self._question, []
        self.model.session.require_sense(question.options)
        for prompt in with_images(question.prompts, self._folders):
            request = self._fitting(prompt) if self._drops else self._request(prompt)
            request.task.require_room(self.model.context)
            request.task.guide(self.model.tokenizer, self._vocab)
            requests.append(request)
        return requests

    def _request(self, prompt: Asked) -> Request:
        """Raises UsageError for tokens that do not exist, and ContextError for what need not be looked at."""
        vocab, context = self.model.engine.vocab_size, self.model.context
        if not isinstance(prompt, str) and not is_conversation(prompt):
            if not all(isinstance(token, int) and 0 <= token < vocab for token in prompt):
                raise UsageError(f"prompt should have token ids from 0 to {vocab - 1}")
        elif not self._drops and (size := bytes_of(prompt)) > (most := most_bytes(self.model.tokenizer, context)):
            raise ContextError(
                f"the prompt has {size} bytes, and no more than {most} fit into a context of {context} tokens"
            )
        return self.model.session.request(prompt, self._question.options, self._question.n)

    def _fitting(self, prompt: Asked) -> Request:
        """Without as many of a conversation's oldest turns as leave an eighth of the context for the answer."""
        request, most = self._request(prompt), self.model.context - self.model.context // 8
        if isinstance(prompt, str) or len(request.prompt) <= most or not is_conversation(prompt):
            return request
        first = sum(message["role"] == "system" for message in prompt[:1])
        turns = [place for place in range(first, len(prompt)) if prompt[place]["role"] == "user"]
        made = {}

        def fits(number: int) -> bool:
            made[number] = self._request([*prompt[:first], *prompt[turns[number] :]])
            return len(made[number].prompt) <= most

        if len(turns) > 1:
            self.dropped = bisect_left(range(len(turns) - 1), True, 1, key=fits)
            return made.get(self.dropped) or self._request([*prompt[:first], *prompt[turns[self.dropped] :]])
        return request

    @property
    def _vocab(self) -> int:
        """As the batch counts it, which finds a grammar that is ready."""
        return min(self.model.engine.vocab_size, self.model.tokenizer.vocab_size)

    async def events(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """All that is told, with the number of the answer among those to all prompts. Raises LocalllmError."""
        source = merged([hearer.events() for hearer in self._hearers])
        end = None if self._seconds is None else asyncio.get_running_loop().time() + self._seconds
        try:
            while (found := await in_time(source, end)) is not None:
                number, told = found
                yield number * self._question.n + told.number, told
        except TimeoutError:
            raise RequestTimeoutError(f"the answer took more than {self._seconds:g} seconds") from None
        finally:
            await source.aclose()
        for hearer in self._hearers:
            self.usage.count(hearer.request)

    def known(self) -> Usage:
        """The usage so far."""
        usage = Usage()
        for hearer in self._hearers:
            usage.count(hearer.request)
        return usage

    def stop_string(self) -> str:
        """What ended the first answer; "" if it was nothing of the kind."""
        answers = self._hearers[0].request.answers
        return answers[0].guide.transcript.stopped_by if answers else ""

    async def close(self) -> None:
        for hearer in self._hearers:
            self._worker.leave(hearer)
        await self._stack.aclose()


@dataclass
class Service:
    """Models, and what all requests share."""

    shelf: ModelPool
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)

    async def exchange(self, question: GenerateRequest) -> ResponseStream:
        """Begin to answer. Close what this returns. Raises LocalllmError."""
        stack = AsyncExitStack()
        name = self.shelf.book(question.model).name
        worker = await stack.enter_async_context(self.shelf.use(name))
        exchange = ResponseStream(name, worker, question, self.limits, stack)
        try:
            await exchange.begin()
        except BaseException:
            await exchange.close()
            raise
        return exchange

    async def count(self, question: GenerateRequest) -> int:
        """How many tokens the prompts have. Raises LocalllmError."""
        async with self.shelf.use(question.model) as worker:
            session = worker.model.session
            return await asyncio.to_thread(
                lambda: sum(
                    len(session.request(prompt, question.options).prompt)
                    for prompt in with_images(question.prompts, self.limits.folders)
                )
            )


def bytes_of(prompt: Any) -> int:
    """Of the texts in a prompt, a text or messages, at least."""
    texts = [prompt] if isinstance(prompt, str) else [texts_of(message.get("content")) for message in prompt]
    return sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))


@lru_cache(maxsize=64)
def most_bytes(tokenizer: Tokenizer, context: int) -> int:
    """No prompt of more bytes fits a context."""
    return tokenizer.most_bytes(context)


def with_images(prompts: Sequence[Asked], folders: Sequence[str]) -> list[Asked]:
    """With the files that their images are. Raises UsageError."""
    return [with_files(prompt, folders) if is_conversation(prompt) else prompt for prompt in prompts]


def is_conversation(prompt: Sequence[Any]) -> TypeGuard[list[dict[str, Any]]]:
    return bool(prompt) and isinstance(prompt[0], dict)


async def in_time(source: AsyncIterator[T], end: float | None) -> T | None:
    """What comes next, None behind the last. Raises TimeoutError when the event loop's clock says `end`."""
    async with asyncio.timeout_at(end):
        return await anext(source, None)


async def merged(sources: Sequence[AsyncIterator[TokenEvent]]) -> AsyncGenerator[tuple[int, TokenEvent]]:
    """What several tell, as it comes, with the number of each; in the end all are closed."""
    if len(sources) == 1:
        async for told in sources[0]:
            yield 0, told
        return
    waiting = {asyncio.ensure_future(anext(source, None)): number for number, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                if (event := task.result()) is not None:
                    waiting[asyncio.ensure_future(anext(sources[number], None))] = number
                    yield number, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
