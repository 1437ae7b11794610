"""Checks of files are remembered until the checks change."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from localllm.errors import ModelError
from localllm.files.cache import checksummed_cache as known
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.metadata import Metadata
from localllm.services.inspection.validate import require_vocabulary
from localllm.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    return tmp_path


def test_a_check_is_cached_by_its_type_and_the_files_hash():
    assert not known.is_recorded("merges", "abc")
    known.record_check("merges", "abc")
    assert known.is_recorded("merges", "abc")
    assert not known.is_recorded("merges", "abd") and not known.is_recorded("template", "abc")


@pytest.mark.parametrize("change", ["size", "time", "another file", "name"])
def test_a_change_of_the_checks_forgets_everything(tmp_path, monkeypatch, change: str):
    copies = tuple(tmp_path / folder.name for folder in known.CHECKS)
    for folder, copy in zip(known.CHECKS, copies, strict=True):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(known, "CHECKS", copies)
    known.hash_sources.cache_clear()
    known.record_check("vocabulary", "abc")
    known.hash_sources.cache_clear()
    assert known.is_recorded("vocabulary", "abc")
    source = copies[-1] / "vocabulary.py"
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
    known.hash_sources.cache_clear()
    assert not known.is_recorded("vocabulary", "abc")
    known.hash_sources.cache_clear()


def test_the_order_of_a_folders_entries_does_not_matter(tmp_path, monkeypatch):
    """Ignore files that are no sources, too; only the order of the folders counts."""
    for name in ("b.py", "a.py", "c.txt"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    hashes, scandir, state_of = [], os.scandir, known.hash_sources.__wrapped__
    for order in (False, True):
        monkeypatch.setattr(known.os, "scandir", lambda folder, order=order: contextlib.nullcontext(
            sorted(scandir(folder), key=lambda entry: entry.name, reverse=order)))  # fmt: skip
        hashes.append(state_of(tmp_path))
    (tmp_path / "c.txt").unlink()
    assert hashes == [state_of(tmp_path)] * 2 and len(hashes[0]) == 16
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.py").touch()
    assert state_of(other, tmp_path) != state_of(tmp_path, other)


def test_all_of_a_vocabularys_check_is_covered():
    """Import nothing outside the folders that are hashed, but what knows no vocabulary."""
    modules = ("quant", "errors", "values", "frozen", "renamed", "system")
    beneath = {f"localllm.{name}" for name in modules}
    program = "import sys, localllm.text.tokenizer; print(*[name for name in sys.modules if name[:9] == 'localllm.'])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    package = Path(known.__file__).parents[2]
    covered = {".".join(("localllm", *folder.relative_to(package).parts)) for folder in known.CHECKS} | beneath
    assert not [name for name in loaded if not any(f"{name}.".startswith(f"{root}.") for root in covered)]


def test_a_folder_writable_by_others_proves_nothing(cache_folder):
    known.record_check("merges", "abc")
    (cache_folder / "known").chmod(0o777)
    assert not known.is_recorded("merges", "abc")


def test_an_unreadable_folder_costs_only_time(monkeypatch, tmp_path):
    """Stand for somebody else's folder; the name that is too long fails for root, too."""
    folder = tmp_path / ("x" * 300)
    monkeypatch.setenv("LOCALLLM_CACHE", str(folder))
    known.record_check("merges", "abc")
    assert not known.is_recorded("merges", "abc")


def test_a_vocabulary_is_checked_once(tmp_path, monkeypatch):
    """Check another file again, and one whose metadata were changed after it was read."""
    looked, look = [], Tokenizer.from_metadata

    def count_checks(metadata, oddities):
        looked.append(len(metadata["tokenizer.ggml.tokens"]))
        return look(metadata, oddities)

    monkeypatch.setattr(Tokenizer, "from_metadata", count_checks)
    first, second = (write_tiny_model(tmp_path / f"{seed}.gguf", seed=seed, context=512 + seed) for seed in (0, 1))
    for path, times in ((first, 1), (first, 1), (second, 2), (first, 2), (second, 2)):
        with GGUFFile.open(path, needed=()) as file:
            require_vocabulary(file)
            assert len(looked) == times
    with GGUFFile.open(first) as file:
        file.metadata["tokenizer.ggml.tokens"] = file.metadata["tokenizer.ggml.tokens"][:-1]
        for times in (3, 4):
            with pytest.raises(ModelError, match=r"0\.gguf: "):
                require_vocabulary(file)
            assert len(looked) == times, "what is wrong is not remembered"


def test_metadata_from_a_file_is_identified_by_its_bytes(tmp_path):
    """Hash values, keys and their order; know nothing of keys that no file has, or that were changed."""
    path = write_tiny_model(tmp_path / "a.gguf")
    with GGUFFile.open(path) as file, GGUFFile.open(write_tiny_model(tmp_path / "b.gguf", context=513)) as other:
        keys = ["general.architecture", "general.name", "llama.context_length"]
        fingerprint = file.metadata.compute_fingerprint(*keys)
        assert fingerprint and fingerprint == file.metadata.compute_fingerprint(
            *keys
        ) != other.metadata.compute_fingerprint(*keys)
        assert file.metadata.compute_fingerprint(*keys[:2]) == other.metadata.compute_fingerprint(*keys[:2])
        assert len({file.metadata.compute_fingerprint(*some) for some in (keys, keys[:2], keys[1:], keys[::-1])}) == 4
        assert file.metadata.compute_fingerprint("none") is file.metadata.compute_fingerprint(*keys, "none") is None
        assert Metadata({"a": 1}).compute_fingerprint("a") is None and Metadata().compute_fingerprint() is None
        for change in (lambda: file.metadata.update({"x": 1}), lambda: other.metadata.pop("general.name")):
            change()
        assert file.metadata.compute_fingerprint(*keys) is other.metadata.compute_fingerprint(keys[0]) is None
