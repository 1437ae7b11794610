"""llama-cpp-python's chat completions, with tools and response formats, as dicts in OpenAI's format."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from localllm.compat.llama_arguments import ChatArguments, build_answer_options, get_length_options, warn
from localllm.compat.llama_completion import count_usage, format_chat_logprobs, make_head
from localllm.errors import UsageError
from localllm.generation.logprobs import LikelyToken
from localllm.generation.model_methods import count_alternatives
from localllm.generation.reasoning import ARGUMENTS, CALL, REASONING, TextPart
from localllm.generation.tools.tool_call_parser import ToolCall, append_part

if TYPE_CHECKING:
    from localllm.api import Model


class ChatCompletion:
    """A running chat completion."""

    def __init__(self, model: "Model", arguments: ChatArguments, name: str, last_n: int, seed: int | None) -> None:
        """Start a chat completion. Raises ContextError, UsageError.

        name: of the model, for responses.  last_n, seed: see build_answer_options.
        """
        options = build_answer_options(arguments, last_n, seed)
        max_tokens, stop = get_length_options(arguments)
        if (schema := parse_schema(arguments.response_format)) is not None:
            options["schema"] = schema
        if stop and (arguments.grammar is not None or schema is not None):
            warn("stop is ignored: grammar or response_format determines the end of the answer")
        if has_logprobs := arguments.logprobs not in (None, False):
            options["top_logprobs"] = count_alternatives(arguments.logprobs, arguments.top_logprobs)
        self.model, self.is_legacy, self.has_logprobs = model, bool(arguments.functions), has_logprobs
        self.head = make_head("chat.completion.chunk" if arguments.stream else "chat.completion", "chatcmpl", name)
        if tools := list_tools(arguments):
            choice = parse_tool_choice(arguments)
            self.answer = model.chat(arguments.messages, max_tokens, stop, tools=tools, tool_choice=choice, **options)
        else:
            self.answer = model.chat(arguments.messages, max_tokens, stop, **options)

    def generate_response(self) -> dict[str, object]:
        """Generate the complete answer; return the response."""
        for _ in self.answer:
            pass
        message = self.answer.message()
        if calls := message.get("tool_calls"):
            message["content"] = message["content"] or None
            if self.is_legacy:
                message["function_call"] = calls[0]["function"]
        logprobs = format_chat_logprobs(self.answer.logprobs, self.model.tokenizer) if self.has_logprobs else None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._get_finish_reason(bool(calls)),
        }
        return {**self.head, "choices": [choice], "usage": count_usage(self.answer)}

    def _get_finish_reason(self, has_calls: bool) -> str:
        reason = self.answer.finish_reason
        return "tool_calls" if has_calls and reason == "stop" else reason

    def stream(self) -> Iterator[dict[str, object]]:
        """Yield the response as chunks; closing the iterator ends the answer."""
        tokens_sent, calls = 0, list[ToolCall]()

        def format_chunk(delta: dict[str, object], reason: str | None = None) -> dict[str, object]:
            nonlocal tokens_sent
            tokens: list[LikelyToken] = self.answer.logprobs[tokens_sent:] if self.has_logprobs else []
            tokens_sent += len(tokens)
            logprobs = format_chat_logprobs(tokens, self.model.tokenizer) if tokens else None
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return {**self.head, "choices": [choice]}

        try:
            yield format_chunk({"role": "assistant"})
            for part in self.answer.parts:
                yield format_chunk(format_delta(part, calls, self.is_legacy))
            yield format_chunk({}, self._get_finish_reason(bool(calls)))
        finally:
            self.answer.close()


def format_delta(part: TextPart, calls: list[ToolCall], is_legacy: bool) -> dict[str, object]:
    """Convert a part of an answer to a delta, and add it to calls; is_legacy: also as function_call."""
    if not append_part(calls, part):
        return {"reasoning_content" if part.kind == REASONING else "content": part.text}
    begins, index = part.kind == CALL, len(calls) - 1
    function = {"name": part.text, "arguments": ""} if begins else {"arguments": part.text}
    call = {**calls[-1].to_message(), "function": function} if begins else {"function": function}
    assert begins or part.kind == ARGUMENTS
    legacy = {"function_call": function} if is_legacy and not index else {}
    return {"tool_calls": [{"index": index, **call}], **legacy}


def parse_schema(form: Mapping[str, object] | None) -> object:
    """Return the JSON schema of a response_format, or None for plain text. Raises UsageError."""
    kind = "text" if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return form.get("schema") or {"type": "object"}
    inner = form.get("json_schema")
    if kind != "json_schema" or not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise UsageError(
            'response_format must be of type text, json_schema or json_object: {"type": "json_object", "schema": ...}'
        )
    return inner["schema"]


def list_tools(arguments: ChatArguments) -> list[Mapping[str, object]]:
    """Return the tools, including OpenAI's legacy functions."""
    functions = [{"type": "function", "function": each} for each in arguments.functions or ()]
    return [*(arguments.tools or ()), *functions]


def parse_tool_choice(arguments: ChatArguments) -> str:
    """Return auto, none, required or the name of the tool to call. Raises UsageError."""
    choice = (arguments.function_call if arguments.tool_choice is None else arguments.tool_choice) or "auto"
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, str):
        raise UsageError('tool_choice must be auto, none, required or {"function": {"name": ...}}')
    return choice
