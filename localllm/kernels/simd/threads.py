"""Primitives for threads: atomic operations, clocks, calls by address."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from localllm.kernels.machine import get_lane
from localllm.kernels.simd.vectors import I32, I64, llvm_call, operation


@operation(types.int64, types.int64)
def atomic_load(builder, address):
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8, typ=I64)


@operation(None, types.int64, types.int64)
def atomic_store(builder, address, value):
    builder.store_atomic(value, builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@operation(types.int64, types.int64, types.int64)
def atomic_add(builder, address, value):
    """Add to an int64 atomically; return its previous value."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@operation(types.boolean, types.int64, types.int64, types.int64)
def atomic_replace(builder, address, expected, value):
    """Store `value` if the int64 equals `expected` (compare-and-swap); return whether it was stored."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.extract_value(builder.cmpxchg(pointer, expected, value, "seq_cst", "seq_cst"), 1)


@operation(None)
def cpu_pause(builder):
    """Tell the CPU that this is a spin loop.

    On ARM by a barrier, because the hint instruction does not pause.
    """
    if "sse2" in get_lane().features:
        llvm_call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    if "neon" in get_lane().features:
        llvm_call(builder, "llvm.aarch64.isb", ir.VoidType(), [I32(15)])


@operation(types.int64)
def cycles(builder):
    """Read a time stamp counter, or the timer of an ARM; 0 where a program may not read one."""
    if "sse2" in get_lane().features:
        return llvm_call(builder, "llvm.readcyclecounter", I64, [])
    return read_register(builder, "cntvct_el0") if "neon" in get_lane().features else I64(0)


def read_register(builder, name):
    function_type = ir.FunctionType(I64, [ir.MetaDataType()])
    read = cgutils.get_or_insert_function(builder.module, function_type, "llvm.read_volatile_register.i64")
    return builder.call(read, [builder.module.add_metadata([name])])


@operation(types.int64)
def slice_cycles(builder):
    """Return the number of `cycles` before a thread yields its CPU: 1 to 2 ms, less than a time slice.

    Beside a busy process, decode of a 1.2 B model keeps 0.65 of its speed with this, 0.57 without. An ARM's timer runs
    at 24 MHz to 1 GHz.
    """
    if "neon" in get_lane().features:
        return builder.udiv(read_register(builder, "cntfrq_el0"), I64(700))
    return I64(4_000_000)


@operation(None, types.int64)
def call_address(builder, function):
    """Call a function `void f(void)` at an address."""
    builder.call(builder.inttoptr(function, ir.FunctionType(ir.VoidType(), []).as_pointer()), [])


@operation(None, types.int64, types.int64, types.int64, types.int64, types.int64)
def call_kernel(builder, function, arguments, part, parts, thread):
    """Call a kernel at an address, with the four arguments of all kernels (cpu/signature.py)."""
    kernel = ir.FunctionType(ir.VoidType(), [I64] * 4)
    builder.call(builder.inttoptr(function, kernel.as_pointer()), [arguments, part, parts, thread])
