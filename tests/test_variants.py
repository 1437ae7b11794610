"""The kernels for other CPUs, in a process of their own: run here, against NumPy, or at least looked at.

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say for which CPU Numba and the kernel library compile, so that a whole session of
tests runs as it would there.
"""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from conftest import ROOT

import localllm
from localllm.files.kept import read_kept
from localllm.kernels.target import cpu_features

sys.path.insert(0, str(ROOT / "scripts"))
from make_synthetic import SHAPES, write_model

BASE = "+64bit,+cmov,+cx8,+fxsr,+mmx,+sse,+sse2"
AVX2 = BASE + ",+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+cx16,+sahf"
AVX512 = AVX2 + "".join(f",+avx512{name}" for name in ("f", "bw", "cd", "dq", "vl", "vnni", "vbmi", "vbmi2", "bf16"))
AMX = AVX512 + ",+amx-tile,+amx-bf16,+amx-int8"
CPUS = {"x86-64": BASE, "haswell": AVX2, "alderlake": AVX2 + ",+avxvnni", "sapphirerapids": AMX}
FORMATS = "Q4_0 or Q5_1 or Q8_0 or Q4_K or Q6_K or Q2_K or IQ4_XS or F16"
ROWWISE = "_norm or functions or temper or test_columns or add or swiglu or select or angles or rope or test_quantize["
TESTS = {
    "test_kernels.py": f"({FORMATS} or {ROWWISE} or test_logits)",
    "test_attention.py": "(F16 or Q8_0 or scores or windows or softcaps or slopes or visible)",
    "test_simd.py": "test",
    "test_recurrent_kernels.py": "test",
    "test_variants.py": "whole_model",
}
MATHEMATICS = {"log", "sin", "cos", "sincos"}  # what kernels may call, once for many numbers

needs_x86 = pytest.mark.skipif("sse2" not in cpu_features(), reason="needs an x86-64")


def run_as(cpu: str, cache: Path, *arguments: str) -> str:
    """What Python writes to stdout if it believes to run on that CPU."""
    chosen = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": CPUS[cpu], "LOCALLLM_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | chosen, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def functions_needed(code: bytes) -> set[str]:
    """The functions that machine code in an ELF file calls elsewhere."""
    sections = {section.name(): section.data() for section in llvm.ObjectFileRef.from_data(code).sections()}
    names = sections[b".strtab"]
    symbols = struct.iter_unpack("<IBBHQQ", sections[b".symtab"])
    starts = [name for name, _, _, section, _, _ in symbols if name and section == 0]
    return {names[start : names.index(b"\0", start)].decode() for start in starts}


@pytest.mark.slow
@needs_x86
@pytest.mark.parametrize("cpu", ["haswell", "x86-64"])
def test_another_cpu(cpu, tmp_path):
    """With AVX2, and with what every x86-64 has. Nothing calls a function for what other CPUs have instructions for."""
    if not {feature.strip("+") for feature in CPUS[cpu].split(",")} <= cpu_features():
        pytest.skip(f"this CPU is no {cpu}")
    selection = " or ".join(f"{file} and {names}" for file, names in TESTS.items())
    files = [f"tests/{file}" for file in TESTS]
    assert " passed" in run_as(cpu, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection, *files)
    objects = list(tmp_path.rglob("*.o"))
    assert len(objects) > 30
    if sys.platform == "linux":
        needed = set().union(*(functions_needed(read_kept(path) or b"") for path in objects))
        assert needed and needed <= MATHEMATICS


ASSEMBLY = """
from localllm.kernels.compile import linked
from localllm.kernels.cpu.pieces import PIECES
for piece in PIECES:
    module, machine = linked(f"{piece}-Q4_K")
    print(machine.emit_assembly(module))
"""


@pytest.mark.slow
@needs_x86
def test_avx_vnni(tmp_path):
    """Its dot product is encoded as on CPUs without AVX-512, whose registers and instructions are not used."""
    assembly = run_as("alderlake", tmp_path, "-c", ASSEMBLY)
    assert len(re.findall(r"\{vex\}\s+vpdpbusd", assembly)) > 16
    assert not re.search(r"\{evex\}|%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])\b", assembly)


def test_a_whole_model_agrees_with_the_reference(tmp_path):
    """Long batches round activations to 8 bits, short ones to 16."""
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
