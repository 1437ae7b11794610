"""Parse tool calls that a model writes as JSON in its answer, bare or fenced.

    ```json
    {"name": "NAME", "arguments": {"ka": "Vab"}}
    ```

Qwen2.5-Coder writes such calls, whatever the template's format; other forms: parse_call. A call is on lines of its own,
names an existing tool, and has valid arguments; everything else is text. Several calls may follow each other, in a
fence or a list. Small models repeat a call without end, so an identical repetition, outside of a fence or a list, ends
the answer.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from localllm.generation.constraints.json_text import normalize_whole_numbers
from localllm.generation.reasoning import ANSWER, ARGUMENTS, CALL, TextPart
from localllm.generation.tools.tool_call_parser import JsonScan

_BEGIN = re.compile(r"(?m)^[ \t]*(?=[{[]|`{1,3})")
_FENCE = re.compile(r"[ \t]*```[\w+-]*[ \t]*\n")
_SPACE = re.compile(r"\s*")
_FENCE_SO_FAR = re.compile(r"[ \t]*(`{1,2}|```[\w+-]*[ \t]*)")


class _UnknownYetError(Exception):
    """Raised when more text is needed to decide whether text is a call."""


class JsonCall(NamedTuple):
    """A tool call written as JSON, and the index of its end in the text."""

    name: str
    arguments: str
    end: int


class JsonToolCallParser:
    """Finds tool calls written as JSON in an answer while it is generated.

    Attributes:
        repeats: whether the model repeated a call, which ends the answer.
    """

    def __init__(self, names: Sequence[str], fits: Callable[[str, str], bool], is_single: bool = False):
        """Start at the beginning of an answer.

        names: names of the tools.  fits: returns whether a tool accepts arguments (JSON).
        is_single: whether only the first call counts.
        """
        self._names, self._fits, self._is_single = names, fits, is_single
        self._buffer, self._is_line = "", True  # whether the held text begins a line
        self._has_text = self._has_called = self.repeats = False
        self._seen = frozenset[tuple[str, str]]()
        self._scanned: tuple[int, JsonScan, int] | None = None  # of an object that is not whole: start, scan, its end

    def push(self, part: TextPart) -> list[TextPart]:
        """Add a part; return the parts that have become certain."""
        if part.kind != ANSWER:
            return [*self.flush(), part]
        if self.repeats:
            return []
        self._buffer += part.text
        return self._parse_parts(is_end=False)

    def flush(self, is_end: bool = False) -> list[TextPart]:
        """Return the held-back text at the end of the answer.

        is_end: whether the model ended the answer; otherwise it was cut off.
        """
        parts = self._parse_parts(is_end=True) if is_end else []
        text, self._buffer = "" if self._has_called and not self._buffer.strip() else self._buffer, ""
        return [*parts, TextPart(ANSWER, text)] if text else parts

    def _parse_parts(self, is_end: bool) -> list[TextPart]:
        """Remove the certain text and calls from the held-back text; return them as parts."""
        parts, place = list[TextPart](), 0
        while not self.repeats and (begin := self._find_begin(place)):
            try:
                calls, end = self._parse_several_calls(begin.start(), is_end)
            except _UnknownYetError:
                place = begin.start()
                break
            if not calls:
                place = end
                continue
            self._add_text(parts, self._buffer[: begin.start()].rstrip())
            self.repeats = all(call[:2] in self._seen for call in calls)
            for call in calls:
                if not self.repeats and not (self._is_single and self._has_called):
                    parts += [TextPart(CALL, call.name), TextPart(ARGUMENTS, call.arguments)]
                self._has_called = True
            self._seen |= {call[:2] for call in calls}
            remaining = "" if self.repeats else self._buffer[end:]
            self._buffer, self._is_line, place = (
                remaining if self._has_text else remaining.lstrip(),
                not self._has_text,
                0,
            )
        else:
            place = len(self._buffer)
        safe = len(self._buffer[:place].rstrip())  # white space before a call is dropped
        self._add_text(parts, self._buffer[:safe])
        self._buffer, self._scanned = self._buffer[safe:], None if safe else self._scanned
        return parts

    def _add_text(self, parts: list[TextPart], text: str) -> None:
        if text:
            self._is_line, self._has_text = text.endswith("\n"), True
            parts.append(TextPart(ANSWER, text))

    def _find_begin(self, place: int) -> re.Match[str] | None:
        """Return the first match of the beginning of a call at index `place` or later; None without one."""
        match = _BEGIN.search(self._buffer, place)
        if match and match.start() == 0 and not self._is_line:
            match = _BEGIN.search(self._buffer, 1)
        return match

    def _parse_several_calls(self, start: int, is_end: bool) -> tuple[list[JsonCall], int]:
        """Return the calls that begin at index `start` and their end, or no calls and the index to continue at.

        Raises _UnknownYetError.
        """
        text, fence = self._buffer, _FENCE.match(self._buffer, start)
        if not fence and not is_end and _FENCE_SO_FAR.fullmatch(text, start):
            raise _UnknownYetError
        place = fence.end() if fence else start
        line_end = text.find("\n", place)
        no_calls = list[JsonCall](), len(text) if line_end < 0 else line_end + 1
        place = _skip_space(text, place)
        is_list = text.startswith("[", place)
        place = _skip_space(text, place + 1) if is_list else place
        calls = list[JsonCall]()
        try:
            while True:
                call = self._parse_call(place)
                if call is None:
                    return no_calls
                calls.append(call)
                place, following = call.end, text[call.end :].lstrip()
                if (is_list or fence) and following.startswith((",", "{")):
                    place = _skip_space(text, text.index(following[0], place) + (following[0] == ","))
                    continue
                break
            if is_list:
                place = _skip_word(text, place, "]")
            if fence:
                place = len(text) if is_end and not text[place:].strip() else _skip_word(text, place, "```")
            if not is_end and not text[place:].strip(" \t"):
                raise _UnknownYetError  # there may be other text in this line
        except _UnknownYetError:
            if is_end:
                return no_calls
            raise
        except ValueError:
            return no_calls
        is_alone = not text[place:].partition("\n")[0].strip()
        return (calls, place) if is_alone else no_calls

    def _parse_call(self, place: int) -> JsonCall | None:
        """Parse the call at an index of the held-back text; return None if it is not a call.

        Raises _UnknownYetError.
        """
        text, start = self._buffer, _skip_space(self._buffer, place)
        if not self._may_be_call(start):
            return None
        start_before, scan, scanned = self._scanned or (-1, JsonScan(), start)
        if start_before != start:
            scan, scanned = JsonScan(), start
        end = scanned + scan.push(text[scanned:])
        if not scan.ended:
            self._scanned = start, scan, end
            raise _UnknownYetError
        self._scanned = None
        call = parse_call(text[start:end])
        if call is None or call[0] not in self._names:
            return None
        name, arguments = call
        for written in (arguments, normalize_whole_numbers(arguments)):
            if self._fits(name, written):
                return JsonCall(name, written, end)
        return None

    def _may_be_call(self, start: int) -> bool:
        """Return whether the first key of an object, and the name of a tool after it, can be those of a call.

        Raises _UnknownYetError.
        """
        if start == len(self._buffer):
            raise _UnknownYetError
        head = _HEAD.match(self._buffer, start)
        if head is None:
            return False
        for text, is_whole, choices in ((head[1], head[2], _KEYS), (head[3], head[4], self._names)):
            if not (text in choices if is_whole else any(choice.startswith(text or "") for choice in choices)):
                return False
            if not is_whole:
                if head.end() == len(self._buffer):
                    raise _UnknownYetError
                return False
            if head[1] != "name":
                break
        return True


_ARGUMENTS = ("arguments", "parameters")
_AROUND = {"type", "id", "function"}
_KEYS = ("name", *_ARGUMENTS, *sorted(_AROUND))
# An object's first key, and, if it is "name", the value: as far as they are there.
_HEAD = re.compile(r'\{\s*(?:"(\w*)(")?(?:(?<="name")\s*(?::\s*(?:"([^"\\]*)(")?)?)?)?)?')


def parse_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a call; None if the object is not a call.

    Models write arguments or parameters, as an object or as a string of JSON, and some put them into the object of
    OpenAI's API, with type, id and function.
    """
    try:
        members = _read_members(text)
        if "function" in members and members.keys() <= _AROUND:
            members = _read_members(members["function"])
        keys = [key for key in _ARGUMENTS if key in members]
        if len(keys) != 1 or not {"name", *keys} <= members.keys() <= {"name", "type", "id", *keys}:
            return None
        name, arguments = json.loads(members["name"]), members[keys[0]]
        arguments = json.loads(arguments) if arguments.startswith('"') else arguments
        return (name, arguments) if isinstance(name, str) and isinstance(json.loads(arguments), dict) else None
    except (ValueError, RecursionError):
        return None


def _read_members(text: str) -> dict[str, str]:
    """Return the JSON text of each value of an object, by key.

    Raises ValueError for other JSON, and for repeated keys.
    """
    members, place, decoder = dict[str, str](), _skip_space(text, 0), json.JSONDecoder()
    if text[place : place + 1] != "{":
        raise ValueError(text)
    while text[place] in "{,":
        key, place = decoder.raw_decode(text, _skip_space(text, place + 1))
        start = _skip_space(text, place)
        if not isinstance(key, str) or key in members or text[start : start + 1] != ":":
            raise ValueError(text)
        start = _skip_space(text, start + 1)
        _, place = decoder.raw_decode(text, start)
        members[key] = text[start:place]
        place = _skip_space(text, place)
        if text[place : place + 1] not in (",", "}"):
            raise ValueError(text)
    return members


def _skip_space(text: str, place: int) -> int:
    """Return the index of the first character that is not white space."""
    space = _SPACE.match(text, place)
    assert space
    return space.end()


def _skip_word(text: str, place: int, word: str) -> int:
    """Return the index after white space and a word.

    Raises ValueError for another word, _UnknownYetError for an incomplete one.
    """
    place = _skip_space(text, place)
    if text.startswith(word, place):
        return place + len(word)
    if word.startswith(text[place:]):
        raise _UnknownYetError
    raise ValueError
