"""Test constrained answers: finished ones match the constraint, and unsupported constraints are refused."""

import json
import math
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, saying
from project import ROOT
from tiny_model import write_tiny_model

import localllm
from localllm.errors import ConstraintError, UsageError
from localllm.generation.answer_state import AnswerState
from localllm.generation.constraints import constraint as constraints
from localllm.generation.constraints import schemas
from localllm.generation.constraints.constraint import Constraint, Matcher, get_matcher, make_constraint
from localllm.generation.constraints.schemas import make_exact
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.reasoning import ANSWER, FORMATS, Thinking
from localllm.generation.sampling.sampler import SamplingOptions
from localllm.generation.session import Session
from localllm.text.tokenizer import Tokenizer

sys.path.insert(0, str(ROOT / "scripts" / "fuzz"))
from check_schemas import Schemas, check, problem

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Who?"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=4096)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Iterator[localllm.Model]:
    with localllm.open(tiny, cache=False) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.from_file(tiny)


def accepts(constraint: Constraint, text: str, tokenizer: Tokenizer) -> bool:
    """Return whether the constraint accepts a string as a whole answer."""
    matcher = get_matcher(constraint, tokenizer, tokenizer.vocab_size)
    for token in tokenizer.encode(text):
        if not matcher.compute_allowed_mask()[token]:
            return False
        matcher.accept(token)
    return bool(matcher.compute_allowed_mask()[list(tokenizer.end_ids)].any())


# Finished answers are valid.


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", [0.8, 1000.0])
def test_finished_answers_validate_against_random_schemas(model: localllm.Model, temperature: float):
    """Check 30 of the random schemas of scripts/fuzz/check_schemas.py."""
    schemas = [schema for schema, _ in zip(Schemas(7), range(30), strict=False)]
    counts = check(model, schemas, temperature, 1, 120)
    assert counts["invalid"] == counts["failed"] == 0
    assert counts["valid"] > 22, "otherwise this shows nothing"


@pytest.mark.sampled
def test_a_real_model_answers_by_a_schema_with_and_without_drafts(shared: Path):
    with localllm.open(shared / "models" / "smollm2-135m-instruct-q4_1.gguf", cache=False) as model:
        answers = {
            speculate: model.chat(ASKED, 60, speculate=speculate, temperature=0, schema=PERSON)
            for speculate in ("off", "ngram")
        }
        for answer in answers.values():
            assert problem(PERSON, "".join(answer)) is None
            assert answer.finish_reason == "stop"
        assert answers["off"].tokens == answers["ngram"].tokens
        assert answers["ngram"].steps < answers["off"].steps, "tokens that must come are guessed"


@pytest.mark.parametrize("seed", range(3))
def test_drafts_do_not_change_a_constrained_answer(model: localllm.Model, seed: int):
    schema = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3}
    answers = [model.chat(ASKED, 150, speculate=how, seed=seed, schema=schema) for how in ("off", "ngram", model)]
    texts = ["".join(answer) for answer in answers]
    assert texts[0] == texts[1] == texts[2]
    assert answers[1].accepted and answers[2].accepted


def test_candidates_beams_and_map_all_keep_the_schema(model: localllm.Model):
    for answers in (model.candidates(ASKED, 4, max_tokens=80, seed=1, schema=PERSON),
                    model.candidates("x", 2, beams=3, max_tokens=80, schema=PERSON),
                    list(model.map([ASKED, "x", ASKED], 80, seed=1, schema=PERSON))):  # fmt: skip
        assert {answer.finish_reason for answer in answers} == {"stop"}
        assert [problem(PERSON, answer.text) for answer in answers] == [None] * len(answers)


def test_a_batch_gives_the_same_constrained_answers_as_single_requests(model: localllm.Model):
    alone = "".join(model.chat(ASKED, 80, seed=5, schema=PERSON))
    assert [answer.text for answer in model.map([ASKED, ASKED], 80, seed=5, schema=PERSON)] == [alone, alone]


def test_a_cut_constrained_answer_ends_with_length(model: localllm.Model):
    answer = model.chat(ASKED, 5, seed=1, schema=PERSON)
    assert len("".join(answer)) >= 2 and answer.finish_reason == "length"


def test_an_answer_ends_without_a_step_for_its_end(model: localllm.Model):
    answer = model.generate("x", 9, seed=1, regex="abc", speculate="off")
    assert ("".join(answer), answer.finish_reason, answer.steps) == ("abc", "stop", 2)


def test_only_the_record_whose_grammar_gets_too_complex_fails(model: localllm.Model, monkeypatch):
    def compute_allowed_mask(matcher: Matcher) -> np.ndarray:
        raise ConstraintError("the answer cannot be constrained any further")

    chosen = [GenerationOptions(80, sampling=SamplingOptions(seed=1), constraint=shape)
              for shape in (None, Constraint.from_schema(PERSON), None)]  # fmt: skip
    monkeypatch.setattr(Matcher, "compute_allowed_mask", compute_allowed_mask)
    requests = [model.session.request(ASKED, options, n) for options, n in zip(chosen, (1, 2, 1), strict=True)]
    finished = [request for some in model.batch(iter(requests)) for request in some]
    assert len(finished) == 3
    assert [request.error is None for request in requests] == [True, False, True]
    with pytest.raises(ConstraintError):
        "".join(model.chat(ASKED, 80, schema=PERSON))


def test_only_the_record_whose_bias_leaves_no_token_fails(model: localllm.Model):
    never = dict.fromkeys(range(model.tokenizer.vocab_size), -math.inf)
    shape = make_constraint(regex="abc")
    requests = [
        model.session.request(
            "x", GenerationOptions(9, sampling=SamplingOptions(seed=1, logit_bias=bias), constraint=shape)
        )
        for bias in (None, never, None)
    ]
    assert sum(len(finished) for finished in model.batch(iter(requests))) == 3
    assert [str(request.error or request.answers[0].text) for request in requests] == [
        "abc", "the constraint allows no token at this position", "abc",
    ]  # fmt: skip


def test_a_class_with_model_json_schema_is_a_schema(model: localllm.Model):
    class Person:
        @classmethod
        def model_json_schema(cls) -> dict:
            return PERSON

    assert problem(PERSON, "".join(model.chat(ASKED, 80, seed=2, schema=Person))) is None
    pydantic = pytest.importorskip("pydantic")
    closed = pydantic.ConfigDict(extra="forbid")
    compiled = pydantic.create_model("Made", __config__=closed, n=(int, pydantic.Field(ge=3, le=5)))
    assert compiled.model_validate_json("".join(model.generate("x", 80, seed=2, schema=compiled))).n in (3, 4, 5)


# Thoughts come first.

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
GREEDY = SamplingOptions(temperature=0)


def answer_with_reasoning(tokenizer: Tokenizer, template: str, script: str, **options) -> tuple[str, str, str]:
    """Return reasoning, answer and finish reason of an engine that follows the script."""
    fake = FakeEngine(tokenizer.vocab_size, saying(tokenizer, script))
    chosen = GenerationOptions(100, (), GREEDY, constraint=Constraint.from_regex("yes|no"), **options)
    answer = Session(PrefixCache(fake), tokenizer, template).chat(ASKED, chosen)
    return "".join(text for kind, text in answer.parts if kind == "thought"), answer.text, answer.finish_reason


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_reasoning_is_free_and_the_answer_is_constrained(tokenizer: Tokenizer, speculate: str):
    opening = TURNS + "<think>\n{# </think> #}"
    script = "<think>\nFree > thought.</think>yes"
    assert answer_with_reasoning(tokenizer, opening, script, speculate=speculate) == ("Free > thought.", "yes", "stop")
    assert answer_with_reasoning(tokenizer, opening, "<think>\nHm</think>yesterday")[1:] == ("yes", "stop")
    assert answer_with_reasoning(tokenizer, opening, "<think>\n" + "ab" * 50, think_budget=4)[::2] == ("abab", "stop")


def test_an_end_token_within_reasoning_does_not_end_the_answer(tokenizer: Tokenizer):
    """Mask the end token until the answer has begun."""
    parts = answer_with_reasoning(tokenizer, TURNS + "<think>\n{# </think> #}", "<think>\nHm")
    assert parts[0].startswith("Hm") and parts[1:] == ("", "length")


def test_reasoning_opened_by_a_token_precedes_a_constrained_answer(tmp_path: Path, monkeypatch):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    monkeypatch.setattr("tiny_model.SPECIAL_TOKENS", special)
    tokenizer = Tokenizer.from_file(write_tiny_model(tmp_path / "tiny.gguf"))
    text = "<think>I write </think> so.</think>no"
    parts = ["<think>", "I write <", "/think> so.", "</think>", "no"]  # the mark in the middle is text, not the token
    script = [token for part in parts for token in tokenizer.encode(part, special=part in special)] + [2]
    start = len(tokenizer.encode_rendered("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"))
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: script[min(len(tokens) - start, len(script) - 1)])
    chosen = GenerationOptions(100, (), GREEDY, constraint=Constraint.from_regex("yes|no"))
    answer = Session(PrefixCache(fake), tokenizer, TURNS).chat(ASKED, chosen)
    assert ("".join(answer), answer.thinking) == ("no", text[7:-10])
    off = GenerationOptions(100, (), GREEDY, constraint=Constraint.from_regex("yes|no"), think="off")
    fake.say = lambda tokens: script[0]
    answer = Session(PrefixCache(fake), tokenizer, TURNS).chat(ASKED, off)
    assert ("".join(answer) in ("yes", "no"), answer.thinking) == (True, "")


def test_gpt_oss_channels_constrain_the_final_channel_only(tmp_path: Path, monkeypatch):
    """Mask the channel markers within the answer."""
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|return|>", "<|call|>"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks]
    monkeypatch.setattr("tiny_model.SPECIAL_TOKENS", special)
    tokenizer = Tokenizer.from_file(write_tiny_model(tmp_path / "tiny.gguf"))
    text = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    script = [*tokenizer.encode(text, special=True), 2]
    template = TURNS + "{# <|start|><|channel|>analysis<|message|><|end|> #}"
    start = len(tokenizer.encode_rendered("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"))
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: script[min(len(tokens) - start, len(script) - 1)])
    chosen = GenerationOptions(100, (), GREEDY, constraint=Constraint.from_regex("yes|no"))
    answer = Session(PrefixCache(fake), tokenizer, template).chat(ASKED, chosen)
    assert ("".join(answer), answer.thinking, answer.finish_reason) == ("yes", "Hm", "stop")


# Grammars and regular expressions.

JSON_GRAMMAR = r"""
root   ::= value  # of llama.cpp's json.gbnf
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ('root ::= "yes" | "no" why?\nwhy ::= ", because " [^\\n]{1,8}', ["no", "no, because é"], ["no, ", "nob"]),
        (JSON_GRAMMAR, ['{"a": [1, -2.5e3, "\\u00e9é"], "b":{}}', "[]", "true "], ["{a:1}", "[1,]", '"\n"', "01"]),
        ('root ::= "(" root ")" | ""', ["", "(())"], ["(()", ")"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", "ab"]),
        ('root ::= [a-c-]{2} . "/" [\\]^]', ["a--/]", "bc\n/^", "aa😀/]"], ["aa/]", "dax/]"]),
        ('root ::= [^a-z]* "x"{2,} "\\x41\\u00e9\\U0001F600"?', ["xx", "1é xxxAé😀"], ["x", "axx"]),
        ('root ::=\n  "a" |\n  "b"\n# done', ["a", "b"], ["ab"]),
        ("root ::= ab-c\nab-c ::= x_1 x_1\nx_1 ::= \"\\\"\" | \"\\t\"", ['""', '"\t'], ['"']),
        ('root ::= a*\na ::= "ab" | "abc" | "cd"', ["abcd", "abccd", ""], ["abd"]),
    ],
)  # fmt: skip
def test_a_grammar_accepts_its_sentences_only(tokenizer: Tokenizer, grammar: str, yes: list[str], no: list[str]):
    constraint = Constraint.from_grammar(grammar)
    assert [accepts(constraint, text, tokenizer) for text in yes] == [True] * len(yes)
    assert [accepts(constraint, text, tokenizer) for text in no] == [False] * len(no)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "has no rule named root"),
        ('rot ::= "a"', "has no rule named root"),
        ("root ::= other", "in line 1: there is no rule 'other'"),
        ('root ::= "a"\nroot = "b"', "in line 2: unexpected '= \"b\"'"),
        ('root ::= ("a"', r"in line 1: expected \), found the end"),
        ('root ::= "a" )', r"in line 1: expected a rule's name, found '\)'"),
        ('\nroot ::= "a\\q"', r"in line 2: there is no escape \\q"),
        ("root ::= [z-a]", "in line 1: the range z-a runs backwards"),
        ("root ::= []", "in line 1: a character class must not be empty"),
        ('root ::= "\\uD800"', r"in line 1: a string must not contain surrogates, \\uD800 to \\uDFFF"),
        ('root ::= "\\U00110000"', r"in line 1: there is no character \\U00110000"),
        ("root ::= <think [a]", "in line 1: unexpected '<think"),
        (b"root", "must be a string"),
    ],
)
def test_invalid_grammars_are_refused(grammar: str, reason: str):
    with pytest.raises(UsageError, match=reason):
        Constraint.from_grammar(grammar)


def test_a_grammar_that_matches_nothing_is_refused():
    with pytest.raises(UsageError, match="it matches no text"):
        Constraint.from_grammar("root ::= a\na ::= root")


@pytest.mark.parametrize(
    ("regex", "yes", "no"),
    [
        (r"\d{3}-\d{4}", ["555-1234"], ["555-123", "555-12345"]),
        (r"(?i)yes|no", ["YES", "no"], ["n"]),
        ("", [""], ["a"]),
        (r"[^\s/]+\.(png|jpe?g)", ["ä.png", "a.b.jpg"], ["a b.png", "a.gif"]),
    ],
)
def test_a_regex_accepts_its_matches_only(tokenizer: Tokenizer, regex: str, yes: list[str], no: list[str]):
    constraint = Constraint.from_regex(regex)
    assert [accepts(constraint, text, tokenizer) for text in yes] == [True] * len(yes)
    assert [accepts(constraint, text, tokenizer) for text in no] == [False] * len(no)


def test_a_regex_never_allows_control_tokens(model: localllm.Model):
    for seed in range(9):
        answer = model.generate("x", 40, seed=seed, temperature=1000.0, top_k=0, top_p=1.0, min_p=0.0, regex=".{9}")
        text = "".join(answer)
        assert len(text) == 9 and not set(answer.tokens) & model.tokenizer.control_ids


# What cannot be had is refused, by name and in one line.


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"uniqueItems": True, "type": "array", "minItems": 2}, "uniqueItems is not supported with minItems above 1"),
        ({"not": {"type": "string"}}, 'the schema cannot be used: "not" is not supported'),
        ({"properties": {"a": {"if": {"type": "string"}, "then": {"minLength": 2}}}}, '"if", "then"'),
        ({"contains": {"type": "string"}, "type": "array"}, "contains"),
        ({"propertyNames": {"minLength": 2}}, "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependentSchemas": {"a": {}}}, "dependentSchemas"),
        ({"unevaluatedProperties": False, "oneOf": [{}]}, "unevaluatedProperties"),
        ({"unevaluatedItems": False}, "unevaluatedItems"),
        ({"$dynamicRef": "#a"}, "dynamicRef"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "http://nowhere.invalid/x"}, "nowhere.invalid"),
        ({"$ref": "#/$defs/a"}, "/[$]defs/a"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "Unsatisfiable"),
        ({"type": "string", "format": "date", "maxLength": 5}, "Unsatisfiable"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, "minimum"),
        ({"type": "string", "pattern": "a("}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"x-guidance": {"lenient": True}, "not": {}}, '"not"'),
        ("{", "the schema is not valid JSON"),
        ("[]", "must be an object"),
        (7, "must be an object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_unsupported_schemas_are_refused_in_one_line(schema, reason: str):
    with pytest.raises(UsageError, match=reason) as refused:
        Constraint.from_schema(schema)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("regex", ["a(", r"\bword\b", r"(a)\1", "[", 5])
def test_invalid_regexes_are_refused_in_one_line(regex):
    with pytest.raises(UsageError, match=r"regex|regular") as refused:
        Constraint.from_regex(regex)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("regex", "reason"),
    [
        ("a(", "the regular expression is invalid: unclosed group"),
        ("[", "the regular expression is invalid: unclosed character class"),
        (r"(a)\1", "the regular expression is invalid: backreferences are not supported"),
        (r"\ba", "lookarounds not supported"),
    ],
)
def test_the_error_of_an_invalid_regex_has_no_picture(regex: str, reason: str):
    with pytest.raises(UsageError) as refused:
        Constraint.from_regex(regex)
    message = str(refused.value)
    assert message.startswith("the regex cannot be used: ") and reason in message
    assert "^" not in message and "|" not in message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("NoExtensionBias and more", "it matches no text"),
        ('Unimplemented keys: ["a"]', '"a" is not supported'),
        ('Unimplemented keys: ["a", "b"]', '"a", "b" are not supported'),
        ("oneOf constraints are hard", "oneOf is supported for schemas that obviously exclude each other only"),
        ("a\n  b |\nerror: c", "a b | error: c"),
        ("x" * 900, "x" * 300),
    ],
)
def test_reasons_of_llguidance_are_shortened_to_one_line(message: str, reason: str):
    assert constraints._shorten_error(message) == reason


def test_schema_and_regex_cannot_be_combined(model: localllm.Model):
    with pytest.raises(UsageError, match="schema and regex cannot be combined"):
        make_constraint(schema={}, regex="a")
    assert make_constraint() is None


def test_bounds_with_the_same_leading_digits_are_both_kept(tokenizer: Tokenizer):
    """Keep the exclusive bound, which llguidance alone would lose."""
    for schema, outside, inside in (
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0", "0.25"),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, "-2", "-2.25"),
        ({"allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]}, "2", "2.5"),
        ({"minimum": 3, "exclusiveMinimum": True}, "3", "3.5"),
    ):
        constraint = Constraint.from_schema({"type": "number", **schema})
        assert (accepts(constraint, outside, tokenizer), accepts(constraint, inside, tokenizer)) == (False, True)


def test_property_names_and_enum_values_are_not_read_as_keywords():
    schema = {
        "properties": {"exclusiveMinimum": {"type": "string"}, "enum": {"exclusiveMinimum": 0, "maximum": 9}},
        "enum": [{"exclusiveMinimum": 0, "maximum": 0.5, "items": []}],
    }
    assert make_exact(json.loads(json.dumps(schema)), is_open=True) == schema


def test_no_module_imports_llguidance_at_its_top():
    for path in (ROOT / "localllm").rglob("*.py"):
        assert not re.search(r"^(import|from) llguidance", path.read_text(encoding="utf-8"), re.MULTILINE)


# The command line.

PROMPT = ("-p", "Who?", "-n", "99", "-s", "1")


def test_run_answers_by_a_schema_from_a_file_or_the_command_line(tiny: Path, tmp_path: Path, cli):
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    for schema in (tmp_path / "person.json", json.dumps(PERSON)):
        code, out, err = cli("run", tiny, *PROMPT, "--json-schema", schema)
        assert (code, problem(PERSON, out), err) == (0, None, "")
    code, out, _ = cli("run", tiny, *PROMPT, "-j", json.dumps(PERSON), "--n", "2", "--json")
    assert [problem(PERSON, answer["text"]) for answer in json.loads(out)["answers"]] == [None, None]


def test_map_outputs_values_by_a_schema_or_their_text(tiny: Path, cli):
    command = "map", tiny, "-n", "99", "-s", "1", "-j", json.dumps(PERSON)
    code, out, _ = cli(*command, stdin=b"a\nb\n")
    outputs = [json.loads(line)["output"] for line in out.splitlines()]
    assert [problem(PERSON, json.dumps(output)) for output in outputs] == [None, None]
    code, out, _ = cli(*command, "--json-as-text", stdin=b"a\nb\n")
    assert [json.loads(json.loads(line)["output"]) for line in out.splitlines()] == outputs
    assert code == 0


def test_run_answers_by_a_grammar_or_a_regex(tiny: Path, tmp_path: Path, cli):
    (tmp_path / "answer.gbnf").write_text('root ::= "yes" | "no"')
    assert cli("run", tiny, *PROMPT, "--grammar", tmp_path / "answer.gbnf")[1] in ("yes\n", "no\n")
    assert cli("run", tiny, *PROMPT, "--grammar", 'root ::= "maybe"')[1] == "maybe\n"
    assert re.fullmatch(r"[ab]{7}\n", cli("run", tiny, *PROMPT, "--regex", "[ab]{7}")[1])


def test_run_exits_with_7_if_a_constrained_answer_was_cut(tiny: Path, cli):
    code, out, err = cli("run", tiny, *PROMPT, "--regex", "[ab]{7}", "-n", "3")
    assert (code, len(out)) == (7, 4)
    assert err == "localllm: error: the answer was cut off before it matched its regex; raise -n or the context\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--json-schema", '{"not": {}}'), "not"),
        (("--json-schema", "missing.json"), "cannot read missing.json: No such file or directory"),
        (("--grammar", 'rot ::= "a"'), "no rule named root"),
        (("--regex", "a("), "unclosed group"),
        (("--regex", "a", "-j", "{}"), "cannot be combined"),
    ],
)
def test_run_refuses_unsupported_constraints_before_it_opens_the_model(
    arguments: tuple[str, ...], reason: str, refused
):
    refused(["run", "missing.gguf", "-p", "Hi", *arguments], reason)


# ---- what is ready for the next answer ------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Record the grammars that are compiled for a vocabulary."""
    compiled, beginning = list[str](), Constraint.create_matcher

    def counted(self, vocabulary):
        compiled.append(self.grammar)
        return beginning(self, vocabulary)

    monkeypatch.setattr(Constraint, "create_matcher", counted)
    return compiled


def test_threads_that_share_a_constraint_compile_it_once(tiny, compiled, monkeypatch):
    """Let the others wait while one thread compiles."""
    tokenizer, constraint = Tokenizer.from_file(tiny), Constraint.from_regex("[abc]{3}")
    counted, here, go, counts = Constraint.create_matcher, threading.Event(), threading.Event(), []

    def slow(self, vocabulary):
        here.set()
        assert go.wait(30)
        return counted(self, vocabulary)

    def work() -> None:
        matcher = get_matcher(constraint, tokenizer, tokenizer.vocab_size)
        counts.append(int(matcher.compute_allowed_mask().sum()))

    compiled.clear()
    monkeypatch.setattr(Constraint, "create_matcher", slow)
    threads = [threading.Thread(target=work) for _ in range(3)]
    threads[0].start()
    assert here.wait(30)
    for thread in threads[1:]:
        thread.start()
        thread.join(0.2)  # it waits for the first, and not for anything that can be told
    go.set()
    for thread in threads:
        thread.join(30)
    assert len(compiled) == 1
    assert len(counts) == 3 and len(set(counts)) == 1 and counts[0] > 0


def test_matchers_of_one_constraint_are_independent(tokenizer):
    first, second = (get_matcher(Constraint.from_regex("ab|cd"), tokenizer, tokenizer.vocab_size) for _ in range(2))
    a, b, c, d = (tokenizer.encode(letter)[0] for letter in "abcd")
    before = second.compute_allowed_mask()
    first.accept(a)
    third = first.copy()
    first.accept(b)
    np.testing.assert_array_equal(second.compute_allowed_mask(), before)
    assert first.is_complete and not third.is_complete
    assert third.compute_allowed_mask()[b] and not third.compute_allowed_mask()[d]
    second.accept(c)
    assert second.compute_allowed_mask()[d] and not second.compute_allowed_mask()[b]


def test_the_oldest_of_65_constraints_is_compiled_again(tiny, compiled):
    tokenizer = Tokenizer.from_file(tiny)
    constraints = [Constraint.from_regex(f"a{{{count}}}") for count in range(1, 66)]
    compiled.clear()
    for constraint in (*constraints[:64], *constraints[:64]):
        get_matcher(constraint, tokenizer, tokenizer.vocab_size)
    assert len(compiled) == 64
    for constraint in (constraints[64], constraints[1], constraints[0]):
        get_matcher(constraint, tokenizer, tokenizer.vocab_size)
    assert compiled[64:] == [constraints[64].grammar, constraints[0].grammar]


def test_forced_tokens_are_expected_even_after_the_answer_has_begun():
    """Expect the rest of a reasoning marker first."""
    answering = SimpleNamespace(kind=ANSWER, is_between_parts=False)
    guide = AnswerState.__new__(AnswerState)
    guide.transcript, guide._matcher = answering, SimpleNamespace(get_expected_tokens=lambda: [9])
    for forced, expected in (((5, 6), [5, 6]), ((), [9])):
        guide._forced = forced
        assert list(guide.get_expected_tokens()) == expected
    guide.transcript = SimpleNamespace(kind="thought", is_between_parts=False)
    assert list(guide.get_expected_tokens()) == []


def test_a_failing_matcher_raises_at_once():
    """Fail at construction, at a mask and at a token."""
    problems = [""]
    llguidance: Any = SimpleNamespace(is_error=lambda: bool(problems[0]), get_error=lambda: problems[0])
    llguidance.compute_bitmask, llguidance.consume_token = lambda: b"\x15", lambda token: None
    matcher = Matcher(llguidance, 5, None)
    assert matcher.compute_allowed_mask().tolist() == [True, False, True, False, True]
    matcher.accept(0)
    problems[0] = "too complex"
    for action in (lambda: Matcher(llguidance, 5, None), matcher.compute_allowed_mask, lambda: matcher.accept(0)):
        with pytest.raises(ConstraintError, match=r"^the answer cannot be constrained any further: too complex$"):
            action()


def test_reasoning_allows_all_tokens_but_ends_and_split_markers():
    """Mask end tokens and tokens that hold a marker's end and more."""
    pieces = ["a", "</think>", "k> ", "> x", ">", "<e>"]
    tokenizer: Any = SimpleNamespace(vocab_size=6, end_ids={5}, pieces=pieces, decode=lambda ids: pieces[ids[0]])
    llguidance: Any = SimpleNamespace(is_error=lambda: False)
    for thinking, expected in (
        (Thinking(FORMATS[-2]), [0, 1, 2, 4]), (Thinking(FORMATS[-2], starts=(1,)), [0, 1, 2, 3, 4]),
        (Thinking(), [0, 1, 2, 3, 4]),
    ):  # fmt: skip
        matcher = Matcher(llguidance, 8, tokenizer)
        mask = matcher.compute_unfinished_mask(thinking)
        assert (
            len(mask) == 8
            and np.flatnonzero(mask).tolist() == expected
            and matcher.compute_unfinished_mask(thinking) is mask
        )


def test_endless_schemas_and_vocabularies_without_an_end_are_refused(monkeypatch):
    def endless(schema: object, is_open: bool) -> None:
        raise RecursionError

    with pytest.raises(
        UsageError, match=r"^the model's vocabulary has no token that ends an answer, which a constraint"
    ):
        get_matcher(Constraint.from_regex("a"), SimpleNamespace(end_ids=frozenset()), 5)
    monkeypatch.setattr(constraints, "make_exact", endless)
    with pytest.raises(UsageError, match=r"^the schema cannot be used: it is nested too deeply$"):
        Constraint.from_schema({})


@pytest.mark.parametrize(("schema", "expected"), [
    ({"exclusiveMinimum": False, "minimum": 3}, {"minimum": 3}), ({"exclusiveMaximum": True}, {}),
    ({"exclusiveMinimum": True, "minimum": 3}, {"exclusiveMinimum": 3}), ({"exclusiveMaximum": False}, {}),
    ({"exclusiveMaximum": True, "maximum": "x"}, {"maximum": "x"}), ({"exclusiveMinimum": 3}, {"exclusiveMinimum": 3}),
    ({"exclusiveMinimum": "x", "maximum": 3}, {"exclusiveMinimum": "x", "maximum": 3}),
    ({"exclusiveMinimum": 3, "maximum": 3.5}, {"minimum": 3 + 3e-9, "maximum": 3.5}),
    ({"exclusiveMaximum": -3, "minimum": -3.5}, {"maximum": -3 - 3e-9, "minimum": -3.5}),
    ({"exclusiveMinimum": 3, "maximum": 4}, {"exclusiveMinimum": 3, "maximum": 4}),
    ({"exclusiveMinimum": 0, "maximum": 0.5}, {"minimum": 1e-9, "maximum": 0.5}),
    ({"exclusiveMinimum": 3, "minimum": 1, "maximum": 3.5}, {"exclusiveMinimum": 3, "minimum": 1, "maximum": 3.5}),
    ({"exclusiveMinimum": 2.5, "maximum": 3}, {"exclusiveMinimum": 2.5, "maximum": 3}),
])  # fmt: skip
def test_boolean_exclusive_bounds_of_old_drafts_are_converted(schema: dict, expected: dict):
    """Convert draft 4's booleans; move a bound that could merge with another."""
    assert schemas._make_inclusive({**schema}, False) == expected
    merged = schemas._make_inclusive({"exclusiveMinimum": 5}, True)
    assert merged == {"minimum": 5 + 5e-9}
