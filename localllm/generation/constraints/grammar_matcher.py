"""Match an answer against a grammar in GBNF, with the methods of llguidance's LLMatcher.

A pushdown automaton matches the exact language of the grammar, byte by byte, and is cached as a table. A configuration,
which is a row of the table, holds all parses of the text so far. Parses that entered a rule at the same position share
their continuations, as in Earley's algorithm (1970) and graph-structured stacks (Tomita, 1986), so ambiguity costs at
most quadratic time, and left recursion works. A call at the end of a rule adds nothing to the stack. Equal
configurations are merged, so that a long quoted string needs few, and each successor is computed once.
"""

import threading
from collections.abc import Callable, Container, Iterable, Iterator
from copy import copy
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from localllm.generation.constraints.gbnf import VocabularyToken, make_grammar_error
from localllm.generation.constraints.grammar_network import DEAD, READ, GrammarNetwork, StateClosure, build_network
from localllm.generation.constraints.vocabulary import TokenConsumer, TokenTrie

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


# A parse: the state within a character (or 0), the closure of the next state, and how its rule was entered.
Way: TypeAlias = "tuple[int, StateClosure, RuleEntry | None]"
Configuration: TypeAlias = frozenset[Way]

AFTER_ROOT = -1  # the state after the root rule
_ROWS = 20_000  # maximum rows of the table (some megabytes), which is then cleared
_MASKS = 512  # cached masks, of 19 KB for 151 thousand tokens
_WALKS = 64  # cached walks, of up to a megabyte
_FORCED = 200  # maximum bytes of forced text
_TOP = np.zeros(1, np.int32)  # the root node of the trie


class RuleEntry:
    """The rules that were entered at one position of a text, and where they return to.

    Compared by identity.

    Attributes:
        callers: continuations after each rule.  rules: all rules entered at the position.
        returns: configurations after a rule, cached by Automaton.
    """

    __slots__ = ("callers", "returns", "rules")

    def __init__(self, calls: "frozenset[_Call]", rules: frozenset[int]):
        self.rules = rules
        self.callers: dict[int, list[tuple[StateClosure, RuleEntry | None]]] = {}
        for rule, closure, entry in calls:
            self.callers.setdefault(rule, []).append((closure, entry))
        self.returns: dict[int, Configuration] = {}


_Call: TypeAlias = tuple[int, StateClosure, RuleEntry | None]  # a rule, and its continuation
_Read: TypeAlias = tuple[
    int, StateClosure, RuleEntry | None
]  # a character's state or token number, and its continuation


class Automaton:
    """The pushdown automaton of a grammar over the tokens of a vocabulary.

    Attributes:
        beginning: the configuration at the beginning of a text.
    """

    def __init__(self, network: GrammarNetwork, trie: TokenTrie, token_ids: list[int]):
        """Set up the automaton.

        token_ids: ids of the network's vocabulary tokens.
        """
        self._network, self._trie, self._token_ids = network, trie, token_ids
        self._lock = threading.Lock()
        self._classify_bytes()
        root, end = StateClosure(-1, frozenset(), False), StateClosure(-1, frozenset(), False)
        root.enters = ((network.root, AFTER_ROOT),)
        self._root, self._end = (0, root, None), (0, end, None)
        begins = network.find_start(network.root).has_arcs
        self.beginning: Configuration = frozenset([self._root] * begins + [self._end] * network.root_is_empty)
        self._clear()

    def _classify_bytes(self) -> None:
        """Group bytes that lead to the same states everywhere, so that they share a column of the table."""
        states = self._network.characters.steps
        following = np.zeros((256, len(states)), np.int32)
        for state, steps in enumerate(states):
            following[list(steps), state] = list(steps.values())
        kinds, class_of = np.unique(following, axis=0, return_inverse=True)
        self._class_of = class_of.reshape(256).astype(np.int32)
        self._steps = [[(kind, int(kinds[kind, state])) for kind in np.flatnonzero(kinds[:, state] != DEAD).tolist()]
                       for state in range(len(states))]  # fmt: skip
        self._columns = len(kinds)
        self._merged = self._trie.merge(self._class_of)

    def _clear(self) -> None:
        """Clear the cached table, except row 0, the dead state."""
        self._table = np.zeros((256, self._columns), np.int32)
        self._is_known, self._is_end = np.zeros(256, bool), np.zeros(256, bool)
        self._configurations: list[Configuration] = [frozenset()]
        self._rows: dict[Configuration, int] = {frozenset(): 0}
        self._is_known[0] = True
        self._entries: dict[frozenset[_Call], RuleEntry] = {}
        self._alone: dict[int, RuleEntry] = {}  # of rules without continuation
        self._masks: dict[Configuration, bytes] = {}
        self._walks: dict[Configuration, tuple[np.ndarray, np.ndarray]] = {}

    # ---- interface of the matcher

    def can_end(self, configuration: Configuration) -> bool:
        """Return whether the text is complete."""
        return self._end in configuration

    def must_end(self, configuration: Configuration) -> bool:
        """Return whether the text is complete and cannot go on."""
        return configuration == {self._end}

    def compute_mask(self, configuration: Configuration) -> bytes:
        """Compute the mask of the next token, which includes end tokens, one bit per token, the lowest bit first."""
        with self._lock:
            if len(self._configurations) > _ROWS:
                self._clear()
            return _get_or_compute(
                self._masks, configuration, _MASKS, lambda: self._compute_mask(configuration).tobytes()
            )

    def consume(self, configuration: Configuration, token: int) -> Configuration:
        """Return the configuration after a token; empty if the token is not allowed."""
        with self._lock:
            row = self._get_row(configuration) if self._trie.texts[token] else 0
            for byte in self._trie.texts[token]:
                row = self._follow(row, self._class_of[byte])
            after = [self._continue_at(closure, entry) for number, closure, entry in self._expand_tokens(configuration)
                      if self._is_matched(number, token)]  # fmt: skip
            return self._merge(self._configurations[row].union(*after))

    def find_forced(self, configuration: Configuration) -> tuple[bytes, bool]:
        """Return the bytes that must come next, about _FORCED at most, and whether the answer must end after them."""
        forced = bytearray()
        with self._lock:
            while len(forced) < _FORCED and self._end not in configuration and not self._expand_tokens(configuration):
                row = self._get_row(configuration)
                self._compute_successors(row)
                columns = np.flatnonzero(self._table[row])
                codes = np.flatnonzero(np.isin(self._class_of, columns))
                if len(codes) != 1:
                    break
                forced.append(int(codes[0]))
                configuration = self._configurations[self._table[row, columns[0]]]
        return bytes(forced), self.must_end(configuration)

    # ---- masks

    def _compute_mask(self, configuration: Configuration) -> np.ndarray:
        """Return the union of the masks of all parses.

        Walks within a rule are cached, whatever entered it.
        """
        allowed = np.zeros(len(self._trie.texts), bool)
        for number, _, _ in self._expand_tokens(configuration):
            self._allow_vocabulary_token(allowed, number)
        if self._end in configuration:
            allowed[self._trie.ends] = True
        packed = np.packbits(allowed, bitorder="little")
        groups: dict[tuple[int, RuleEntry | None], list[Way]] = {}
        for way in configuration:
            groups.setdefault((way[1].rule, way[2]), []).append(way)
        places, rows = [_TOP[:0]], [_TOP[:0]]
        for (rule, entry), ways in groups.items():
            nodes, after = _TOP, frozenset(ways)
            if entry is not None:
                tokens, nodes = self._walk_within(rule, ways)
                packed |= tokens
                after = self._find_returns(rule, entry)
            places.append(nodes)
            rows.append(np.full(len(nodes), self._get_row(after), np.int32))
        result: np.ndarray = packed | self._walk(np.concatenate(places), np.concatenate(rows))[0]
        return result

    def _walk_within(self, rule: int, ways: Iterable[Way]) -> tuple[np.ndarray, np.ndarray]:
        """Walk from the root of the trie as if the answer ended with the rule."""
        if rule not in self._alone:
            self._alone[rule] = RuleEntry(frozenset([(rule, self._end[1], None)]), frozenset())
        configuration = frozenset((reader, closure, self._alone[rule]) for reader, closure, _ in ways)
        row = np.array([self._get_row(configuration)], np.int32)
        return _get_or_compute(self._walks, configuration, _WALKS, lambda: self._walk(_TOP, row))

    def _walk(self, nodes: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Follow all tokens below nodes of the trie at once, level by level.

        rows: row of the table at each node, int32 [nodes]. Returns the bits of the allowed tokens, and the inner nodes
        at which the text can end.
        """
        trie = self._merged
        can_come = np.zeros(len(trie.column), bool)
        ends = [_TOP[:0]]
        while len(nodes):
            for row in np.flatnonzero(np.bincount(rows[~self._is_known[rows]])).tolist():
                self._compute_successors(row)
            counts = trie.counts[nodes]
            shifts = trie.first[nodes] - (np.cumsum(counts, dtype=np.int32) - counts)
            nodes = np.repeat(shifts, counts)
            nodes += np.arange(len(nodes), dtype=np.int32)
            rows = self._table.ravel()[np.repeat(rows * self._columns, counts) + trie.column[nodes]]
            is_alive = rows != 0
            can_come[nodes[is_alive]] = True
            is_alive &= trie.counts[nodes] > 0
            nodes, rows = nodes[is_alive], rows[is_alive]
            ends.append(nodes[self._is_end[rows]])
        return np.packbits(can_come[trie.node_of], bitorder="little"), np.concatenate(ends)

    def _allow_vocabulary_token(self, allowed: np.ndarray, number: int) -> None:
        """Allow the vocabulary token with this index or, if the grammar negates it, all others."""
        token = self._token_ids[number]
        if self._network.vocabulary_tokens[number].is_negated:
            was_allowed = allowed[token]
            allowed |= self._trie.is_token
            allowed[token] = was_allowed
        else:
            allowed[token] = True

    def _is_matched(self, number: int, token: int) -> bool:
        """Return whether a token is allowed where the grammar has the vocabulary token with this index."""
        return (self._token_ids[number] == token) != self._network.vocabulary_tokens[number].is_negated

    # ---- the table

    def _get_row(self, configuration: Configuration) -> int:
        """Return the row of a configuration in the table; a full table is cleared."""
        row = self._rows.setdefault(configuration, len(self._configurations))
        if row == len(self._configurations):
            self._configurations.append(configuration)
            if row == len(self._table):
                self._table, self._is_known, self._is_end = (
                    np.concatenate([each, np.zeros_like(each)]) for each in (self._table, self._is_known, self._is_end)
                )
            self._is_end[row] = self._end in configuration
        return row

    def _follow(self, row: int, column: int) -> int:
        """Return the row after a byte of this class."""
        self._compute_successors(row)
        return int(self._table[row, column])

    def _compute_successors(self, row: int) -> None:
        """Compute the missing successors of a row, one for each class of bytes."""
        if self._is_known[row]:
            return
        self._is_known[row] = True
        reads, _ = self._expand(self._configurations[row])
        by_column: dict[int, list[tuple[int, int]]] = {}
        for number, (reader, _, _) in enumerate(reads):
            for column, following in self._steps[reader]:
                by_column.setdefault(column, []).append((number, following))
        row_numbers: dict[tuple[tuple[int, int], ...], int] = {}  # many bytes lead to the same row
        for column, steps in by_column.items():
            key = tuple(steps)
            if key not in row_numbers:
                row_numbers[key] = self._get_row(self._advance(reads, key))
            self._table[row, column] = row_numbers[key]

    def _advance(self, reads: "list[_Read]", steps: Iterable[tuple[int, int]]) -> Configuration:
        """Return the configuration after a byte.

        steps: (index of a read that accepts the byte, next state within its character).
        """
        ways: set[Way] = set()
        for number, following in steps:
            _, closure, entry = reads[number]
            if following == READ:
                ways.update(self._continue_at(closure, entry))
            else:
                ways.add((following, closure, entry))
        return self._merge(ways)

    def _merge(self, ways: Iterable[Way]) -> Configuration:
        """Merge parses of a rule that differ only in the next state, as those of `"a"? "a"? "a"?` do."""
        merged: set[Way] = set()
        groups: dict[tuple[int, RuleEntry], set[StateClosure]] = {}
        for reader, closure, entry in ways:
            if reader or entry is None:
                merged.add((reader, closure, entry))
            else:
                groups.setdefault((closure.rule, entry), set()).add(closure)
        merged.update((0, self._network.merge(frozenset(group)), entry) for (_, entry), group in groups.items())
        return frozenset(merged)

    # ---- configurations

    def _expand(self, configuration: Configuration) -> "tuple[list[_Read], list[_Read]]":
        """Return the characters and the vocabulary tokens that can come next, with their continuations."""
        network = self._network
        reads: dict[_Read, None] = {}
        tokens: dict[_Read, None] = {}
        calls: set[_Call] = set()

        def begin(closure: StateClosure, entry: RuleEntry | None) -> None:
            reads.update({(reader, network.find_closure(state), entry): None for reader, state in closure.reads})
            tokens.update({(number, network.find_closure(state), entry): None for number, state in closure.tokens})

        for reader, closure, entry in configuration:
            if reader:
                reads[reader, closure, entry] = None
            else:
                begin(closure, entry)
                for rule, state in closure.enters:
                    calls.update(self._enter_rule(rule, state, entry))
        if calls:
            entry = self._get_entry(frozenset(calls))
            for rule in entry.rules:
                begin(network.find_start(rule), entry)
        return [*reads], [*tokens]

    def _expand_tokens(self, configuration: Configuration) -> "list[_Read]":
        return self._expand(configuration)[1] if self._network.vocabulary_tokens else []

    def _enter_rule(self, rule: int, state: int, entry: RuleEntry | None) -> Iterator[_Call]:
        """Yield the calls that enter a rule; a call at the end of its caller passes on the caller's continuations."""
        if state == AFTER_ROOT:
            yield rule, self._end[1], None
            return
        closure = self._network.find_closure(state)
        if closure.has_arcs or entry is None:
            yield rule, closure, entry
        else:
            for _, after, below in self._find_returns(closure.rule, entry):
                yield rule, after, below

    def _get_entry(self, calls: "frozenset[_Call]") -> RuleEntry:
        if calls not in self._entries:
            rules = frozenset[int]().union(*(self._network.find_entered(rule) for rule, _, _ in calls))
            self._entries[calls] = RuleEntry(calls, rules)
        return self._entries[calls]

    def _continue_at(self, closure: StateClosure, entry: RuleEntry | None) -> Iterable[Way]:
        """Yield the parses that continue at a closure, and those after its rule if the rule may end there."""
        if closure.has_arcs:
            yield 0, closure, entry
        if closure.ends and entry is not None:
            yield from self._find_returns(closure.rule, entry)

    def _find_returns(self, rule: int, entry: RuleEntry) -> Configuration:
        """Return the parses that continue after a rule, and after the rules that end with it; cached."""
        if rule not in entry.returns:
            ways: set[Way] = set()
            reached, todo = {(rule, entry)}, [(rule, entry)]
            while todo:
                for closure, below in self._find_callers(*todo.pop()):
                    if closure.has_arcs or closure is self._end[1]:
                        ways.add((0, closure, below))
                    if closure.ends and below is not None and (closure.rule, below) not in reached:
                        reached.add((closure.rule, below))
                        todo.append((closure.rule, below))
            entry.returns[rule] = self._merge(ways)
        return entry.returns[rule]

    def _find_callers(self, rule: int, entry: RuleEntry) -> Iterator[tuple[StateClosure, RuleEntry | None]]:
        """Yield the states that continue once a rule ends, each with its entry.

        These are the states after each call of the rule at this position, in whichever rule the call stands.
        """
        yield from entry.callers.get(rule, ())
        for caller in entry.rules:
            for entered, state in self._network.find_start(caller).enters:
                if entered == rule:
                    yield self._network.find_closure(state), entry


_Value = TypeVar("_Value")


def _get_or_compute(
    cache: dict[Configuration, _Value], key: Configuration, size: int, compute: Callable[[], _Value]
) -> _Value:
    """Return a cached value, or compute and cache it; a full cache drops the least recently used value."""
    value = cache.pop(key) if key in cache else compute()
    if len(cache) >= size:
        del cache[next(iter(cache))]
    cache[key] = value
    return value


class GrammarMatcher(TokenConsumer):
    """Matches one answer with a grammar, token by token."""

    def __init__(self, grammar: str, tokenizer: "Tokenizer", trie: TokenTrie):
        """Start at the beginning of an answer.

        Raises UsageError for an invalid grammar, or one with tokens that the vocabulary lacks.
        """
        network = build_network(grammar)
        self._named = [_find_token(token, tokenizer) for token in network.vocabulary_tokens]
        self._automaton = Automaton(network, trie, self._named)
        self._ends = sorted(tokenizer.end_ids)
        self._configuration = self._automaton.beginning
        self._automaton.compute_mask(self._configuration)  # which takes longest the first time
        self._has_ended = False

    def deep_copy(self) -> "GrammarMatcher":
        """Return an independent copy, which shares the cached automaton."""
        return copy(self)

    def compute_bitmask(self) -> bytes:
        """Compute the mask of the next token, which includes end tokens, one bit per token, the lowest bit first."""
        return self._automaton.compute_mask(self._configuration)

    def _accept(self, token: int) -> bool:
        if token in self._ends and self._automaton.can_end(self._configuration) and not self._has_ended:
            self._has_ended = True
            return True
        configuration = self._automaton.consume(self._configuration, token)
        if self._has_ended or not configuration:
            return False
        self._configuration = configuration
        return True

    def is_stopped(self) -> bool:
        """Return whether the answer must end now."""
        return self._has_ended or self._automaton.must_end(self._configuration)

    def find_forced(self) -> tuple[bytes, bool]:
        """Return the text that must come next, about 200 bytes at most, and whether the answer must end after it."""
        return self._automaton.find_forced(self._configuration)

    def names_any_token(self, tokens: Container[int]) -> bool:
        """Return whether the grammar names any of these tokens by text or id."""
        return any(token in tokens for token in self._named)


def _find_token(token: VocabularyToken, tokenizer: "Tokenizer") -> int:
    """Return the id of a token that a grammar names. Raises UsageError if the vocabulary does not have it."""
    if token.text.startswith("<["):
        number = int(token.text[2:-2])
        if number >= tokenizer.vocab_size:
            raise make_grammar_error(
                token.line, f"a token id must be from 0 to {tokenizer.vocab_size - 1} (found {number})"
            )
        return number
    special = tokenizer.get_special_id(token.text)
    ids = tokenizer.encode_inside(token.text) if special is None else [special]
    if len(ids) != 1:
        raise make_grammar_error(
            token.line, f"{token.text} must be one token of the model's vocabulary (found {len(ids)})"
        )
    return ids[0]
