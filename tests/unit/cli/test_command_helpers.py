"""What commands make of their options and show of their work: each helper alone, without a model."""

import io
import json
import mmap
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import MISSING
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.arch.families.apertus import read_by_layer
from localllm.cli import map_run as map_command
from localllm.cli import open_model as opening
from localllm.cli import open_model as pulling
from localllm.cli.commands import embed, fit, inspect, serve
from localllm.cli.commands import pull as pull_command
from localllm.cli.commands.embed import output_of
from localllm.cli.commands.quantize import (
    CalibrationGroup,
    Spent,
    plan_by_sensitivity,
    require_consent,
    sizing,
    suggest_type,
    understood,
    with_texts,
)
from localllm.cli.interactive import slash_commands as chat_commands
from localllm.cli.options import endpoint
from localllm.cli.options import shared as options
from localllm.cli.options import tools as tool_options
from localllm.cli.options.conflicts import CONFLICTS, Conflict, require_combination
from localllm.cli.options.diffusion import (
    EPSILON,
    PLACES,
    Diffusion,
    decode_with_blanks,
    diffusion_options,
)
from localllm.cli.options.endpoint import EndpointGroup
from localllm.cli.options.images import ImageGroup
from localllm.cli.options.shared import (
    ExactSampling,
    Rope,
    Sampling,
    Shape,
    Thoughts,
    parse_layers,
    system_message,
    text_of,
)
from localllm.cli.parameters import explicit_options, fields_of
from localllm.cli.terminal import (
    output as terminal,
)
from localllm.cli.terminal import render, tool_calls
from localllm.cli.terminal import (
    result_report as report,
)
from localllm.cli.terminal import (
    stream_renderer as drawing,
)
from localllm.convert.config import Config
from localllm.convert.projectors.internvl import one_side
from localllm.errors import LocalllmError, ModelError, RecordsError, UsageError
from localllm.files.gguf import file as ahead
from localllm.files.gguf import header_only as hollow
from localllm.files.gguf.header import HeaderReader
from localllm.files.gguf.metadata_reader import Checked
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.files.models_folder import choose_projector
from localllm.files.safe_file import make_private
from localllm.generation.options import GenerationOptions
from localllm.generation.tools.tool_call_parser import ToolCall
from localllm.quant.formats import RECIPES
from localllm.quantizing.mixed_precision.plan import parse_bits, parse_size, read_formats, with_formats, write_formats
from localllm.quantizing.plan import QuantizeRequest
from localllm.services import outputs
from localllm.services.hub import pull
from localllm.services.hub.catalogue import HubReference
from localllm.services.hub.name_values import variables_of
from localllm.services.hub.pull import Pulled
from localllm.services.records.lines import Record
from localllm.services.remote.dialect import Form
from localllm.services.tools.box import Outcome


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """stdin and stderr are terminals, of 200 columns."""
    both = lambda stream: stream in (sys.stdin, sys.stderr)  # noqa: E731
    for module in (terminal, pulling):
        monkeypatch.setattr(module, "is_terminal", both)
    monkeypatch.setattr(terminal, "size_of", lambda stream: (200, 24))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


# ---- tools


@pytest.mark.parametrize(("outcome", "shown"), [
    (Outcome("one line\n"), "one line"), (Outcome("first\nsecond"), "12 characters: first …"),
    (Outcome("error: no\nfile", True), "error: no"), (Outcome("x" * 300), "x" * 200),
    (Outcome(f"{'x' * 300}\ny"), f"302 characters: {'x' * 100} …"), (Outcome(""), ""),
])  # fmt: skip
def test_what_is_told_of_a_call(monkeypatch: pytest.MonkeyPatch, outcome: Outcome, shown: str):
    told: list[str] = []
    monkeypatch.setattr(tool_calls, "dim", told.append)
    tool_calls.tell(outcome)
    assert told == [shown]


class Box:
    """Tools of these names, which do what they are called."""

    def __init__(self, *names: str, most: int = 50_000):
        self.names, self.most, self.use = [*names], most, "these tools"

    def perform(self, call: ToolCall) -> Outcome:
        return Outcome(f"did {call.name}")

    def limit_to(self, names: list[str]) -> None:
        self.names = [name for name in self.names if name in names]

    def refresh(self) -> None:
        """Offer the same."""

    def may_offer(self, name: str) -> bool:
        return False


class Keys:
    """A keyboard on which somebody gives these answers."""

    def __init__(self, *answers: str):
        self.answers, self.asked, self.closed = [*answers], list[str](), 0

    def ask(self, question: str) -> str:
        self.asked.append(question)
        return self.answers.pop(0)

    def close(self) -> None:
        self.closed += 1


def tools(*answers: str, yes: tuple[str, ...] = (), most: int = 9, keyboard: bool = True, **more: Any) -> Any:
    """Of three tools, and the keyboard."""
    keys = Keys(*answers)
    box: Any = Box("read", "write", "run")
    return tool_calls.ToolCalls(box, yes, most, keys if keyboard else None, **{"transcript": None, **more}), keys  # type: ignore[arg-type]


def call(name: str, pieces: str = '{"a": "ü"}') -> ToolCall:
    return ToolCall(name, [pieces] if pieces else [], "id")


REFUSED = "error: the user does not allow this call"


@pytest.mark.parametrize(("answers", "allowed", "done"), [
    (["y", "yes", "n"], ["asked", "asked", "no"], [True, True, False]), (["a"], ["always"] * 3, [True] * 3),
    (["always"], ["always"] * 3, [True] * 3), (["x", "", "a"], ["no", "no", "always"], [False, False, True]),
])  # fmt: skip
def test_the_user_allows_calls(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], allowed: list[str], done: list[bool]
):
    it, keys = tools(*answers)
    noted: list[Any] = []
    monkeypatch.setattr(it, "_transcript", SimpleNamespace(add=noted.append))
    monkeypatch.setattr(tool_calls, "perf_counter", iter([1.0, 1.25049] * 3).__next__)
    results = [it.results([call("run")])[0] for _ in range(3)]
    assert [result["content"] for result in results] == ["did run" if yes else REFUSED for yes in done]
    assert results[0] == {"role": "tool", "tool_call_id": "id", "name": "run", "content": results[0]["content"]}
    assert [each["allowed"] for each in noted] == allowed and [each["failed"] for each in noted] == [
        not x for x in done
    ]
    assert noted[0]["seconds"] == 0.25 and not keys.answers
    assert keys.asked[0] == 'tool: run {"a": "ü"}\nallow it? [y]es, [n]o, [a]lways run: '


def test_calls_that_nobody_is_asked_about(capsys: pytest.CaptureFixture[str]):
    """Of tools that are named, and of those that there are not: the model is told so. A call that was cut has no
    arguments."""
    it, keys = tools("n", yes=("read",))
    names = [result["content"] for result in it.results([call("read"), call("none"), call("run", "")])]
    assert names == ["did read", "did none", REFUSED] and keys.asked[0].startswith("tool: run {}\n")
    said = [line for line in capsys.readouterr().err.splitlines() if "tool: " in line]
    assert said == ['localllm: tool: read {"a": "ü"}', 'localllm: tool: none {"a": "ü"}']
    nobody, _ = tools(yes=("read",), keyboard=False)
    assert [each["content"] for each in nobody.results([call("read"), call("run")])] == ["did read", REFUSED]


def test_steps_are_counted_anew_for_each_question():
    first, _ = tools(yes=("run",), most=1)
    assert len(first.results([call("run")])) == 1  # before any question
    it, _ = tools(yes=("run",), most=2)
    for _ in range(2):
        it.note_question([])
        it.results([call("run"), call("run"), call("run")])
        it.results([])
        with pytest.raises(LocalllmError, match="called tools 2 times without answering; raise --max-steps"):
            it.results([call("run")])


def test_whom_one_can_ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    opened: list[Any] = []
    monkeypatch.setattr(tool_calls.Keyboard, "open", lambda: opened[-1])

    def of(*yes: str, keyboard: Keys | None = None) -> Any:
        opened.append(keyboard)
        box: Any = Box("read", "run")
        with ExitStack() as stack:
            return tool_calls.ToolCalls.of(box, yes, 3, None, stack)

    keys = Keys()
    assert of("read", "run", keyboard=keys)._keyboard is None and not keys.closed
    assert of("read", keyboard=keys)._keyboard is keys and keys.closed == 1
    assert capsys.readouterr().err == ""
    assert of("read").box.names == ["read"]
    said = "localllm: no terminal to ask for consent, so these tools are not offered: run\n"
    assert capsys.readouterr().err == said
    with pytest.raises(UsageError, match="no terminal to ask for consent; allow the calls with --yes read,run"):
        of()
    with pytest.raises(UsageError, match="yes: unknown tool 'rum'; available: read, run"):
        of("read", "rum")


@pytest.mark.parametrize(("context", "most", "expected"), [
    (4096, 50_000, 4096), (None, 50_000, 50_000), (500, 50_000, 1000), (4096, 700, 700),
])  # fmt: skip
def test_tools_begin_with_a_model(tmp_path: Path, context: int | None, most: int, expected: int):
    """What they return fits it; the transcript is one, whatever models follow."""
    path = tmp_path / "transcript"
    it, _ = tools(transcript=str(path))
    it.box.most = most
    model: Any = SimpleNamespace(context=context, name="", path="m.gguf")
    with ExitStack() as stack:
        for _ in range(2):
            assert it.begin(model, GenerationOptions(), stack).tools == "these tools" and it.box.most == expected
        it.note_question([{"role": "user", "content": "Hi"}])
        it.note({"role": "assistant", "content": "Ho"}, finish="stop")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["model"] == "m.gguf" and lines[1:] == [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "finish": "stop"},
    ]  # fmt: skip


def test_a_keyboard(monkeypatch: pytest.MonkeyPatch):
    """What was typed before the question is no answer; who sends nothing says no."""
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
    keyboard = tool_calls.Keyboard(keys, screen)
    assert [keyboard.ask("\x1b[2Jrun? ") for _ in range(4)] == ["yes", "n", "n", "n"]
    assert did[:2] == ["forget", "\ufffd[2Jrun? "] and screen.getvalue() == "\ufffd[2Jrun? " * 3 + "\n\ufffd[2Jrun? "
    keyboard.close()
    assert keys.closed and did[-1] == "closed"


@pytest.mark.parametrize(("terminal_there", "silent", "out"), [
    (True, False, ""), (False, False, "at last\n"), (False, True, ""), (True, True, ""),
])  # fmt: skip
def test_the_answer_behind_all_calls(monkeypatch: pytest.MonkeyPatch, terminal_there: bool, silent: bool, out: str):
    """A file gets what is said last, and nothing that was said before a call."""
    written, began, streamed = [], list[Any](), list[Any]()
    said = [("first", [call("run")]), ("at last", [])]
    answers = iter([SimpleNamespace(text=text, calls=calls, finish_reason="stop", thinking="",
                                    message=lambda text=text: {"role": "assistant", "content": text})
                    for text, calls in said])  # fmt: skip
    monkeypatch.setattr(tool_calls, "begin", lambda model, messages, chosen: began.append([*messages]) or next(answers))
    monkeypatch.setattr(tool_calls, "stream", lambda answer, line, holds, thoughts: streamed.append((holds, thoughts)))
    monkeypatch.setattr(tool_calls, "is_terminal", lambda stream: terminal_there)
    monkeypatch.setattr(tool_calls, "write", written.append)
    it, _ = tools(yes=("run",))
    asked: Any = [{"role": "user", "content": "Hi"}]
    answer, messages, interrupted = tool_calls.answer_with_tools(
        None, asked, GenerationOptions(), it, None, silent, False
    )  # type: ignore[arg-type]
    assert (answer.text, interrupted, "".join(written)) == ("at last", None, out)
    assert [each["content"] for each in messages] == ["first", "did run", "at last"] and asked == began[0]
    assert began[1] == [*asked, *messages[:2]]
    assert streamed == [(silent or not terminal_there, False)] * 2


# ---- opening


def test_compiling_is_told_once_where_no_line_can_be_shown(capsys: pytest.CaptureFixture[str]):
    show = opening.compiling(terminal.ProgressLine())
    show(1, 1)
    assert capsys.readouterr().err == ""  # nothing was to be done
    for done in range(3):
        show(done, 2)
    assert capsys.readouterr().err == "localllm: compiling 2 kernels for this computer, once; this may take a minute\n"
    opening.compiling(terminal.ProgressLine())(0, 1)
    assert "compiling a kernel for this computer" in capsys.readouterr().err


def test_progress_on_a_line(on_terminal: None, capsys: pytest.CaptureFixture[str]):
    line = terminal.ProgressLine()
    compiling = opening.compiling(line)
    compiling(1, 3)
    assert capsys.readouterr().err == "\r\x1b[Kcompiling kernels for this computer, once: 1 of 3"
    compiling(3, 3)
    assert capsys.readouterr().err == "\r\x1b[K"
    reading = opening.reading(line)
    reading(0, 5)
    assert capsys.readouterr().err == ""  # a short prompt needs none
    reading(2, 5)
    opening.uploading(line)(1_500_000_000, 2_000_000_000)
    shown = capsys.readouterr().err
    assert "reading the prompt: 2 of 5 tokens" in shown and "weights to the card: 1.5 of 2.0 GB" in shown


def test_layers_for_a_card():
    assert (options.layer_count("7"), options.layer_count("all")) == (7, "all")
    assert [parse_layers(text) for text in ("all", "auto", "-1", "0", "9999999")] == [
        "all",
        "auto",
        "all",
        "0",
        "9999999",
    ]
    for text in ("10000000", "-2", "1.5", "", "ALL"):
        with pytest.raises(ValueError, match="is not a number, all or auto"):
            parse_layers(text)


# ---- pulling


class Pulls:
    """A pull that tells what a test wants."""

    def __init__(self, *told: tuple[Any, ...], received: int = 5, error: BaseException | None = None):
        self.told, self.received, self.error = told, received, error

    def __call__(self, reference: HubReference, watcher: Any) -> Pulled:
        for name, *arguments in self.told:
            getattr(watcher, name)(*arguments)
        if self.error:
            raise self.error
        return Pulled(Path("/m.gguf"), 3_000_000_000, self.received)


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, on_terminal: None, capsys: pytest.CaptureFixture[str]) -> Any:
    def shown(made: Pulls) -> str:
        monkeypatch.setattr(pull, "pull", made)
        assert pulling.pull_shown(HubReference("hf:a/b", "a/b")) == "/m.gguf"
        return capsys.readouterr().err

    return shown


def test_what_a_pull_shows(pulled: Any, monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, *[5.0] * 20])
    monkeypatch.setattr(pulling, "monotonic", lambda: next(clock, 5.0))
    shown = pulled(
        Pulls(("looking", "the header"), ("checking", "f", 10**9, 2 * 10**9), ("checking", "f", 2 * 10**9, 2 * 10**9))
    )
    assert "hf:a/b: looking at the header" in shown and "checking 2.0 GB of 2.0 GB: f" in shown
    assert "checking 1.0 GB" not in shown  # a moment after the last one
    assert shown.endswith("hf:a/b: 3.0 GB\n") and "already downloaded and verified" in pulled(Pulls(received=0))
    assert "trying again: it broke" in pulled(Pulls(("interrupted", "it broke")))


def test_how_fast_a_pull_is(pulled: Any, monkeypatch: pytest.MonkeyPatch):
    """Counted from what was there at first."""
    clock = iter([0.0, 10.0, 10.0, 10.0, 10.0, 12.0, 12.0, 12.0, 12.0, 12.0])
    monkeypatch.setattr(pulling, "monotonic", lambda: next(clock, 12.0))
    shown = pulled(Pulls(("receiving", "f", 10**9, 3 * 10**9), ("receiving", "f", 2 * 10**9, 3 * 10**9)))
    assert "1.0 GB of 3.0 GB: f" in shown and "2.0 GB of 3.0 GB, 500.0 MB/s, 0:02 to go: f" in shown


def test_an_interrupted_pull(pulled: Any, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt):
        pulled(Pulls(error=KeyboardInterrupt()))
    assert "what was downloaded is kept" in capsys.readouterr().err
    with pytest.raises(LocalllmError):
        pulled(Pulls(("looking", "x"), error=LocalllmError("broken")))
    assert capsys.readouterr().err.endswith("\r\x1b[K")


@pytest.mark.parametrize(("seconds", "text"), [
    (0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3600, "1:00:00"), (7325, "2:02:05"),
    (1e9, "99:59:59"),
])  # fmt: skip
def test_durations(seconds: float, text: str):
    assert pulling.duration(seconds) == text


def test_a_missing_model_is_offered_where_somebody_can_say_so(
    tmp_path: Path, on_terminal: None, monkeypatch: pytest.MonkeyPatch
):
    from localllm.services.hub.catalogue import MissingError

    there = tmp_path / "m.gguf"
    there.write_bytes(b"")
    assert pulling.resolve_model_path(str(there)) == str(there)
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path))
    monkeypatch.setattr(pull, "pull", Pulls())
    for answer, path in (("y\n", "/m.gguf"), ("\n", None)):
        stdin = io.StringIO(answer)
        monkeypatch.setattr(sys, "stdin", stdin)
        if path:
            assert pulling.resolve_model_path("hf:a/b") == path
        else:
            with pytest.raises(MissingError):
                pulling.resolve_model_path("hf:a/b")
    monkeypatch.setattr(pulling, "is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(MissingError):
        pulling.resolve_model_path("hf:a/b")


@pytest.mark.parametrize(("size", "told"), [("0.6 GB", " (0.6 GB)"), ("", "")])
def test_how_large_a_missing_model_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: str, told: str
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("no\n"))
    missing = LocalllmError("missing")
    missing.reference = SimpleNamespace(text="qwen", size=size)  # type: ignore[attr-defined]
    with pytest.raises(LocalllmError, match="missing"):
        pulling.offer_pull(missing)  # type: ignore[arg-type]
    assert " ".join(capsys.readouterr().err.split()) == f"qwen is not on this computer. Pull it{told}? [y/N]"


# ---- fit


def facts(*rows: tuple[int, str, bool, float | None], **more: Any) -> dict[str, Any]:
    told = [
        {"context": c, "kv_type": k, "fits": f, "tokens_per_s": s, "needed_bytes": c * 10**6} for c, k, f, s in rows
    ]
    return {"rows": told, "longest": dict.fromkeys(dict.fromkeys(k for _, k, _, _ in rows), 0), "context": 9000, **more}


def test_the_table_of_fit():
    both = facts(
        (2048, "f16", True, 12.34), (512, "f16", True, 20.0), (512, "q8_0", True, 25.0), (2048, "q8_0", False, 9.9)
    )
    header, first, second = fit.needs(both)
    assert header.split() == ["context", "f16", "tokens/s", "q8_0", "tokens/s"]
    assert first.split() == ["512", "512.0", "MB", "20.0", "512.0", "MB", "25.0"]
    assert second.split() == ["2048", "2.0", "GB", "12.3", "2.0", "GB", "too", "much"]
    vectors = facts((512, "f16", True, None))
    assert [line.split() for line in fit.needs(vectors)] == [["texts", "of", "needed"], ["512", "512.0", "MB"]]


def test_the_facts_of_fit():
    told = {"weight_bytes_per_token": 10**8, "path": "p", "architecture": "llama", "parameters": 10**9,
    "weight_bytes": 5 * 10**8,
            "projector_bytes": 0, "available_bytes": 10**10, "bandwidth_gbs": 30.04}  # fmt: skip
    lines = fit.summary({**told, **facts((1, "f16", True, 1.0))})
    assert any("500.0 MB, of which each token reads 100.0 MB" in line for line in lines)
    assert any("10.0 GB available, read at 30.0 GB/s" in line for line in lines) and not any(
        "projector" in line for line in lines
    )
    lines = fit.summary({**told, "projector_bytes": 10**6, **facts((1, "f16", True, None))})
    assert any("projector" in line for line in lines) and not any("each token" in line for line in lines)


# ---- serve


def test_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a.gguf", "b=c.gguf", "d.gguf"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    paths = lambda *words: {each.name: each.path for each in serve.map_names([*words])}  # noqa: E731
    assert paths("a.gguf", "x=d.gguf") == {"a": "a.gguf", "x": "d.gguf"}
    assert paths("b=c.gguf") == {"b=c": "b=c.gguf"}  # a file that is there
    assert paths(f"{tmp_path}/a.gguf") == {"a": f"{tmp_path}/a.gguf"}
    with pytest.raises(UsageError, match=r"two models have the name a: rename one with NAME=a\.gguf"):
        paths(f"a={tmp_path}/d.gguf", "a.gguf")
    assert paths() == {}


def test_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "keys"

    def kept(text: str, mode: int = 0o600) -> tuple[str, ...]:
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
        return serve.keys_of(str(file))

    assert serve.keys_of(None) == () and kept(" 12345678 \n\nabcdefgh\n") == ("12345678", "abcdefgh")
    assert capsys.readouterr().err == ""
    for short in ("1234567\n", "12345678\nx\n", "äöüäöüäöü\n"):
        with pytest.raises(UsageError, match="a key must have at least 8 ASCII characters"):
            kept(short)
    with pytest.raises(UsageError, match="has no key"):
        kept("\n \n")
    if os.name == "posix":
        for mode in (0o640, 0o604):
            kept("12345678", mode)
            assert "other users of this computer can read" in capsys.readouterr().err


# ---- options


# Of options, by group: what nobody's word means, and what is made of that.
UNSAID = [
    (Shape, {"json_whitespace": False, "additional_properties": False}, Shape.form, Form()),
    (Thoughts, {"think": "auto"}, Thoughts.as_fields,
     {"think": "auto", "think_budget": None, "template_variables": {}}),
    (ImageGroup, {"pan_and_scan": False}, lambda group: (group.mmproj, group.pan_and_scan), (None, False)),
    (tool_options.ToolGroup, {"max_steps": 20, "no_json_calls": False}, lambda group: group.open_tools(None), None),
    (EndpointGroup, {}, EndpointGroup.place, None), (Sampling, {}, explicit_options, {}),
    (ExactSampling, {"ignore_eos": False}, ExactSampling.as_fields, {}),
    (Diffusion, {"has_noise": False, "visual": False}, Diffusion.as_fields, {}),
    (options.Cache, {"kv_type": "f16"}, options.Cache.types, "f16"),
    (options.EngineGroup, {"device": "auto", "gpu_layers": "auto"}, lambda group: parse_layers("auto"), "auto"),
    (options.Answers, {"escape": False}, lambda group: parse_layers("all"), "all"),
    (options.GenerationGroup, {"escape": False, "speculate": "auto"}, lambda group: parse_layers("7"), "7"),
    (serve.Place, {"port": 11435, "strict_model_names": False, "access_log": False}, lambda group: serve.amount("7"),
     7),
    (serve.Share, {"max_body": 32_000_000, "max_connections": 128, "grace": 30.0, "spm_infill": False},
     lambda group: serve.amount("1K"), 1000),
]  # fmt: skip


@pytest.mark.parametrize(("group", "usual", "made", "of_it"), UNSAID, ids=[case[0].__name__ for case in UNSAID])
def test_what_options_mean_that_nobody_gives(group: Any, usual: dict[str, Any], made: Any, of_it: Any):
    defaults = {each.name: each.default for each in fields_of(group) if each.default not in (MISSING, None)}
    assert defaults == usual
    nested = {each.name: None for each in fields_of(group) if each.default is MISSING}
    assert made(group(**nested)) == of_it


def test_a_form_is_one_of_three():
    assert Shape().constraint() is None and Shape(regex="x").constraint()
    for two in ({"regex": "x", "grammar": 'root ::= "y"'}, {"json_schema": "{}", "regex": ""}):
        with pytest.raises(UsageError, match="cannot be combined"):
            Shape(**two).constraint()
    assert Shape(json_schema='{"a": 1}', regex="x").form() == Form({"a": 1}, None, "x")


def test_texts_and_files_of_them(tmp_path: Path):
    (tmp_path / "s.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    (tmp_path / "latin").write_bytes(b"\xe4")
    assert (
        text_of("x", None, "{") is None
        and text_of("x", "{}", "{") == "{}"
        and text_of("x", "a ::= b", "::=") == "a ::= b"
    )
    assert text_of("x", str(tmp_path / "s.json"), "{") == '{"a": 1}'
    for given, message in (
        (" ", "x is empty"),
        (str(tmp_path / "no"), "cannot read .*: No such file"),
        (str(tmp_path / "latin"), "not UTF-8"),
    ):
        with pytest.raises(UsageError, match=message):
            text_of("x", given, "{")


def test_variables():
    assert variables_of("a=1") == {"a": 1} and variables_of("a=x y") == {"a": "x y"} and variables_of("a=") == {"a": ""}
    assert variables_of(' {"a": true, "b": null}') == {"a": True, "b": None} and variables_of("a=b=c") == {"a": "b=c"}
    for odd in ("a", "1a=2", "{a}", "=1"):
        with pytest.raises(UsageError, match="template_var must be NAME=VALUE or a JSON object"):
            variables_of(odd)
    thoughts = Thoughts(think="on", think_budget=0, template_var=["a=1", '{"b": 2}', "a=3"])
    assert thoughts.as_fields() == {"think": "on", "think_budget": 0, "template_variables": {"a": 3, "b": 2}}
    assert not explicit_options(Thoughts())
    for other in ({"think": "off"}, {"think_budget": 0}, {"template_var": ["a=1"]}):
        assert explicit_options(Thoughts(**other)) == other


def test_images_of_the_command_line(monkeypatch: pytest.MonkeyPatch):
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert ImageGroup().with_images(asked) is asked and ImageGroup().with_images("x") == "x"
    assert ImageGroup(image_files=["a", "b"]).with_images(asked) == [asked[0], {**asked[1], "images": ["a", "b"]}]
    with pytest.raises(UsageError, match="images need a chat template"):
        ImageGroup(image_files=["a"]).with_images("x")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x89PNG")))
    assert ImageGroup(image_files=["a", "-"]).sources() == ["a", b"\x89PNG"]
    with pytest.raises(UsageError, match="stdin can hold only one image"):
        ImageGroup(image_files=["-", "-"]).sources()
    assert (
        ImageGroup(image_files=["-"]).takes_stdin
        and not ImageGroup(image_files=["a"]).takes_stdin
        and not ImageGroup().takes_stdin
    )
    with pytest.raises(UsageError, match="chat reads the prompt from stdin"):
        ImageGroup(image_files=["-"]).require_files()
    ImageGroup(image_files=["a"]).require_files()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="must be open"):
        ImageGroup(image_files=["-"]).sources()


def test_system_messages(tmp_path: Path):
    (tmp_path / "s").write_text("from a file")
    assert system_message(None, None) is None and system_message("x", None) == "x"
    assert system_message(None, str(tmp_path / "s")) == "from a file"
    with pytest.raises(UsageError, match="give either -sys or -sysf, not both"):
        system_message("x", str(tmp_path / "s"))


def test_options_of_models_that_fill_places():
    def choices(max_tokens: int | None = None, ban: Any = None, **drawing: Any) -> Any:
        return SimpleNamespace(max_tokens=max_tokens, ban=ban, drawing=lambda: drawing)

    usual: Any = diffusion_options(choices(), Diffusion())
    assert (usual.length, usual.epsilon, usual.block_length) == (PLACES, EPSILON, 0) == (128, 1e-3, 0)
    assert (
        diffusion_options(choices(-1), Diffusion()).length == 128
        and diffusion_options(choices(7), Diffusion()).length == 7
    )
    blocks = diffusion_options(
        choices(32, temperature=0.5, seed=3), Diffusion(block_length=16, steps=8, has_noise=True)
    )
    assert (blocks.block_length, blocks.steps, blocks.temperature, blocks.seed, blocks.has_noise) == (
        16,
        8,
        0.5,
        3,
        True,
    )
    assert Diffusion(visual=True).as_fields() == {}
    chosen = diffusion_options(choices(), Diffusion(algorithm=0, guidance=0.0, block_length=0))  # 0 is a choice, too
    assert (chosen.algorithm, chosen.epsilon, usual.algorithm) == (0, EPSILON, 4)
    with pytest.raises(UsageError, match="1 to 10000 steps"):
        diffusion_options(choices(), Diffusion(steps=0))
    with pytest.raises(UsageError, match="do not support ban"):
        diffusion_options(choices(ban=["x"]), Diffusion())
    with pytest.raises(UsageError, match="do not support min-p"):
        diffusion_options(choices(min_p=0.1, temperature=1.0), Diffusion())


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: row.option)
def test_options_that_exclude_each_other_are_refused(row: Conflict):
    require_combination({row.option: True} | dict.fromkeys(row.others, False))
    for other in row.others:
        require_combination({other: True})
        with pytest.raises(UsageError, match=re.escape(row.message.format(row.option, other))):
            require_combination({row.option: True, other: True})


def test_a_text_as_it_settles():
    tokenizer = SimpleNamespace(end_ids={9}, decode=lambda ids: "".join(map(chr, ids)))
    opened: Any = SimpleNamespace(tokenizer=tokenizer)
    assert decode_with_blanks(opened, [72, 1, 105, 33, 9, 72], mask=1) == "H_i!"
    assert decode_with_blanks(opened, [1, 1], mask=1) == "__"


# ---- reports


def answer(**more: Any) -> Any:
    told = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 3, "prefill_s": 0.5, "ttft_s": 0.6,
    "decode_s": 0.25,
            "text": "t", "thinking": "", "finish_reason": "stop", "dropped": 0, "skipped": 0, "seed": 7,
            "drafted": 6,
            "accepted": 2}  # fmt: skip
    return SimpleNamespace(**told | more)


MODEL: Any = SimpleNamespace(file=1, path="p", arch="llama", format="Q8_0", device="CPU")


def test_a_report(capsys: pytest.CaptureFixture[str]):
    found = report.report(MODEL, [answer(tokens=[1, 2, 3])], False, 0.1, 2.0)
    assert found["timings"] == {"load_s": 0.1, "prefill_s": 0.5, "ttft_s": 0.6, "decode_s": 0.25, "total_s": 2.0,
                                "prefill_tps": 10.0, "decode_tps": 8.0}  # fmt: skip
    assert found["speculation"] == {"drafted": 6, "accepted": 2, "steps_saved": 2} and found["tokens"] == [1, 2, 3]
    report.tell(found)
    err = capsys.readouterr().err
    assert "prompt: 9 tokens, 4 of them known, in 0.50 s (10.0 per second), model loaded in 0.10 s\n" in err
    assert "answer: 3 tokens in 0.25 s (8.0 per second), first after 0.60 s, finish: stop, seed: 7" in err
    assert "drafted: 6 tokens, 2 accepted" in err
    card: Any = SimpleNamespace(**{**vars(MODEL), "device": "H100"})
    plain = report.report_one(card, answer(drafted=0, cached_tokens=0, prefill_s=0.0, decode_s=0.0), 0.1, 2.0)
    assert plain["timings"]["prefill_tps"] == plain["timings"]["decode_tps"] == 0 and "tokens" not in plain
    report.tell(plain)
    err = capsys.readouterr().err
    assert (
        "known" not in err
        and "guessed" not in err
        and "loaded in 0.10 s on H100" in err
        and "prompt: 9 tokens in 0.00 s, " in err
    )


def test_a_report_of_several(capsys: pytest.CaptureFixture[str]):
    answers: Any = [SimpleNamespace(text="a", thinking="", logprob=-1.0, finish_reason="stop", tokens=[1, 2], seed=5),
                    SimpleNamespace(text="b", thinking="h", logprob=-2.0, finish_reason="length", tokens=[3],
                    seed=None)]  # fmt: skip
    found = report.report(MODEL, answers, True, 0.5, 2.0)
    assert [each.get("seed") for each in found["answers"]] == [5, None] and "seed" not in found["answers"][1]
    assert found["timings"] == {"load_s": 0.5, "total_s": 2.0}
    report.tell(found)
    assert "answers: 2 with 3 tokens in 1.50 s, model loaded in 0.50 s" in capsys.readouterr().err
    assert report.about(SimpleNamespace(file=None, path="u", name="n")) == {"endpoint": "u", "name": "n"}  # type: ignore[arg-type]


# ---- files


def test_only_files_of_the_kind_are_replaced(tmp_path: Path):
    path = str(tmp_path / "x")
    outputs.require_kind(path, lambda path: False, "a model", False)
    (tmp_path / "x").write_bytes(b"")
    outputs.require_kind(path, lambda path: False, "a model", False)  # empty, as mktemp makes it
    (tmp_path / "x").write_bytes(b"my notes")
    outputs.require_kind(path, lambda path: True, "a model", False)
    outputs.require_kind(path, outputs.is_model, "a model", True)
    for kind in (outputs.is_model, outputs.is_imatrix, outputs.are_logits, outputs.is_receipt, lambda path: False):
        with pytest.raises(UsageError, match="x: this file exists and is not a model; use --force to replace it"):
            outputs.require_kind(path, kind, "a model", False)


@pytest.mark.parametrize(("kind", "is_model"), [(None, True), ("model", True), ("imatrix", False), ("adapter", False)])
def test_models_by_their_metadata(tmp_path: Path, kind: str | None, is_model: bool):
    metadata = {} if kind is None else {"general.type": kind}
    write_gguf(tmp_path / "m.gguf", metadata, [OutputTensor.of("a", np.ones(4, np.float32))])
    assert outputs.is_model(str(tmp_path / "m.gguf")) == is_model


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_folders_are_private(tmp_path: Path):
    assert make_private(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    make_private(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalllmError, match="cannot be created"):
        make_private(tmp_path / "file" / "x")


@pytest.mark.parametrize(("text", "bytes_"), [
    ("3.5GB", 3_500_000_000), ("800m", 800_000_000), ("800 MB", 800_000_000), ("12k", 12_000), ("77", 77),
    ("1T", 10**12),
    ("5b", 5), ("OWN", 1000),
])  # fmt: skip
def test_sizes(text: str, bytes_: int):
    plan: Any = SimpleNamespace(nbytes=1000)
    assert parse_size(text)(plan) == bytes_


def test_sizes_that_are_none():
    for odd in ("", "GB", "3,5GB", "-1", "3XB", "own it", "1e9"):
        with pytest.raises(UsageError, match=r"^--size \S.*: expected a size like 45G, 3\.5GB or 800MB$"):
            parse_size(odd)
    jobs = [SimpleNamespace(output=SimpleNamespace(nbytes=700))]
    plan: Any = SimpleNamespace(nbytes=1000, weights=800, jobs=jobs)
    assert parse_bits(4.5)(plan) == 450 + 300 and parse_bits(1)(plan) == 400 and parse_bits(32)(plan) == 3500
    for odd_bits in (0.99, 32.1):
        with pytest.raises(UsageError, match="--bpw must be from 1 to 32"):
            parse_bits(odd_bits)


def test_formats_in_a_file(tmp_path: Path):
    path, source = (
        str(tmp_path / "plan.toml"),
        SimpleNamespace(tensors=[SimpleNamespace(name="a.b"), SimpleNamespace(name="c")]),
    )
    write_formats(path, {"a.b": "Q4_K", "c": "F16"})
    assert read_formats(path, source) == {"a.b": "Q4_K", "c": "F16"}  # type: ignore[arg-type]
    (tmp_path / "plan.toml").write_text('"c" = "q8_0"\n')
    assert read_formats(path, source) == {"c": "Q8_0"}  # type: ignore[arg-type]
    request = with_formats(QuantizeRequest(RECIPES["Q4_0"]), {"c": "Q8_0"})
    assert request.options.formats == {"c": "Q8_0"}
    for said, message in (
        ("c = ", "plan.toml: "),
        ('d = "F16"', "has no tensor d"),
        ('c = "Q99"', "Q99, for c, is not a tensor format"),
        ("c = 5", "5, for c"),
    ):
        (tmp_path / "plan.toml").write_text(said)
        with pytest.raises(UsageError, match=message):
            read_formats(path, source)  # type: ignore[arg-type]


@pytest.mark.parametrize(("names", "model", "found"), [
    (["m-Q4.gguf", "mmproj-m-f32.gguf", "mmproj-m-f16.gguf"], "m-Q4.gguf", "mmproj-m-f16.gguf"),
    (["a/mmproj-x.gguf"], "m.gguf", None), (["a/mmproj-x.gguf"], "a/m.gguf", "a/mmproj-x.gguf"),
    (["mmproj-other-f16.gguf", "mmproj-m-q8_0.gguf"], "m-Q4_K_M.gguf", "mmproj-m-q8_0.gguf"),
    (["mmproj.txt", "x.gguf"], "m.gguf", None), (["MMPROJ-M.GGUF"], "m.gguf", "MMPROJ-M.GGUF"),
])  # fmt: skip
def test_which_projector_belongs_to_a_model(names: list[str], model: str, found: str | None):
    assert choose_projector(names, model) == found


def test_large_files_are_mapped_ahead(monkeypatch: pytest.MonkeyPatch):
    small, large = np.zeros(8, np.uint8), np.zeros(16, np.uint8)
    tensors = {"a": SimpleNamespace(data=large[4:][::2]), "b": SimpleNamespace(data=small)}
    file: Any = SimpleNamespace(tensors=tensors, parts={"/large": ["a"], "/small": ["b"], "/empty": []})
    mapped = []
    monkeypatch.setattr(ahead, "LEAST", 16)
    monkeypatch.setattr(ahead.memory, "prefault", lambda *arguments: mapped.append(arguments))
    monkeypatch.setattr(ahead, "Thread", lambda target, args, daemon: SimpleNamespace(start=lambda: target(*args)))
    for can, expected in ((False, []), (True, [("/large", large.ctypes.data, 16, ahead.AT_ONCE)])):
        monkeypatch.setattr(ahead.memory, "can_prefault", lambda can=can: can)
        ahead.prefault(file)
        assert mapped == expected


# ---- headers that come in pieces


def header_of(tmp_path: Path) -> tuple[bytes, int]:
    """A small model, and how many of its bytes are its header."""
    write_gguf(tmp_path / "m.gguf", {"general.name": "n" * 40}, [OutputTensor.of("a", np.ones(64, np.float32))])
    data = (tmp_path / "m.gguf").read_bytes()
    return data, len(data) - 256


def test_how_much_of_a_file_has_all_of_its_header(tmp_path: Path):
    data, length = header_of(tmp_path)
    with open(tmp_path / "m.gguf", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        known = [hollow.header_complete(content, "m", count) for count in range(len(data) + 1)]
        reader = HeaderReader(content, "m")
        reader.read()
    first = reader.position
    assert known == [False] * first + [True] * (len(known) - first) and length - 32 < first <= length  # it is padded


def test_headers_are_fetched_in_growing_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, length = header_of(tmp_path)
    monkeypatch.setattr(hollow, "FIRST", 16)
    asked = list[tuple[int, int]]()

    def fetch(start: int, end: int) -> bytes:
        asked.append((start, end))
        return data[start:end]

    with open(tmp_path / "hollow", "w+b") as file:
        fetched = hollow.write_header(file, "m", len(data), fetch)
        assert asked[:3] == [(0, 16), (16, 32), (32, 64)] and fetched == asked[-1][1] >= length - 32
        assert [start for start, _ in asked[1:]] == [end for _, end in asked[:-1]]
        assert os.path.getsize(tmp_path / "hollow") == len(data)
    monkeypatch.setattr(hollow, "MOST", 32)
    with open(tmp_path / "hollow", "w+b") as file, pytest.raises(ModelError, match="a header of more than 32 bytes"):
        hollow.write_header(file, "m", len(data), fetch)
    problem = r"^m: header: not a GGUF file: expected the bytes GGUF at its start$"
    with open(tmp_path / "hollow", "w+b") as file, pytest.raises(ModelError, match=problem):
        hollow.write_header(file, "m", 64, lambda start, end: b"x" * (end - start))
    monkeypatch.setattr(hollow, "MOST", 1 << 28)
    for first, fetched in ((len(data) - 1, len(data) - 1), (len(data), len(data)), (1 << 22, len(data))):
        monkeypatch.setattr(hollow, "FIRST", first)
        asked.clear()
        with open(tmp_path / "hollow", "w+b") as file:
            assert hollow.write_header(file, "m", len(data), fetch) == fetched and asked == [(0, fetched)]


# ---- small things


def test_what_need_not_be_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m.gguf").write_bytes(b"")
    assert pull_command.pull_file(f"{tmp_path}/m.gguf") == f"{tmp_path}/m.gguf"
    with pytest.raises(UsageError, match="is the built-in model; there is nothing to download"):
        pull_command.pull_file("guide")
    with pytest.raises(ModelError, match="no such file"):
        pull_command.pull_file(f"{tmp_path}/none.gguf")
    monkeypatch.setattr(pull_command, "pull_shown", lambda reference: reference.repository)
    assert pull_command.pull_file("hf:a/b") == "a/b"


@pytest.mark.parametrize(("character", "wide"), [
    ("a", False), ("é", False), ("狐", True), ("→", True), ("\u2190", True), ("\u218f", False), ("\u2bff", True),
    ("\u2c00", False),
    ("\ufe0f", True), ("\ufe0e", False), ("가", True), ("…", False),
])  # fmt: skip
def test_what_is_wide_or_may_become_so(character: str, wide: bool):
    assert drawing.is_wide(character) == wide


def test_where_a_line_may_end_without_a_space():
    assert drawing.begins_word("狐", "a") and drawing.begins_word("a", "狐") and not drawing.begins_word("a", "b")
    assert not drawing.begins_word("狐", "。") and drawing.begins_word("a", "🇩🇪")


def test_sides_of_pictures_in_a_config():
    def side(value: Any) -> int:
        return one_side(Config({"image_size": value}, Path("config.json")), "image_size")

    assert side(448) == side([448, 448]) == 448
    for odd in ([448], [448, 224], [448, 448, 448], [], None, "448", ["448", "448"]):
        with pytest.raises(ModelError, match="image_size"):
            side(odd)


def test_a_number_for_each_layer():
    def read(value: Any) -> list[float]:
        return read_by_layer(Checked({"xielu.beta": value}, "xielu.", "m"), "beta", 2).tolist()

    assert read(0.5) == [0.5, 0.5] and read(np.array([1e4, -1e4])) == [1e4, -1e4]
    for odd in (1, np.array([1, 2]), np.array([1.0]), np.array([1.0, 1.1e4]), np.array([1.0, np.nan]), -1.1e4, None):
        with pytest.raises(ModelError, match="beta must be 2 numbers from -10000 to 10000"):
            read(odd)


# ---- chat


def test_the_table_of_chats_commands():
    conversation: Any = None  # words are the same in every one
    for name, command in chat_commands.COMMANDS.items():
        is_value = command.argument.replace(" ", "").isupper()  # other words are typed as they stand, and Tab has them
        if command.argument and not is_value:
            assert command.offers is not None and command.argument.split("|") == [*command.offers(conversation)], name
        assert command.help[:1].islower() or command.help.startswith("on, off"), name


def test_titles_of_sessions():
    assert render.TITLE == 40
    assert json.dumps(sorted(chat_commands.KEYS))  # every key has a line of help


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("q4km", "did you mean Q4_K_M?"), ("IQ4-XS", "did you mean IQ4_XS?"), ("Q4_K_N", "did you mean Q"),
        ("model", ""), ("q8" + "-" * 9 + "0", "did you mean Q8_0?"),
    ],
)  # fmt: skip
def test_which_type_may_be_meant(text: str, question: str):
    assert suggest_type(text).startswith(question) and bool(suggest_type(text)) == bool(question)


NO_TYPE = "is not a type; localllm quantize --help lists them"


@pytest.mark.parametrize(("words", "found"), [
    ("in Q4_0", ("in", None, "Q4_0", None)), ("in out q8_0", ("in", "out", "Q8_0", None)),
    ("in Q4_0 8", ("in", None, "Q4_0", 8)), ("in out Q4_0 8", ("in", "out", "Q4_0", 8)),
    ("in Q4_0 Q8_0", ("in", "Q4_0", "Q8_0", None)), ("in 2 7", ("in", None, "Q4_0", 7)),
    ("in Q4_0 x", f"x {NO_TYPE}"), ("in model.gguf", f"model.gguf {NO_TYPE}"), ("in Q4-K-M9", "did you mean Q4_K_M"),
    *((words, "expected IN [OUT] TYPE") for words in ("in", "in out x 8", "in out Q4_0 8 9", "in out Q4_0 x")),
])  # fmt: skip
def test_what_quantize_is_told(words: str, found: tuple[Any, ...] | str):
    if isinstance(found, str):
        with pytest.raises(UsageError, match=re.escape(found)):
            understood(tuple(words.split()))
    else:
        source, target, recipe, threads = understood(tuple(words.split()))
        assert (source, target, recipe.name, threads) == found


@pytest.mark.parametrize(("words", "before", "texts"), [
    ("in Q4_0 a b", "in Q4_0", "a b"), ("in out Q4_0 a", "in out Q4_0", "a"), ("in out Q4_0", "in out Q4_0", ""),
    ("in Q4_0 Q8_0", "in Q4_0", "Q8_0"), ("in out x y", "in out x y", ""), ("in", "in", ""),
])  # fmt: skip
def test_which_words_are_texts(words: str, before: str, texts: str):
    assert with_texts(tuple(words.split())) == (tuple(before.split()), tuple(texts.split()))


def test_formats_by_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The file of the plan is not replaced by mistake, and nothing is measured then."""
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
    with pytest.raises(UsageError, match=r"plan\.toml: this file exists; --force overwrites it, and without --size"):
        plan_by_sensitivity(source, request, len, path, 3, False, Spent(CalibrationGroup()))
    with pytest.raises(UsageError, match="no formats are so small"):
        plan_by_sensitivity(source, request, min, None, 3, False, Spent(CalibrationGroup()))
    assert not asked
    for at, force in ((path, True), (None, False), (f"{path}2", False)):
        spent = Spent(CalibrationGroup())
        new, made = plan_by_sensitivity(source, request, len, at, 3, force, spent)
        assert re.fullmatch(r"\d\.\d s \(scales \d\.\d, choosing formats \d\.\d\)", str(spent))
        assert new == "the scaled one" and made.options.formats == {"a": "Q8_0"}
        assert at is None or read_formats(at, SimpleNamespace(tensors=[SimpleNamespace(name="a")])) == {"a": "Q8_0"}
    assert asked == [("m", 3), ("the scaled one", len, 3)] * 3
    line = "predicted KL divergence 0.1235 (0.2000 with the formats of Q4_0); "
    line += "measured on held-out texts, weights only: 0.1000"
    assert capsys.readouterr().err.splitlines() == [f"localllm: {line}"] * 3
    with pytest.raises(UsageError, match="give either --size or --bpw, not both"):
        sizing("1GB", 4.0, True)
    with pytest.raises(UsageError, match="--size and --bpw choose formats by measuring the model: add --calibrate"):
        sizing("1GB", None, False)
    plan: Any = SimpleNamespace(nbytes=1000, weights=800, jobs=[SimpleNamespace(output=SimpleNamespace(nbytes=1000))])
    assert sizing("12k", None, True)(plan) == 12_000 and sizing(None, 4.0, True)(plan) == 400


def test_files_are_neither_replaced_nor_made_larger_unless_that_is_said(tmp_path: Path):
    there, new = tmp_path / "there.gguf", str(tmp_path / "new.gguf")
    there.write_text("")
    plan: Any = SimpleNamespace(paths=lambda target: [new, target])
    for nbytes, is_named, target, force in (
        (102, False, new, False), (102, True, str(there), False), (999, True, str(there), True),
    ):  # fmt: skip
        require_consent(plan, target, nbytes, 100, is_named, force)
    require_consent(plan, new, 10**12, None, False, False)  # of a folder, which has no size
    with pytest.raises(UsageError, match=r"there\.gguf: this file exists"):
        require_consent(plan, str(there), 102, 100, False, False)
    with pytest.raises(UsageError, match="larger than the old one: 103 B, from 100 B; --force writes it anyway"):
        require_consent(plan, str(there), 103, 100, True, False)


def test_how_a_plan_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from localllm.cli.commands import quantize as command
    from localllm.quantizing import quantize as service

    asked: list[Any] = []
    plan: Any = SimpleNamespace(
        paths=lambda target: [f"{target}-1", f"{target}-2"], source=SimpleNamespace(path="in"), nbytes=10,
        nbytes_before=20, bits_per_weight=4.5, bits_per_weight_before=16.0, weights=9,
    )  # fmt: skip

    def run(plan: Any, target: str, request: Any, threads: int, on_progress: Any, compiling: Any, *others: Any) -> None:
        told, on_stage = others
        asked.append((target, threads))
        on_progress(3, "name")
        on_stage("encoding", 9, 9, "name")
        told.append("odd")

    monkeypatch.setattr(service, "check_output", lambda plan, target, request: asked.append(("check", target)))
    monkeypatch.setattr(service, "run", run)
    target, request = str(tmp_path / "out"), QuantizeRequest(RECIPES["Q4_0"])
    for threads in (0, 1025):
        with pytest.raises(UsageError, match=f"threads must be from 1 to 1024, not {threads}"):
            command.require_possible(plan, target, request, threads, False)
    (tmp_path / "out-2").write_bytes(b"notes")
    with pytest.raises(UsageError, match="out-2: this file exists and is not a model"):
        command.require_possible(plan, target, request, 1, False)
    asked.clear()
    monkeypatch.setattr(command, "perf_counter", iter([1.0, 3.46, 3.46, 1.0, 1.5, 3.26, 3.46]).__next__)
    for threads, parts in ((1, ()), (1024, ("scales",))):
        command.require_possible(plan, target, request, threads, True)
        spent = command.Spent(CalibrationGroup())
        for part in parts:
            spent.add(part)
        command.execute(plan, target, request, threads, spent)
    assert asked == [("check", target), (target, 1), ("check", target), (target, 1024)]
    out, err = capsys.readouterr()
    said = f"{target}-1 and 1 more: 10 B, 4.50 bits per weight (before: 20 B, 16.00), 2.5 s"
    assert out.splitlines() == [said, f"{said} (scales 0.5, encoding 1.8)"]
    assert err.splitlines() == ["localllm: warning: odd"] * 2


# ---- vectors and where they go


def vectors_of(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32).reshape(-1, 2)


def test_vectors_as_lines(capsysbinary: pytest.CaptureFixture[bytes]):
    records = [Record(1, "a"), Record("ü", "b")]
    lines = embed.Lines(None, plain=False)
    lines.put(records, vectors_of(0.1, -2.0, 1 / 3, 1e-20))
    lines.fail(Record("ü", ""), UsageError("no text"))
    out = capsysbinary.readouterr().out.decode().splitlines()
    assert out[0] == '{"id": 1, "embedding": [0.100000001, -2]}' and out[2] == '{"id": "ü", "error": "no text"}'
    assert out[1] == '{"id": "ü", "embedding": [0.333333343, 9.99999968e-21]}'
    plain = embed.Lines(None, plain=True)
    plain.put(records, vectors_of(0.1, -2.0, 3.0, 4.0))
    assert capsysbinary.readouterr().out == b"0.100000001 -2\n3 4\n"
    with pytest.raises(UsageError, match=r"^no text; the plain format cannot record errors, use --format jsonl$"):
        plain.fail(records[0], UsageError("no text"))
    rows = embed.AllRows()
    assert rows.left(records) is records
    with pytest.raises(UsageError, match=r"^no text; an .npy file cannot record errors, use --format jsonl$"):
        rows.fail(records[0], UsageError("no text"))


def test_vectors_that_are_there_are_not_made_again(tmp_path: Path):
    """But for errors, which are tried again; of another input nothing may be there."""
    path, model = tmp_path / "v.jsonl", str(tmp_path / "m.gguf")
    records = [Record(1, "a"), Record(2, "b"), Record(3, "", "broken"), Record(4, "d")]
    with output_of("jsonl", str(path), model, records) as out:
        assert out.left(records) == records
        out.put(records[:1], vectors_of(1, 2))
        out.fail(records[1], UsageError("no"))
        out.put(records[2:3], vectors_of(3, 4))
    with output_of("jsonl", str(path), model, records) as out:
        assert out.left(records) == records[1:]
    problem = r"v\.jsonl: the record 1 is not in this input; give another output file"
    with pytest.raises(UsageError, match=problem), output_of("jsonl", str(path), model, records[1:]):
        pass


@pytest.mark.parametrize("kind", ["plain", "npy"])
def test_vectors_in_a_file(tmp_path: Path, kind: str):
    """It appears when it is complete, and is not the model's."""
    path, model = str(tmp_path / "v"), str(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"model")
    with output_of(kind, path, model, []) as out:
        out.put([Record(1, "a")], vectors_of(1, 2))
        out.put([Record(2, "b")], vectors_of(3, 4))
        assert not os.path.exists(path)
    found = np.loadtxt(path) if kind == "plain" else np.load(path)
    assert found.tolist() == [[1, 2], [3, 4]] and (kind == "plain" or found.dtype == np.float32)
    with pytest.raises(LocalllmError), output_of(kind, model, model, []) as out:
        out.put([Record(1, "a")], vectors_of(1, 2))
    assert (tmp_path / "m.gguf").read_bytes() == b"model"


def test_an_array_for_a_terminal_or_a_pipe(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]):
    with output_of("npy", None, "m", []):
        pass
    assert np.load(io.BytesIO(capsysbinary.readouterr().out)).shape == (0, 0)
    monkeypatch.setattr(embed, "is_terminal", lambda stream: True)
    problem = r"a NumPy file cannot be printed to a terminal"
    with pytest.raises(UsageError, match=problem), output_of("npy", None, "m", []):
        pass


@pytest.mark.parametrize(("format", "output", "kind"), [
    (None, "v.npy", "npy"), ("plain", "v.npy", "plain"), (None, "v", "jsonl"), (None, None, "jsonl"),
])  # fmt: skip
def test_how_vectors_are_written(format: str | None, output: str | None, kind: str):
    assert embed.kind_of(format, output) == kind


def test_what_is_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lines of a file or of stdin, files, images; and INPUT may be a text where there are images."""
    (tmp_path / "lines").write_text("a\n")
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "c.txt").write_bytes(b"\xff\xff\0")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped\n")))

    def ids(*given: Any) -> list[tuple[Any, bool]]:
        return [(record.id, bool(record.error)) for record in embed.records_of(*given)]

    lines, picture = str(tmp_path / "lines"), "x.png"
    assert ids(lines, None) == [(1, False)] and ids(lines, None, [picture]) == [(1, False), (picture, False)]
    assert ids("a cat", None, [picture]) == [("a cat", False), (picture, False)]
    assert ids(None, None, [picture]) == [(picture, False)] and ids(None, None) == [(1, False)]
    both = [str(tmp_path / "b.txt"), str(tmp_path / "c.txt")]
    assert ids(None, both, [picture]) == [(picture, False), (both[0], False), (both[1], True)]


# ---- servers and models, in words


@pytest.mark.parametrize(("text", "number"), [
    ("500M", 500_000_000), ("8g", 8 * 10**9), (" 1.5k ", 1500), ("12", 12), ("7B", 7), ("2kb", 2000), ("0.0015K", 1),
])  # fmt: skip
def test_amounts(text: str, number: int):
    assert serve.amount(text) == number
    for odd in ("", "M", "1.M", "-1", "1T", "1 M", f"{text}x"):
        with pytest.raises(ValueError, match="is not a size such as 500M or 8G"):
            serve.amount(odd)


@pytest.mark.parametrize(("more", "left"), [
    ({}, []), ({"context": 5}, ["-c"]), ({"threads": 5}, ["-t"]), ({"device": "cpu"}, ["--device"]),
    ({"gpu_layers": "0"}, ["-ngl"]), ({"cache": options.Cache(keys="f32")}, ["--kv-type"]),
    ({"context": 5, "threads": 1, "cache": options.Cache(kv_type="q8_0")}, ["-c", "-t", "--kv-type"]),
])  # fmt: skip
def test_what_a_server_decides_itself(more: dict[str, Any], left: list[str]):
    assert endpoint.about_weights(options.EngineGroup(**{"cache": options.Cache(), "rope": Rope(), **more})) == left


def test_who_is_asked_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCALLLM_API_KEY", raising=False)
    (tmp_path / "key").write_text(" k \n")
    (tmp_path / "none").write_text(" \n")
    group = endpoint.EndpointGroup
    assert group().place() is None and endpoint.key_of(None) is None
    assert group(endpoint="http://x", api_key_file=str(tmp_path / "key")).place().key == "k"
    with pytest.raises(UsageError, match="api_key_file needs --endpoint URL"):
        group(api_key_file=str(tmp_path / "key")).place()
    with pytest.raises(UsageError, match="none has no keys; write one per line"):
        group(endpoint="http://x", api_key_file=str(tmp_path / "none")).place()
    for said, known in (("k", "k"), ("", None)):
        monkeypatch.setenv("LOCALLLM_API_KEY", said)
        assert endpoint.key_of(None) == known
    with pytest.raises(UsageError, match="fast is not available with --endpoint: the server sets it"):
        endpoint.open_remote(None, None, None, ray=False, fast=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("layers", "used", "said"), [
    (0, True, ""), (1, True, "1 layer, 5 B, used"), (1, False, "1 layer, 5 B, not used"),
    (2, True, "2 layers, 5 B, one is used"), (2, False, "2 layers, 5 B, not used"),
])  # fmt: skip
def test_layers_that_guess_in_words(layers: int, used: bool, said: str):
    assert inspect.guessing({"layers": layers, "bytes": 5, "used": used}) == said


def test_what_a_model_sees_by():
    eye = {"side": 224, "patch": 14, "width": 512, "type": "clip"}
    told = "clip: pictures of 224 x 224 in patches of 14, vectors of 512 numbers"
    assert inspect.sees(eye, None) == told
    told = "mlp: pictures of 224 x 224 in patches of 14, for models 512 wide"
    assert inspect.sees(eye | {"type": "mlp"}, None) == told
    assert inspect.sees(None, {"path": "p", "bytes": 7}) == "images, by p (7 B)"
    assert inspect.sees(None, None) == ""
    assert inspect.advice(("top_k", "min_p")) == "top_k;min_p" and inspect.advice(0.5) == "0.5"


FACTS = {
    "vocabulary": {"size": 9, "kind": "gpt2"}, "supported": True, "chat_template": None, "layers": 2, "width": None,
    "heads": 4, "kv_heads": None, "path": "/m.gguf", "name": "", "architecture": "llama", "reason": "odd",
    "parameters": 1500, "tensors": [1, 2], "weight_bytes": 3000, "bits_per_weight": 4.504, "made_with": "a\n b",
    "context": 0, "reads": "", "guessing": {"layers": 0, "bytes": 0, "used": False}, "sees": None, "projector": None,
    "sampling": {"top_k": 5, "samplers": ("a", "b")},
}  # fmt: skip


def test_facts_of_a_file():
    """What it does not tell is left out."""
    lines = {line[:14].strip(): line[14:] for line in inspect.summary(FACTS)}
    assert lines == {
        "file": "/m.gguf", "architecture": "llama", "parameters": "1.5 k in 2 tensors",
        "weights": "3.0 kB, 4.50 bits per weight", "made with": "a b", "shape": "2 layers, 4 heads",
        "vocabulary": "9 tokens, gpt2", "chat template": "no", "sampling": "top_k 5, samplers a;b",
    }  # fmt: skip
    other = FACTS | {"supported": False, "context": 7, "chat_template": "x", "name": "n", "reads": "text"}
    lines = {line[:14].strip(): line[14:] for line in inspect.summary(other)}
    assert lines["architecture"] == "llama (not usable: odd)" and lines["context"] == "7 tokens"
    assert (lines["name"], lines["chat template"], lines["makes"]) == ("n", "yes", "text")
    eye = {"side": 2, "patch": 1, "width": 5, "type": "clip"}
    assert "chat template" not in {line[:14].strip() for line in inspect.summary(FACTS | {"sees": eye})}


# ---- many prompts


def test_how_far_many_prompts_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    shown: list[str] = []
    now = [100.0]
    line = SimpleNamespace(show=shown.append, clear=lambda: shown.append(""))
    monkeypatch.setattr(map_command, "ProgressLine", lambda: line)
    monkeypatch.setattr(map_command, "perf_counter", lambda: now[0])
    monkeypatch.setattr(map_command, "dim", lambda text: shown.append(f"dim {text}"))
    progress = map_command.Progress([Record(number, "") for number in range(5)], 3)
    now[0] = 110.0
    with progress:  # from which on time counts
        now[0] = 112.0
        progress.show(SimpleNamespace(written=30, done=0))  # type: ignore[arg-type]
        progress.count({"id": 1})
        progress.count({"id": 2, "error": "no"})
        progress.show(SimpleNamespace(written=50, done=2))  # type: ignore[arg-type]
    expected = ["3 of 8 answered, 15.0 tokens/s", "", "", "5 of 8 answered, 25.0 tokens/s, 3 s left", ""]
    assert shown == expected
    with pytest.raises(KeyboardInterrupt):
        progress.end(False)
    assert shown[5:] == ["dim 2 records in 2 s, 25.0 tokens/s, 1 failed"]
    for _ in range(3):
        progress.count({"id": 3})
    with pytest.raises(RecordsError, match=r"^1 of 5 records failed; see the error field of their output lines$"):
        progress.end(True)
    said = "5 records in 2 s, 50 tokens written, 25.0 tokens/s, 1 failed"
    assert capsys.readouterr().err == f"{said}\n"
    progress._failed = 0
    progress.end(False)


# ---- what is kept


def test_what_is_kept_of_prompts_and_texts(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]):
    """What two prompts begin with counts once, with the latest; the sum is of all."""
    from localllm.cli.commands import cache
    from localllm.files.cache import ngram_cache_file as written_file
    from localllm.files.cache import prefix_files

    told: list[str] = []
    monkeypatch.setattr(cache, "dim", told.append)
    monkeypatch.setattr(cache, "moment", lambda seconds: f"at {seconds}")
    monkeypatch.setattr(prefix_files, "clear", lambda: 1500)
    monkeypatch.setattr(written_file, "clear", lambda: 500)
    entries, texts = list[Any](), list[Any]()
    monkeypatch.setattr(prefix_files, "list_entries", lambda: entries)
    monkeypatch.setattr(written_file, "list_files", lambda: texts)
    cache.cache()
    cache.cache("clear")
    assert told == ["the cache is empty", "2.0 kB removed"] and capsysbinary.readouterr().out == b""
    texts.append((77, 8, 4))
    cache.cache()
    assert [line.split() for line in capsysbinary.readouterr().out.decode().splitlines()][1:] == [
        ["texts", "77", "8", "B", "at", "4"], ["all", "8", "B"],
    ]  # fmt: skip
    for key, before, size, used, end in (("a", "", 100, 1, 64), ("b", "a", 20, 2, 96), ("c", "a", 3, 9, 80)):
        about = SimpleNamespace(before=before, model=f"m\n{key}", end=end)
        entries.append(SimpleNamespace(key=key, about=about, size=size, used=used))
    cache.cache()
    assert [line.split() for line in capsysbinary.readouterr().out.decode().splitlines()][1:] == [
        ["m", "c", "80", "103", "B", "at", "9"], ["m", "b", "96", "20", "B", "at", "2"],
        ["texts", "77", "8", "B", "at", "4"], ["all", "131", "B"],
    ]  # fmt: skip
