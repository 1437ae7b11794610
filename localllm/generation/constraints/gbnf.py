r"""Parse grammars in GBNF, llama.cpp's notation, to expressions.

    root ::= "yes" | "no" reason?     # a rule: strings, [classes], other rules, (groups), * + ? {2} {2,} {2,5}
    reason ::= ", because " [^\n]{1,80}

The notation: grammars/README.md and src/llama-grammar.cpp of llama.cpp. Grammars that llama.cpp accepts have the same
meaning. Additionally, line breaks within rules, `_` in names, left recursion, and repetitions above 2000 are allowed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from localllm.errors import UsageError
from localllm.frozen import frozen

_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)|(?P<name>[A-Za-z0-9_-]+)|(?P<assign>::=)"""
    r"""|(?P<text>"(?:[^"\\]|\\.)*")|(?P<class>\[(?:[^\]\\]|\\.)*\])|(?P<token>!?<[^>]*>)"""
    r"""|(?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<mark>[()|.])""",
    re.DOTALL,
)
_CHARACTERS = re.compile(
    r"""\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\([tnr\\"\[\]-])|([^\\])""", re.DOTALL
)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r"}
_MAX_CODE_POINT = 0x10FFFF
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@frozen
class CharacterSet:
    """One character of a set.

    Attributes:
        ranges: ranges of code points, including both ends.
    """

    ranges: tuple[tuple[int, int], ...]


@frozen
class VocabularyToken:
    """One token of the vocabulary, `<think>` or `<[1000]>`; if `is_negated`, any other token.

    Attributes:
        text: as in the grammar, with brackets.  line: line number from 1.
    """

    text: str
    is_negated: bool
    line: int


@frozen
class RuleReference:
    rule: str


@frozen
class Concatenation:
    """Expressions that match one after the other."""

    items: "tuple[Expression, ...]"


@frozen
class Alternatives:
    """Expressions of which one matches."""

    alternatives: "tuple[Expression, ...]"


@frozen
class Repeat:
    """An expression that matches from `least` to `most` times.

    Attributes:
        most: None without a limit.
    """

    item: "Expression"
    least: int
    most: int | None


Expression: TypeAlias = CharacterSet | VocabularyToken | RuleReference | Concatenation | Alternatives | Repeat


@frozen
class GrammarToken:
    """A lexical token of a grammar.

    Attributes:
        kind: name of its group in _TOKENS.  line: line number from 1.
    """

    kind: str
    text: str
    line: int


def parse_grammar(text: str) -> Mapping[str, Expression]:
    """Parse a grammar in GBNF to its rules by name, of which one is root.

    Raises UsageError, with the line number, for an invalid grammar.
    """
    if not isinstance(text, str):
        raise UsageError(f"a grammar must be a string, not {text!r:.60}")
    try:
        rules = GrammarParser(text.removeprefix("\ufeff")).parse_rules()
    except RecursionError:
        raise UsageError("the grammar is invalid: its groups are nested too deeply") from None
    if "root" not in rules:
        raise UsageError("the grammar has no rule named root: add one, the rule that the whole answer matches")
    return rules


def make_grammar_error(line: int, problem: str) -> UsageError:
    """Return the error for a problem in a line of the grammar."""
    return UsageError(f"the grammar is invalid in line {line}: {problem}")


class GrammarParser:
    """Recursive-descent parser of a grammar."""

    def __init__(self, text: str):
        self._tokens, self._place = [*_tokenize(text)], 0

    def parse_rules(self) -> dict[str, Expression]:
        """Parse all rules; return them by name, the last of several with the same name. Raises UsageError."""
        rules: dict[str, Expression] = {}
        references: list[GrammarToken] = []
        while self._place < len(self._tokens):
            if self._is_next("repeat"):
                token = self._tokens[self._place]
                raise make_grammar_error(token.line, f"{token.text} must follow the item that it repeats")
            name = self._consume("name", "a rule's name")
            self._consume("assign", "::=")
            begin = self._place
            rules[name.text] = self._parse_alternatives()
            references += [token for token in self._tokens[begin : self._place] if token.kind == "name"]
        for token in references:
            if token.text not in rules:
                raise make_grammar_error(token.line, f"there is no rule {token.text!r}")
        return rules

    def _parse_alternatives(self) -> Expression:
        parts = [self._parse_sequence()]
        while self._is_next("mark", "|"):
            self._place += 1
            parts.append(self._parse_sequence())
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def _parse_sequence(self) -> Expression:
        parts = list[Expression]()
        while (part := self._parse_item()) is not None:
            while self._is_next("repeat"):
                part = Repeat(part, *_parse_count(self._consume("repeat")))
            parts.append(part)
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _parse_item(self) -> Expression | None:
        """Parse a string, class, rule name, token or group; return None at the end of a sequence."""
        if self._is_next("name") and not self._is_next("assign", ahead=1):
            return RuleReference(self._consume("name").text)
        if self._is_next("text"):
            token = self._consume("text")
            codes = [*map(ord, _unescape(token, token.text[1:-1]))]
            if any(0xD800 <= code < 0xE000 for code in codes):
                raise make_grammar_error(token.line, "a string must not contain surrogates, \\uD800 to \\uDFFF")
            return Concatenation(tuple(CharacterSet(((code, code),)) for code in codes))
        if self._is_next("class"):
            return _parse_class(self._consume("class"))
        if self._is_next("token"):
            return _parse_vocabulary_token(self._consume("token"))
        if self._is_next("mark", "."):
            self._place += 1
            return CharacterSet(((0, _MAX_CODE_POINT),))
        if self._is_next("mark", "("):
            self._place += 1
            inner = self._parse_alternatives()
            self._consume("mark", ")")
            return inner
        return None

    def _is_next(self, kind: str, text: str | None = None, ahead: int = 0) -> bool:
        """Return whether the next token, or the one `ahead` tokens later, has this type and text."""
        if self._place + ahead >= len(self._tokens):
            return False
        token = self._tokens[self._place + ahead]
        return token.kind == kind and text in (None, token.text)

    def _consume(self, kind: str, text: str | None = None) -> GrammarToken:
        """Return the next token and advance. Raises UsageError if it does not have this type and text."""
        if not self._is_next(kind, text if kind == "mark" else None):
            token = self._tokens[self._place] if self._place < len(self._tokens) else None
            line = token.line if token else self._tokens[-1].line
            raise make_grammar_error(
                line, f"expected {text or kind}, found {repr(token.text[:20]) if token else 'the end'}"
            )
        self._place += 1
        return self._tokens[self._place - 1]


def _parse_count(repeat: GrammarToken) -> tuple[int, int | None]:
    """Return the minimum and maximum number of repetitions (None: no limit).

    Raises UsageError if the maximum is below the minimum.
    """
    if repeat.text in _COUNTS:
        return _COUNTS[repeat.text]
    minimum, comma, maximum = re.sub(r"\s", "", repeat.text)[1:-1].partition(",")
    if maximum and int(maximum) < int(minimum):
        raise make_grammar_error(repeat.line, f"the maximum of {repeat.text} must not be below its minimum")
    return int(minimum), (int(maximum) if maximum else None) if comma else int(minimum)


def _tokenize(text: str) -> Iterator[GrammarToken]:
    """Yield the lexical tokens of a grammar. Raises UsageError at an unexpected character."""
    place, line = 0, 1
    while place < len(text):
        match = _TOKENS.match(text, place)
        if match is None:
            raise make_grammar_error(line, f"unexpected {text[place : place + 20].splitlines()[0]!r}")
        if match.lastgroup != "space":
            assert match.lastgroup is not None
            yield GrammarToken(match.lastgroup, match[0], line)
        place, line = match.end(), line + match[0].count("\n")


def _unescape(token: GrammarToken, text: str) -> Iterator[str]:
    """Yield the characters of a string or class, with escapes resolved. Raises UsageError for an unknown escape."""
    place = 0
    while place < len(text):
        match = _CHARACTERS.match(text, place)
        if match is None:
            raise make_grammar_error(token.line, f"there is no escape {text[place : place + 2]}")
        if digits := match[1] or match[2] or match[3]:
            code = int(digits, 16)
            if code > _MAX_CODE_POINT:
                raise make_grammar_error(token.line, f"there is no character {match[0]}")
            yield chr(code)
        else:
            yield match[5] or _ESCAPES.get(match[4], match[4])
        place = match.end()


def _parse_class(token: GrammarToken) -> CharacterSet:
    """Parse a character class such as [^a-z]. Raises UsageError."""
    body = token.text[1:-1]
    is_negated = body.startswith("^")
    body = body[is_negated:]
    ranges, place = list[tuple[int, int]](), 0
    characters = [*_unescape(token, body)]
    pieces = [match[0] for match in _CHARACTERS.finditer(body)]
    while place < len(characters):
        first = last = characters[place]
        if place + 2 < len(characters) and pieces[place + 1] == "-":
            last, place = characters[place + 2], place + 2
            if first > last:
                raise make_grammar_error(token.line, f"the range {pieces[place - 2]}-{pieces[place]} runs backwards")
        ranges.append((ord(first), ord(last)))
        place += 1
    if not ranges:
        raise make_grammar_error(token.line, "a character class must not be empty")
    return CharacterSet(_invert_ranges(ranges) if is_negated else tuple(ranges))


def _invert_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of all other characters."""
    inverted, start = list[tuple[int, int]](), 0
    for first, last in sorted(ranges):
        if start < first:
            inverted.append((start, first - 1))
        start = max(start, last + 1)
    return (*inverted, (start, _MAX_CODE_POINT)) if start <= _MAX_CODE_POINT else tuple(inverted)


def _parse_vocabulary_token(token: GrammarToken) -> VocabularyToken:
    """Parse a vocabulary token: <text> or <[id]>, with an optional ! before it. Raises UsageError."""
    text = token.text.removeprefix("!")
    if text.startswith("<[") and not re.fullmatch(r"<\[\d+\]>", text):
        raise make_grammar_error(token.line, f"{text} must contain a token id, like <[1000]>")
    return VocabularyToken(text, token.text.startswith("!"), token.line)
