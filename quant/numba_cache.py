"""Cache the searches that Numba compiles on disk, so that each computer compiles them once.

Numba's own cache does not notice edits in the files of a function's callees. This one has a folder named by a hash of
everything that the machine code depends on: all sources of this package, compiler versions, CPU.
"""

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator

from localllm.system.files import get_cache_folder, make_private_folder

# The compiler may reorder sums, fuse multiply and add, and multiply by reciprocals; otherwise it vectorizes no loops.
# NaN and infinity keep their meaning. The order of sums is fixed when a loop is compiled, so results are reproducible.
FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}


def compile_cached(function: Callable, name: str = "") -> Callable:
    """Decorate a function so that Numba compiles it at its first call, without the GIL and with a disk cache.

    If the folder cannot be written, every process compiles it again. name: distinguishes functions made from the same
    source.
    """
    function.__qualname__ = name or function.__qualname__
    dispatcher: Any = numba.njit(nogil=True, fastmath=FAST_MATH, error_model="numpy")(function)
    with record_failures():
        dispatcher._cache = _TolerantCache(function)
    return dispatcher


cache_problems: list[str] = []  # at most one message, which says why machine code could not be cached


@contextmanager
def record_failures() -> Iterator[None]:
    """Suppress an OSError in the block and record it in `cache_problems`.

    Without a cache, starts only take longer.
    """
    try:
        yield
    except OSError as error:
        cache_problems[:] = [f"compiled searches cannot be kept in {get_code_folder()}: {error.strerror}"]


def compile_inline(function: Callable) -> Callable:
    """Decorate a function that is compiled into each of its callers, so that loop bounds can be constants."""
    return numba.njit(nogil=True, fastmath=FAST_MATH, error_model="numpy", forceinline=True)(function)


def compile_encoder(name: str, encode: Callable) -> Callable:
    """Compile an encoder that was built for a format, as `compile_cached` does.

    It is inlined into a function of its own, so that loop bounds are constants; that takes 0.8 of the time.
    """
    rows = compile_inline(encode)
    return compile_cached(lambda weights, importance, out: rows(weights, importance, out), f"encode_{name}")


@cache
def get_code_folder() -> Path:
    key = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    cpu = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES") or llvm.get_host_cpu_features().flatten()
    for part in (version("numba"), version("llvmlite"), platform.python_version(), cpu, features):
        key.update(part.encode() + b"\0")
    return get_cache_folder() / "quant" / key.hexdigest()[:20]


class _Locator(UserProvidedCacheLocator):
    def __init__(self, function: FunctionType, source: str):
        super().__init__(function, source)
        self._cache_path = str(get_code_folder())

    @classmethod
    def from_function(cls, function: FunctionType, source: str) -> "_Locator":
        make_private_folder(get_code_folder())  # Numba unpickles files from there, so who can write them can run code
        locator = cls(function, source)
        locator.ensure_cache_path()
        return locator


class _Implementation(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012


class _TolerantCache(FunctionCache):
    """A function cache that compiles a function again if its entry cannot be read."""

    _impl_class = _Implementation

    def _index_key(self, signature, codegen):
        """Return the key without Numba's hash of the closure.

        If the closure has functions, that hash differs between processes. The function's name and the name of the
        folder identify it instead.
        """
        return signature, codegen.magic_tuple()

    def load_overload(self, signature, target_context):
        try:
            return super().load_overload(signature, target_context)
        except Exception:  # a damaged file can make unpickling raise anything
            with suppress(OSError):
                self.flush()  # clears the index, which saving would otherwise read again
            return None

    def save_overload(self, signature, data) -> None:
        with record_failures():  # the disk may be full
            super().save_overload(signature, data)
