"""GBNF, llama.cpp's notation for grammars, to the Lark dialect of llguidance.

    root ::= "yes" | "no" reason?     # a rule: texts, [classes], other rules, (groups), * + ? {2} {2,} {2,5}
    reason ::= ", because " [^\\n]{1,80}

The notation: grammars/README.md of llama.cpp; Lark's: docs/syntax.md of llguidance. What has no recursion becomes
terminals, which the lexer follows as regular expressions, and only the rest rules of the parser: that is fast. Between
terminals of a recursive grammar the lexer takes the longest, as lexers do.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from localllm.errors import UsageError
from localllm.frozen import frozen

_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)|(?P<name>[A-Za-z0-9_-]+)|(?P<assign>::=)"""
    r"""|(?P<text>"(?:[^"\\]|\\.)*")|(?P<class>\[(?:[^\]\\]|\\.)*\])"""
    r"""|(?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<mark>[()|.])""",
    re.DOTALL,
)
_CHARACTERS = re.compile(
    r"""\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\([tnr\\"\[\]])|([^\\])""", re.DOTALL
)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r"}


@frozen
class Token:
    """A piece of a grammar's text: which kind, what it says, and in which line."""

    kind: str
    text: str
    line: int


@dataclass
class Expression:
    """Lark for a part of a rule, and the rules that it refers to."""

    lark: str
    rules: set[str] = field(default_factory=set)


def lark_of(text: str) -> str:
    """A grammar in GBNF as Lark. Raises UsageError, with the line."""
    if not isinstance(text, str):
        raise UsageError(f"a grammar should be a text, not {text!r}")
    rules = Parser(text).rules()
    if "root" not in rules:
        raise UsageError("the grammar has no rule named root")
    recursive = _recursive(rules)
    names = {name: f"{'r' if name in recursive else 'T'}_{i}" for i, name in enumerate(rules)}
    lines = [f"{names[name]}: {_named(rule.lark, names)}" for name, rule in rules.items()]
    return "\n".join(["%llguidance {}", f"start: {names['root']}", *lines, ""])


def _named(lark: str, names: dict[str, str]) -> str:
    """With the rules' names in Lark, which tell terminals from others."""
    return re.sub("\0([^\0]+)\0", lambda found: names[found[1]], lark)


def _recursive(rules: dict[str, Expression]) -> set[str]:
    """The rules that lead to themselves, or to one that does."""
    finite: set[str] = set()
    while found := {name for name, rule in rules.items() if name not in finite and rule.rules <= finite}:
        finite |= found
    return rules.keys() - finite


class Parser:
    """Reads a grammar by recursive descent."""

    def __init__(self, text: str):
        self._tokens, self._place = [*_tokens(text)], 0

    def rules(self) -> dict[str, Expression]:
        """All rules by their names. Raises UsageError."""
        rules: dict[str, Expression] = {}
        referred: list[Token] = []
        while self._place < len(self._tokens):
            name = self._take("name", "a rule's name")
            self._take("assign", "::=")
            before = self._place
            rules[name.text] = self._alternatives()
            referred += [token for token in self._tokens[before : self._place] if token.kind == "name"]
        for token in referred:
            if token.text not in rules:
                raise _wrong(token.line, f"there is no rule {token.text!r}")
        return rules

    def _alternatives(self) -> Expression:
        parts = [self._sequence()]
        while self._next("mark", "|"):
            self._place += 1
            parts.append(self._sequence())
        return _joined(parts, " | ")

    def _sequence(self) -> Expression:
        parts = list[Expression]()
        while (part := self._item()) is not None:
            while self._next("repeat"):
                part = Expression(f"({part.lark}){_count(self._take('repeat').text)}", part.rules)
            parts.append(part)
        return _joined(parts, " ") if parts else Expression('""')

    def _item(self) -> Expression | None:
        """A text, class, rule or group; None at the end of a sequence."""
        if self._next("name") and not self._next("assign", ahead=1):
            name = self._take("name").text
            return Expression(f"\0{name}\0", {name})
        if self._next("text"):
            token = self._take("text")
            return Expression(json.dumps("".join(_characters(token, token.text[1:-1])), ensure_ascii=False))
        if self._next("class"):
            return Expression(_class(self._take("class")))
        if self._next("mark", "."):
            self._place += 1
            return Expression("/(?s:.)/")
        if self._next("mark", "("):
            self._place += 1
            inner = self._alternatives()
            self._take("mark", ")")
            return Expression(f"({inner.lark})", inner.rules)
        return None

    def _next(self, kind: str, text: str | None = None, ahead: int = 0) -> bool:
        """Whether such a token comes."""
        if self._place + ahead >= len(self._tokens):
            return False
        token = self._tokens[self._place + ahead]
        return token.kind == kind and text in (None, token.text)

    def _take(self, kind: str, text: str | None = None) -> Token:
        """The next token, which must be of this kind. Raises UsageError."""
        if not self._next(kind, text if kind == "mark" else None):
            found = self._tokens[self._place] if self._place < len(self._tokens) else None
            line = found.line if found else self._tokens[-1].line
            raise _wrong(line, f"expected {text or kind}, found {repr(found.text[:20]) if found else 'the end'}")
        self._place += 1
        return self._tokens[self._place - 1]


def _joined(parts: list[Expression], between: str) -> Expression:
    return Expression(between.join(part.lark for part in parts), set().union(*(part.rules for part in parts)))


def _count(repeat: str) -> str:
    """* + ? as they are, {2} as {2,2}."""
    inner = re.sub(r"\s", "", repeat)
    return f"{{{inner[1:-1]},{inner[1:-1]}}}" if inner[1:-1].isdigit() else inner


def _tokens(text: str) -> Iterator[Token]:
    place = 0
    while place < len(text):
        found = _TOKENS.match(text, place)
        line = text.count("\n", 0, place) + 1
        if found is None:
            raise _wrong(line, f"this cannot be read: {text[place : place + 20].splitlines()[0]!r}")
        if found.lastgroup != "space":
            assert found.lastgroup is not None
            yield Token(found.lastgroup, found[0], line)
        place = found.end()


def _characters(token: Token, text: str) -> Iterator[str]:
    """With escapes resolved."""
    place = 0
    while place < len(text):
        found = _CHARACTERS.match(text, place)
        if found is None:
            raise _wrong(token.line, f"there is no escape {text[place : place + 2]}")
        if digits := found[1] or found[2] or found[3]:
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise _wrong(token.line, f"there is no character {found[0]}")
            yield chr(code)
        else:
            yield found[5] or _ESCAPES.get(found[4], found[4])
        place = found.end()


def _class(token: Token) -> str:
    """A class of characters as a regular expression."""
    body = token.text[1:-1]
    negated = body.startswith("^")
    body = body[negated:]
    parts, place = list[str](), 0
    pieces = [(found.start(), found[0]) for found in _CHARACTERS.finditer(body)]
    characters = [*_characters(token, body)]
    while place < len(characters):
        if place + 2 < len(characters) and pieces[place + 1][1] == "-":
            first, last, place = characters[place], characters[place + 2], place + 3
            if first > last:
                raise _wrong(token.line, f"the range {first}-{last} runs backwards")
        else:
            first, last, place = characters[place], characters[place], place + 1
        parts.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
    if not parts:
        raise _wrong(token.line, "a class of characters is empty")
    return f"/[{'^' if negated else ''}{''.join(parts)}]/"


def _wrong(line: int, problem: str) -> UsageError:
    return UsageError(f"the grammar is invalid in line {line}: {problem}")
