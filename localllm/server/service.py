"""A request to a model by name, and the stream of its events; shared by all of the server's APIs."""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from localllm.errors import ContextError, UsageError
from localllm.frozen import frozen
from localllm.generation.conversation import AnswerDefaults
from localllm.generation.infill import Infill
from localllm.generation.options import GenerationOptions
from localllm.generation.request import Completion, Request
from localllm.images.parts import get_text, list_image_parts
from localllm.server.attachments import resolve_images
from localllm.server.http import COMMENT, ClientLimits, RequestTimeoutError
from localllm.server.metrics import Metrics
from localllm.server.model_pool import ModelPool
from localllm.server.worker import Subscriber, TokenEvent, Worker
from localllm.text.messages import Message

if TYPE_CHECKING:
    from localllm.api import Model

# For /infill: minimum tokens of a chunk that is reused from the middle of an earlier prompt.
INFILL_REUSE = 64
T = TypeVar("T")
Prompt = str | list[int] | list[Message]  # text, token ids, or messages


@frozen
class GenerateRequest:
    """A generation request of any API, parsed.

    Attributes:
        model: its name, None for the first.  prompts: each gets n choices.
        top_logprobs: alternatives to report for each token; None: no log probabilities.
        context: token ids of an earlier prompt and its answer, put before each prompt; not checked yet.
        wants_progress: whether events tell how much of each prompt is read.
    """

    model: str | None
    prompts: Sequence[Prompt | Infill]
    options: GenerationOptions
    n: int = 1
    top_logprobs: int | None = None
    context: Sequence[object] = ()
    wants_progress: bool = False


@dataclass
class TokenUsage:
    """Token counts of a request: prompt, cached part of the prompt, completion, and reasoning in the completion."""

    prompt: int = 0
    cached: int = 0
    written: int = 0
    thought: int = 0

    def count(self, request: Request) -> None:
        self.prompt += len(request.prompt)
        self.cached += request.cached
        self.written += sum(len(completion.tokens) for completion in request.answers)
        self.thought += sum(completion.guide.thoughts for completion in request.answers)


class ResponseStream:
    """A response being generated; close it when the client has disconnected.

    Attributes:
        model: the model in use.  name: its name in the pool.  usage: complete after the last event.
        dropped: count of oldest turns dropped to fit the context.
    """

    def __init__(
        self,
        name: str,
        worker: Worker,
        generate_request: GenerateRequest,
        limits: ClientLimits,
        stack: AsyncExitStack,
        defaults: AnswerDefaults | None = None,
    ):
        self.name, self.model, self.usage, self.dropped = name, worker.model, TokenUsage(), 0
        self._defaults = defaults
        self._worker, self._generate_request, self._stack = worker, generate_request, stack
        self._seconds, self._drops, self._folders = limits.answer_seconds, limits.drops_turns, limits.folders
        self._cache_reuse = limits.cache_reuse
        self._subscribers = list[Subscriber]()

    async def begin(self) -> None:
        if self._defaults:
            options = self._defaults.complete(self._generate_request.options)
            self._generate_request = replace(self._generate_request, options=options)
        self._generate_request = drop_unknown_biases(self._generate_request, self.model.engine.vocab_size)
        self._generate_request = with_named_adapter(self._generate_request, self.model)
        requests = await asyncio.to_thread(self._build_requests)
        for request in requests:
            wants_progress = self._generate_request.wants_progress
            subscriber = Subscriber(request, self._generate_request.top_logprobs, self._worker.cancel, wants_progress)
            self._worker.submit(subscriber)
            self._subscribers.append(subscriber)

    def _build_requests(self) -> list[Request]:
        """Build the batch's requests; call this outside the event loop.

        Templates, vocabularies and grammars take time.
        """
        generate_request, requests = self._generate_request, list[Request]()
        self._generate_request = generate_request = self._set_cache_reuse(generate_request)
        self.model.session.validate_combination(generate_request.options)
        prompts = encode_infills(generate_request, self.model)
        for prompt in resolve_prompt_images(prompts, self._folders):
            request = self._build_truncated_request(prompt) if self._drops else self._build_request(prompt)
            request.task.require_room(self.model.context)
            request.task.create_state(self.model.tokenizer, self._vocab)
            request.task.resolve_adapter_scales(self.model.engine)
            requests.append(request)
        return requests

    def _set_cache_reuse(self, generate_request: GenerateRequest) -> GenerateRequest:
        """Return the request with its own cache_reuse, or the server's. Raises UsageError."""
        if (reuse := generate_request.options.cache_reuse) is not None:
            if reuse and not self.model.engine.can_shift:
                raise UsageError("n_cache_reuse must be 0: this model does not support context shift")
            return generate_request
        reuse = self._cache_reuse
        if reuse is None:
            # Editors send a prompt to /infill after every keystroke.
            is_cut = any(isinstance(prompt, Infill) and prompt.is_cut for prompt in generate_request.prompts)
            reuse = INFILL_REUSE if is_cut else 0
        reuse = reuse if reuse and self.model.engine.can_shift else 0
        return replace(generate_request, options=replace(generate_request.options, cache_reuse=reuse))

    def _build_request(self, prompt: Prompt) -> Request:
        """Build one request.

        Raises UsageError for unknown tokens, and ContextError for a prompt whose bytes alone exceed the context.
        """
        vocab = self.model.engine.vocab_size
        if not isinstance(prompt, str) and not is_chat(prompt):
            require_known_tokens(prompt, vocab, "prompt")
        elif not self._drops:
            require_size(count_bytes(prompt), self.model)
        prompt = add_defaults(prompt, self._defaults)
        request = self.model.session.request(prompt, self._generate_request.options, self._generate_request.n)
        if context := require_known_tokens(self._generate_request.context, vocab, "context"):
            ids = request.prompt[request.prompt[:1] == [self.model.tokenizer.bos_id] :]
            request.task = replace(request.task, prompt=[*context, *ids])
        if not request.prompt:  # as in OpenAI's API, it becomes the start of a document
            bos, eos = self.model.tokenizer.bos_id, self.model.tokenizer.eos_id
            request.prompt.extend([each for each in (bos, eos) if each is not None][:1])
        return request

    def _build_truncated_request(self, prompt: Prompt) -> Request:
        """Drop the oldest turns until an eighth of the context is left for the answer."""
        request, limit = self._build_request(prompt), self.model.context - self.model.context // 8
        if isinstance(prompt, str) or len(request.prompt) <= limit or not is_chat(prompt):
            return request
        first = sum(message["role"] == "system" for message in prompt[:1])
        turns = [index for index in range(first, len(prompt)) if prompt[index]["role"] == "user"]
        built = {}

        def fits(number: int) -> bool:
            built[number] = self._build_request([*prompt[:first], *prompt[turns[number] :]])
            return len(built[number].prompt) <= limit

        if len(turns) > 1:
            self.dropped = bisect_left(range(len(turns) - 1), True, 1, key=fits)
            return built.get(self.dropped) or self._build_request([*prompt[:first], *prompt[turns[self.dropped] :]])
        return request

    @property
    def _vocab(self) -> int:
        """Vocabulary size under which the batch looks up compiled grammars."""
        return min(self.model.engine.vocab_size, self.model.tokenizer.vocab_size)

    async def stream_events(self) -> AsyncGenerator[tuple[int, TokenEvent]]:
        """Yield all events, each with its choice's index over all prompts. Raises LocalllmError."""
        source = merge_streams([subscriber.stream_events() for subscriber in self._subscribers])
        end = None if self._seconds is None else asyncio.get_running_loop().time() + self._seconds
        try:
            while (item := await get_next_before(source, end)) is not None:
                number, token_event = item
                yield number * self._generate_request.n + token_event.number, token_event
        except TimeoutError:
            raise RequestTimeoutError(
                f"the answer took more than {self._seconds:g} seconds, the limit of --timeout; lower max_tokens"
            ) from None
        finally:
            await source.aclose()
        for subscriber in self._subscribers:
            self.usage.count(subscriber.request)

    def list_prompts(self) -> list[tuple[Prompt | Infill, list[int]]]:
        """Return each prompt as the client sent it, and its token ids."""
        request_prompts = self._generate_request.prompts
        return [(prompt, each.request.prompt) for prompt, each in zip(request_prompts, self._subscribers, strict=True)]

    def count_usage(self) -> TokenUsage:
        usage = TokenUsage()
        for subscriber in self._subscribers:
            usage.count(subscriber.request)
        return usage

    def get_completion(self) -> Completion:
        return self._subscribers[0].request.answers[0]

    def format_timings(self) -> dict[str, object]:
        """Return llama-server's counts and times: of several answers the sum of tokens, and the longest time."""
        usage, answers = self.count_usage(), [each for one in self._subscribers for each in one.request.answers]
        prefill, decode = (
            max((getattr(each, name) for each in answers), default=0.0) for name in ("prefill_s", "decode_s")
        )
        return {
            "cache_n": usage.cached,
            **format_rate("prompt", usage.prompt - usage.cached, prefill),
            **format_rate("predicted", usage.written, decode),
        }

    def describe_progress(self) -> bytes:
        """Return a comment of an event stream: how much of the prompts is read, or that the server is at work."""
        reading = [each.progress for each in self._subscribers if each.progress and not each.request.begun]
        if not reading:
            return COMMENT
        done, total = sum(each.processed for each in reading), sum(each.total for each in reading)
        return f": read {done} of {total} tokens of the prompt\n".encode()

    def stop_string(self) -> str:
        """Return the stop string that ended the first choice, or ""."""
        answers = self._subscribers[0].request.answers
        return answers[0].guide.transcript.stopped_by if answers else ""

    async def close(self) -> None:
        """Cancel generation and release the model."""
        for subscriber in self._subscribers:
            self._worker.cancel(subscriber)
        await self._stack.aclose()


@dataclass
class ServerContext:
    """The models and limits that all requests share."""

    pool: ModelPool
    metrics: Metrics
    limits: ClientLimits = field(default_factory=ClientLimits)

    async def start(self, generate_request: GenerateRequest, keep_seconds: float | None = None) -> ResponseStream:
        """Start a response, which the caller closes; keep_seconds: see ModelPool.use. Raises LocalllmError."""
        stack = AsyncExitStack()
        entry = self.pool.resolve(generate_request.model)
        worker = await stack.enter_async_context(self.pool.use(entry.name, keep_seconds))
        stream = ResponseStream(entry.name, worker, generate_request, self.limits, stack, entry.options.defaults)
        try:
            await stream.begin()
        except BaseException:
            await stream.close()
            raise
        return stream

    async def count(self, generate_request: GenerateRequest) -> int:
        defaults = self.pool.resolve(generate_request.model).options.defaults
        async with self.pool.use(generate_request.model) as worker:
            model, options = worker.model, defaults.complete(generate_request.options)
            return await asyncio.to_thread(
                lambda: sum(
                    len(model.session.request(add_defaults(prompt, defaults), options).prompt)
                    for prompt in resolve_prompt_images(encode_infills(generate_request, model), self.limits.folders)
                )
            )


def format_rate(name: str, count: int, seconds: float) -> dict[str, object]:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def with_named_adapter(generate_request: GenerateRequest, model: "Model") -> GenerateRequest:
    """Return the request with the adapter that its model's name ends with, after a colon, as in base:adapter."""
    name, options = (generate_request.model or "").rpartition(":")[2], generate_request.options
    if options.lora is not None or name not in [adapter.name for adapter in model.engine.adapters]:
        return generate_request
    return replace(generate_request, options=replace(options, lora={name: 1.0}))


def drop_unknown_biases(generate_request: GenerateRequest, vocab: int) -> GenerateRequest:
    """Remove biases of unknown tokens; clients send biases for OpenAI's vocabularies."""
    sampling = generate_request.options.sampling
    if not sampling.logit_bias or max(sampling.logit_bias) < vocab:
        return generate_request
    biases = {token: bias for token, bias in sampling.logit_bias.items() if token < vocab}
    options = replace(generate_request.options, sampling=replace(sampling, logit_bias=biases))
    return replace(generate_request, options=options)


def encode_infills(generate_request: GenerateRequest, model: "Model") -> list[Prompt]:
    """Return the prompts; convert fill-in-the-middle prompts to token ids.

    Raises UsageError for a model without fill-in-the-middle tokens, and ContextError.
    """
    prompts = list[Prompt]()
    for prompt in generate_request.prompts:
        if isinstance(prompt, Infill):
            if not prompt.is_cut:
                require_size(count_bytes(prompt.prefix) + count_bytes(prompt.suffix), model)
            prompts.append(prompt.encode_to_fit(model.tokenizer, model.context, generate_request.options.max_tokens))
        else:
            prompts.append(prompt)
    return prompts


def require_known_tokens(ids: Sequence[object], vocab: int, name: str) -> list[int]:
    """Return the ids. Raises UsageError unless all are token ids of a vocabulary of this size."""
    ids_known = [token for token in ids if isinstance(token, int) and 0 <= token < vocab]
    if len(ids_known) < len(ids):
        raise UsageError(f"{name}: token ids must be from 0 to {vocab - 1}")
    return ids_known


def require_size(size: int, model: "Model") -> None:
    """Raise ContextError for a prompt with more bytes than the context could hold."""
    if size > (limit := model.tokenizer.compute_max_bytes(model.context)):
        fitting = f"at most {limit} fit in a context of {model.context} tokens"
        raise ContextError(f"the prompt has {size} bytes, but {fitting}; shorten it")


def count_bytes(prompt: str | list[Message]) -> int:
    """Count the UTF-8 bytes of a prompt's text, a lower bound of the rendered prompt's size."""
    texts = [prompt] if isinstance(prompt, str) else [get_text(message.get("content") or "") for message in prompt]
    return sum(len(text.encode(errors="replace")) for text in texts)


def resolve_prompt_images(prompts: Sequence[Prompt], folders: Sequence[str]) -> list[Prompt]:
    """Replace the images of each conversation by files. Raises UsageError."""
    return [
        resolve_images(prompt, folders) if is_chat(prompt) and any(map(list_image_parts, prompt)) else prompt
        for prompt in prompts
    ]


def add_defaults(prompt: Prompt, defaults: AnswerDefaults | None) -> Prompt:
    """Add the default system and first messages of the model's name to a conversation."""
    return defaults.build_conversation(prompt) if defaults and is_chat(prompt) else prompt


def is_chat(prompt: Sequence[object]) -> TypeGuard[list[Message]]:
    return bool(prompt) and isinstance(prompt[0], dict)


async def get_next_before(source: AsyncIterator[T], end: float | None) -> T | None:
    """Return the next item, or None at the end. Raises TimeoutError at time `end` of the event loop's clock."""
    async with asyncio.timeout_at(end):
        return await anext(source, None)


async def merge_streams(sources: Sequence[AsyncIterator[TokenEvent]]) -> AsyncGenerator[tuple[int, TokenEvent]]:
    """Merge streams as their items arrive, each with its stream's index; close all at the end."""
    if len(sources) == 1:
        async for token_event in sources[0]:
            yield 0, token_event
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
