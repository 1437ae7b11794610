"""Test reasoning: found however it is tokenized, shown apart, limited, and not sent back."""

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, saying
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from localllm.cli.terminal.output import make_printable
from localllm.errors import UsageError
from localllm.generation.answer_state import AnswerState, StopFilter, Transcript
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.reasoning import (
    ANSWER,
    ESCAPE,
    FORMATS,
    REASONING,
    ChannelFormat,
    ReasoningParser,
    TagFormat,
    TextPart,
    Thinking,
    detect_format,
    make_template_variables,
)
from localllm.generation.sampling.sampler import SamplingOptions
from localllm.generation.scheduler import Generation
from localllm.generation.session import Session
from localllm.text.templates import ChatTemplate
from localllm.text.tokenizer import StreamDecoder, Tokenizer

GREEDY = GenerationOptions(sampling=SamplingOptions(temperature=0))
THINK, GPT_OSS = TagFormat("<think>", "</think>"), FORMATS[0]
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
OPENING = TURNS + "<think>\n{# </think> #}"
ASKING = TURNS + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


def split_reasoning(format, *pieces: str, is_open: bool = False) -> tuple[str, str]:
    """Return reasoning and answer."""
    splitter = ReasoningParser(Thinking(format, is_open))
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
    assert all(part.text for part in parts)
    reasoning, answer = ("".join(part.text for part in parts if part.kind == kind) for kind in (REASONING, ANSWER))
    return reasoning, answer


SAID = [
    (THINK, False, "<think>\nHm.\n\n</think>\n\nYes.", ("Hm.", "Yes.")),
    (THINK, True, "Hm. A < b </thin\n</think>\n\nYes. ", ("Hm. A < b </thin", "Yes. ")),
    (THINK, True, "\n\n</think>Yes", ("", "Yes")),
    (THINK, True, "Hm", ("Hm", "")),
    (THINK, False, " \n<think>a</think>b", ("a", "b")),
    (THINK, False, " I write <think>so</think>.", ("", " I write <think>so</think>.")),
    (THINK, False, "<thin ice", ("", "<thin ice")),
    (THINK, False, "<thi", ("", "<thi")),
    (THINK, False, "<think>a</think><think>b</think>", ("a", "<think>b</think>")),
    (None, False, "<think>a</think>b", ("", "<think>a</think>b")),
    (TagFormat("<|channel>thought", "<channel|>"), False, "<|channel>thought\nHm<channel|>Yes", ("Hm", "Yes")),
    (GPT_OSS, False, "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
     ("Hm", "Yes")),
    (GPT_OSS, False, "<|channel|>commentary<|message|>Wait. <|end|><|start|>assistant<|channel|>analysis<|message|>Hm"
     "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{}", ("Hm", "Wait. {}")),
    (GPT_OSS, False, "Yes <|", ("", "Yes <|")),
    (GPT_OSS, False, "<|channel|>fin", ("", "")),
    (FORMATS[1], False, "<|think|>Hm<|end|><|begin|>assistant<|content|>Yes", ("Hm", "Yes")),
]  # fmt: skip


@pytest.mark.parametrize(("format", "is_open", "text", "expected"), SAID)
def test_reasoning_and_answer_are_separated(format, is_open: bool, text: str, expected: tuple[str, str]):
    assert split_reasoning(format, text, is_open=is_open) == expected
    assert split_reasoning(format, *text, is_open=is_open) == expected, "character by character"


@given(st.sampled_from(SAID), st.data())
def test_chunk_boundaries_do_not_change_the_separation(case: tuple, data):
    format, is_open, text, expected = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    assert split_reasoning(format, *pieces, is_open=is_open) == expected


def test_text_is_streamed_as_soon_as_it_is_certain():
    splitter = ReasoningParser(Thinking(THINK))
    parts = [splitter.push(piece) for piece in ("<thi", "nk>", "Hm", " a <", "b", "\n</think", ">", "\n\n", "Yes")]
    assert parts == [
        [],
        [],
        [(REASONING, "Hm")],
        [(REASONING, " a")],
        [(REASONING, " <b")],
        [],
        [],
        [],
        [(ANSWER, "Yes")],
    ]


class NoTokens:
    def get_special_id(self, text: str) -> None:
        return None


THINKERS = {
    "Cohere2MoE": "<|START_THINKING|>", "CohereForAI": "<|START_THINKING|>", "ByteDance": "<seed:think>",
    "MiniMax-M3": "<mm:think>", "google-gemma-4": "<|channel>thought", "mistralai-Ministral": "[THINK]",
    "openai-gpt-oss": "<|channel|>analysis<|message|>", "upstage-Solar": "<|think|>", "Apertus": "<|inner_prefix|>",
    "Apriel-1.6": "Here are my reasoning steps:", "Qwen3.5": "<think>", "deepseek-ai": "<think>", "GLM": "<think>",
}  # fmt: skip
SILENT = ("meta-llama", "google-gemma-2", "Qwen-Qwen2.5", "LFM2-8B", "Mistral-Small", "ibm-granite-granite-4.0")


def test_released_templates_have_the_expected_reasoning_markers(shared: Path):
    templates = sorted((shared / "templates").glob("*.jinja"))
    assert len(templates) > 40
    for path in templates:
        format = detect_format(path.read_text(encoding="utf-8"), NoTokens())
        marks = [marks for name, marks in THINKERS.items() if path.name.startswith(name)]
        assert not marks or (format and format.opens == marks[0]), path.name
        assert not path.name.startswith(SILENT) or format is None, path.name


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("Qwen3.5-4B", "<think>\n\n</think>\n\n", "<think>\n"),
        ("deepseek-ai-DeepSeek-V3.1", "<think></think>", "<think>"),
        ("google-gemma-4-31B-it-interleaved", "<|channel>thought\n<channel|>", "<|turn>model\n"),
        ("MiniMax-M3", "</mm:think>", "<mm:think>"),
        ("upstage-Solar-Open-100B", "<|think|><|end|><|begin|>assistant", "<|begin|>assistant"),
        ("ByteDance-Seed-OSS", "</seed:think>", "assistant\n"),
        ("Cohere2MoE", "<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>"),
    ],
)
def test_think_on_and_off_reach_the_template(shared: Path, name: str, off: str, on: str):
    source = (shared / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    for choice, end in (("off", off), ("on", on), ("high", on)):
        text = ChatTemplate(source).render(
            [{"role": "user", "content": "Hi"}], **make_template_variables(source, choice, None)
        )
        assert text.endswith(end), choice


def test_a_reasoning_effort_reaches_the_template(shared: Path):
    source = (shared / "templates" / "openai-gpt-oss-120b.jinja").read_text(encoding="utf-8")
    for choice, effort in (("low", "low"), ("high", "high"), ("off", "low"), ("auto", "medium"), ("on", "medium")):
        variables = make_template_variables(source, choice, None)
        assert f"Reasoning: {effort}" in ChatTemplate(source).render([{"role": "user", "content": "Hi"}], **variables)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def conversation(tokenizer: Tokenizer, template: str, *answers: str) -> Session:
    return Session(PrefixCache(FakeEngine(tokenizer.vocab_size, saying(tokenizer, *answers))), tokenizer, template)


def test_every_opening_tag_has_its_closing_tag():
    elements = [tags for tags in FORMATS if isinstance(tags, TagFormat) and re.fullmatch(r"</?[a-z:]+>", tags.opens)]
    assert len(elements) >= 5
    assert [tags.closes for tags in elements] == [f"</{tags.opens[1:]}" for tags in elements]


def test_an_answer_excludes_its_reasoning(tokenizer: Tokenizer):
    session = conversation(tokenizer, OPENING, "<think>\nHm, hello.\n</think>\n\nhello world")
    answer = session.ask("Hi", GREEDY)
    assert "".join(answer) == answer.text == "hello world"
    assert (answer.thinking, answer.finish_reason) == ("Hm, hello.", "stop")
    parts = list(session.ask("Hi", GREEDY).parts)
    assert [kind for kind, _ in parts] == sorted((kind for kind, _ in parts), reverse=True)
    assert "".join(text for kind, text in parts if kind == REASONING) == "Hm, hello."


def test_reasoning_is_sent_back_only_if_the_template_renders_it(tokenizer: Tokenizer):
    source = TURNS.replace(
        "{{ m.content }}", "{{ '(' ~ m.reasoning_content ~ ')' if m.reasoning_content }}{{ m.content }}"
    )
    for template, expected in (
        (OPENING, "assistant\nb<|im_end|>"),
        (source + "{# </think> #}", "assistant\n(a)b<|im_end|>"),
    ):
        session = conversation(tokenizer, template, "<think>\na</think>\n\nb")
        "".join(session.ask("Hi", GREEDY))
        assert expected in tokenizer.decode(session.ask("And?", GREEDY).prompt, special=True)
        assert session.messages[1] == {"role": "assistant", "content": "b", "reasoning_content": "a"}


@pytest.mark.parametrize(("template", "behind"), [(OPENING, "<think>\na\n</think>\n\nb"), (ASKING, "b")])
def test_an_answer_of_another_process_is_continued(tokenizer: Tokenizer, template: str, behind: str):
    """Insert the reasoning first if the template opens one."""
    session = conversation(tokenizer, template, "c")
    answer = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    session._history = [{"role": "user", "content": "Hi"}, answer]
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    going_on = session.resume(GREEDY)
    assert tokenizer.decode(going_on.prompt, special=True) == asked + behind


def test_a_stop_string_ends_the_answer_but_not_the_reasoning(tokenizer: Tokenizer):
    session = conversation(tokenizer, OPENING, "<think>\nfirst. second</think>third. fourth")
    answer = session.ask("Hi", replace(GREEDY, stop=(".",)))
    assert ("".join(answer), answer.thinking, answer.finish_reason) == ("third", "first. second", "stop")


@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_closes_the_reasoning(tokenizer: Tokenizer, budget: int, speculate: str):
    session = conversation(tokenizer, OPENING, "<think>\n" + "abcdefgh" * 9)
    answer = session.ask("Hi", replace(GREEDY, think_budget=budget, max_tokens=40, speculate=speculate))
    closing = tokenizer.encode("\n</think>\n\n")
    assert len("".join(answer)) == 40 - budget - len(closing)
    assert answer.thinking == "abcde"[:budget]
    assert answer.tokens[budget : budget + len(closing)] == closing


def test_a_budget_limits_a_model_that_opens_its_own_reasoning(tokenizer: Tokenizer):
    session = conversation(tokenizer, ASKING, "<think>abcdefgh" * 9)
    answer = session.ask("Hi", replace(GREEDY, think_budget=2, max_tokens=40))
    assert ("".join(answer)[:3], answer.thinking) == ("k>a", "ab")  # the script goes on behind "\n</think>\n\n"


def test_think_off_closes_an_opened_reasoning_at_once(tokenizer: Tokenizer):
    off = replace(GREEDY, think="off", max_tokens=30)
    for template in (ASKING, OPENING):
        answer = conversation(tokenizer, template, "abc").ask("Hi", off)
        text = tokenizer.decode(answer.prompt, special=True)
        assert text.endswith("</think>\n\n") and text.count("<think>") == 1
        assert (answer.thinking, "".join(answer)) == ("", "")  # the script has ended
    answer = conversation(tokenizer, TURNS + "{# </think> #}", "<think>abcdefgh ijkl" * 3).ask("Hi", off)
    "".join(answer)
    assert answer.thinking == ""


def test_template_variables_of_the_user_override_ours(tokenizer: Tokenizer):
    session = conversation(tokenizer, TURNS + "{{ mood }}{{ enable_thinking }}", "abc")
    chosen = replace(GREEDY, think="off", template_variables={"mood": "sad", "enable_thinking": 1})
    assert tokenizer.decode(session.ask("Hi", chosen).prompt).endswith("sad1")


def test_candidates_have_their_own_reasoning(tokenizer: Tokenizer):
    session = conversation(tokenizer, OPENING, "<think>\nHm</think>\n\nYes")
    for answer in session.candidates([{"role": "user", "content": "Hi"}], GREEDY, 2):
        assert (answer.thinking, answer.text) == ("Hm", "Yes")
    assert session.candidates([{"role": "user", "content": "Hi"}], GREEDY, 1, 2)[0].thinking == "Hm"


def test_a_completed_text_has_no_reasoning(tokenizer: Tokenizer):
    session = conversation(tokenizer, OPENING, "<think>a</think>b")
    answer = session.complete("x", GREEDY)
    assert isinstance(answer, Generation)
    assert ("".join(answer), answer.thinking) == ("<think>a</think>b", "")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"think": "maybe"}, "think must be auto, on, off, low, medium or high, not 'maybe'"),
        ({"think_budget": -1}, "think_budget must be an integer, 0 or greater, not -1"),
        ({"think_budget": True}, "think_budget must be an integer, 0 or greater, not True"),
    ],
)
def test_invalid_reasoning_options_are_refused(options: dict, reason: str):
    with pytest.raises(UsageError, match=reason):
        GenerationOptions(**options)


def test_reasoning_markers_may_be_control_tokens(tmp_path: Path, monkeypatch):
    """Find them although they have no text."""
    monkeypatch.setattr(
        "tiny_model.SPECIAL_TOKENS", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[THINK]", "[/THINK]"]
    )
    tokenizer = Tokenizer.from_file(write_tiny_model(tmp_path / "tiny.gguf"))
    script = [*tokenizer.encode("[THINK]Hm[/THINK]Yes", special=True), tokenizer.eos_id]
    assert len(script) == 8
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: script[min(max(0, len(tokens) - start), 7)])
    session = Session(PrefixCache(fake), tokenizer, TURNS)
    start = len(session.encode_chat([{"role": "user", "content": "Hi"}]))
    answer = session.ask("Hi", GREEDY)
    assert ("".join(answer), answer.thinking) == ("Yes", "Hm")


@pytest.mark.parametrize("format", FORMATS)
def test_the_closing_text_of_a_format_ends_the_reasoning(format):
    assert split_reasoning(format, f"{format.opens}a{format.closing}b") == ("a", "b")


class Follower:
    """A matcher that allows some tokens and records those it accepts."""

    def __init__(self, *tokens: int):
        self.tokens, self.said, self.is_complete = list(tokens), list[int](), False

    def copy(self) -> "Follower":
        twin = Follower(*self.tokens)
        twin.said = [*self.said]
        return twin

    def compute_allowed_mask(self) -> np.ndarray:
        return np.isin(np.arange(9), self.tokens)

    def compute_unfinished_mask(self, thinking: Thinking) -> np.ndarray:
        return np.isin(np.arange(9), [1, 2, 4, 8])

    def accept(self, token: int) -> None:
        self.said.append(token)

    def get_expected_tokens(self) -> list[int]:
        return [7]


PIECES = [b"", b"a", b"b", b"<think>", b"</think>", b"\n", b"<|channel|>x", b"<|message|>", b"}"]


def make_state(
    format, matcher: Follower | None = None, is_whole: bool = False, calls: Any = None, **thinking: Any
) -> AnswerState:
    """Return the state of an answer whose tokens have the bytes above."""
    decoder = StreamDecoder(SimpleNamespace(token_bytes=lambda token, special: PIECES[token]), False, False)
    known = Thinking(format, **thinking)
    return AnswerState(Transcript(decoder, (), known), known, matcher, calls, *[True] * is_whole)


def allowed_tokens(guide: AnswerState) -> list[int] | None:
    allowed = guide.compute_allowed_mask(8)
    assert allowed is None or allowed.shape == (8,)
    return None if allowed is None else np.flatnonzero(allowed).tolist()


MARKS = {
    "shown": {3: ESCAPE + "<think>", 4: ESCAPE + "</think>"},
    "starts": (3,),
    "continuing": (5,),
    "closing": (4, 5),
}


@pytest.mark.parametrize(("matcher", "calls", "budget", "expected"), [
    (None, None, None, False), (Follower(1), None, None, True), (None, Follower(1), None, True),
    (None, None, 0, True), (None, None, 5, True),
])  # fmt: skip
def test_the_mask_is_needed_for_constraints_calls_and_budgets(matcher, calls, budget: int | None, expected: bool):
    guide = make_state(None, matcher, calls=calls, budget=budget)
    twin = guide.copy()
    assert guide.is_needed == twin.is_needed == expected
    assert (twin._calls is calls) == (calls is None) and (twin._matcher is matcher) == (matcher is None)


def test_reasoning_is_free_and_unseen_by_the_constraint():
    """Begin it only as its format allows."""
    guide = make_state(THINK.escape_marks(), Follower(0, 1, 3, 8), **MARKS)
    other: Any = guide.copy()
    matcher: Any = guide._matcher
    assert (allowed_tokens(guide), guide.get_expected_tokens(), guide.has_ended) == ([0, 1, 3], (), False)
    for token, allowed, expected, thoughts in (
        (3, [5], (5,), 0), (5, [1, 2, 4], (), 0), (1, [1, 2, 4], (), 1), (4, [0, 1], [7], 2), (1, [0, 1], [7], 2),
    ):  # fmt: skip
        matcher.is_complete = True
        assert guide.has_ended == (guide.transcript.kind == ANSWER), "not within a thought"
        matcher.is_complete = False
        guide.accept(token)
        assert (allowed_tokens(guide), guide.get_expected_tokens(), guide.thoughts) == (allowed, expected, thoughts)
    assert (matcher.said, guide.transcript.thinking, guide.transcript.text) == ([1], "a", "a")
    matcher.is_complete = True
    assert guide.has_ended
    other.accept(5)
    assert (other._matcher.said, other.transcript.text, allowed_tokens(other), other.thoughts) == ([5], "\n", [0, 1], 0)
    free = make_state(THINK.escape_marks(), **MARKS)
    for token in (3, 1, 4):
        free.accept(token)
        assert (allowed_tokens(free), free.get_expected_tokens(), free.has_ended) == (None, (), False)
    unmarked = make_state(THINK, Follower(0, 1, 3))
    assert (unmarked.transcript.kind, allowed_tokens(unmarked)) == (ANSWER, [0, 1, 3])


def test_a_used_up_budget_forces_the_closing_marker():
    for matcher in (None, Follower(0, 1, 3)):
        guide = make_state(THINK.escape_marks(), matcher, is_open=True, budget=2, **MARKS)
        free, behind = (None, None) if matcher is None else ([1, 2, 4], [0, 1])
        assert allowed_tokens(guide) == free
        for token, allowed, expected in ((1, free, ()), (2, [4], (4, 5)), (4, [5], (5,))):
            guide.accept(token)
            assert (allowed_tokens(guide), guide.get_expected_tokens()) == (allowed, expected)
        guide.accept(5)
        assert (allowed_tokens(guide), guide.thoughts, guide.transcript.thinking) == (behind, 2, "ab")
        guide = make_state(THINK.escape_marks(), matcher, is_open=True, budget=0, **MARKS)
        assert allowed_tokens(guide) == [4]
        guide = make_state(THINK.escape_marks(), matcher, budget=0, **MARKS)
        assert allowed_tokens(guide) == behind, "none may begin"
        assert make_state(THINK.escape_marks(), matcher, is_open=True, budget=1, **MARKS).get_expected_tokens() == ()


def test_every_answer_of_a_channel_format_gets_its_header():
    """Force the header whatever the budget; constrain only what follows it."""
    assert isinstance(GPT_OSS, ChannelFormat)
    format = replace(GPT_OSS, thought="never")  # whose marks are no tokens here
    for budget in (None, 0):
        guide = make_state(format, Follower(0, 1), starts=(6,), budget=budget)
        assert (guide.transcript.kind, allowed_tokens(guide)) == (None, [6])
        guide.accept(6)
        assert (guide.transcript.kind, allowed_tokens(guide), guide._matcher.said) == (None, [1, 2, 4], [])
        guide.accept(7)
        assert (guide.transcript.kind, allowed_tokens(guide), guide._matcher.said) == (ANSWER, [0, 1], [])
        guide.accept(1)
        assert (guide._matcher.said, guide.transcript.text) == ([1], "a")


def test_a_constraint_may_include_reasoning_and_headers():
    guide = make_state(THINK.escape_marks(), Follower(0, 1, 3, 8), is_whole=True, budget=5, shown=MARKS["shown"])
    assert (guide.transcript.kind, allowed_tokens(guide)) == (None, [0, 1, 3])
    for token, kind, thoughts in ((3, REASONING, 0), (1, REASONING, 1), (4, ANSWER, 2), (2, ANSWER, 2)):
        guide.accept(token)
        assert (guide.transcript.kind, allowed_tokens(guide), guide.thoughts) == (kind, [0, 1, 3], thoughts)
    assert (guide._matcher.said, guide.transcript.thinking, guide.transcript.text) == ([3, 1, 4, 2], "a", "b")


def test_text_that_is_no_call_leaves_the_call_grammar():
    """Apply the grammar of calls from where a call may begin."""
    for may in (True, False):
        calls: Any = SimpleNamespace(accept_text=lambda text, may=may: may and text == "x")
        guide = make_state(None, calls=calls)
        guide.transcript.abandon_call = lambda: ["prose"]
        assert guide._begin_call(calls, "x") == ([] if may else ["prose"])
        assert (guide._matcher is calls) == may and guide._calls is None


def test_nothing_is_allowed_after_a_stop_string():
    transcript = make_state(None).transcript
    transcript._stops = StopFilter([".b", "."])
    assert transcript._filter_parts([TextPart(ANSWER, "a.b"), TextPart(ANSWER, "c")]) == [(ANSWER, "a")]
    assert (transcript.text, transcript.stopped_by, transcript.flush(), transcript.text) == ("a", ".", [], "a")


ON = {"enable_thinking": True, "thinking": True, "thinking_mode": "enabled"}
OFF = {"enable_thinking": False, "thinking": False, "thinking_mode": "disabled", "thinking_budget": 0}


@pytest.mark.parametrize(("source", "think", "budget", "expected"), [
    ("", "auto", None, {}), ("'no_think'", "auto", 5, {"thinking_budget": 5}), ("", "auto", 0, {"thinking_budget": 0}),
    ("", "on", None, ON), ("", "on", 7, ON | {"thinking_budget": 7}),
    ("none", "off", 7, OFF | {"reasoning_effort": "low"}),
    ('"no_think" "none"', "off", None, OFF | {"reasoning_effort": "no_think"}),
    ("'minimal' 'none'", "off", None, OFF | {"reasoning_effort": "none"}),
    ("'minimal' 'low'", "off", None, OFF | {"reasoning_effort": "minimal"}),
    ("'no_think'", "on", None, ON | {"reasoning_effort": "high"}),
    ("'no_think'", "medium", None, ON | {"reasoning_effort": "medium"}),
    ("", "low", 3, ON | {"reasoning_effort": "low", "thinking_budget": 3}),
    ("", "high", None, ON | {"reasoning_effort": "high"}),
])  # fmt: skip
def test_the_template_gets_the_variables_of_its_reasoning_switch(
    source: str, think: str, budget: int | None, expected: dict
):
    assert make_template_variables(source, think, budget) == expected


# The command line.


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that opens its reasoning and never closes it."""
    template = TURNS + "{{ mood }}{% if enable_thinking is not false %}<think>\n{# </think> #}{% endif %}"
    return write_tiny_model(tmp_path_factory.mktemp("models") / "thinker.gguf", chat_template=template)


ASKED = ("-p", "Hi", "--temp", "0", "--no-cache")


def test_run_prints_the_answer_without_its_reasoning(thinker: Path, cli):
    result = json.loads(cli("run", thinker, *ASKED, "-n", "40", "--think-budget", "5", "--json")[1])
    code, out, err = cli("run", thinker, *ASKED, "-n", "40", "--think-budget", "5")
    assert (code, out, err) == (0, result["text"] + "\n", "")
    assert result["thinking"] and result["text"] and "think>" not in result["thinking"] + result["text"]
    assert json.loads(cli("run", thinker, *ASKED, "-n", "4", "--json")[1])["text"] == ""
    assert json.loads(cli("run", thinker, *ASKED, "-n", "4", "--json", "--think", "off")[1])["thinking"] == ""


def test_run_shows_reasoning_dimmed_on_a_terminal_unless_hidden(thinker: Path, cli, monkeypatch):
    monkeypatch.setattr("localllm.cli.terminal.output.is_terminal", lambda stream: stream is sys.stderr)
    result = json.loads(cli("run", thinker, *ASKED, "-n", "40", "--think-budget", "5", "--json")[1])
    _, out, err = cli("run", thinker, *ASKED, "-n", "40", "--think-budget", "5")
    assert out == result["text"] + "\n"
    assert make_printable(result["thinking"]) in re.sub("\x1b\\[[0-9]*[mK]|\r", "", err)
    hidden = cli("run", thinker, *ASKED, "-n", "40", "--think-budget", "5", "--hide-thinking")[2]
    assert "\x1b[2m" in err and "\x1b[2m" not in hidden


def test_template_var_sets_variables_of_the_template(thinker: Path, cli):
    def count_prompt_tokens(*arguments: str) -> int:
        return json.loads(cli("run", thinker, *ASKED, "-n", "1", "--json", *arguments)[1])["prompt_tokens"]

    plain = count_prompt_tokens()
    assert count_prompt_tokens("--template-var", "mood=sad") == plain + 3
    assert count_prompt_tokens("--template-var", "mood=[1]") == plain + 3
    assert count_prompt_tokens("--template-var", '{"mood": 12, "enable_thinking": false}') == plain + 2 - len(
        "<think>\n"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--think", "maybe"), "must be auto, on, off, low, medium or high, not 'maybe'"),
        (("--think-budget", "-2"), "must be an integer, 0 or greater, not -2"),
        (("--template-var", "x"), "must be NAME=VALUE or a JSON object, not 'x'"),
        (("--raw", "--think", "on"), "--raw turns off"),
    ],
)
def test_run_refuses_invalid_reasoning_options(arguments: tuple[str, ...], reason: str, refused):
    refused(["run", "missing.gguf", "-p", "Hi", *arguments], reason)


def test_map_writes_reasoning_beside_the_output(thinker: Path, cli):
    _, out, _ = cli("map", thinker, "-n", "40", "--temp", "0", "--think-budget", "5", stdin=b"Hi\n")
    assert json.loads(out)["thinking"] and json.loads(out)["output"]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("call", "text", "expected"),
    [
        (ESCAPE + "<c>", f"<think>Hm.{ESCAPE}<c>x</think>", [(REASONING, "Hm."), (ANSWER, f"{ESCAPE}<c>x</think>")]),
        ("<c>", "<think>Hm.\n <c>x", [(REASONING, "Hm."), (ANSWER, "<c>x")]),
        ("<c>", "<think><c>x", [(ANSWER, "<c>x")]),
        ("<c>", "<think>Hm. <c>x</think>y", [(REASONING, "Hm. <c>x"), (ANSWER, "y")]),
        ("<c>", "<think>Hm.</think>\n<c>x", [(REASONING, "Hm."), (ANSWER, "<c>x")]),
    ],
)  # fmt: skip
def test_the_marker_of_a_call_ends_reasoning(call: str, text: str, expected: list, size: int):
    parser, parts = ReasoningParser(Thinking(THINK), call), list[TextPart]()
    for place in range(0, len(text), size):
        parts += parser.push(text[place : place + size])
    texts = {
        kind: "".join(part.text for part in [*parts, *parser.flush()] if part.kind == kind) for kind, _ in expected
    }
    assert [*texts.items()] == expected
