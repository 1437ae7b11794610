"""Object files of kernels in the user's cache folder.

They lie in a folder named by a key of everything that machine code depends on: sources, compiler versions, CPU.
"""

import hashlib
import os
import re
import shutil
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from localllm.files.safe_file import remove_abandoned
from localllm.kernels.target import cpu_feature_string, cpu_name, version_file
from localllm.quant import formats
from localllm.quant.cache import cache_folder

SHARED_SOURCES = (
    "arguments",
    "compile",
    "faults",
    "half",
    "kept",
    "objects",
    "pipeline",
    "simd",
    "system",
    "target",
)  # beside those of localllm.kernels.cpu
FOLDER_NAME = re.compile("[0-9a-f]{20}")
DAY = 24 * 3600  # seconds
UNUSED = 30 * DAY  # a folder that no program has used for this time is removed


@cache
def object_folder() -> Path:
    """The folder of this computer's object files, named by the key."""
    kernels, key = Path(__file__).parent, hashlib.sha256()
    shared = [kernels / f"{name}.py" for name in SHARED_SOURCES]
    for source in [*sorted((kernels / "cpu").rglob("*.py")), *shared, Path(formats.__file__)]:
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    compilers = version_file("numba"), version_file("llvmlite")
    for part in (*compilers, cpu_name().encode(), cpu_feature_string().encode()):
        key.update(part + b"\0")
    return cache_folder() / "kernels" / key.hexdigest()[:20]


def object_file(name: str) -> Path:
    return object_folder() / f"{name}.o"


def symbol(name: str) -> str:
    """The kernel's name in its object file."""
    return f"localllm_{name}"


def mark_used(folder: Path | None = None) -> None:
    """Note once a day that a folder, or that of object files, is in use, as its time of change."""
    folder = folder or object_folder()
    with suppress(OSError):
        if folder.stat().st_mtime < time.time() - DAY:
            os.utime(folder)


def prune() -> None:
    """Remove other keys' folders that are no longer used, and what killed programs have left half written."""
    used, now = object_folder(), time.time()
    with suppress(OSError):  # of a folder that cannot be looked into
        for folder in used.parent.glob("*"):
            if folder != used and FOLDER_NAME.fullmatch(folder.name) and age(folder, now) > UNUSED:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in used.parent.glob("*"):
            remove_abandoned(str(folder))


def age(path: Path, now: float) -> float:
    """Seconds since the last change; 0 if the file is gone."""
    try:
        return now - path.lstat().st_mtime
    except OSError:
        return 0
