"""Test that no kernel accesses memory out of bounds, whatever the model's shape and the batch."""

import os
import subprocess
import sys

import pytest
from guarded import BATCHES, FORMATS, SHAPES
from project import ROOT, SUPPORT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")


# Of each kind of kernel one format, with some of the batches; `python tests/support/guarded.py F16 5 0 1 2` does the
# same for others and some shapes.
SAMPLED = {"F32": (5, 129), "BF16": (1, 13), "Q8_0": (1, 13), "Q4_K": (1, 5, 129), "Q6_K": (9, 129)}


def test_sampled_types_and_batches_are_known():
    assert SAMPLED.keys() < set(FORMATS)
    assert {tokens for batches in SAMPLED.values() for tokens in batches} == set(BATCHES)


@pytest.mark.slow(20)
@pytest.mark.sampled("format", "tokens", every=6, always=("Q8_0-13",))
@pytest.mark.parametrize(("format", "tokens"), [(name, tokens) for name in SAMPLED for tokens in SAMPLED[name]])
def test_models_of_odd_shapes_stay_within_bounds(format, tokens):
    """A crash shows in the exit code; the shape at which it happened is the last that was printed."""
    program = SUPPORT / "guarded.py"
    command = [sys.executable, str(program), format, str(tokens), *map(str, range(len(SHAPES)))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, f"{format}, after {done.stdout.splitlines()[-1:]}: {done.stderr[-500:]}"


@pytest.mark.slow(20)
@pytest.mark.sampled("program", "tokens", always=("recurrent-5",))
@pytest.mark.parametrize(
    ("program", "tokens"), [("recurrent", 1), ("recurrent", 5), ("recurrent", 70), ("texts", 5), ("texts", 70)]
)
def test_recurrent_models_and_encoders_stay_within_bounds(program, tokens):
    program = SUPPORT / f"guarded_{program}.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}: {done.stderr[-500:]}"


def test_reading_beyond_a_guard_crashes():
    program = "import ctypes, guarded; ctypes.string_at(guarded.guarded(64), 65)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == -11
