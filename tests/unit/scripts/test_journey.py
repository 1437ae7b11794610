"""Test scripts/journey: which files run before the first byte of an answer."""

import re
import subprocess
import sys

from project import ROOT

MOST = 142  # files of a warm run of the built-in model; docs/architecture.md says how many
MOST_CALLS = 120  # calls of functions for one token; 109 where the text has no earlier one in its cache


def journey(*arguments: str) -> tuple[str, list[str]]:
    """Run a command under the hook; return its stdout and the lines about files."""
    command = [sys.executable, "scripts/tools/journey.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()


def test_files_are_listed_in_the_order_in_which_they_run() -> None:
    answer, lines = journey("run", "-p", "Hi", "-n", "2", "--temp", "0")
    *files, count, token = lines[lines.index("") + 1 :]
    assert answer.strip()
    assert count == f"{len(files)} files" and token == "a token: 0 calls of 0 functions"
    assert len(set(files)) == len(files) <= MOST
    way = ["cli/main", "cli/commands/run", "api", "arch/families/llama", "engine/engine", "generation/sampling/sampler"]
    places = [files.index(f"localllm/{name}.py") for name in way]
    assert places == sorted(places)
    assert not any("server/" in name or "families/gemma" in name for name in files)


def test_a_token_passes_few_functions() -> None:
    answer, lines = journey("run", "-p", "Hi", "--seed", "1")
    counts = re.fullmatch(r"a token: (\d+) calls of (\d+) functions", lines[-1])
    assert len(answer) > 40 and counts
    calls, functions = map(int, counts.groups())
    assert 40 < functions < calls <= MOST_CALLS


def test_files_run_after_the_first_byte_are_not_listed() -> None:
    answer, lines = journey("--version")
    assert answer.strip()
    assert "localllm/cli/app.py" in lines and "localllm/api.py" not in lines
