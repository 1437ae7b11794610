"""A table of the row-wise operations ("verbs"), whose result has as many columns as their input.

A row connects the operation's formula (localllm.arch.rowwise_verbs) with its kernels: their arguments, whether they may
overwrite their first input, and the module of the kernel on each target. The kernel has the verb's name. Importing this
module does not import Numba.
"""

from typing import Any, NamedTuple

from localllm.kernels.declaration import arguments

SHAPE = ("count", "y", "stride", "columns")  # arguments that all of them have
SOURCES = {"weight": "vector"}  # argument of a kernel: its name in the operation, where the two differ


class Verb(NamedTuple):
    """A row of the table.

    Attributes:
        arguments: the declaration of the kernels' arguments.
        inputs: the names of those that are activations, in the order of the operation's inputs.
        strides: the names of those that are the row stride, in bytes, of the last input.
        given: for each of the other arguments, its name in the operation.
        cpu, cuda: the kernel's module in localllm.kernels.cpu and in localllm.kernels.cuda.
        in_place: whether the kernel may write its result over its first input.
    """

    arguments: Any
    inputs: tuple[str, ...]
    strides: tuple[str, ...]
    given: dict[str, str]
    cpu: str
    cuda: str
    in_place: bool = True


def row(names: str, inputs: str, cpu: str, cuda: str = "elementwise.elementwise", in_place: bool = True) -> Verb:
    """Make a row of the table.

    names: all arguments of the kernels, in order; inputs: those that are activations; both separated by spaces.
    """
    activations, fields = tuple(inputs.split()), names.split()
    strides = tuple(name for name in fields if name.endswith("_stride"))
    from_engine = {*SHAPE, *activations, *strides}
    given = {name: SOURCES.get(name, name) for name in fields if name not in from_engine}
    return Verb(arguments(names), activations, strides, given, cpu, cuda, in_place)


ROWWISE = {
    # y = x / sqrt(mean(x^2) + epsilon) * weight, the mean of each `group` columns.
    "rms_norm": row("count x weight y stride columns group epsilon", "x", "elementwise.norms", "elementwise.norms"),
    # y = (x - mean) / sqrt(variance + epsilon) * weight + bias, for each `group` columns.
    "layer_norm": row(
        "count x weight bias y stride columns group epsilon", "x", "elementwise.norms", "elementwise.norms"
    ),
    # y = x + z; z_stride 0: one row for all tokens.
    "add": row("count x z z_stride y stride columns", "x z", "elementwise.rowwise"),
    # y = x * z.
    "multiply": row("count x z y stride columns", "x z", "elementwise.activations"),
    # y = gate * sigmoid(gate) * up.
    "swiglu": row("count gate up y stride columns", "gate up", "elementwise.rowwise"),
    # y = gelu(gate) * up.
    "geglu": row("count gate up y stride columns", "gate up", "elementwise.activations"),
    # y = max(gate, 0) * up.
    "reglu": row("count gate up y stride columns", "gate up", "elementwise.activations"),
    # y = gate * sigmoid(sharpness * gate) * (up + 1), gate up to `limit`, up between -limit and limit.
    "swiglu_limited": row("count gate up sharpness limit y stride columns", "gate up", "elementwise.activations"),
    # y = x * sigmoid(gate of the row), gate f32 [rows, 1].
    "sigmoid_gate": row(
        "count x gate gate_stride y stride columns", "x gate", "elementwise.activations", in_place=False
    ),
    # y = gelu(x).
    "gelu": row("count x y stride columns", "x", "elementwise.activations"),
    # y = x / 2 * (1 + erf(x / sqrt(2))).
    "gelu_erf": row("count x y stride columns", "x", "elementwise.activations"),
    # y = max(x, 0)^2.
    "relu_squared": row("count x y stride columns", "x", "elementwise.activations"),
    # y = max(x, 0).
    "relu": row("count x y stride columns", "x", "elementwise.activations"),
    # y = e^x.
    "exponential": row("count x y stride columns", "x", "elementwise.activations"),
    # y = x + number.
    "add_scalar": row("count x number y stride columns", "x", "elementwise.activations"),
    # y = e^x / the sum of them, of each row.
    "softmax": row("count x y stride columns", "x", "elementwise.heads", "elementwise.heads"),
    # y = a matrix of `size` rows whose rows and columns add up to 1, transposed.
    "sinkhorn": row("count x size iterations epsilon y stride columns", "x", "elementwise.heads", "elementwise.heads"),
    # y = x * weight, f32 [columns].
    "scale_columns": row("count x weight y stride columns", "x", "elementwise.activations"),
    # y = x + (z - x) * weight, f32 [columns].
    "lerp": row("count x z weight y stride columns", "x z", "elementwise.rowwise"),
    # y = each of the heads' columns of x times its gate, f32 [rows, heads].
    "multiply_heads": row(
        "count x gates gates_stride heads y stride columns", "x gates", "elementwise.heads", "elementwise.heads"
    ),
    # y = alpha_p x^2 + beta x above 0, alpha_n (e^min(x, epsilon) - 1 - x) + beta x below.
    "xielu": row("count x alpha_p alpha_n beta epsilon y stride columns", "x", "elementwise.activations"),
    # y = 1 / (1 + e^-x).
    "sigmoid": row("count x y stride columns", "x", "elementwise.activations"),
    # y = log(1 + e^(x + bias)).
    "softplus": row("count x bias y stride columns", "x", "elementwise.activations"),
    # y = x * factor.
    "scale": row("count x factor y stride columns", "x", "elementwise.activations"),
    # y = x, but nothing beyond limit or -limit.
    "clamp": row("count x limit y stride columns", "x", "elementwise.activations"),
    # y = the sign of x * sqrt(max(|x|, least)).
    "signed_root": row("count x least y stride columns", "x", "elementwise.activations"),
    # y = cap * tanh(x / cap).
    "softcap": row("count x cap y stride columns", "x", "elementwise.activations"),
}


def where(verb: str) -> str:
    """Return an error message that names the files to change for a verb without kernels."""
    return (
        f"the verb {verb!r} has no row in localllm/kernels/verbs.py, no operation in localllm/engine/operations that"
        " says its steps, and no function in the table of the target: it needs one of them"
    )
