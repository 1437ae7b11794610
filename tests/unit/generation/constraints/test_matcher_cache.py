"""Test the cache of compiled constraints: it dies with its tokenizer, and slow ones block no other."""

import gc
import threading
import weakref
from typing import Any

import pytest
from vocabularies import GIVEN, byte_level

from localllm.errors import UsageError
from localllm.generation.constraints import grammar_network
from localllm.generation.constraints.constraint import Constraint, get_matcher
from localllm.generation.constraints.grammar_matcher import GrammarMatcher
from localllm.generation.constraints.grammar_network import build_network
from localllm.text.tokenizer import Tokenizer


def new_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(GIVEN["merges"], "qwen2", (1, 3)))


def test_compiled_constraints_are_freed_with_their_tokenizer():
    constraints = [
        Constraint.from_schema({"type": "string"}),
        Constraint.from_grammar('root ::= "a"'),
        Constraint.from_regex("a"),
    ]
    tokenizer = new_tokenizer()
    for constraint in constraints:
        matcher = get_matcher(constraint, tokenizer, tokenizer.vocab_size)
        matcher.compute_allowed_mask()
        matcher.get_expected_tokens()
    dead = weakref.ref(tokenizer)
    del tokenizer, matcher
    gc.collect()
    assert dead() is None


def test_a_slow_grammar_blocks_no_other_grammar(monkeypatch: pytest.MonkeyPatch):
    """Compile others meanwhile, of the same model and of another."""
    begins, go_on, make = threading.Event(), threading.Event(), GrammarMatcher.__init__

    def slowly(self: GrammarMatcher, grammar: str, *others: Any) -> None:
        if "slow" in grammar:
            begins.set()
            assert go_on.wait(20)
        make(self, grammar, *others)

    monkeypatch.setattr(GrammarMatcher, "__init__", slowly)
    first, second = new_tokenizer(), new_tokenizer()
    slow, quick = Constraint.from_grammar('root ::= "slow"'), Constraint.from_grammar('root ::= "quick"')
    thread = threading.Thread(target=get_matcher, args=(slow, first, first.vocab_size))
    thread.start()
    assert begins.wait(20)
    for tokenizer in (second, first):
        assert get_matcher(quick, tokenizer, tokenizer.vocab_size).compute_allowed_mask().any()
    go_on.set()
    thread.join(20)
    assert not thread.is_alive()


def test_rules_that_refer_backwards_are_visited_once(monkeypatch: pytest.MonkeyPatch):
    calls, reach = list[int](), grammar_network.GrammarNetwork._collect_reachable
    monkeypatch.setattr(
        grammar_network.GrammarNetwork,
        "_collect_reachable",
        lambda self, *arguments: calls.append(1) or reach(self, *arguments),
    )
    rules = [f'r{number} ::= "x" r{number - 1}' for number in range(1, 200)]
    build_network("\n".join(['r0 ::= "backwards"', *rules, "root ::= r199"]))
    assert len(calls) < 8 * 200


def test_a_grammar_that_takes_too_long_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_network, "MAX_SECONDS", -1.0)
    with pytest.raises(UsageError, match="takes too long to compile"):
        build_network('root ::= "too long"')
