"""Files removed by other programs while ours list them: only removed ones are passed over."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_model import write_tiny_model

from localllm.errors import LocalllmError, UsageError
from localllm.files import models_folder, safe_file
from localllm.files import provenance as origin
from localllm.files.cache import checksummed_cache as kept
from localllm.files.cache import ngram_cache_file as written_file
from localllm.files.cache import prefix_files
from localllm.files.cache.prefix_files import PrefixChunkInfo
from localllm.files.provenance import (
    Provenance,
    get_record_path,
    hash_beginning,
    is_same_input,
    read_record,
    remove_record,
    require_same_input,
    write_record,
)
from localllm.files.safe_file import SafeFile
from localllm.quantizing.imatrix import ImportanceCollector
from localllm.services import sessions
from localllm.services.hub import catalogue
from localllm.services.sessions import SavedChat, SessionFile


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Use folders of the test instead of the user's."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, "1")


@pytest.fixture
def lost(monkeypatch):
    """Remove a file as soon as its folder was listed."""
    scandir, iterdir, listdir = os.scandir, Path.iterdir, os.listdir

    def let_go(path: Path) -> None:
        class Scanned:
            def __init__(self, folder="."):
                with scandir(folder) as found:
                    self.entries = iter(sorted(found, key=lambda entry: entry.name))
                path.unlink(missing_ok=True)

            def __enter__(self):
                return self.entries

            def __exit__(self, *error):
                pass

            def __next__(self):
                return next(self.entries)

            def __iter__(self):
                return self.entries

            def close(self):
                pass

        def listed(all_of):
            def names(folder="."):
                found = sorted(all_of(folder))
                path.unlink(missing_ok=True)
                return iter(found) if all_of is iterdir else found

            return names

        monkeypatch.setattr(os, "scandir", Scanned)
        monkeypatch.setattr(os, "listdir", listed(listdir))
        monkeypatch.setattr(Path, "iterdir", listed(iterdir))

    return let_go


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def write_prefixes() -> list[Path]:
    for number in range(3):
        key = f"{number}" * 32
        prefix_files.write_prefix(key, PrefixChunkInfo("m", number, ""), {"x": np.zeros(1000, np.uint8)})
        os.utime(prefix_files.get_folder() / key, (number + 1, number + 1))
    return sorted(prefix_files.get_folder().iterdir())


def write_texts() -> list[Path]:
    for name in "abc":
        written_file.write_texts(name, np.arange(5), np.arange(3))
    return sorted(written_file.get_folder().iterdir())


@pytest.mark.parametrize("which", range(3))
def test_a_prompt_removed_while_listing_is_passed_over(lost, which: int):
    paths = write_prefixes()
    lost(paths[which])
    stay = [path.name for path in paths if path != paths[which]]
    assert sorted(entry.key for entry in prefix_files.list_entries()) == stay
    paths[which].write_bytes(b"x")
    size = paths[1].stat().st_size if which != 1 else paths[0].stat().st_size
    assert prefix_files.remove_all() == 2 * size
    assert names(prefix_files.get_folder()) == []


@pytest.mark.parametrize("which", range(3))
def test_pruning_counts_no_prompt_removed_meanwhile(lost, monkeypatch, which: int):
    """Remove the oldest first."""
    paths = write_prefixes()
    size = paths[0].stat().st_size
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, f"{size / 1e9}")
    lost(paths[which])
    prefix_files.prune()
    assert names(prefix_files.get_folder()) == [paths[1 if which == 2 else 2].name]


@pytest.mark.parametrize("which", range(3))
def test_a_text_removed_while_listing_is_passed_over(lost, which: int):
    assert written_file.list_files() == [] and written_file.remove_all() == 0, "there is not a folder"
    paths = write_texts()
    content, size = paths[which].read_bytes(), paths[0].stat().st_size
    lost(paths[which])
    assert [(tokens, taken) for tokens, taken, _ in written_file.list_files()] == [(5, size)] * 2
    paths[which].write_bytes(content)
    assert written_file.remove_all() == 2 * size
    assert names(written_file.get_folder()) == [] and written_file.remove_all() == 0


def test_texts_that_cannot_be_removed_are_an_error(monkeypatch):
    path = write_texts()[0]

    def refuse(self, missing_ok=False):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(LocalllmError) as failure:
        written_file.remove_all()
    assert str(failure.value).startswith(str(path.parent)) and "cannot be removed: Operation" in str(failure.value)


@pytest.mark.parametrize("which", range(3))
def test_a_session_removed_while_listing_is_passed_over(lost, which: int):
    for number in range(3):
        with SessionFile(f"s{number}") as file:
            file.chat = SavedChat()
            file.rewrite()
        os.utime(sessions.get_path(f"s{number}"), (number + 1, number + 1))
    lost(sessions.get_path(f"s{which}"))
    stay = [f"s{number}" for number in (2, 1, 0) if number != which]
    assert sessions.list_names() == stay and [one.name for one in sessions.list_sessions()] == stay
    assert sessions.find_latest_name() == stay[0] and sessions.list_branches("s9") == ["s9"]


@pytest.mark.parametrize("which", range(3))
def test_a_model_removed_while_listing_is_passed_over(lost, tmp_path, which: int):
    (tmp_path / "models").mkdir()
    for number in range(3):
        write_tiny_model(tmp_path / "models" / f"m{number}.gguf")
    lost(tmp_path / "models" / f"m{which}.gguf")
    assert [(model.name, model.is_whole) for model in catalogue.list_models_on_disk()] == [
        (f"m{number}", number != which) for number in range(3)
    ]
    assert models_folder.get_size(tmp_path / "models" / f"m{which}.gguf") == 0


def test_half_written_files_removed_meanwhile_are_passed_over(lost, tmp_path):
    paths = [tmp_path / f".localllm-9-{number}.tmp" for number in range(3)]
    for path in paths:
        path.touch()
    lost(paths[1])
    safe_file.remove_abandoned(str(tmp_path))
    assert names(tmp_path) == []


def test_an_error_wins_over_the_temporary_files_removal(tmp_path, monkeypatch):
    """Report what went wrong when somebody has removed the file meanwhile."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), SafeFile(tmp_path / "x") as file:
            os.unlink(file.temporary)
            raise error

    def vanish(source: str, target: object) -> None:
        os.unlink(source)
        raise OSError(5, "Input/output error")

    sources = list[str]()

    def noted(source: str, target: object) -> None:
        sources.append(source)
        vanish(source, target)

    monkeypatch.setattr(kept, "replace_file", noted)
    with pytest.raises(OSError, match="Input/output error"):
        kept.write_checksummed(tmp_path / "folder" / "x", b"content")
    assert names(tmp_path / "folder") == []
    assert os.path.dirname(sources[0]) == str(tmp_path / "folder"), "on the same disk"
    assert safe_file.TEMPORARY.fullmatch(os.path.basename(sources[0])), "others see that it is half written"


def test_removing_empty_folders_stops_at_the_models_folder(tmp_path):
    folder = tmp_path / "models" / "a" / "b"
    folder.parent.mkdir(parents=True)
    models_folder.remove_empty_folders(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["models"] and not list((tmp_path / "models").iterdir())
    folder.mkdir(parents=True)
    (folder.parent / "x").touch()
    models_folder.remove_empty_folders(folder)
    assert names(folder.parent) == ["x"] and not folder.exists()


def test_removing_the_part_of_an_interrupted_run_twice_is_harmless(tmp_path):
    (tmp_path / "out.part").touch()
    for _ in range(2):
        ImportanceCollector.remove_part(SimpleNamespace(_part=tmp_path / "out.part"))
        assert names(tmp_path) == []


def test_a_record_goes_only_after_its_output(tmp_path):
    """Accept that somebody has removed the record, too."""
    output = str(tmp_path / "out")
    Path(output).write_bytes(b"answers")
    write_record(output, Provenance.describe(b"questions", "q"))
    remove_record(output)
    assert os.path.exists(get_record_path(output))
    assert str(read_record(output)) == f"{os.path.abspath('q')} (9 bytes)" and Provenance.describe(b"", "").path == ""
    os.unlink(output)
    for _ in range(2):
        remove_record(output)
        assert not os.path.exists(get_record_path(output))


@pytest.mark.parametrize(
    ("path", "data", "goes_on"),
    [
        ("q", b"questions", True), ("q", b"questions, and more", True), ("q", b"question", False), ("q", b"", False),
        ("q", b"Questions", False), ("other", b"questions", True), ("other", b"questions, and more", False), (
        "other", b"question", False), ("", b"questions", True), ("", b"questions!", False), ("q", b"Questions!", False),
    ],
)  # fmt: skip
def test_a_run_goes_on_with_grown_or_renamed_input(tmp_path, path: str, data: bytes, goes_on: bool):
    output, now = str(tmp_path / "out"), Provenance.describe(data, path)
    assert is_same_input(Provenance.describe(b"questions", "q"), data, now) == goes_on
    require_same_input(output, data, now)
    Path(output).write_bytes(b"answers")
    require_same_input(output, data, now)
    write_record(output, Provenance.describe(b"questions", "q"))
    if goes_on:
        require_same_input(output, data, now)
        return
    with pytest.raises(UsageError) as error:
        require_same_input(output, data, now)
    before, after = (
        f"{os.path.abspath('q')} (9 bytes)",
        f"{os.path.abspath(path) if path else 'stdin'} ({len(data)} bytes)",
    )
    expected = f"{output} has answers for {before}, not for {after}; --redo replaces them, or use another output file"
    if path == "q":
        expected = f"{os.path.abspath(path)} has changed since {output} was started; --redo replaces its answers"
        expected += ", or use another output file"
    assert str(error.value) == expected


def test_the_digest_covers_the_beginning_of_an_input():
    one, other = (b"a" * (1 << 16) + end for end in (b"x", b"y"))
    before = Provenance.describe(one, "q")  # all of it counts where it has become shorter
    assert [is_same_input(before, data, Provenance.describe(data, "q")) for data in (one, one[:-1])] == [True, False]
    assert (
        hash_beginning(one) == hash_beginning(other)
        and hash_beginning(one[1:]) != hash_beginning(other[1:])
        and len(hash_beginning(one)) == 16
    )


def test_corrupt_records_are_treated_as_missing(tmp_path, monkeypatch):
    """Include records of an empty output, and cut ones; and write no known record again."""
    output, now = tmp_path / "out", Provenance.describe(b"questions", "")
    assert read_record(str(output)) is None and get_record_path(str(output)) == os.path.realpath(
        tmp_path / ".out.localllm"
    )
    output.write_bytes(b"answers")
    write_record(str(output), now)
    mark = Path(get_record_path(str(output)))
    content = mark.read_bytes()
    assert content == b'{"path": "", "size": 9, "beginning": "%s", "by": {}}\n' % hash_beginning(b"questions").encode()
    monkeypatch.setattr(origin, "SafeFile", lambda path: 1 // 0)
    write_record(str(output), now)
    with pytest.raises(ZeroDivisionError):
        write_record(str(output), Provenance.describe(b"questions", "q"))
    for broken in (content[:-9], b"[]", b"1", b'{"path": ""}', content[:-2] + b', "x": 1}', b"\xff"):
        mark.write_bytes(broken)
        assert read_record(str(output)) is None
    mark.write_bytes(content)
    assert read_record(str(output)) == now
    output.write_bytes(b"")
    assert read_record(str(output)) is None
