"""Parse a server's responses, streamed or whole."""

from collections.abc import Iterator
from typing import Any

from localllm.frozen import frozen
from localllm.generation.constraints.json_text import JsonCompactor
from localllm.generation.reasoning import ANSWER, REASONING, TextPart
from localllm.generation.tools.tool_call import ToolCall, complete_calls

REASONS = {"eos": "stop", "stop_sequence": "stop", "content_filter": "stop", "function_call": "tool_calls"}


class Streaming:
    """A response assembled from its events.

    Attributes:
        text: by kind.  usage: tokens that were counted.  finish_reason: "" before.  events: that had something.
    """

    def __init__(self, is_compact: bool = False) -> None:
        """Start empty.

        is_compact: whether the response is JSON whose whitespace is removed.
        """
        self._compactor = JsonCompactor() if is_compact else None
        self.text, self.finish_reason, self.events = {ANSWER: "", REASONING: ""}, "", 0
        self.usage: dict[str, Any] = {}
        self._calls = dict[int, ToolCall]()

    @property
    def calls(self) -> list[ToolCall]:
        """Complete tool calls in order."""
        return complete_calls(call for _, call in sorted(self._calls.items()))

    def take(self, event: dict[str, Any]) -> Iterator[TextPart]:
        """Add an event, and yield the new parts."""
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            reason = choice.get("finish_reason")
            self.finish_reason = REASONS.get(reason, reason) if isinstance(reason, str) else self.finish_reason
            delta = choice.get("delta") or {}
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
            for call in delta.get("tool_calls") or ():
                self._take_call(call)

    def _take_call(self, told: Any) -> None:
        if not isinstance(told, dict):
            return
        number = told.get("index") if isinstance(told.get("index"), int) else len(self._calls)
        assert isinstance(number, int)
        function = told.get("function") if isinstance(told.get("function"), dict) else {}
        assert isinstance(function, dict)
        call = self._calls.setdefault(number, ToolCall(""))
        if isinstance(told.get("id"), str) and told["id"]:
            call.id = told["id"]
        call.name = call.name or str(function.get("name") or "")
        if function.get("arguments"):
            call.pieces.append(str(function["arguments"]))
        self.events += 1


@frozen
class RemoteAnswer:
    """One choice of a complete response.

    Attributes:
        logprob: per token, 0 if the server does not tell it.  tells_logprobs: whether it does.
        completion_tokens: as far as known.
    """

    text: str
    thinking: str
    finish_reason: str
    logprob: float = 0.0
    tells_logprobs: bool = False
    completion_tokens: int = 0

    @classmethod
    def of(cls, choice: Any, usage: Any, is_compact: bool = False) -> "RemoteAnswer":
        choice = choice if isinstance(choice, dict) else {}
        message = choice.get("message") if isinstance(choice.get("message"), dict) else {}
        text = message.get("content") or choice.get("text") or ""
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        reason = choice.get("finish_reason") or "length"
        told = (choice.get("logprobs") or {}).get("content") if isinstance(choice.get("logprobs"), dict) else None
        logprobs = [one.get("logprob") for one in told or () if isinstance(one, dict)]
        found = [logprob for logprob in logprobs if isinstance(logprob, int | float)]
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        count = count if isinstance(count, int) else 0
        mean = sum(found) / len(found) if found else 0.0
        text = JsonCompactor().push(str(text)) if is_compact else str(text)
        return cls(text, str(thought), REASONS.get(reason, str(reason)), mean, bool(found), count)
