"""Kernels of the formulas (localllm.kernels.formulas), and two that scale rows.

A thread computes four columns of a row, so y may be an input.
"""

import math

from numba import cuda, float32

from localllm.kernels.cuda import gpu
from localllm.kernels.formulas import FORMULAS, Number, Row, Strided, bind, build_tuple_function, get_annotations
from localllm.kernels.table import KERNELS

ZERO, ONE = float32(0), float32(1)
# The constants of `compute_erf`.
P, A, B = float32(0.3275911), float32(0.254829592), float32(-0.284496736)
C, D, E = float32(1.421413741), float32(-1.453152027), float32(1.061405429)


@gpu.device
def compute_first_column():
    return 4 * (cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)


@gpu.device
def keep_finite(y, x):
    """Return y, or NaN where x is not finite.

    A bounded function, such as a sigmoid, would otherwise hide that broken weights have produced infinity or NaN.
    """
    return y + ZERO * x


@gpu.device
def compute_erf(x):
    """Compute erf x with an error of at most 3e-7 (Abramowitz and Stegun 1964, 7.1.26)."""
    size = abs(x)
    t = ONE / (ONE + P * size)
    y = ONE - ((((E * t + D) * t + C) * t + B) * t + A) * t * gpu.exp(-x * x)
    return -y if x < ZERO else y


@gpu.device
def compute_softplus(x):
    """Compute log(1 + e^x) = max(x, 0) + log(1 + e^-|x|); infinity gives NaN."""
    return keep_finite((x if x > ZERO else ZERO) + gpu.log1p(gpu.exp(-abs(x))), x)


@gpu.device
def select_by_sign(x, y, z):
    """Return y where x is above 0, else z; z also where x is NaN."""
    return y if x > ZERO else z


WORDS = {
    "absolute": gpu.device(lambda x: abs(x)), "erf": compute_erf, "exp": gpu.exp,
    "fma": gpu.device(lambda x, y, z: x * y + z), "propagate_nan": keep_finite,
    "larger": gpu.device(lambda x, y: x if x > y else y), "log_one_plus_exp": compute_softplus, "number": float32,
    "reciprocal": gpu.device(lambda x: ONE / x), "smaller": gpu.device(lambda x, y: x if x < y else y),
    "sqrt": math.sqrt, "tanh": gpu.tanh, "where_above_zero": select_by_sign,
}  # fmt: skip
compute_sigmoid, compute_swiglu = bind("sigmoid", WORDS, gpu.device), bind("swiglu", WORDS, gpu.device)


def make(name):
    declaration, compute, kinds = (
        KERNELS[name].arguments,
        bind(name, WORDS, gpu.device),
        get_annotations(FORMULAS[name]),
    )
    indices = [(getattr(declaration, each), kind) for each, kind in kinds.items()]
    sources = [make_source(declaration, index, kind) for index, kind in indices if kind is not Number]
    rows_of = build_tuple_function(sources, gpu.device)
    numbers_of = build_tuple_function([make_number(index) for index, kind in indices if kind is Number], gpu.device)
    one, two, three, four = (
        build_tuple_function([make_column(place, column) for place in range(len(sources))], gpu.device)
        for column in range(4)
    )
    count, y, stride, columns = declaration.count, declaration.y, declaration.stride, declaration.columns

    @gpu.device
    def compute_rows(a):
        row, column = cuda.blockIdx.x, compute_first_column()
        if row < gpu.load_i64(a[count]) and column < a[columns]:
            rows, numbers = rows_of(a, 0), numbers_of(a, 0)
            gpu.store_4f32(
                a[y] + row * a[stride] + 4 * column,
                compute(*(one(rows, 0) + numbers)),
                compute(*(two(rows, 0) + numbers)),
                compute(*(three(rows, 0) + numbers)),
                compute(*(four(rows, 0) + numbers)),
            )

    return name_parameters(compute_rows, ", ".join(declaration._fields))


def name_parameters(function, names):
    """Build a kernel that has parameters with the given names and calls function(all of them, as a tuple)."""
    scope = {"function": function}
    exec(f"def kernel({names}):\n    function(({names}))", scope)
    return scope["kernel"]


def make_source(declaration, index, kind):
    stride = index + 1 if kind is Strided else declaration.stride

    def load_of_token(a, _):
        return gpu.load_4f32(a[index] + cuda.blockIdx.x * a[stride] + 4 * compute_first_column())

    def load_of_all(a, _):
        return gpu.load_4f32(a[index] + 4 * compute_first_column())

    return gpu.device(load_of_all if kind is Row else load_of_token)


def make_number(index):
    return gpu.device(lambda a, _: gpu.decode_f32(a[index]))


def make_column(place, column):
    return gpu.device(lambda rows, _: rows[place][column])


def scale_by_position(count, x, positions, slope, length, offset, y, stride, columns):
    row, column = cuda.blockIdx.x, compute_first_column()
    if row < gpu.load_i64(count) and column < columns:
        at, position = row * stride + 4 * column, gpu.load_i64(positions + 8 * row) + offset
        factor = ONE + gpu.decode_f32(slope) * gpu.log(float32(position // length + 1))
        a, b, c, d = gpu.load_4f32(x + at)
        gpu.store_4f32(y + at, a * factor, b * factor, c * factor, d * factor)


def sigmoid_gate(count, x, gate, gate_stride, y, stride, columns):
    row, column = cuda.blockIdx.x, compute_first_column()
    if row < gpu.load_i64(count) and column < columns:
        at, factor = row * stride + 4 * column, compute_sigmoid(gpu.load_f32(gate + row * gate_stride))
        a, b, c, d = gpu.load_4f32(x + at)
        gpu.store_4f32(y + at, a * factor, b * factor, c * factor, d * factor)
