"""Escapes control tokens' texts, such as <|im_end|>, in messages; only the template's become tokens.

A template puts its own markers and the messages into one string. Before rendering, a BREAK character is inserted into
each marker of the messages; Tokenizer.encode_rendered removes it after it has found the control tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from localllm.text.special_tokens import build_prefix_regex

Message = dict[str, Any]  # {"role": "system", "user" or "assistant", "content": its text}

IMAGE = "\ufdd1"  # placeholder of an image: a Unicode noncharacter
BREAK = "\ufdd0"  # a noncharacter: it is in no text, templates do not trim it, and JSON does not escape it


class Renders(Protocol):
    """An object that renders a conversation, as ChatTemplate does."""

    def render(self, messages: Sequence[Message], **variables: Any) -> str: ...


class Markers:
    """The texts of a vocabulary's control tokens, without single characters, into which no BREAK fits."""

    def __init__(self, pieces: Iterable[str]) -> None:
        pieces = [piece for piece in pieces if len(piece) > 1]
        self._pieces: dict[str, list[str]] = {}  # by their first two characters
        for piece in pieces:
            self._pieces.setdefault(piece[:2], []).append(piece)
        edges = re.escape("".join(sorted({piece[0] for piece in pieces} | {piece[-1] for piece in pieces})))
        # Templates change the case of names and types.
        self._heads = re.compile(build_prefix_regex(pieces), re.IGNORECASE)
        self._edges = re.compile(f"(?=[{edges}])|(?<=[{edges}])" if edges else "(?!)", re.IGNORECASE)

    def render(self, template: Renders, messages: Sequence[Mapping[str, object]], **variables: object) -> str:
        """Render a conversation for Tokenizer.encode_rendered; arguments and errors as ChatTemplate.render.

        A template can still compose a marker from broken texts: from two fields, or by cutting something out of one (as
        Nemotron's does with "/think"). So the conversation is rendered a second time, with a BREAK wherever a marker
        could begin or end. If the second text has fewer markers, a message contributed one, and the second text is
        returned. Otherwise the first is, because the additional BREAKs hide tags such as </think> from templates that
        look for them.
        """
        broken, shattered = (
            (_change_texts(messages, change), _change_texts(variables, change))
            for change in (self._break_markers, self._break_all_edges)
        )
        text = template.render(broken[0], **broken[1])
        if broken == shattered:
            return text
        safe = template.render(shattered[0], **shattered[1])
        same = all(one == other for one, other in zip_longest(self._occurrences(text), self._occurrences(safe)))
        return text if same else safe

    def _occurrences(self, text: str) -> Iterator[str]:
        """Yield the control tokens' texts that occur whole in a text, in order."""
        for place in self._heads.finditer(text):
            start = place.start() - 1
            candidates = self._pieces.get(text[start : start + 2], [])
            yield from (piece for piece in candidates if text.startswith(piece, start))

    def _break_markers(self, text: str) -> str:
        """Put a BREAK into each marker, after its first character."""
        text = without_surrogates(text).replace(BREAK, "�")
        return self._heads.sub(BREAK, text)

    def _break_all_edges(self, text: str) -> str:
        """Put a BREAK also wherever a marker could begin or end; identifiers stay as they are."""
        text = self._break_markers(text)
        if text.isidentifier():
            return text
        text = self._edges.sub(BREAK, text)
        inner = text.strip()
        return text.replace(inner, BREAK + inner + BREAK, 1) if inner else text


def without_surrogates(text: str) -> str:
    """Join pairs of surrogates, and replace lone ones, which UTF-8 cannot hold, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change every text in a JSON value, except roles and keys that are identifiers: templates compare these."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_change_texts(item, change) for item in value]
    if isinstance(value, Mapping):
        return {
            _unless_word(key, change): _unless_word(item, change) if key == "role" else _change_texts(item, change)
            for key, item in value.items()
        }
    return value


def _unless_word(value: object, change: Callable[[str], str]) -> object:
    return change(value) if isinstance(value, str) and not value.isidentifier() else value
