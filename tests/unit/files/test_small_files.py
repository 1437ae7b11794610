"""Files of users besides models: texts, settings, lines, logits; and metadata, field by field."""

import math
import os
import re
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.errors import LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.files import jsonl_file as line_file
from localllm.files import logits_file, settings, text_file
from localllm.files.gguf import header_only as hollow
from localllm.files.gguf.metadata_reader import MetadataReader, count_strings, is_number, is_text
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.files.jsonl_file import JsonlFile
from localllm.files.settings import find_line, parse_settings, split_key
from localllm.files.text_file import require_encoding, strip_line_break
from localllm.system import files, locks

# ---- files of users -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        (b"", None, ""), ("ä\n".encode(), None, "ä"), (b"a\r\n", None, "a"),
        (b"a\n\n", None, "a\n"), (b"a\r", None, "a"),
        ("\ufeffä".encode(), None, "ä"), ("ä".encode("utf-16"), None, "ä"), ("\ufeffä".encode("utf-16-be"), None, "ä"),
        (b"\xe4", "latin-1", "ä"), ("ä".encode("utf-16-le"), "utf-16-le", "ä"),
        (b"a\xffb", None, "x: not UTF-8 at byte 1 (0xff)"), (b"\xff\xfea", None, "x: not UTF-16 at byte 2 (0x61)"),
        (b"\xe4", "ascii", "x: not ASCII at byte 0 (0xe4)"),
        (b"a", "undefined", "x: not UNDEFINED: "),
    ],
)  # fmt: skip
def test_a_text_file_is_decoded_without_its_last_line_break(tmp_path, monkeypatch, data, encoding, text):
    monkeypatch.chdir(tmp_path)
    Path("x").write_bytes(data)
    if ": not " in text:
        with pytest.raises(UsageError) as error:
            text_file.read_text("x", encoding)
        assert str(error.value).startswith(text)
    else:
        assert text_file.read_text("x", encoding) == text
    assert strip_line_break("a\n\r") == "a\n"


def test_missing_files_and_unknown_encodings_are_refused(tmp_path):
    with pytest.raises(UsageError) as error:
        text_file.read_text(tmp_path / "none")
    assert str(error.value) == f"{tmp_path / 'none'}: cannot be read: No such file or directory"
    for known in (None, "utf-8", "cp1252", "latin-1"):
        require_encoding(known)
    for name, shown in (("nope", "nope"), ("hex", "hex"), ("a\0b", r"'a\x00b'"), ("", "''")):
        with pytest.raises(UsageError) as error:
            require_encoding(name)
        assert str(error.value) == f"encoding {shown} is unknown; use, for example, utf-8, utf-16, latin-1 or cp1252"


TOML = """cache_gb = 2
[defaults]
threads = 4

[command.run]
temp = 0.2
[model."a.b"]
 "context" = 1
"""


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("cache_gb",), 1),
        (("defaults",), 2),
        (("defaults", "threads"), 3),
        (("defaults", "none"), 2),
        (("command", "run"), 5),
        (("command", "run", "temp"), 6),
        (("command", "run", "none"), 5),
        (("model", "a.b", "context"), 8),
        (("model", "a.b"), 7),
        (("none",), 1),
        (("command", "none"), 1),
    ],
)
def test_a_setting_is_located_by_its_line(keys, line):
    assert find_line(TOML, keys) == line
    assert split_key("""a."b.c".'d e'.f-g""") == ["a", "b.c", "d e", "f-g"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache_gb = -1", "line 1: cache_gb must be a number, 0 or greater"),
        ("cache_gb = true", "line 1: cache_gb must be a number, 0 or greater"),
        ("\ncache_gb = 1e9", "line 2: cache_gb must be a number, 0 or greater"),
        ("cache_gb = 'a'", "line 1: cache_gb must be a number, 0 or greater"),
        ("other = 1", "line 1: unknown key 'other'; available: cache_gb, [aliases], [defaults], [command], [model]"),
        ("model = 1", "line 1: model must be a table: [model]"),
        ("[command]\nrun = 1", "line 2: command must contain tables, such as [command.run]"),
        ("[model]\na = 1", "line 2: model must contain tables, such as [model.a]"),
        ("[aliases]\na = 1", "line 2: an alias must be a path or a name, in quotes"),
        ("[aliases]\nb = 'x'\na = ''", "line 3: an alias must be a path or a name, in quotes"),
        ("a = 1\nb = \n", "line 2: invalid value"),
        ("a = 1\n\nb = '''x\n", "line 4: expected \"'''\""),
    ],
)
def test_invalid_settings_are_refused_with_their_line(text, message):
    with pytest.raises(UsageError) as error:
        parse_settings(Path("config.toml"), text)
    assert str(error.value).partition(" (at end")[0] == f"config.toml, {message}"


def test_settings_are_read_with_defaults_and_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "get_config_path", lambda: tmp_path / "config.toml")
    empty = settings.load_settings()
    assert (empty.path, empty.cache_gb, empty.aliases, empty.defaults) == (tmp_path / "config.toml", None, {}, {})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "config.toml").write_text("cache_gb = 0\n[aliases]\na = '~/b'\n[model.m]\nx = 1\n", encoding="utf-8")
    loaded = settings.load_settings()
    assert (loaded.cache_gb, loaded.aliases, loaded.model) == (0, {"a": os.path.expanduser("~/b")}, {"m": {"x": 1}})
    assert str(loaded.make_error("wrong", "model", "m")) == f"{tmp_path / 'config.toml'}, line 4: wrong"
    (tmp_path / "config.toml").write_bytes(b"a\nb\n\xff")
    with pytest.raises(UsageError) as error:
        settings.load_settings()
    assert str(error.value) == f"{tmp_path / 'config.toml'}, line 3: the file must be UTF-8"


@pytest.mark.parametrize("can_replace", [True, False])
def test_dropped_lines_are_removed_from_the_file(tmp_path, monkeypatch, can_replace):
    """Drop them also where no open file can be replaced."""
    monkeypatch.setattr("localllm.files.jsonl_file.can_replace_open_files", lambda: can_replace and os.name != "nt")
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"id": "b"}\n{"id": "c')
    with JsonlFile(path, keep=lambda record: record["id"] != "a") as file:
        assert file.records == [{"id": "b"}]
        assert path.read_bytes() == b'{"id": "b"}\n'
    assert path.read_bytes() == b'{"id": "b"}\n'


@pytest.mark.parametrize(
    ("data", "records", "wrong"),
    [
        (b"", [], None), (b'{"id": "a"}\n', ["a"], None), (b'{"id": 1}\n{"id": "b"}\n{"i', [1, "b"], None),
        (b'{"id": 1}\n{"id": "b", "x', [1], None), (b"x", [], 1), (b'{"id": 1}\nx', [], 2), (b'{"id": 1.5}\n', [], 1),
        (b"[1]\n", [], 1), (b'{"id": 1}\n\n', [], 2), (b'{"x": 1}\n', [], 1), (b"[" * 99_999 + b"\n", [], 1),
    ],
)  # fmt: skip
def test_an_incomplete_last_line_is_removed_and_other_files_stay(tmp_path, data, records, wrong):
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    if wrong:
        with pytest.raises(UsageError) as error:
            JsonlFile(path).__enter__()
        expected = f"{path}: line {wrong} is not a record of an earlier run; give another output name"
        assert (str(error.value), path.read_bytes()) == (expected, data)
    else:
        with JsonlFile(path) as file:
            assert [record["id"] for record in file.records] == records
            file.write(b'{"id": "new"}\n')
        lines = path.read_bytes().splitlines()
        assert (len(lines), lines[-1]) == (len(records) + 1, b'{"id": "new"}')


def test_lines_are_written_whole_or_reported(tmp_path, monkeypatch):
    """Write piece by piece, too; remove a file in which nothing came to be, for an error."""
    path, write = tmp_path / "x.jsonl", os.write
    with JsonlFile(path) as file, monkeypatch.context() as slow:
        slow.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
        file.write(b'{"id": "new"}\n')
    assert path.read_bytes() == b'{"id": "new"}\n'

    def refuse(descriptor, data):
        raise OSError(28, "No space")

    with JsonlFile(path) as file, monkeypatch.context() as full, pytest.raises(LocalllmError) as error:
        full.setattr(os, "write", refuse)
        file.write(b"x")
    expected = f"{path}: No space; the records written so far stay, and the next run resumes"
    assert str(error.value) == expected
    for name, fails in (("empty", False), ("gone", True), ("kept", True)):
        with suppress(ZeroDivisionError), JsonlFile(tmp_path / name) as file:
            if name == "kept":
                file.write(b'{"id": 1}\n')
            assert not fails or 1 // 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "kept", "x.jsonl"]


def test_a_json_line_is_utf_8_unless_its_text_is_none():
    assert line_file.encode_line({"id": "ä"}) == '{"id": "ä"}\n'.encode()
    assert line_file.encode_line({"id": "ä\ud800"}) == b'{"id": "\\u00e4\\ud800"}\n'


@pytest.mark.skipif(sys.platform == "win32", reason="a file is replaced that is open")
def test_a_file_of_lines_is_closed_in_time(tmp_path, monkeypatch):
    """Close it at once where another process has it or it holds no record; else before or behind its replacement."""
    path, opened, closed, free = tmp_path / "x.jsonl", list[int](), list[tuple](), [False]

    def open_file(*given) -> int:
        opened.append(files.open_file(*given))
        return opened[-1]

    def close(descriptor: int) -> None:
        closed.append((descriptor, path.read_bytes()))
        os.close(descriptor)

    monkeypatch.setattr(line_file, "open_file", open_file)
    monkeypatch.setattr(line_file, "lock_file", lambda descriptor: free[0] and locks.lock_file(descriptor))
    monkeypatch.setattr(line_file, "os", SimpleNamespace(**(vars(os) | {"close": close})))
    synced = []
    monkeypatch.setattr(line_file, "sync_file", synced.append)
    one, two, three = (b'{"id": %d}\n' % number for number in (1, 2, 3))
    for content, message in ((b"", "another process is writing this file"), (b"other\n", "line 1 is not a record")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message), line_file.JsonlFile(path):
            pass
        assert closed == [(opened.pop(), content)] and not opened
        closed.clear()
        free[0] = True
    for can, first in ((True, two), (False, one + two)):
        path.write_bytes(one + two)
        monkeypatch.setattr(line_file, "can_replace_open_files", lambda can=can: can)
        with line_file.JsonlFile(path, keep=lambda record: record["id"] > 1) as file:
            assert file.records == [{"id": 2}] and [content for _, content in closed] == [first]
            with pytest.raises(UsageError, match="another process"), line_file.JsonlFile(path):
                pass
            closed.pop()
            opened.pop()
            file.write(three)
        assert synced == opened[1:]
        synced.clear()
        assert [each for each, _ in closed] == opened and closed[-1][1] == path.read_bytes() == two + three
        opened.clear()
        closed.clear()


# ---- models of which the header is there ----------------------------------------------------------------------------


def test_a_header_is_read_without_the_weights(tmp_path, monkeypatch):
    """Fetch the header in pieces, each as long as all before; name errors by the names that people know."""
    content, asked = np.arange(1000, dtype=np.float32), list[tuple]()
    write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, [OutputTensor.from_array("x", content)])
    data = (tmp_path / "m.gguf").read_bytes()

    def fetch(name: str, start: int, end: int) -> bytes:
        asked.append((name, start, end))
        return data[start:end]

    monkeypatch.setattr(hollow, "FIRST_BYTES", 16)
    with hollow.open_header_only({"m.gguf": len(data)}, fetch) as (model, fetched):
        assert (model.path, [*model.tensors], model.tensors["x"].shape) == ("m.gguf", ["x"], (1000,))
        assert asked == [
            ("m.gguf", first, last) for first, last in pairwise([0, 16, 32, 64, 128, 256]) if first < fetched
        ]
        assert asked[-1][2] == fetched < 300 and model.parts == {"m.gguf": ["x"]}
    with pytest.raises(ModelError) as error, hollow.open_header_only({"m.gguf": len(data) - 64}, fetch):
        pass
    assert str(error.value).startswith("m.gguf: ") and str(tmp_path) not in str(error.value)
    assert "/" not in str(error.value)

    class Full:
        def truncate(self, size: int) -> None:
            raise OSError("No space")

    with pytest.raises(LocalllmError, match=r"^m\.gguf: cannot write its header to the temporary folder: No space$"):
        hollow.write_header(Full(), "m.gguf", 99, fetch)


# ---- files of logits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [[3, 1, -1, 2.5], [0, -9, -15.9, -40, 5], [2, 2, 2], [7]])
def test_logits_in_16_bits_are_exact_to_half_a_step(logits):
    """Divide the distance between the largest and the least, which is 16 at most, into 65535 steps."""
    numbers = np.array(logits, np.float32)
    log_sum = float(np.log(np.exp(numbers.astype(float)).sum()))
    row = np.full(logits_file.compute_row_width(len(logits)), 7, np.uint16)
    logits_file.quantize_logits(numbers, log_sum, row, np.zeros_like(numbers))
    unpacked = logits_file.dequantize_logits(row, np.zeros_like(numbers))
    floor = numbers.max() - logits_file.MAX_DISTANCE
    step = (numbers.max() - max(numbers.min(), floor)) / 65535
    assert np.abs(unpacked - (np.maximum(numbers, floor) - log_sum)).max() <= step / 2 + 2e-6
    scale, least = row[:4].view(np.float32)
    assert scale == pytest.approx(step) and least == pytest.approx(max(numbers.min(), floor) - log_sum)
    assert row[4 + int(numbers.argmax())] == (65535 if step else 0) and len(row) % 2 == 0
    assert row[4 + len(logits) :].tolist() == [7] * (len(logits) % 2)


def test_the_least_likely_logits_are_kept_alike():
    """Raise them to 16 below the largest; where all are alike, there is nothing to scale by."""
    for logits, expected in (([0, -15, -16, -17, -99], [0, -15, -16, -16, -16]), ([3, 3, 3, 3, 3], [3] * 5)):
        numbers, row = np.array(logits, np.float32), np.full(logits_file.compute_row_width(5), 7, np.uint16)
        with np.errstate(all="raise"):
            logits_file.quantize_logits(numbers, 0.0, row, np.empty(5, np.float32))
        np.testing.assert_allclose(logits_file.dequantize_logits(row, np.empty(5, np.float32)), expected, atol=3e-4)
        assert numbers.tolist() == logits and row[-1] == 7


def test_a_file_of_logits_reads_back_and_refuses_damage(tmp_path):
    chunks = np.arange(10).reshape(2, 5)
    assert [logits_file.count_scored_tokens(size) for size in (4, 5, 512)] == [1, 2, 255]
    path, rows = tmp_path / "x", np.arange(2 * 2 * 8, dtype=np.uint16)
    with logits_file.LogitsWriter(path, chunks, 3) as file:
        file.write(rows[:16])
        file.write(rows[16:])
    read = logits_file.LogitsFile.open(path)
    assert (read.chunks.tolist(), read.vocab_size) == (chunks.tolist(), 3)
    assert read.rows.shape == (2, 2, 8) and read.rows.reshape(-1).tolist() == rows.tolist()
    del read
    whole, start = path.read_bytes(), len(logits_file.MAGIC)

    def with_number(place: int, number: int) -> bytes:
        at = start + 4 * place
        return whole[:at] + number.to_bytes(4, "little", signed=True) + whole[at + 4 :]

    none, damaged, short = (
        "not a logits file; --save-logits writes one", "the logits file is damaged; write it again with --save-logits",
        "the logits file is incomplete; write it again with --save-logits",
    )  # fmt: skip
    for data, message in (
        (whole[:19], none), (b"x" + whole[1:], none), (whole[:20], short), (whole[:-1], short), (whole + b"x", short),
        (with_number(0, 3), damaged), (with_number(1, 0), damaged), (with_number(2, 0), damaged),
        (with_number(2, -1), damaged),
        (with_number(0, 4), short), (with_number(1, 1), short), (with_number(2, 1), short),
    ):  # fmt: skip
        (tmp_path / "y").write_bytes(data)
        with pytest.raises(ModelError) as error:
            logits_file.LogitsFile.open(tmp_path / "y")
        assert str(error.value) == f"{tmp_path / 'y'}: {message}"
    with pytest.raises(UsageError) as error:
        logits_file.LogitsFile.open(tmp_path / "none")
    assert str(error.value) == f"{tmp_path / 'none'}: cannot be read: No such file or directory"
    with pytest.raises(ZeroDivisionError), logits_file.LogitsWriter(tmp_path / "z", chunks, 3) as file:
        file.write(rows)
        1 // 0  # noqa: B018
    assert not (tmp_path / "z").exists()


# ---- metadata -------------------------------------------------------------------------------------------------------

TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
FIELDS = {
    "one": 1, "yes": True, "half": 0.5, "zero": 0.0, "tiny": TINY, "less": TINY / 2, "below": -0.5, "none": math.nan,
    "all": math.inf, "text": "a", "numbers": np.arange(3), "table": np.zeros((1, 3)), "names": ["a", "b"], "mixed": [1],
    "many": [*range(9)], "some": [*range(8)], "empty": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda c: c.read_integer("one", None, 1, 5), 1), (lambda c: c.read_integer("one", None, 0, 1), 1),
        (lambda c: c.read_integer("none there", 5, 1, 5), 5),
        (lambda c: c.read_integer("zero", 1, 0, 5), "a number from 0 to 5 (found 0.0)"),
        (lambda c: c.read_integer("one", None, 2, 5), "a number from 2 to 5 (found 1)"),
        (lambda c: c.read_integer("one", None, 0, 0), "a number from 0 to 0 (found 1)"),
        (lambda c: c.read_integer("yes", None, 0, 5), "a number from 0 to 5 (found True)"),
        (lambda c: c.read_integer("none there", None, 0, 5), "a number from 0 to 5 (found missing)"),
        *((lambda c, name=name: c.read_number(name), FIELDS[name]) for name in ("one", "half", "zero", "tiny")),
        (lambda c: c.read_number("none there", 2.5), 2.5),
        *((lambda c, name=name: c.read_number(name), f"a positive number (found {told})") for name, told in (
            ("less", TINY / 2), ("below", -0.5), ("none", "nan"), ("all", "inf"), ("yes", True), ("text", "a"))),
        (lambda c: c.read_flag("yes"), True), (lambda c: c.read_flag("none there", False), False),
        (lambda c: c.read_flag("one"), "true or false (found 1)"), (lambda c: c.read_text("text"), "a"),
        (lambda c: c.read_text("none there", "b"), "b"), (lambda c: c.read_text("one"), "a string (found 1)"),
        (lambda c: c.read_array("numbers", "iu", "numbers").tolist(), [0, 1, 2]),
        (lambda c: c.read_array("numbers", "f", "fractions"), "fractions (found [0 1 2])"),
        (lambda c: c.read_array("table", "f", "fractions"), "fractions (found [[0. 0. 0.]])"),
        (lambda c: c.read_array("many", "i", "numbers"), "numbers (found an array of 9)"),
        (lambda c: c.read_array("some", "i", "numbers"), "numbers (found [0, 1, 2, 3, 4, 5, 6, 7])"),
        (lambda c: c.read_strings("names"), ["a", "b"]), (lambda c: c.read_strings("empty"), []),
        (lambda c: c.read_strings("mixed"), "an array of strings (found [1])"),
        (lambda c: c.read_strings("text"), "an array of strings (found a)"),
        (
            lambda c: (c.has("one"), c.has("none there"), c.read_raw("one"), c.read_raw("none there", 3)),
            (True, False, 1, 3),
        ),
    ],
)  # fmt: skip
def test_metadata_of_a_wrong_type_or_range_is_refused(ask, answer):
    """Check both ends of each range, and the message for others."""
    fields = MetadataReader({f"llama.{name}": value for name, value in FIELDS.items()}, "llama.", "m.gguf")
    if isinstance(answer, str) and " (found " in answer:
        with pytest.raises(ModelError) as error:
            ask(fields)
        assert re.fullmatch(r"m\.gguf: llama\.[a-z ]+ must be " + re.escape(answer), str(error.value))
    else:
        assert ask(fields) == answer


def test_metadata_errors_name_the_key_and_the_file():
    bare = MetadataReader({}, "llama.")
    assert str(bare.make_error("wrong")) == "wrong" and bare.format_key("a\nb") == repr("llama.a\nb")
    unsupported = MetadataReader({}, "", "m.gguf").make_unsupported_error("no")
    assert (type(unsupported), str(unsupported)) == (UnsupportedError, "m.gguf: no")
    values = {"list": ["a", "b"], "text": "a"}
    assert [count_strings(values, key) for key in ("list", "text", "none")] == [2, None, None]
    assert [is_text(values, key) for key in ("list", "text", "none")] == [False, True, False]
    assert [is_number(value) for value in (0, LARGEST, TINY, TINY / 2, -1, math.inf)] == [True] * 3 + [False] * 3
