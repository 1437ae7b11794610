"""Remove white space from JSON while it is streamed, and points from whole numbers."""

import json
import re

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\]+')  # within a string


class JsonCompactor:
    """Filters streamed JSON: removes white space outside of strings.

    Models write white space as in their training, and answer worse if a constraint forbids it; programs need none.
    """

    def __init__(self) -> None:
        self._is_inside = self._is_escaped = False

    def push(self, text: str) -> str:
        """Return a piece of text without white space outside of strings."""
        parts, place = list[str](), 0
        while place < len(text):
            if not self._is_inside:
                quote = text.find('"', place)
                end = len(text) if quote < 0 else quote + 1
                parts.append(_SPACE.sub("", text[place:end]))
                self._is_inside, place = quote >= 0, end
                continue
            if self._is_escaped or text[place] in '"\\':
                self._is_inside = self._is_escaped or text[place] != '"'
                self._is_escaped = not self._is_escaped and text[place] == "\\"
                end = place + 1
            else:
                plain = _PLAIN.match(text, place)
                assert plain
                end = plain.end()
            parts.append(text[place:end])
            place = end
        return "".join(parts)


def with_whole_numbers(text: str) -> str:
    """Return JSON whose whole numbers have no point and no exponent: 5.0 is 5. Invalid JSON is returned as it is."""
    try:
        return json.dumps(json.loads(text, parse_float=_read_number), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _read_number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number
