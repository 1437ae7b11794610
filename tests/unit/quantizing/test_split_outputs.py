"""Test split models, and that outputs replace nothing by mistake."""

import errno
import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from project import ROOT
from selection import everything
from system_calls import SystemCalls
from terminal import Terminal
from tiny_model import finish, write_tiny_model

from localllm.cli.terminal import quantize_progress
from localllm.cli.terminal.output import ProgressLine
from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.safe_file import SafeFile
from tests.integration.test_cli import posix
from tests.unit.quantizing.quantize_parts import SHAPES, arrays, quantized, values, write_imatrix, write_model


def split(path: Path, folder: Path) -> Path:
    """Write the model in three files; return the first's path."""
    weights = arrays()
    writer = gguf.GGUFWriter(str(folder / "part.gguf"), "llama", split_max_tensors=3)
    writer.add_uint32("llama.block_count", 2)
    for name, array in weights.items():
        writer.add_tensor(name, array)
    finish(writer)
    return folder / "part-00001-of-00003.gguf"


def test_split_files_become_one(tmp_path: Path):
    file = quantized(split(tmp_path, tmp_path), tmp_path / "x.gguf", "Q8_0")
    assert not [key for key in file.metadata if key.startswith("split.")]
    assert file.tensors.keys() == SHAPES.keys()


def test_no_split_gets_its_name_before_all_are_on_the_disk(tmp_path: Path, monkeypatch):
    parts, calls = split(tmp_path, tmp_path), SystemCalls(monkeypatch)
    quantized(parts, tmp_path / "x-00001-of-00003.gguf", "COPY", keep_split=True)
    numbers = {(tmp_path / f"x-0000{number}-of-00003.gguf").stat().st_ino for number in (1, 2, 3)}
    first = min(place for place, call in enumerate(calls) if call[0] == "name" and call[1] in numbers)
    assert {number for name, number in calls[:first] if name == "fsync"} >= numbers
    assert calls.of(tmp_path / "x-00003-of-00003.gguf")[-2:] == ["name", "fsync folder"]


def test_split_files_stay_split_with_keep_split(tmp_path: Path):
    parts = split(tmp_path, tmp_path)
    file = quantized(parts, tmp_path / "x-00001-of-00003.gguf", "COPY", keep_split=True)
    assert [os.path.basename(name) for name in file.parts] == [f"x-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert list(file.parts.values()) == list(GGUFFile.open(parts).parts.values())
    for name in file.parts:
        fields = gguf.GGUFReader(name).fields
        kinds = [fields[f"split.{key}"].types[0].name for key in ("no", "count", "tensors.count")]
        assert kinds == ["UINT16", "UINT16", "INT32"]
    for name, array in arrays().items():
        np.testing.assert_array_equal(values(file)[name], array)


def test_existing_files_of_a_split_model_are_not_replaced(tmp_path: Path):
    parts = split(tmp_path, tmp_path)
    (tmp_path / "x-00002-of-00003.gguf").write_text("old")
    with pytest.raises(UsageError, match=r"x-00002-of-00003\.gguf: this file exists"):
        quantized(parts, tmp_path / "x.gguf", "Q8_0", keep_split=True)
    with pytest.raises(UsageError, match="the output is also an input"):
        quantized(parts, tmp_path / "part.gguf", "Q8_0", keep_split=True)
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == ["pa", "pa", "pa", "x-"]


def test_a_failure_leaves_no_file_of_a_split_model(tmp_path: Path, monkeypatch):
    parts = split(tmp_path, tmp_path)
    calls = itertools.count()
    real = SafeFile.finish

    def fail(self) -> None:
        if next(calls) == 2:
            raise LocalllmError("refused")
        real(self)

    monkeypatch.setattr(SafeFile, "finish", fail)
    with pytest.raises(LocalllmError, match="refused"):
        quantized(parts, tmp_path / "x.gguf", "COPY", keep_split=True)
    assert {path.name[:4] for path in tmp_path.iterdir()} == {"part"}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "blk.0.attn_norm.weight", "blk.1.ffn_gate_exps.weight"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_infinite_weights_are_refused_by_name(bad: float, name: str, dtype, tmp_path: Path):
    weights = arrays(dtype)
    weights[name][..., -1] = bad
    write_model(tmp_path / "m.gguf", weights)
    (tmp_path / "x.gguf").write_text("old")
    for recipe in ("Q4_0", "COPY"):
        with pytest.raises(ModelError, match=rf"tensor {name}: the weight in row 0, column \d+ is {bad}"):
            quantized(tmp_path / "m.gguf", tmp_path / "x.gguf", recipe)
    assert (tmp_path / "x.gguf").read_text() == "old" and len(list(tmp_path.iterdir())) == 2


def test_weights_near_the_float_limit_are_accepted(tmp_path: Path):
    weights = arrays()
    weights["blk.0.attn_v.weight"][0, :2] = 3e38, -3e38
    write_model(tmp_path / "m.gguf", weights)
    quantized(tmp_path / "m.gguf", tmp_path / "x.gguf", "F32")


def test_an_output_that_is_the_input_is_refused(model: Path, tmp_path: Path):
    shutil.copy(model, tmp_path / "m.gguf")
    (tmp_path / "soft.gguf").symlink_to("m.gguf")
    os.link(tmp_path / "m.gguf", tmp_path / "hard.gguf")
    for name in ("m.gguf", "soft.gguf", "hard.gguf"):
        with pytest.raises(UsageError, match="the output is also an input"):
            quantized(tmp_path / "m.gguf", tmp_path / name, "Q8_0")
        with pytest.raises(UsageError, match="the output is also an input"):
            quantized(tmp_path / "soft.gguf", tmp_path / name, "Q8_0")
    assert (tmp_path / "m.gguf").read_bytes() == model.read_bytes()


def test_the_importance_matrix_is_not_replaced(model: Path, importance, tmp_path: Path):
    imatrix = write_imatrix(tmp_path / "i.gguf", importance)
    with pytest.raises(UsageError, match="the output is also an input"):
        quantized(model, tmp_path / "i.gguf", "Q8_0", imatrix=imatrix)


def test_a_full_disk_is_noticed_before_writing(model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(LocalllmError, match="bytes needed, but only 1000 free"):
        quantized(model, tmp_path / "x.gguf", "Q8_0")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_the_old_file(model: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "x.gguf").write_text("old")
    real, calls = os.write, itertools.count()

    def write(descriptor: int, data) -> int:
        if next(calls) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(LocalllmError, match="No space left on device; nothing was changed"):
        quantized(model, tmp_path / "x.gguf", "Q8_0")
    assert (tmp_path / "x.gguf").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def small_disk(tmp_path: Path):
    """Mount a file system of 128 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", folder], capture_output=True).returncode:
        pytest.skip("this user cannot mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(not shutil.which("mount") or os.name != "posix", reason="needs mount")
def test_a_small_file_system_leaves_the_old_file(model: Path, small_disk: Path, monkeypatch):
    """Fill it before the start, or in the middle after the system has promised more."""
    (small_disk / "x.gguf").write_text("old")
    with pytest.raises(LocalllmError, match="bytes needed"):
        quantized(model, small_disk / "x.gguf", "F16")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, 10**9))
    with pytest.raises(LocalllmError, match="No space left on device"):
        quantized(model, small_disk / "x.gguf", "F16")
    assert (small_disk / "x.gguf").read_text() == "old" and len(list(small_disk.iterdir())) == 1


def test_a_file_size_limit_leaves_no_file(model: Path, tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(LocalllmError, match="File too large"):
            quantized(model, tmp_path / "x.gguf", "Q8_0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


FATE = """
import os, signal, sys
from localllm.cli.main import main
from localllm.quantizing import plan as quantize_plan
quantize_plan.CHUNK_WEIGHTS = 1 << 12
number, call = int(sys.argv[1]), int(sys.argv[2])
def fatal(function):
    def call_or_die(*arguments, **named):
        global call
        call -= 1
        if call == 0:
            os.kill(os.getpid(), number)
        return function(*arguments, **named)
    return call_or_die
for name in ("write", "fsync", "link"):  # localllm writes one file, and on stderr by other means
    setattr(os, name, fatal(getattr(os, name)))
sys.argv = ["localllm", "quantize", *sys.argv[3:]]
try:
    main()
finally:
    print(-call, file=sys.stderr)
"""


def with_fate(number: int, call: int, model: Path, target: Path) -> subprocess.CompletedProcess:
    """Quantize in a process that sends itself a signal at its `call`-th call that writes, syncs or names the file."""
    command = [sys.executable, "-c", FATE, str(int(number)), str(call), model, target, "Q8_0", "-t", "2", "--force"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def calls(model: Path, tmp_path_factory) -> int:
    """Return the number of such calls; the last, which syncs the folder, comes after the new file exists."""
    return int(with_fate(0, 0, model, tmp_path_factory.mktemp("calls") / "x.gguf").stderr)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="elsewhere, a kill leaves a temporary file")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)],
)
def test_a_signal_at_random_points_leaves_the_old_file(number: int, code: int, calls: int, model: Path, tmp_path: Path):
    (tmp_path / "x.gguf").write_text("old")
    for call in random.Random().sample(range(1, calls), 3):
        done = with_fate(number, call, model, tmp_path / "x.gguf")
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), (call, done.stderr)
        assert (tmp_path / "x.gguf").read_text() == "old" and len(list(tmp_path.iterdir())) == 1, call


@pytest.mark.parametrize("columns", [10, 20, 80])
def test_the_percentage_is_shown_on_narrow_terminals(columns: int, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = quantize_progress.StageProgress({"encoding": 1.0}, ProgressLine())
    progress._display = quantize_progress._ProgressBar(ProgressLine())
    with progress as show:
        show("encoding", 1, 10, "blk.0.attn_q.weight")
        table = progress._display._progress.get_renderable()
        console = progress._display._progress.console
        with console.capture() as captured:
            console.print(table)
    assert " 10%" in captured.get()


@pytest.mark.slow
@posix
def test_a_terminal_sees_progress_that_disappears(tmp_path: Path):
    """Show a dumb terminal the last line only."""
    model, out = write_tiny_model(tmp_path / "m.gguf"), tmp_path / "x.gguf"
    for term in ("xterm", "dumb"):
        shown = Terminal("quantize", str(model), str(out), "Q8_0", "--force", TERM=term)
        assert shown.end() == 0, shown.seen
        assert ("%" in shown.seen and "\x1b[2K" in shown.seen) == (term == "xterm"), shown.seen
        assert re.search(r"x\.gguf: .*, \d+\.\d s\r\n", shown.seen)
        assert GGUFFile.open(out).tensors["output.weight"].format.name == "Q8_0"


@pytest.mark.slow
def test_a_kill_at_random_moments_leaves_the_old_or_new_file(tmp_path: Path):
    """Kill it at moments from before the first import to the end."""
    model = write_tiny_model(tmp_path / "m.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "x.gguf").write_text("old")
    command = [sys.executable, "-m", "localllm", "quantize", model, folder / "x.gguf", "Q8_0", "--force"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    new = (folder / "x.gguf").read_bytes()
    for _ in range(20 if everything() else 6):
        (folder / "x.gguf").write_text("old")
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            process.wait(random.uniform(0.1, 1.2))
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        assert (folder / "x.gguf").read_bytes() in (b"old", new)
        assert len(list(folder.iterdir())) == 1
