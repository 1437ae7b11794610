"""Test the assembly of CUDA kernels without a GPU, and the cache of machine code."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from project import ROOT

from localllm.kernels.cuda import build
from localllm.kernels.table import KERNELS

pytestmark = pytest.mark.skipif(find_spec("numba_cuda") is None, reason="needs pip install 'localllm[cuda]'")


def has_assembler() -> bool:
    try:
        return build.find_assembler().is_file()
    except FileNotFoundError:
        return False


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python without the simulator."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_ENABLE_CUDASIM": "0"} | variables
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


@pytest.mark.sampled(every=12)  # ten seconds each
@pytest.mark.skipif(not has_assembler(), reason="needs ptxas, of the wheel nvidia-cuda-nvcc")
@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.9", "9.0", "10.0"])
def test_kernels_are_assembled_within_limits(capability):
    """Allow no spills, no local memory, few registers; scripts/platform/check_ptx.py does all types for all GPUs."""
    result = run(str(ROOT / "scripts/platform/check_ptx.py"), "--quick", "--capability", capability)
    assert result.returncode == 0, result.stdout + result.stderr
    kinds = {line.split()[0].partition("-")[0] for line in result.stdout.splitlines()}
    assert capability != "8.0" or kinds >= {name for name, row in KERNELS.items() if row.cuda}


def test_every_kernel_name_that_is_checked_can_be_built():
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts' / 'platform'}"}
    result = run(
        "-c",
        "import check_ptx; from localllm.kernels.cuda import find_kernel as f; [*map(f, check_ptx.names(0, '8.0'))]",
        **path,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_kernel_with_too_many_registers_is_reported():
    code = "import check_ptx; check_ptx.REGISTERS = 8; check_ptx.main()"
    result = run("-c", code, "fetch", "--capability", "8.0", PYTHONPATH=f"{ROOT}:{ROOT / 'scripts' / 'platform'}")
    assert result.returncode == 1 and "fetch" in result.stdout and "over a limit" in result.stdout


KEEP = """
from localllm.kernels.cuda.build import build_machine_code
told = []
codes = build_machine_code(["fetch"], (8, 0), lambda done, total: told.append((done, total)), print)
code, entry = codes["fetch"]
assert code[:4] == b"\\x7fELF" and entry.encode() in code, entry
print(told)
"""


@pytest.mark.sampled
@pytest.mark.slow
def test_machine_code_is_cached_and_damage_replaced(tmp_path):
    cache = {"LOCALLLM_CACHE": str(tmp_path), "NUMBA_ENABLE_CUDASIM": "1"}  # which compilers do not heed
    assert run("-c", KEEP, **cache).stdout == "[(0, 1), (1, 1)]\n"
    assert run("-c", KEEP, **cache).stdout == "[]\n"
    (file,) = Path(tmp_path).rglob("*.cubin")
    file.write_bytes(file.read_bytes()[:-1] + b"?")  # damage
    assert run("-c", KEEP, **cache).stdout == "[(0, 1), (1, 1)]\n"
    (tmp_path / "file").write_text("not a folder")
    output = run("-c", KEEP, **cache | {"LOCALLLM_CACHE": str(tmp_path / "file")}).stdout.splitlines()
    folder = tmp_path / "file" / "kernels" / file.parent.name
    assert output == [f"compiled kernels cannot be kept in {folder}: Not a directory", "[(0, 1), (1, 1)]"]
