"""Primitives for threads: atomics, time, calls by address."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from localllm.kernels.machine import this_lane
from localllm.kernels.simd.vectors import I32, I64, llvm_call, operation


@operation(types.int64, types.int64)
def atomic_load(builder, address):
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8, typ=I64)


@operation(None, types.int64, types.int64)
def atomic_store(builder, address, value):
    builder.store_atomic(value, builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@operation(types.int64, types.int64, types.int64)
def atomic_add(builder, address, value):
    """Add; return what was there before."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@operation(types.boolean, types.int64, types.int64, types.int64)
def atomic_replace(builder, address, expected, value):
    """Store `value` if `expected` is there; tell whether it was."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.extract_value(builder.cmpxchg(pointer, expected, value, "seq_cst", "seq_cst"), 1)


@operation(None)
def cpu_pause(builder):
    """Tell the core that this is a waiting loop.

    On ARM this is a barrier, which takes time: the hint instruction takes none there.
    """
    if "sse2" in this_lane().features:
        llvm_call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    if "neon" in this_lane().features:
        llvm_call(builder, "llvm.aarch64.isb", ir.VoidType(), [I32(15)])


@operation(types.int64)
def cycles(builder):
    """Return the time stamp counter, which runs at a constant rate; 0 where programs may not read one."""
    if "sse2" in this_lane().features:
        return llvm_call(builder, "llvm.readcyclecounter", I64, [])
    return read_register(builder, "cntvct_el0") if "neon" in this_lane().features else I64(0)


def read_register(builder, name):
    """Return a system register of an ARM."""
    function_type = ir.FunctionType(I64, [ir.MetaDataType()])
    read = cgutils.get_or_insert_function(builder.module, function_type, "llvm.read_volatile_register.i64")
    return builder.call(read, [builder.module.add_metadata([name])])


@operation(types.int64)
def slice_cycles(builder):
    """Return the cycles that a thread runs before it yields its processor: 1 to 2 ms, under a time slice.

    Beside a busy process, decode of a 1.2 B model keeps 0.65 of its speed with this and 0.57 without. An ARM counts
    in a clock of its own, 24 MHz to 1 GHz.
    """
    if "neon" in this_lane().features:
        return builder.udiv(read_register(builder, "cntfrq_el0"), I64(700))
    return I64(4_000_000)


@operation(None, types.int64)
def call_address(builder, function):
    """Call void function(void) by its address."""
    builder.call(builder.inttoptr(function, ir.FunctionType(ir.VoidType(), []).as_pointer()), [])


@operation(None, types.int64, types.int64, types.int64, types.int64, types.int64)
def call_kernel(builder, function, arguments, part, parts, thread):
    """Call a kernel by its address."""
    kernel = ir.FunctionType(ir.VoidType(), [I64] * 4)
    builder.call(builder.inttoptr(function, kernel.as_pointer()), [arguments, part, parts, thread])
