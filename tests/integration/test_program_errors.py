"""Test how the program starts and ends when something is wrong: inputs, outputs, closed streams, memory, mistakes."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from project import ROOT

import localllm
from localllm import builtin_model
from localllm.arch.weights import count_table_bytes
from localllm.cli import prompt_input as prompts
from localllm.cli.argv import ParsedArgs, replace_option_names
from localllm.cli.main import MIN_MEMORY
from localllm.cli.registry import list_params
from localllm.cli.terminal import output as terminal
from localllm.engine import backend
from localllm.engine.backend import WORKING_BYTES
from localllm.errors import ContextError, ModelError, UsageError
from localllm.files import text_file
from localllm.files.gguf.file import GGUFFile
from localllm.files.safe_file import WriteLock
from localllm.kernels.build import faults
from localllm.services.records.lines import read_records
from localllm.text.messages import validate_messages

PROGRAM = [sys.executable, "-m", "localllm"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
GREEDY = ["--temp", "0", "-n", "4"]

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and streams of POSIX")


@pytest.fixture
def folder(tiny: str, tmp_path: Path) -> Path:
    """Make a folder with every input of a command: model.gguf, text, lines, imatrix."""
    shutil.copy(tiny, tmp_path / "model.gguf")
    (tmp_path / "text").write_text("hello world " * 40)
    (tmp_path / "lines").write_text("Hi\n")
    return tmp_path


def shell(script: str, *arguments: object, **more) -> subprocess.CompletedProcess[bytes]:
    """Run a line of sh in which "$@" is the program with the arguments."""
    command = ["sh", "-c", script, "sh", *PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120, env=ENVIRONMENT, **more)


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Outputs.


@pytest.mark.parametrize(
    "arguments",
    [
        "perplexity model.gguf text -c 16 --save-logits model.gguf",
        "perplexity model.gguf text -c 16 --save-logits text",
        "perplexity model.gguf text -c 16 --save-logits link",
        "imatrix model.gguf text -c 16 -o model.gguf",
        "imatrix model.gguf text -c 16 -o text",
        "imatrix model.gguf link.part -c 16 -o link",  # where it keeps what it knows so far
        "imatrix --in-file imatrix --in-file imatrix -o imatrix",
        "imatrix model.gguf text -c 16 --in-file imatrix -o imatrix",
        "map model.gguf lines -o lines",
        "map model.gguf lines -o model.gguf",
        "map model.gguf lines -f text -o text",
        "quantize model.gguf model.gguf Q8_0",
        "quantize model.gguf link Q8_0",
        "quantize model.gguf imatrix Q8_0 --imatrix imatrix",
        "run model.gguf -p x --receipt model.gguf",
        "run model.gguf -p x --receipt link",
        "run model.gguf -f text --receipt text",
    ],
)
def test_an_output_never_replaces_an_input(folder: Path, cli, refused, monkeypatch, arguments: str):
    (folder / "link").symlink_to(folder / "model.gguf")
    (folder / "link.part").write_text("hello world " * 40)
    if arguments.startswith("map"):
        (folder / "text").write_text("Say {line}")
    monkeypatch.chdir(folder)
    if "imatrix imatrix" in arguments or "file imatrix" in arguments:
        assert cli("imatrix", "model.gguf", "text", "-c", "16", "--chunks", "2", "-o", "imatrix")[0] == 0
    before = read_all(folder)
    assert re.fullmatch(
        r"localllm: error: .*the output is also an input; choose another name\n", refused(arguments.split())
    )
    assert read_all(folder) == before


def test_quantize_replaces_its_default_output_only_with_force(folder: Path, cli, refused):
    model, target = folder / "model.gguf", folder / "model-Q8_0.gguf"
    assert cli("quantize", model, "Q8_0")[0] == 0
    whole = target.read_bytes()
    target.write_bytes(b"precious")
    message = f"localllm: error: {target}: this file exists; --force overwrites it, or give another OUT\n"
    for options in ((), ("--dry-run",)):
        assert refused(["quantize", model, "Q8_0", *options]) == message
        assert target.read_bytes() == b"precious"
    assert cli("quantize", model, "Q8_0", "--dry-run", "--force")[0] == 0 and target.read_bytes() == b"precious"
    assert cli("quantize", model, "Q8_0", "--force")[0] == 0 and target.read_bytes() == whole
    target.write_bytes(b"named by the user")
    assert cli("quantize", model, target, "Q8_0")[0] == 2 and target.read_bytes() == b"named by the user"
    assert cli("quantize", model, target, "Q8_0", "--force")[0] == 0 and target.read_bytes() == whole
    assert cli("quantize", model, target, "Q8_0")[0] == 0 and target.read_bytes() == whole


@pytest.mark.parametrize(
    ("command", "out", "written"),
    [("quantize", "out.gguf", "out.gguf"), ("split", "out", "out-00001-of-00001.gguf")],
)
def test_two_commands_do_not_write_one_file_at_once(folder: Path, refused, command: str, out: str, written: str):
    with WriteLock(str(folder / written)):
        words = [command, folder / "model.gguf", folder / out, *["Q8_0"] * (command == "quantize")]
        problem = "another localllm is writing this file; wait until it has finished"
        assert refused(words) == f"localllm: error: {folder}/{written}: {problem}\n"
    assert not (folder / written).exists()


@posix
@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
@pytest.mark.parametrize("name", ["a\u3000b\xa0c  d", "new\nline", "back\\slash", os.fsdecode(b"\xff")])
def test_sha256sum_accepts_what_verify_prints(tiny: str, tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    shutil.copy(tiny, tmp_path / name / "m.gguf")
    done = shell('"$@" | tail -1 | sha256sum -c', "verify", tmp_path / name / "m.gguf")
    assert done.returncode == 0 and done.stdout.endswith(b"OK\n")


@posix
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("how", ["run TINY -p Hi -n 4 --json", "inspect TINY", "--version"])
def test_an_answer_that_cannot_be_written_is_an_error(tiny: str, how: str):
    done = shell('"$@" >/dev/full', *how.replace("TINY", tiny).split(), stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (1, b"localllm: error: No space left on device\n")


@posix
@pytest.mark.parametrize("streams", [">&-", ">&- <&-", ">&- 2>&-"])
def test_a_closed_stdout_is_an_error(tiny: str, streams: str):
    done = shell(f'"$@" {streams}', "run", tiny, "-p", "Hi", *GREEDY)
    message = b"" if "2>&-" in streams else b"localllm: error: stdout is closed: open it or redirect it to a file\n"
    assert (done.returncode, done.stderr) == (1, message)


@posix
@pytest.mark.parametrize("streams", ["2>&-", "2>&- <&-"])
@pytest.mark.parametrize(
    ("arguments", "code"), [("run none.gguf -p x", 3), ("frobnicate", 2), ("", 2), ("list --blub", 2)]
)
def test_messages_never_go_to_stdout_when_stderr_is_closed(arguments: str, code: int, streams: str):
    streams += "" if "<" in streams else " </dev/null"
    done = shell(f'"$@" {streams}', *arguments.split())
    assert (done.returncode, done.stdout) == (code, b"")


@posix
def test_a_warning_stays_out_of_the_answer_when_stderr_is_closed(tiny: str):
    answer = shell('LOCALLLM_BLUB=1 "$@" </dev/null', "run", tiny, "-p", "Hi", *GREEDY)
    assert b"LOCALLLM_BLUB" in answer.stderr
    done = shell('LOCALLLM_BLUB=1 "$@" 2>&- </dev/null', "run", tiny, "-p", "Hi", *GREEDY)
    assert (done.returncode, done.stdout) == (0, answer.stdout)


@posix
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux' /proc")
def test_child_programs_inherit_open_streams():
    script = "import os; from localllm.cli.main import open_closed_streams; open_closed_streams(); "
    script += (
        "os.write(9, repr([(os.readlink(f'/proc/self/fd/{n}'), os.get_inheritable(n)) for n in range(3)]).encode())"
    )
    done = shell(f'"{sys.executable}" -c "$2" 9>&1 <&- >&- 2>&-'.replace("$2", script))
    assert done.stdout.decode() == str([("/dev/null", True)] * 3)


@pytest.mark.slow
@posix
def test_no_file_takes_the_descriptor_of_a_closed_stream(folder: Path):
    """Keep warnings out of an output that would get the lowest free descriptor."""
    done = shell('"$@" 2>&- <&-', "quantize", folder / "model.gguf", folder / "out.gguf", "Q8_0")
    assert done.returncode == 0
    shell('"$@"', "quantize", folder / "model.gguf", folder / "again.gguf", "Q8_0")
    assert (folder / "out.gguf").read_bytes() == (folder / "again.gguf").read_bytes()


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ("--sampling-seq mt --repeat-penalty 1.3", "--repeat-penalty (not in --samplers)"),
        (
            "--samplers top_k;temperature --dry-multiplier 0.8 --top-p 0.5",
            "--top-p, --dry-multiplier (not in --samplers)",
        ),
        ("--mirostat 2 --presence-penalty 1", "--presence-penalty (mirostat replaces all steps except temperature)"),
        ("--sampling-seq emt --repeat-penalty 1.3", ""),
        ("--sampling-seq mt --repeat-penalty 1", ""),
        ("--repeat-penalty 1.3", ""),
    ],
)
def test_a_penalty_missing_from_the_samplers_is_reported(tiny: str, cli, options: str, unused: str):
    code, _, err = cli("run", tiny, "-p", "Hi", "-n", "2", "--no-stdin", *options.split())
    assert (code, err) == (0, f"localllm: ignored (no effect): {unused}\n" if unused else "")


# The prompt.


class Endless(io.RawIOBase):
    """A pipe that never ends."""

    def __init__(self, piece: bytes):
        self.records_input, self._piece = 0, piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = (self._piece * (len(buffer) // len(self._piece) + 1))[: len(buffer)]
        buffer[:] = data
        self.records_input += len(data)
        return len(data)


@pytest.mark.parametrize(("encoding", "factor"), [(None, 1), ("latin-1", 4)])
def test_a_prompt_that_cannot_fit_is_refused_while_it_is_read(encoding: str | None, factor: int):
    source, most = Endless(b"hello "), 5 * prompts.MIN_CHECKED_BYTES
    with pytest.raises(ContextError, match="alone exceed the context"):
        prompts.read_bounded(io.BufferedReader(source), lambda: most, encoding)
    assert most * factor < source.records_input <= most * factor + 2 * prompts.MIN_CHECKED_BYTES
    with pytest.raises(ContextError):
        prompts.read_bounded(
            io.BytesIO(b"\xff\xfe" + b"a\0" * 5 * prompts.MIN_CHECKED_BYTES), lambda: prompts.MIN_CHECKED_BYTES
        )
    long = b"x" * (3 * prompts.MIN_CHECKED_BYTES)
    assert prompts.read_bounded(io.BytesIO(long), lambda: len(long)) == long


def test_a_short_prompt_does_not_need_the_limit():
    def asked() -> int:
        raise AssertionError

    assert prompts.read_bounded(io.BytesIO(b"short"), asked) == b"short"


def test_an_endless_pipe_is_refused(tiny: str):
    command = [*PROGRAM, "run", tiny, "-c", "100", *GREEDY]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdin is not None and process.stderr is not None
    with suppress(OSError):  # until nobody reads any more
        while True:
            os.write(process.stdin.fileno(), b"y\n" * 1000)
    assert process.wait(120) == 4
    message = process.stderr.read().decode()
    assert re.fullmatch(
        r"localllm: error: the prompt is too long: its first \d+ bytes alone exceed the context; shorten it, or .*\s",
        message,
    )
    process.stdin.close()
    process.stderr.close()


def test_the_limit_of_prompt_bytes_depends_on_the_context(tiny: str):
    from localllm.api import get_max_prompt_bytes

    with localllm.open(tiny) as model:
        text = "<|endoftext|> world" * 50
        assert len(text.encode()) <= model.tokenizer.compute_max_bytes(len(model.tokenize(text, special=True)))
    longest = len("<|endoftext|>")
    assert (get_max_prompt_bytes(tiny, 30), get_max_prompt_bytes(tiny)) == (30 * longest, 200_000 * longest)


@pytest.mark.slow
@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_every_text_is_shorter_than_the_bound_by_its_tokens(name: str):
    tokenizer = localllm.Tokenizer.from_metadata(vocabularies.metadata(name))
    for text in [*vocabularies.GIVEN["texts"], *vocabularies.PROSE.splitlines()]:
        assert len(text.encode()) <= tokenizer.compute_max_bytes(len(tokenizer.encode(text)))


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 5])
def test_an_unknown_character_may_be_one_token(longest: int, monkeypatch):
    """Count 4 bytes in the bound on prompts, even if all pieces are shorter."""
    tokenizer = localllm.Tokenizer.from_file(builtin_model())
    monkeypatch.setattr(tokenizer, "pieces", ["a" * longest, "b"])
    monkeypatch.setattr(tokenizer, "_swallows", False)
    assert tokenizer.compute_max_bytes(10) == 10 * max(longest, 4)
    tokenizer = localllm.Tokenizer.from_file(builtin_model())  # the longest piece is found once
    monkeypatch.setattr(tokenizer, "pieces", ["\u2581" * longest])
    monkeypatch.setattr(tokenizer, "_swallows", False)
    assert tokenizer.compute_max_bytes(10) == 10 * max(3 * longest, 4)
    monkeypatch.setattr(tokenizer, "_swallows", True)
    assert tokenizer.compute_max_bytes(10) == sys.maxsize


TEXTS = [
    ("für 👍".encode(), None, "für 👍"),
    (b"\xef\xbb\xbfx", None, "x"),
    ("für 👍".encode("utf-16"), None, "für 👍"),
    (b"\xfe\xff" + "für 👍".encode("utf-16-be"), None, "für 👍"),
    (b"f\xfcr", "latin-1", "für"),
    (b"\x93x\x94", "cp1252", "“x”"),
    ("für".encode("utf-16-le"), "utf-16-le", "für"),
    (b"\xef\xbb\xbfx", "utf-8", "x"),
    (b"", None, ""),
]


@pytest.mark.parametrize(("data", "encoding", "text"), TEXTS)
def test_texts_are_decoded_by_bom_or_encoding(data: bytes, encoding: str | None, text: str):
    assert text_file.decode_text(data, "name", encoding) == text


@pytest.mark.parametrize(
    ("data", "encoding", "problem"),
    [
        (b"abc\xffd", None, r"name: not UTF-8 at byte 3 \(0xff\)"),
        (b"ab\xc3", None, r"name: not UTF-8 at byte 2 \(0xc3\)"),
        (b"\xff\xfea\0b", None, r"name: not UTF-16 at byte 4 \(0x62\)"),
        (b"\x81", "cp1252", r"name: not CP1252 at byte 0 \(0x81\)"),
    ],
)
def test_undecodable_texts_are_refused(data: bytes, encoding: str | None, problem: str):
    with pytest.raises(UsageError, match=problem):
        text_file.decode_text(data, "name", encoding)


def test_encodings_of_prompts_are_detected_or_given(tiny: str, cli, refused, folder: Path):
    expected = cli("run", tiny, "-p", "für", *GREEDY)
    assert expected[0] == 0
    latin, marked = folder / "latin", folder / "marked"
    latin.write_bytes(b"f\xfcr\n")
    marked.write_bytes("für\r\n".encode("utf-16"))
    assert cli("run", tiny, "-f", marked, *GREEDY) == expected
    assert cli("run", tiny, *GREEDY, stdin=marked.read_bytes()) == expected
    assert cli("run", tiny, *GREEDY, "-f", latin, "--encoding", "latin-1") == expected
    assert cli("chat", tiny, *GREEDY, "--encoding", "latin-1", stdin=b"f\xfcr") == expected
    for source, name in ((["-f", latin], str(latin)), ([], "stdin")):
        problem, advice = f"{name}: not UTF-8 at byte 1 (0xfc)", "set another encoding with --encoding NAME\n"
        message = f"localllm: error: {problem}; {advice}"
        assert cli("run", tiny, *source, "--encoding", "utf-8", stdin=b"f\xfcr") == (2, "", message)
        (folder / "binary").write_bytes(b"f\xfcr\0")
        assert cli("run", tiny, "-f", folder / "binary")[:2] == (2, "")
        message = f"localllm: warning: {problem}; replaced 1 byte in all; {advice}"
        replaced = cli("run", tiny, "-p", "f\ufffdr", *GREEDY)
        stdin_argument = {} if source else {"stdin": b"f\xfcr"}
        assert cli("run", tiny, *source, *GREEDY, **stdin_argument) == (0, replaced[1], message)
    message = "localllm: error: -p must be UTF-8 (found byte 0xfc at character 1): put the text into a file"
    assert cli("run", tiny, "-p", "f\udcfcr")[2].startswith(message)
    assert cli("run", tiny, "-p", "f\udcc3\udcbcr", "-n", "1")[0] == 0, "UTF-8 in a locale without it"
    for unknown in ("utf-9", "hex", "a\0b", ""):
        assert re.match(
            "localllm: error: --encoding .* is unknown", refused(["run", tiny, "-p", "x", "--encoding", unknown])
        )


@pytest.mark.parametrize(
    "arguments", ["perplexity TINY latin -c 16", "imatrix TINY latin -o out", "tokenize TINY --encoding utf-8"]
)
def test_other_commands_refuse_undecodable_texts(tiny: str, refused, folder: Path, monkeypatch, arguments: str):
    monkeypatch.chdir(folder)
    Path("latin").write_bytes(b"f\xfcr" * 100)
    assert re.fullmatch(
        r"localllm: error: (latin|stdin): not UTF-8 at byte 1 \(0xfc\).*\n",
        refused([*arguments.replace("TINY", tiny).split()], stdin=b"f\xfcr" * 100),
    )


def test_invalid_bytes_of_a_diff_give_one_warning(tiny: str, cli, refused, folder: Path):
    """Read the rest in every command, and report the number of invalid bytes once."""
    diff = b"+f\xfcr\n-\xe9\xe8 caf\xe9\n+\xc3\xbc\n"
    warning = (
        r"localllm: warning: stdin: not UTF-8 at byte 2 \(0xfc\); replaced 4 bytes in all; "
        r"set another encoding with --encoding NAME\n"
    )
    code, out, err = cli("tokenize", tiny, stdin=diff)
    assert code == 0 and re.fullmatch(warning, err), err
    assert out == cli("tokenize", tiny, stdin=diff.decode(errors="replace").encode())[1]
    ask = ["map", tiny, *GREEDY, "-n", "1", "-p", "{line}"]
    code, out, err = cli(*ask, stdin=diff)
    assert code == 0 and re.fullmatch(warning, err), err
    assert [json.loads(line)["input"] for line in out.splitlines()] == ["+f\ufffdr", "-\ufffd\ufffd caf\ufffd", "+ü"]
    code, out, err = cli(*ask, "--encoding", "latin-1", stdin=b"f\xfcr\n")
    assert (code, json.loads(out)["input"], err) == (0, "für", "")
    refused([*ask, "--encoding", "utf-8"], "stdin: not UTF-8 at byte 2 (0xfc)", stdin=diff)


def test_map_decodes_its_lines():
    first, second = read_records(b"f\xfcr\nf\xc3\xbcr\n")
    assert first.error == "line 1 is not UTF-8 at byte 1" and (second.input, second.error) == ("für", "")
    assert [record.input for record in read_records("für\nx".encode("utf-16"))] == ["für", "x"]


def test_stdin_is_read_by_name_and_not_with_no_stdin(tiny: str, cli):
    expected = cli("run", tiny, "-p", "Hi", *GREEDY)
    assert cli("run", tiny, "-f", "-", *GREEDY, stdin=b"Hi\n") == expected
    assert cli("run", tiny, "-p", "Hi", "--no-stdin", *GREEDY, stdin=b"more") == expected
    assert cli("run", tiny, "-p", "Hi", "-f", "-", *GREEDY, stdin=b"more") == cli(
        "run", tiny, "-p", "Hi", *GREEDY, stdin=b"more"
    )
    assert cli("run", tiny, "--no-stdin", stdin=b"Hi")[0] == 2


SILENCE = b"localllm: waiting for input on stdin; use --no-stdin or </dev/null if there is none, Ctrl-C to quit\n"


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["run TINY -p x -n 1", "run TINY -f - -n 1", "chat TINY -n 1", "map TINY -n 1", "tokenize TINY"]
)
def test_a_silent_stdin_is_reported(tiny: str, arguments: str):
    """Print one line after two seconds, and read what arrives later."""
    command = [*PROGRAM, *arguments.replace("TINY", tiny).split()]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as process:
        assert process.stderr.readline() == SILENCE
        out, _ = process.communicate(b"Hi\n", timeout=60)
    quick = subprocess.run(command, input=b"Hi\n", capture_output=True, timeout=60, env=ENVIRONMENT)
    assert (process.returncode, SILENCE in quick.stderr, bool(out)) == (0, False, True)


def test_a_stream_is_silent_only_while_nothing_arrives(monkeypatch):
    from localllm.system.terminal import is_silent

    read, write = os.pipe()
    with open(read, "rb") as source, open(write, "wb", buffering=0) as sink:
        assert is_silent(source, 0.01)
        sink.write(b"x")
        assert not is_silent(source, 0.01)
        sink.close()
        source.read()
        assert not is_silent(source, 0.01)  # its end is something, too
    assert not is_silent(source, 0.01) and not is_silent(None, 0.01) and not is_silent(io.BytesIO(), 0.01)


# What a shell's `while read -r word; do ...; done` does: reads no more than a line before a program gets its stdin.
LOOP = """
import os, subprocess, sys
while word := os.read(0, 2):
    subprocess.run([*sys.argv[1:], "-p", word.strip(), "--no-stdin"], stdout=subprocess.DEVNULL, check=True)
    os.write(1, word)
"""


def test_a_command_in_a_read_loop_does_not_consume_the_loops_stdin(tiny: str):
    command = [sys.executable, "-c", LOOP, *PROGRAM, "run", tiny, *GREEDY]
    done = subprocess.run(command, input=b"a\nb\n", capture_output=True, timeout=120, env=ENVIRONMENT)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [b"a", b"b"], b"")


# Mistakes.


@pytest.mark.parametrize("command", ["run", "chat", "inspect", "tokenize", "perplexity", "imatrix", "bench", "warmup"])
@pytest.mark.parametrize("model", ["", "missing.gguf", "."])
def test_every_command_refuses_a_missing_model(cli, folder: Path, monkeypatch, command: str, model: str):
    """Exit with the same code, also for an empty name."""
    monkeypatch.chdir(folder)
    more = {"perplexity": ["text"], "imatrix": ["text", "-o", "out"], "tokenize": ["x"]}.get(command, [])
    code, out, err = cli(command, model, *more, stdin=b"Hi")
    assert (code, out) == (3, "")
    assert re.fullmatch(r"localllm: error: .*(no such file|a directory).*\n", err)


@pytest.mark.parametrize(
    "arguments",
    [
        "run TINY -f missing", "quantize TINY x Q8_0 --imatrix missing", "imatrix --in-file missing -o out",
        "perplexity TINY --kl-divergence --base missing", "map TINY missing",
        "map TINY -f missing", "perplexity TINY missing",
        "perplexity TINY .", "imatrix TINY missing -o out", "replay missing", "run TINY -p x --receipt no/r",
        "perplexity TINY text --save-logits no/x", "imatrix TINY text -o no/x", "map TINY lines -o no/x",
        "quantize TINY no/x Q8_0", "run TINY -p x -t 0", "perplexity TINY text -t 0", "imatrix TINY text -o x -t 0",
        "bench TINY -t 0", "quantize TINY x Q8_0 -t 0", "map TINY lines -t 0", "chat TINY -t 0", "run TINY -p x -c -1",
        "chat TINY -c -1", "map TINY lines -c -1", "perplexity TINY text -c -1",
    ],
)  # fmt: skip
def test_the_same_mistake_has_the_same_exit_code(tiny: str, refused, folder: Path, monkeypatch, arguments: str):
    monkeypatch.chdir(folder)
    assert re.fullmatch(r"localllm: error: .+\n", refused([*arguments.replace("TINY", tiny).split()], stdin=b"Hi"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "-3"], "-n must be 0 or greater, not -3"),
        (["-n-3"], "-n must be 0 or greater, not -3"),
        (["--max-tokens=-3"], "--max-tokens must be 0 or greater, not -3"),
        (["--top-p", "2"], "--top-p must be above 0 and at most 1, not 2.0"),
        (["--temp", "nan"], "--temp must be a number, not nan"),
    ],
)
def test_errors_name_options_as_they_were_typed(tiny: str, refused, words: list[str], message: str):
    assert refused(["run", tiny, "-p", "x", *words]).startswith(f"localllm: error: {message}")


def test_an_option_that_was_not_typed_has_its_longest_name():
    params = list_params("run")
    assert replace_option_names("max_tokens must be less", params, ParsedArgs(), {}) == "--max-tokens must be less"
    assert replace_option_names("the file max_tokens.gguf", params, ParsedArgs(), {}) == "the file max_tokens.gguf"
    assert replace_option_names("model of a prompt", params, ParsedArgs(), {}) == "model of a prompt"


@pytest.mark.parametrize("name", ["keys", "threads", "stop", "max_tokens", "top_k", "n"])
def test_file_names_are_not_taken_for_option_names(tiny: str, cli, tmp_path: Path, monkeypatch, name: str):
    """Use files named like options in Python, given as arguments and in the environment."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("short\n")
    Path(name).chmod(0o600)
    problem = "each key must have at least 8 characters, all ASCII (found 5 characters): replace it"
    message = f"localllm: error: {name}: {problem}\n"
    assert cli("serve", tiny, "--api-key-file", name)[2] == message
    monkeypatch.setenv("LOCALLLM_API_KEY_FILE", name)
    assert cli("serve", tiny)[2] == message
    monkeypatch.delenv("LOCALLLM_API_KEY_FILE")
    Path(name).write_text("# none\n")
    assert cli("serve", tiny, "--api-key-file", name)[2].startswith(
        f"localllm: error: {name} must have at least one key, "
    )
    assert cli("run", f"./{name}/{name}", "-p", "x")[2].startswith(f"localllm: error: ./{name}/{name}")
    assert cli("run", tiny, "-p", name, "-n", "-3")[2].startswith("localllm: error: -n must be 0 or greater")
    assert cli("run", tiny, "-p", name, "--top-k", "-3")[2].startswith("localllm: error: --top-k must be")


@pytest.mark.parametrize("text", ["a 'top_k b' c", "the file top_k b is gone", "top_k b: no such file"])
def test_option_names_within_values_are_kept(text: str):
    params, words = list_params("run"), ParsedArgs({"file": "top_k b", "stop": ["top_k b"]})
    assert replace_option_names(text, params, words, {}) == text
    assert replace_option_names("top_k must be 0 or greater", params, words, {}) == "--top-k must be 0 or greater"


# The Python API.


@pytest.fixture(scope="module")
def model(tiny: str):
    with localllm.open(tiny, context=512) as opened:
        yield opened


def text_of(generation) -> str:
    return "".join(generation)


def test_numpy_numbers_are_accepted(model, tiny: str):
    expected = text_of(model.generate([10, 11], 5, temperature=0.5, seed=7, top_k=9))
    ids = np.array([10, 11])
    assert text_of(model.generate(ids, np.int64(5), temperature=np.float32(0.5), seed=np.int64(7), top_k=np.int32(9)))
    assert text_of(model.generate(ids, np.int32(5), temperature=np.float64(0.5), seed=7, top_k=np.int8(9))) == expected
    assert model.detokenize(ids) == model.detokenize([10, 11])
    with localllm.open(tiny, threads=np.int64(1), context=np.int16(300)) as other:
        assert (other.context, type(other.context)) == (300, int)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"prompt": b"Hi"}, "the prompt must be a str, not bytes: decode it first"),
        ({"prompt": None}, "the prompt must be a str, not NoneType"),
        ({"prompt": ["Hi"]}, "token ids must be a list of integers; `map` takes several prompts"),
        ({"prompt": [1.5]}, "token ids must be a list of integers"),
        ({"stop": [1]}, "stop must be a str, not int"),
        ({"stop": b"x"}, "stop must be a str, not bytes"),
        ({"stop": 1}, "stop must be a list of strings, not 1"),
        ({"stop": [""]}, "stop must not be empty"),
        ({"max_tokens": "3"}, "max_tokens must be an integer, not '3'"),
        ({"max_tokens": 3.0}, "max_tokens must be an integer, not 3.0"),
        ({"max_tokens": True}, "max_tokens must be an integer, not True"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"top_k": 3.5}, "top_k must be an integer"),
        ({"on_overflow": "shift", "keep": "4"}, "keep must be an integer, not '4'"),
        ({"speculate": 5}, "speculate must be .*, not 5"),
    ],
)
def test_invalid_arguments_of_generate_are_refused(model, arguments: dict, problem: str):
    with pytest.raises(UsageError, match=problem):
        text_of(model.generate(**{"prompt": "Hi", "max_tokens": 2} | arguments))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"threads": "2"}, "threads must be an integer"), ({"threads": 1.5}, "threads must be an integer"),
        ({"context": "9"}, "context must be an integer"), ({"context": -1}, "context must be 0 or greater"),
        ({"kv_type": 5}, "kv_type must be a str"), ({"chat_template": b"x"}, "chat_template must be a str"),
    ],
)  # fmt: skip
def test_invalid_arguments_of_open_are_refused(tiny: str, arguments: dict, problem: str):
    with pytest.raises(UsageError, match=problem):
        localllm.open(tiny, **arguments)


def test_other_methods_refuse_invalid_arguments(model):
    for call, problem in (
        (lambda: model.tokenize(b"x"), "text must be a str, not bytes"),
        (lambda: model.detokenize("ab"), "token ids must be a list of integers, not str"),
        (lambda: model.logits("x"), "token ids must be a list of integers, not str"),
        (lambda: model.candidates("x", n="2"), "n must be an integer"),
        (lambda: list(model.map(["x"], parallel=0)), "parallel must be 1 or greater"),
    ):
        with pytest.raises(UsageError, match=problem):
            call()


def test_content_parts_equal_their_joined_text(model):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    whole = model.session.encode_chat([{"role": "user", "content": "one\ntwo"}])
    assert model.session.encode_chat([{"role": "user", "content": parts}]) == whole
    assert validate_messages([{"role": "assistant", "content": None}]) == [{"role": "assistant", "content": None}]
    for content, problem in (
        ([{"type": "image_url", "image_url": {"url": "x"}}], "images are not downloaded"),
        ([{"type": "text"}], "must have a string as its text"),
        ([5], "a content part must be"),
        (5, "found int"),
        (b"x", "found bytes"),
    ):
        with pytest.raises(UsageError, match=problem):
            model.chat([{"role": "user", "content": content}])
    for messages in ("Hi", {"role": "user", "content": "x"}, [{"content": "x"}], [5]):
        with pytest.raises(UsageError, match="message"):
            model.chat(messages)


def test_map_accepts_parts_and_refuses_invalid_images(tiny: str, cli, tmp_path: Path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}\n'
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}\n'
    )
    code, out, _ = cli("map", tiny, lines, *GREEDY)
    first, second = out.splitlines()
    assert code == 6 and '"output"' in first and "must have an image_url" in second


def test_the_package_is_typed_and_opens_with_the_trained_context(tiny: str, cli):
    assert (ROOT / "localllm" / "py.typed").exists()
    with localllm.open(tiny) as model:
        assert model.context == model.trained_context == 200_000
    code, _, err = cli("run", tiny, "-p", "x" * 200_000, "-n", "1")
    assert code == 4 and "holds only 200000" in err


# The terminal's conventions.


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("term", "no_color", "shown"),
    [
        ("xterm", None, "\x1b[2mhello\x1b[0m\n\r\x1b[Kworking\r\x1b[K"),
        ("xterm", "", "\x1b[2mhello\x1b[0m\n\r\x1b[Kworking\r\x1b[K"),
        ("xterm", "1", "hello\n\r\x1b[Kworking\r\x1b[K"),
        ("dumb", None, "hello\n"),
    ],
)
def test_decoration_follows_term_and_no_color(monkeypatch, term: str, no_color: str | None, shown: str):
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stderr", Screen())
    line = terminal.ProgressLine()
    terminal.say_dim("hello")
    line.show("working")
    line.clear()
    assert sys.stderr.getvalue() == shown


# Signals, memory, files that change.


@pytest.mark.parametrize("command", [
    "perplexity {} {text} -c 64", "imatrix {} {text} -o {out} -c 64", "bench {} -p 64 -n 64 -r 10000",
    "inspect {} --check", "quantize {} {out} Q8_0",
])  # fmt: skip
def test_every_command_reports_a_truncated_model(tiny: str, cli, monkeypatch, folder: Path, command: str):
    """Install the handler before the first weight is read."""
    paths: list[str] = []

    def tell(path: str) -> None:
        paths.append(path)
        raise ModelError("the handler")

    monkeypatch.setattr(faults, "end_on_bus_error", tell)
    words = command.format(tiny, text=folder / "text", out=folder / "out").split()
    assert (cli(*words)[0], paths) == (3, [tiny])


@posix
def test_a_model_truncated_during_an_answer_is_reported(tiny: str, tmp_path: Path):
    path = tmp_path / "model.gguf"
    shutil.copy(tiny, path)
    command = [*PROGRAM, "run", str(path), "-p", "Hi", "--no-stdin", "--temp", "0", "-n", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdout is not None and process.stdout.read(10)
    os.truncate(path, 8192)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3
    message = f"localllm: error: {path}: the file got shorter, or its disk failed, while it was in use\n"
    assert err.decode() == message


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_sigterm_while_compiling_leaves_no_processes(tiny: str, tmp_path: Path):
    process = subprocess.Popen(
        [*PROGRAM, "run", tiny, "-p", "Hi", "--no-stdin", *GREEDY],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**ENVIRONMENT, "LOCALLLM_CACHE": str(tmp_path)},
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline, compilers = time.monotonic() + 60, list[str]()
    while not compilers and time.monotonic() < deadline:
        time.sleep(0.05)
        compilers = children.read_text().split()
    assert compilers, "nothing was compiled"
    time.sleep(0.3)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    assert re.fullmatch(
        rb"localllm: compiling (a kernel|\d+ kernels) for this computer, once; this may take a minute\n", err
    )
    while any(is_running(pid) for pid in compilers):
        assert time.monotonic() < deadline, "compilers go on"
        time.sleep(0.05)
    assert [path for path in tmp_path.rglob("*.tmp") if path.is_file()] == []


def is_running(pid: str) -> bool:
    """Return whether a process runs, rather than waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited as on Linux")
def test_too_little_memory_exits_with_5(tiny: str):
    """Try ten limits from Python's own needs to enough: one line and exit code 5, or the answer."""
    least = MIN_MEMORY >> 10  # kB
    sizes = [20_000, 60_000, 80_000, 120_000, least - 1, least + 20_000, 290_000, 310_000, 350_000, 1_000_000]
    results = []
    for size in sizes:
        done = shell(f'ulimit -v {size}; "$@"', "run", tiny, "-p", "Hi", "--no-stdin", *GREEDY)
        message = re.fullmatch(rb"localllm: error: .*memory.*\n", done.stderr)
        assert done.returncode == 0 or (done.returncode == 5 and done.stdout == b"" and message), (size, done)
        results.append(done.returncode)
    assert results[:5] == [5] * 5 and results[-1] == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited as on Linux")
@pytest.mark.parametrize("option", ["-v", "-d"])
def test_fit_knows_the_limits_of_the_process(tiny: str, option: str):
    done = shell(f'ulimit {option} 500000; "$@"', "fit", tiny, "--json")
    assert 0 < json.loads(done.stdout)["available_bytes"] < 500_000 * 1024


def test_weights_beyond_the_memory_are_reported_before_loading(tiny: str, cli, monkeypatch):
    file = GGUFFile.open(tiny)
    size = file.nbytes - count_table_bytes(file.tensors) + WORKING_BYTES
    line = "localllm: warning: the weights take 0.00 GB, and only 0.00 GB of memory are available: "
    for available, message in ((size, ""), (size - 1, line)):
        monkeypatch.setattr(backend, "get_available_memory", lambda mapped=0, size=available: size)
        code, _, stderr = cli("run", tiny, "-p", "Hi", "--no-stdin", *GREEDY)
        assert code == 0 and stderr.startswith(message) and stderr.count("\n") == bool(message)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited as on Linux")
def test_too_little_memory_to_quantize_exits_with_5(tiny: str, tmp_path: Path):
    """Refuse first, as LLVM would abort while compiling or loading a search."""
    done = shell('ulimit -v 380000; "$@"', "quantize", tiny, str(tmp_path / "out.gguf"), "Q8_0")
    assert done.returncode == 5 and re.fullmatch(rb"localllm: error: not enough memory.*\n", done.stderr)
    assert not list(tmp_path.iterdir())
