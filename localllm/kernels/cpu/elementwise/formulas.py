"""Kernels of the formulas (localllm.kernels.formulas), on vectors of 16 columns.

Two other kernels scale rows.
"""

from math import exp, log

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu.signature import inlined, kernel, load_argument, load_argument_f32
from localllm.kernels.formulas import FORMULAS, Number, Row, Strided, bind, build_tuple_function, get_annotations
from localllm.kernels.table import KERNELS, SCALE_BY_POSITION, SIGMOID_GATE


@simd.operation(simd.f32x16, simd.f32x16, simd.f32x16, simd.f32x16)
def where_above_zero(builder, x, y, z):
    """Return y where x is above 0, else z; z also where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, simd.f32x16.llvm(None)), y, z)


WORDS = {
    "absolute": simd.abs_f32x16, "erf": simd.erf_f32x16, "exp": simd.exp_f32x16, "fma": simd.fma_f32x16,
    "propagate_nan": simd.if_finite_f32x16, "larger": simd.max_f32x16, "log_one_plus_exp": simd.softplus_f32x16,
    "number": simd.splat_f32x16, "reciprocal": simd.reciprocal_f32x16, "smaller": simd.min_f32x16,
    "sqrt": simd.sqrt_f32x16, "tanh": simd.tanh_f32x16, "where_above_zero": where_above_zero,
}  # fmt: skip


def make(name):
    declaration, compute, kinds = KERNELS[name].arguments, bind(name, WORDS, inlined), get_annotations(FORMULAS[name])
    indices = [(getattr(declaration, each), kind) for each, kind in kinds.items()]
    rows = [make_source(declaration, index, kind) for index, kind in indices if kind is not Number]
    numbers_of = build_tuple_function([make_number(index) for index, kind in indices if kind is Number], inlined)
    loads = build_tuple_function([inlined(make_load(place)) for place in range(len(rows))], inlined)
    rows_of = build_tuple_function(rows, inlined)

    @kernel
    def compute_rows(a, part, parts, thread):
        stride, size = load_argument(a, declaration.stride), load_argument(a, declaration.columns) * 4
        tokens = simd.load_i64(load_argument(a, declaration.count))
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            rows, y, numbers = rows_of(a, t), load_argument(a, declaration.y) + t * stride, numbers_of(a, t)
            for i in range(0, size, 64):
                simd.store_f32x16(y + i, compute(*(loads(rows, i) + numbers)))

    return compute_rows


def make_source(declaration, index, kind):
    if kind is Row:
        return inlined(lambda a, token: load_argument(a, index))
    stride = index + 1 if kind is Strided else declaration.stride
    return inlined(lambda a, token: load_argument(a, index) + token * load_argument(a, stride))


def make_number(index):
    return inlined(lambda a, token: simd.splat_f32x16(load_argument_f32(a, index)))


def make_load(place):
    return lambda rows, i: simd.load_f32x16(rows[place] + i)


def make_row_scaling(declaration, factor_of):
    @kernel
    def rows(a, part, parts, thread):
        stride, size = load_argument(a, declaration.stride), load_argument(a, declaration.columns) * 4
        tokens = simd.load_i64(load_argument(a, declaration.count))
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            x, y = load_argument(a, declaration.x) + t * stride, load_argument(a, declaration.y) + t * stride
            factor = factor_of(a, t)
            for i in range(0, size, 64):
                simd.store_f32x16(y + i, simd.load_f32x16(x + i) * simd.splat_f32x16(factor))

    return rows


@inlined
def compute_temperature(a, token):
    """Compute a token's attention temperature, 1 + slope * log(floor((position + offset) / length) + 1)."""
    position = simd.load_i64(load_argument(a, SCALE_BY_POSITION.positions) + token * 8) + load_argument(
        a, SCALE_BY_POSITION.offset
    )
    return float32(
        1.0
        + load_argument_f32(a, SCALE_BY_POSITION.slope)
        * log(float(position // load_argument(a, SCALE_BY_POSITION.length) + 1))
    )


@inlined
def compute_gate(a, token):
    """Compute the sigmoid of a row's gate; NaN if the gate is not finite."""
    gate = simd.load_f32(load_argument(a, SIGMOID_GATE.gate) + token * load_argument(a, SIGMOID_GATE.gate_stride))
    return float32(1.0 / (1.0 + exp(-float(gate)))) + float32(0.0) * gate


scale_by_position = make_row_scaling(SCALE_BY_POSITION, compute_temperature)
sigmoid_gate = make_row_scaling(SIGMOID_GATE, compute_gate)
