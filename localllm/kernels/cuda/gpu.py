"""Device functions and intrinsics for CUDA kernels.

They access memory by address, compute dot products of bytes, and exchange values within a warp. Memory is addressed by
int64, and nothing is checked, as on the CPU. Each function exists twice: as instructions for the GPU, and as Python for
Numba's simulator, where an address is one of the host's and a lane is a greenlet (tests/support/simulated.py). A warp
of the simulator may be smaller, which makes it faster: kernels use WARP.
"""

import ctypes
import math

import numpy as np
from numba import config, cuda, float32, float64, int32, int64

SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]
WARP = 32  # threads; tests with the simulator set a smaller power of two before kernels are imported
BLOCK = 256  # default number of threads per block; a multiple of WARP

if SIMULATED:
    from numba.cuda.simulator import kernel as simulator

    class RunningKernel:
        """The module `cuda` of the running kernel, as device functions see it in the simulator."""

        def __getattr__(self, name):
            return getattr(simulator._get_kernel_context(), name)

    def device(function):
        """Decorate a function that kernels call. Functions that use `cuda` need this in the simulator.

        Numba's simulator adds the kernel's `cuda` to the function's module for a call, and removes it when the first of
        several threads returns. numba-cuda's runs one thread at a time to avoid that, which costs half of the time.
        """
        if "cuda" in function.__globals__:
            function.__globals__["cuda"] = RunningKernel()
        return function

    def make_scalar_load(kind):
        """Build a function (address) that loads a value of a ctypes type."""
        return lambda address: kind.from_address(int(address)).value

    def make_scalar_store(kind, convert):
        """Build a function (address, value) that converts a value and stores it as a ctypes type."""

        def store(address, value):
            kind.from_address(int(address)).value = convert(value)

        return store

    load_f32, load_f64 = make_scalar_load(ctypes.c_float), make_scalar_load(ctypes.c_double)
    load_i8, load_u8 = make_scalar_load(ctypes.c_int8), make_scalar_load(ctypes.c_uint8)
    load_u16, load_i32, load_i64 = (
        make_scalar_load(ctypes.c_uint16),
        make_scalar_load(ctypes.c_int32),
        make_scalar_load(ctypes.c_int64),
    )
    store_f32, store_i8 = make_scalar_store(ctypes.c_float, float), make_scalar_store(ctypes.c_int8, int)
    store_i32, store_i64 = make_scalar_store(ctypes.c_int32, int), make_scalar_store(ctypes.c_int64, int)
    store_u16 = make_scalar_store(ctypes.c_uint16, int)

    def peek_vector(kind, count):
        """Build a function (address) that loads `count` 4-byte values at once, from a multiple of their size."""

        def load(address):
            assert address % (4 * count) == 0, "a vector load that is not aligned"
            return tuple((kind * count).from_address(int(address)))

        return load

    def make_vector_store(kind, convert):
        """Build a function that stores four 4-byte values at once, to a multiple of 16."""

        def store(address, a, b, c, d):
            assert address % 16 == 0, "a vector store that is not aligned"
            (kind * 4).from_address(int(address))[:] = [convert(x) for x in (a, b, c, d)]

        return store

    load_4i32, load_2i32 = peek_vector(ctypes.c_int32, 4), peek_vector(ctypes.c_int32, 2)
    load_4f32, load_2f32 = peek_vector(ctypes.c_float, 4), peek_vector(ctypes.c_float, 2)
    stream_4i32, stream_2i32 = load_4i32, load_2i32  # on a GPU these bypass the L1 cache
    store_4f32, store_4i32 = make_vector_store(ctypes.c_float, float), make_vector_store(ctypes.c_int32, int)

    def ignore_warnings(function):
        """Build a function that calls a function of NumPy without warnings about infinity and NaN."""

        def call(x):
            with np.errstate(all="ignore"):
                return function(x)

        return call

    exp, log, log1p, tanh = map(ignore_warnings, (np.exp, np.log, np.log1p, np.tanh))  # of float32 or float64

    def compute_cosine(x):
        """Return the cosine of 2 pi x.

        x: an angle in turns, float64.
        """
        return math.cos(2 * math.pi * (x % 1))

    def compute_sine(x):
        return math.sin(2 * math.pi * (x % 1))

    def shift_and_mask(word, shift, mask):
        """Shift an int32 right by `shift` bits, filling with zeros, or left by -shift, and mask the result."""
        word = int(word) & 0xFFFFFFFF
        return (word >> shift if shift >= 0 else word << -shift) & mask & 0xFFFFFFFF

    def extract_byte(word, number):
        """Return a byte of an int32 as a signed integer.

        number: index of the byte, 0 to 3.
        """
        return ((int(word) >> 8 * number & 0xFF) ^ 0x80) - 0x80

    def permute(a, b, selector):
        """Select four of the bytes of a (0 to 3) and of b (4 to 7), by the nibbles of `selector` (PRMT)."""
        both = (int(a) & 0xFFFFFFFF) | (int(b) & 0xFFFFFFFF) << 32
        return sum((both >> 8 * (int(selector) >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))

    def dot4(a, b, c):
        """Return c plus the dot product of the four signed bytes of a and of b (dp4a)."""
        words = (np.array([int(x) & 0xFFFFFFFF], np.uint32).view(np.int8).astype(np.int64) for x in (a, b))
        return int(c) + int(np.dot(*words))

    def decode_f16(bits):
        return float(np.array([int(bits) & 0xFFFF], np.uint16).view(np.float16)[0])

    def decode_f16_pair(bits):
        """Convert the two float16 values in the low and the high half of an int32 to float32."""
        return decode_f16(bits), decode_f16(bits >> 16)

    def exp2(x):
        """Compute 2 ** x, float32, with an error of 2 units in the last place."""
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return float(np.exp2(np.float32(x)))

    def encode_f16(x):
        with np.errstate(over="ignore"):
            return int(np.array([x], np.float32).astype(np.float16).view(np.uint16)[0])

    def decode_f32(bits):
        """Return the float32 with the given bits.

        Kernels get float arguments as bits.
        """
        return float(np.array([int(bits) & 0xFFFFFFFF], np.uint32).view(np.float32)[0])

    def encode_f32(x):
        """Return the bits of the float32 x as an int32."""
        return int(np.array([x], np.float32).view(np.int32)[0])

    def round_to_int(x):
        """Round to the nearest integer, ties to even, int32."""
        return int(np.rint(x))

    def exchange_in_warp(value):
        """Return the values of all lanes of the warp, in order. All lanes must call it."""
        return RunningKernel().warp_exchange(value)  # a function that tests/support/simulated.py adds

    def load_from_lane(x, mask):
        """Return x, a float32, of the lane whose index is this lane's index xor `mask`."""
        return exchange_in_warp(x)[RunningKernel().threadIdx.x % WARP ^ mask]

    def synchronize_warp():
        """Make the writes of a warp's lanes visible to all of them."""
        exchange_in_warp(0)

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda import libdevice
    from numba.cuda.compiler import compile_cuda
    from numba.cuda.dispatcher import CUDADispatcher
    from numba.cuda.extending import intrinsic

    exp, log, log1p, tanh = math.exp, math.log, math.log1p, math.tanh

    I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
    F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
    GLOBAL = 1  # address space

    def internalize_shared_memory(module):
        """Give shared memory internal linkage: each function that calls another is linked with a copy of it."""
        for name, variable in module.globals.items():
            if name.startswith("_cudapy_smem"):
                variable.linkage = "internal"

    class DeviceFunction(CUDADispatcher):
        """A function that kernels call.

        Unlike Numba's device functions, it needs no GPU: its code is the same for all GPUs.
        """

        def compile_device(self, arguments, return_type=None):
            if arguments not in self.overloads:
                result = compile_cuda(
                    self.py_func, return_type, arguments, forceinline=True, nvvm_options={"opt": 3}, cc=(7, 5)
                )
                for module in result.library.modules:
                    internalize_shared_memory(module)
                result.target_context.insert_user_function(result.entry_point, result.fndesc, [result.library])
                self.overloads[arguments] = result
            return self.overloads[arguments]

    def device(function):
        """Decorate a function that kernels call; LLVM inlines it."""
        return DeviceFunction(function, {"device": True})

    def cast_to_pointer(builder, address, kind):
        return builder.inttoptr(address, ir.PointerType(kind, GLOBAL))

    def make_load(kind, result, widen=None):
        """Build an intrinsic (address) that loads a value of an LLVM type.

        widen: the instruction that converts it.
        """

        @intrinsic
        def load(typing_context, address):
            def code(context, builder, signature, arguments):
                value = builder.load(cast_to_pointer(builder, arguments[0], kind))
                return getattr(builder, widen)(value, context.get_value_type(result)) if widen else value

            return result(types.int64), code

        return load

    def make_store(kind, accepted, narrow=None):
        """Build an intrinsic (address, value) that stores a value as an LLVM type.

        narrow: the instruction that converts it.
        """

        @intrinsic
        def store(typing_context, address, value):
            def code(context, builder, signature, arguments):
                number = getattr(builder, narrow)(arguments[1], kind) if narrow else arguments[1]
                builder.store(number, cast_to_pointer(builder, arguments[0], kind))
                return context.get_dummy_value()

            return types.void(types.int64, accepted), code

        return store

    load_f32, load_f64 = make_load(F32, types.float32), make_load(F64, types.float64)
    load_i8, load_u8 = make_load(I8, types.int32, "sext"), make_load(I8, types.int32, "zext")
    load_u16, load_i32, load_i64 = (
        make_load(I16, types.int32, "zext"),
        make_load(I32, types.int32),
        make_load(I64, types.int64),
    )
    store_f32, store_i8 = make_store(F32, types.float32), make_store(I8, types.int32, "trunc")
    store_i32, store_i64 = make_store(I32, types.int32), make_store(I64, types.int64)
    store_u16 = make_store(I16, types.int32, "trunc")

    def build_vector_loader(kind, result, count):
        """Build an intrinsic (address) that loads `count` values at once, as a tuple."""

        @intrinsic
        def load(typing_context, address):
            def code(context, builder, signature, arguments):
                vector = cast_to_pointer(builder, arguments[0], ir.VectorType(kind, count))
                value = builder.load(vector, align=4 * count)
                items = [builder.extract_element(value, I32(i)) for i in range(count)]
                return context.make_tuple(builder, signature.return_type, items)

            return types.UniTuple(result, count)(types.int64), code

        return load

    load_4i32, load_2i32 = build_vector_loader(I32, types.int32, 4), build_vector_loader(I32, types.int32, 2)
    load_4f32 = build_vector_loader(F32, types.float32, 4)

    @intrinsic
    def store_4f32(typing_context, address, a, b, c, d):
        def code(context, builder, signature, arguments):
            vector = ir.Constant(ir.VectorType(F32, 4), ir.Undefined)
            for place, number in enumerate(arguments[1:]):
                vector = builder.insert_element(vector, number, I32(place))
            builder.store(vector, cast_to_pointer(builder, arguments[0], vector.type), align=16)
            return context.get_dummy_value()

        return types.void(types.int64, *[types.float32] * 4), code

    def assembly(text, constraints, result, *kinds, volatile=False):
        """Return the type and the code of an intrinsic that consists of PTX instructions.

        volatile: whether they must be neither moved nor removed.
        """

        def code(context, builder, signature, arguments):
            llvm = [context.get_value_type(kind) for kind in kinds]
            function = ir.FunctionType(context.get_value_type(result), llvm)
            return builder.asm(function, text, constraints, arguments, volatile)

        return result(*kinds), code

    load_2f32 = build_vector_loader(F32, types.float32, 2)

    def build_streamer(count):
        """Make an intrinsic (address) that loads `count` int32 at once without using space in the L1 cache."""
        places = ", ".join(f"${i}" for i in range(count))
        text = f"ld.global.nc.L1::no_allocate.v{count}.b32 {{{places}}}, [${count}];"
        constraints = "=r," * count + "l"

        @intrinsic
        def load(typing_context, address):
            def code(context, builder, signature, arguments):
                function = ir.FunctionType(ir.LiteralStructType([I32] * count), [I64])
                value = builder.asm(function, text, constraints, arguments, False)
                items = [builder.extract_value(value, i) for i in range(count)]
                return context.make_tuple(builder, signature.return_type, items)

            return types.UniTuple(types.int32, count)(types.int64), code

        return load

    stream_4i32, stream_2i32 = build_streamer(4), build_streamer(2)

    @intrinsic
    def store_4i32(typing_context, address, a, b, c, d):
        def code(context, builder, signature, arguments):
            vector = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
            for i in range(4):
                vector = builder.insert_element(vector, arguments[1 + i], I32(i))
            builder.store(vector, cast_to_pointer(builder, arguments[0], vector.type), align=16)
            return context.get_dummy_value()

        return types.void(types.int64, *[types.int32] * 4), code

    @intrinsic
    def shift_and_mask(typing_context, word, shift, mask):
        def code(context, builder, signature, arguments):
            word, shift, mask = arguments
            right, left = builder.lshr(word, shift), builder.shl(word, builder.neg(shift))
            return builder.and_(builder.select(builder.icmp_signed("<", shift, I32(0)), left, right), mask)

        return types.int32(types.int32, types.int32, types.int32), code

    @intrinsic
    def extract_byte(typing_context, word, number):
        def code(context, builder, signature, arguments):
            left = builder.shl(arguments[0], builder.sub(I32(24), builder.mul(arguments[1], I32(8))))
            return builder.ashr(left, I32(24))

        return types.int32(types.int32, types.int32), code

    @intrinsic
    def permute(typing_context, a, b, selector):
        return assembly("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", types.int32, *[types.int32] * 3)

    @intrinsic
    def dot4(typing_context, a, b, c):
        return assembly("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", types.int32, types.int32, types.int32, types.int32)

    @intrinsic
    def decode_f16(typing_context, bits):
        text = "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }"
        return assembly(text, "=f,r", types.float32, types.int32)

    @intrinsic
    def decode_f16_pair(typing_context, bits):
        def code(context, builder, signature, arguments):
            halves = builder.bitcast(arguments[0], ir.VectorType(F16, 2))
            numbers = [builder.fpext(builder.extract_element(halves, I32(i)), F32) for i in range(2)]
            return context.make_tuple(builder, signature.return_type, numbers)

        return types.UniTuple(types.float32, 2)(types.int32), code

    @intrinsic
    def exp2(typing_context, x):
        return assembly("ex2.approx.ftz.f32 $0, $1;", "=f,f", types.float32, types.float32)

    @intrinsic
    def encode_f16(typing_context, x):
        text = "{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h; }"
        return assembly(text, "=r,f", types.int32, types.float32)

    @intrinsic
    def decode_f32(typing_context, bits):
        text = "{ .reg .b32 low; cvt.u32.u64 low, $1; mov.b32 $0, low; }"
        return assembly(text, "=f,l", types.float32, types.int64)

    @intrinsic
    def encode_f32(typing_context, x):
        return assembly("mov.b32 $0, $1;", "=r,f", types.int32, types.float32)

    @intrinsic
    def round_to_int(typing_context, x):
        return assembly("cvt.rni.s32.f32 $0, $1;", "=r,f", types.int32, types.float32)

    @intrinsic
    def load_from_lane(typing_context, x, mask):
        text = "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        return assembly(text, "=f,f,r", types.float32, types.float32, types.int32, volatile=True)

    @device
    def synchronize_warp():
        cuda.syncwarp()

    @device
    def compute_cosine(x):
        return libdevice.cospi(x + x)

    @device
    def compute_sine(x):
        return libdevice.sinpi(x + x)


@device
def get_lane():
    return cuda.threadIdx.x & (WARP - 1)


@device
def add(x, y):
    return x + y


@device
def max_or_nan(x, y):
    """Return the larger value, or NaN if one of them is NaN."""
    return y if y > x or y != y else x


def make_warp_reduction(two):
    """Build a function that reduces a float32 of each lane of a warp to one value.

    All lanes get the result. two: combines two values.
    """

    @device
    def reduce_warp(x):
        mask = WARP // 2
        while mask > 0:
            x = two(x, load_from_lane(x, mask))
            mask //= 2
        return x

    return reduce_warp


def make_block_reduction(two):
    """Build a function that reduces a float32 of each thread of a block to one value.

    All threads of the block must call it. two: combines two values.
    """
    over_warp = make_warp_reduction(two)

    @device
    def reduce_block(x):
        of_warps = cuda.shared.array(32, float32)
        x = over_warp(x)
        cuda.syncthreads()  # until an earlier result has been read
        if get_lane() == 0:
            of_warps[cuda.threadIdx.x // WARP] = x
        cuda.syncthreads()
        result = of_warps[0]
        for warp in range(1, cuda.blockDim.x // WARP):
            result = two(result, of_warps[warp])
        return result

    return reduce_block


warp_sum, warp_max = make_warp_reduction(add), make_warp_reduction(max_or_nan)
block_sum, block_max = make_block_reduction(add), make_block_reduction(max_or_nan)
