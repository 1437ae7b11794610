"""Test scripts/journey: which files run before the first byte of an answer."""

import subprocess
import sys

from project import ROOT

MOST = 142  # files of a warm run of the built-in model; docs/architecture.md says how many


def journey(*arguments: str) -> tuple[str, list[str]]:
    """Run a command under the hook; return its stdout and the lines about files."""
    command = [sys.executable, "scripts/tools/journey.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()


def test_files_are_listed_in_the_order_in_which_they_run() -> None:
    answer, lines = journey("run", "-p", "Hi", "-n", "2", "--temp", "0")
    files, count = lines[lines.index("") + 1 : -1], lines[-1]
    assert answer.strip()
    assert count == f"{len(files)} files"
    assert len(set(files)) == len(files) <= MOST
    way = ["cli/main", "cli/commands/run", "api", "arch/families/llama", "engine/engine", "generation/sampling/sampler"]
    places = [files.index(f"localllm/{name}.py") for name in way]
    assert places == sorted(places)
    assert not any("server/" in name or "families/gemma" in name for name in files)


def test_files_run_after_the_first_byte_are_not_listed() -> None:
    answer, lines = journey("--version")
    assert answer.strip()
    assert "localllm/cli/app.py" in lines and "localllm/api.py" not in lines
