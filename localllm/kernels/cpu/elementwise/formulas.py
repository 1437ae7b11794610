"""Kernels of the formulas (localllm.kernels.formulas), on vectors of 16 columns.

Two other kernels scale rows.
"""

from math import exp, log

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu.signature import argument, argument_f32, inlined, kernel
from localllm.kernels.formulas import FORMULAS, Number, Row, Strided, bind, kinds_of, tuple_of
from localllm.kernels.table import KERNELS, SCALE_BY_POSITION, SIGMOID_GATE


@simd.operation(simd.f32x16, simd.f32x16, simd.f32x16, simd.f32x16)
def where_above_zero(builder, x, y, z):
    """Return y where x is above 0, else z; z also where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, simd.f32x16.llvm(None)), y, z)


WORDS = {
    "absolute": simd.abs_f32x16, "erf": simd.erf_f32x16, "exp": simd.exp_f32x16, "fma": simd.fma_f32x16,
    "if_finite": simd.if_finite_f32x16, "larger": simd.max_f32x16, "log_one_plus_exp": simd.softplus_f32x16,
    "number": simd.splat_f32x16, "reciprocal": simd.reciprocal_f32x16, "smaller": simd.min_f32x16,
    "sqrt": simd.sqrt_f32x16, "tanh": simd.tanh_f32x16, "where_above_zero": where_above_zero,
}  # fmt: skip


def make(name):
    declaration, compute, kinds = KERNELS[name].arguments, bind(name, WORDS, inlined), kinds_of(FORMULAS[name])
    indices = [(getattr(declaration, each), kind) for each, kind in kinds.items()]
    rows = [make_source(declaration, index, kind) for index, kind in indices if kind is not Number]
    numbers_of = tuple_of([make_number(index) for index, kind in indices if kind is Number], inlined)
    loads = tuple_of([inlined(make_load(place)) for place in range(len(rows))], inlined)
    rows_of = tuple_of(rows, inlined)

    @kernel
    def of_rows(a, part, parts, thread):
        stride, size = argument(a, declaration.stride), argument(a, declaration.columns) * 4
        tokens = simd.load_i64(argument(a, declaration.count))
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            rows, y, numbers = rows_of(a, t), argument(a, declaration.y) + t * stride, numbers_of(a, t)
            for i in range(0, size, 64):
                simd.store_f32x16(y + i, compute(*(loads(rows, i) + numbers)))

    return of_rows


def make_source(declaration, index, kind):
    if kind is Row:
        return inlined(lambda a, token: argument(a, index))
    stride = index + 1 if kind is Strided else declaration.stride
    return inlined(lambda a, token: argument(a, index) + token * argument(a, stride))


def make_number(index):
    return inlined(lambda a, token: simd.splat_f32x16(argument_f32(a, index)))


def make_load(place):
    return lambda rows, i: simd.load_f32x16(rows[place] + i)


def scaled_by(declaration, factor_of):
    @kernel
    def rows(a, part, parts, thread):
        stride, size = argument(a, declaration.stride), argument(a, declaration.columns) * 4
        tokens = simd.load_i64(argument(a, declaration.count))
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            x, y = argument(a, declaration.x) + t * stride, argument(a, declaration.y) + t * stride
            factor = factor_of(a, t)
            for i in range(0, size, 64):
                simd.store_f32x16(y + i, simd.load_f32x16(x + i) * simd.splat_f32x16(factor))

    return rows


@inlined
def temperature(a, token):
    """Compute a token's attention temperature, 1 + slope * log(floor((position + offset) / length) + 1)."""
    position = simd.load_i64(argument(a, SCALE_BY_POSITION.positions) + token * 8) + argument(
        a, SCALE_BY_POSITION.offset
    )
    return float32(
        1.0
        + argument_f32(a, SCALE_BY_POSITION.slope) * log(float(position // argument(a, SCALE_BY_POSITION.length) + 1))
    )


@inlined
def sigmoid_of_gate(a, token):
    """Compute the sigmoid of a row's gate; NaN if the gate is not finite."""
    gate = simd.load_f32(argument(a, SIGMOID_GATE.gate) + token * argument(a, SIGMOID_GATE.gate_stride))
    return float32(1.0 / (1.0 + exp(-float(gate)))) + float32(0.0) * gate


scale_by_position = scaled_by(SCALE_BY_POSITION, temperature)
sigmoid_gate = scaled_by(SIGMOID_GATE, sigmoid_of_gate)
