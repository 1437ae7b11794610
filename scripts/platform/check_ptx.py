#!/usr/bin/env python3
"""Compile CUDA kernels for cards that are not here, and check what NVIDIA's assembler says of them.

    scripts/platform/check_ptx.py [--quick | KERNEL...] [--capability 7.5 8.0 8.9 9.0 10.0]

Prints a line for each kernel and compute capability: registers of a thread, bytes that it spills, bytes of its stack
and of shared memory. Ends with 1 if one of them is over its limit. Needs what `pip install localllm[cuda]` installs,
and ptxas (of the wheel nvidia-cuda-nvcc), but no card. All kernels for all cards take 15 minutes of CPU time; --quick
is what the tests do: for 8.0 most of them, for the others one of each kind that is made for formats.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

os.environ["NUMBA_ENABLE_CUDASIM"] = "0"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from localllm.kernels.cuda import MODULES  # noqa: E402
from localllm.kernels.cuda.build import assembler, ptx  # noqa: E402
from localllm.kernels.cuda.matmul.planes import PLAIN, PLANES  # noqa: E402

CAPABILITIES = ("7.5", "8.0", "8.9", "9.0", "10.0")
REGISTERS = 128  # of a thread
MORE_REGISTERS = {"attend_few": 192, "attend_many": 255}  # their running sums are most of it
SHARED = 48 << 10  # bytes that every card gives without being asked
CACHE = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")

# The formats that kernels are made for, the first one being what --quick takes for other cards than 8.0.
FORMATS: dict[str, list[str]] = {
    "to_planes": ["Q4_K", *PLANES],
    "unpack": ["Q6_K", *PLANES],
    "embed": ["Q4_K", *PLANES, *PLAIN],
    "linear_planes": [f"{tokens}-{name}" for tokens in (1, 2, 4, 8) for name in ("Q4_K", *PLANES)],
    "linear_plain": [f"{tokens}-{name}" for tokens in (1, 2, 4, 8) for name in ("F16", *PLAIN)],
    "store": ["Q8_0", *CACHE],
    "recall": ["Q8_0", *CACHE],
    "select_keys": ["Q8_0", *CACHE],
    "select_key_blocks": ["Q8_0", *CACHE],
    "attend_few": [f"{kind}-{kind}-4-128-128" for kind in ("F16", "Q8_0")],
    "head_scan": ["delta", "plain"],
    "wkv": ["delta", "gated", "first"],
    "attend_many": [f"{kind}-{kind}-128-128-{depth}" for depth in (8, 16) for kind in ("F16", "Q8_0")],
}
# Those of them that --quick takes for 8.0, besides.
QUICK = re.compile("to_planes-|unpack-|linear_planes-1-|linear_planes-8-(Q2_K|Q6_K)|linear_plain-8-F16")


class Report(NamedTuple):
    """What the assembler says of a kernel; bytes, but for the registers."""

    registers: int
    spilled: int
    stack: int
    shared: int

    def fine(self, name: str) -> bool:
        registers = MORE_REGISTERS.get(name.partition("-")[0], REGISTERS)
        return self.registers <= registers and self.shared <= SHARED and self.spilled == self.stack == 0


def names(quick: bool, capability: str) -> list[str]:
    """Return the kernels to check for a card."""
    made = {kind: [f"{kind}-{name}" for name in dict.fromkeys(formats)] for kind, formats in FORMATS.items()}
    if quick and capability != "8.0":
        return [formats[0] for formats in made.values()]
    if quick:
        made = {kind: [first, *filter(QUICK.match, others)] for kind, (first, *others) in made.items()}
    names = [name for kind in MODULES for name in made.get(kind, [kind])]
    return [name for name in names if capability != "7.5" or not re.match("attend_many.*-16", name)]  # which it has not


def report(name: str, capability: tuple[int, int]) -> Report:
    """Compile a kernel and assemble it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx(name, capability))
        arch = "sm_{}{}".format(*capability)
        command = [str(assembler()), "-v", f"-arch={arch}", str(source), "-o", str(source.with_suffix(".cubin"))]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{name} for {arch}: {result.stderr.strip()}")

    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, result.stderr)))

    spilled = number(r"(\d+) bytes spill")
    return Report(number(r"Used (\d+) registers"), spilled, number(r"(\d+) bytes stack"), number(r"(\d+) bytes smem"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", metavar="KERNEL")
    parser.add_argument("--quick", action="store_true", help="not all of them")
    parser.add_argument("--capability", nargs="+", default=CAPABILITIES, choices=CAPABILITIES)
    given = parser.parse_args()
    bad = 0
    print(f"{'kernel':<32} {'card':>5} {'registers':>9} {'spilled':>8} {'stack':>6} {'shared':>7}")
    for capability in given.capability:
        major, minor = map(int, capability.split("."))
        for name in given.kernels or names(given.quick, capability):
            found = report(name, (major, minor))
            numbers = f"{found.registers:>9} {found.spilled:>8} {found.stack:>6} {found.shared:>7}"
            print(f"{name:<32} {capability:>5} {numbers}{'' if found.fine(name) else '  over a limit'}", flush=True)
            bad += not found.fine(name)
    print(f"{bad} over a limit")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
