#!/usr/bin/env python3
"""Record what each operation becomes on a target that computes nothing, on the CPU and on a GPU.

    python scripts/record/record_steps.py

Writes tests/goldens/steps.txt, steps_cpu.txt and steps_cuda.txt. Look at what differs: nothing else verifies it.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from tests.unit.engine.cpu import test_lowering as cpu  # noqa: E402
from tests.unit.engine.cuda import test_lowering as cuda  # noqa: E402
from tests.unit.engine.lower import test_lowering as lower  # noqa: E402

if __name__ == "__main__":
    for tests in (lower, cpu, cuda):
        lower.written(tests.FILE, tests.said())
