"""The object files of kernels in the user's cache folder.

The folder's name is a hash of everything that machine code depends on: sources, compiler versions, CPU.
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from localllm.files.safe_file import remove_abandoned
from localllm.kernels.machine import Lane, get_lane, read_version_file
from localllm.quant import formats
from localllm.system import cpu
from localllm.system.files import get_cache_folder

Progress = Callable[[int, int], None]  # (kernels compiled, kernels to compile)
SOURCES = (
    "cpu/**/*.py",
    "formats/*.py",
    "simd/*.py",
    "build/compile.py",
    "build/faults.py",
    "build/objects.py",
    "build/pipeline.py",
    "machine.py",
    "declaration.py",
    "formulas.py",
    "table.py",
)  # in localllm.kernels
FOLDER_NAME = re.compile("[0-9a-f]{20}(-[a-z0-9_-]+)?")  # a hash, and a system that scripts/wheels compiled for
DAY = 24 * 3600  # seconds
MAX_UNUSED_SECONDS = 30 * DAY  # seconds after which an unused folder is removed


@cache
def get_object_folder(lane: Lane | None = None) -> Path:
    """Return the folder of a lane's object files, this computer's by default, named by the hash."""
    lane = lane or get_lane()
    key = hashlib.sha256()
    add_sources(key, SOURCES)
    compilers = read_version_file("numba"), read_version_file("llvmlite")
    for part in (*compilers, lane.cpu.encode(), lane.feature_string.encode()):
        key.update(part + b"\0")
    return get_cache_folder() / "kernels" / key.hexdigest()[:20]


def add_sources(key: "hashlib._Hash", patterns: Iterable[str]) -> None:
    """Add the names and contents of matching files, and of the tables of formats, to a hash.

    patterns: of files in localllm.kernels.
    """
    kernels = Path(__file__).parents[1]
    paths = {path.relative_to(kernels).as_posix(): path for pattern in patterns for path in kernels.glob(pattern)}
    paths |= {f"quant/{name}": Path(formats.__file__).with_name(name) for name in ("formats.py", "block_codes.py")}
    paths["system/cpu.py"] = Path(cpu.__file__)
    for name, path in sorted(paths.items()):
        key.update(name.encode() + b"\0" + path.read_bytes() + b"\0")


def get_object_file(name: str, lane: Lane | None = None) -> Path:
    return get_object_folder(lane) / f"{name}.o"


def get_symbol(name: str) -> str:
    return f"localllm_{name}"


def mark_used(folder: Path | None = None) -> None:
    """Record the use of a folder in its modification time, at most once a day.

    folder: by default this computer's.
    """
    folder = folder or get_object_folder()
    with suppress(OSError):
        if folder.stat().st_mtime < time.time() - DAY:
            os.utime(folder)


def prune() -> None:
    """Remove object files that were not used for UNUSED seconds, and unfinished files of killed programs."""
    used, now = get_object_folder(), time.time()
    with suppress(OSError):  # a folder that cannot be read
        for folder in used.parent.glob("*"):
            if folder != used and FOLDER_NAME.fullmatch(folder.name) and compute_age(folder, now) > MAX_UNUSED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in used.parent.glob("*"):
            remove_abandoned(str(folder))


def compute_age(path: Path, now: float) -> float:
    """Return the seconds since a file or folder was last modified; 0 if it no longer exists."""
    try:
        return now - path.lstat().st_mtime
    except OSError:
        return 0
