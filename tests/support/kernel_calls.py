"""Helpers of kernel tests: calls by address with an int64 array, as the tape makes them, and their memory."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable

import gguf
import numpy as np
import pytest

from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.cpu.matmul.kernel_variants import VARIANTS, get_max_few_fast, get_max_few_tokens
from localllm.kernels.machine import Lane
from localllm.kernels.reference import dequantize_bits
from localllm.kernels.table import order_arguments
from localllm.quant.formats import UNKNOWN_TO_GGUF

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
THREADS = 3
GUARD = np.float32(7.25)
COMMON = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # what people use
# For tests of a format `name`: others take turns, each in all files at once, as to compile one takes 5 s.
by_format = pytest.mark.sampled("name", always=COMMON)


def caller(names: Iterable[str], lane: Lane | None = None) -> Callable[..., None]:
    """Return a function (kernel name, parts, **arguments) that runs all parts of a step, the last part first.

    The kernels `names` are compiled now, all at once; others when they are called, by a compiler that starts for them.
    lane: to compile for, this machine's by default.
    """
    library = KernelLibrary(compiled_for(names), lane=lane)

    def call(name: str, parts: int, **arguments) -> None:
        library.load(compiled_for([name]))
        kind, _, format = name.partition("-")
        if kind == "linear_quantized":
            name, arguments = kind, arguments | kernel_variants(library, format, arguments["columns"], lane)
        kernel = KERNEL(library.addresses[name])
        values = np.array([encoded(value) for value in order_arguments(name, arguments)], np.int64)
        for part in reversed(range(parts)):
            kernel(values.ctypes.data, part, parts, part % THREADS)

    return call


def compiled_for(names: Iterable[str]) -> list[str]:
    """Return the kernels that exist for them: a product of quantized weights has several variants."""
    kernels = []
    for name in names:
        kind, _, format = name.partition("-")
        is_whole = kind == "linear_quantized" and format
        kernels += [kind, *(f"{piece}-{format}" for piece in VARIANTS)] if is_whole else [name]
    return kernels


def kernel_variants(
    library: KernelLibrary, format: str, columns: int, lane: Lane | None = None
) -> dict[str, np.ndarray | int]:
    """Return the table from which a product of quantized weights takes its kernel variants."""
    addresses = [library.addresses[f"{piece}-{format}"] for piece in VARIANTS]
    return {
        "variants": np.array(addresses, np.int64),
        "few_tokens": get_max_few_tokens(format, columns, lane),
        "few_fast": get_max_few_fast(format, columns, lane),
    }


def wanted(request, names: Iterable[str], kind_of: Callable[[str], str] | None = None) -> list[str]:
    """Return the kernels `names` without a format, and those of the formats that this module's selected tests have.

    kind_of: which kind of kernels a test calls, by its name; of all kinds if not given.
    """
    formats = set[str]()
    for item in request.session.items:
        if item.module is request.module:
            format = item.callspec.params.get("name", "") if hasattr(item, "callspec") else ""
            formats.add(f"{kind_of(item.originalname)}-{format}" if kind_of and format else format)
    return [name for name in names if {name, name.partition("-")[2]} & formats]


def dequantized(name: str, blocks: np.ndarray) -> np.ndarray:
    """Dequantize whole blocks of any format, uint8 [..., bytes], by `gguf`: float32 [..., weights]."""
    if name in UNKNOWN_TO_GGUF:
        return dequantize_bits(blocks, name).reshape(*blocks.shape[:-1], -1)
    return gguf.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType[name]).astype(np.float32)


def encoded(value) -> int:
    """Return an argument as an int64: an integer, the bits of a float32, or the address of an array."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return int(np.float32(value).view(np.int32)) if isinstance(value, float) else int(value)


def for_any_parts(compute) -> np.ndarray:
    """Return compute(parts), after checking that it is the same to the bit for any number of parts."""
    whole = compute(1)
    for parts in (2, 5, 40):
        np.testing.assert_array_equal(compute(parts), whole)
    return whole


def count(number: int) -> np.ndarray:
    return np.array([number], np.int64)


def padded(values: np.ndarray) -> np.ndarray:
    """Return padded activations for kernels: tokens by 8, columns to `line_columns`; NaN in the padding."""
    memory = np.full((-(-len(values) // 8) * 8 + 8, line_columns(values.shape[1])), np.nan, np.float32)
    memory[: len(values), : values.shape[1]] = values
    return memory


def line_columns(columns: int) -> int:
    """Return the columns between tokens: a multiple of 16 that is an odd number of cache lines."""
    return (-(-columns // 16) | 1) * 16


def output(tokens: int, columns: int) -> np.ndarray:
    """Allocate activations whose last row and padding a kernel must not write."""
    return np.full((-(-tokens // 8) * 8 + 9, line_columns(columns)), GUARD)


def written(memory: np.ndarray, tokens: int, columns: int) -> np.ndarray:
    """Return the rows that a kernel wrote to an `output`."""
    assert (memory[-1] == GUARD).all(), "wrote too much"
    assert (memory[:tokens, -(-columns // 16) * 16 :] == GUARD).all(), "wrote behind the padding"
    return memory[:tokens, :columns].copy()


def at_end_of_page(data: np.ndarray) -> np.ndarray:
    """Return a copy behind which no memory is readable, as at the end of a mapped file: reading on is a crash."""
    size = -(-data.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    if os.name == "posix":
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + size), mmap.PAGESIZE, 0) == 0
    copy = memory[size - data.nbytes : size]
    copy[:] = data.reshape(-1).view(np.uint8)
    return copy


def vector(values: np.ndarray) -> np.ndarray:
    """Return a norm's weights or a bias, padded to 16 with NaN, behind which nothing is readable."""
    return at_end_of_page(np.pad(values, (0, -len(values) % 16), constant_values=np.nan))


class Scratch:
    """Scratch memory of `size` bytes for each thread, full of NaN, with a guard behind it."""

    def __init__(self, size: int):
        self.memory = np.full(THREADS * size // 4 + 16, np.nan, np.float32)
        self.memory[-16:] = GUARD
        self.arguments = {"scratch": self.memory, "scratch_bytes": size}

    def check(self) -> None:
        assert (self.memory[-16:] == GUARD).all(), "used too much scratch memory"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
