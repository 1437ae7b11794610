"""Test that a constrained value may be written in every JSON spelling, token by token."""

import json
import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from vocabularies import GIVEN, byte_level

from localllm.generation.constraints.constraint import Constraint, Matcher, get_matcher, matches_schema
from localllm.generation.constraints.json_matcher import is_whole_escape, parse_escape
from localllm.generation.constraints.json_text import normalize_whole_numbers
from localllm.generation.tools.tool_call_format import ParameterMarks, ToolCallFormat
from localllm.generation.tools.tool_grammar import Tool, ToolGrammar, ToolUse
from localllm.text.tokenizer import Tokenizer

# Tokens that end within an escape, or begin in one and go beyond it.
ODD = (
    "\\u",
    '"\\',
    "\\u00",
    "e9",
    "edit",
    "each",
    "u0",
    "ud8",
    "3d",
    "\\/",
    "\\\\",
    "nfo",
    "9\\",
    "1e",
    "e-",
    "00",
    '9"',
)
TOKENIZER = Tokenizer(byte_level(GIVEN["merges"], "qwen2", (1, 3), ODD))
TEXTS = {
    TOKENIZER.token_bytes(token): token for token in range(TOKENIZER.vocab_size) if token not in TOKENIZER.mark_ids
}
CHARACTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from('é你😀"\\/\n\t\x00\x1f\x7fa')
STRINGS = st.text(CHARACTERS, max_size=6)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=5,
)


def accepts(schema: object, text: str, seed: int | None = None) -> bool:
    """Return whether a string can be written, by the tokenizer's or by random tokens, and then ended."""
    constraint = Constraint.from_schema(schema, additional_properties=True)
    return writes(get_matcher(constraint, TOKENIZER, TOKENIZER.vocab_size), text, seed)


def writes(matcher: Matcher, text: str, seed: int | None) -> bool:
    """Return whether a matcher allows a string and then the end: see accepts."""
    choose, data, tokens = random.Random(seed), text.encode(), TOKENIZER.encode_inside(text)
    while data:
        mask = matcher.compute_allowed_mask()
        beginnings = [TEXTS[data[:length]] for length in range(1, 9) if data[:length] in TEXTS]
        choices = [token for token in ([tokens.pop(0)] if seed is None else beginnings) if mask[token]]
        if not choices:
            return False
        token = choose.choice(choices[-2:])
        matcher.accept(token)
        data = data[len(TOKENIZER.token_bytes(token)) :]
    return bool(matcher.compute_allowed_mask()[[*TOKENIZER.end_ids]].all())


def spell(text: str, seed: int, plain_ascii: bool = False) -> str:
    """Write a string as JSON in random spellings; plain_ascii keeps ASCII characters as they are."""
    choose, written = random.Random(seed), ['"']
    for character in text:
        plain, units = json.dumps(character, ensure_ascii=False)[1:-1], character.encode("utf-16-be")
        codes = [units[place : place + 2].hex() for place in range(0, len(units), 2)]
        spellings = [plain, "".join(f"\\u{code}" for code in codes), "".join(f"\\u{code.upper()}" for code in codes)]
        spellings = spellings[:1] if plain_ascii and character.isascii() else spellings
        written.append(choose.choice(spellings + ["\\/"] * (character == "/")))
    return "".join(written) + '"'


@given(VALUES, st.integers(0, 99))
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
def test_an_empty_schema_accepts_all_that_json_dumps_writes(value: Any, seed: int):
    assert accepts({}, json.dumps(value), seed)


@given(STRINGS, st.integers(0, 99))
@settings(max_examples=10, deadline=None, phases=[Phase.generate])
def test_a_string_accepts_every_spelling_of_its_characters(text: str, seed: int):
    written = spell(text, seed)
    assert json.loads(written) == text
    assert accepts({"type": "string", "maxLength": len(text), "minLength": len(text)}, written, seed)
    assert accepts({"type": "string", "pattern": "^(?s:.)*$"}, written, seed)
    written = spell(text, seed, plain_ascii=True)  # the usual tokens of a text that must follow
    assert accepts({"const": text}, written, seed)
    assert accepts({"enum": ["other", text, text + "é"]}, written, seed)
    key = {"type": "object", "properties": {text: {"type": "null"}}, "required": [text]}
    assert accepts(key, f"{{{written}: null}}", seed)


@given(STRINGS.filter(bool), st.integers(0, 99))
@settings(max_examples=10, deadline=None, phases=[Phase.generate])
def test_max_length_counts_characters_instead_of_escapes(text: str, seed: int):
    assert not accepts({"type": "string", "maxLength": len(text) - 1}, spell(text, seed), seed)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, r'"caf\u00e9"'),
        ({"type": "string", "maxLength": 2}, r'"\ud83d\ude00\u00E9"'),
        ({"type": "string", "pattern": "^caf.$"}, r'"caf\u00e9"'),
        ({"type": "string", "pattern": "^[à-ü]+$"}, r'"\u00e9\u00e0"'),
        ({"type": "string", "pattern": "^a/b$"}, r'"a\/b"'),
        ({"type": "string", "format": "uri"}, r'"http:\/\/a.b\/c"'),
        ({"const": {"é": ["ü/"]}}, r'{"\u00e9": ["\u00fc\/"]}'),
        ({"patternProperties": {"^é": {"type": "null"}}, "additionalProperties": False}, r'{"\u00e9a": null}'),
        ({"anyOf": [{"const": "é"}, {"type": "integer"}]}, r'"\u00e9"'),
        ({"type": "array", "items": {"enum": ["é", "è"]}}, r'["\u00e8","\u00e9"]'),
        ({"type": "number", "minimum": 0, "maximum": 1}, "1e-05"),
        ({"type": "number", "exclusiveMinimum": 0}, "2.5E+3"),
        ({"type": "number", "multipleOf": 0.5}, "15e-1"),
        ({"type": "array", "items": {"type": "number", "maximum": 5}}, "[1e-3, 2e0]"),
    ],
)
def test_a_restricted_value_accepts_any_spelling(schema: dict[str, Any], text: str):
    assert all(accepts(schema, text, seed) for seed in (None, 1, 2))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, r'"\ud83d"'),
        ({"type": "string"}, r'"\ude00"'),
        ({"type": "string"}, r'"\ud83d\u0041"'),
        ({"const": "é"}, r'"\u00e8"'),
        ({"const": "😀"}, r'"\ud83d\ude01"'),
        ({"type": "string", "maxLength": 1}, r'"\u00e9\u00e9"'),
        ({"type": "string", "pattern": "^[a-z]+$"}, r'"\u00e9"'),
        ({"type": "string"}, r'"\x"'),
        ({"type": "number", "maximum": 1}, "1e1"),
        ({"type": "number", "minimum": 0}, "-1e-5"),
        ({"type": "integer"}, "1e3"),  # programs want digits
        ({}, r'\u0074rue'),
        ({}, r'{\u0022a": 1}'),
    ],
)  # fmt: skip
def test_another_value_is_masked_in_any_spelling(schema: dict[str, Any], text: str):
    assert not any(accepts(schema, text, seed) for seed in (None, 1, 2))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "aé😀"},
        {"enum": ["café", "caff", 'x"y', "a/b"]},
        {"type": "string", "pattern": "^[é-ë]{2}$"},
        {"type": "string", "maxLength": 2},
        {"type": "number", "minimum": 0.001, "maximum": 0.2},
        {"type": "object", "properties": {"é": {"enum": [10, 200]}}, "required": ["é"]},
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_no_allowed_token_leads_to_a_dead_end(schema: dict[str, Any], seed: int):
    """Draw random tokens, odd spellings first."""
    choose = random.Random(seed)
    matcher = get_matcher(Constraint.from_schema(schema), TOKENIZER, TOKENIZER.vocab_size)
    data = b""
    while not (mask := matcher.compute_allowed_mask())[[*TOKENIZER.end_ids]].any():
        allowed = mask.nonzero()[0].tolist()
        assert allowed, data
        odd = [token for token in allowed if set(TOKENIZER.token_bytes(token)) & {*b"\\eE"} or len(data) > 40]
        token = choose.choice(odd or allowed)
        data += TOKENIZER.token_bytes(token)
        assert len(data) < 400
        matcher.accept(token)
    checked = {**schema, "additionalProperties": False} if "properties" in schema else schema
    assert matches_schema(normalize_whole_numbers(data.decode()), checked), data


def test_surrogates_are_decoded_only_in_pairs():
    assert parse_escape(rb"\ud83d\ude00") == [(0x1F600, 0x1F600)]
    assert not is_whole_escape(rb"\ud83d")
    assert parse_escape(rb"\udc") == parse_escape(rb"\ud83d\u0") == parse_escape(rb"\q") == []


JSON_CALLS = ToolCallFormat('<call>{"name": "', '", "arguments": ', "}</call><call>{", "}</call>")
MARKED = ToolCallFormat("<f=", ">\n", None, "</f>", ParameterMarks("<p=", "<p=", (">", "</p>"), (":", "</p>")))


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (JSON_CALLS, r'<call>{"name": "w", "arguments": {"t": "\u00e9", "n": [{"\u00fc": 1e-3}]}}</call>'),
        (MARKED, '<f=w>\n<p=t>C:\\users "\\u00e9</p><p=n:[{"\\u00fc": 1e-3}]</p></f>'),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_tool_calls_accept_every_spelling_in_json_only(format: ToolCallFormat, text: str, seed: int):
    numbers = {"type": "object", "properties": {"ü": {"type": "number", "minimum": 0}}}
    properties = {"t": {"type": "string"}, "n": {"type": "array", "items": numbers}}
    tool = Tool("w", parameters={"type": "object", "properties": properties, "required": ["t"]})
    matcher = ToolGrammar(ToolUse([tool], "required"), format, TOKENIZER).make_matcher(TOKENIZER.vocab_size)
    assert writes(matcher, text, seed)
