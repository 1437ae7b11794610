"""What was checked before is remembered, until the checks change."""

import os
import shutil
import subprocess
import sys

import pytest

from localllm.files import known


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    return tmp_path


def test_remembered_by_kind_and_hash():
    assert not known.is_known("merges", "abc")
    known.remember("merges", "abc")
    assert known.is_known("merges", "abc")
    assert not known.is_known("merges", "abd") and not known.is_known("template", "abc")


@pytest.mark.parametrize("change", ["size", "time", "another file", "name"])
def test_forgotten_with_any_change_of_the_checks(tmp_path, monkeypatch, change: str):
    copies = tuple(tmp_path / folder.name for folder in known.CHECKS)
    for folder, copy in zip(known.CHECKS, copies, strict=True):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(known, "CHECKS", copies)
    known.state_of.cache_clear()
    known.remember("vocabulary", "abc")
    known.state_of.cache_clear()
    assert known.is_known("vocabulary", "abc")
    source = copies[1] / "vocabulary.py"
    if change == "size":
        status = source.stat()
        source.write_text(source.read_text() + "\n")
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "time":
        os.utime(source, (1, 1))
    elif change == "another file":
        (copies[0] / "more.py").touch()
    else:
        source.rename(source.with_name("words_and_pieces.py"))
    known.state_of.cache_clear()
    assert not known.is_known("vocabulary", "abc")
    known.state_of.cache_clear()


def test_all_of_a_vocabularys_check_is_covered():
    """What the check imports lies in the folders that are looked at; what is beneath them knows no vocabulary."""
    beneath = {"localllm.quant", "localllm.errors", "localllm.values", "localllm.frozen", "localllm.system"}
    program = "import sys, localllm.text.tokenizer; print(*[name for name in sys.modules if name[:9] == 'localllm.'])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    covered = {f"localllm.{folder.name}" for folder in known.CHECKS} | beneath
    assert not [name for name in loaded if not any(f"{name}.".startswith(f"{root}.") for root in covered)]


def test_a_folder_that_others_can_write_to_proves_nothing(cache_folder):
    known.remember("merges", "abc")
    (cache_folder / "known").chmod(0o777)
    assert not known.is_known("merges", "abc")


def test_a_folder_that_cannot_be_looked_into_costs_only_time(monkeypatch, tmp_path):
    """Somebody else's, say; the name that is too long fails for root, too."""
    folder = tmp_path / ("x" * 300)
    monkeypatch.setenv("LOCALLLM_CACHE", str(folder))
    known.remember("merges", "abc")
    assert not known.is_known("merges", "abc")
