"""Grammars in GBNF: the language is exactly llama.cpp's, character by character. The oracle is gbnf_oracle.py."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gbnf_oracle import Chart, Grammar
from tiny_model import write_tiny_model

from localllm.errors import ConstraintError, UsageError
from localllm.generation import grammar_automaton
from localllm.generation.constraints import Constraint, Matcher, matcher_of
from localllm.generation.grammar_matcher import GrammarMatcher
from localllm.generation.network import MOST_STATES, network_of
from localllm.generation.token_trie import TokenTrie
from localllm.text.tokenizer import Tokenizer

GRAMMARS = {
    "sums": r"""
        root ::= (sum "=" blank value "\n")+   # blanks at the end of a rule, and a line break that must follow
        sum ::= value ([-+*/] blank value)*
        value ::= [a-z] [a-z0-9]* blank | [0-9]+ blank | "(" blank sum ")" blank
        blank ::= [ \t\n]*""",
    "word or itself": 'root ::= "(" (root | word) ")"\nword ::= [a-z) ]+',
    "json": r"""
        root ::= value
        value ::= "{" blank (pair ("," blank pair)*)? "}" blank | "[" blank (value ("," blank value)*)? "]" blank |
          string | number | ("true" | "false" | "null") blank
        pair ::= string ":" blank value
        string ::= "\"" ( [^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" blank
        number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? blank
        blank ::= | " " | "\n" [ \t]{0,5}""",
    "program": r"""
        root ::= function+
        function ::= type " " name "(" (type " " name (", " type " " name)*)? ") {" line* "\n}\n"
        line ::= "\n  " ( name " = " value ";" | "if (" value " " [<>] " " value ") {" line* "}" | "return " value ";" )
        value ::= product (" " [+-] " " product)*
        product ::= atom (" " [*/%] " " atom)*
        atom ::= name | [0-9]{1,8} | "-" atom | "(" value ")" | name "(" (value (", " value)*)? ")"
        type ::= "int" | "char" | "int32"
        name ::= [a-zA-Z_] [a-zA-Z_0-9]*""",
    "game": r"""
        root ::= ("1. " move " " move "\n"
                 ([1-9] [0-9]? ". " move (" " move)? "\n")*)
        move ::= (piece | [a-h] ("x" [a-h])? [1-8] ("=" [NBQR])? | "O-O" "-O"?) [+#]?
        piece ::= [KNBRQ] [a-h]? [1-8]? "x"? [a-h] [1-8]""",
    "list": 'root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"',
    "nested lists": 'root ::= list{2}\nlist ::= "<" (list | [^<>]){0,3} ">" blank\nblank ::= (" "? blank-two){1}\nblank-two ::= "\\n"*',
    "letters of the world": r"root ::= [à-ÿα-ωぁ-ゟ😀-😎]+ [^\x00-\x7F]{0,2} ([\u4e00-\u9fff] | [\U0001F300-\U0001F5FF])? [^a-zé漢]",
    "anything": r'root ::= . "x" .{2,4} "."',
    "ambiguous": 'root ::= root root | "a" root "b" | "a" | ("a" | "ab")*',
    "one way or another": 'root ::= "a" root "b" | "a" root "c" | "x" | even\neven ::= ("xx" even)?',
    "palindromes": 'root ::= [ab]? | "a" root "a" | "b" root "b"',
    "begins with itself": 'root ::= root "+" term | term\nterm ::= term "*" [0-9] | [0-9] | "(" root ")"',
    "begins with another that begins with it": 'root ::= one "r" | "x"\none ::= none two "o"\ntwo ::= root "t" | "y"\nnone ::= " "?',
    "ends with itself": 'root ::= [a-c] root | [c-f] tail | "."\ntail ::= "-" root | root?',
    "counts": 'root ::= ("ab"{2,3} "c"{0} ("d" | "de"){0,40} [0-9]{30,} ("x" ("y" | "z"{2}){0,3} ){ 2 , 5 }){1,2} "!"{0,0}',
    "loops of nothing": 'root ::= (("a"? | ()) ("b"* "c"?)*)* "." (""? "d"){0,2}',
    "prefixes of each other": 'root ::= word (" " word)*\nword ::= "in" | "int" | "integer" | "int" [a-z]+ | [a-z]',
    "escapes": r'root ::= "\"\\\[\]\t\x41\u00e9\U0001F600" [\]\[\\"^a\-z-]+ [-+] [+--] [^^] "é\n"',
}  # fmt: skip


class Vocabulary:
    """Tokens as bad as they come: every byte, pieces of characters, and pieces of sentences."""

    def __init__(self, sentences: list[str], seed: int = 0):
        rng = random.Random(seed)
        texts = {bytes([byte]): None for byte in range(256)}
        for text in [*sentences, "漢字 é😀€", "ß\n\n  ", "\U0010ffff߿ࠀ"]:
            data = text.encode()
            for _ in range(8):
                start = rng.randrange(len(data) + 1)
                texts[data[start : start + rng.randint(2, 9)]] = None
        texts |= dict.fromkeys([b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80", b"\xe2\x82\xe2", b"\xf0\x9f\x98\x80\xf0\x9f"])
        self.texts = [b"", b"<end>", *(text for text in texts if text), b"", b"a", b"ab"]
        self.vocab_size, self.end_ids, self.mark_ids = len(self.texts), [0, 1], {0, 1}

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token]

    def encode_inside(self, text: str) -> list[int]:
        return [self.texts.index(bytes([byte])) for byte in text.encode()]

    def special_id(self, text: str) -> int | None:
        return None

    def cut(self, data: bytes, rng: random.Random) -> list[int]:
        """Tokens at random that make up some bytes."""
        tokens = []
        while data:
            tokens.append(rng.choice([token for token, text in enumerate(self.texts) if text and data.startswith(text)
                                      and token not in self.mark_ids]))  # fmt: skip
            data = data[len(self.texts[tokens[-1]]) :]
        return tokens


def begin(grammar: str, vocabulary) -> Matcher:
    return matcher_of(Constraint.of_grammar(grammar), vocabulary, vocabulary.vocab_size)


def is_taken(matcher: Matcher, tokens: list[int], ends: list[int]) -> bool:
    """Whether these tokens are an answer, whole."""
    for token in tokens:
        if not matcher.allowed()[token]:
            return False
        matcher.accept(token)
    return bool(matcher.allowed()[ends].all())


@pytest.fixture(params=GRAMMARS)
def case(request) -> SimpleNamespace:
    grammar, rng = GRAMMARS[request.param], random.Random(request.param)
    oracle = Grammar(grammar)
    sentences = [oracle.sentence(rng, room=rng.choice([5, 20, 60])) for _ in range(25)]
    vocabulary = Vocabulary(sentences)
    return SimpleNamespace(grammar=grammar, oracle=oracle, rng=rng, sentences=sentences, vocabulary=vocabulary)


def test_every_sentence_is_accepted_however_it_is_cut_into_tokens(case):
    for sentence in case.sentences:
        chart = Chart(case.oracle)
        assert all(map(chart.push, sentence)) and chart.is_whole, "the oracle is wrong"
        matcher, whole = begin(case.grammar, case.vocabulary), len(chart.sets)
        left = sentence.encode()
        for token in case.vocabulary.cut(left, case.rng):
            assert matcher.allowed()[token], (sentence, left)
            matcher.accept(token)
            left = left[len(case.vocabulary.texts[token]) :]
        allowed = matcher.allowed()
        assert allowed[0] and allowed[1] and len(chart.sets) == whole
        assert matcher.is_complete == (not chart.terminals())


def test_what_may_come_is_what_the_oracle_lets_come(case):
    """All tokens, at places of sentences, within characters too."""
    for sentence in case.rng.sample(case.sentences, 4):
        matcher, chart = begin(case.grammar, case.vocabulary), Chart(case.oracle)
        place = case.rng.randint(0, len(sentence))
        assert all(map(chart.push, sentence[:place]))
        rest = sentence[place : place + 1].encode()[: case.rng.randint(0, 3)]
        rest = b"" if len(rest) == len(sentence[place : place + 1].encode()) else rest
        for token in case.vocabulary.cut(sentence[:place].encode() + rest, case.rng):
            matcher.accept(token)
        expected = [bool(text) and token > 1 and chart.takes(rest + text) for token, text in enumerate(case.vocabulary.texts)]
        expected[0] = expected[1] = chart.is_whole and not rest
        differing = np.flatnonzero(matcher.allowed() != expected)
        assert not differing.size, (sentence[:place], rest, [case.vocabulary.texts[token] for token in differing])


def test_what_is_no_sentence_is_refused(case):
    """Sentences with a character too many, too few, another, or two of them exchanged; the oracle says which still are."""
    refused = 0
    for sentence in case.sentences:
        for _ in range(4):
            place, other = case.rng.randint(0, len(sentence)), case.rng.choice([*sentence, *"aé(\n \"0b"])
            kind = case.rng.randrange(4)
            changed = sentence[:place] + ("", other, other, sentence[place + 1 : place + 2])[kind] + (
                sentence[place : place + 1] + sentence[place + 2 :] if kind == 3 else sentence[place + (kind != 1) :])
            chart = Chart(case.oracle)
            is_one = all(map(chart.push, changed)) and chart.is_whole
            refused += not is_one
            tokens = case.vocabulary.cut(changed.encode(), case.rng)
            assert is_taken(begin(case.grammar, case.vocabulary), tokens, [0, 1]) == is_one, changed
    assert refused > 10, "otherwise this shows little"
