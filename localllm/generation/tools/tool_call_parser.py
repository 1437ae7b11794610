"""Parse the tool calls of an answer while it is generated, to parts: text, names, arguments as JSON."""

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field

from localllm.generation.constraints.schemas import Schema
from localllm.generation.reasoning import ANSWER, ARGUMENTS, CALL, ESCAPE, TextPart, count_overlap
from localllm.generation.tools.tool_call_format import (
    HARMONY,
    ID,
    PYTHON,
    ParameterForm,
    ToolCallFormat,
    make_additional_form,
    make_parameter_form,
)


def generate_call_id() -> str:
    """Return a random id of a call: nine letters and digits, as some templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass
class ToolCall:
    """A tool call, which may be incomplete while it is generated.

    Attributes:
        pieces: chunks of its arguments as JSON.
    """

    name: str
    pieces: list[str] = field(default_factory=list)
    id: str = field(default_factory=generate_call_id)

    @property
    def text(self) -> str:
        """The arguments as JSON, which may be incomplete."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, object] | None:
        """The arguments; None if their JSON is incomplete or not an object."""
        try:
            parsed = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, dict) else None

    def to_message(self) -> dict[str, object]:
        """Return the call as an entry of a message's tool_calls."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}


def append_part(calls: list[ToolCall], part: TextPart) -> bool:
    """Append a part of type CALL or ARGUMENTS to the calls; return whether it has one of these types."""
    if part.kind == CALL:
        calls.append(ToolCall(part.text))
    elif part.kind == ARGUMENTS:
        calls[-1].pieces.append(part.text)
    return part.kind in (CALL, ARGUMENTS)


def select_complete_calls(calls: Iterable[ToolCall]) -> list[ToolCall]:
    """Return the calls whose arguments are complete."""
    return [call for call in calls if call.arguments is not None]


_ID = "[A-Za-z0-9_-]+"
_LONGEST_ID = 64  # a mark is no longer than its pattern and an id
_NAME = re.compile("[A-Za-z0-9_.-]{1,64}")  # of a parameter that is not in the schema
_PYTHON_WORDS = re.compile("|".join(PYTHON))


class ToolCallParser:
    """Parses the tool calls of an answer in the format of the model's chat template.

    A grammar (ToolGrammar) must make the text after the trigger follow the format.

    Attributes:
        trigger: mark that begins a call, with an ESCAPE if it is a token.
        in_call: whether the trigger was found.  pending: text that had been generated after it by then.
    """

    def __init__(self, format: ToolCallFormat, tools: Mapping[str, Schema], marks: frozenset[str] = frozenset()):
        """Start at the beginning of an answer.

        tools: schemas of the parameters, by name of the tool.
        marks: strings of the format that are single tokens, which appear with an ESCAPE before them.
        """
        self._format, self._tools, self._marks = format, tools, marks
        self.trigger = escape_tokens(format.trigger, marks)
        self._is_token, self._is_tag = ESCAPE in self.trigger, format.has_tag
        self._buffer, self._text_before, self.in_call, self.pending = "", "", False, ""
        self._state: Callable[[list[TextPart]], bool] = self._parse_prose
        self._name, self._count, self._scan = "", 0, JsonScan()
        self._given_names: set[str] = set()  # names of the current call's parameters, for formats with ParameterMarks
        self._open: OpenParameter | None = None
        names = "|".join(re.escape(name) for name in sorted(tools, key=len, reverse=True))
        is_harmony = format.opening == HARMONY.opening
        between = build_harmony_pattern(marks) if is_harmony else build_mark_pattern(format.between, marks)
        self._name_pattern = re.compile(f"({names}){between}")
        self._patterns: dict[str, re.Pattern[str]] = {}

    @property
    def is_marked(self) -> bool:
        """Return whether the trigger is a token or tag, which plain text does not contain."""
        return self._is_token or self._is_tag

    def copy(self) -> "ToolCallParser":
        """Return an independent copy."""
        twin = copy(self)
        twin._scan, twin._open = copy(self._scan), self._open and self._open.copy()
        twin._state = getattr(twin, self._state.__name__)
        return twin

    def begin(self) -> None:
        """Start within a call, before its opening, because the answer must be a call."""
        self.in_call, self._state = True, self._parse_opening

    def push(self, text: str) -> list[TextPart]:
        """Add text; return the parts that have become certain."""
        self._buffer += text
        parts = list[TextPart]()
        while self._state(parts):
            pass
        return parts

    def flush(self, is_end: bool = False) -> list[TextPart]:
        """Return the held-back plain text at the end of the answer.

        is_end: whether the model ended the answer, which also ends a call.
        """
        if is_end and self._state == self._parse_marks:
            closing = self._format.closing.replace(ID, "0")
            return self.push(closing[count_overlap(self._buffer, closing) :])
        text, self._buffer = self._buffer, ""
        return [TextPart(ANSWER, text)] if text and not self.in_call else []

    def abandon_call(self) -> list[TextPart]:
        """Treat the text of an invalid call, and all text after it, as plain text; return the call's text."""
        text = self.trigger * self.in_call + self._buffer
        self.in_call, self._state = False, self._pass_prose
        self._buffer = ""
        return [TextPart(ANSWER, text)] if text else []

    # ---- states: each consumes held text, and returns whether the next state should try

    def _parse_prose(self, parts: list[TextPart]) -> bool:
        place = self._find_trigger()
        if place is None:
            safe = len(self._buffer) - count_overlap(self._buffer, self.trigger)
            text = self._buffer[:safe]
            if self._format.opening == HARMONY.opening and ESCAPE in text:  # a header, which may be that of a call
                return False
            safe = len(text.rstrip()) if text.strip() or self._text_before else 0
            self._add_text(parts, self._buffer[:safe])
            self._buffer = self._buffer[safe:]
            return False
        text_before, self.pending = self._buffer[:place].rstrip(), self._buffer[place + len(self.trigger) :]
        if self._format.opening != HARMONY.opening:
            self._add_text(parts, text_before)
        self._buffer, self.in_call, self._state = self.pending, True, self._parse_opening_rest
        return bool(self._buffer)

    def _find_trigger(self) -> int | None:
        """Return the index of the trigger in the held-back text; None without one.

        A trigger that is not a token must begin a line (a tag) or the whole text.
        """
        place = self._buffer.find(self.trigger)
        if place < 0 or self._is_token or self._format.opening == HARMONY.opening:
            return place if place >= 0 else None
        text_before = self._text_before + self._buffer[:place]
        if not text_before.strip() or (self._is_tag and text_before.rstrip(" ").endswith("\n")):
            return place
        return None

    def _pass_prose(self, parts: list[TextPart]) -> bool:
        self._add_text(parts, self._buffer)
        self._buffer = ""
        return False

    def _add_text(self, parts: list[TextPart], text: str) -> None:
        if text:
            self._text_before = (self._text_before + text)[-80:]
            parts.append(TextPart(ANSWER, text))

    def _parse_opening(self, parts: list[TextPart]) -> bool:
        return self._consume(self._format.opening.lstrip(), self._parse_name)

    def _parse_opening_rest(self, parts: list[TextPart]) -> bool:
        remaining = self._format.opening.lstrip()[len(self._format.trigger) :]
        return self._consume(remaining, self._parse_name)

    def _parse_name(self, parts: list[TextPart]) -> bool:
        match = self._name_pattern.match(self._buffer)
        if not match:
            return False
        self._name, self._buffer = match[1], self._buffer[match.end() :]
        parts.append(TextPart(CALL, self._name))
        self._scan, self._count, self._given_names = JsonScan(), 0, set()
        self._state = self._parse_marks if self._format.marks else self._parse_json
        return True

    def _parse_json(self, parts: list[TextPart]) -> bool:
        end = self._scan.push(self._buffer)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if text:
            parts.append(TextPart(ARGUMENTS, text))
        if self._scan.ended:
            self._state = self._parse_separator
        return self._scan.ended

    def _parse_separator(self, parts: list[TextPart]) -> bool:
        """Parse the separator after the arguments of a call, if another call follows."""
        if self._format.separator is None:
            return False
        return self._consume(self._format.separator, self._parse_name)

    def _parse_marks(self, parts: list[TextPart]) -> bool:
        """Parse a complete parameter between ParameterMarks, or the end of the call."""
        self._open = self._open or self._find_parameter()
        if self._open:
            return self._take_value(parts, self._open)
        last = self._format.closing, self._format.separator
        if any(piece and self._compile_pattern(piece).match(self._buffer) for piece in last):
            parts.append(TextPart(ARGUMENTS, "}" if self._count else "{}"))
            self._state = self._parse_separator
            return True
        return False

    def _find_parameter(self) -> "OpenParameter | None":
        """Return the parameter whose name and mark begin the held-back text; None if they are incomplete."""
        marks, schema = self._format.marks, self._tools[self._name]
        assert marks
        head = self._compile_pattern(marks.next if self._count else marks.first).match(self._buffer)
        if head is None:
            return None
        for key, part in (schema.get("properties") or {}).items():
            end = head.end() + len(key)
            if self._buffer.startswith(key, head.end()) and self._is_value_begin(end):
                return OpenParameter(key, make_parameter_form(part, schema), end)
        name = _NAME.match(self._buffer, head.end())
        if name and self._is_value_begin(name.end()) and (others_form := make_additional_form(schema)):
            return OpenParameter(name[0], others_form, name.end())
        return None

    def _take_value(self, parts: list[TextPart], parameter: "OpenParameter") -> bool:
        """Add a parameter if it is complete, unless it is repeated; return whether it is complete."""
        value = self._parse_value(parameter)
        if value is None:
            return False
        (value_text, end), key = value, parameter.key
        if key not in self._given_names:
            head = ", " if self._given_names else "{"
            parts.append(TextPart(ARGUMENTS, f"{head}{json.dumps(key)}: {value_text}"))
        self._given_names, self._count, self._buffer = {*self._given_names, key}, self._count + 1, self._buffer[end:]
        self._open = None
        return True

    def _is_value_begin(self, place: int) -> bool:
        """Return whether the value of a parameter begins at this index."""
        marks = self._format.marks
        assert marks
        return any(self._compile_pattern(mid).match(self._buffer, place) for mid, _ in (marks.text, marks.json))

    def _parse_value(self, parameter: "OpenParameter") -> tuple[str, int] | None:
        """Return the value of a parameter as JSON, and the index after its marks; None if it is incomplete."""
        marks, form = self._format.marks, parameter.form
        assert marks
        mid, close = (self._compile_pattern(piece) for piece in marks.text)
        if form.texts and (head := mid.match(self._buffer, parameter.place)):
            if not (end := close.search(self._buffer, max(head.end(), parameter.searched))):
                parameter.searched = len(self._buffer) - len(close.pattern) - _LONGEST_ID
                return None
            text = self._buffer[head.end() : end.start()].replace(ESCAPE, "")
            return form.read(text) if marks.text == marks.json else json.dumps(text, ensure_ascii=False), end.end()
        mid, close = (self._compile_pattern(piece) for piece in marks.json)
        if not (head := mid.match(self._buffer, parameter.place)):
            return None
        if self._buffer.startswith(("{", "["), head.end()) and not parameter.scan_to_end(self._buffer, head.end()):
            return None
        word = _PYTHON_WORDS.match(self._buffer, head.end())
        try:
            value_end = word.end() if word else json.JSONDecoder().raw_decode(self._buffer, head.end())[1]
        except ValueError:
            return None
        end = close.match(self._buffer, value_end)
        value = PYTHON[word[0]] if word else self._buffer[head.end() : value_end]
        return (value, end.end()) if end and value_end < len(self._buffer) else None

    def _consume(self, piece: str, then: Callable[[list[TextPart]], bool]) -> bool:
        """Remove a piece of the format from the held-back text and go on with state `then`.

        Returns whether the text began with the piece.
        """
        match = self._compile_pattern(piece).match(self._buffer)
        if not match:
            return False
        self._buffer, self._state = self._buffer[match.end() :], then
        return True

    def _compile_pattern(self, piece: str) -> re.Pattern[str]:
        """Return the compiled regular expression of a piece of the format."""
        if piece not in self._patterns:
            self._patterns[piece] = re.compile(build_mark_pattern(piece, self._marks))
        return self._patterns[piece]


class JsonScan:
    """A search for the end of a JSON value that is being generated.

    Attributes:
        ended: whether the last bracket was found.
    """

    def __init__(self) -> None:
        self._depth, self._inside, self._skip, self.ended = 0, False, False, False

    def push(self, text: str) -> int:
        """Return how many of these characters belong to the value."""
        for place, character in enumerate(text):
            if self._skip:
                self._skip = False
            elif character == "\\":
                self._skip = self._inside
            elif character == '"':
                self._inside = not self._inside
            elif not self._inside and character in "{}[]":
                self._depth += 1 if character in "{[" else -1
                if not self._depth:
                    self.ended = True
                    return place + 1
        return len(text)


def escape_tokens(piece: str, marks: frozenset[str]) -> str:
    """Return text with an ESCAPE before each string that is a single token."""
    if not marks:
        return piece
    return re.sub("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)), rf"{ESCAPE}\g<0>", piece)


def build_mark_pattern(piece: str, marks: frozenset[str]) -> str:
    """Return a regular expression for a mark, with or without ESCAPE characters."""
    escaped = re.escape(escape_tokens(piece, marks)).replace(re.escape(ESCAPE), f"{ESCAPE}?")
    return escaped.replace(re.escape(ID), _ID)


def build_harmony_pattern(marks: frozenset[str]) -> str:
    """Return a regular expression for gpt-oss's header after the name of a tool: channel and JSON mark."""
    channel, constrain, message = (
        build_mark_pattern(mark, marks) for mark in ("<|channel|>", "<|constrain|>", "<|message|>")
    )
    return rf"(?:{channel}commentary)?(?: ?{constrain}json| json)?{message}"


class OpenParameter:
    """A parameter whose value is being generated.

    Attributes:
        place: index of the mark after the name.  searched: index at which the search for the value's end continues.
    """

    def __init__(self, key: str, form: ParameterForm, place: int):
        self.key, self.form, self.place, self.searched = key, form, place, 0
        self._scan = JsonScan()

    def copy(self) -> "OpenParameter":
        twin = copy(self)
        twin._scan = copy(self._scan)
        return twin

    def scan_to_end(self, text: str, start: int) -> bool:
        """Return whether the brackets of a JSON value are closed; each character is scanned once."""
        begin = max(start, self.searched)
        if not self._scan.ended:
            self.searched = begin + self._scan.push(text[begin:])
        return self._scan.ended
