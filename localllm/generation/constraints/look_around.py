"""Rewrite patterns of JSON schemas with look-around, which llguidance's regular expressions lack.

A look-ahead at the start of a pattern is a further pattern for the same text, so it becomes a schema in allOf. An
alternative of anyOf with any other look-around is left out if there are others.
"""

import re
from collections.abc import Mapping
from typing import Any

_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # an escape, a class or a character


def without_look_around(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without look-around where possible, with the same meaning or a narrower one.

    Such patterns are common: pydantic (2.13) describes Decimal as a number or a string with one, and patterns of
    passwords look ahead for a digit and a letter.
    """
    parts = schema.get("anyOf")
    if isinstance(parts, list):
        usable = [part for part in parts if not (isinstance(part, Mapping) and looks_around(part.get("pattern")))]
        schema = {**schema, "anyOf": usable or parts}
    patterns = split_look_aheads(schema["pattern"]) if looks_around(schema.get("pattern")) else None
    if not patterns:
        return schema
    rest = {word: value for word, value in schema.items() if word != "pattern"}
    return {**rest, "allOf": [*(rest.get("allOf") or ()), *({"pattern": pattern} for pattern in patterns)]}


def looks_around(pattern: object) -> bool:
    """Return whether a pattern has a look-ahead or look-behind."""
    if not isinstance(pattern, str) or "(?" not in pattern:
        return False
    return any(token == "(" and pattern.startswith(_LOOK_AROUND, place) for place, _, token in _walk(pattern))


def split_look_aheads(pattern: str) -> list[str] | None:
    """Split ^(?=A)(?=B)C into patterns that a text must all match: ^(?:A), ^(?:B), ^C. None for any other form."""
    if not pattern.startswith("^"):
        return None
    left, found = pattern[1:], list[str]()
    while left.startswith("(?="):
        end = _closing(left)
        if end is None:
            return None
        found.append(f"^(?:{left[3:end]})")
        left = left[end + 1 :]
    if any(looks_around(part) for part in [left, *found]) or _has_alternatives(left):
        return None
    return [*found, f"^{left}"]


def _closing(pattern: str) -> int | None:
    """Return where the parenthesis that a pattern begins with is closed."""
    return next((place for place, depth, token in _walk(pattern) if token == ")" and depth == 0), None)


def _has_alternatives(pattern: str) -> bool:
    """Return whether a pattern has alternatives outside of parentheses."""
    return any(token == "|" and depth == 0 for _, depth, token in _walk(pattern))


def _walk(pattern: str) -> list[tuple[int, int, str]]:
    """List each token of a pattern: its position, the number of open parentheses after it, its text."""
    depth, found = 0, []
    for token in _TOKEN.finditer(pattern):
        depth += (token[0] == "(") - (token[0] == ")")
        found.append((token.start(), depth, token[0]))
    return found
