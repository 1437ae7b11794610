"""Products of small matrices of float16 on tensor cores, summed in float32: C += A B^T.

The instruction is mma.sync.m16n8k16, or two of m16n8k8. The lanes of a warp hold fragments of the matrices, two float16
values in an int32, as the PTX ISA defines (9.7.14.5.8). With g = lane / 4, t = lane % 4, `step` an index of 16 columns
of A and `tile` of 8 columns of C, a lane holds these values:

    A [16, 16 * steps]         word step * 4 + r: row g + r % 2 * 8, columns step * 16 + r / 2 * 8 + 2 t and the next
    B [8 * tiles, 16 * steps]  in shared memory, rows of `stride` words; a lane reads from word g * stride + t on
    C [16, 8 * tiles]          float32 value tile * 4 + r: row g + r / 2 * 8, column tile * 8 + 2 t + r % 2

The stride of B is 4 more than a multiple of 8 words, so that lanes have no bank conflicts. C, packed to float16, has
the layout of A: attention weights, computed from scores in C, are multiplied by values without leaving their registers.
"""

import numpy as np

from localllm.kernels.cuda.gpu import SIMULATED

if SIMULATED:
    from localllm.kernels.cuda.gpu import exchange_in_warp, get_lane

    def pack(x):
        """Convert float32 values to float16, two in an int32."""
        with np.errstate(over="ignore"):
            return tuple(np.array(x, np.float32).astype(np.float16).view(np.int32).tolist())

    def interleave(a, b):
        """Interleave the float16 values of a and b, two in an int32."""
        pairs = np.array([a, b], np.int32).view(np.uint16).T.copy()
        return tuple(pairs.view(np.int32).reshape(-1).tolist())

    def make_multiply(tiles, steps, stride, depth):
        """Build a function (c, a, words, at) -> c + a b^T.

        b is in shared memory; this lane reads it from `at` on. depth: that of the instruction, 16, or 8 for compute
        capability 7.5.
        """
        places = [
            tile * 8 * stride + step * 8 + 4 * r for tile in range(tiles) for step in range(steps) for r in (0, 1)
        ]

        def multiply(c, a, words, at):
            all_lanes = exchange_in_warp((a, [words[at + place] for place in places]))
            of_a = np.array([one for one, _ in all_lanes], np.int32).view(np.float16).astype(np.float32)
            of_b = np.array([one for _, one in all_lanes], np.int32).view(np.float16).astype(np.float32)
            left = of_a.reshape(8, 4, steps, 2, 2, 2).transpose(4, 0, 2, 3, 1, 5).reshape(16, 16 * steps)
            right = of_b.reshape(8, 4, tiles, steps, 2, 2).transpose(3, 4, 1, 5, 2, 0).reshape(16 * steps, 8 * tiles)
            g, t = get_lane() // 4, get_lane() % 4
            own_numbers = (left @ right).reshape(2, 8, tiles, 4, 2)[:, g, :, t].transpose(1, 0, 2)
            return tuple((np.array(c, np.float32) + own_numbers.reshape(-1)).tolist())

        return multiply

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    from localllm.kernels.cuda.unrolled import extract_items

    F16, F32, I32, I64 = ir.HalfType(), ir.FloatType(), ir.IntType(32), ir.IntType(64)
    RESULT = ir.LiteralStructType([F32] * 4)
    SHAPES = {  # by depth: the instruction, the number of words of A and of B
        16: ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$0,$1,$2,$3}}, {a}, {b}, {c};", 4, 2),
        8: ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{$0,$1,$2,$3}}, {a}, {b}, {c};", 2, 1),
    }

    def pack_pair(builder, low, high):
        vector = ir.Constant(ir.VectorType(F16, 2), ir.Undefined)
        vector = builder.insert_element(vector, low, I32(0))
        return builder.bitcast(builder.insert_element(vector, high, I32(1)), I32)

    @intrinsic
    def pack(typing_context, x):
        def code(context, builder, signature, arguments):
            halves = [builder.fptrunc(number, F16) for number in extract_items(builder, arguments[0])]
            words = [pack_pair(builder, *halves[i : i + 2]) for i in range(0, len(halves), 2)]
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.int32, x.count // 2)(x), code

    @intrinsic
    def interleave(typing_context, a, b):
        def code(context, builder, signature, arguments):
            words = []
            for both in zip(*(extract_items(builder, argument) for argument in arguments), strict=True):
                of_a, of_b = (builder.bitcast(word, ir.VectorType(F16, 2)) for word in both)
                for i in range(2):
                    numbers = builder.extract_element(of_a, I32(i)), builder.extract_element(of_b, I32(i))
                    words.append(pack_pair(builder, *numbers))
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.int32, 2 * a.count)(a, b), code

    def format_operands(first, count):
        """Format the placeholders of an instruction's operands.

        first: index of the first one; count: their number.
        """
        return "{" + ",".join(f"${i}" for i in range(first, first + count)) + "}"

    def multiply_add(builder, a, b, c, depth):
        """Emit one multiply-add instruction on tensor cores."""
        text, of_a, of_b = SHAPES[depth]
        text = text.format(
            a=format_operands(4, of_a), b=format_operands(4 + of_a, of_b), c=format_operands(4 + of_a + of_b, 4)
        )
        constraints = ",".join(["=f"] * 4 + ["r"] * (of_a + of_b) + ["f"] * 4)
        kind = ir.FunctionType(RESULT, [I32] * (of_a + of_b) + [F32] * 4)
        result = builder.asm(kind, text, constraints, [*a, *b, *c], True)
        return [builder.extract_value(result, i) for i in range(4)]

    def make_multiply(tiles, steps, stride, depth):
        @intrinsic
        def multiply(typing_context, c, a, words, at):
            def code(context, builder, signature, arguments):
                sums, of_a = extract_items(builder, arguments[0]), extract_items(builder, arguments[1])
                data = context.make_array(words)(context, builder, arguments[2]).data
                data = builder.gep(data, [arguments[3]])
                for step in range(steps):
                    for tile in range(tiles):
                        at = tile * 8 * stride + step * 8
                        b = [builder.load(builder.gep(data, [I64(at + more)])) for more in (0, 4)]
                        one = sums[tile * 4 : tile * 4 + 4]
                        for part in range(16 // depth):
                            whole = slice(None) if depth == 16 else slice(part, part + 1)
                            half = of_a[step * 4 + part * 2 : step * 4 + part * 2 + depth // 4]
                            one = multiply_add(builder, half, b[whole], one, depth)
                        sums[tile * 4 : tile * 4 + 4] = one
                return context.make_tuple(builder, signature.return_type, sums)

            return c(c, a, words, types.int64), code

        return multiply
