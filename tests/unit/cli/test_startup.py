"""Test the fast start of the interpreter, and the variable that turns it off."""

import gc
import os
import subprocess
import sys

import pytest
from project import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

SHOW = """
import gc, os, sys
from localllm.cli.main import run_program
def show():
    print(gc.get_threshold()[0], "numpy._core._add_newdocs" in sys.modules, os.environ.get("OPENBLAS_NUM_THREADS"))
class AtTeardown:
    def __del__(self): os.write(1, b"teardown\\n")
kept = AtTeardown()
import atexit
atexit.register(show)
sys.argv = ["localllm", "--version"]
run_program()
"""


@pytest.mark.parametrize(
    ("plain", "lines"), [("", ["150000 True 1"]), ("1", [f"{gc.get_threshold()[0]} False None", "teardown"])]
)
def test_a_plain_start_uses_no_shortcut(plain: str, lines: list[str]) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, timeout=120,
        env=environment | {"LOCALLLM_PLAIN_START": plain},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == lines


def test_a_plain_start_gives_the_same_exit_code() -> None:
    command = [sys.executable, "-m", "localllm", "run", "--none"]
    environment = {**ENVIRONMENT, "LOCALLLM_PLAIN_START": "1"}
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
