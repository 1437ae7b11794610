"""The kernels of other CPUs: compiled for them and run here, against NumPy, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from localllm.kernels.target import cpu_features

BASE = ["64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"]
AVX2 = [
    *BASE, "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe",
    "cx16", "sahf",
]  # fmt: skip
LANES = {"avx2": ("haswell", AVX2), "generic": ("x86-64", BASE)}
KERNELS = "Q4_0 or Q5_1 or Q8_0 or Q4_K or Q6_K or Q2_K or IQ4_XS or F16 or rms_norm or rope or swiglu"


@pytest.mark.slow
@pytest.mark.skipif("sse2" not in cpu_features(), reason="not an x86-64")
@pytest.mark.parametrize("lane", LANES)
def test_kernels_for_another_cpu(lane: str, tmp_path: Path):
    name, features = LANES[lane]
    if not set(features) <= cpu_features():
        pytest.skip(f"this CPU cannot run {name}'s instructions")
    listed = ",".join(f"+{feature}" for feature in features)
    environment = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": listed, "LOCALLLM_CACHE": str(tmp_path)}
    selection = f"test_kernels.py and ({KERNELS}) or test_simd.py and (dot or f16 or half or lookup or flags)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection]
    command += [str(ROOT / "tests" / file) for file in ("test_kernels.py", "test_simd.py")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
