"""Test the cache of the quantizers' machine code: it is found again, and losing it costs only time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from localllm.system.files import get_cache_folder

PROGRAM = """
import numpy as np
from localllm.quant import blocks
out = np.empty(2, np.uint16)
blocks.narrow_to_half(np.array([1, -2], np.float32), out)
print(out.tolist(), sum(blocks.narrow_to_half.stats.cache_hits.values()))
"""


def run(cache: Path) -> str:
    environment = os.environ | {"LOCALLLM_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * len(data)]
)
def test_machine_code_is_cached_and_compiled_again_when_damaged(tmp_path: Path, damage):
    assert run(tmp_path) == "[15360, 49152] 0"
    assert run(tmp_path) == "[15360, 49152] 1"
    for file in tmp_path.rglob("*.nb*"):
        file.write_bytes(damage(file.read_bytes()))
    assert run(tmp_path) == "[15360, 49152] 0"
    assert run(tmp_path) == "[15360, 49152] 1"


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_written_is_not_used(tmp_path: Path):
    (tmp_path / "file").touch()
    assert run(tmp_path / "file") == "[15360, 49152] 0"


@pytest.mark.slow
def test_a_cache_folder_that_others_can_write_is_not_used(tmp_path: Path):
    """Refuse it, because Numba reads pickles from it."""
    assert run(tmp_path) == "[15360, 49152] 0"
    (folder,) = (tmp_path / "quant").iterdir()
    folder.chmod(0o777)
    assert run(tmp_path) == "[15360, 49152] 0"


@pytest.mark.parametrize("relative", ["", ".", "cache", "~/cache"])
def test_the_cache_is_never_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    monkeypatch.setenv("LOCALLLM_CACHE", relative)
    assert get_cache_folder() == Path("/home/someone/.cache/localllm")
    monkeypatch.setenv("HOME", relative)
    assert get_cache_folder() == Path("/.cache/localllm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert get_cache_folder() == Path("/caches/localllm")
    monkeypatch.setenv("LOCALLLM_CACHE", "/chosen")
    assert get_cache_folder() == Path("/chosen")


def test_the_cache_key_covers_every_source_and_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from localllm.quant import numba_cache as compiled

    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    folders = set()
    for name, text in [("a.py", "1"), ("a.py", "2"), ("b.py", "2")]:
        (tmp_path / name).write_text(text)
        folders.add(compiled.get_code_folder.__wrapped__())
    monkeypatch.setenv("NUMBA_CPU_NAME", "another")
    folders.add(compiled.get_code_folder.__wrapped__())
    assert len(folders) == 4
