"""Kernels for other CPUs, in a process of their own: run here, against NumPy, or at least looked at.

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say for which CPU Numba and the kernel library compile, so that a whole session of
tests runs as it would there.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from project import ROOT
from selection import again_the_same, everything

import localllm
from localllm.kernels.machine import get_lane
from localllm.system.files import get_cache_folder

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
from make_synthetic import SHAPES, write_model

BASE = "+64bit,+cmov,+cx8,+fxsr,+mmx,+sse,+sse2"
AVX2 = BASE + ",+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+cx16,+sahf"
AVX512 = AVX2 + "".join(f",+avx512{name}" for name in ("f", "bw", "cd", "dq", "vl", "vnni", "vbmi", "vbmi2", "bf16"))
AMX = AVX512 + ",+amx-tile,+amx-bf16,+amx-int8"
SSE4 = BASE + ",+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+sahf"
CPUS = {"x86-64": BASE, "nehalem": SSE4, "haswell": AVX2, "alderlake": AVX2 + ",+avxvnni", "sapphirerapids": AMX}
FORMATS = "F16 or Q4_0 or Q8_0 or Q4_K_M"
FAMILIES = "llama_moe or gemma2 or deepseek2_lite or qwen35 or mamba2"
TESTS = {
    "unit/kernels/simd/test_simd.py": "test",
    "platform/test_variants.py": "whole_model",
    "goldens/test_logits.py": f"(test_common_formats and ({FORMATS})) or (test_architectures and ({FAMILIES}))",
}
# Without --all, instead of those whose turn it is: there may be none.
FEWER = {"goldens/test_logits.py": "(test_common_formats and Q4_K_M) or (test_architectures and mamba2)"}

needs_x86 = pytest.mark.skipif("sse2" not in get_lane().features, reason="needs an x86-64")


def run_as(cpu: str, cache: Path, *arguments: str) -> str:
    """Return what Python writes to stdout if it believes to run on that CPU."""
    chosen = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": CPUS[cpu], "LOCALLLM_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | chosen, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.slow(60)
@pytest.mark.sampled(every=36)
@needs_x86
@pytest.mark.parametrize("file", TESTS)
@pytest.mark.parametrize("cpu", ["alderlake", "haswell", "nehalem", "x86-64"])
def test_tests_pass_on_another_cpu(cpu, file):
    """Run the vocabulary of vectors, a model, and llama.cpp's logits with AVX-VNNI, AVX2, SSE4, and without any.

    Kernels one by one: tests/unit/kernels/test_lanes.py.
    """
    if not {feature.strip("+") for feature in CPUS[cpu].split(",")} <= get_lane().features:
        pytest.skip(f"this CPU is no {cpu}")
    tests = TESTS[file] if everything() else FEWER.get(file, TESTS[file])
    arguments = ["-q", "-p", "no:cacheprovider", "-k", tests, f"tests/{file}", *again_the_same()]
    arguments += ["--all"] * (file in FEWER)
    assert " passed" in run_as(cpu, get_cache_folder(), "-m", "pytest", *arguments)


ASSEMBLY = """
from localllm.kernels.build.compile import compile_module
from localllm.kernels.cpu.matmul.kernel_variants import VARIANTS
for piece in VARIANTS:
    module, machine = compile_module(f"{piece}-Q4_K")
    print(machine.emit_assembly(module))
"""


@pytest.mark.sampled
@needs_x86
def test_avx_vnni_uses_nothing_of_avx_512(tmp_path):
    """Expect its dot product in the encoding of CPUs without AVX-512, whose registers and instructions are not used."""
    assembly = run_as("alderlake", tmp_path, "-c", ASSEMBLY)
    assert len(re.findall(r"\{vex\}\s+vpdpbusd", assembly)) > 16
    assert not re.search(r"\{evex\}|%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])\b", assembly)


def test_a_whole_model_agrees_with_the_reference(tmp_path):
    """Round activations to 8 bits in long batches, to 16 in short ones."""
    write_model(tmp_path / "model.gguf", SHAPES["tiny"], "Q4_K_M")
    ids = np.random.default_rng(0).integers(0, 500, 200).tolist()
    with localllm.open(tmp_path / "model.gguf") as model:
        answer = "".join(model.generate(ids[:20], max_tokens=8, temperature=0))
        short, long = model.logits(ids[:60]), model.logits(ids)
    with localllm.open(tmp_path / "model.gguf", backend="reference") as model:
        exact = model.logits(ids)
        assert answer == "".join(model.generate(ids[:20], max_tokens=8, temperature=0))
    for got, error in ((short, 1e-7), (long, 1e-3)):
        difference = got - exact[: len(got)]
        assert (difference**2).sum() / (exact[: len(got)] ** 2).sum() < error
