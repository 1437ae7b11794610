"""Test how commands format numbers, tables, answers and lists."""

import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli import open_model as pulling
from localllm.cli.commands import fit, inspect
from localllm.cli.commands import list as list_command
from localllm.cli.interactive import settings as chat_options
from localllm.cli.options import shared as shape
from localllm.cli.prompt_input import read_bounded
from localllm.cli.terminal import line_editor, render
from localllm.cli.terminal import output as terminal
from localllm.cli.terminal import result_report as report
from localllm.cli.terminal import stream_renderer as drawing
from localllm.cli.terminal.line_editor import FileHistory
from localllm.cli.terminal.output import to_json_line
from localllm.errors import ContextError, UsageError
from localllm.generation.options import GenerationOptions
from localllm.generation.reasoning import ANSWER, REASONING
from localllm.services import sessions
from localllm.services.hub import name_values


@pytest.fixture
def on_terminal(monkeypatch):
    """Return a function that makes streams, by name, terminals."""

    def choose(*names: str) -> None:
        monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream in [getattr(sys, name) for name in names])
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")

    return choose


# ---- numbers and tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "as_count", "as_size"),
    [
        (0, "0", "0 B"), (999, "999", "999 B"), (1000, "1.0 k", "1.0 kB"), (1550, "1.6 k", "1.6 kB"),
        (10**6, "1.0 M", "1.0 MB"), (10**6 - 1, "1000.0 k", "1000.0 kB"), (10**9, "1.0 B", "1.0 GB"),
        (12345678, "12.3 M", "12.3 MB"), (7 * 10**12, "7000.0 B", "7000.0 GB"),
    ],
)  # fmt: skip
def test_counts_and_sizes_are_formatted(number: int, as_count: str, as_size: str):
    assert (render.format_count(number), render.format_size(number)) == (as_count, as_size)


def test_columns_are_as_wide_as_their_widest_cell():
    assert render.format_table(("name", "n"), [("a", "100"), ("longer", "1")]) == [
        "name      n",
        "a       100",
        "longer    1",
    ]
    assert render.format_columns(("n", "x"), [("1", "b"), ("22", "")], "><") == [" n  x", " 1  b", "22"]
    assert render.format_table(("only", "header"), []) == ["only  header"]


@pytest.mark.parametrize(("wide", "shown"), [(40, ["name   n  m", "a     10  5"]), (9, ["name   n", "a     10"])])
def test_a_table_on_a_terminal_has_the_columns_that_fit(monkeypatch, wide: int, shown: list[str]):
    monkeypatch.setattr(render, "get_terminal_width", lambda: wide)
    assert render.format_table(("name", "n", "m"), [("a", "10", "5")]) == shown


@pytest.mark.parametrize(
    ("wide", "widths"),
    [
        (3, [5]), (5, [5]), (16, [5]), (17, [5, 10]), (18, [5, 11]), (21, [5, 14]), (22, [5, 10, 3]), (31, [5, 19, 3]),
        (32, [5, 20, 3]), (40, [5, 20, 3]),
    ],
)  # fmt: skip
def test_columns_are_dropped_or_cut_to_fit(wide: int, widths: list[int]):
    """Keep ten letters of a column that may be cut, and always the first column."""
    assert render.fit_columns([5, 20, 3], [False, True, False], wide) == widths


def test_long_cells_are_cut_with_an_ellipsis():
    header, rows = ("name", "what", "n"), [("a", "0123456789abcdef", "5"), ("longer", "x", "10")]
    assert render.format_columns(header, rows, "<<>", 27) == [
        "name    what              n", "a       0123456789abcd…   5", "longer  x                10",
    ]  # fmt: skip
    assert render.format_columns(header, rows, "<<>", 9) == ["name", "a", "longer"]
    assert (render.shorten("abc", 3), render.shorten("abcd", 3)) == ("abc", "ab…")


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (0, ["what  aa bb-bb cc"]), (17, ["what  aa bb-bb cc"]), (16, ["what  aa bb-bb", "      cc"]),
        (10, ["what  aa", "      bb-bb", "      cc"]),
    ],
)  # fmt: skip
def test_facts_break_between_words(monkeypatch, width: int, lines: list[str]):
    monkeypatch.setattr(render, "get_terminal_width", lambda: width)
    assert render.format_facts([("what", "aa bb-bb\ncc")], 6) == lines
    assert width or render.format_facts([("a", "b")]) == [f"a{' ' * 13}b"]


def test_file_stems_drop_the_folder_and_one_line_drops_control_characters():
    assert [render.get_file_stem(path) for path in ("/a/b.gguf", "c:\\a\\b.gguf", "b", "a.gguf.txt")] == [
        "b", "b", "b", "a.gguf.txt",
    ]  # fmt: skip
    assert render.to_one_line(" a\n\tb\x1b[2J ") == "a b\N{REPLACEMENT CHARACTER}[2J"


@pytest.mark.parametrize("space", ["\u3000", "\xa0", "\u2003", "\u202f", "  "])
def test_unusual_spaces_of_a_path_are_kept(space: str, capsys):
    path = f"/a{space}b/c.gguf"
    assert render.to_one_line(path) == path
    assert render.format_columns(("path",), [(f"{path}{space}",)], "<")[1] == f"{path}{space}".rstrip(" ")
    terminal.say(f"localllm: error: {path}: no such file\n\t  or folder")
    assert capsys.readouterr().err == f"localllm: error: {path}: no such file or folder\n"


@pytest.mark.parametrize(
    ("path", "line"),
    [("a\u3000b", "SUM  a\u3000b"), ("a\\b", "\\SUM  a\\\\b"), ("a\nb\rc", "\\SUM  a\\nb\\rc"), ("é\t", "SUM  é\t")],
)
def test_checksums_are_printed_as_sha256sum_prints_them(path: str, line: str):
    assert render.format_checksum("SUM", path) == line


# ---- an answer ------------------------------------------------------------------------------------------------------


def answer(parts: list[tuple], **more) -> SimpleNamespace:
    text = "".join(piece for kind, piece in parts if kind == ANSWER and isinstance(piece, str))
    return SimpleNamespace(parts=iter(parts), text=text, **{"dropped": 0, "kept": 0, "is_full": False, **more})


PARTS = [(REASONING, "Hm"), (REASONING, "."), (ANSWER, "Yes"), (ANSWER, "!")]


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [
        ({}, "Yes!\n", "thinking:\nHm.\n\n"),
        ({"thoughts": False}, "Yes!\n", ""),
        ({"silent": True}, "", "thinking:\nHm.\n\n"),
    ],
)
def test_reasoning_goes_to_the_terminal_and_the_answer_to_stdout(capsysbinary, on_terminal, options, out, err):
    on_terminal("stderr")
    assert render.print_stream(answer(PARTS), terminal.ProgressLine(), **options) is False
    assert capsysbinary.readouterr() == (out.encode(), err.encode())


def test_an_answer_after_reasoning_has_a_heading_without_colours(capsys, on_terminal, monkeypatch):
    on_terminal("stderr")
    monkeypatch.setattr(render, "is_terminal", lambda stream: stream is sys.stdout)
    render.print_stream(answer(PARTS), terminal.ProgressLine())
    assert capsys.readouterr().err == "thinking:\nHm.\n\nanswer:\n"


def test_reasoning_without_an_answer_ends_its_line(capsys, on_terminal):
    on_terminal("stderr")
    render.print_stream(answer(PARTS[:2], calls=[]), terminal.ProgressLine())
    assert capsys.readouterr() == ("\n", "thinking:\nHm.\n")


def test_reasoning_is_not_written_to_files(capsysbinary, on_terminal):
    on_terminal()
    render.print_stream(answer(PARTS), terminal.ProgressLine())
    assert capsysbinary.readouterr() == (b"Yes!\n", b"")


@pytest.mark.parametrize(("text", "out"), [("", b""), ("Yes", b"Yes\n")])
def test_ctrl_c_ends_the_line_if_something_was_printed(capsysbinary, text: str, out: bytes):
    def parts():
        if text:
            yield ANSWER, text
        raise KeyboardInterrupt

    interrupted = SimpleNamespace(parts=parts(), text=text, dropped=0, is_full=False)
    assert render.print_stream(interrupted, terminal.ProgressLine()) is True
    assert capsysbinary.readouterr() == (out, b"")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, ""),
        ({"is_full": True}, "the answer ended"),
        ({"dropped": 64, "kept": 4}, "64 tokens after the first 4 were dropped"),
        ({"dropped": 64, "kept": 4, "is_full": True}, "64 tokens after the first 4 were dropped"),
    ],
)
def test_a_full_context_is_reported(capsys, facts, message):
    render.note_overflow(answer([], **facts))
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == bool(message)


MODEL = SimpleNamespace(
    path="/m.gguf",
    arch="llama",
    format="Q4_0",
    file="its file",
    device="CPU",
    engine=SimpleNamespace(get_disk_statistics=dict),
)
ONE = {
    "prompt_tokens": 50, "cached_tokens": 10, "tokens": [2] * 21, "completion_tokens": 21,
    "prefill_s": 2.0, "ttft_s": 2.5, "decode_s": 4.0,
    "text": "Yes", "thinking": "", "finish_reason": "stop", "dropped": 0, "skipped": 0, "seed": 7, "drafted": 0,
    "accepted": 0,
}  # fmt: skip


def report_lines(capsys, result: dict) -> list[str]:
    report.print_stats(result)
    return capsys.readouterr().err.splitlines()


def test_speeds_count_computed_tokens_only(capsys):
    """Exclude cached prompt tokens and the first token's step."""
    result = report.build_report(MODEL, [SimpleNamespace(**ONE)], False, 0.5, 9.0)
    times = result["timings"]
    assert (times["prefill_tps"], times["decode_tps"], times["total_s"], times["load_s"]) == (20.0, 5.0, 9.0, 0.5)
    assert (result["prompt_tokens"], result["cached_tokens"], result["completion_tokens"]) == (50, 10, 21)
    prompt, answer_line = report_lines(capsys, result)
    assert prompt == ("prompt: 50 tokens, 10 cached, in 2.00 s (20.0 per second), model loaded in 0.50 s")
    assert answer_line == "answer: 21 tokens in 4.00 s (5.0 per second), first after 2.50 s, finish: stop, seed: 7"


def test_zero_seconds_give_a_speed_of_zero(capsys):
    facts = ONE | {
        "prefill_s": 0.0,
        "decode_s": 0.0,
        "cached_tokens": 0,
        "tokens": [1],
        "completion_tokens": 1,
        "drafted": 9,
        "accepted": 4,
    }
    model = SimpleNamespace(**vars(MODEL) | {"device": "H200, 3 of 4 layers"})
    result = report.build_report(model, [SimpleNamespace(**facts)], False, 0.5, 9.0)
    assert (result["timings"]["prefill_tps"], result["timings"]["decode_tps"]) == (0, 0)
    assert result["speculation"] == {"drafted": 9, "accepted": 4, "steps_saved": 4}
    prompt, answer_line, guessed = report_lines(capsys, result)
    assert prompt == "prompt: 50 tokens in 0.00 s, model loaded in 0.50 s on H200, 3 of 4 layers"
    assert "1 tokens in 0.00 s (0.0 per second)" in answer_line
    assert guessed == "drafted: 9 tokens, 4 accepted, each of which saves a step"


def test_several_answers_report_seeds_only_if_they_were_sampled(capsys):
    two = [
        SimpleNamespace(text=text, thinking="", logprob=-1.0, tokens=[1] * count, finish_reason="stop", seed=seed)
        for text, count, seed in (("a", 3, 5), ("b", 4, None))
    ]
    result = report.build_report(MODEL, two, True, 0.5, 2.5)
    assert [row.get("seed", "none") for row in result["answers"]] == [5, "none"]
    assert report_lines(capsys, result) == ["answers: 2 with 7 tokens in 2.00 s, model loaded in 0.50 s"]
    assert json.loads(to_json_line(result)) == result


# ---- the progress line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "width", "beginning"),
    [("abc", 3, "abc"), ("abcd", 3, "abc"), ("日本", 3, "日"), ("日本", 4, "日本"), ("aé日", 3, "aé"), ("", 0, "")],
)
def test_a_progress_text_is_cut_to_the_width(text: str, width: int, beginning: str):
    assert terminal.truncate_columns(text, width) == beginning


def test_a_progress_line_is_overwritten_and_erased(capsys, on_terminal, monkeypatch):
    on_terminal("stderr")
    monkeypatch.setattr(terminal, "get_width", lambda stream: 5)
    line = terminal.ProgressLine()
    line.clear()
    for text in ("abc", "abc", "abcdefg"):
        line.show(text)
    line.clear()
    line.clear()
    assert capsys.readouterr().err == "\r\x1b[Kabc\r\x1b[Kabcd\r\x1b[K"


@pytest.mark.parametrize("reason", ["file", "dumb"])
def test_a_progress_line_is_silent_in_files_and_on_dumb_terminals(capsys, on_terminal, monkeypatch, reason):
    on_terminal(*["stderr"] * (reason == "dumb"))
    monkeypatch.setenv("TERM", "dumb")
    line = terminal.ProgressLine()
    line.show("abc")
    line.clear()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("LOCALLLM_PLAIN", "1")])
def test_progress_of_plain_output_is_printed_in_lines(capsys, on_terminal, monkeypatch, name: str, value: str):
    on_terminal("stderr")
    monkeypatch.setenv(name, value)
    now = [100.0]
    monkeypatch.setattr(terminal, "monotonic", lambda: now[0])
    line, lines = terminal.ProgressLine(), list[str]()
    for now[0] in (100.0, 101.9, 102.0, 103.0, 111.9, 112.0):
        line.show(f"at {now[0]:g}")
        lines += capsys.readouterr().err.splitlines()
    assert lines == ["localllm: at 102", "localllm: at 112"]
    line.clear()
    line.show("anew")
    assert capsys.readouterr().err == ""


# ---- lists ----------------------------------------------------------------------------------------------------------


def test_list_shows_local_and_known_models():
    whole = SimpleNamespace(
        name="a", size=2000, is_whole=True, path=Path("/m/a.gguf"), read_header=lambda: ("", "Q4_0")
    )
    part = SimpleNamespace(name="b", size=30, is_whole=False, path=Path("/m/b.gguf"))
    lora = SimpleNamespace(name="l", size=30, is_whole=True, path=Path("/m/l"), read_header=lambda: ("adapter", "F16"))
    vector = SimpleNamespace(
        name="v", size=30, is_whole=True, path=Path("/m/v"), read_header=lambda: ("control vector", "")
    )
    assert list_command.format_models_on_disk([], {}) == list_command.format_known_models([]) == ""
    table = list_command.format_models_on_disk([whole, part, lora, vector], {"n": "a"})
    assert [line.split() for line in table.splitlines()] == [
        ["name", "size", "format", "path"],
        ["a", "2.0", "kB", "Q4_0", "/m/a.gguf"],
        ["b", "30", "B", "incomplete", "/m/b.gguf"],
        ["l", "30", "B", "F16", "adapter", "/m/l"],
        ["v", "30", "B", "control", "vector", "/m/v"],
        ["n", "name", "of", "a"],
    ]
    known = SimpleNamespace(name="c", parameters="1 B", megabytes=700, context=4096, license="MIT", description="x y")
    assert list_command.format_known_models([known]).splitlines()[1].split() == [
        "c",
        "700.0",
        "MB",
        "1",
        "B",
        "4096",
        "x",
        "y",
        "MIT",
    ]


@pytest.mark.parametrize(("length", "title"), [(39, "q" * 39), (40, "q" * 40), (41, "q" * 39 + "…"), (0, "")])
def test_sessions_show_their_shortened_first_question(monkeypatch, length: int, title: str):
    chat = sessions.SavedChat()
    chat.messages = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "q" * length},
        {"role": "user", "content": "no"},
    ]  # fmt: skip
    monkeypatch.setattr(sessions, "list_sessions", lambda: [sessions.ListedSession("trip", 1e9, chat)])
    header, row = render.format_sessions()
    assert header.split() == ["session", "last", "used", "messages", "first", "question", "model"]
    assert row.split()[0] == "trip" and row.split()[3] == "3"
    assert row.split()[4:] == ([title] if title else [])
    monkeypatch.setattr(sessions, "list_sessions", lambda: [sessions.ListedSession("trip", 1e9, chat, "torn")])
    assert render.format_sessions()[1].endswith("damaged")
    monkeypatch.setattr(sessions, "list_sessions", list)
    assert render.format_sessions() == []


def test_stats_tell_what_was_read_from_the_disk(capsys):
    times = {"total_s": 3.0, "load_s": 1.0}
    disk = {"read_bytes": 2.5e9, "waited_s": 1.25}
    report.print_stats({"answers": [], "timings": times, "disk": disk})
    report.print_stats({"answers": [], "timings": times, "disk": disk | {"expert_hits": 3, "expert_misses": 1}})
    first, _, second, _ = capsys.readouterr().err.splitlines()
    assert first == "disk: 2.50 GB read, waited 1.25 s for it"
    assert second == f"{first}, 75% of the experts in memory"


FACTS = {"context": 100, "longest": {"f16": 100, "q8_0": 100}}


@pytest.mark.parametrize(
    ("longest", "conclusion"),
    [
        ({"f16": 100, "q8_0": 100}, "It fits, with its whole context of 100 tokens."),
        ({"f16": 60, "q8_0": 100}, "It fits with 60 tokens (f16), 100 tokens (q8_0)."),
        ({"f16": 0, "q8_0": 7}, "It fits with 7 tokens (q8_0)."),
        ({"f16": 0, "q8_0": 0}, "This model does not fit."),
    ],
)
def test_fit_concludes_whether_a_model_fits(longest, conclusion):
    report: Any = {"context": 100, "longest": longest, "rows": [{"tokens_per_s": 9.0, "fits": True}], "disk": None}
    assert fit.format_conclusion(report) == conclusion


@pytest.mark.parametrize(("per_token", "experts"), [(5 * 10**9, ""), (10**9, " of experts (equally popular ones)")])
def test_fit_tells_how_a_model_larger_than_memory_runs(per_token, experts):
    disk = {"held_bytes": 3 * 10**9, "read_bytes": 2 * 10**9, "disk_gbs": 0.5, "tokens_per_s": 0.25}
    report: Any = {
        "context": 100, "longest": {"f16": 0}, "rows": [{"tokens_per_s": 9.0, "fits": False}], "disk": disk,
        "weight_bytes_per_token": per_token,
    }  # fmt: skip
    assert fit.format_conclusion(report) == (
        f"This model is larger than memory. It runs: 3.0 GB stay in memory, each token reads 2.0 GB{experts} from the "
        "disk, which gives 0.5 GB/s: about 0.2 tokens/s."
    )


def test_fit_lists_the_memory_needed_by_context_and_kv_type():
    rows = [
        {"context": context, "kv_type": kind, "needed_bytes": 1000 * context, "tokens_per_s": 3.25, "fits": context < 9}
        for context in (16, 8)
        for kind in ("f16", "q8_0")
    ]
    report: Any = {"longest": {"f16": 0, "q8_0": 0}, "rows": rows}
    header, first, second = fit.needs(report)
    assert first.split() == ["8", "8.0", "kB", "3.2", "8.0", "kB", "3.2"]
    assert second.split() == ["16", "16.0", "kB", "too", "much", "16.0", "kB", "too", "much"]
    assert header.startswith("context")
    assert inspect.format_memory([]) == []


# ---- what is typed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("a=1", {"a": 1}), ("a=x=y", {"a": "x=y"}), ("a=", {"a": ""}), ('{"a": 1, "b": [2]}', {"a": 1, "b": [2]}),
        (" {}", {}), ("a=true", {"a": True}),
    ],
)  # fmt: skip
def test_template_variables_are_parsed(text: str, variables: dict):
    assert name_values.parse_variables(text) == variables


@pytest.mark.parametrize("text", ["a", "=1", "1a=2", "a b=1", "{", "{'a': 1}"])
def test_invalid_template_variables_are_refused(text: str):
    with pytest.raises(UsageError, match="template_var must be"):
        name_values.parse_variables(text)


def test_an_option_takes_a_text_or_a_file(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf{}")
    assert shape.read_value("grammar", None, "{") is None
    assert shape.read_value("grammar", "{1}", "{") == "{1}"
    assert shape.read_value("grammar", str(tmp_path / "a"), "{") == "{}"
    (tmp_path / "a").write_bytes(b"\xff")
    for name, reason in (("a", "not UTF-8"), ("b", "No such file")):
        with pytest.raises(UsageError, match=f"cannot read .*{name}: .*{reason}"):
            shape.read_value("grammar", str(tmp_path / name), "{")


def test_set_changes_options_of_a_conversation():
    usual = GenerationOptions()
    for name, text, value in (
        ("--max-tokens", "7", 7), ("n", "-1", None), ("stop", "a;b", ("a", "b")), ("keep", "default", None),
    ):  # fmt: skip
        changed = chat_options.change_option(usual, name, text)
        assert getattr(changed, chat_options.OTHER_NAMES.get(name, name.lstrip("-").replace("-", "_"))) == value
    assert chat_options.change_option(usual, "temp", "0.5").sampling.temperature == 0.5
    assert chat_options.change_option(usual, "ignore_eos", "on").sampling.ignore_eos is True
    assert chat_options.change_option(chat_options.change_option(usual, "temp", "0.5"), "temp", "default") == usual
    for name, text, problem in (
        ("nothing", "1", "unknown option"), ("ignore_eos", "1", "on or off"), ("top_k", "1.5", "an integer"),
        ("temp", "x", "a number"), ("logit_bias", "1", "cannot be set in a chat"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=problem):
            chat_options.change_option(usual, name, text)
    settings = chat_options.list_settings(chat_options.change_option(usual, "top_k", "3"))
    shown = {name: is_usual for name, _, is_usual in settings}
    assert not shown["top_k"] and shown["temperature"]


def test_session_settings_apply_only_to_options_not_typed():
    typed = chat_options.change_option(GenerationOptions(), "temp", "0.5")
    merged = chat_options.apply_settings(typed, {"temperature": 0.9, "stop": ["a"], "top_k": "x", "gone": 1, "keep": 3})
    assert (merged.sampling.temperature, merged.stop, merged.sampling.top_k, merged.keep) == (
        0.5, ("a",), typed.sampling.top_k, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "most", "encoding", "fits"),
    [
        ((1 << 20) - 1, 1, None, True),  # so much is read before anybody asks
        (1 << 20, 1 << 20, None, True),
        ((1 << 20) + 1, 1 << 20, None, False),
        ((1 << 20) + 1, 1 << 20, "utf-16", True),  # whose bytes may be a quarter of so many
        ((1 << 22) + 1, 1 << 20, "utf-16", False),
        (5 << 20, 5 << 20, None, True),
    ],
)
def test_files_too_large_to_fit_are_not_read(size: int, most: int, encoding: str | None, fits: bool):
    source = io.BytesIO(b"a" * size + b"b" * (8 << 20) * (not fits))
    if fits:
        assert read_bounded(source, lambda: most, encoding) == b"a" * size
    else:
        with pytest.raises(ContextError, match="too long"):
            read_bounded(source, lambda: most, encoding)
        assert source.tell() <= size + (1 << 20)


def test_the_history_is_private_and_bounded(tmp_path: Path, monkeypatch):

    monkeypatch.setattr(line_editor, "MAX_BYTES", 100)
    monkeypatch.setattr(line_editor, "MAX_ENTRY", 30)
    kept = FileHistory(tmp_path / "state" / "history")
    for text in ("x" * 27, "x" * 28, "é\n"):
        kept.store_string(text)
    assert [*kept.load_history_strings()] == ["é\n", "x" * 27], "a line of 30 bytes is kept, a longer one not"
    for number in range(20):
        kept.store_string(f"text {number:2}")
    texts = [*kept.load_history_strings()]
    assert texts == [f"text {number:2}" for number in range(19, 19 - len(texts), -1)]
    assert 4 <= len(texts) <= 9 and os.stat(kept.path).st_size <= 100
    assert (os.stat(kept.path).st_mode & 0o777, os.stat(kept.path.parent).st_mode & 0o777) == (0o600, 0o700)
    with open(kept.path, "ab") as file:
        file.write(b'\xff torn\n{"no": "text"}\n3\n"last"\n"torn')
    assert [*kept.load_history_strings()][:2] == ["last", texts[0]], "what is no text is left out"


@pytest.mark.parametrize(
    ("typed", "yes"), [("y\n", True), ("YES \n", True), ("yess\n", False), ("n\n", False), ("", False), ("\n", False)]
)
def test_only_y_and_yes_confirm(monkeypatch, capsys, typed: str, yes: bool):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert pulling.confirm("Sure?\x1b") is yes
    assert capsys.readouterr().err == "Sure?\N{REPLACEMENT CHARACTER} [y/N] "


# ---- pages ----------------------------------------------------------------------------------------------------------


def pushed(page: drawing.AnswerPage, *pieces: tuple[str, bool]) -> None:
    for text, is_thought in pieces:
        page.push(text, is_thought)
    page.end()


THOUGHT_FIRST = [("\n\nHm, ", True), ("well.\n", True), ("\nYes, ", False), ("it is.", False)]


def test_a_file_gets_the_answer_alone(capsysbinary, on_terminal):
    on_terminal()
    page = drawing.make_page(markdown=True)
    assert isinstance(page, drawing.PlainPage)
    pushed(page, *THOUGHT_FIRST)
    assert capsysbinary.readouterr().out == b"\nYes, it is.\n"


def test_reasoning_is_followed_by_an_empty_line(capsysbinary, monkeypatch):
    """Drop leading line breaks of both."""
    monkeypatch.setenv("NO_COLOR", "1")
    page = drawing.WrappedPage(lambda: 40)
    pushed(page, *THOUGHT_FIRST)
    assert capsysbinary.readouterr().out == b"thinking:\nHm, well.\n\nanswer:\nYes, it is.\n"
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm")
    pushed(drawing.WrappedPage(lambda: 40), ("Hm", True), ("Yes", False))
    assert capsysbinary.readouterr().out == b"\x1b[2mHm\x1b[0m\n\nYes\n", "thoughts are dim"


@pytest.fixture
def screen(monkeypatch):
    """Return a function that sets the screen's columns and lines."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(drawing.terminal, "get_size", lambda stream: (20, 6))
    monkeypatch.setattr(drawing, "get_width", lambda: 20)


def screen_lines(out: bytes) -> list[str]:
    """Replay the output on an endless screen and return its lines."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[\d+A\x1b\[J|\n|\r)", out.decode()):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.startswith("\x1b") and part.endswith("J"):
            row -= int(part[2:].partition("A")[0])
            del lines[row:]
            lines.append("")
        elif part != "\r":
            lines[row] += re.sub(r"\x1b\[[\d;]*m", "", part)
    return lines


@pytest.mark.parametrize("frame", [-1.0, 1e9])
def test_markdown_is_the_same_whenever_it_is_redrawn(capsysbinary, monkeypatch, screen, frame: float):
    """Redraw at every chunk, or only at whole blocks, which an empty line separates."""
    monkeypatch.setattr(drawing, "FRAME_SECONDS", frame)
    text = "Some *words* that wrap around\n\n- one\n- two\n\n```\na\n\nb\n```\n\nThe end"
    page = drawing.MarkdownPage()
    pushed(page, *((piece, False) for piece in re.split(r"(?<= )", text)))
    lines = screen_lines(capsysbinary.readouterr().out)
    assert [line.strip() for line in lines] == [
        "Some words that wrap", "around", "", "• one", "• two", "", "a", "", "b", "", "The end", "",
    ]  # fmt: skip


def test_reasoning_is_drawn_before_markdown(capsysbinary, screen):
    page = drawing.MarkdownPage()
    pushed(page, ("Hm", True), ("*Yes*", False))
    lines = [line.strip() for line in screen_lines(capsysbinary.readouterr().out)]
    assert lines == ["thinking:", "Hm", "", "answer:", "Yes", ""]
    page = drawing.MarkdownPage()
    pushed(page, ("Hm", True))
    assert [line.strip() for line in screen_lines(capsysbinary.readouterr().out)] == ["thinking:", "Hm", ""]


def test_lines_that_left_the_screen_are_not_redrawn(capsysbinary, monkeypatch, screen):
    monkeypatch.setattr(drawing, "FRAME_SECONDS", -1.0)
    page = drawing.MarkdownPage()
    for number in range(12):
        page.push(f"- line {number}\n")
    page.end()
    out = capsysbinary.readouterr().out
    assert [line.strip() for line in screen_lines(out)] == [*(f"• line {number}" for number in range(12)), ""]
    assert out.count(b"line 0") < 6 and max(int(number) for number in re.findall(rb"\x1b\[(\d+)A", out)) <= 4
