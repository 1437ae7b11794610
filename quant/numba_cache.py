"""An on-disk cache for the searches that Numba compiles, once per computer.

Numba's own cache does not see an edit in a file that a function's callees come from. Ours lies in a folder named by a
key of everything that the machine code depends on: all sources of this package, compiler versions, CPU.
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

from localllm.quant.cache import cache_folder, make_private

# Sums may be taken in any order, products added without rounding, quotients made of reciprocals: that is what makes
# vectors of loops. NaN and infinity keep their meaning. The order is fixed when a loop is compiled.
FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}


def compiled(function: Callable, name: str = "") -> Any:
    """Decorate a function that Numba compiles at its first call, without the GIL, cached on disk.

    If the folder cannot be written, every process compiles it anew. name: distinguishes functions made from the same
    source.
    """
    function.__qualname__ = name or function.__qualname__
    dispatcher: Any = numba.njit(nogil=True, fastmath=FAST_MATH, error_model="numpy")(function)
    with noting():
        dispatcher._cache = _Cache(function)
    return dispatcher


problems: list[str] = []  # why machine code could not be kept, in one line, once it was so


@contextmanager
def noting() -> Iterator[None]:
    """Catch OSError in the block and add it to `problems`; a failing cache only costs time."""
    try:
        yield
    except OSError as error:
        problems[:] = [f"compiled searches cannot be kept in {code_folder()}: {error.strerror}"]


def inlined(function: Callable) -> Any:
    """Decorate a part of compiled functions that is compiled into each, so that loops see constant bounds."""
    return numba.njit(nogil=True, fastmath=FAST_MATH, error_model="numpy", forceinline=True)(function)


def compiled_encoder(name: str, encode: Callable) -> Any:
    """Compile an encoder made for a format, as `compiled`.

    Compiled into a function that does nothing else, its searches see constant bounds: in 0.8 of the time.
    """
    rows = inlined(encode)
    return compiled(lambda weights, importance, out: rows(weights, importance, out), f"encode_{name}")


@cache
def code_folder() -> Path:
    """Return the folder of this computer's machine code, named by the key."""
    key = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    cpu = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES") or llvm.get_host_cpu_features().flatten()
    for part in (version("numba"), version("llvmlite"), platform.python_version(), cpu, features):
        key.update(part.encode() + b"\0")
    return cache_folder() / "quant" / key.hexdigest()[:20]


class _Locator(UserProvidedCacheLocator):
    """A locator that points Numba's cache at our folder."""

    def __init__(self, function: FunctionType, source: str):
        super().__init__(function, source)
        self._cache_path = str(code_folder())

    @classmethod
    def from_function(cls, function: FunctionType, source: str) -> "_Locator":
        make_private(code_folder())  # Numba reads pickles there, which are as good as programs
        locator = cls(function, source)
        locator.ensure_cache_path()
        return locator


class _Implementation(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012


class _Cache(FunctionCache):
    """Numba's cache in our folder. Unreadable entries are compiled anew."""

    _impl_class = _Implementation

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        """Return a key without Numba's hash of a function's closure.

        That differs between processes for compiled functions; the function's name and the folder's tell the rest.
        """
        return signature, codegen.magic_tuple()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(signature, target_context)
        except Exception:  # a damaged file can make unpickling raise anything
            with suppress(OSError):
                self.flush()  # the index, which would be read again when something is saved
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        with noting():  # a full disk, say
            super().save_overload(signature, data)
