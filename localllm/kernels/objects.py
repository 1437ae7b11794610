"""Object files of kernels in the user's cache folder.

They lie in a folder named by a key of everything that machine code depends on: sources, compiler versions, CPU. Each is
behind a checksum, and written atomically, so any number of programs may do it at once.
"""

import errno
import hashlib
import os
import re
import shutil
import time
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import llvmlite

from localllm.files.safe_file import lock, remove_abandoned, temporary_prefix
from localllm.kernels.target import cpu_feature_string, cpu_name
from localllm.quant import formats
from localllm.quant.cache import cache_folder, is_private

SHARED_SOURCES = (
    "arguments",
    "compile",
    "faults",
    "half",
    "objects",
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
    for part in (numba_version(), llvmlite.__version__.encode(), cpu_name().encode(), cpu_feature_string().encode()):
        key.update(part + b"\0")
    return cache_folder() / "kernels" / key.hexdigest()[:20]


def numba_version() -> bytes:
    """The file in which Numba says its version. Importing Numba takes 300 ms, importlib.metadata 12."""
    package = find_spec("numba")
    assert package is not None and package.origin is not None, "numba is a dependency"
    return Path(package.origin).with_name("_version.py").read_bytes()


def object_file(name: str) -> Path:
    return object_folder() / f"{name}.o"


def symbol(name: str) -> str:
    """The kernel's name in its object file."""
    return f"localllm_{name}"


def checksum(path: Path, code: bytes) -> bytes:
    """32 bytes of machine code and the place that it is made for: the key and the kernel's name."""
    return hashlib.sha256(f"{path.parent.name}/{path.name}\0".encode() + code).digest()


def write_object(path: Path, code: bytes) -> None:
    """Keep machine code behind its checksum, in folders private to the user. Readers see the whole file or none.

    Raises OSError.
    """
    import tempfile  # seldom needed

    for folder in (path.parent.parent, path.parent):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if not is_private(folder):
            raise PermissionError(errno.EACCES, "others can write there")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=temporary_prefix(), suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            lock(handle)
            file.write(checksum(path, code) + code)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_object(path: Path) -> bytes | None:
    """Machine code that `write_object` wrote there; None if there is none or it was damaged since."""
    try:
        data = path.read_bytes() if is_private(path.parent) else b""
    except OSError:
        return None
    return data[32:] if checksum(path, data[32:]) == data[:32] else None


def mark_used(folder: Path | None = None) -> None:
    """Note once a day that a folder, or that of object files, is in use, as its time of change."""
    folder = folder or object_folder()
    with suppress(OSError):
        if folder.stat().st_mtime < time.time() - DAY:
            os.utime(folder)


def prune() -> None:
    """Remove other keys' folders that are no longer used, and what killed programs have left half written."""
    used, now = object_folder(), time.time()
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
