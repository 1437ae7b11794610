"""Grammars as networks of states: each state's characters, rules to enter, and next states.

Recursive transition networks, one for each rule (W. Woods, Transition network grammars for natural language analysis,
1970). Only what can be part of a finished text is kept.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

from localllm.errors import UsageError
from localllm.generation.constraints.gbnf import (
    Alternatives,
    Characters,
    Concatenation,
    Expression,
    Repeat,
    RuleReference,
    VocabularyToken,
    parse_grammar,
)
from localllm.generation.constraints.utf8_automaton import DEAD, Utf8Automata

MOST_STATES = 200_000  # 0.5 s and 100 MB; JSON has 60
_KEPT = 64  # grammars


class Kind(Enum):
    """Kinds of arcs between states: empty, a character, a token, or a whole rule."""

    SKIP = auto()
    READ = auto()
    TOKEN = auto()
    ENTER = auto()


class Arc(NamedTuple):
    """A transition to another state; what: READ's state of Utf8Automata, TOKEN's number or ENTER's rule."""

    kind: Kind
    what: int
    target: int


class Closure:
    """The arcs of a state and of all states that it reaches without reading. Compared by identity.

    Attributes:
        rule: whose it is.  arcs: all.  reads: (a character's state of Utf8Automata, state after it).
        tokens: (token's number, state after it).  enters: (rule, state after it).
        ends: whether the rule may end here.
    """

    __slots__ = ("arcs", "ends", "enters", "reads", "rule", "tokens")

    def __init__(self, rule: int, arcs: frozenset[Arc], ends: bool):
        self.arcs = arcs
        ways = {kind: tuple({(arc.what, arc.target): None for arc in arcs if arc.kind is kind}) for kind in Kind}
        self.rule, self.ends = rule, ends
        self.reads, self.tokens, self.enters = ways[Kind.READ], ways[Kind.TOKEN], ways[Kind.ENTER]

    @property
    def goes_on(self) -> bool:
        """Return whether it can read or enter anything."""
        return bool(self.reads or self.tokens or self.enters)


_Usable: TypeAlias = Callable[[Arc], bool]


class Network:
    """The states of a grammar's rules, whose closures are made on demand.

    Attributes:
        characters: what reads them.  vocabulary_tokens: by their numbers.  root: the rule.  root_is_empty: whether the
        grammar accepts the empty text.
    """

    def __init__(self, rules: Mapping[str, Expression]):
        """Build the network. Raises UsageError for a grammar that is too large or produces no text."""
        self.characters = Utf8Automata()
        self.vocabulary_tokens: list[VocabularyToken] = []
        self._arcs: list[list[Arc]] = []
        self._rule_of: list[int] = []
        self.starts: list[int] = []
        self._ends: list[int] = []
        self._pending: list[Expression] = [*rules.values()]  # by the rules' numbers
        self._names = {name: number for number, name in enumerate(rules)}
        self._number_of = cache(self._add_rule)  # of an expression that is a rule without a name
        while len(self.starts) < len(self._pending):
            self._build_rule(len(self.starts))
        self.root = self._names["root"]
        self._keep_useful()
        self._shared: dict[tuple[int, frozenset[Arc], bool], Closure] = {}
        self.find_closure = cache(self._find_closure)  # of a state
        self.merge = cache(self._merge)  # of closures
        self.find_entered = cache(self._find_entered)  # of a rule

    # ---- building

    def _add_rule(self, expression: Expression) -> int:
        self._pending.append(expression)
        return len(self._pending) - 1

    def _build_rule(self, rule: int) -> None:
        self._rule = rule
        self.starts.append(self._add_state())
        self._ends.append(self._build(self._pending[rule], self.starts[rule]))

    def _add_state(self) -> int:
        if len(self._arcs) >= MOST_STATES:
            raise UsageError("the grammar is too large: use smaller repetition counts")
        self._arcs.append([])
        self._rule_of.append(self._rule)
        return len(self._arcs) - 1

    def _add_arc(self, start: int, kind: Kind, what: int, end: int | None = None) -> int:
        end = self._add_state() if end is None else end
        self._arcs[start].append(Arc(kind, what, end))
        return end

    def _build(self, expression: Expression, start: int) -> int:
        """Add an expression's states from `start` on and return the state after it. No arc leads back to `start`."""
        match expression:
            case Characters(ranges=ranges):
                return self._add_arc(start, Kind.READ, self.characters.start_of(ranges))
            case VocabularyToken():
                self.vocabulary_tokens.append(expression)
                return self._add_arc(start, Kind.TOKEN, len(self.vocabulary_tokens) - 1)
            case RuleReference(rule=rule):
                return self._add_arc(start, Kind.ENTER, self._names[rule])
            case Concatenation(items=items):
                for item in items:
                    start = self._build(item, start)
                return start
            case Alternatives(alternatives=alternatives):
                end = self._add_state()
                for alternative in alternatives:
                    self._add_arc(self._build(alternative, start), Kind.SKIP, 0, end)
                return end
            case Repeat():
                return self._build_repeat(expression, start)

    def _build_repeat(self, repeat: Repeat, start: int) -> int:
        """Add an item several times; one of many parts becomes a rule, so that it is there once."""
        item, least, most = repeat.item, repeat.least, repeat.most
        copies = most if most is not None else least + 1
        is_rule = copies > 2 and not isinstance(item, Characters | VocabularyToken | RuleReference)

        def once(at: int) -> int:
            return self._add_arc(at, Kind.ENTER, self._number_of(item)) if is_rule else self._build(item, at)

        for _ in range(least):
            start = once(start)
        if most is None:
            loop = self._add_arc(start, Kind.SKIP, 0)
            self._add_arc(once(loop), Kind.SKIP, 0, loop)
            return loop
        end = self._add_state()
        for _ in range(most - least):
            self._add_arc(start, Kind.SKIP, 0, end)
            start = once(start)
        return self._add_arc(start, Kind.SKIP, 0, end)

    # ---- leaving out what leads nowhere

    def _keep_useful(self) -> None:
        """Remove arcs that no finished text takes, and rules that only match the empty text; those are skipped.

        Raises UsageError if no text is left.
        """
        rules = range(len(self.starts))
        finite = _grow(rules, lambda rule, known: self._ends[rule] in self._reach(
            rule, lambda arc: arc.what in known if arc.kind is Kind.ENTER else arc.kind is Kind.SKIP or arc.what != DEAD
            or arc.kind is Kind.TOKEN))  # fmt: skip
        if self.root not in finite:
            raise UsageError("the grammar cannot be used: it matches no text")
        self._drop(lambda arc: arc.kind is Kind.ENTER and arc.what not in finite)
        self._drop(lambda arc: arc.kind is Kind.READ and arc.what == DEAD)
        ending = self._find_ending()
        self._drop(lambda arc: arc.target not in ending)
        empty = _grow(rules, lambda rule, known: self._ends[rule] in self._reach(
            rule, lambda arc: arc.kind is Kind.SKIP or (arc.kind is Kind.ENTER and arc.what in known)))  # fmt: skip
        says = _grow(rules, lambda rule, known: any(
            arc.kind in (Kind.READ, Kind.TOKEN) or (arc.kind is Kind.ENTER and arc.what in known)
            for state in self._reach(rule, lambda arc: True) for arc in self._arcs[state]))  # fmt: skip
        for state, arcs in enumerate(self._arcs):
            entered = [arc for arc in arcs if arc.kind is Kind.ENTER]
            skips = [Arc(Kind.SKIP, 0, arc.target) for arc in entered if arc.what in empty]
            self._arcs[state] = [arc for arc in arcs if arc.kind is not Kind.ENTER or arc.what in says] + skips
        self.root_is_empty = self.root in empty

    def _reach(self, rule: int, usable: "_Usable") -> set[int]:
        """Collect the states of a rule that usable arcs lead to from its start."""
        reached, todo = {self.starts[rule]}, [self.starts[rule]]
        while todo:
            for arc in self._arcs[todo.pop()]:
                if arc.target not in reached and usable(arc):
                    reached.add(arc.target)
                    todo.append(arc.target)
        return reached

    def _find_ending(self) -> set[int]:
        """Collect the states from which their rule's end is reached."""
        sources: list[list[int]] = [[] for _ in self._arcs]
        for state, arcs in enumerate(self._arcs):
            for arc in arcs:
                sources[arc.target].append(state)
        ending, todo = {*self._ends}, [*self._ends]
        while todo:
            more = {*sources[todo.pop()]} - ending
            ending |= more
            todo += more
        return ending

    def _drop(self, useless: "_Usable") -> None:
        for state, arcs in enumerate(self._arcs):
            self._arcs[state] = [arc for arc in arcs if not useless(arc)]

    # ---- what comes next

    def _find_closure(self, state: int) -> Closure:
        """Compute a state's closure; states of a rule with the same have one closure."""
        reached, todo = {state}, [state]
        arcs: set[Arc] = set()
        while todo:
            for arc in self._arcs[todo.pop()]:
                if arc.kind is not Kind.SKIP:
                    arcs.add(arc)
                elif arc.target not in reached:
                    reached.add(arc.target)
                    todo.append(arc.target)
        rule = self._rule_of[state]
        return self._share(rule, frozenset(arcs), self._ends[rule] in reached)

    def _share(self, rule: int, arcs: frozenset[Arc], ends: bool) -> Closure:
        if (rule, arcs, ends) not in self._shared:
            self._shared[rule, arcs, ends] = Closure(rule, arcs, ends)
        return self._shared[rule, arcs, ends]

    def _merge(self, closures: frozenset[Closure]) -> Closure:
        """Unite several closures of a rule; the caller handles the rule's end."""
        rule = next(iter(closures)).rule
        return self._share(rule, frozenset[Arc]().union(*(closure.arcs for closure in closures)), False)

    def find_start(self, rule: int) -> Closure:
        """Return the closure of a rule's first state."""
        return self.find_closure(self.starts[rule])

    def _find_entered(self, rule: int) -> frozenset[int]:
        """Collect the rules that begin wherever a rule begins: itself, what it can begin with, and so on."""
        entered, todo = {rule}, [rule]
        while todo:
            more = {each for each, _ in self.find_start(todo.pop()).enters} - entered
            entered |= more
            todo += more
        return frozenset(entered)


def _grow(rules: Iterable[int], belongs: Callable[[int, set[int]], bool]) -> set[int]:
    """Collect the rules that belong to a set if others do: the smallest such set."""
    known: set[int] = set()
    others = [*rules][::-1]  # what a rule refers to often stands behind it
    grows = True
    while grows:
        grows = False
        for rule in others:
            if rule not in known and belongs(rule, known):
                known.add(rule)
                grows = True
    return known


@lru_cache(_KEPT)
def build_network(grammar: str) -> Network:
    """Make the network of a grammar in GBNF. Raises UsageError."""
    rules = parse_grammar(grammar)
    try:
        return Network(rules)
    except RecursionError:
        raise UsageError("the grammar is invalid: its groups are nested too deeply") from None
