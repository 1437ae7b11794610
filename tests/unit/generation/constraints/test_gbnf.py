"""Test GBNF grammars character by character against the oracle in gbnf_oracle.py."""

import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeEngine
from gbnf_oracle import Chart, Grammar
from tiny_model import write_tiny_model

from localllm.errors import ConstraintError, UsageError
from localllm.generation.constraints import grammar_matcher
from localllm.generation.constraints import grammar_network as network
from localllm.generation.constraints.constraint import Constraint, Matcher, get_matcher
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.sampling.sampler import SamplingOptions
from localllm.generation.session import Session
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
    "nested lists": 'root ::= list{2}\nlist ::= "<" (list | [^<>]){0,3} ">" blank\n'
        'blank ::= (" "? blank-two){1}\nblank-two ::= "\\n"*',
    "letters of the world": r"root ::= [à-ÿα-ωぁ-ゟ😀-😎]+ [^\x00-\x7F]{0,2} "
        r"([\u4e00-\u9fff] | [\U0001F300-\U0001F5FF])? [^a-zé漢]",
    "anything": r'root ::= . "x" .{2,4} "."',
    "ambiguous": 'root ::= root root | "a" root "b" | "a" | ("a" | "ab")*',
    "one way or another": 'root ::= "a" root "b" | "a" root "c" | "x" | even\neven ::= ("xx" even)?',
    "palindromes": 'root ::= [ab]? | "a" root "a" | "b" root "b"',
    "begins with itself": 'root ::= root "+" term | term\nterm ::= term "*" [0-9] | [0-9] | "(" root ")"',
    "begins with another that begins with it": 'root ::= one "r" | "x"\none ::= none two "o"\ntwo ::= root "t" | "y"\n'
        'none ::= " "?',
    "ends with itself": 'root ::= [a-c] root | [c-f] tail | "."\ntail ::= "-" root | root?',
    "counts": 'root ::= ("ab"{2,3} "c"{0} ("d" | "de"){0,40} [0-9]{30,} '
        '("x" ("y" | "z"{2}){0,3} ){ 2 , 5 }){1,2} "!"{0,0}',
    "loops of nothing": 'root ::= (("a"? | ()) ("b"* "c"?)*)* "." (""? "d"){0,2}',
    "prefixes of each other": 'root ::= word (" " word)*\nword ::= "in" | "int" | "integer" | "int" [a-z]+ | [a-z]',
    "escapes": r'root ::= "\"\\\[\]\t\x41\u00e9\U0001F600" [\]\[\\"^a\-z-]+ [-+] [+--] [^^] "é\n"',
}  # fmt: skip


class Vocabulary:
    """A hostile vocabulary: every byte, fragments of characters, and fragments of sentences."""

    def __init__(self, sentences: list[str], seed: int = 0):
        rng = random.Random(seed)
        texts = {bytes([byte]): None for byte in range(256)}
        for text in [*sentences, "漢字 é😀€", "ß\n\n  ", "\U0010ffff߿ࠀ"]:
            data = text.encode()
            for _ in range(8):
                start = rng.randrange(len(data) + 1)
                texts[data[start : start + rng.randint(2, 9)]] = None
        texts |= dict.fromkeys(
            [b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80", b"\xe2\x82\xe2", b"\xf0\x9f\x98\x80\xf0\x9f"]
        )
        self.texts = [b"", b"<end>", *(text for text in texts if text), b"", b"a", b"ab"]
        self.vocab_size, self.end_ids, self.mark_ids = len(self.texts), [0, 1], {0, 1}

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token]

    def encode_inside(self, text: str) -> list[int]:
        return [self.texts.index(bytes([byte])) for byte in text.encode()]

    def get_special_id(self, text: str) -> int | None:
        return None

    def split(self, data: bytes, rng: random.Random) -> list[int]:
        """Split bytes into random tokens."""
        tokens = []
        while data:
            tokens.append(rng.choice([token for token, text in enumerate(self.texts) if text and data.startswith(text)
                                      and token not in self.mark_ids]))  # fmt: skip
            data = data[len(self.texts[tokens[-1]]) :]
        return tokens


def begin(grammar: str, vocabulary) -> Matcher:
    return get_matcher(Constraint.from_grammar(grammar), vocabulary, vocabulary.vocab_size)


def accepts_tokens(matcher: Matcher, tokens: list[int], ends: list[int]) -> bool:
    """Return whether these tokens are a whole answer."""
    for token in tokens:
        if not matcher.compute_allowed_mask()[token]:
            return False
        matcher.accept(token)
    return bool(matcher.compute_allowed_mask()[ends].all())


def is_sentence(grammar: str, text: str) -> bool:
    """Ask the oracle whether a string is a sentence of the grammar."""
    chart = Chart(Grammar(grammar))
    return all(map(chart.push, text)) and chart.is_whole


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
        for token in case.vocabulary.split(left, case.rng):
            assert matcher.compute_allowed_mask()[token], (sentence, left)
            matcher.accept(token)
            left = left[len(case.vocabulary.texts[token]) :]
        allowed = matcher.compute_allowed_mask()
        assert allowed[0] and allowed[1] and len(chart.sets) == whole
        assert matcher.is_complete == (not chart.terminals())


def test_the_mask_equals_the_oracle_at_random_positions(case):
    """Compare all tokens, also within a character."""
    for sentence in case.rng.sample(case.sentences, 4):
        matcher, chart = begin(case.grammar, case.vocabulary), Chart(case.oracle)
        place = case.rng.randint(0, len(sentence))
        assert all(map(chart.push, sentence[:place]))
        rest = sentence[place : place + 1].encode()[: case.rng.randint(0, 3)]
        rest = b"" if len(rest) == len(sentence[place : place + 1].encode()) else rest
        for token in case.vocabulary.split(sentence[:place].encode() + rest, case.rng):
            matcher.accept(token)
        expected = [
            bool(text) and token > 1 and chart.takes(rest + text) for token, text in enumerate(case.vocabulary.texts)
        ]
        expected[0] = expected[1] = chart.is_whole and not rest
        differing = np.flatnonzero(matcher.compute_allowed_mask() != expected)
        assert not differing.size, (sentence[:place], rest, [case.vocabulary.texts[token] for token in differing])


def test_changed_sentences_are_accepted_only_if_the_oracle_accepts_them(case):
    """Insert, remove, replace or swap a character."""
    refused = 0
    for sentence in case.sentences:
        for _ in range(4):
            place, other = case.rng.randint(0, len(sentence)), case.rng.choice([*sentence, *'aé(\n "0b'])
            kind = case.rng.randrange(4)
            changed = (
                sentence[:place]
                + ("", other, other, sentence[place + 1 : place + 2])[kind]
                + (
                    sentence[place : place + 1] + sentence[place + 2 :]
                    if kind == 3
                    else sentence[place + (kind != 1) :]
                )
            )
            is_one = is_sentence(case.grammar, changed)
            refused += not is_one
            tokens = case.vocabulary.split(changed.encode(), case.rng)
            assert accepts_tokens(begin(case.grammar, case.vocabulary), tokens, [0, 1]) == is_one, changed
    assert refused > 10, "otherwise this shows little"


# ---- from a command line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


def test_an_answer_of_sums_ends_at_its_line_break(shared: Path, tmp_path: Path, cli):
    """Keep blanks at the end of a rule from swallowing the line break."""
    grammar = GRAMMARS["sums"].replace(")+ ", "){1,3} ").replace(r"[ \t\n]*", r"[ \n]{0,2}")
    (tmp_path / "sums.gbnf").write_text("\ufeff" + grammar, encoding="utf-8")
    model = shared / "models" / "smollm2-135m-instruct-q4_1.gguf"
    for prompt in ("Write an equation.", "What is 2 + 2?"):
        code, answer, complaint = cli(
            "run", model, "-p", prompt, "--temp", 0, "-n", 100, "--grammar", tmp_path / "sums.gbnf"
        )
        assert (code, complaint) == (0, "")
        assert is_sentence(grammar, answer) or is_sentence(grammar, answer.removesuffix("\n"))


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "(" (root | word) ")"\nword ::= [a-z) ]{1,20}',
        'root ::= value "\\n"\nvalue ::= ("(" value ")" | [a-z]{1,9}) blank\nblank ::= [ \\n]{0,3}',
        'root ::= "a"{0} "b"{0,0} [c-z]{5}',
    ],
)
def test_a_random_model_writes_sentences_of_the_grammar(tiny: Path, grammar: str, cli):
    for options in (("--temp", 0), ("--temp", 5, "-s", 3), ("--temp", 5, "-s", 4, "--speculate", "off")):
        code, answer, complaint = cli("run", tiny, "-p", "Who?", "-n", 400, "--grammar", grammar, *options)
        assert (code, complaint) == (0, "")
        assert is_sentence(grammar, answer) or is_sentence(grammar, answer.removesuffix("\n"))


@pytest.mark.parametrize(("grammar", "complaint"), [
    ('root ::= "a" )', r"the grammar is invalid in line 1: expected a rule's name, found '\)'"),
    ('# one\nroot ::= a\nb ::= "x"', "the grammar is invalid in line 2: there is no rule 'a'"),
    ("root ::= <[99999]>", r"invalid in line 1: a token id must be from 0 to [0-9]+ \(found 99999\)"),
    ("root ::= <about it>", r"line 1: <about it> must be one token of the model's vocabulary \(found [0-9]+\)"),
])  # fmt: skip
def test_grammar_errors_name_the_line_of_the_users_grammar(tiny: Path, grammar: str, complaint: str, cli):
    code, answer, stderr = cli("run", tiny, "-p", "Who?", "--grammar", grammar)
    assert (code, answer) == (2, "") and re.fullmatch(f"[^\n]*{complaint}\n", stderr)


# ---- grammars that are none, and large ones


@pytest.mark.parametrize(("grammar", "reason"), [
    ("root ::= [a-c]{3,2}", r"in line 1: the maximum of \{3,2\} must not be below its minimum"),
    ('root ::= "a"\n\n* "b"', None),
    ("root ::=\n * [a]", r"in line 2: \* must follow the item that it repeats"),
    ("root ::= ({2} [a])", r"in line 1: expected \), found '\{2\}'"),
    ('root ::= "a"{,3}', r"in line 1: unexpected"),
    ('root ::= "a', "in line 1: unexpected '\"a'"), ("root ::= [a", r"in line 1: unexpected '\[a'"),
    ("root ::= <[1x]> [a]", r"in line 1: <\[1x\]> must contain a token id, like <\[1000\]>"),
    ("root ::= [a]{3000}", "too large: use smaller repetition counts"),
    ("root ::= " + "(" * 5000 + "[a]" + ")" * 5000, "its groups are nested too deeply"),
    ('root ::= "a" root', "it matches no text"),
    ("root ::= [^\\U00000000-\\U0010FFFF]", "it matches no text"),
    ('root ::= "a" | "b" other\nother ::= other', None), ("\ufeffroot ::= [a]", None), ('root ::= "a" # no end', None),
    ("root ::= [a\\uD800-\\uDFFF]", None), ("root ::= [^\\uD800-\\uDFFF]", None),
    ("root ::= [\\uD800-\\uDFFF]", "it matches no text"), ("root ::= [\\u00e9-\\x41]", r"the range \\u00e9-\\x41 runs"),
])  # fmt: skip
def test_edge_cases_of_grammars_are_accepted_or_refused_with_a_line(grammar: str, reason: str | None, monkeypatch):
    monkeypatch.setattr(network, "MAX_STATES", 2000)
    if reason is None:
        matcher = begin(grammar, vocabulary := Vocabulary([]))
        assert matcher.compute_allowed_mask()[vocabulary.encode_inside("a")].all()
        return
    with pytest.raises(UsageError, match=reason):
        Constraint.from_grammar(grammar)


def test_rules_that_match_nothing_are_never_entered():
    vocabulary = Vocabulary([])
    matcher = begin('root ::= "a" ("b" | "cc" other | "d" [^\\U00000000-\\U0010FFFF])\nother ::= "x" other', vocabulary)
    matcher.accept(vocabulary.encode_inside("a")[0])
    assert [vocabulary.texts[token] for token in np.flatnonzero(matcher.compute_allowed_mask())] == [b"b"]
    only_nothing = begin('root ::= nothing nothing?\nnothing ::= "" | () "a"{0}', vocabulary)
    assert (
        only_nothing.is_complete and np.flatnonzero(only_nothing.compute_allowed_mask()).tolist() == vocabulary.end_ids
    )


@pytest.mark.parametrize(("grammar", "text"), [
    ('root ::= "(" root ")" | "x"', "(" * 3000 + "x" + ")" * 3000), ('root ::= [a-z] root | "."', "a" * 9000 + "."),
    ('root ::= root [a-z] | "."', "." + "a" * 9000), ("root ::= ([a-z]{1,90} [ ]){3,4000}", "abcde fghi " * 150),
    ('root ::= root root | "a"', "a" * 60),
])  # fmt: skip
def test_long_answers_stay_within_bounded_caches(grammar: str, text: str, monkeypatch):
    """Evict cached rows, masks and walks on the way."""
    vocabulary = Vocabulary([text[:30]])
    monkeypatch.setattr(grammar_matcher, "_ROWS", 500)
    monkeypatch.setattr(grammar_matcher, "_MASKS", 7)
    monkeypatch.setattr(grammar_matcher, "_WALKS", 3)
    matcher = begin(grammar, vocabulary)
    for place, token in enumerate(vocabulary.encode_inside(text)):
        assert matcher.compute_allowed_mask()[token], place
        matcher.accept(token)
    assert matcher.compute_allowed_mask()[0]
    assert len(matcher._matcher._automaton._configurations) < 2000


def test_matchers_of_one_grammar_are_independent():
    vocabulary = Vocabulary([])
    a, b, c = vocabulary.encode_inside("abc")
    first = begin("root ::= [ab] [bc] [a]?", vocabulary)
    second = first.copy()
    first.accept(a)
    third = first.copy()
    third.accept(c)
    assert [each.compute_allowed_mask()[[a, b, c]].tolist() for each in (first, second, third)] == [
        [False, True, True], [True, True, False], [True, False, False],
    ]  # fmt: skip
    first.compute_allowed_mask()[:] = False
    assert first.compute_allowed_mask()[b]


def test_a_token_that_is_not_allowed_is_refused():
    vocabulary = Vocabulary([])
    matcher = begin("root ::= [a]", vocabulary)
    with pytest.raises(ConstraintError, match="the grammar does not allow token 0"):
        matcher.accept(0)
    matcher = begin("root ::= [a]*", vocabulary)
    matcher.accept(1)
    assert matcher.is_complete
    with pytest.raises(ConstraintError):
        matcher.accept(vocabulary.encode_inside("a")[0])


@pytest.mark.parametrize(("grammar", "prefix", "expected"), [
    ('root ::= "yes" [a-z]?', "", "ye"), ('root ::= "yes"', "", "yes"), ('root ::= "yes"', "y", "es"),
    ("root ::= [a]*", "", ""), ('root ::= ("ab" | "ac") root | "x"', "", ""),
    ('root ::= "aé" | "aè"', "", ""), ('root ::= "é漢" "x"?', "", "é"), ("root ::= [a]{500}", "", "a" * 199),
])  # fmt: skip
def test_forced_tokens_stop_before_one_that_could_merge(grammar: str, prefix: str, expected: str):
    """Leave out the last token unless nothing can follow it."""
    vocabulary = Vocabulary([])
    matcher = begin(grammar, vocabulary)
    for token in vocabulary.encode_inside(prefix):
        matcher.accept(token)
    forced = b"".join(vocabulary.texts[token] for token in matcher.get_expected_tokens())
    assert forced.decode(errors="ignore") == expected


# ---- tokens of the vocabulary


@pytest.mark.parametrize(("grammar", "prefix", "allowed"), [
    ("root ::= <[300]> [a]", [], {300}), ("root ::= <[300]> [a]", [300], {"a"}),
    ('root ::= [a]? <[1]> "b"', [], {1, "a"}),
    ("root ::= <[0]> | <[97]>{2}", [97 + 1], {97 + 1}), ('root ::= !<[300]>* "x"', [], None),
    ("root ::= [a] !<[300]>", [], {"a"}),
    ('root ::= item+\nitem ::= <[300]> "b" | "a"', [300, "b"], {300, "a", 0, 1}),
])  # fmt: skip
def test_token_ids_in_a_grammar_match_whole_tokens(grammar: str, prefix: list, allowed: set | None):
    """Match a token by its id, whatever its bytes."""
    vocabulary = Vocabulary(["some text of which tokens are made"] * 30)
    number = {each: vocabulary.encode_inside(each)[0] for each in ("a", "b", "x")}
    matcher = begin(grammar.replace("97", "98"), vocabulary)
    for each in prefix:
        matcher.accept(number.get(each, each))
    allowed_ids = {*np.flatnonzero(matcher.compute_allowed_mask()).tolist()}
    if allowed is None:
        assert allowed_ids == {*range(2, vocabulary.vocab_size)} - {300}
        return
    same = {token for each in allowed if isinstance(each, str) for token, text in enumerate(vocabulary.texts)
            if text == each.encode()}  # fmt: skip
    assert allowed_ids == {each for each in allowed if isinstance(each, int)} | same


def test_a_grammar_with_think_constrains_the_reasoning_too(tmp_path: Path, monkeypatch):
    """Leave reasoning free if the grammar does not mention <think>."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    monkeypatch.setattr("tiny_model.SPECIAL_TOKENS", special)
    tokenizer = Tokenizer.from_file(write_tiny_model(tmp_path / "tiny.gguf"))
    head = "<|im_start|>{{ m.role }}\n"
    template = f"{{% for m in messages %}}{head}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}<|im_start|>assistant\n"
    wanted = [
        token for part in ("<think>", "abcdef", "</think>", "maybe") for token in tokenizer.encode(part, special=True)
    ]

    def answer(grammar: str) -> tuple[str, str, str]:
        begun: list[int] = []

        def say(tokens: list[int]) -> int:
            begun.append(len(tokens))
            return [*wanted, 2][min(len(tokens) - begun[0], len(wanted))]

        fake = FakeEngine(tokenizer.vocab_size, say)
        shape = Constraint.from_grammar(grammar)
        options = GenerationOptions(60, (), SamplingOptions(temperature=0), constraint=shape)
        answer = Session(PrefixCache(fake), tokenizer, template).chat([{"role": "user", "content": "Who?"}], options)
        return "".join(answer), answer.thinking, answer.finish_reason

    thought = "root ::= <think> !</think>{1,9} </think> "
    assert answer(thought + '("yes" | "no" | [m] [a-z]{4})') == ("maybe", "abcdef", "stop")
    assert answer(thought.replace("{1,9}", "{1}") + "[a-z]{2}")[1:] == (tokenizer.decode(wanted[1:2]), "stop")
    assert answer("root ::= [a-z]{5}") == ("maybe", "abcdef", "stop")
    assert answer("root ::= [x-z]{2}")[1:] == ("abcdef", "stop")


def test_the_first_mask_of_a_large_grammar_visits_few_states():
    """Bound the work, not the time: many rules, states and ambiguities."""
    rules = "".join(f'r{n} ::= "{n}" (r{n + 1} | [a-z]{{2,9}} r{n + 2}?)\n' for n in range(300))
    vocabulary = Vocabulary([])
    matcher = begin(f'root ::= r0\n{rules}r300 ::= "x"\nr301 ::= "y"', vocabulary)
    for token in vocabulary.encode_inside("".join(map(str, range(300))) + "x"):
        matcher.accept(token)
    assert matcher.compute_allowed_mask()[0]
    assert begin("root ::= [^a]{0,20000}", vocabulary).compute_allowed_mask().sum() > 100
    matcher = begin("root ::= " + "[a-z]? " * 400 + '"."', vocabulary)
    for token in vocabulary.encode_inside("x" * 400 + "."):
        assert matcher.compute_allowed_mask()[token]
        matcher.accept(token)
    assert matcher.is_complete
