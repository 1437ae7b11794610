"""Test the command line: exit codes, streams, pipes, signals, and a terminal."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from project import ROOT, complaints
from signals import apart, ctrl_c
from terminal import Terminal
from tiny_model import damage, write_tiny_model
from vocabularies import metadata, write_vocabulary

import localllm
from localllm.arch import ARCHITECTURES
from localllm.cli import main
from localllm.cli import open_model as pulling
from localllm.cli import registry as commands
from localllm.cli.commands import rm
from localllm.cli.prompt_input import read_prompt
from localllm.cli.terminal import output as terminal
from localllm.cli.terminal import render as remaining
from localllm.cli.terminal.render import format_size
from localllm.errors import UsageError
from localllm.files.cache import ngram_cache_file as written_file
from localllm.files.cache import prefix_files
from localllm.generation.beam_search import Answer
from localllm.generation.sampling.options import DEFAULTS, LETTERS
from localllm.generation.session import Session

PROGRAM = [sys.executable, "-m", "localllm"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
GREEDY = ["--temp", "0", "-n", "12"]
LONG = ["--temp", "0", "-n", "100000"]  # would take minutes

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of POSIX")


def localllm_process(*arguments: str, stdin=b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the whole program in its own process; stdin: bytes for a pipe, or a file."""
    source = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, timeout=120, env={**ENVIRONMENT, **environment}, **source
    )


def answer_of(cli, *arguments: str, stdin: bytes = b"") -> dict:
    code, out, err = cli("run", *arguments, "--json", stdin=stdin)
    assert (code, err) == (0, "")
    return json.loads(out)


# Help, versions, refusals.


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_command_has_help_and_a_line_in_the_list(cli, command: str):
    code, out, err = cli(command, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: localllm {command}" in out
    assert re.search(rf"^  {command} +[A-Z].*\.$", cli("--help")[1], re.MULTILINE)


def test_help_shows_the_true_defaults():
    numbers = {name: value for name, value in DEFAULTS.items() if type(value) in (int, float)}
    for command in ("run", "chat"):
        help_of = {param.name: param.help for param in commands.list_params(command)}
        matches = {name: re.search(r"\[default: (-?[0-9.]+)[],]", help_of[name]) for name in numbers}
        assert {name: float(match[1]) for name, match in matches.items()} == numbers
        assert f"[default: {';'.join(DEFAULTS['samplers'])}]" in help_of["samplers"]
        assert f"[default: {''.join(LETTERS[name] for name in DEFAULTS['samplers'])}]" in help_of["letters"]
        assert '[default: a line break, :, ", *]' in help_of["dry_sequence_breakers"]
        assert DEFAULTS["dry_sequence_breakers"] == ("\n", ":", '"', "*")
        assert DEFAULTS.keys() - help_of.keys() == set(), "an option for each"


def test_without_arguments_usage_goes_to_stderr(cli):
    code, out, err = cli()
    assert (code, out) == (2, "")
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("code", "arguments", "reason"),
    [
        (2, ["run", "TINY"], "the prompt is missing"),
        (2, ["run", "TINY", "-p", ""], "the prompt is missing"),
        (2, ["run"], "MODEL and the prompt are missing"),
        (2, ["run", "TINY", "-p", "x", "--bogus"], "--bogus"),
        (2, ["run", "TINY", "-p", "x", "-n", "many"], "many"),
        (2, ["run", "TINY", "-p", "x", "-n", "-3"], "-n must"),
        (2, ["run", "TINY", "-p", "x", "-t", "0"], "-t must"),
        (2, ["run", "TINY", "-p", "x", "-c", "-5"], "-c must"),
        (2, ["run", "TINY", "-p", "x", "--top-p", "2"], "--top-p must"),
        (2, ["run", "TINY", "-p", "x", "--temp", "nan"], "--temp must"),
        (2, ["run", "TINY", "-p", "x", "-r", ""], "-r must not be empty"),
        (2, ["run", "TINY", "-p", "x", "--kv-type", "f8"], "f8"),
        (2, ["run", "TINY", "-p", "x", "-sys", "y", "--raw"], "--raw"),
        (2, ["run", "TINY", "-p", "x", "--chat-template", "phi3", "--raw"], "--raw"),
        (2, ["run", "TINY", "-p", "x", "-sys", "a", "-sysf", "b"], "give either -sys or -sysf, not both"),
        (2, ["run", "TINY", "-p", "x", "-sysf", __file__, "--raw"], "--raw"),
        (2, ["run", "TINY", "-p", "x", "--think", "on", "--raw"], "--raw"),
        (2, ["run", "TINY", "-p", "x", "--think-budget", "3", "--raw"], "--raw"),
        (2, ["run", "TINY", "-p", "x", "--template-var", "a=1", "--raw"], "--raw"),
        (2, ["map", "TINY", __file__, "--chat-template", "phi3", "--raw"], "--raw"),
        (2, ["map", "TINY", __file__, "--think", "off", "--raw"], "--raw"),
        (2, ["run", "TINY", "-p", "x", "--samplers", "top_k", "--sampling-seq", "k"], "not both"),
        (2, ["run", "TINY", "-p", "x", "--kv-type", "k=f16,v=f16", "-ctk", "f32"], "leave out -ctk and -ctv"),
        (2, ["run", "TINY", "-p", "x", "--kv-type", "k=f16,v=f16", "-ctv", "f32"], "leave out -ctk and -ctv"),
        (2, ["run", "TINY", "-p", "x", "--grammar", "root ::= x", "--regex", "x"], "--grammar and --regex cannot"),
        (2, ["run", "TINY", "-p", "x", "--n", "2", "--speculate", "draft:TINY"], "for a single answer"),
        (2, ["run", "TINY", "-p", "x", "--beams", "2", "--speculate", "draft:TINY"], "for a single answer"),
        (2, ["run", "TINY", "-p", "x", "--beams", "2", "--mirostat", "1"], "--mirostat cannot be combined"),
        (
            2,
            ["run", "TINY", "-p", "x", "--n", "2", "--on-overflow", "shift"],
            "cannot be combined with --on-overflow=shift",
        ),
        (2, ["chat", "TINY", "--session", "a", "--continue"], "not both"),
        (2, ["chat", "TINY", "--session", "a"], "need a terminal"),
        (2, ["imatrix", "-o", "new.imatrix"], "MODEL is missing"),
        (2, ["imatrix", "TINY", "-o", "new.imatrix"], "TEXT is missing"),
        (2, ["perplexity", "TINY", __file__, "--kl-divergence", "--base", "b"], "--base FILE determines the text"),
        (2, ["perplexity", "TINY", "--kl-divergence", "--base", "b", "-c", "64"], "--base FILE determines the text"),
        (
            2,
            ["perplexity", "TINY", "--kl-divergence", "--base", "b", "--save-logits", "l"],
            "--base FILE determines the text",
        ),
        (2, ["run", "TINY", "-f", "missing.txt"], "missing.txt"),
        (2, ["run", "TINY", "-p", "x", "--n", "0"], "--n must be 1 or greater"),
        (2, ["run", "TINY", "-p", "x", "--beams", "-1"], "--beams must be 0 or greater"),
        (
            2,
            ["run", "TINY", "-p", "x", "--n", "3", "--beams", "2"],
            "3 answers need at least as many beams \\(found 2\\): raise beams, or lower n",
        ),
        (2, ["run", "TINY", "-p", "x", "--beams", "2", "--temp", "0"], "--temp cannot be combined"),
        (2, ["run", "TINY", "-p", "x", "--beams", "2", "-s", "1"], "-s cannot be combined"),
        (2, ["tokenize", "TINY", "a", "b"], "b"),
        (2, ["bench", "TINY", "-r", "0"], "-r must"),
        (2, ["bench", "TINY", "-n", "-1"], "-1"),
        (2, ["bench", "TINY", "-p", "1,x"], "1,x"),
        (2, ["bench", "TINY", "-t", "0"], "from 1"),
        (2, ["bench", "TINY", "-pg", "5"], "2 integers"),
        (2, ["bench", "TINY", "-p", "0", "-n", "0"], "no tests selected"),
        (2, ["bench", "TINY", "--md", "--json"], "--md"),
        (2, ["bench", "TINY", "-t", "5000"], "-t must"),
        (2, ["talk"], "talk"),
        (3, ["run", "missing.gguf", "-p", "x"], "missing.gguf"),
        (3, ["run", __file__, "-p", "x"], "not a GGUF file"),
        (3, ["inspect", "missing.gguf"], "missing.gguf"),
        (3, ["tokenize", "missing.gguf", "x"], "missing.gguf"),
        (3, ["chat", "missing.gguf"], "missing.gguf"),
        (3, ["bench", "missing.gguf"], "missing.gguf"),
        (3, ["warmup", "missing.gguf"], "missing.gguf"),
        (4, ["run", "TINY", "-c", "30", "-p", "x" * 100], "1[0-9][0-9] tokens.* 30"),
        (5, ["run", "TINY", "-c", str(10**16), "-p", "x"], "memory"),
    ],
)
def test_invalid_command_lines_are_refused_in_one_line(cli, tiny: str, code: int, arguments: list[str], reason: str):
    stdin = b"Hi" if arguments[0] == "chat" else b""
    exit_code, out, err = cli(*[tiny if word == "TINY" else word for word in arguments], stdin=stdin)
    assert (exit_code, out) == (code, "")
    assert re.fullmatch(rf"(localllm: warning: .*\n)?localllm: error: .*{reason}.*\n", err)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (MemoryError(), 5, "not enough memory"),
        (RuntimeError("can't start new thread"), 5, "not enough memory, or too many threads"),
        (ZeroDivisionError("division\nby zero"), 1, "internal error.*ZeroDivisionError: division by zero"),
    ],
)
def test_unexpected_errors_take_one_line(monkeypatch, capsys, error: Exception, code: int, reason: str):
    monkeypatch.delenv("LOCALLLM_DEBUG", raising=False)
    assert main.report_error(error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"localllm: error: {reason}.*\n", err)


def test_localllm_debug_shows_a_traceback():
    done = localllm_process("inspect", "missing.gguf", LOCALLLM_DEBUG="1")
    assert done.returncode == 3
    assert b"Traceback" in done.stderr


# run: the answer.


def test_stdout_is_the_answer_and_a_line_break(tiny: str, cli):
    expected = answer_of(cli, tiny, "-p", "Hi", *GREEDY)
    done = localllm_process("run", tiny, "-p", "Hi", *GREEDY)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == expected["text"].encode() + b"\n"
    assert expected["completion_tokens"] == len(expected["tokens"]) == 12


def test_run_prints_a_json_object(tiny: str, cli):
    began = time.perf_counter()
    answer = answer_of(cli, tiny, "-p", "Hi", "-n", "5", "-s", "42")
    times = {"load_s", "prefill_s", "ttft_s", "decode_s", "total_s", "prefill_tps", "decode_tps"}
    assert answer.keys() == {
        *(
            "text",
            "thinking",
            "tokens",
            "finish_reason",
            "prompt_tokens",
            "completion_tokens",
            "seed",
            "speculation",
            "model",
            "timings",
            "cached_tokens",
            "dropped_tokens",
        )
    }
    assert answer["timings"].keys() == times
    assert all(value > 0 for value in answer["timings"].values())
    assert answer["timings"]["total_s"] > answer["timings"]["load_s"] + answer["timings"]["ttft_s"]
    assert answer["timings"]["total_s"] < time.perf_counter() - began + 1e-3
    assert answer["model"] == {"path": tiny, "arch": "llama", "format": "F32", "device": "CPU"}
    assert (answer["seed"], answer["finish_reason"], answer["completion_tokens"]) == (42, "length", 5)
    model = localllm.Tokenizer.from_file(tiny)
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompt_tokens"] == len(model.encode(prompt, special=True))
    assert answer["text"] == model.decode(answer["tokens"])


def test_a_seed_reproduces_the_answer(tiny: str, cli):
    first = answer_of(cli, tiny, "-p", "Hi", "-n", "20")
    again = answer_of(cli, tiny, "-p", "Hi", "-n", "20", "--seed", str(first["seed"]))
    assert (again["tokens"], again["seed"]) == (first["tokens"], first["seed"])
    assert answer_of(cli, tiny, "-p", "Hi", "-n", "20")["seed"] != first["seed"]


def test_raw_system_and_stop_change_prompt_and_answer(tiny: str, cli):
    raw = answer_of(cli, tiny, "-p", "Hi", "--raw", *GREEDY)
    assert raw["prompt_tokens"] == 2
    plain = answer_of(cli, tiny, "-p", "Hi", *GREEDY)
    with_system = answer_of(cli, tiny, "-p", "Hi", "-sys", "Be brief", *GREEDY)
    assert with_system["prompt_tokens"] > plain["prompt_tokens"] + len("Be brief")
    half = plain["text"][: len(plain["text"]) // 2]
    stopped = answer_of(cli, tiny, "-p", "Hi", "-r", "never said", "-r", plain["text"][len(half) :], *GREEDY)
    assert plain["text"].startswith(stopped["text"])
    assert (stopped["finish_reason"], len(stopped["text"])) == ("stop", len(half))


def test_a_file_without_a_template_uses_the_plain_one(tmp_path: Path, cli):
    path = str(write_tiny_model(tmp_path / "bare.gguf", chat_template=None))
    ran = json.loads(cli("run", path, "-p", "Hi", "--json", *GREEDY)[1])
    code, out, err = cli("run", path, "-p", "Hi", *GREEDY)
    assert (code, out) == (0, ran["text"] + "\n")
    assert err.startswith("localllm: warning: the file has no chat template: using 'chatml'; choose")
    assert cli("chat", path, *GREEDY, stdin=b"Hi") == (0, out, err)
    with localllm.open(path) as model:
        answer = model.chat([{"role": "user", "content": "Hi"}], max_tokens=12, temperature=0)
        assert ("".join(answer), len(answer.prompt)) == (ran["text"], ran["prompt_tokens"])
    chosen = cli("run", path, "-p", "Hi", "--json", "--chat-template", "chatml", *GREEDY)
    assert (json.loads(chosen[1])["tokens"], chosen[2]) == (ran["tokens"], "")
    raw = cli("run", path, "-p", "Hi", "--json", "--raw", *GREEDY)
    assert (json.loads(raw[1])["prompt_tokens"], raw[2]) == (2, "")


def test_chat_template_selects_a_template_or_is_refused(tiny: str, cli, refused):
    prompt = "<|user|>\nHi<|end|>\n<|assistant|>\n"
    expected = len(localllm.Tokenizer.from_file(tiny).encode(prompt, special=True))
    assert answer_of(cli, tiny, "-p", "Hi", "--chat-template", "phi3", *GREEDY)["prompt_tokens"] == expected
    for command in (["run", tiny, "-p", "x"], ["chat", tiny]):
        refused([*command, "--chat-template", "phi9"], "unknown chat template 'phi9'; available: bailing, ", stdin=b"x")


def test_stats_go_to_stderr(tiny: str, cli):
    stats = r"prompt: \d+ tokens in .*\nanswer: 12 tokens in .*finish: length, seed: 5\n"
    for speculate, guesses in (("off", ""), ("ngram", r"(drafted: \d+ tokens, \d+ accepted, .*\n)?")):
        code, out, err = cli("run", tiny, "-p", "Hi", "--stats", "-s", "5", "--speculate", speculate, *GREEDY)
        assert code == 0
        assert out.endswith("\n") and "tokens in" not in out
        assert re.fullmatch(stats + guesses, err)


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """Record the calls of Session.candidates, which gives two answers."""
    calls = []

    def candidates(session: Session, *arguments) -> list[Answer]:
        calls.append(arguments)
        return [Answer("two\nlines", [5, 6], -1.5, "stop", 8), Answer("über", [7], -2.0, "length", 7)]

    monkeypatch.setattr(Session, "candidates", candidates, raising=False)
    return calls


def test_run_prints_several_answers_and_passes_their_options(tiny: str, cli, asked: list[tuple]):
    code, out, err = cli("run", tiny, "-p", "Hi", "--n", "2", "--stats", "-s", "7")
    assert (code, out) == (0, "two\nlines\n\nüber\n")
    assert re.fullmatch(r"answers: 2 with 3 tokens in .* s, model loaded in .* s\n", err)
    assert cli("run", tiny, "-p", "Hi", "--raw", "--beams", "3", "--n", "2", "-n", "4", "-r", "x")[:2] == (0, out)
    (messages, chosen, *counts), (text, plain, *beam_counts) = asked
    assert (messages, chosen.sampling.seed, counts) == ([{"role": "user", "content": "Hi"}], 7, [2, 0])
    assert (text, plain.max_tokens, plain.stop, beam_counts) == ("Hi", 4, ("x",), [2, 3])


def test_run_prints_several_answers_as_json(tiny: str, cli, asked: list[tuple]):
    result = answer_of(cli, tiny, "-p", "Hi", "--beams", "1")
    assert result.keys() == {"answers", "model", "timings"}
    assert result["answers"] == [
        {"text": "two\nlines", "thinking": "", "logprob": -1.5, "tokens": [5, 6], "finish_reason": "stop", "seed": 8},
        {"text": "über", "thinking": "", "logprob": -2.0, "tokens": [7], "finish_reason": "length", "seed": 7},
    ]
    assert result["timings"]["total_s"] > result["timings"]["load_s"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "MODEL", "-p", "Hi"], ["run", "MODEL", "-p", "Hi", "--json"], ["chat", "MODEL"],
        ["bench", "MODEL", "-p", "8", "-n", "2", "-r", "1"], ["perplexity", "MODEL", "TEXT", "-c", "16"],
        ["imatrix", "MODEL", "TEXT", "-o", "OUT", "-c", "16", "--process-output"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_refuses_a_damaged_model(tmp_path: Path, cli, arguments: list[str]):
    """Blame the file for logits that are not finite."""
    (tmp_path / "text").write_text("hello world " * 20)
    model = damage(write_tiny_model(tmp_path / "tiny.gguf"))
    names = {"MODEL": model, "TEXT": tmp_path / "text", "OUT": tmp_path / "out"}
    code, _, err = cli(*[names.get(word, word) for word in arguments], stdin=b"Hi\n")
    assert code == 3
    assert re.fullmatch(r"localllm: error: .*tiny\.gguf: the model computed logits that are not finite; .*\n", err)
    assert not (tmp_path / "out").exists()


def test_a_context_beyond_the_trained_one_warns(tiny: str, cli):
    code, _, err = cli("run", tiny, "-p", "Hi", "-c", "300000", *GREEDY)
    assert code == 0
    assert re.fullmatch(r"localllm: warning: .*300000.*200000.*\n", err)


# run: the prompt.


@pytest.mark.parametrize(
    ("prompts", "files", "stdin", "whole"),
    [
        (["ask"], "", b"", "ask"),
        (["ask"], "", b"text\n", "text\n\nask"),
        ([], "", b"text\r\n", "text"),
        ([], "f", b"", "file"),
        (["ask"], "f", b"text\n\n", "file\n\ntext\n\n\nask"),
        (["ask", "more"], "fg", b"", "file\n\nfile\n\nask\n\nmore"),
        ([], "", b"\xef\xbb\xbf\xc3\xa4", "ä"),
    ],
)
def test_the_prompt_is_joined_from_options_files_and_stdin(
    tmp_path: Path, monkeypatch, prompts, files: str, stdin: bytes, whole: str
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    paths = [tmp_path / name for name in files]
    for path in paths:
        path.write_text("file\n")
    assert read_prompt(prompts, [*map(str, paths)], with_names=False).text == whole


def test_a_missing_prompt_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError):
        read_prompt([])


@pytest.mark.parametrize("closed", [False, pytest.param(True, marks=posix)])
def test_run_works_without_stdin(tiny: str, closed: bool):
    command = [*(("sh", "-c", 'exec "$@" <&-', "sh") if closed else ()), *PROGRAM, "run", tiny, "-p", "Hi", *GREEDY]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\n")


# Pipes and signals.


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the program and wait for its first words."""
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        **apart(),
    )
    assert process.stdout is not None
    assert process.stdout.read(10)
    return process


def test_a_closed_pipe_ends_quietly(tiny: str):
    process = start("run", tiny, "-p", "Hi", *LONG)
    process.stdout.close()
    assert process.wait(30) == 0
    assert complaints(process.stderr.read()) == ""
    process.stderr.close()


@posix
def test_a_full_disk_is_reported(tiny: str):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*PROGRAM, "run", tiny, "-p", "Hi", *GREEDY],
            stdout=full,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            input=b"",
        )
    assert done.returncode == 1
    assert re.fullmatch(rb"localllm: error: No space left on device\n", done.stderr)


def test_ctrl_c_keeps_the_answer_so_far(tiny: str):
    process = start("run", tiny, "-p", "Hi", *LONG)
    ctrl_c(process)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, b"")
    assert out.endswith(b"\n")


def test_ctrl_c_while_a_class_is_created_exits_with_130():
    """Unwrap what Python 3.11 wraps in __set_name__."""
    error = RuntimeError("Error calling __set_name__ on ...")
    error.__cause__ = KeyboardInterrupt()
    assert main.report_error(error) == 130


# The program, which says on stderr that it has begun: Python itself does not start gracefully when interrupted.
STARTING = """
import os
from localllm.cli import main
require = main.check_environment
def tell():
    os.write(2, b"begun\\n")
    require()
main.check_environment = tell
main.run_program()
"""


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.2])
def test_ctrl_c_during_the_start_exits_with_130(tiny: str, seconds: float):
    """Keep native threads or an interrupted import of NumPy from crashing the exit."""
    command = [sys.executable, "-c", STARTING, "run", tiny, "-p", "Hi", *LONG]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, **apart()
    )
    assert process.stderr is not None and process.stderr.readline() == b"begun\n"
    time.sleep(seconds)
    ctrl_c(process)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, b"")


# Ctrl-C in a callback, from which Python lets nothing out.
IN_A_CALLBACK = """
import signal, time, weakref
from localllm.cli import main
main.reraise_ctrl_c()
class Nothing: ...
nothing = Nothing()
reference = weakref.ref(nothing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del nothing
    print("goes on", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_is_raised_again_where_python_cannot_raise_it():
    done = subprocess.run([sys.executable, "-c", IN_A_CALLBACK], capture_output=True, env=ENVIRONMENT, timeout=120)
    assert (done.stdout.splitlines(), done.stderr) == ([b"goes on", b"interrupted"], b"")


# Ctrl-C when the exit code is decided, while the program waits for its threads.
AT_THE_END = """
import signal, threading
from localllm.cli.main import run_program
threading._shutdown = lambda: signal.raise_signal(signal.SIGINT)
run_program()
"""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["run", "--none"], 2)])
def test_ctrl_c_at_the_end_does_not_change_the_exit_code(words: list[str], code: int):
    done = subprocess.run([sys.executable, "-c", AT_THE_END, *words], capture_output=True, env=ENVIRONMENT, timeout=120)
    assert (done.returncode, done.stderr.count(b"\n")) == (code, int(code > 0)), done.stderr


# The program, which says on stderr when it has its first token: with --json, nothing else shows that.
TELLING = """
import sys
from localllm.cli.main import main
from localllm.generation.sampling.sampler import Sampler
accept = Sampler.accept
def tell(self, token):
    Sampler.accept = accept
    accept(self, token)
    print("begun", file=sys.stderr, flush=True)
Sampler.accept = tell
main()
"""


def test_ctrl_c_with_json_prints_the_object_so_far(tiny: str):
    process = subprocess.Popen(
        [sys.executable, "-c", TELLING, "run", tiny, "-p", "Hi", "--json", "--stats", *LONG],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        **apart(),
    )
    assert process.stderr is not None and process.stderr.readline().rstrip() == b"begun"
    ctrl_c(process)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert json.loads(out)["finish_reason"] == "interrupted"
    assert b"finish: interrupted" in err


@posix
def test_sigterm_ends_the_program_silently(tiny: str):
    process = start("run", tiny, "-p", "Hi", *LONG)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (-signal.SIGTERM, b"")


@pytest.mark.parametrize("terminals", [{"stdin"}, {"stderr"}, set()], ids=repr)
def test_without_a_terminal_nothing_is_asked(terminals, tmp_path: Path, cli, monkeypatch):
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path))
    write_tiny_model(tmp_path / "tiny.gguf")
    for module in (pulling, rm):
        monkeypatch.setattr(module, "is_terminal", lambda stream: stream in [getattr(sys, name) for name in terminals])
    code, out, err = cli("run", "hf:tiny/none", "-p", "x", stdin=b"y\n")
    assert (code, out) == (3, "") and "[y/N]" not in err
    code, out, err = cli("rm", tmp_path / "tiny.gguf", stdin=b"y\n")
    assert (code, out) == (2, "") and "remove it with --force" in err and "[y/N]" not in err
    assert (tmp_path / "tiny.gguf").exists()


def test_the_remaining_time_counts_this_run_only(monkeypatch):
    """Ignore what an earlier run did, which took no time now."""
    clock = iter([100.0, 110.0, 130.0, 130.0])
    monkeypatch.setattr(remaining, "perf_counter", lambda: next(clock))
    time = remaining.RemainingTime(40, done=30)
    assert time.format_first() == "chunk 31 of 40"
    assert time.describe(32) == "chunk 32 of 40, 40 s left"
    assert time.describe(33) == "chunk 33 of 40, 1 min 10 s left"
    assert time.describe(40) == "chunk 40 of 40, 0 s left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (61, "1 min 1 s"), (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"), (3661, "1 h 1 min"), (7322, "2 h 2 min"), (90_000, "25 h 0 min"),
    ],
)  # fmt: skip
def test_remaining_times_are_printed_in_units(seconds: float, text: str):
    assert remaining.format_duration(seconds) == text


def test_cache_counts_a_shared_prefix_once(cli, tmp_path: Path, monkeypatch):
    """Assign it to the later of two prompts."""
    monkeypatch.setattr(prefix_files, "get_folder", lambda: tmp_path)
    monkeypatch.setattr(written_file, "get_folder", lambda: tmp_path / "written")
    pieces = [("b", 512, "", 40), ("c", 700, "b", 20), ("d", 600, "b", 10), ("e", 90, "", 7)]
    for number, (key, end, before, kilobytes) in enumerate(pieces):
        about = prefix_files.PrefixChunkInfo("tiny.gguf", end, before * 32)
        prefix_files.write_prefix(key * 32, about, {"pages": np.zeros(1000 * kilobytes, np.uint8)})
        os.utime(tmp_path / (key * 32), (1e9 + number, 1e9 + number))
    sizes = {key: (tmp_path / (key * 32)).stat().st_size for key, *_ in pieces}
    code, out, _ = cli("cache")
    rows = [line.split() for line in out.splitlines()[1:]]
    expected = [("90", sizes["e"]), ("600", sizes["d"] + sizes["b"]), ("700", sizes["c"])]
    assert code == 0
    assert [row[:4] for row in rows[:3]] == [
        ["tiny.gguf", tokens, *format_size(count).split()] for tokens, count in expected
    ]
    assert rows[3][:3] == ["all", *format_size(sum(sizes.values())).split()]


def test_control_characters_are_replaced():
    assert terminal.make_printable("a\x1b[2J\x07b\r\n\tc\x9b\x7f\u202e") == "a�[2J�b\n\tc���"
    assert terminal.make_printable("a\u200e\u200f\u061c\u2028\u2029b") == "a�����b"
    assert terminal.make_printable("a\u200b\u2060\ufeff\u200d\U000e0041b") == "ab"
    assert terminal.make_printable("می\u200cخواهم 👩\u200d🔬") == "می\u200cخواهم 👩\u200d🔬"


# The other commands.


def test_inspect_prints_facts_or_json(tiny: str, cli):
    code, out, err = cli("inspect", tiny)
    assert (code, err) == (0, "")
    for words in ("llama", "F32", "200000", "2 layers", "268 tokens", "32.00 bits per weight"):
        assert words in out
    code, out, err = cli("inspect", tiny, "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["supported"] and facts["chat_template"]
    assert facts["parameters"] == sum(_product(tensor["shape"]) for tensor in facts["tensors"])
    assert facts["weight_bytes"] == 4 * facts["parameters"] == facts["formats"]["F32"]["bytes"]
    cache = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, dimensions, bytes
    assert facts["memory"][0]["cache_bytes"] == 2048 * cache
    assert facts["memory"][-1] == {
        "context": 200_000,
        "cache_bytes": 200_000 * cache,
        "total_bytes": 200_000 * cache + facts["weight_bytes"],
    }


def _product(shape: list[int]) -> int:
    return shape[0] * _product(shape[1:]) if shape else 1


def test_inspect_works_for_unsupported_architectures(model_path, cli, monkeypatch):
    monkeypatch.delitem(ARCHITECTURES, "mamba")
    code, out, _ = cli("inspect", model_path("mamba"))
    assert code == 0
    assert "mamba (not usable: " in out


def test_inspect_and_tokenize_accept_a_vocabulary(tmp_path, cli):
    path = write_vocabulary(metadata("llama-bpe"), tmp_path / "vocabulary.gguf")
    code, out, _ = cli("inspect", path)
    assert code == 0
    assert "contains a vocabulary" in out
    assert cli("tokenize", path, " the") == (0, '758\t"<|begin|>"\n260\t" the"\n', "")


def test_tokenize_prints_ids_and_pieces(tiny: str, cli):
    lines = '1\t"<|im_start|>"\n262\t"hello"\n267\t" world"\n13\t"\\n"\n'
    assert cli("tokenize", tiny, "<|im_start|>hello world\n") == (0, lines, "")
    assert cli("tokenize", tiny, stdin=b"<|im_start|>hello world\n\n") == (0, lines, "")
    code, out, _ = cli("tokenize", tiny, "--json", "hello\N{EURO SIGN}")
    assert code == 0
    assert json.loads(out) == [
        {"id": 262, "piece": "hello"},
        *({"id": 3 + byte, "piece": f"\\x{byte:02x}"} for byte in "\N{EURO SIGN}".encode()),
    ]


def test_warming_up_prints_nothing_to_stdout(tiny: str, cli):
    assert cli("warmup", tiny) == (0, "", "")


def test_chat_through_a_pipe_equals_run(tiny: str, cli):
    assert cli("chat", tiny, *GREEDY, stdin=b"Hi\n") == cli("run", tiny, *GREEDY, stdin=b"Hi\n")


# A terminal: see tests/integration/test_chat.py too.


@posix
def test_a_terminal_gets_no_control_characters(tiny: str):
    wild = ["-p", "Hi", "--temp", "4", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-s", "2", "-n", "300"]
    exact = localllm_process("run", tiny, *wild).stdout
    assert re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", exact), "the test needs an answer with control characters"
    shown = Terminal("run", tiny, *wild)
    shown.type("\x04")  # nobody reads it
    assert shown.end() == 0
    answer = shown.seen.replace("\r\n", "\n").replace("^D\b\b", "")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", answer)
    assert "".join(answer.split()) == "".join(terminal.make_printable(exact.decode()).split())  # lines break elsewhere
