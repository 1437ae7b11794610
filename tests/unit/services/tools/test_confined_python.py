"""Test confined Python programs of models, as `eval` runs them."""

from pathlib import Path

import pytest

from localllm.services.tools import confined_python
from localllm.services.tools.confined_python import run_confined
from localllm.system.processes import PipeReader

pytestmark = pytest.mark.skipif(bool(reason := confined_python.describe_obstacle()), reason=reason or "it can")


def test_a_right_program_passes():
    """Allow it to write in its folder and to import the standard library."""
    program = "import json, math, re\nopen('file', 'w').write('text')\nassert open('file').read() == 'text'\n"
    assert run_confined(program + "print('a' * 100_000)").passed


def test_a_wrong_program_fails_with_its_reason():
    outcome = run_confined("def f(x):\n    return x\nassert f(1) == 2, 'not equal'")
    assert not outcome.passed and outcome.reason == "AssertionError: not equal"
    assert "SyntaxError" in run_confined("def f(:").reason
    assert not run_confined("raise SystemExit(3)").passed


def test_stderr_of_a_program_is_bounded(monkeypatch):
    """Bound endless output and endless lines."""
    kept = list[int]()
    text = PipeReader.get_text
    monkeypatch.setattr(PipeReader, "get_text", lambda self: kept.append(len(self._data)) or text(self))
    program = "import sys\nfor _ in range(400): sys.stderr.write('x' * 9999 + '\\n')\nsys.exit('the end')"
    outcome = run_confined(program)
    assert (outcome.passed, outcome.reason, max(kept)) == (False, "the end", confined_python.MAX_STDERR)
    outcome = run_confined("import sys\nsys.stderr.write('y' * 3_000_000)\nsys.exit(1)")
    assert outcome.reason == "y" * confined_python.MAX_REASON and max(kept) == confined_python.MAX_STDERR


@pytest.mark.slow
def test_time_and_memory_of_a_program_are_limited():
    assert run_confined("while True: pass", seconds=1).reason == "stopped after 1 seconds"
    assert run_confined("x = [0] * (1 << 28)", memory=1 << 29).reason == "MemoryError"
    assert "File too large" in run_confined("open('file', 'wb').write(bytes(1 << 25))").reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import socket; socket.socketpair()",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.mkdir('/tmp/other')",
        "open({outside!r}).read()",
        "open({outside!r}, 'w')",
        "import os; os.execv('/bin/sh', ['sh', '-c', 'cat {outside}'])",
    ],
)
def test_a_confined_program_cannot_access_anything_outside_its_sandbox(tmp_path: Path, program):
    outside = tmp_path / "secret"
    outside.write_text("secret")
    outcome = run_confined(program.replace("{outside!r}", repr(str(outside))).replace("{outside}", str(outside)))
    assert not outcome.passed and ("not permitted" in outcome.reason or "enied" in outcome.reason)
    assert outside.read_text() == "secret" and not Path("/tmp/other").exists()


def test_a_program_does_not_see_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "1")
    assert run_confined("import os; assert 'SECRET_KEY' not in os.environ").passed


def test_nothing_runs_where_programs_cannot_be_confined(monkeypatch):
    monkeypatch.setattr(confined_python, "describe_obstacle", lambda: "the Linux kernel does not support Landlock")
    with pytest.raises(RuntimeError, match="Landlock"):
        run_confined("pass")
