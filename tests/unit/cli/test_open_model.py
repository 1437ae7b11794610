"""Test how models are opened, pulled, fitted and served: messages and refusals."""

import io
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.cli import open_model as opening
from localllm.cli import open_model as pulling
from localllm.cli.commands import fit, serve
from localllm.cli.options import shared as options
from localllm.cli.options.shared import parse_layers
from localllm.cli.terminal import output as terminal
from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.gguf import header_only as hollow
from localllm.files.gguf.header import HeaderReader
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.services.hub import pull
from localllm.services.hub.catalogue import HubReference
from localllm.services.hub.pull import PullResult


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stdin and stderr terminals of 200 columns."""
    both = lambda stream: stream in (sys.stdin, sys.stderr)  # noqa: E731
    for module in (terminal, pulling):
        monkeypatch.setattr(module, "is_terminal", both)
    monkeypatch.setattr(terminal, "get_size", lambda stream: (200, 24))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


def test_compiling_is_reported_once_without_a_terminal(capsys: pytest.CaptureFixture[str]):
    show = opening.make_compile_progress(terminal.ProgressLine())
    show(1, 1)
    assert capsys.readouterr().err == ""  # nothing was to be done
    for done in range(3):
        show(done, 2)
    assert capsys.readouterr().err == "localllm: compiling 2 kernels for this computer, once; this may take a minute\n"
    opening.make_compile_progress(terminal.ProgressLine())(0, 1)
    assert "compiling a kernel for this computer" in capsys.readouterr().err


def test_opening_and_compiling_show_progress_on_one_line(on_terminal: None, capsys: pytest.CaptureFixture[str]):
    line = terminal.ProgressLine()
    compiling = opening.make_compile_progress(line)
    compiling(1, 3)
    assert capsys.readouterr().err == "\r\x1b[Kcompiling kernels for this computer, once: 1 of 3"
    compiling(3, 3)
    assert capsys.readouterr().err == "\r\x1b[K"
    reading = opening.make_prefill_progress(line)
    reading(0, 5)
    assert capsys.readouterr().err == ""  # a short prompt needs none
    reading(1024, 3700)
    opening.make_upload_progress(line)(1_500_000_000, 2_000_000_000)
    shown = capsys.readouterr().err
    assert "read 1,024 of 3,700 tokens" in shown and "copying weights to the GPU: 1.5 of 2.0 GB" in shown


def test_gpu_layers_are_a_count_or_all():
    assert (options.convert_layer_count("7"), options.convert_layer_count("all")) == (7, "all")
    assert [parse_layers(text) for text in ("all", "auto", "-1", "0", "9999999")] == [
        "all",
        "auto",
        "all",
        "0",
        "9999999",
    ]
    for text in ("10000000", "-2", "1.5", "", "ALL"):
        with pytest.raises(ValueError, match="must be a number of layers, all or auto, not"):
            parse_layers(text)


class Pulls:
    """A pull with scripted events."""

    def __init__(self, *events: tuple[Any, ...], received: int = 5, error: BaseException | None = None):
        self.told, self.received, self.error = events, received, error

    def __call__(self, reference: HubReference, watcher: Any) -> PullResult:
        for name, *arguments in self.told:
            getattr(watcher, name)(*arguments)
        if self.error:
            raise self.error
        return PullResult(Path("/m.gguf"), 3_000_000_000, self.received)


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, on_terminal: None, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a scripted pull and returns stderr."""

    def shown(script: Pulls) -> str:
        monkeypatch.setattr(pull, "pull_model", script)
        assert pulling.pull_with_progress(HubReference("hf:a/b", "a/b")) == "/m.gguf"
        return capsys.readouterr().err

    return shown


def test_pull_shows_checks_and_totals(pulled: Any, monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, *[5.0] * 20])
    monkeypatch.setattr(pulling, "monotonic", lambda: next(clock, 5.0))
    shown = pulled(
        Pulls(
            ("report_lookup", "the header"),
            ("report_check", "f", 10**9, 2 * 10**9),
            ("report_check", "f", 2 * 10**9, 2 * 10**9),
        )
    )
    assert "hf:a/b: requesting the header" in shown and "checking 2.0 GB of 2.0 GB: f" in shown
    assert "checking 1.0 GB" not in shown  # a moment after the last one
    assert shown.endswith("hf:a/b: 3.0 GB\n") and "already downloaded and verified" in pulled(Pulls(received=0))
    assert "trying again: it broke" in pulled(Pulls(("report_interruption", "it broke")))


def test_pull_speed_ignores_bytes_already_downloaded(pulled: Any, monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 10.0, 10.0, 10.0, 10.0, 12.0, 12.0, 12.0, 12.0, 12.0])
    monkeypatch.setattr(pulling, "monotonic", lambda: next(clock, 12.0))
    shown = pulled(Pulls(("report_download", "f", 10**9, 3 * 10**9), ("report_download", "f", 2 * 10**9, 3 * 10**9)))
    assert "1.0 GB of 3.0 GB: f" in shown and "2.0 GB of 3.0 GB, 500.0 MB/s, 0:02 to go: f" in shown


def test_an_interrupted_pull_keeps_its_download(pulled: Any, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt):
        pulled(Pulls(error=KeyboardInterrupt()))
    assert "the partial download is kept" in capsys.readouterr().err
    with pytest.raises(LocalllmError):
        pulled(Pulls(("report_lookup", "x"), error=LocalllmError("broken")))
    assert capsys.readouterr().err.endswith("\r\x1b[K")


@pytest.mark.parametrize(("seconds", "text"), [
    (0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.4, "59:59"), (3600, "1:00:00"), (7325, "2:02:05"),
    (1e9, "99:59:59"),
])  # fmt: skip
def test_durations_are_printed_in_minutes_or_hours(seconds: float, text: str):
    assert pulling.format_duration(seconds) == text


def test_a_missing_model_is_offered_only_on_a_terminal(
    tmp_path: Path, on_terminal: None, monkeypatch: pytest.MonkeyPatch
):
    from localllm.services.hub.catalogue import MissingError

    there = tmp_path / "m.gguf"
    there.write_bytes(b"")
    assert pulling.resolve_model_path(str(there)) == str(there)
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path))
    monkeypatch.setattr(pull, "pull_model", Pulls())
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


@pytest.mark.parametrize(("size", "size_text"), [("0.6 GB", " (0.6 GB)"), ("", "")])
def test_the_offer_names_the_size_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: str, size_text: str
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("no\n"))
    missing = LocalllmError("missing")
    missing.reference = SimpleNamespace(text="qwen", size=size)
    with pytest.raises(LocalllmError, match="missing"):
        pulling.offer_pull(missing)
    assert " ".join(capsys.readouterr().err.split()) == f"qwen is not on this computer. Download it{size_text}? [y/N]"


def facts(*rows: tuple[int, str, bool, float | None], **more: Any) -> Any:
    rows_of_facts = [
        {"context": c, "kv_type": k, "fits": f, "tokens_per_s": s, "needed_bytes": c * 10**6} for c, k, f, s in rows
    ]
    return {
        "rows": rows_of_facts,
        "longest": dict.fromkeys(dict.fromkeys(k for _, k, _, _ in rows), 0),
        "context": 9000,
        **more,
    }


def test_fit_prints_a_table_by_context_and_kv_type():
    both = facts(
        (2048, "f16", True, 12.34), (512, "f16", True, 20.0), (512, "q8_0", True, 25.0), (2048, "q8_0", False, 9.9)
    )
    header, first, second = fit.format_needs(both)
    assert header.split() == ["context", "f16", "tokens/s", "q8_0", "tokens/s"]
    assert first.split() == ["512", "512.0", "MB", "20.0", "512.0", "MB", "25.0"]
    assert second.split() == ["2048", "2.0", "GB", "12.3", "2.0", "GB", "too", "much"]
    vectors = facts((512, "f16", True, None))
    assert [line.split() for line in fit.format_needs(vectors)] == [["texts", "of", "needed"], ["512", "512.0", "MB"]]


def test_fit_prints_weights_memory_and_bandwidth():
    base: Any = {"weight_bytes_per_token": 10**8, "path": "p", "architecture": "llama", "parameters": 10**9,
    "weight_bytes": 5 * 10**8,
            "projector_bytes": 0, "adapter_bytes": 0, "table_bytes": 5 * 10**6,
            "available_bytes": 10**10, "bandwidth_gbs": 30.04}  # fmt: skip
    lines = fit.format_summary(base | facts((1, "f16", True, 1.0)))
    assert any("500.0 MB, of which each token reads 100.0 MB" in line for line in lines)
    assert "embeddings    5.0 MB of the weights; only rows in use take memory" in lines
    assert any("10.0 GB available, read at 30.0 GB/s" in line for line in lines) and not any(
        "projector" in line for line in lines
    )
    with_adapter = {**base, "adapter_bytes": 3 * 10**6, **facts((1, "f16", True, None))}
    assert "adapters      3.0 MB" in fit.format_summary(with_adapter)
    lines = fit.format_summary(base | {"projector_bytes": 10**6} | facts((1, "f16", True, None)))
    assert any("projector" in line for line in lines) and not any("each token" in line for line in lines)


def test_served_models_are_named_by_file_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a.gguf", "b=c.gguf", "d.gguf"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    paths = lambda *words: {each.name: each.path for each in serve.map_names([*words])}  # noqa: E731
    assert paths("a.gguf", "x=d.gguf") == {"a": "a.gguf", "x": "d.gguf"}
    assert paths("b=c.gguf") == {"b=c": "b=c.gguf"}  # a file that is there
    assert paths(f"{tmp_path}/a.gguf") == {"a": f"{tmp_path}/a.gguf"}
    with pytest.raises(UsageError, match=r"two models are named a: give one another name with NAME=a\.gguf"):
        paths(f"a={tmp_path}/d.gguf", "a.gguf")
    assert paths() == {}


def test_keys_are_read_from_a_private_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "keys"

    def kept(text: str, mode: int = 0o600) -> tuple[str, ...]:
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
        return serve.read_api_keys(str(file))

    assert serve.read_api_keys(None) == () and kept(" 12345678 \n\nabcdefgh\n") == ("12345678", "abcdefgh")
    assert capsys.readouterr().err == ""
    for short in ("1234567\n", "12345678\nx\n", "äöüäöüäöü\n"):
        with pytest.raises(UsageError, match="each key must have at least 8 characters, all ASCII"):
            kept(short)
    with pytest.raises(UsageError, match="must have at least one key, one per line"):
        kept("\n \n")
    if os.name == "posix":
        for mode in (0o640, 0o604):
            kept("12345678", mode)
            assert "other users of this computer can read" in capsys.readouterr().err


def write_small_model(tmp_path: Path) -> tuple[bytes, int]:
    """Write a small model; return its bytes and the length of its header."""
    write_gguf(tmp_path / "m.gguf", {"general.name": "n" * 40}, [OutputTensor.from_array("a", np.ones(64, np.float32))])
    data = (tmp_path / "m.gguf").read_bytes()
    return data, len(data) - 256


def test_an_incomplete_header_is_recognized(tmp_path: Path):
    data, length = write_small_model(tmp_path)
    with open(tmp_path / "m.gguf", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        known = [hollow.is_header_complete(content, "m", count) for count in range(len(data) + 1)]
        reader = HeaderReader(content, "m")
        reader.read()
    first = reader.position
    assert known == [False] * first + [True] * (len(known) - first) and length - 32 < first <= length  # it is padded


def test_headers_are_fetched_in_growing_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, length = write_small_model(tmp_path)
    monkeypatch.setattr(hollow, "FIRST_BYTES", 16)
    asked = list[tuple[int, int]]()

    def fetch(start: int, end: int) -> bytes:
        asked.append((start, end))
        return data[start:end]

    with open(tmp_path / "hollow", "w+b") as file:
        fetched = hollow.write_header(file, "m", len(data), fetch)
        assert asked[:3] == [(0, 16), (16, 32), (32, 64)] and fetched == asked[-1][1] >= length - 32
        assert [start for start, _ in asked[1:]] == [end for _, end in asked[:-1]]
        assert os.path.getsize(tmp_path / "hollow") == len(data)
    monkeypatch.setattr(hollow, "MAX_BYTES", 32)
    with open(tmp_path / "hollow", "w+b") as file, pytest.raises(ModelError, match="at most 32 bytes"):
        hollow.write_header(file, "m", len(data), fetch)
    problem = r"^m: header: not a GGUF file: expected the bytes GGUF at its start$"
    with open(tmp_path / "hollow", "w+b") as file, pytest.raises(ModelError, match=problem):
        hollow.write_header(file, "m", 64, lambda start, end: b"x" * (end - start))
    monkeypatch.setattr(hollow, "MAX_BYTES", 1 << 28)
    for first, fetched in ((len(data) - 1, len(data) - 1), (len(data), len(data)), (1 << 22, len(data))):
        monkeypatch.setattr(hollow, "FIRST_BYTES", first)
        asked.clear()
        with open(tmp_path / "hollow", "w+b") as file:
            assert hollow.write_header(file, "m", len(data), fetch) == fetched and asked == [(0, fetched)]
