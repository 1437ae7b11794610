"""The formulas of row-wise kernels: each is written once and compiled for every target.

A formula is a row of the table of kernels (localllm.kernels.table), and its arguments follow from its parameters. A
parameter without an annotation is an activation; `Strided` is one with its own stride, `Row` one row for all tokens,
float32 [columns], `Number` a float32. The result, y, has as many columns as the first activation, and may replace it.

A formula computes with vectors of 16 columns on CPUs and with scalars on GPUs. Besides + - * it may use the
functions of WORDS in kernels/cpu/elementwise/formulas.py and kernels/cuda/elementwise/formulas.py. A formula that
bounds its input uses `propagate_nan`: it would otherwise hide that broken weights have produced infinity or NaN.
This module does not import Numba.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Annotated, Any, TypeAlias, cast

from localllm.kernels.declaration import declare_kernel

Strided: TypeAlias = Annotated[Any, "strided"]
Row: TypeAlias = Annotated[Any, "row"]
Number: TypeAlias = Annotated[Any, "number"]
FORMULAS: dict[str, FunctionType] = {}
# Each target has these functions; `bind` replaces the names by them.
absolute = erf = exp = fma = propagate_nan = larger = log_one_plus_exp = number = cast(Any, None)
reciprocal = smaller = sqrt = tanh = where_above_zero = cast(Any, None)
SQRT_2_BY_PI, SQRT_HALF = 0.7978845608028654, 0.7071067811865476


def declare_formula(formula: Any) -> Any:
    """Add a formula to the table of kernels."""
    kinds = get_annotations(formula)
    names = " ".join(f"{name} {name}_stride" if kind is Strided else name for name, kind in kinds.items())
    inputs = " ".join(name for name, kind in kinds.items() if kind not in (Row, Number))
    declare_kernel(
        formula.__name__, f"count {names} y stride columns", "elementwise.formulas", "by_four", inputs, in_place=True
    )
    FORMULAS[formula.__name__] = formula
    return formula


def get_annotations(formula: FunctionType) -> dict[str, Any]:
    """Return the annotation of each parameter, None for activations without one."""
    return {
        name: formula.__annotations__.get(name) for name in formula.__code__.co_varnames[: formula.__code__.co_argcount]
    }


def bind(name: str, words: Mapping[str, Any], compiled: Callable[[Any], Any]) -> Any:
    """Return a target's version of a formula; words: its functions; compiled: its decorator of functions."""
    code = FORMULAS[name].__code__
    inner = {other: bind(other, words, compiled) for other in code.co_names if other in FORMULAS}
    return compiled(FunctionType(code, {**globals(), **words, **inner}, name))


def build_tuple_function(functions: Sequence[Callable[..., Any]], compiled: Callable[[Any], Any]) -> Any:
    """Build a function (a, b) of all functions' results, which Numba compiles to registers.

    compiled: see `bind`.
    """
    if not functions:
        return compiled(lambda a, b: ())
    first, others = functions[0], build_tuple_function(functions[1:], compiled)
    return compiled(lambda a, b: (first(a, b), *others(a, b)))


@declare_formula
def add(x, z: Strided):
    return x + z


@declare_formula
def multiply(x, z):
    return x * z


@declare_formula
def scale(x, factor: Number):
    return x * factor


@declare_formula
def scale_columns(x, weight: Row):
    return x * weight


@declare_formula
def add_scalar(x, number: Number):
    return x + number


@declare_formula
def lerp(x, z, weight: Row):
    return fma(z - x, weight, x)


@declare_formula
def relu(x):
    return propagate_nan(larger(number(0.0), x), x)


@declare_formula
def reglu(gate, up):
    return relu(gate) * up


@declare_formula
def relu_squared(x):
    above = relu(x)
    return above * above


@declare_formula
def clamp(x, limit: Number):
    return propagate_nan(smaller(limit, larger(-limit, x)), x)


@declare_formula
def exponential(x):
    return propagate_nan(exp(x), x)


@declare_formula
def sigmoid(x):
    return propagate_nan(reciprocal(number(1.0) + exp(-x)), x)


@declare_formula
def softplus(x, bias: Row):
    return log_one_plus_exp(x + bias)


@declare_formula
def softcap(x, cap: Number):
    inner = x * reciprocal(cap)
    return propagate_nan(tanh(inner) * cap, inner)


@declare_formula
def gelu(x):
    """Compute x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    inner = fma(x * x * x, number(0.044715), x) * number(SQRT_2_BY_PI)
    return x * number(0.5) * (number(1.0) + tanh(inner))


@declare_formula
def gelu_erf(x):
    """Compute x / 2 * (1 + erf(x / sqrt(2)))."""
    return x * number(0.5) * (number(1.0) + erf(x * number(SQRT_HALF)))


@declare_formula
def geglu(gate, up):
    return gelu(gate) * up


@declare_formula
def swiglu(gate, up):
    return gate * reciprocal(number(1.0) + exp(-gate)) * up


@declare_formula
def swiglu_limited(gate, up, sharpness: Number, limit: Number):
    """Compute gate * sigmoid(sharpness * gate) * (up + 1), with limited inputs.

    gate is at most `limit`, up is between -limit and limit.
    """
    gate = propagate_nan(smaller(limit, gate), gate)
    return gate * reciprocal(number(1.0) + exp(gate * -sharpness)) * (clamp(up, limit) + number(1.0))


@declare_formula
def signed_root(x, least: Number):
    """Compute sqrt(max(|x|, least)) with the sign of x, 0 for 0."""
    root = sqrt(larger(absolute(x), least))
    return propagate_nan(where_above_zero(x, root, where_above_zero(-x, -root, x * number(0.0))), x)


@declare_formula
def xielu(x, alpha_p: Number, alpha_n: Number, beta: Number, epsilon: Number):
    """Compute alpha_p x^2 + beta x above 0, alpha_n (e^min(x, epsilon) - 1 - x) + beta x below.

    The error is at most alpha_n * 2e-7.
    """
    below = exp(smaller(epsilon, x)) - number(1.0) - x
    return fma(beta, x, where_above_zero(x, alpha_p * x * x, alpha_n * below))
