"""Test tools and permissions of run and chat, and the quantize options."""

import io
import json
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli.commands.quantize import (
    CalibrationFlags,
    PhaseTimer,
    make_size_limit,
    parse_positional,
    plan_by_sensitivity,
    require_consent,
    split_calibration_files,
    suggest_type,
)
from localllm.cli.interactive import slash_commands as chat_commands
from localllm.cli.terminal import render, tool_calls
from localllm.errors import LocalllmError, UsageError
from localllm.generation.options import GenerationOptions
from localllm.generation.tools.tool_call_parser import ToolCall
from localllm.quant.formats import RECIPES
from localllm.quantizing.mixed_precision.plan import read_formats
from localllm.quantizing.plan import QuantizeRequest
from localllm.services.tools.box import ToolResult


@pytest.mark.parametrize(("outcome", "shown"), [
    (ToolResult("one line\n"), "one line"), (ToolResult("first\nsecond"), "12 characters: first …"),
    (ToolResult("error: no\nfile", True), "error: no"), (ToolResult("x" * 300), "x" * 200),
    (ToolResult(f"{'x' * 300}\ny"), f"302 characters: {'x' * 100} …"), (ToolResult(""), ""),
])  # fmt: skip
def test_a_tool_result_is_summarized_in_one_line(monkeypatch: pytest.MonkeyPatch, outcome: ToolResult, shown: str):
    messages: list[str] = []
    monkeypatch.setattr(tool_calls, "say_dim", messages.append)
    tool_calls.show_result(outcome)
    assert messages == [shown]


class Box:
    """Tools that return what they are called."""

    def __init__(self, *names: str, most: int = 50_000):
        self.names, self.most, self.use = [*names], most, "these tools"

    def perform(self, call: ToolCall) -> ToolResult:
        return ToolResult(f"did {call.name}")

    def limit_to(self, names: list[str]) -> None:
        self.names = [name for name in self.names if name in names]

    def refresh(self) -> None:
        """Offer the same."""

    def may_offer(self, name: str) -> bool:
        return False


class Keys:
    """A keyboard with scripted answers."""

    def __init__(self, *answers: str):
        self.answers, self.asked, self.closed = [*answers], list[str](), 0

    def ask(self, question: str) -> str:
        self.asked.append(question)
        return self.answers.pop(0)

    def close(self) -> None:
        self.closed += 1


def tools(*answers: str, yes: tuple[str, ...] = (), most: int = 9, keyboard: bool = True, **more: Any) -> Any:
    """Return the calls of three tools, and the keyboard."""
    keys = Keys(*answers)
    box: Any = Box("read", "write", "run")
    return tool_calls.ToolCallRunner(box, yes, most, keys if keyboard else None, **{"transcript": None, **more}), keys


def call(name: str, pieces: str = '{"a": "ü"}') -> ToolCall:
    return ToolCall(name, [pieces] if pieces else [], "id")


REFUSED = "error: the user does not allow this call"


@pytest.mark.parametrize(("answers", "allowed", "done"), [
    (["y", "yes", "n"], ["asked", "asked", "no"], [True, True, False]), (["a"], ["always"] * 3, [True] * 3),
    (["always"], ["always"] * 3, [True] * 3), (["x", "", "a"], ["no", "no", "always"], [False, False, True]),
])  # fmt: skip
def test_the_user_allows_or_denies_calls(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], allowed: list[str], done: list[bool]
):
    it, keys = tools(*answers)
    noted: list[Any] = []
    monkeypatch.setattr(it, "_transcript", SimpleNamespace(add=noted.append))
    monkeypatch.setattr(tool_calls, "perf_counter", iter([1.0, 1.25049] * 3).__next__)
    results = [it.run_calls([call("run")])[0] for _ in range(3)]
    assert [result["content"] for result in results] == ["did run" if yes else REFUSED for yes in done]
    assert results[0] == {"role": "tool", "tool_call_id": "id", "name": "run", "content": results[0]["content"]}
    assert [each["allowed"] for each in noted] == allowed and [each["failed"] for each in noted] == [
        not x for x in done
    ]
    assert noted[0]["seconds"] == 0.25 and not keys.answers
    assert keys.asked[0] == 'tool: run {"a": "ü"}\nallow it? [y]es, [n]o, [a]lways run: '


def test_named_and_unknown_tools_need_no_consent(capsys: pytest.CaptureFixture[str]):
    """Tell the model of unknown tools; a cut call has no arguments."""
    it, keys = tools("n", yes=("read",))
    names = [result["content"] for result in it.run_calls([call("read"), call("none"), call("run", "")])]
    assert names == ["did read", "did none", REFUSED] and keys.asked[0].startswith("tool: run {}\n")
    lines = [line for line in capsys.readouterr().err.splitlines() if "tool: " in line]
    assert lines == ['localllm: tool: read {"a": "ü"}', 'localllm: tool: none {"a": "ü"}']
    nobody, _ = tools(yes=("read",), keyboard=False)
    assert [each["content"] for each in nobody.run_calls([call("read"), call("run")])] == ["did read", REFUSED]


def test_the_tool_limit_is_counted_anew_for_each_question():
    first, _ = tools(yes=("run",), most=1)
    assert len(first.run_calls([call("run")])) == 1  # before any question
    it, _ = tools(yes=("run",), most=2)
    for _ in range(2):
        it.log_question([])
        it.run_calls([call("run"), call("run"), call("run")])
        it.run_calls([])
        with pytest.raises(LocalllmError, match="called tools 2 times without answering; raise --max-steps"):
            it.run_calls([call("run")])


def test_tools_without_a_terminal_need_yes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    opened: list[Any] = []
    monkeypatch.setattr(tool_calls.ConsentTerminal, "open", lambda: opened[-1])

    def of(*yes: str, keyboard: Keys | None = None) -> Any:
        opened.append(keyboard)
        box: Any = Box("read", "run")
        with ExitStack() as stack:
            return tool_calls.ToolCallRunner.create(box, yes, 3, None, stack)

    keys = Keys()
    assert of("read", "run", keyboard=keys)._keyboard is None and not keys.closed
    assert of("read", keyboard=keys)._keyboard is keys and keys.closed == 1
    assert capsys.readouterr().err == ""
    assert of("read").box.names == ["read"]
    warning = "localllm: no terminal to ask for consent: run not offered; allow them with --yes run\n"
    assert capsys.readouterr().err == warning
    with pytest.raises(
        UsageError, match="there is no terminal to ask for consent: allow the calls with --yes read,run"
    ):
        of()
    with pytest.raises(UsageError, match="yes: unknown tool 'rum'; available: read, run"):
        of("read", "rum")


@pytest.mark.parametrize(("context", "most", "expected"), [
    (4096, 50_000, 4096), (None, 50_000, 50_000), (500, 50_000, 1000), (4096, 700, 700),
])  # fmt: skip
def test_tool_results_are_limited_by_the_context(tmp_path: Path, context: int | None, most: int, expected: int):
    """Keep one transcript when the model changes."""
    path = tmp_path / "transcript"
    it, _ = tools(transcript=str(path))
    it.box.most = most
    model: Any = SimpleNamespace(context=context, name="", path="m.gguf")
    with ExitStack() as stack:
        for _ in range(2):
            assert it.begin(model, GenerationOptions(), stack).tools == "these tools" and it.box.most == expected
        it.log_question([{"role": "user", "content": "Hi"}])
        it.note({"role": "assistant", "content": "Ho"}, finish="stop")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["model"] == "m.gguf" and lines[1:] == [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "finish": "stop"},
    ]  # fmt: skip


def test_the_keyboard_ignores_earlier_input_and_takes_silence_as_no(monkeypatch: pytest.MonkeyPatch):
    did: list[Any] = []

    class Typed(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
            line = super().readline()
            if line == "^C\n":
                raise KeyboardInterrupt
            return line

    class Screen(io.StringIO):
        def flush(self) -> None:
            did.append(self.getvalue())

        def close(self) -> None:
            did.append("closed")
            raise OSError

    monkeypatch.setattr(tool_calls, "discard_input", lambda keys: did.append("forget"))
    keys, screen = Typed(" Yes \n\n^C\n"), Screen()
    keyboard = tool_calls.ConsentTerminal(keys, screen)
    assert [keyboard.ask("\x1b[2Jrun? ") for _ in range(4)] == ["yes", "n", "n", "n"]
    assert did[:2] == ["forget", "\ufffd[2Jrun? "] and screen.getvalue() == "\ufffd[2Jrun? " * 3 + "\n\ufffd[2Jrun? "
    keyboard.close()
    assert keys.closed and did[-1] == "closed"


@pytest.mark.parametrize(("terminal_there", "silent", "out"), [
    (True, False, ""), (False, False, "at last\n"), (False, True, ""), (True, True, ""),
])  # fmt: skip
def test_only_the_text_after_all_calls_goes_to_a_file(
    monkeypatch: pytest.MonkeyPatch, terminal_there: bool, silent: bool, out: str
):
    written, began, streamed = [], list[Any](), list[Any]()
    script = [("first", [call("run")]), ("at last", [])]
    answers = iter([SimpleNamespace(text=text, calls=calls, finish_reason="stop", thinking="",
                                    message=lambda text=text: {"role": "assistant", "content": text})
                    for text, calls in script])  # fmt: skip
    session = SimpleNamespace(chat=lambda messages, options: began.append([*messages]) or next(answers))
    model: Any = SimpleNamespace(session=session)
    monkeypatch.setattr(
        tool_calls, "print_stream", lambda answer, line, holds, thoughts: streamed.append((holds, thoughts))
    )
    monkeypatch.setattr(tool_calls, "is_terminal", lambda stream: terminal_there)
    monkeypatch.setattr(tool_calls, "write", written.append)
    it, _ = tools(yes=("run",))
    asked: Any = [{"role": "user", "content": "Hi"}]
    answer, messages, interrupted = tool_calls.answer_with_tools(
        model, asked, GenerationOptions(), it, None, silent, False
    )
    assert (answer.text, interrupted, "".join(written)) == ("at last", None, out)
    assert [each["content"] for each in messages] == ["first", "did run", "at last"] and asked == began[0]
    assert began[1] == [*asked, *messages[:2]]
    assert streamed == [(silent or not terminal_there, False)] * 2


def test_every_chat_command_has_a_line_in_the_table():
    conversation: Any = None  # words are the same in every one
    for name, command in chat_commands.COMMANDS.items():
        is_value = command.argument.replace(" ", "").isupper()  # other words are typed as they stand, and Tab has them
        if command.argument and not is_value:
            assert command.completions is not None and command.argument.split("|") == [
                *command.completions(conversation)
            ], name
        assert command.help[:1].islower() or command.help.startswith("on, off"), name


def test_session_titles_have_40_characters_and_keys_are_listed():
    assert render.TITLE == 40
    assert json.dumps(sorted(chat_commands.KEYS))  # every key has a line of help


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("q4km", "did you mean Q4_K_M?"), ("IQ4-XS", "did you mean IQ4_XS?"), ("Q4_K_N", "did you mean Q"),
        ("model", ""), ("q8" + "-" * 9 + "0", "did you mean Q8_0?"),
    ],
)  # fmt: skip
def test_a_mistyped_format_gets_a_suggestion(text: str, question: str):
    assert suggest_type(text).startswith(question) and bool(suggest_type(text)) == bool(question)


NO_TYPE = "unknown quantization type {}; localllm quantize --help lists the types"


@pytest.mark.parametrize(("words", "expected"), [
    ("in Q4_0", ("in", None, "Q4_0", None)), ("in out q8_0", ("in", "out", "Q8_0", None)),
    ("in Q4_0 8", ("in", None, "Q4_0", 8)), ("in out Q4_0 8", ("in", "out", "Q4_0", 8)),
    ("in Q4_0 Q8_0", ("in", "Q4_0", "Q8_0", None)), ("in 2 7", ("in", None, "Q4_0", 7)),
    ("in Q4_0 x", NO_TYPE.format("x")), ("in model.gguf", NO_TYPE.format("model.gguf")), ("in Q4-K-M9", "did "
    "you mean Q4_K_M"),
    *(
        (words, "expected 2 or 3 arguments, IN [OUT] TYPE, found")
        for words in ("in", "in out x 8", "in out Q4_0 8 9", "in out Q4_0 x")
    ),
])  # fmt: skip
def test_quantize_distinguishes_files_types_and_options(words: str, expected: tuple[Any, ...] | str):
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=re.escape(expected)):
            parse_positional(tuple(words.split()))
    else:
        source, target, recipe, threads = parse_positional(tuple(words.split()))
        assert (source, target, recipe.name, threads) == expected


@pytest.mark.parametrize(("words", "before", "texts"), [
    ("in Q4_0 a b", "in Q4_0", "a b"), ("in out Q4_0 a", "in out Q4_0", "a"), ("in out Q4_0", "in out Q4_0", ""),
    ("in Q4_0 Q8_0", "in Q4_0", "Q8_0"), ("in out x y", "in out x y", ""), ("in", "in", ""),
])  # fmt: skip
def test_words_after_the_format_are_calibration_texts(words: str, before: str, texts: str):
    assert split_calibration_files(tuple(words.split())) == (tuple(before.split()), tuple(texts.split()))


def test_a_plan_by_sensitivity_is_written_and_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Measure nothing if the plan's file exists."""
    from localllm.quantizing import scale_folding as folding
    from localllm.quantizing.mixed_precision import plan as by_need

    asked: list[Any] = []
    chosen = SimpleNamespace(predicted=0.12345, usual=0.2, found=0.1, formats={"a": "Q8_0"})

    def folded(source: Any, request: Any, count: int, show: Any, compiling: Any) -> str:
        asked.append((source.path, count))
        return "the scaled one"

    def by(source: Any, request: Any, size: Any, count: int, show: Any, check: Any, compiling: Any) -> Any:
        asked.append((source, size, count))
        return chosen

    def possible(source: Any, request: Any, size: Any) -> None:
        if size is min:
            raise UsageError("no formats are so small")

    monkeypatch.setattr(folding, "fold_scales", folded)
    monkeypatch.setattr(by_need, "choose_formats", by)
    monkeypatch.setattr(by_need, "require_possible", possible)
    source: Any = SimpleNamespace(path="m", files=[str(tmp_path / "m")])
    request, path = QuantizeRequest(RECIPES["Q4_0"], texts=()), str(tmp_path / "plan.toml")
    (tmp_path / "plan.toml").write_text("")
    with pytest.raises(
        UsageError, match=r"plan\.toml: the file exists; overwrite it with --force, or leave out --size"
    ):
        plan_by_sensitivity(source, request, len, path, 3, False, PhaseTimer(CalibrationFlags()))
    with pytest.raises(UsageError, match="no formats are so small"):
        plan_by_sensitivity(source, request, min, None, 3, False, PhaseTimer(CalibrationFlags()))
    assert not asked
    for at, force in ((path, True), (None, False), (f"{path}2", False)):
        spent = PhaseTimer(CalibrationFlags())
        new, planned = plan_by_sensitivity(source, request, len, at, 3, force, spent)
        assert re.fullmatch(r"\d\.\d s \(scales \d\.\d, choosing formats \d\.\d\)", str(spent))
        assert new == "the scaled one" and planned.options.formats == {"a": "Q8_0"}
        assert at is None or read_formats(at, SimpleNamespace(tensors=[SimpleNamespace(name="a")])) == {"a": "Q8_0"}
    assert asked == [("m", 3), ("the scaled one", len, 3)] * 3
    line = "predicted KL divergence 0.1235 (0.2000 with the formats of Q4_0); "
    line += "measured on held-out texts, weights only: 0.1000"
    assert capsys.readouterr().err.splitlines() == [f"localllm: {line}"] * 3
    with pytest.raises(UsageError, match="give either --size or --bpw, not both"):
        make_size_limit("1GB", 4.0, True)
    with pytest.raises(
        UsageError, match="--size and --bpw choose formats by measuring the model, which needs --calibrate"
    ):
        make_size_limit("1GB", None, False)
    plan: Any = SimpleNamespace(nbytes=1000, weights=800, jobs=[SimpleNamespace(output=SimpleNamespace(nbytes=1000))])
    assert make_size_limit("12k", None, True)(plan) == 12_000 and make_size_limit(None, 4.0, True)(plan) == 400


def test_quantize_replaces_or_enlarges_files_only_with_force(tmp_path: Path):
    there, new = tmp_path / "there.gguf", str(tmp_path / "new.gguf")
    there.write_text("")
    plan: Any = SimpleNamespace(list_paths=lambda target: [new, target])
    for nbytes, is_named, target, force in (
        (102, False, new, False), (102, True, str(there), False), (999, True, str(there), True),
    ):  # fmt: skip
        require_consent(plan, target, nbytes, 100, is_named, force)
    require_consent(plan, new, 10**12, None, False, False)  # of a folder, which has no size
    with pytest.raises(UsageError, match=r"there\.gguf: this file exists"):
        require_consent(plan, str(there), 102, 100, False, False)
    with pytest.raises(UsageError, match="larger than the old one: 103 B, from 100 B; use --force to write it anyway"):
        require_consent(plan, str(there), 103, 100, True, False)


def test_quantize_prints_its_result_and_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from localllm.cli.commands import quantize as command
    from localllm.quantizing import quantize as service

    asked: list[Any] = []
    plan: Any = SimpleNamespace(
        list_paths=lambda target: [f"{target}-1", f"{target}-2"], source=SimpleNamespace(path="in"), nbytes=10,
        nbytes_before=20, bits_per_weight=4.5, bits_per_weight_before=16.0, weights=9,
    )  # fmt: skip

    def run(plan: Any, target: str, request: Any, threads: int, on_progress: Any, compiling: Any, *others: Any) -> None:
        warnings, on_stage = others
        asked.append((target, threads))
        on_progress(3, "name")
        on_stage("encoding", 9, 9, "name")
        warnings.append("odd")

    monkeypatch.setattr(service, "check_output", lambda plan, target, request: asked.append(("check", target)))
    monkeypatch.setattr(service, "quantize_model", run)
    target, request = str(tmp_path / "out"), QuantizeRequest(RECIPES["Q4_0"])
    for threads in (0, 1025):
        with pytest.raises(UsageError, match=f"threads must be from 1 to 1024, not {threads}"):
            command.require_writable(plan, target, request, threads, False)
    (tmp_path / "out-2").write_bytes(b"notes")
    with pytest.raises(UsageError, match="out-2: the file exists and is not a model"):
        command.require_writable(plan, target, request, 1, False)
    asked.clear()
    monkeypatch.setattr(command, "perf_counter", iter([1.0, 3.46, 3.46, 1.0, 1.5, 3.26, 3.46]).__next__)
    for threads, parts in ((1, ()), (1024, ("scales",))):
        command.require_writable(plan, target, request, threads, True)
        spent = command.PhaseTimer(CalibrationFlags())
        for part in parts:
            spent.add(part)
        command.write_files(plan, target, request, threads, spent)
    assert asked == [("check", target), (target, 1), ("check", target), (target, 1024)]
    out, err = capsys.readouterr()
    result = f"{target}-1 and 1 more: 10 B, 4.50 bits per weight (before: 20 B, 16.00), 2.5 s"
    assert out.splitlines() == [result, f"{result} (scales 0.5, encoding 1.8)"]
    assert err.splitlines() == ["localllm: warning: odd"] * 2
