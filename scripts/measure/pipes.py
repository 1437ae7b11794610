"""Judge the innermost blocks of prompt kernels by LLVM's model of other CPUs.

    python scripts/measure pipes [--formats Q4_K,Q8_0] [--cpus NAME,...] [--kernel linear_fast]

Compiles a kernel for each CPU, takes the basic block with most products, which is the body of its innermost
loop, and asks llvm-mca (Debian's llvm-19) how
many cycles a pass takes. Prints a Markdown table: cycles for 32 multiplications of bytes; the cycles for which the
busiest pipe is needed at least (block reciprocal throughput), and their share of the pass: what is missing to 100 % is
lost to latency and dependencies; and the instructions of a pass, with products and accesses to the stack among them.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from common import ROOT
from wheels import V3, VNNI

# (LLVM's name, features, system); znver5 has the model of znver4 in LLVM 19, apple-m4 that of all of Apple's.
CPUS = {
    "haswell": (V3, "linux-x86_64"),
    "skylake": (V3, "linux-x86_64"),
    "icelake-server": (VNNI, "linux-x86_64"),
    "alderlake": (f"{V3},+avxvnni", "linux-x86_64"),
    "sapphirerapids": (f"{VNNI},+avx512bf16,+avxvnni", "linux-x86_64"),  # without its tiles
    "znver2": (V3, "linux-x86_64"),
    "znver3": (V3, "linux-x86_64"),
    "znver4": (f"{VNNI},+avx512bf16", "linux-x86_64"),
    "znver5": (f"{VNNI},+avx512bf16,+avxvnni", "linux-x86_64"),
    "apple-m1": ("+neon,+dotprod", "linux-aarch64"),
    "apple-m4": ("+neon,+dotprod,+i8mm", "linux-aarch64"),
    "cortex-a76": ("+neon,+dotprod", "linux-aarch64"),
    "neoverse-n1": ("+neon,+dotprod", "linux-aarch64"),
    "neoverse-v2": ("+neon,+dotprod,+i8mm", "linux-aarch64"),
}
# Multiplications of bytes by an instruction, for 16 bytes of a register; words count only where there are no bytes.
BYTES = {"vpmaddubsw": 16, "vpdpbusd": 16, "sdot": 16, "usdot": 16, "udot": 16, "smmla": 32, "usmmla": 32, "ummla": 32}
WORDS = {"vpmaddwd": 8, "vpdpwssd": 8, "smlal": 8, "smlal2": 8}

JUMP = r"(j\w+|b|b\.\w+|cbn?z|tbn?z|retq?)\b"


class Block(NamedTuple):
    """Instructions that are executed one after the other, one a line."""

    lines: list[str]

    @property
    def multiplications(self) -> int:
        """The multiplications of weights and activations in a pass."""
        for counts in (BYTES, WORDS):
            if total := sum(counts.get(word(line), 0) * registers(line) for line in self.lines):
                return total
        return 0

    @property
    def products(self) -> int:
        """The instructions that multiply."""
        return sum(word(line) in BYTES or word(line) in WORDS for line in self.lines)

    @property
    def on_stack(self) -> int:
        """The instructions that read or write the stack."""
        return sum("(%rsp" in line or "[sp" in line or "(%rbp" in line for line in self.lines)


def word(line: str) -> str:
    """Return the instruction's name, without its encoding and the arrangement that Apple's assembler writes."""
    return line.removeprefix("{vex}").split()[0].split(".")[0]


def registers(line: str) -> int:
    """Return how many times 16 bytes an instruction treats."""
    return 4 if "%zmm" in line else 2 if "%ymm" in line else 1


def basic_blocks(assembly: str) -> list[Block]:
    """List the runs of instructions between labels and jumps."""
    blocks, lines = list[Block](), list[str]()
    comment = "#" if "%ymm" in assembly else "//"  # of x86, of ARM
    for line in (line.split(comment)[0].strip() for line in assembly.splitlines()):
        if line.endswith(":") or re.match(JUMP, line):
            blocks.append(Block(lines))
            lines = []
        elif line and not line.startswith("."):
            lines.append(line)
    return blocks


def assembly_of(kernel: str, cpu: str) -> str:
    """Compile a kernel for a CPU."""
    features, system = CPUS[cpu]
    environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-m", "scripts.tools.cross_compile", system, "--assembly", kernel]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def simulate(block: Block, cpu: str, program: str) -> tuple[float, float]:
    """Return the cycles of a pass, and those that its busiest pipe needs."""
    target = "aarch64" if CPUS[cpu][1] != "linux-x86_64" else "x86_64"
    text = "\n".join(block.lines)
    command = [program, f"-mtriple={target}", f"-mcpu={cpu}", f"-mattr={CPUS[cpu][0]}", "-iterations=200"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    cycles, least = re.search(r"Total Cycles:\s+(\d+)", done), re.search(r"Block RThroughput:\s+([\d.]+)", done)
    assert cycles and least
    return int(cycles[1]) / 200, float(least[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="Q4_K,Q8_0")
    parser.add_argument("--cpus", default=",".join(CPUS))
    parser.add_argument("--kernel", default="linear_fast")
    parser.add_argument("--program", default="llvm-mca-19")
    parser.add_argument("--save", type=Path, help="a folder for the blocks, to read")
    options = parser.parse_args()
    print("| CPU | format | cycles for 32 multiplications | busiest pipe | share | instructions | products | stack |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for cpu in options.cpus.split(","):
        for name in options.formats.split(","):
            blocks = basic_blocks(assembly_of(f"{options.kernel}-{name}", cpu))
            block = max(blocks, key=lambda each: each.multiplications)
            if options.save:
                (options.save / f"{cpu}-{name}.s").write_text("\n".join(block.lines) + "\n")
            cycles, least = simulate(block, cpu, options.program)
            each = block.multiplications / 32
            print(
                f"| {cpu} | {name} | {cycles / each:.2f} | {least / each:.2f} | {least / cycles:.0%} | "
                f"{len(block.lines)} | {block.products} | {block.on_stack} |",
                flush=True,
            )
