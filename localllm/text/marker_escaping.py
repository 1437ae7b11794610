"""Escapes control tokens' texts, such as <|im_end|>, in messages; only the template's become tokens.

A template puts both into one string. So the markers in messages are broken before it is rendered, by a character that
Tokenizer.encode_rendered removes again after it has looked for control tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from localllm.text.special_tokens import build_prefix_regex

Message = dict[str, Any]  # {"role": "system", "user" or "assistant", "content": its text}

IMAGE = "\ufdd1"  # stands for an image: a noncharacter, too
BREAK = "\ufdd0"  # a noncharacter: in no text, no white space that a template trims, left alone by JSON


class Renders(Protocol):
    """An object that renders a conversation, as ChatTemplate does."""

    def render(self, messages: Sequence[Message], **variables: Any) -> str: ...


class Markers:
    """The texts of a vocabulary's control tokens, without those of one character, which cannot be broken."""

    def __init__(self, pieces: Iterable[str]) -> None:
        pieces = [piece for piece in pieces if len(piece) > 1]
        self._pieces: dict[str, list[str]] = {}  # by their first two characters
        for piece in pieces:
            self._pieces.setdefault(piece[:2], []).append(piece)
        edges = re.escape("".join(sorted({piece[0] for piece in pieces} | {piece[-1] for piece in pieces})))
        # Templates change the case of names and types.
        self._heads = re.compile(build_prefix_regex(pieces), re.IGNORECASE)
        self._edges = re.compile(f"(?=[{edges}])|(?<=[{edges}])" if edges else "(?!)", re.IGNORECASE)

    def render(self, template: Renders, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render a conversation for Tokenizer.encode_rendered; arguments and errors as ChatTemplate.render.

        Even of broken texts a template can make a marker: out of two fields, or by cutting something out of one (as
        Nemotron's does with "/think"). So it is rendered again, with the texts broken wherever a marker could begin or
        end: if one is missing then, it was a message's, and the second rendering is the answer. It is not always the
        answer because templates look for tags, such as </think>, that it breaks too.
        """
        rendered_markers = [messages, variables]
        broken, shattered = _with_texts(rendered_markers, self._broken), _with_texts(rendered_markers, self._shatter)
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

    def _broken(self, text: str) -> str:
        text = without_surrogates(text).replace(BREAK, "�")
        return self._heads.sub(BREAK, text)

    def _shatter(self, text: str) -> str:
        text = self._broken(text)
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


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change every text in a value, but not roles and keys that are words: templates test them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_with_texts(item, change) for item in value]
    if isinstance(value, Mapping):
        return {
            _unless_word(key, change): _unless_word(item, change) if key == "role" else _with_texts(item, change)
            for key, item in value.items()
        }
    return value


def _unless_word(value: Any, change: Callable[[str], str]) -> Any:
    return change(value) if isinstance(value, str) and not value.isidentifier() else value
