"""Build wheels that carry machine code. Usage: scripts/wheels [SYSTEM...] [--lanes NAME,...] [--output FOLDER].

For each system (default: all), compiles all kernels for its lanes and builds a wheel that carries them.
Systems: linux-x86_64, linux-aarch64, windows-amd64, macos-arm64, macos-x86_64. Compiled kernels are
cached, and compiled again only if sources or compilers change. See localllm/kernels/build/shipped.py.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from localllm.errors import LocalllmError
from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.kernels.build.compilers import CompilerPool
from localllm.kernels.build.objects import get_object_folder
from localllm.kernels.build.shipped import compute_source_hash
from localllm.kernels.cpu import FLOAT_FORMATS, SUB_BLOCK
from localllm.kernels.cpu.attention.cache import STORAGE
from localllm.kernels.cpu.matmul.kernel_variants import VARIANTS
from localllm.kernels.machine import Lane
from localllm.kernels.table import KERNELS
from scripts.tools.cross_compile import HANDLER, handler, initialize

ROOT = Path(__file__).resolve().parents[2]
MOST = 12_000_000  # bytes of a wheel
V3 = (
    "+64bit,+cmov,+crc32,+cx8,+cx16,+fxsr,+mmx,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+sahf,+xsave,+avx,+avx2,"
    "+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe"
)
V4 = f"{V3},+avx512f,+avx512cd,+avx512bw,+avx512dq,+avx512vl"
VNNI = f"{V4},+avx512vnni,+avx512ifma,+avx512vbmi,+avx512vbmi2,+avx512bitalg,+avx512vpopcntdq"
X86 = {
    "avx2": Lane("haswell", V3),
    "avx-vnni": Lane("alderlake", f"{V3},+avxvnni"),
    "avx512-vnni": Lane("icelake-server", VNNI),
    "avx512-bf16": Lane("znver4", f"{VNNI},+avx512bf16"),
    "amx": Lane("sapphirerapids", f"{VNNI},+avx512bf16,+avxvnni,+amx-tile,+amx-bf16,+amx-int8"),
}
ARM = {
    "neon-dotprod": Lane("cortex-a76", "+neon,+dotprod"),
    "neon-i8mm": Lane("neoverse-v1", "+neon,+dotprod,+i8mm"),
}
APPLE = {
    "neon-dotprod": Lane("apple-m1", "+neon,+dotprod"),
    "neon-i8mm": Lane("apple-m2", "+neon,+dotprod,+i8mm"),
}
# By system: the wheel's platform tag and its lanes. Macs with Intel CPUs of 2013 to 2020 have AVX2, few have more.
SYSTEMS = {
    "linux-x86_64": ("manylinux_2_17_x86_64.manylinux2014_x86_64", X86),
    "linux-aarch64": ("manylinux_2_17_aarch64.manylinux2014_aarch64", ARM),
    "windows-amd64": ("win_amd64", X86),
    "macos-arm64": ("macosx_11_0_arm64", APPLE),
    "macos-x86_64": ("macosx_10_13_x86_64", {"avx2": X86["avx2"]}),
}


class WheelError(Exception):
    """Raised when a wheel cannot be built; the message says what to do."""


ON_CPU = {name: row for name, row in KERNELS.items() if row.cpu}
IN_TILES = [name for name, row in ON_CPU.items() if row.cpu.startswith("amx") or name == "multiply_peak_tiles"]


def kernels_by_part() -> dict[str, list[str]]:
    """List all kernels but those of AMX: those of a format together, and others."""
    parts = {name: [*(f"{piece}-{name}" for piece in VARIANTS), f"embed-{name}"] for name in SUB_BLOCK}
    parts |= {name: [f"linear_float-{name}", f"embed-{name}", f"add_low_rank-{name}"] for name in sorted(FLOAT_FORMATS)}
    kinds = {name for name in ON_CPU if name not in IN_TILES}
    by_format = {*VARIANTS, "linear_float", "embed", "add_low_rank"}
    by_storage = {"attend", "store", "recall", "select_keys", "select_key_blocks"}
    by_rule = {"wkv": ("gated", "first", "delta"), "head_scan": ("plain", "delta")}
    parts |= {f"cache in {kind}": [f"{name}-{kind}" for name in sorted(by_storage)] for kind in STORAGE}
    parts["recurrent"] = [f"{name}-{rule}" for name, rules in by_rule.items() for rule in rules]
    parts["peak"] = ["multiply_peak"]
    return parts | {"others": sorted(kinds - by_format - by_storage - {*by_rule, "multiply_peak"})}


def kernels_of(lane: Lane) -> list[str]:
    """List the kernels that a wheel carries for a lane."""
    names = [name for part in kernels_by_part().values() for name in part]
    if lane.has_tiles:
        names += [f"unpack_groups-{name}" for name in SUB_BLOCK] + [
            f"unpack_rows-{name}" for name in sorted(FLOAT_FORMATS)
        ]
        names += [f"attend_tiles-{kind}" for kind in STORAGE]
        by_format = {"unpack_groups", "unpack_rows", "attend_tiles"}
        names += [name for name in IN_TILES if name not in by_format]
    return [*names, HANDLER]


def compile_lane(system: str, lane: Lane) -> dict[str, bytes]:
    """Return the object files of a lane by the name of the kernel, compiled or kept. Raises LocalllmError."""
    names, folder = kernels_of(lane), Path(f"{get_object_folder(lane)}-{system}")
    objects = {name: code for name in names if (code := read_checksummed(folder / f"{name}.o"))}
    missing = [name for name in names if name not in objects]
    if not missing:
        return objects
    tell = sys.stderr.isatty()

    def keep(name: str, code: bytes) -> None:
        write_checksummed(folder / f"{name}.o", code)

    def progress(done: int, total: int) -> None:
        if tell:
            print(f"\r{system} {lane.cpu}: {done} of {total}", end="", file=sys.stderr, flush=True)

    compilers = CompilerPool(missing, keep, "scripts.tools.cross_compile", system, lane=lane)
    try:
        return objects | compilers.wait(missing, progress)
    finally:
        compilers.close()
        if tell:
            print(file=sys.stderr)


def write_archive(path: Path, objects: dict[str, bytes]) -> None:
    """Write a zip archive whose bytes depend on the object files alone."""
    with ZipFile(path, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        for name, code in sorted(objects.items()):
            archive.writestr(ZipInfo(f"{name}.o"), code, ZIP_DEFLATED, 9)


def write_archives(folder: Path, system: str, lanes: dict[str, Lane]) -> None:
    """Write the archives of a system's lanes, and lanes.json. Raises LocalllmError."""
    rows = {}
    for name, lane in lanes.items():
        started, path = time.monotonic(), folder / f"{name}.zip"
        objects = compile_lane(system, lane)
        objects[handler(system)[0]] = objects.pop(HANDLER)
        write_archive(path, objects)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        rows[path.name] = {"cpu": lane.cpu, "features": lane.feature_string, "sha256": digest}
        size, seconds = path.stat().st_size / 1e6, time.monotonic() - started
        print(f"{system} {name}: {len(objects)} kernels, {size:.2f} MB, {seconds:.0f} s", file=sys.stderr)
    told = {"sources": compute_source_hash(), "archives": rows}
    (folder / "lanes.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def version() -> str:
    """Return the project's version."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def build_wheel(system: str, lanes: dict[str, Lane], output: Path) -> Path:
    """Build the wheel of a system. Raises WheelError, LocalllmError."""
    tag, _ = SYSTEMS[system]
    with tempfile.TemporaryDirectory() as folder:
        write_archives(Path(folder), system, lanes)
        environment = os.environ | {"LOCALLLM_WHEEL_KERNELS": folder, "LOCALLLM_WHEEL_TAG": f"py3-none-{tag}"}
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(output)]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            raise WheelError("hatchling failed: fix what it says")
    (wheel,) = output.glob(f"localllm-{version()}-py3-none-{tag}.whl")
    if (size := wheel.stat().st_size) > MOST:
        raise WheelError(f"{wheel.name} has {size / 1e6:.1f} MB, {MOST / 1e6:.0f} are allowed: leave out a lane")
    return wheel


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=", ".join(SYSTEMS))
    parser.add_argument("--lanes", help="only these, with commas between them")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    initialize()
    try:
        if unknown := sorted({*options.systems} - {*SYSTEMS}):
            raise WheelError(f"{unknown[0]}: unknown system; known are {', '.join(SYSTEMS)}")
        for system in options.systems or SYSTEMS:
            lanes = SYSTEMS[system][1]
            if options.lanes:
                lanes = {name: lane for name, lane in lanes.items() if name in options.lanes.split(",")}
            wheel = build_wheel(system, lanes, options.output)
            print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB")
    except (WheelError, LocalllmError, OSError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
