"""A model on a server with OpenAI's API, with the methods of a local Model that commands use."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from time import perf_counter
from typing import Self, TypeVar

from localllm.errors import ContextError, LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.generation.constraints.json_text import JsonCompactor
from localllm.generation.conversation import Conversation
from localllm.generation.options import GenerationOptions
from localllm.generation.reasoning import ANSWER, REASONING, TextPart
from localllm.generation.tools.tool_call_parser import ToolCall, select_complete_calls
from localllm.images.parts import to_data_urls
from localllm.services.remote.dialect import DIALECTS, OTHER, UNLIMITED, OutputFormat, build_request
from localllm.services.remote.http import Endpoint, EndpointError, as_count, as_object, as_objects
from localllm.text.messages import Message

REASONS = {"eos": "stop", "stop_sequence": "stop", "content_filter": "stop", "function_call": "tool_calls"}
CHAT, TEXT = "/chat/completions", "/completions"
MAX_ANSWERS = 16  # maximum answers to one prompt
T = TypeVar("T")


# ---- responses


class StreamedResponse:
    """A streamed response, assembled from its events.

    Attributes:
        text: by type, ANSWER or REASONING.  usage: the server's token counts.  finish_reason: "" until the end.
        events: count of events with text or tool calls.
    """

    def __init__(self, is_compact: bool = False) -> None:
        """Start empty; is_compact: remove the whitespace of a JSON response."""
        self._compactor = JsonCompactor() if is_compact else None
        self.text, self.finish_reason, self.events = {ANSWER: "", REASONING: ""}, "", 0
        self.usage: dict[str, object] = {}
        self._calls = dict[int, ToolCall]()

    @property
    def calls(self) -> list[ToolCall]:
        """The complete tool calls, in order."""
        return select_complete_calls(call for _, call in sorted(self._calls.items()))

    def push(self, event: dict[str, object]) -> Iterator[TextPart]:
        """Add an event; yield its text."""
        if isinstance(event.get("usage"), dict):
            self.usage = as_object(event["usage"])
        for choice in as_objects(event.get("choices")):
            reason = choice.get("finish_reason")
            self.finish_reason = REASONS.get(reason, reason) if isinstance(reason, str) else self.finish_reason
            delta = as_object(choice.get("delta"))
            texts = (REASONING, delta.get("reasoning_content") or delta.get("reasoning")), (
                ANSWER, delta.get("content") or choice.get("text")
            )  # fmt: skip
            for kind, text in texts:
                if kind == ANSWER and isinstance(text, str) and self._compactor:
                    text = self._compactor.push(text)
                if isinstance(text, str) and text:
                    self.text[kind] += text
                    self.events += 1
                    yield TextPart(kind, text)
            for call in as_objects(delta.get("tool_calls")):
                self._push_call(call)

    def _push_call(self, delta: dict[str, object]) -> None:
        number, id = delta.get("index"), delta.get("id")
        function = as_object(delta.get("function"))
        call = self._calls.setdefault(number if isinstance(number, int) else len(self._calls), ToolCall(""))
        if isinstance(id, str) and id:
            call.id = id
        call.name = call.name or str(function.get("name") or "")
        if function.get("arguments"):
            call.pieces.append(str(function["arguments"]))
        self.events += 1


@frozen
class RemoteAnswer:
    """One choice of a complete response.

    Attributes:
        logprob: mean per token, 0 if the server reports none.  has_logprobs: whether it does.
        completion_tokens: 0 if the server reports none.
    """

    text: str
    thinking: str
    finish_reason: str
    logprob: float = 0.0
    has_logprobs: bool = False
    completion_tokens: int = 0

    @classmethod
    def parse(cls, choice: object, usage: object, is_compact: bool = False) -> "RemoteAnswer":
        """Parse one choice of a response; is_compact: see StreamedResponse."""
        choice = as_object(choice)
        message = as_object(choice.get("message"))
        text = str(message.get("content") or choice.get("text") or "")
        thinking = message.get("reasoning_content") or message.get("reasoning") or ""
        reason = choice.get("finish_reason") or "length"
        tokens = as_objects(as_object(choice.get("logprobs")).get("content"))
        logprobs = [value for token in tokens if isinstance(value := token.get("logprob"), int | float)]
        count = as_count(as_object(usage).get("completion_tokens"))
        mean = fmean(logprobs) if logprobs else 0.0
        text = JsonCompactor().push(text) if is_compact else text
        return cls(text, str(thinking), REASONS.get(str(reason), str(reason)), mean, bool(logprobs), count)


class RemoteModel:
    """A model on a server.

    Attributes:
        endpoint: the server.  name: the server's name of the model.  dialect: the features that the server supports.
        form: the required output format.  session: the conversation with the model.
    """

    prefixes, file, is_diffusion, device, arch = None, None, False, "", ""
    format = file_type = "endpoint"
    warnings: Sequence[str] = ()

    def __init__(self, endpoint: Endpoint, name: str | None = None, form: OutputFormat | None = None):
        """Connect to the server. Raises EndpointError, and UsageError for an unknown model.

        name: None for the server's first model.
        """
        self.endpoint, self.path, self.form = endpoint, endpoint.url, form or OutputFormat()
        models = as_objects(endpoint.get("/models").get("data"))
        names = [str(each.get("id")) for each in models]
        if not names and name is None:
            raise EndpointError(f"{endpoint.url} serves no models")
        if name is not None and names and name not in names:
            raise UsageError(f"{endpoint.url} does not serve model {name!r}; available: {', '.join(names[:20])}")
        about = next((each for each in models if each.get("id") == name), models[0] if models else {})
        self.name = name or names[0]
        self.dialect = DIALECTS.get(str(about.get("owned_by")), OTHER)
        self._about, self._context = about, 0
        self.session = RemoteSession(self)

    @property
    def context(self) -> int:
        """The context length; 0 if the server does not report it (some do only when the model is loaded)."""
        self._context = self._context or fetch_context_length(self._about, self.endpoint, self.name)
        return self._context

    def build_fields(self, options: GenerationOptions) -> dict[str, object]:
        """Return the fields of a request. Raises UsageError for options that servers do not support."""
        if options.on_overflow == "shift":
            raise UsageError("on_overflow=shift is not available with an endpoint: the server manages its own context")
        return {"model": self.name, **build_request(options, self.form, self.dialect)}

    def close(self) -> None:
        """Do nothing; a remote model has no resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def fetch_context_length(about: dict[str, object], endpoint: Endpoint, name: str) -> int:
    """Return a model's context length, 0 if unknown.

    vLLM reports it per model, llama-server and localllm outside /v1.
    """
    if length := as_count(about.get("max_model_len")):
        return length
    if about.get("owned_by") in ("llamacpp", "localllm"):
        with suppress(EndpointError):
            props = replace(endpoint, url=endpoint.url.removesuffix("/v1")).get("/props")
            if "models" in props:
                models = as_objects(props["models"])
                return next((as_count(each.get("context")) for each in models if each.get("name") == name), 0)
            return as_count(as_object(props.get("default_generation_settings")).get("n_ctx"))
    return 0


class RemoteSession(Conversation["RemoteGeneration"]):
    """A conversation with a model on a server."""

    def __init__(self, model: RemoteModel):
        super().__init__()
        self._model = model

    def chat(self, messages: Sequence[Message], options: GenerationOptions | None = None) -> "RemoteGeneration":
        """Answer messages without adding them to this conversation. Raises EndpointError, UsageError."""
        options = options or GenerationOptions()
        return RemoteGeneration(self._model, CHAT, {"messages": to_data_urls(messages)}, options)

    def complete(self, prompt: str, options: GenerationOptions | None = None) -> "RemoteGeneration":
        """Continue a prompt without a chat template."""
        return RemoteGeneration(self._model, TEXT, {"prompt": prompt, **self._get_length(options)}, options)

    def _get_length(self, options: GenerationOptions | None) -> dict[str, object]:
        """Return the server's max_tokens for no limit, since servers end plain text after 16 tokens without it.

        Returns {} if the options have a limit. Raises UsageError for a server without a value for no limit.
        """
        if options and options.max_tokens is not None:
            return {}
        if self._model.dialect.name in ("localllm", "llama-server"):
            return {"max_tokens": UNLIMITED if self._model.dialect.name == "localllm" else -1}
        raise UsageError("max_tokens must be set: without it, the endpoint ends raw completions after 16 tokens")

    def resume(self, options: GenerationOptions | None = None) -> "RemoteGeneration":
        raise UsageError("an endpoint's answer cannot be continued: its API does not support it")

    def candidates(
        self, prompt: str | Sequence[Message], options: GenerationOptions | None = None, n: int = 1, beams: int = 0
    ) -> list[RemoteAnswer]:
        """Return n answers, the likeliest first if the server reports logprobs. Raises EndpointError, UsageError."""
        if beams:
            raise UsageError("beams is not available with an endpoint: its API does not support beam search")
        if not 1 <= n <= MAX_ANSWERS:
            raise UsageError(f"n must be from 1 to {MAX_ANSWERS} for an endpoint, not {n}")
        path, fields = (TEXT, {"prompt": prompt, **self._get_length(options)}) if isinstance(prompt, str) else (
            CHAT, {"messages": to_data_urls(prompt)}
        )  # fmt: skip
        fields = {**self._model.build_fields(options or GenerationOptions()), **fields, "n": n}
        if n > 1 and path == CHAT:
            fields["logprobs"] = True
        reply = self._model.endpoint.post(path, fields)
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices:
            raise EndpointError(
                f"{self._model.endpoint.url} sent a response without `choices`; check that it has OpenAI's API"
            )
        is_compact = options is not None and options.is_compact
        answers = [RemoteAnswer.parse(choice, reply.get("usage"), is_compact) for choice in choices]
        is_ranked = all(answer.has_logprobs for answer in answers)
        return sorted(answers, key=lambda answer: -answer.logprob) if is_ranked else answers

    def _start_answer(
        self, system: list[Message], history: list[Message], options: GenerationOptions, is_own: bool
    ) -> tuple[list[Message], "RemoteGeneration"]:
        """Start an answer; while the server reports that the conversation is too long, drop its older half."""
        history_left = history
        while True:
            answer = RemoteGeneration(self._model, CHAT, {"messages": to_data_urls(system + history_left)}, options)
            try:
                answer.begin()
                break
            except ContextError:
                turns = [index for index, message in enumerate(history_left) if message["role"] == "user"]
                if options.on_overflow == "error" or len(turns) < 2:
                    raise
                history_left = history_left[turns[(len(turns) + 1) // 2] :]
        self.forgotten = sum(message["role"] == "user" for message in history[: len(history) - len(history_left)])
        return history_left, answer


class RemoteGeneration:
    """An answer that a server generates, with the attributes of a Generation that servers report.

    It has token counts, but no token ids.
    """

    dropped, skipped, kept, is_full, drafted, accepted = 0, 0, None, False, 0, 0

    def __init__(self, model: RemoteModel, path: str, prompt: dict[str, object], options: GenerationOptions | None):
        options = options or GenerationOptions()
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        self._fields, self._model, self._path = {**model.build_fields(options), **prompt, **stream}, model, path
        self._response = StreamedResponse(options.is_compact)
        self._events: Iterator[dict[str, object]] | None = None
        self.seed, self.finish_reason = options.sampling.seed, "interrupted"
        self.ttft_s = self.decode_s = self.prefill_s = 0.0
        self._started = perf_counter()
        self.parts = self._stream_parts()

    def begin(self) -> None:
        """Send the request and wait for the first event. Raises EndpointError, ContextError."""
        if self._events is None:
            self._started = perf_counter()
            events = self._model.endpoint.stream_events(self._path, self._fields)
            first = next(events, None)
            self._events = iter([]) if first is None else chain_and_close(first, events)

    def _stream_parts(self) -> Iterator[TextPart]:
        self.begin()
        assert self._events is not None
        try:
            for event in self._events:
                for part in self._response.push(event):
                    self.prefill_s = self.ttft_s = self.ttft_s or perf_counter() - self._started
                    self.decode_s = perf_counter() - self._started - self.ttft_s
                    yield part
        finally:
            close = getattr(self._events, "close", None)
            if close:
                close()
        if not self._response.finish_reason:
            raise EndpointError(f"{self._model.endpoint.url} closed the connection before the end of the answer")
        self.finish_reason = "stop" if self._response.finish_reason == "tool_calls" else self._response.finish_reason

    @property
    def text(self) -> str:
        return self._response.text[ANSWER]

    @property
    def thinking(self) -> str:
        return self._response.text[REASONING]

    @property
    def calls(self) -> list[ToolCall]:
        return self._response.calls

    @property
    def prompt_tokens(self) -> int:
        return as_count(self._response.usage.get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int:
        details = as_object(self._response.usage.get("prompt_tokens_details"))
        return as_count(details.get("cached_tokens"))

    @property
    def completion_tokens(self) -> int:
        return as_count(self._response.usage.get("completion_tokens")) or self._response.events

    def message(self) -> dict[str, object]:
        reasoning: dict[str, object] = {"reasoning_content": self.thinking} if self.thinking else {}
        if self.calls:
            reasoning["tool_calls"] = [call.to_message() for call in self.calls]
        return {"role": "assistant", "content": self.text, **reasoning}

    def __iter__(self) -> Iterator[str]:
        return (text for kind, text in self.parts if kind == ANSWER)

    def close(self) -> None:
        """Close the connection, which makes the server stop generating."""
        with suppress(LocalllmError):
            self.parts.close()  # type: ignore[attr-defined]


def chain_and_close(first: T, rest: Iterator[T]) -> Iterator[T]:
    """Yield `first`, then `rest`, a generator that is closed at the end."""
    try:
        yield first
        yield from rest
    finally:
        rest.close()  # type: ignore[attr-defined]
