"""Convert an answer's tokens to text: reasoning, answer and tool calls, up to a stop string."""

from collections.abc import Sequence
from copy import copy, deepcopy
from json import loads
from typing import TYPE_CHECKING

from localllm.generation.constraints.distinct_items import DistinctItems
from localllm.generation.constraints.json_text import JsonCompactor
from localllm.generation.reasoning import ANSWER, ESCAPE, REASONING, ReasoningParser, TextPart, Thinking, overlap
from localllm.generation.tools.tool_call_parser import ARGUMENTS, CALL
from localllm.text.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.tools.tool_call_parser import ToolCall
    from localllm.generation.tools.tool_grammar import ToolGrammar


class StopFilter:
    """Passes text up to the first stop string; holds back text that may become one."""

    def __init__(self, stops: Sequence[str]):
        self.found, self.which = False, ""
        self._stops = tuple(stops)
        self._buffer = ""

    def push(self, text: str) -> str:
        """Add text; return what is certain now. A stop string sets `found`, and the text after it is dropped."""
        self._buffer += text
        ends = [(index, stop) for stop in self._stops if (index := self._buffer.find(stop)) >= 0]
        if ends:
            self.found, (end, self.which) = True, min(ends)
            output, self._buffer = self._buffer[:end], ""
            return output
        safe = len(self._buffer) - max((overlap(self._buffer, stop) for stop in self._stops), default=0)
        output, self._buffer = self._buffer[:safe], self._buffer[safe:]
        return output

    def flush(self) -> str:
        text, self._buffer = self._buffer, ""
        return text


class Transcript:
    """The text of the tokens so far. Stop strings end the answer, but not reasoning.

    Attributes:
        text: the answer, as far as it is certain.  thinking: the reasoning before it.
        has_stopped: whether a stop string was found, which ends the text.
        calls: the tool calls, the last of which may be incomplete.  reader: parses them; None without tools.
    """

    def __init__(
        self, decoder: StreamDecoder, stops: Sequence[str] = (), thinking: Thinking | None = None,
        calls: "ToolGrammar | None" = None, form: "Constraint | None" = None,
    ):  # fmt: skip
        """Start an empty transcript.

        decoder: a new decoder, which is copied.  calls: the grammar of tool calls, if there are tools.
        form: the constraint of the answer, or None.
        """
        self._thinking = thinking or Thinking()
        self.reader = calls.reader() if calls else None
        self._json_reader = calls.json_reader() if calls and form is None else None
        self._token_texts = {**self._thinking.shown, **(calls.shown if calls else {})}
        self._plain = {**self._thinking.plain, **(calls.plain if calls else {})}
        interrupts = self._thinking.format and self.reader and self.reader.is_marked
        call = self.reader.trigger if self.reader and interrupts else ""
        self._decoder, self._stops = decoder.copy(), StopFilter(stops)
        self._splitter = ReasoningParser(self._thinking, call)
        self._distinct = DistinctItems(loads(form.distinct)) if form and form.distinct else None
        self._call_distinct: DistinctItems | None = None
        self._calls = calls
        self._answer_json = JsonCompactor() if form and form.is_compact else None
        self._call_json = None if calls is None or calls.use.json_whitespace else JsonCompactor()
        self.text = self.thinking = ""
        self.calls: list[ToolCall] = []

    def copy(self) -> "Transcript":
        twin = copy(self)
        twin.reader, twin.calls = self.reader and self.reader.copy(), deepcopy(self.calls)
        twin._json_reader = copy(self._json_reader)
        twin._distinct = self._distinct and self._distinct.copy()
        twin._call_distinct = self._call_distinct and self._call_distinct.copy()
        twin._answer_json, twin._call_json = copy(self._answer_json), copy(self._call_json)
        twin._decoder, twin._splitter, twin._stops = self._decoder.copy(), self._splitter.copy(), copy(self._stops)
        return twin

    @property
    def has_stopped(self) -> bool:
        """Return whether a stop string was found, or the model repeats a call."""
        return self._stops.found or (self._json_reader is not None and self._json_reader.repeats)

    @property
    def stopped_by(self) -> str:
        """The stop string that was found, or ""."""
        return self._stops.which

    @property
    def kind(self) -> str | None:
        """The kind of the next text: see ReasoningParser."""
        return self._splitter.kind

    @property
    def is_between(self) -> bool:
        """Return whether neither reasoning nor the answer, nor a header of one, has begun."""
        return self._splitter.is_between

    @property
    def interruption(self) -> str:
        """The text of a tool call that has ended the reasoning, as it was then; "" if none has."""
        return self._splitter.interruption

    def begin_answer(self) -> None:
        """Treat all that follows as answer, with its white space."""
        self._splitter.begin_answer()

    def go_on_from(self, text: str) -> None:
        """Put a text at the beginning of the answer; `push` does not return it again."""
        if self._answer_json:
            self._answer_json.push(text)

    def push(self, token: int) -> list[TextPart]:
        text = self._decoder.push(token)
        return self._cut_at_stop(self._splitter.push(self._token_texts.get(token, text)))

    def give_up_call(self) -> list[TextPart]:
        """Treat the text of an invalid call as plain text."""
        return (
            self._cut_at_stop([])
            if self.reader is None
            else self._without_marks(self._with_json(self.reader.give_up()))
        )

    def flush(self, is_end: bool = False) -> list[TextPart]:
        """Return the rest at the end; nothing after a stop string.  is_end: the model has ended the answer."""
        if self.has_stopped:
            return []
        parts = self._cut_at_stop([*self._splitter.push(self._decoder.flush()), *self._splitter.flush()])
        if self.reader:
            parts += self._without_marks(self._with_json(self.reader.flush(is_end)))
        if self._json_reader:
            parts += self._without_marks(self._json_reader.flush(is_end))
        return parts + self._record(ANSWER, self._stops.flush())

    def _cut_at_stop(self, parts: list[TextPart]) -> list[TextPart]:
        """Parse tool calls in the parts, and cut all at a stop string."""
        if self.reader is None:
            return self._without_marks(parts)
        parsed = list[TextPart]()
        for part in parts:
            parsed += self.reader.push(part.text) if part.kind == ANSWER else [part]
        return self._without_marks(self._with_json(parsed))

    def _with_json(self, parts: list[TextPart]) -> list[TextPart]:
        """Parse tool calls that are written as JSON in the parts."""
        reader = self._json_reader
        return parts if reader is None else [each for part in parts for each in reader.push(part)]

    def _without_marks(self, parts: list[TextPart]) -> list[TextPart]:
        """Return the parts without ESCAPE characters, with filtered JSON, up to a stop string."""
        output = list[TextPart]()
        for kind, text in parts:
            if self._stops.found:
                break
            if ESCAPE in text:
                for mark, plain in self._plain.items():
                    text = text.replace(mark, plain)
            if items := {ANSWER: self._distinct, ARGUMENTS: self._call_distinct}.get(kind):
                text = items.push(text)
            if compactor := {ANSWER: self._answer_json, ARGUMENTS: self._call_json}.get(kind):
                text = compactor.push(text)
            output += self._record(kind, self._stops.push(text) if kind == ANSWER else text)
        return output

    def _record(self, kind: str, text: str) -> list[TextPart]:
        if kind == REASONING:
            self.thinking += text
        elif kind == ANSWER:
            self.text += text
        elif text:
            from localllm.generation.tools.tool_call_parser import append_part  # seldom needed

            if kind == CALL:
                self._call_json = self._call_json and JsonCompactor()
                self._call_distinct = self._calls.distinct_items(text) if self._calls else None
            append_part(self.calls, TextPart(kind, text))
        return [TextPart(kind, text)] if text else []
