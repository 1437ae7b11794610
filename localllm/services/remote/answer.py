"""Parse a server's responses, streamed or complete."""

from collections.abc import Iterator
from statistics import fmean

from localllm.frozen import frozen
from localllm.generation.constraints.json_text import JsonCompactor
from localllm.generation.reasoning import ANSWER, REASONING, TextPart
from localllm.generation.tools.tool_call import ToolCall, complete_calls
from localllm.services.remote.http import json_count, json_object, json_objects

REASONS = {"eos": "stop", "stop_sequence": "stop", "content_filter": "stop", "function_call": "tool_calls"}


class Streaming:
    """A streamed response, assembled from its events.

    Attributes:
        text: by kind, ANSWER or REASONING.  usage: the server's token counts.  finish_reason: "" until the end.
        events: number of events with text or tool calls.
    """

    def __init__(self, is_compact: bool = False) -> None:
        """Start empty; is_compact: remove the whitespace of a response in JSON."""
        self._compactor = JsonCompactor() if is_compact else None
        self.text, self.finish_reason, self.events = {ANSWER: "", REASONING: ""}, "", 0
        self.usage: dict[str, object] = {}
        self._calls = dict[int, ToolCall]()

    @property
    def calls(self) -> list[ToolCall]:
        """Return the complete tool calls in order."""
        return complete_calls(call for _, call in sorted(self._calls.items()))

    def push(self, event: dict[str, object]) -> Iterator[TextPart]:
        """Add an event, and yield its parts."""
        if isinstance(event.get("usage"), dict):
            self.usage = json_object(event["usage"])
        for choice in json_objects(event.get("choices")):
            reason = choice.get("finish_reason")
            self.finish_reason = REASONS.get(reason, reason) if isinstance(reason, str) else self.finish_reason
            delta = json_object(choice.get("delta"))
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
            for call in json_objects(delta.get("tool_calls")):
                self._push_call(call)

    def _push_call(self, delta: dict[str, object]) -> None:
        number, id = delta.get("index"), delta.get("id")
        function = json_object(delta.get("function"))
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
    def of(cls, choice: object, usage: object, is_compact: bool = False) -> "RemoteAnswer":
        """Parse one choice of a response; is_compact: see Streaming."""
        choice = json_object(choice)
        message = json_object(choice.get("message"))
        text = str(message.get("content") or choice.get("text") or "")
        thinking = message.get("reasoning_content") or message.get("reasoning") or ""
        reason = choice.get("finish_reason") or "length"
        tokens = json_objects(json_object(choice.get("logprobs")).get("content"))
        logprobs = [value for token in tokens if isinstance(value := token.get("logprob"), int | float)]
        count = json_count(json_object(usage).get("completion_tokens"))
        mean = fmean(logprobs) if logprobs else 0.0
        text = JsonCompactor().push(text) if is_compact else text
        return cls(text, str(thinking), REASONS.get(str(reason), str(reason)), mean, bool(logprobs), count)
