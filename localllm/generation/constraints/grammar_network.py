"""Build recursive transition networks from grammars, one for each rule (W. Woods, 1970).

Source: Transition network grammars for natural language analysis. States have arcs that read a character or token, or
enter a rule. Arcs that no finished text uses are removed. Characters are matched byte by byte in UTF-8.
"""

import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import cache, lru_cache
from time import perf_counter
from typing import NamedTuple, TypeAlias

from localllm.errors import UsageError
from localllm.generation.constraints.gbnf import (
    Alternatives,
    CharacterSet,
    Concatenation,
    Expression,
    Repeat,
    RuleReference,
    VocabularyToken,
    parse_grammar,
)

Ranges = tuple[tuple[int, int], ...]
DEAD, READ = 0, 1  # states: no character of the set matches, or one is complete
_LENGTHS = ((0, 0x7F, 0x00), (0x80, 0x7FF, 0xC0), (0x800, 0xFFFF, 0xE0), (0x10000, 0x10FFFF, 0xF0))
_SURROGATES = (0xD800, 0xDFFF)


class Utf8Automata:
    """The automata that match the characters of sets in UTF-8.

    Attributes:
        steps: for each state, the next state by byte; DEAD for all other bytes.
    """

    def __init__(self) -> None:
        self.steps: list[dict[int, int]] = [{}, {}]
        self._states: dict[tuple[int, Ranges], int] = {}
        self.start_of = cache(self._add_start)  # of ranges

    def _add_start(self, ranges: Ranges) -> int:
        """Return the start state of a set of ranges; DEAD for an empty set."""
        steps: dict[int, int] = {}
        merged = _normalize(ranges)
        for continuations, (low, high, lead) in enumerate(_LENGTHS):
            inside = _intersect(merged, low, high)
            steps |= self._split_range(inside, continuations, lead)
        return self._add(steps)

    def _split_range(self, ranges: Ranges, continuations: int, lead: int) -> dict[int, int]:
        """Return the next states by the first byte of characters of 1 + `continuations` bytes.

        lead: the first byte without the bits of the code point.
        """
        size, steps = 64**continuations, dict[int, int]()
        for block in {block for first, last in ranges for block in range(first // size, last // size + 1)}:
            remainders = tuple((a - block * size, b - block * size)
                         for a, b in _intersect(ranges, block * size, (block + 1) * size - 1))  # fmt: skip
            steps[lead + block] = self._add_continuation(continuations, remainders)
        return steps

    def _add_continuation(self, continuations: int, ranges: Ranges) -> int:
        """Return the state that expects this many continuation bytes."""
        if continuations == 0:
            return READ
        if (continuations, ranges) not in self._states:
            self._states[continuations, ranges] = self._add(self._split_range(ranges, continuations - 1, 0x80))
        return self._states[continuations, ranges]

    def _add(self, steps: dict[int, int]) -> int:
        """Add a state with these steps; return DEAD if it has none."""
        if not steps:
            return DEAD
        self.steps.append(steps)
        return len(self.steps) - 1


def _intersect(ranges: Iterable[tuple[int, int]], low: int, high: int) -> Ranges:
    """Return the parts of ranges from `low` to `high`."""
    return tuple((max(a, low), min(b, high)) for a, b in ranges if a <= high and b >= low)


def _normalize(ranges: Ranges) -> Ranges:
    """Sort and merge ranges, and remove surrogates, which UTF-8 cannot encode."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return _intersect(merged, 0, _SURROGATES[0] - 1) + _intersect(merged, _SURROGATES[1] + 1, 0x10FFFF)


MAX_STATES = 200_000  # take 0.5 s and 100 MB; the grammar of JSON has 60
MAX_SECONDS = 30.0  # for each of three steps of building
_KEPT = 64  # grammars


class ArcType(Enum):
    """The type of a transition between states: empty, a character, a token, or a whole rule."""

    SKIP = auto()
    READ = auto()
    TOKEN = auto()
    ENTER = auto()


class Arc(NamedTuple):
    """A transition to another state.

    Attributes:
        what: state of Utf8Automata (READ), index of the token (TOKEN) or rule (ENTER).  target: the next state.
    """

    kind: ArcType
    what: int
    target: int


class StateClosure:
    """The arcs of a state and of all states that it reaches by SKIP arcs.

    Compared by identity.

    Attributes:
        rule: rule of the state.  arcs: all arcs but SKIP.  reads: (state of Utf8Automata, next state).
        tokens: (index of the token, next state).  enters: (rule, next state).
        ends: whether the rule may end at the state.
    """

    __slots__ = ("arcs", "ends", "enters", "reads", "rule", "tokens")

    def __init__(self, rule: int, arcs: frozenset[Arc], ends: bool):
        self.arcs = arcs
        ways = {kind: tuple({(arc.what, arc.target): None for arc in arcs if arc.kind is kind}) for kind in ArcType}
        self.rule, self.ends = rule, ends
        self.reads, self.tokens, self.enters = ways[ArcType.READ], ways[ArcType.TOKEN], ways[ArcType.ENTER]

    @property
    def has_arcs(self) -> bool:
        """Return whether any arc leaves the state."""
        return bool(self.reads or self.tokens or self.enters)


_Usable: TypeAlias = Callable[[Arc], bool]


class GrammarNetwork:
    """The states of the rules of a grammar; closures are computed when they are needed.

    Attributes:
        characters: automata of the character sets.  vocabulary_tokens: by index.  root: the start rule.
        root_is_empty: whether the grammar accepts the empty text.
    """

    def __init__(self, rules: Mapping[str, Expression]):
        """Build the network. Raises UsageError for a grammar that is too large or matches no text."""
        self.characters = Utf8Automata()
        self.vocabulary_tokens: list[VocabularyToken] = []
        self._arcs: list[list[Arc]] = []
        self._rule_of: list[int] = []
        self.starts: list[int] = []
        self._ends: list[int] = []
        self._pending: list[Expression] = [*rules.values()]  # by the rules' numbers
        self._names = {name: number for number, name in enumerate(rules)}
        self._number_of = cache(self._add_rule)  # of a repeated expression, which becomes an unnamed rule
        while len(self.starts) < len(self._pending):
            self._build_rule(len(self.starts))
        self.root = self._names["root"]
        self._remove_useless()
        self._shared: dict[tuple[int, frozenset[Arc], bool], StateClosure] = {}
        self.find_closure = cache(self._find_closure)  # of a state
        self.merge = cache(self._merge)  # of closures
        self.find_entered = cache(self._find_entered)  # of a rule

    # ---- building

    def _add_rule(self, expression: Expression) -> int:
        """Queue a rule to be built; return its number."""
        self._pending.append(expression)
        return len(self._pending) - 1

    def _build_rule(self, rule: int) -> None:
        self._rule = rule
        self.starts.append(self._add_state())
        self._ends.append(self._build(self._pending[rule], self.starts[rule]))

    def _add_state(self) -> int:
        """Add a state of the current rule; return its number. Raises UsageError for too many states."""
        if len(self._arcs) >= MAX_STATES:
            raise UsageError("the grammar is too large: use smaller repetition counts")
        self._arcs.append([])
        self._rule_of.append(self._rule)
        return len(self._arcs) - 1

    def _add_arc(self, start: int, kind: ArcType, target: int, end: int | None = None) -> int:
        """Add an arc to the state `end` (None: a new state); return that state."""
        end = self._add_state() if end is None else end
        self._arcs[start].append(Arc(kind, target, end))
        return end

    def _build(self, expression: Expression, start: int) -> int:
        """Add the states of an expression after `start`; return its last state.

        No arc leads back to `start`.
        """
        match expression:
            case CharacterSet(ranges=ranges):
                return self._add_arc(start, ArcType.READ, self.characters.start_of(ranges))
            case VocabularyToken():
                self.vocabulary_tokens.append(expression)
                return self._add_arc(start, ArcType.TOKEN, len(self.vocabulary_tokens) - 1)
            case RuleReference(rule=rule):
                return self._add_arc(start, ArcType.ENTER, self._names[rule])
            case Concatenation(items=items):
                for item in items:
                    start = self._build(item, start)
                return start
            case Alternatives(alternatives=alternatives):
                end = self._add_state()
                for alternative in alternatives:
                    self._add_arc(self._build(alternative, start), ArcType.SKIP, 0, end)
                return end
            case Repeat():
                return self._build_repeat(expression, start)

    def _build_repeat(self, repeat: Repeat, start: int) -> int:
        """Add a repeated item after `start`; return its last state.

        A complex item becomes a rule without a name, so that its states exist once.
        """
        item, minimum, maximum = repeat.item, repeat.least, repeat.most
        copies = maximum if maximum is not None else minimum + 1
        is_rule = copies > 2 and not isinstance(item, CharacterSet | VocabularyToken | RuleReference)

        def once(at: int) -> int:
            return self._add_arc(at, ArcType.ENTER, self._number_of(item)) if is_rule else self._build(item, at)

        for _ in range(minimum):
            start = once(start)
        if maximum is None:
            loop = self._add_arc(start, ArcType.SKIP, 0)
            self._add_arc(once(loop), ArcType.SKIP, 0, loop)
            return loop
        end = self._add_state()
        for _ in range(maximum - minimum):
            self._add_arc(start, ArcType.SKIP, 0, end)
            start = once(start)
        return self._add_arc(start, ArcType.SKIP, 0, end)

    # ---- removal of useless arcs

    def _remove_useless(self) -> None:
        """Remove arcs that no finished text uses; rules that match only the empty text become SKIP arcs.

        Raises UsageError if the grammar matches no text.
        """
        callers: list[set[int]] = [set() for _ in self.starts]
        for state, arcs in enumerate(self._arcs):
            for arc in arcs:
                if arc.kind is ArcType.ENTER:
                    callers[arc.what].add(self._rule_of[state])
        finite = _compute_fixpoint(lambda rule, known: self._ends[rule] in self._collect_reachable(
            rule,
            lambda arc: arc.what in known
            if arc.kind is ArcType.ENTER
            else arc.kind is ArcType.SKIP or arc.what != DEAD
            or arc.kind is ArcType.TOKEN), callers)  # fmt: skip
        if self.root not in finite:
            raise UsageError("the grammar cannot be used: it matches no text; give root an alternative that ends")
        self._remove_arcs(lambda arc: arc.kind is ArcType.ENTER and arc.what not in finite)
        self._remove_arcs(lambda arc: arc.kind is ArcType.READ and arc.what == DEAD)
        ending = self._find_ending()
        self._remove_arcs(lambda arc: arc.target not in ending)
        empty = _compute_fixpoint(lambda rule, known: self._ends[rule] in self._collect_reachable(
            rule, lambda arc: arc.kind is ArcType.SKIP or (arc.kind is ArcType.ENTER and arc.what in known),
        ), callers)  # fmt: skip
        nonempty = _compute_fixpoint(lambda rule, known: any(
            arc.kind in (ArcType.READ, ArcType.TOKEN) or (arc.kind is ArcType.ENTER and arc.what in known)
            for state in self._collect_reachable(rule, lambda arc: True) for arc in self._arcs[state]),
            callers)  # fmt: skip
        for state, arcs in enumerate(self._arcs):
            entered = [arc for arc in arcs if arc.kind is ArcType.ENTER]
            skips = [Arc(ArcType.SKIP, 0, arc.target) for arc in entered if arc.what in empty]
            self._arcs[state] = [arc for arc in arcs if arc.kind is not ArcType.ENTER or arc.what in nonempty] + skips
        self.root_is_empty = self.root in empty

    def _collect_reachable(self, rule: int, usable: "_Usable") -> set[int]:
        """Return the states of a rule that usable arcs reach from its start."""
        reached, todo = {self.starts[rule]}, [self.starts[rule]]
        while todo:
            for arc in self._arcs[todo.pop()]:
                if arc.target not in reached and usable(arc):
                    reached.add(arc.target)
                    todo.append(arc.target)
        return reached

    def _find_ending(self) -> set[int]:
        """Return the states from which the end of their rule can be reached."""
        sources: list[list[int]] = [[] for _ in self._arcs]
        for state, arcs in enumerate(self._arcs):
            for arc in arcs:
                sources[arc.target].append(state)
        ending, todo = {*self._ends}, [*self._ends]
        while todo:
            added = {*sources[todo.pop()]} - ending
            ending |= added
            todo += added
        return ending

    def _remove_arcs(self, useless: "_Usable") -> None:
        """Remove the arcs for which `useless` is true."""
        for state, arcs in enumerate(self._arcs):
            self._arcs[state] = [arc for arc in arcs if not useless(arc)]

    # ---- closures

    def _find_closure(self, state: int) -> StateClosure:
        """Compute the closure of a state; states of a rule with equal closures share one object."""
        reached, todo = {state}, [state]
        arcs: set[Arc] = set()
        while todo:
            for arc in self._arcs[todo.pop()]:
                if arc.kind is not ArcType.SKIP:
                    arcs.add(arc)
                elif arc.target not in reached:
                    reached.add(arc.target)
                    todo.append(arc.target)
        rule = self._rule_of[state]
        return self._get_closure(rule, frozenset(arcs), self._ends[rule] in reached)

    def _get_closure(self, rule: int, arcs: frozenset[Arc], ends: bool) -> StateClosure:
        """Return the closure with these arcs, a shared one if it exists."""
        if closure := self._shared.get((rule, arcs, ends)):
            return closure
        return self._shared.setdefault((rule, arcs, ends), StateClosure(rule, arcs, ends))  # threads share the network

    def _merge(self, closures: frozenset[StateClosure]) -> StateClosure:
        """Return the union of several closures of a rule.

        `ends` is False, because the caller handles the end of the rule.
        """
        rule = next(iter(closures)).rule
        return self._get_closure(rule, frozenset[Arc]().union(*(closure.arcs for closure in closures)), False)

    def find_start(self, rule: int) -> StateClosure:
        """Return the closure of the start state of a rule."""
        return self.find_closure(self.starts[rule])

    def _find_entered(self, rule: int) -> frozenset[int]:
        """Return a rule and all rules with which it can begin, directly or indirectly."""
        entered, todo = {rule}, [rule]
        while todo:
            added = {each for each, _ in self.find_start(todo.pop()).enters} - entered
            entered |= added
            todo += added
        return frozenset(entered)


def _compute_fixpoint(belongs: Callable[[int, set[int]], bool], callers: Sequence[Collection[int]]) -> set[int]:
    """Compute the smallest set of rules that is closed under `belongs`.

    belongs: whether a rule is in the set, depending on the rules that it enters. callers: for each rule, the rules that
    enter it. Raises UsageError if it takes longer than MAX_SECONDS.
    """
    members, end = set[int](), perf_counter() + MAX_SECONDS
    waiting = dict.fromkeys(range(len(callers)))  # rules usually come before those that they refer to
    while waiting:
        if perf_counter() > end:
            raise UsageError("the grammar takes too long to compile: use fewer rules that refer to each other")
        rule, _ = waiting.popitem()
        if rule not in members and belongs(rule, members):
            members.add(rule)
            waiting |= dict.fromkeys(caller for caller in callers[rule] if caller not in members)
    return members


@lru_cache(_KEPT)
def build_network(grammar: str) -> GrammarNetwork:
    """Return the network of a grammar in GBNF, built or from the cache.

    Raises UsageError for an invalid grammar.
    """
    try:
        with yield_to_threads():
            return GrammarNetwork(parse_grammar(grammar))
    except RecursionError:
        raise UsageError("the grammar is invalid: its groups are nested too deeply") from None


_LOCK = threading.Lock()
_PATIENCE = 0.0005  # seconds that other threads wait for the interpreter, each time; Python's default is ten times that
_count, _usual = 0, (True, 0.005)


@contextmanager
def yield_to_threads() -> Iterator[None]:
    """Let other Python threads run often, and pause the garbage collector.

    A collection would stop them for up to a second if the grammar is large.
    """
    global _count, _usual
    with _LOCK:
        if not _count:
            _usual = gc.isenabled(), sys.getswitchinterval()
            gc.disable()
            sys.setswitchinterval(_PATIENCE)
        _count += 1
    try:
        yield
    finally:
        with _LOCK:
            _count -= 1
            if not _count:
                sys.setswitchinterval(_usual[1])
                if _usual[0]:
                    gc.enable()
