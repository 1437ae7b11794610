"""Test files that are removed or replaced while open or mapped, and long paths."""

import ctypes
import gc
import ntpath
import os
import sys
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from localllm.errors import LocalllmError
from localllm.files.gguf.file import GGUFFile
from localllm.files.safe_file import SafeFile
from localllm.system import files


def content(file: GGUFFile) -> bytes:
    return b"".join(tensor.data.tobytes() for tensor in file.tensors.values())


def test_a_mapped_model_can_be_removed(tmp_path: Path):
    """Keep the mapping readable; on Windows the name may stay until the file is closed."""
    path = write_tiny_model(tmp_path / "x.gguf")
    expected, file = content(GGUFFile.open(path)), GGUFFile.open(path)
    path.unlink()
    assert content(file) == expected
    assert sys.platform == "win32" or not path.exists()
    del file
    gc.collect()
    assert not path.exists()


def test_a_mapped_model_is_replaced_or_stays(tmp_path: Path):
    """Refuse on Windows without a change; elsewhere keep the old file mapped."""
    path = write_tiny_model(tmp_path / "x.gguf")
    before, file = path.read_bytes(), GGUFFile.open(path)
    expected = content(file)
    if files.can_replace_open_files():
        with SafeFile(path) as new:
            new.write(b"new")
        assert path.read_bytes() == b"new"
    else:
        with pytest.raises(LocalllmError, match="has the file open; nothing was changed"), SafeFile(path) as new:
            new.write(b"new")
        assert path.read_bytes() == before
    assert content(file) == expected and os.listdir(tmp_path) == ["x.gguf"]


def test_a_model_no_longer_mapped_is_replaced(tmp_path: Path):
    path = write_tiny_model(tmp_path / "x.gguf")
    content(GGUFFile.open(path))
    with SafeFile(path) as new:
        new.write(b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["x.gguf"]


def test_a_model_with_a_long_path_is_opened(tmp_path: Path):
    """Use more characters than Windows accepts without a prefix."""
    folder, model = tmp_path / ("a" * 100) / ("ü" * 100) / ("c" * 100), write_tiny_model(tmp_path / "x.gguf")
    expected = content(GGUFFile.open(model))
    known = files.to_long_path if sys.platform == "win32" else str
    os.makedirs(known(str(folder)))
    os.replace(model, known(str(folder / "x.gguf")))
    assert content(GGUFFile.open(folder / "x.gguf")) == expected


def test_long_paths_of_windows_get_a_prefix(monkeypatch):
    monkeypatch.setattr(files.os, "path", ntpath)
    monkeypatch.setattr(ntpath, "abspath", lambda path: path)  # which is POSIX's here
    name = "\\".join(["n" * 50] * 6)
    assert files.to_long_path("C:\\models\\x.gguf") == "C:\\models\\x.gguf"
    assert files.to_long_path(f"C:\\{name}") == f"\\\\?\\C:\\{name}"
    assert files.to_long_path(f"\\\\host\\share\\{name}") == f"\\\\?\\UNC\\host\\share\\{name}"
    assert files.to_long_path(f"\\\\?\\C:\\{name}") == f"\\\\?\\C:\\{name}"


@pytest.mark.skipif(sys.platform != "win32", reason="Windows only")
def test_windows_is_told_that_paths_may_be_long():
    """Check the process environment block; wine takes all paths, so it cannot show whether Windows looks."""
    find = ctypes.WinDLL("ntdll").RtlGetCurrentPeb
    find.restype = ctypes.c_void_p
    ctypes.c_uint8.from_address(find() + 3).value &= 0x7F
    before = ctypes.string_at(find(), 8)
    files.allow_long_paths()
    assert ctypes.string_at(find(), 8) == before[:3] + bytes([before[3] | 0x80]) + before[4:]
