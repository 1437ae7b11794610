"""Kernels for 64-bit ARMs, compiled on any computer: which instructions they have.

scripts/platform/test_arm64 runs them.
"""

import os
import re
import subprocess
import sys

import pytest
from project import ROOT

from localllm.engine.memory.cache import ReservedMemory
from localllm.kernels.cpu import SUB_BLOCK
from localllm.kernels.cpu.matmul.kernel_variants import VARIANTS
from localllm.system import cpu, memory
from localllm.system.cpu import read_arm_features
from localllm.system.memory import get_available_memory
from scripts.tools.wheels import kernels_by_part

LINUX, MACOS = "linux-aarch64", "macos-arm64"
APPLE_M1, APPLE_M4 = ("apple-m1", "+neon,+dotprod"), ("apple-m4", "+neon,+dotprod,+i8mm")
A72, V1 = ("cortex-a72", "+neon"), ("neoverse-v1", "+neon,+dotprod,+i8mm")
BYTE_PRODUCTS = {"usdot", "sdot", "udot", "usmmla", "smmla", "ummla", "smull"}
# What kernels may call elsewhere: mathematics, and what fills memory with zeros.
MAY_CALL = {"exp", "expf", "log", "logf", "log1pf", "sin", "cos", "sincos", "__sincos_stret", "memset", "bzero"}


def assembly(system: str, cpu: tuple[str, str], *kernels: str) -> str:
    """Return the kernels' assembly for that CPU."""
    environment = os.environ | {"NUMBA_CPU_NAME": cpu[0], "NUMBA_CPU_FEATURES": cpu[1], "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "scripts.tools.cross_compile", system, "--assembly", *kernels]
    done = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def instructions(text: str) -> set[str]:
    return set(re.findall(r"^\t([a-z][a-z0-9]*)", text, re.MULTILINE))


def called(text: str) -> set[str]:
    """Return the functions called and not defined here, without the underscore that macOS puts before names."""
    here = set(re.findall(r'^"?([^\s":]+)"?:', text, re.MULTILINE))
    names = re.findall(r'^\tbl\t"?([^\s"]+)"?', text, re.MULTILINE)
    return {name for name in names if name not in here}


@pytest.mark.sampled(every=6)  # to compile it takes five seconds
@pytest.mark.parametrize(
    ("system", "cpu", "products"),
    [
        (LINUX, V1, {"usdot", "usmmla", "smmla"}),
        pytest.param(MACOS, APPLE_M1, {"sdot"}, marks=pytest.mark.slow),
        pytest.param(MACOS, APPLE_M4, {"usdot", "usmmla", "smmla"}, marks=pytest.mark.slow),
    ],
)
def test_products_of_bytes_use_the_cpus_instructions(system, cpu, products):
    text = assembly(system, cpu, *(f"{piece}-TQ2_0" for piece in VARIANTS))
    assert instructions(text) & BYTE_PRODUCTS == products
    assert {name.removeprefix("_") for name in called(text)} <= MAY_CALL


PARTS = kernels_by_part()


@pytest.mark.slow
@pytest.mark.sampled(every=30)  # a part takes seven seconds, others twenty
@pytest.mark.parametrize("cpu", [APPLE_M1, APPLE_M4], ids=lambda cpu: cpu[0])
@pytest.mark.parametrize("part", PARTS)
def test_every_kernel_compiles_for_macs(part, cpu):
    """Expect dot products for quantized weights, and no call of a function that macOS does not have."""
    text = assembly(MACOS, cpu, *PARTS[part])
    dots = {"sdot", "usdot", "udot", "usmmla", "smmla", "ummla"}
    assert bool(instructions(text) & dots) == (part in {*SUB_BLOCK, "peak"})
    assert {name.removeprefix("_") for name in called(text)} <= MAY_CALL


@pytest.mark.sampled
@pytest.mark.slow
def test_kernels_for_the_first_arms_call_no_functions():
    """Expect instructions for waiting, the clock, half floats, and products that are added."""
    text = assembly(LINUX, A72, "run", "embed-F16", "embed-Q5_0", "rms_norm")
    assert {"isb", "mrs", "fcvtl", "fmla"} <= instructions(text)
    assert called(text) <= MAY_CALL


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ({}, ["neon"]),
        ({16: 1 << 20, 26: 0}, ["neon", "dotprod"]),
        ({16: 1 << 20, 26: 1 << 13}, ["neon", "dotprod", "i8mm"]),
    ],
)
def test_features_are_read_from_linux(monkeypatch, words, features):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(cpu, "read_auxiliary_value", lambda word: words.get(word, 0))
    assert read_arm_features() == features


@pytest.mark.parametrize(("known", "features"), [({}, []), ({"DotProd": 1, "I8MM": 0}, ["dotprod"])])
def test_features_are_read_from_macos(monkeypatch, known, features):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(cpu, "read_sysctl", lambda name: known.get(name.removeprefix("hw.optional.arm.FEAT_"), 0))
    assert read_arm_features() == ["neon", *features]


def test_memory_of_macos_is_counted_and_given_back(monkeypatch):
    """Expect memory that was given back to read as zero."""
    monkeypatch.setattr(sys, "platform", "darwin")
    known = {"hw.memsize": 16_000_000_000, "kern.memorystatus_level": 60}
    monkeypatch.setattr(memory, "read_sysctl", lambda name: known.get(name, 0))
    assert get_available_memory() == 9_600_000_000
    known.clear()
    assert get_available_memory() == sys.maxsize
    reserved = ReservedMemory(1 << 20)
    reserved.bytes[:] = 1
    reserved.give_back(100_000, 900_000)
    assert (
        reserved.bytes[:65_536].all() and not reserved.bytes[131_072:851_968].any() and reserved.bytes[917_504:].all()
    )
    reserved.bytes[:] = 2
    assert reserved.bytes.min() == 2
