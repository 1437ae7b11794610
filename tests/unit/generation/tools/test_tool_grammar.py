"""Test tool calls: formats of released templates, incremental parsing, and grammars that allow only valid calls."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_model
from project import GOLDENS, ROOT
from tool_talker import QWEN
from vocabularies import GIVEN, USER_DEFINED, byte_level, with_prefix

from localllm import api, builtin_model
from localllm.errors import UsageError
from localllm.generation.answer_state import AnswerState, Transcript, UnionMatcher
from localllm.generation.reasoning import ANSWER, ARGUMENTS, CALL, ESCAPE, TagFormat, TextPart, Thinking
from localllm.generation.tools import tool_call_parser
from localllm.generation.tools.json_tool_calls import JsonToolCallParser
from localllm.generation.tools.tool_call_format import (
    GENERIC,
    HARMONY,
    ID,
    IDS,
    UNRENDERED_FORMATS,
    ParameterMarks,
    ToolCallFormat,
    build_string_pattern,
    derive_call_format,
    make_parameter_form,
    replace_differing_ids,
)
from localllm.generation.tools.tool_call_parser import JsonScan, ToolCallParser
from localllm.generation.tools.tool_grammar import Tool, ToolGrammar, ToolUse, escape_regex
from localllm.generation.tools.tool_messages import (
    PROBE,
    convert_arguments,
    convert_calls,
    escape_results,
    find_result_marks,
)
from localllm.text.templates import ChatTemplate
from localllm.text.tokenizer import Tokenizer

ENDS = [
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|call|>", "<|end_of_text|>", "<turn|>", "<|calls|>",
    "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<seed:eos>", "<|eom|>", "[e~[", "<end_of_sentence>", "<|end|>",
    "<|role_end|>", "<|message_sep|>", "</assistant>", "<SPECIAL_12>", "<｜hy_eos:opensource｜>",
]  # fmt: skip
WEATHER = Tool(
    "get_weather",
    "The weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 16},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
TIME = Tool("time.now", "What time it is", {"type": "object", "properties": {"zone": {"type": "string"}}})
# Templates that ask for calls in words only, or cannot be rendered: there calls are plain JSON.
WITHOUT = {"Kimi-K2-Instruct", "Kimi-K2-Thinking", "LFM2-8B-A1B", "MiniMax-M3", "GigaChat3-10B-A1.8B", "muse-glimmer",
           "google-gemma-2-2b-it", "llama-cpp-deepseek-r1", "meetkai-functionary-medium-v3.2"}  # fmt: skip
SHARED = ROOT.parent / "shared" / "templates"
NAMES = sorted(json.loads((GOLDENS / "chat_renderings.json").read_text(encoding="utf-8"))["renderings"])


def format_of(source: str) -> tuple[ChatTemplate, ToolCallFormat]:
    template = ChatTemplate(source, "<s>", "</s>")
    tools = [PROBE.to_json_schema()]
    return template, derive_call_format(
        source, lambda messages, begins: template.render(messages, add_generation_prompt=begins, tools=tools), ENDS
    )


def parse(reader: ToolCallParser, text: str, seed: int = 0) -> tuple[str, list[tuple[str, dict]]]:
    """Return prose and calls of a chunked text."""
    cuts, prose, calls = random.Random(seed), "", list[list[str]]()
    while text:
        size = cuts.randint(1, 4)
        piece, text = text[:size], text[size:]
        for kind, part in reader.push(piece):
            if kind == ANSWER:
                prose += part
            elif kind == CALL:
                calls.append([part, ""])
            elif kind == ARGUMENTS:
                calls[-1][1] += part
    prose += "".join(part for kind, part in reader.flush() if kind == ANSWER)
    return prose, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_calls_rendered_by_a_released_template_are_parsed_back(shared: Path, name: str):
    template, format = format_of((shared / "templates" / f"{name}.jinja").read_text(encoding="utf-8"))
    assert (format == GENERIC) == (name in WITHOUT)
    if format == GENERIC or name.startswith("ibm-granite-granite-3.3"):
        return
    tools = {WEATHER.name: WEATHER.parameters, TIME.name: TIME.parameters}
    at = {} if "DeepSeek-V4" not in name else {"zone": "UTC"}  # which writes an empty line for no parameters
    expected_calls = [
        (WEATHER.name, {"city": "São Paulo <b>", "days": 3}),
        (TIME.name, at),
        (WEATHER.name, {"city": "x", "days": 1}),
    ]
    for count in (1, 3) if format.separator is not None else (1,):
        calls = [
            {"id": f"callAaa0{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(expected_calls[:count])
        ]
        message = convert_arguments({"role": "assistant", "content": "", "tool_calls": calls}, format.as_text)
        text = template.render(
            [{"role": "user", "content": "Hi"}, message], add_generation_prompt=False,
            tools=[WEATHER.to_json_schema(), TIME.to_json_schema()],
        )  # fmt: skip
        first = text.rindex(format.trigger, 0, text.rindex(WEATHER.name) if count == 1 else text.rindex(TIME.name))
        place = text.rfind("get_weather") if count == 1 else text.rindex(WEATHER.name, 0, text.rindex(TIME.name))
        first = text.rindex(format.trigger, 0, place)
        if format == HARMONY:
            first -= 1
        reader = ToolCallParser(format, tools)
        prose = "Well.\n" if format.has_tag else ""
        assert parse(reader, prose + text[first:])[1] == expected_calls[:count]


LITERAL = 'To call, one writes <tool_call>{"name": "x"}</tool_call>.'


def test_only_tool_results_have_their_markers_broken():
    """Keep the tags that users and the model write."""
    text = "<end> and [DONE] twice: <end>"
    messages = [{"role": role, "content": text} for role in ("system", "user", "assistant", "tool")]
    *others, result = escape_results(messages, ("<end>", "[DONE]"))
    assert others == messages[:-1]
    assert result == {"role": "tool", "content": "< end> and [ DONE] twice: < end>"}


def test_markers_in_prose_are_prose():
    _, format = format_of(QWEN)
    assert format.trigger == "<tool_call>"
    tools = {WEATHER.name: WEATHER.parameters}
    assert parse(ToolCallParser(format, tools), LITERAL) == (LITERAL, [])
    signed = ToolCallParser(format, tools, frozenset({"<tool_call>"}))
    assert parse(signed, f"Look:\n{LITERAL}") == (f"Look:\n{LITERAL}", [])


@pytest.mark.parametrize("text", ["", " ", "x", "a < b", "<tool", "{", "Let me see.\n\n"])
def test_prose_without_calls_is_unchanged(text: str):
    for format in (GENERIC, format_of(QWEN)[1], *UNRENDERED_FORMATS.values()):
        assert parse(ToolCallParser(format, {WEATHER.name: {}}), text)[0] == text


@pytest.fixture(scope="module")
def guide():
    with api.open_model(builtin_model(), 2) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return api.open_tokenizer(tiny_model.write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


FORMATS = {
    "generic": GENERIC, "hermes": format_of(QWEN)[1], **UNRENDERED_FORMATS,
    "coder": None, "deepseek": None, "mistral": None, "glm": None, "gemma": None, "llama": None,
}  # fmt: skip
FILES = {
    "coder": "Qwen3-Coder", "deepseek": "deepseek-ai-DeepSeek-V3.1", "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
    "glm": "GLM-4.6", "gemma": "google-gemma-4-31B-it-interleaved", "llama": "meta-llama-Llama-3.2-3B-Instruct",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_an_untrained_model_makes_valid_calls(guide, request, name: str):
    """Check tools, arguments and types, unless the answer was cut."""
    import jsonschema

    format = FORMATS[name]
    if format is None:
        folder = request.getfixturevalue("shared") / "templates"
        format = format_of((folder / f"{FILES[name]}.jinja").read_text(encoding="utf-8"))[1]
    from localllm.generation.options import GenerationOptions
    from localllm.generation.request import PromptTask
    from localllm.generation.sampling.options import SamplingOptions

    tools = {tool.name: tool for tool in (WEATHER, TIME)}
    whole = 0
    for seed in range(6):
        use = ToolUse([WEATHER, TIME], ("required", WEATHER.name)[seed % 2], parallel=seed % 3 == 0)
        options = GenerationOptions(160, sampling=SamplingOptions(temperature=1.5, seed=seed))
        calls = ToolGrammar(use, format, guide.tokenizer)
        prompt = guide.session.encode_chat([{"role": "user", "content": "Hi"}])
        decoder = guide.tokenizer.stream(continued=True)
        from localllm.generation.request import Request

        heard = list[tuple[str, str]]()
        task = PromptTask(prompt, decoder, options, calls=calls)

        def listen(answering, token, parts, row, heard=heard):
            heard.extend(parts)

        asked = Request(task, listener=listen)
        for _ in guide.batch([asked]):
            pass
        assert asked.error is None
        if asked.answers[0].finish_reason == "length":
            continue
        whole += 1
        calls_made = list[list[str]]()
        for kind, text in heard:
            assert kind in (CALL, ARGUMENTS), (kind, text)
            calls_made.append([text, ""]) if kind == CALL else calls_made[-1].__setitem__(1, calls_made[-1][1] + text)
        assert len(calls_made) == 1 or use.parallel
        for called, arguments in calls_made:
            jsonschema.validate(json.loads(arguments), dict(tools[called].parameters))
            assert use.choice in ("required", called)
    assert whole


def test_schemas_beyond_the_grammar_are_accepted(guide):
    odd = {"type": "object", "properties": {"x": {"type": "string", "not": {"const": "a"}}}, "required": ["x"]}
    loose = ToolGrammar(ToolUse([Tool("f", "", odd)], "required"), GENERIC, guide.tokenizer)
    loose.make_matcher(guide.tokenizer.vocab_size)
    with pytest.raises(UsageError, match="tools: f: the schema cannot be used"):
        ToolGrammar(ToolUse([Tool("f", "", odd, strict=True)], "required"), GENERIC, guide.tokenizer)
    with pytest.raises(UsageError, match="is not a valid name"):
        Tool("rm -rf")
    with pytest.raises(UsageError, match="not one of the tools"):
        ToolUse([TIME], "other")
    with pytest.raises(UsageError, match="each with a different name"):
        ToolUse([TIME, TIME])


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ("</call>\n<call>", "</call>\n<call>", "</call>\n<call>"),
        ('}, "id": 1, {', '}, "id": 2, {', '}, "id": ' + ID + ", {"),
        ("call 7 of 3: 12", "call 8 of 3: 13", f"call {ID} of 3: {ID}"),
        (f"] {IDS[0]} [", f"] {IDS[1]} [", f"] {ID} ["),
        ("1, then", "1; then", "1, then"),
        ("1, 2", "1", "1, 2"),
    ],
)
def test_the_common_form_of_two_calls_marks_ids(one: str, other: str, common: str):
    """Replace differing numbers by ids; take other differences from the first."""
    assert replace_differing_ids(one, other) == common


def test_harmony_markers_are_not_allowed_within_strings(tmp_path, monkeypatch):
    """Keep gpt-oss's visible markers from ending a string."""
    marks = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"]
    monkeypatch.setattr(tiny_model, "SPECIAL_TOKENS", [*tiny_model.SPECIAL_TOKENS, *marks])
    tokenizer = api.open_tokenizer(tiny_model.write_tiny_model(tmp_path / "harmony.gguf"))
    numbers = [tokenizer.get_special_id(mark) for mark in marks]
    calls = ToolGrammar(ToolUse([TIME], "required"), HARMONY, tokenizer)
    matcher = calls.make_matcher(tokenizer.vocab_size)
    head = "<|channel|>analysis<|message|>H"
    for token in tokenizer.encode(head, special=True):
        matcher.accept(token)
    allowed = dict(zip(marks, matcher.compute_allowed_mask()[numbers], strict=True))
    assert [mark for mark in marks if allowed[mark]] == ["<|end|>"]
    for token in tokenizer.encode('<|end|><|start|>assistant to=functions.time.now<|message|>{"zone":"C', special=True):
        matcher.accept(token)
    assert not matcher.compute_allowed_mask()[numbers].any()


def test_no_token_is_forced_while_two_matchers_are_possible():
    form, calls = SimpleNamespace(get_expected_tokens=lambda: [1]), SimpleNamespace(get_expected_tokens=lambda: [2])
    either: Any = UnionMatcher(form, calls)
    assert either.get_expected_tokens() == []
    either.form = None
    assert either.get_expected_tokens() == [2]
    either.form, either.calls = form, None
    assert either.get_expected_tokens() == [1]


class Follower:
    """A matcher of token words that records what it accepts."""

    def __init__(self, *words: list[int]):
        self.words, self.said, self.compute_unfinished_mask = words, list[int](), lambda thinking: (thinking, self)

    def copy(self) -> "Follower":
        twin = Follower(*self.words)
        twin.said = [*self.said]
        return twin

    def compute_allowed_mask(self) -> np.ndarray:
        size = len(self.said)
        nexts = {word[size] for word in self.words if word[:size] == self.said and len(word) > size}
        return np.isin(np.arange(6), [*nexts])

    def accept(self, token: int) -> None:
        assert self.compute_allowed_mask()[token]
        self.said.append(token)

    @property
    def is_complete(self) -> bool:
        return self.said in self.words


def test_a_union_follows_both_matchers_until_they_differ():
    """Allow reasoning before them."""
    form, calls = Follower([1], [1, 2]), Follower([1, 2, 3, 5], [4])
    either: Any = UnionMatcher(form, calls)
    other, thinking = either.copy(), Thinking()
    assert np.flatnonzero(either.compute_allowed_mask()).tolist() == [1, 4]
    either.accept(1)
    only_form = either.copy()
    only_form.calls = None
    assert (either.is_complete, form.is_complete) == (False, True)  # a call may still come
    for token in (2, 3):
        assert np.flatnonzero(either.compute_allowed_mask()).tolist() == [token]
        either.accept(token)
    assert (form.said, calls.said, either.is_complete, either.form) == ([1, 2], [1, 2, 3], False, None)
    twin = either.copy()
    assert np.flatnonzero(either.compute_allowed_mask()).tolist() == [5]
    either.accept(5)
    assert (calls.said, either.is_complete, twin.is_complete) == ([1, 2, 3, 5], True, False)
    assert either.compute_unfinished_mask(thinking) == (thinking, form)
    assert other.form.said == other.calls.said == []
    other.accept(4)
    assert (other.form, other.is_complete, form.said) == (None, True, [1, 2])
    only_form.copy().accept(2)
    only_form.accept(2)
    assert (only_form.form.said, only_form.is_complete) == ([1, 2], True)


CODER = ToolCallFormat(
    "\n<tool_call>\n<function=", ">\n", "</function>\n</tool_call>\n<tool_call>\n<function=",
    "</function>\n</tool_call>",
    ParameterMarks("<parameter=", "<parameter=", (">\n", "\n</parameter>\n"), (">\n", "\n</parameter>\n")),
)  # fmt: skip
LFM2 = UNRENDERED_FORMATS["<|tool_call_start|>"]
TOOLS = {tool.name: tool.parameters for tool in (WEATHER, TIME)}


def parts_of(reader: ToolCallParser, pieces: list[str]) -> list[tuple[str, str]]:
    return [(kind, text) for piece in pieces for kind, text in reader.push(piece)]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (CODER, "<tool_call>\n<function=get_weather>\n<parameter=city>\nSão \"Paulo\"\n<b>\n</parameter>\n"
         "<parameter=days>\n31\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
         '<parameter=tags>\n["}", "a"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time.now>\n'
         "</function>\n</tool_call>"),
        (LFM2, '<|tool_call_start|>[get_weather(city="São \\"Paulo\\"\n<b>", days=31, unit="C", tags=["}", "a"]), '
         "time.now()]<|tool_call_end|>"),
    ],
    ids=["tags", "words"],
)  # fmt: skip
def test_marked_parameters_are_streamed_one_by_one(format: ToolCallFormat, text: str):
    """Stream each when it is complete: a number at what follows it, all at the end marker."""
    text = text.replace('\\"', "'") if format is LFM2 else text
    city = "São 'Paulo'\n<b>" if format is LFM2 else 'São "Paulo"\n<b>'
    expected = [
        (ANSWER, "Well."), (CALL, "get_weather"),
        (ARGUMENTS, f'{{"city": {json.dumps(city, ensure_ascii=False)}'), (ARGUMENTS, ', "days": 31'),
        (ARGUMENTS, ', "unit": "C"'), (ARGUMENTS, ', "tags": ["}", "a"]'), (ARGUMENTS, "}"),
        (CALL, "time.now"), (ARGUMENTS, "{}"),
    ]  # fmt: skip
    text = f"Well.\n{text}"
    assert parts_of(ToolCallParser(format, TOOLS), [text]) == expected
    reader, parts = ToolCallParser(format, TOOLS), list[tuple[str, str]]()
    for place, character in enumerate(text):
        more = parts_of(reader, [character])
        before = "".join(piece for _, piece in parts)
        if (ARGUMENTS, ', "days": 31') in more:
            assert text[: place + 1].partition("31")[2] == ("\n</parameter>\n" if format is CODER else ",")
        assert reader.in_call == (format.trigger in text[: place + 1]), before
        parts += more
    merged = [(ANSWER, "".join(piece for kind, piece in parts if kind == ANSWER))]
    assert merged + [part for part in parts if part[0] != ANSWER] == expected
    assert reader.flush() == []


@pytest.mark.parametrize(
    ("format", "pieces"),
    [
        (CODER, ["<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
                 "<parameter=days>\n31\n</parameter>\n", "</func", "tion>\n", "</tool_call>"]),
        (LFM2, ['<|tool_call_start|>[get_weather(city="Rome", days=31', ")", "]<|tool_call_end|>"]),
    ],
    ids=["tags", "words"],
)  # fmt: skip
def test_an_end_token_completes_an_unclosed_call(format: ToolCallFormat, pieces: list[str]):
    """Leave a cut call incomplete."""
    for count in range(1, len(pieces) + 1):
        for is_end in (True, False):
            reader = ToolCallParser(format, TOOLS)
            parts = [*parts_of(reader, pieces[:count]), *reader.flush(is_end)]
            written = "".join(text for kind, text in parts if kind == ARGUMENTS)
            is_whole = count == len(pieces) or is_end
            assert (json.loads(written) == {"city": "Rome", "days": 31}) if is_whole else not written.endswith("}")


def test_marker_tokens_within_a_string_are_text():
    reader = ToolCallParser(CODER, TOOLS, frozenset({"<tool_call>", "</tool_call>"}))
    text = (
        f"{ESCAPE}<tool_call>\n<function=time.now>\n<parameter=zone>\na {ESCAPE}</tool_call>\n</parameter>\n</function>"
    )
    assert parts_of(reader, [text])[1:] == [(ARGUMENTS, '{"zone": "a </tool_call>"')]
    assert parts_of(reader, [f"\n{ESCAPE}</tool_call>"]) == [(ARGUMENTS, "}")]
    assert parts_of(reader, ["more"]) == []


def test_a_copied_parser_is_independent():
    """Copy it also where a possible call turns out to be text."""
    reader = ToolCallParser(GENERIC, TOOLS)
    assert parts_of(reader, ['{"name": "time.now", "arguments": {"zone": "a']) == [
        (CALL, "time.now"), (ARGUMENTS, '{"zone": "a'),
    ]  # fmt: skip
    twin = reader.copy()
    assert parts_of(twin, ['}"}}', "{"]) == [(ARGUMENTS, '}"}')]
    assert parts_of(reader, ['\\"}", "b": [{}]}}']) == [(ARGUMENTS, '\\"}", "b": [{}]}')]
    assert (twin.flush(), reader.flush()) == ([], [])
    wrong = ToolCallParser(GENERIC, TOOLS)
    assert (parts_of(wrong, ['{"name": "', "no"]), wrong.in_call, wrong.pending) == ([], True, "")
    assert wrong.abandon_call() == [(ANSWER, '{"name": "no')]
    assert (parts_of(wrong, ['{"name": "time.now'])) == [(ANSWER, '{"name": "time.now')]
    assert (wrong.in_call, wrong.flush(), wrong.abandon_call()) == (False, [], [])
    bidden = ToolCallParser(GENERIC, TOOLS)
    bidden.begin()
    assert (bidden.in_call, parts_of(bidden.copy(), ["{"]), bidden.copy().flush()) == (True, [], [])
    assert parts_of(bidden, ['{"name": "time.now", "arguments": {}', "}"]) == [(CALL, "time.now"), (ARGUMENTS, "{}")]


def test_white_space_is_held_until_the_next_text():
    """Drop it before a call and where it is all there is."""
    reader = ToolCallParser(CODER, TOOLS)
    parts_by_chunk = [parts_of(reader, [piece]) for piece in (" ", "a ", "\n", "b", "\n\n", "<tool_call>\n")]
    assert parts_by_chunk == [[], [(ANSWER, " a")], [], [(ANSWER, " \nb")], [], []]
    assert (reader.in_call, reader.pending) == (True, "\n")
    assert reader.abandon_call() == [(ANSWER, "<tool_call>\n")]


@pytest.mark.parametrize(
    ("format", "marks", "text", "is_call"),
    [
        (CODER, "", "Well.\n  <tool_call>", True), (CODER, "", "Well. <tool_call>", False),
        (CODER, "", "\n <tool_call>", True),
        (CODER, "<tool_call>", f"Well. {ESCAPE}<tool_call>", True), (CODER, "<tool_call>", "Well.\n<tool_call>", False),
        (GENERIC, "", '{"name": "', True), (GENERIC, "", 'Well.\n{"name": "', False),
        (GENERIC, "", '\n\n{"name": "', True),
        (HARMONY, "", "<|channel|>commentary to=functions.", True), (HARMONY, "", "assistant to=functions.", True),
    ],
)  # fmt: skip
def test_a_call_may_begin_only_where_its_marker_allows(format: ToolCallFormat, marks: str, text: str, is_call: bool):
    """Allow a tag at a line's start, a token anywhere, text at the beginning, and harmony's in a header."""
    for pieces in ([text], [*text]):
        reader = ToolCallParser(format, TOOLS, frozenset(filter(None, [marks])))
        parts_of(reader, pieces)
        assert reader.in_call == is_call


def test_a_marker_without_a_call_is_text():
    reader = ToolCallParser(CODER, TOOLS, frozenset({"<tool_call>", "</tool_call>"}))
    assert parts_of(reader, [f"a{ESCAPE}</tool_call>", "b"]) == [(ANSWER, f"a{ESCAPE}</tool_call>"), (ANSWER, "b")]


def test_a_harmony_header_is_not_shown():
    marks = frozenset({"<|channel|>", "<|message|>", "<|constrain|>"})
    reader = ToolCallParser(HARMONY, TOOLS, marks)
    head = f"{ESCAPE}<|channel|>commentary", " to=functions.time.now ", f"{ESCAPE}<|constrain|>json"
    assert [parts_of(reader, [piece]) for piece in head] == [[], [], []]
    assert parts_of(reader, [f"{ESCAPE}<|message|>", '{"zone": "}"}']) == [
        (CALL, "time.now"),
        (ARGUMENTS, '{"zone": "}"}'),
    ]
    assert parts_of(ToolCallParser(HARMONY, TOOLS, marks), ["Well", ", so"]) == [(ANSWER, "Well"), (ANSWER, ", so")]


def test_tools_without_parameters_or_with_a_common_prefix_are_told_apart():
    tools = {"now": {"type": "object"}, "now_then": {"type": "object", "properties": None}}
    for format, text in (
        (CODER, "<tool_call>\n<function=%s>\n</function>\n</tool_call>"),
        (LFM2, "<|tool_call_start|>[%s(), "),
    ):
        for name in tools:
            assert parts_of(ToolCallParser(format, tools), [text % name]) == [(CALL, name), (ARGUMENTS, "{}")]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "text"), ({"enum": ["a", "b"]}, "text"), ({"enum": ["a", 1]}, "both"),
        ({"enum": []}, "other"), ({"type": "integer"}, "other"), ({}, "both"), (True, "both"), ({"const": "a"}, "text"),
        ({"type": ["string", "null"]}, "both"), ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "both"),
        ({"$ref": "#/$defs/t"}, "text"), ({"anyOf": [{"$ref": "#/$defs/t"}, {"const": "b"}], "title": "T"}, "text"),
        ({"allOf": [{"$ref": "#/$defs/t"}], "default": "a"}, "text"), ({"properties": {}}, "other"),
        ({"type": ["integer", "null"]}, "other"), ({"const": None}, "other"), ({"$ref": "#/$defs/no"}, "other"),
    ],
)  # fmt: skip
def test_string_parameters_are_recognized_in_a_schema(schema: object, expected: str):
    form = make_parameter_form(schema, {"$defs": {"t": {"type": "string"}}})
    assert {"text": (True, False), "both": (True, True), "other": (False, True)}[expected] == (
        bool(form.texts),
        form.other is not None,
    )


PLACES = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 4},
        "days": {"type": "integer", "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "tags": {"$ref": "#/$defs/tags"},
    },
    "required": ["days"],
    "$defs": {"tags": {"type": "array", "items": {"type": "boolean"}}},
}


@pytest.mark.parametrize(
    ("inside", "is_whole"),
    [
        ("days=3", True), ('city="Oslo", days=3', True), ('days=3, unit="C"', True), ("days=3, tags=[true]", True),
        ('city="O", days=3, unit="F", tags=[]', True), ('city="Paris", days=3', False), ('city="", days=3', False),
        ("days=10", False), ('days="3"', False), ("", False), ('city="Oslo"', False), ('unit="C", days=3', True),
        ('days=3, unit="K"', False), ("days=3, tags=3", False), ("days=3, days=3", False), ("days=3,", False),
        (", days=3", False), ("days=3, more=1", False), ("days=3), places(days=4", True), ("days=3), now(", True),
    ],
)  # fmt: skip
def test_the_grammar_of_marked_parameters_allows_any_order_once(tokenizer, inside: str, is_whole: bool):
    """Demand required ones; resolve references in the schema."""
    calls = ToolGrammar(ToolUse([Tool("places", "", PLACES), Tool("now")], "required"), LFM2, tokenizer)
    matcher = calls.make_matcher(tokenizer.vocab_size)
    assert matcher.accept_text(f"<|tool_call_start|>[places({inside})]<|tool_call_end|>") == is_whole
    if is_whole:
        assert not matcher.accept_text(" ")


def test_parallel_calls_are_allowed_unless_turned_off(tokenizer):
    """Begin at the trigger or after it."""
    tools = [Tool("places", "", PLACES), Tool("now")]
    two = "[now(), now()]<|tool_call_end|>"
    for use, whole, text, is_allowed in (
        (ToolUse(tools), False, two, True),
        (ToolUse(tools, parallel=False), False, two, False),
        (ToolUse(tools), True, f"<|tool_call_start|>{two}", True),
        (ToolUse(tools), True, two, False),
        (ToolUse(tools, "places"), True, f"<|tool_call_start|>{two}", False),
    ):
        calls = ToolGrammar(use, LFM2, tokenizer)
        assert calls.make_matcher(tokenizer.vocab_size, whole).accept_text(text) == is_allowed, (use, text)


def writing(
    call: Any, separator: str = "", knows: bool = True, most: int = 3, takes: type = dict, end: str = ENDS[0]
) -> Any:
    """Return a template that renders calls by `call`; knows: its tools, takes: the type of arguments."""

    def render(messages: list[dict], begins: bool) -> str:
        text = "qx_alpha: W\n" * knows
        for message in messages:
            calls = [each["function"] | {"id": each["id"]} for each in message.get("tool_calls", ())]
            if len(calls) > most or not all(isinstance(each["arguments"], takes) for each in calls):
                raise UsageError("it cannot")
            written = separator.join(call(each["name"], each["arguments"], each["id"]) for each in calls)
            text += f"<|im_start|>{message['role']}\n{message['content']}{written}{end}\n"
        return text + "<|im_start|>assistant\n" * begins

    return render


def in_json(name: str, arguments: Any, id: str) -> str:
    json_arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json_arguments}}}\n</tool_call>'


def marked(name: str, arguments: Any, id: str) -> str:
    parameters = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"\n<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


JSON_FORMAT = ToolCallFormat(
    '<tool_call>\n{"name": "', '", "arguments": ', '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>"
)
MARKED = ToolCallFormat(
    "<tool_call>\n<function=", ">\n<", "/function>\n</tool_call>\n<tool_call>\n<function=", "/function>\n</tool_call>",
    ParameterMarks("parameter=", "parameter=", (">\n", "\n</parameter>\n<"), (">\n", "\n</parameter>\n<")),
)  # fmt: skip


@pytest.mark.parametrize(("render", "expected"), [
    (writing(in_json, "\n"), JSON_FORMAT), (writing(in_json, "\n", knows=False), replace(JSON_FORMAT, is_known=False)),
    (writing(in_json, "\n", takes=str), replace(JSON_FORMAT, as_text=True)),
    (writing(in_json, "\n", end=""), JSON_FORMAT),
    (writing(in_json, most=1), replace(JSON_FORMAT, separator=None)),
    (writing(lambda name, given, id: f"[CALLS]{name}[ID]{id}[ARGS]{json.dumps(given)}"),
     ToolCallFormat("[CALLS]", f"[ID]{ID}[ARGS]", "[CALLS]", "")),
    (writing(marked), MARKED), (writing(marked, most=1), replace(MARKED, separator=None)),
    (writing(lambda name, given, id: f"<|call|>[{name}({', '.join(f'{k}={json.dumps(given[k])}' for k in given)})]"),
     ToolCallFormat("<|call|>[", "(", ")]<|call|>[", ")]", ParameterMarks("", ", ", ('="', '"'), ("=", "")))),
    (writing(lambda *_: ""), UNRENDERED_FORMATS["<|tool_call|>"]), (writing(lambda *_: "", knows=False), GENERIC),
    (writing(lambda name, given, id: f"</s>{name}{json.dumps(given)}"), GENERIC),
    (writing(lambda name, given, id: f" to=functions.{name} {json.dumps(given)}"), HARMONY),
    (writing(lambda name, given, id: f" to=functions.{name} {json.dumps(given)}", knows=False),
     replace(HARMONY, is_known=False)),
])  # fmt: skip
def test_the_format_is_derived_from_a_rendered_call(render: Any, expected: ToolCallFormat):
    """Fall back to the template's source if it renders tools but no calls."""
    assert derive_call_format("<|tool_call|>", render, ["<|im_end|>", "</s>"]) == expected
    assert derive_call_format("", writing(lambda *_: ""), ENDS) == GENERIC


@pytest.mark.parametrize(("one", "other", "form"), [
    ("x1y", "x2y", f"x{ID}y"), ("x1", "x1", "x1"), ("x1", "y2", "x1"), ("1 2 3", "1 9 3", f"1 {ID} 3"),
    (f"a{IDS[0]}b", f"a{IDS[2]}b", f"a{ID}b"), ("x 9", "x 10", f"x {ID}"),
])  # fmt: skip
def test_differing_digits_and_ids_are_recognized(one: str, other: str, form: str):
    assert replace_differing_ids(one, other) == form


SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
GENERICALLY = (
    "You can call these functions:\n"
    '{"name": "time.now", "description": "What time it is", "parameters": '
    '{"type": "object", "properties": {"zone": {"type": "string"}}}}\nTo call one, answer with '
)
PLAINLY = GENERICALLY + 'nothing but JSON: {"name": its name, "arguments": its arguments}.'


@pytest.mark.parametrize(("format", "use", "instruction"), [
    (JSON_FORMAT, ToolUse([TIME]), None), (replace(JSON_FORMAT, is_known=False), None, None),
    (replace(JSON_FORMAT, is_known=False), ToolUse([TIME], "none"), None), (GENERIC, ToolUse([TIME]), PLAINLY),
    (replace(JSON_FORMAT, is_known=False, opening="\n" + JSON_FORMAT.opening), ToolUse([TIME]),
     GENERICALLY + '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'),
])  # fmt: skip
def test_tools_are_described_by_the_template_or_an_instruction(
    format: ToolCallFormat, use: ToolUse | None, instruction: str | None
):
    """Append the instruction to the system message."""
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    assert convert_calls([ASKED], format, use) == [*system, ASKED]
    assert convert_calls([], format, use) == system
    both = f"Be brief.\n\n{instruction}" if instruction else "Be brief."
    assert convert_calls([SYSTEM, ASKED], format, use) == [{"role": "system", "content": both}, ASKED]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (message,) = convert_calls([{"role": "assistant", "content": "So:", "tool_calls": [call]}], format, None)
    function = {"name": "f", "arguments": {"a": 1}}
    words = {"role": "assistant", "content": f"So:\n{json.dumps(function)}"}
    assert message == words if format == GENERIC else message["tool_calls"] == [{**call, "function": function}]


@pytest.mark.parametrize(("takes", "behind", "marks"), [
    (dict, "\n</result>[/X]<|im_end|>", ("</result>", "[/X]")), (str, "</result>", ("</result>",)),
    (int, "</result>", ()),
    (dict, " " * 66 + "</result>", ("</result>",)), (dict, " " * 67 + "</result>", ()), (dict, "", ()),
])  # fmt: skip
def test_closing_tags_after_a_tool_result_are_recognized(takes: type, behind: str, marks: tuple[str, ...]):
    """Accept arguments as strings or objects; skip tokens."""

    def render(messages: list[dict], add_generation_prompt: bool, tools: list) -> str:
        assert not add_generation_prompt and tools == [PROBE.to_json_schema()]
        assert messages[0]["role"] == "user" and len(messages[1]["tool_calls"]) == 1 and len(messages) == 3
        assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
        if not isinstance(messages[1]["tool_calls"][0]["function"]["arguments"], takes):
            raise UsageError("it cannot")
        return f"{messages[2]['content']}{behind}"

    template = SimpleNamespace(render=render)
    tokenizer = SimpleNamespace(get_special_id=lambda mark: 5 if mark == "<|im_end|>" else None)
    assert find_result_marks(template, tokenizer) == marks


@pytest.mark.parametrize(("schema", "expected"), [
    ({}, "{0,}"), ({"minLength": 2, "maxLength": 3}, "{2,3}"), ({"maxLength": 1000}, "{0,1000}"),
    ({"maxLength": 1001}, "*"),
    ({"minLength": 1000}, "{1000,}"), ({"minLength": 1001}, "*"), ({"minLength": "2"}, "*"), ({"maxLength": 1.5}, "*"),
    ({"minLength": 1001, "maxLength": 5}, "*"), ({"maxLength": 0}, "{0,0}"),
])  # fmt: skip
def test_string_grammars_keep_the_length_limits_of_their_schema(schema: dict, expected: str):
    assert build_string_pattern(schema) == f"(?s:.{expected})"
    assert escape_regex("a/b\n c.") == r"a\/b\n c\."


@pytest.mark.parametrize("size", [2_000, 4_000])
def test_long_values_are_searched_only_once(size: int, monkeypatch: pytest.MonkeyPatch):
    scanned, patterns, push, pattern = list[int](), list[str](), JsonScan.push, tool_call_parser.build_mark_pattern
    monkeypatch.setattr(JsonScan, "push", lambda self, text: scanned.append(len(text)) or push(self, text))
    monkeypatch.setattr(
        tool_call_parser,
        "build_mark_pattern",
        lambda *pattern_arguments: patterns.append(pattern_arguments[0]) or pattern(*pattern_arguments),
    )
    schema = {"type": "object", "properties": {"t": {"type": "string"}, "n": {"type": "array"}}}
    marks = ParameterMarks("<p=", "<p=", (">", "</p>"), (":", "</p>"))
    reader = ToolCallParser(ToolCallFormat("<f=", ">", None, "</f>", marks), {"w": schema})
    text = f"<f=w><p=t>{'x' * size}</p><p=n:[{', '.join('1' * size)}]</p></f>"
    assert sum(kind == ARGUMENTS for kind, _ in parts_of(reader, [*text])) == 3
    assert len(patterns) < 20 and sum(scanned) < 4 * size
    bare = json.dumps({"name": "w", "arguments": {"t": "x" * size}})
    reader = JsonToolCallParser(["w"], lambda name, arguments: True)
    scanned.clear()
    parts = [part for character in bare for part in reader.push(TextPart(ANSWER, character))] + reader.flush(True)
    assert [part.kind for part in parts] == [CALL, ARGUMENTS] and sum(scanned) < 3 * size


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_the_token_of_a_call_ends_open_reasoning(choice: str, end: str):
    """Check it with a required call, too."""
    metadata = byte_level(GIVEN["merges"], "qwen2", (1, 3))
    pieces, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    marks = {"tokens": [*pieces, "<tool_call>", "</tool_call>"], "token_type": [*kinds, USER_DEFINED, USER_DEFINED]}
    tokenizer = Tokenizer(metadata | with_prefix(marks))
    closing = "}\n</tool_call>"
    opening = '<tool_call>\n{"name": "'
    format = ToolCallFormat(opening, '", "arguments": ', f"{closing}\n{opening}", closing)
    tool = Tool("w", parameters={"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]})
    calls = ToolGrammar(ToolUse([tool], choice), format, tokenizer)
    thinking = Thinking.detect(
        TagFormat("<think>", "</think>"), tokenizer, tokenizer.encode("<think>", special=True), None
    )
    transcript, matcher = Transcript(tokenizer.stream(), (), thinking, calls), calls.make_matcher(tokenizer.vocab_size)
    state = AnswerState(transcript, thinking, *([matcher] if choice == "required" else [None, matcher]))
    text = 'I look.<tool_call>\n{"name": "w", "arguments": {"t": "x"}}\n</tool_call>' + end
    for token in tokenizer.encode(text, special=True):
        mask = state.compute_allowed_mask(tokenizer.vocab_size)
        assert mask is None or mask[token]
        state.accept(token)
    mask = state.compute_allowed_mask(tokenizer.vocab_size)
    assert mask is not None and mask[list(tokenizer.end_ids)].any()
    assert transcript.thinking == "I look." and not transcript.text
    assert [(call.name, call.arguments) for call in transcript.calls] == [("w", {"t": "x"})]
