"""Find special tokens in a template's output, and escape them in the messages it renders.

A template puts its own markers, such as <|im_end|>, and the messages into one string, but only the template's markers
may become tokens. Before rendering, `MarkerEscaper` inserts a BREAK character into each marker in the messages;
Tokenizer.encode_rendered removes it after `SpecialTokenSplitter` has found the tokens. Both find candidates with a
regular expression of their first characters.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from localllm.text.messages import Message

IMAGE = "\ufdd1"  # placeholder of an image: a Unicode noncharacter
BREAK = "\ufdd0"  # a noncharacter: no text has it, templates do not trim it, and JSON does not escape it
_WHITE_SPACE = " \t\n\v\f\r"


class SpecialTokenSplitter:
    """Splits a text at special tokens as llama.cpp does, the longest first.

    The time is proportional to the text, whatever the number of tokens.
    """

    def __init__(
        self, tokens: Iterable[tuple[str, int]], strips_before: Collection[int], strips_after: Collection[int]
    ) -> None:
        """Build the splitter.

        tokens: text and id of each. strips_before, strips_after: ids of tokens that remove the white space before or
        after them.
        """
        ordered = sorted(tokens, key=lambda token: -len(token[0].encode(errors="replace")))
        self._ids = dict(ordered)
        self._ranks = {text: rank for rank, (text, _) in enumerate(ordered)}
        self._lengths: dict[str, list[int]] = {}  # of texts, by their first LENGTH characters
        for text in self._ids:
            lengths = self._lengths.setdefault(text[:LENGTH], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        self._head_lengths = sorted({len(head) for head in self._lengths})
        self._places = re.compile(build_prefix_regex(self._ids))
        self._strips_before, self._strips_after = strips_before, strips_after

    def split(self, text: str) -> list[str | int]:
        """Split a text into strings and ids of special tokens, in order, without empty strings."""
        cuts, position = [], 0
        fragments: list[str | int] = []
        is_taken = bytearray(len(text))
        for _, start, end in sorted(self._find_occurrences(text)):
            if (
                is_taken[start] or is_taken[end - 1]
            ):  # checking both ends suffices, since earlier tokens are not shorter
                continue
            token = self._ids[text[start:end]]
            if token in self._strips_before:
                start = _extend_edge(text, is_taken, start, -1)
            if token in self._strips_after:
                end = _extend_edge(text, is_taken, end, 1)
            is_taken[start:end] = b"\1" * (end - start)
            cuts.append((start, end, token))
        for start, end, token in sorted(cuts):
            fragments += [text[position:start], token] if start > position else [token]
            position = end
        return [*fragments, text[position:]] if position < len(text) else fragments

    def _find_occurrences(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, start, end) of every occurrence, also within other ones."""
        for place in self._places.finditer(text):
            start = place.start() - 1
            for head in self._head_lengths:
                for length in self._lengths.get(text[start : start + head], ()):
                    if (rank := self._ranks.get(text[start : start + length])) is not None:
                        yield rank, start, start + length


def _extend_edge(text: str, is_taken: bytearray, edge: int, step: int) -> int:
    """Return an edge of a token's match moved over white space that belongs to no other token."""
    at = edge if step > 0 else edge - 1
    while 0 <= at < len(text) and text[at] in _WHITE_SPACE and not is_taken[at]:
        at += step
    return at if step > 0 else at + 1


# Characters of a prefix: enough to distinguish <think> from <|im_end|>, few enough that all <unused...> share one.
LENGTH = 8


def build_prefix_regex(strings: Iterable[str]) -> str:
    """Build an expression with an empty match after the first character of each string.

    It tests only the first LENGTH characters, so callers compare the rest. Without strings it matches nothing.
    """
    first_ones = {string[:LENGTH] for string in strings}
    return (
        "|".join(f"(?<={re.escape(first)})(?={_build_tree(rest)})" for first, rest in _group_by_first(first_ones))
        or "(?!)"
    )


def _build_tree(strings: Collection[str]) -> str:
    """Build an expression that matches any of the strings and tests no character twice."""
    if "" in strings:
        return ""
    return "(?:" + "|".join(re.escape(first) + _build_tree(rest) for first, rest in _group_by_first(strings)) + ")"


def _group_by_first(strings: Collection[str]) -> list[tuple[str, set[str]]]:
    """Group strings by their first character: (character, remainders)."""
    rests: dict[str, set[str]] = {}
    for string in strings:
        rests.setdefault(string[0], set()).add(string[1:])
    return sorted(rests.items())


class ChatRenderer(Protocol):
    """Renders conversations like ChatTemplate, whose `tags` it also has."""

    @property
    def tags(self) -> re.Pattern[str]: ...

    def render(self, messages: Sequence[Message], **variables: Any) -> str: ...


class MarkerEscaper:
    """Escapes the texts of a vocabulary's control tokens in messages.

    Control tokens of a single character have no room for a BREAK and are left out.
    """

    def __init__(self, pieces: Iterable[str]) -> None:
        pieces = [piece for piece in pieces if len(piece) > 1]
        self._pieces: dict[str, list[str]] = {}  # by their first two characters
        for piece in pieces:
            self._pieces.setdefault(piece[:2], []).append(piece)
        edges = re.escape("".join(sorted({piece[0] for piece in pieces} | {piece[-1] for piece in pieces})))
        # Templates may change the case of names and types.
        self._heads = re.compile(build_prefix_regex(pieces), re.IGNORECASE)
        self._edges = re.compile(f"(?=[{edges}])|(?<=[{edges}])" if edges else "(?!)", re.IGNORECASE)

    def render(
        self,
        template: ChatRenderer,
        messages: Sequence[Mapping[str, object]],
        reasoning: tuple[str, str] | None = None,
        /,
        **variables: object,
    ) -> str:
        """Render a conversation for Tokenizer.encode_rendered; arguments and errors as in ChatTemplate.render.

        reasoning: tags around reasoning at the beginning of an answer's content, which the template may remove. BREAKs
        hide all other tags in contents from the template.

        A template can still compose a marker from broken text: from two fields, or by removing something from one (as
        Nemotron's does with "/think"). So the conversation is rendered a second time, with a BREAK wherever a marker
        could begin or end. If the second text has fewer markers, a message contributed one, and the second text is
        returned. Otherwise the first is, because the additional BREAKs hide tags such as </think> from templates that
        look for them.
        """
        clean, variables = _change_texts(messages, _remove_breaks), _change_texts(variables, _remove_breaks)
        messages = [_hide_tags(message, template.tags, reasoning) for message in clean]
        changes = self._break_markers, self._break_all_edges
        broken, shattered = (_change_texts([messages, variables], change) for change in changes)
        text = template.render(broken[0], **broken[1])
        if broken == shattered:
            return text
        safe = template.render(shattered[0], **shattered[1])
        pairs = zip_longest(self._find_occurrences(text), self._find_occurrences(safe))
        return text if all(first == second for first, second in pairs) else safe

    def _find_occurrences(self, text: str) -> Iterator[str]:
        """Yield the texts of control tokens that occur in a text, in order."""
        for place in self._heads.finditer(text):
            start = place.start() - 1
            candidates = self._pieces.get(text[start : start + 2], [])
            yield from (piece for piece in candidates if text.startswith(piece, start))

    def _break_markers(self, text: str) -> str:
        """Insert a BREAK into each marker, after its first character."""
        return self._heads.sub(BREAK, text)

    def _break_all_edges(self, text: str) -> str:
        """Insert a BREAK wherever a marker could begin or end, except in identifiers."""
        text = self._break_markers(text)
        if text.isidentifier():
            return text
        text = self._edges.sub(BREAK, text)
        inner = text.strip()
        return text.replace(inner, BREAK + inner + BREAK, 1) if inner else text


def _remove_breaks(text: str) -> str:
    """Replace BREAKs and lone surrogates by U+FFFD."""
    return replace_surrogates(text).replace(BREAK, "�")


REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def _hide_tags(message: Any, tags: re.Pattern[str], reasoning: tuple[str, str] | None) -> Any:
    """Insert BREAKs into the tags in a message's content, so that a template does not split it there.

    Reasoning between its tags at the beginning of an answer stays unchanged.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, str) or not tags.search(content):
        return message
    start = 0
    if reasoning and message.get("role") == "assistant" and not any(map(message.get, REASONING_FIELDS)):
        opens, closes = reasoning
        if content.lstrip().startswith(opens) and (end := content.find(closes, content.find(opens) + len(opens))) >= 0:
            start = end + len(closes)
    return {**message, "content": content[:start] + tags.sub(lambda tag: BREAK.join(tag[0]), content[start:])}


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs, and replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string in a JSON value, except roles and identifiers, which templates compare."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_change_texts(item, change) for item in value]
    if isinstance(value, Mapping):
        return {
            _change_unless_identifier(key, change): _change_unless_identifier(item, change)
            if key == "role"
            else _change_texts(item, change)
            for key, item in value.items()
        }
    return value


def _change_unless_identifier(value: object, change: Callable[[str], str]) -> object:
    return change(value) if isinstance(value, str) and not value.isidentifier() else value
