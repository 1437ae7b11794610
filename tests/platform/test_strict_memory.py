"""Readers and writers of the cache ask for its pages before, as Windows wants it."""

import os
import subprocess
import sys

import pytest
from project import ROOT, SUPPORT

CASES = [
    "tests/unit/engine/memory/test_page_table.py::test_random_operations_leave_each_sequence_its_own_tokens",
    "tests/unit/engine/memory/test_sliding_windows.py",
    "tests/unit/engine/test_rope_shift.py::test_shifting_a_sequence_without_its_first_windows_runs_it_again",
    "tests/unit/engine/test_forks.py",
    "tests/goldens/test_encoders.py::test_the_cpu_agrees_with_the_reference[bert]",
    "tests/integration/test_images.py::test_run_answers_depend_on_the_image_only[gemma3]",
    "tests/goldens/test_logits.py::test_architectures_agree_with_llama_cpp[vectors-gemma3]",
]
TOUCH = """
import strict_memory
from localllm.engine.memory.cache import ReservedMemory
memory = ReservedMemory(1 << 16, whole=False)
memory.use(5000, 5001)
memory.bytes[4096:8192] = 1
USE
print(memory.bytes[30000] + memory.bytes[5000], flush=True)
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")


@pytest.mark.sampled
@pytest.mark.slow
def test_all_pages_touched_were_asked_for():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "strict_memory", "-p", "no:cacheprovider", *CASES]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("", ""),
        ("memory.use(30000, 30001)", "1\n"),
        ("memory.use(30000, 30001); memory.give_back(4096, 8192)", ""),
        ("memory.use(0, 1 << 16); memory.give_back(4097, 8192)", "1\n"),  # no whole page
    ],
)
def test_touching_a_page_without_asking_ends_the_program(use: str, expected: str):
    program = [sys.executable, "-c", TOUCH.replace("USE", use)]
    done = subprocess.run(program, cwd=SUPPORT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode == 0) == (expected, bool(expected)), done.stderr
