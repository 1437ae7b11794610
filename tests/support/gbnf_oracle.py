"""An independent implementation of GBNF: random sentences, and Earley's algorithm over characters.

Nothing is shared with localllm. Repetitions are expanded into rules, as llama.cpp does.
"""

import random
from dataclasses import dataclass, field

LAST = 0x10FFFF


@dataclass(frozen=True)
class Terminal:
    """One character in these ranges, or outside them."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False

    def has(self, code: int) -> bool:
        return any(first <= code <= last for first, last in self.ranges) != self.is_negated

    def meets(self, low: int, high: int) -> bool:
        """Return whether it matches a character from low to high that is no surrogate."""
        edges = {
            low,
            high,
            *(edge + step for pair in self.ranges for edge in pair for step in (-1, 0, 1)),
            0xD7FF,
            0xE000,
        }
        return any(self.has(code) for code in edges if low <= code <= high and not 0xD800 <= code <= 0xDFFF)


Production = tuple  # of Terminals and rules' names


@dataclass
class Grammar:
    """Rules without repetitions."""

    text: str
    rules: dict[str, list[Production]] = field(default_factory=dict)

    def __post_init__(self):
        self._at = 0
        self._space(True)
        while self._at < len(self.text):
            name = self._name()
            self._space(False)
            assert self.text.startswith("::=", self._at)
            self._at += 3
            self._space(True)
            self.rules[name] = self._alternatives(name, False)
            self._space(True)
        self.shortest: dict[str, int] = dict.fromkeys(self.rules, 10**6)
        for _ in self.rules:
            for name, productions in self.rules.items():
                self.shortest[name] = min(self.shortest[name], *map(self.length, productions))

    def length(self, production: Production) -> int:
        return sum(1 if isinstance(part, Terminal) else self.shortest[part] + 1 for part in production)

    # ---- reading

    def _space(self, lines: bool):
        while self._at < len(self.text) and (char := self.text[self._at]) in " \t#" + "\r\n" * lines:
            self._at = self.text.find("\n", self._at) % (len(self.text) + 1) if char == "#" else self._at + 1

    def _name(self) -> str:
        start = self._at
        while self._at < len(self.text) and (self.text[self._at].isalnum() or self.text[self._at] == "-"):
            self._at += 1
        assert self._at > start, self.text[start:]
        return self.text[start : self._at]

    def _alternatives(self, name: str, nested: bool) -> list[Production]:
        productions = [self._sequence(name, nested)]
        while self.text.startswith("|", self._at):
            self._at += 1
            self._space(True)
            productions.append(self._sequence(name, nested))
        return productions

    def _new(self, name: str, productions: list[Production]) -> str:
        self.rules[new_name := f"{name}_{len(self.rules)}"] = productions
        return new_name

    def _sequence(self, name: str, nested: bool) -> Production:
        parts: list[Production] = []
        while self._at < len(self.text) and (char := self.text[self._at]) not in "|)\r\n":
            self._at += 1
            if char == '"':
                codes = []
                while self.text[self._at] != '"':
                    codes.append(self._char())
                self._at += 1
                parts.append(tuple(Terminal(((code, code),)) for code in codes))
            elif char == "[":
                parts.append((self._set(),))
            elif char == ".":
                parts.append((Terminal((), True),))
            elif char == "(":
                self._space(True)
                parts.append((self._new(name, self._alternatives(name, True)),))
                assert self.text[self._at] == ")"
                self._at += 1
            elif char in "*+?{":
                parts.append(self._repeated(name, parts.pop(), char))
            else:
                self._at -= 1
                parts.append((self._name(),))
            self._space(nested)
        return tuple(part for production in parts for part in production)

    def _repeated(self, name: str, item: Production, char: str) -> Production:
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1), "{": (0, 0)}[char]
        if char == "{":
            inside = self.text[self._at : self.text.index("}", self._at)]
            self._at += len(inside) + 1
            first, comma, second = inside.partition(",")
            least = int(first)
            most = (int(second) if second.strip() else None) if comma else least
        rest: Production = ()
        if most is None:
            again = self._new(name, [()])
            self.rules[again] = [(*item, again), ()]
            rest = (again,)
        else:
            for _ in range(most - least):
                rest = (self._new(name, [(*item, *rest), ()]),)
        return item * least + rest

    def _set(self) -> Terminal:
        is_negated = self.text[self._at] == "^"
        self._at += is_negated
        ranges = []
        while self.text[self._at] != "]":
            first = last = self._char()
            if self.text[self._at] == "-" and self.text[self._at + 1] != "]":
                self._at += 1
                last = self._char()
            ranges.append((first, last))
        self._at += 1
        return Terminal(tuple(ranges), is_negated)

    def _char(self) -> int:
        char = self.text[self._at]
        self._at += 1
        if char != "\\":
            return ord(char)
        char = self.text[self._at]
        self._at += 1
        if char in "xuU":
            size = {"x": 2, "u": 4, "U": 8}[char]
            self._at += size
            return int(self.text[self._at - size : self._at], 16)
        return ord({"n": "\n", "t": "\t", "r": "\r"}.get(char, char))

    # ---- sentences

    def sentence(self, rng: random.Random, name: str = "root", room: int = 60) -> str:
        """Return a random sentence; once `room` is used up, the shortest that remains."""
        text, stack = "", [name]
        while stack:
            part = stack.pop()
            if isinstance(part, Terminal):
                text += self._draw(part, rng)
                continue
            productions = self.rules[part]
            if len(text) + len(stack) > room:
                least = min(map(self.length, productions))
                productions = [each for each in productions if self.length(each) == least]
            stack += reversed(rng.choice(productions))
        return text

    def _draw(self, terminal: Terminal, rng: random.Random) -> str:
        pool = "ab z09_,;:()[]{}\"\\'+-*/=<>\n\té€漢😀\x00\x7f߿ࠀ\U0010ffff"
        if terminal.is_negated:
            return rng.choice([char for char in pool if terminal.has(ord(char))])
        first, last = rng.choice(terminal.ranges)
        return chr(rng.choice([first, last, rng.randint(first, last)]))


class Chart:
    """Earley's sets for a text that arrives character by character."""

    def __init__(self, grammar: Grammar):
        self.rules = grammar.rules
        self.empty: set[str] = set()
        while more := {name for name, productions in self.rules.items() if name not in self.empty
                       and any(all(part in self.empty for part in each) for each in productions)}:  # fmt: skip
            self.empty |= more
        self.sets = [self._closed([("", ("root",), 0, 0)], 0)]

    def _closed(self, todo: list, place: int) -> dict:
        items: dict = dict.fromkeys(todo)
        here = [*todo]
        while here:
            name, production, dot, origin = here.pop()
            new = []
            if dot == len(production):
                others = list(items if origin == place else self.sets[origin])
                waiting = (other for other in others if other[2] < len(other[1]) and other[1][other[2]] == name)
                new += [(other[0], other[1], other[2] + 1, other[3]) for other in waiting]
            elif not isinstance(part := production[dot], Terminal):
                new += [(part, each, 0, place) for each in self.rules[part]]
                if part in self.empty:
                    new.append((name, production, dot + 1, origin))
            for item in new:
                if item not in items:
                    items[item] = None
                    here.append(item)
        return items

    def terminals(self) -> dict:
        return {item: item[1][item[2]] for item in self.sets[-1]
                if item[2] < len(item[1]) and isinstance(item[1][item[2]], Terminal)}  # fmt: skip

    def push(self, char: str) -> bool:
        """Add a character and return True; return False and change nothing if it is not allowed."""
        behind = [(item[0], item[1], item[2] + 1, item[3])
                  for item, terminal in self.terminals().items() if terminal.has(ord(char))]  # fmt: skip
        if behind:
            self.sets.append(self._closed(behind, len(self.sets)))
        return bool(behind)

    def pop(self):
        self.sets.pop()

    @property
    def is_whole(self) -> bool:
        return ("", ("root",), 1, 0) in self.sets[-1]

    def takes(self, data: bytes) -> bool:
        """Return whether these bytes may follow, the last of which may begin a character."""
        text = data.decode(errors="surrogateescape")
        pushed, is_fine = 0, True
        for place, char in enumerate(text):
            if 0xDC80 <= ord(char) <= 0xDCFF:
                rest = text[place:].encode(errors="surrogateescape")
                is_fine = any(
                    terminal.meets(low, high) for low, high in begun(rest) for terminal in self.terminals().values()
                )
                break
            if not self.push(char):
                is_fine = False
                break
            pushed += 1
        for _ in range(pushed):
            self.pop()
        return is_fine


def begun(data: bytes) -> list[tuple[int, int]]:
    """Return the range of characters that begin with these bytes, if any."""
    lead, *others = data
    for length, mark, bits in ((2, 0xC0, 5), (3, 0xE0, 4), (4, 0xF0, 3)):
        if lead >> bits == mark >> bits and len(others) < length - 1 and all(byte >> 6 == 2 for byte in others):
            value = lead & (1 << bits) - 1
            for byte in others:
                value = value << 6 | byte & 63
            shift = 6 * (length - 1 - len(others))
            low, high = value << shift, (value + 1 << shift) - 1
            low, high = max(low, {2: 0x80, 3: 0x800, 4: 0x10000}[length]), min(high, LAST)
            return [(low, high)] if low <= high else []
    return []
