"""What gates are made of: functions of single numbers, row by row; columns padded to 16."""

from localllm.kernels.arguments import MULTIPLY, SIGMOID, SOFTPLUS
from localllm.kernels.cpu.signature import argument, kernel
from localllm.kernels.simd import load_f32x16, load_i64, sigmoid_f32x16, softplus_f32x16, store_f32x16


@kernel
def multiply(a, part, parts, thread):
    """y = x * z."""
    stride, tokens = argument(a, MULTIPLY.stride), load_i64(argument(a, MULTIPLY.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, z = argument(a, MULTIPLY.x) + t * stride, argument(a, MULTIPLY.z) + t * stride
        y = argument(a, MULTIPLY.y) + t * stride
        for i in range(0, argument(a, MULTIPLY.columns) * 4, 64):
            store_f32x16(y + i, load_f32x16(x + i) * load_f32x16(z + i))


@kernel
def sigmoid(a, part, parts, thread):
    """y = 1 / (1 + e^-x)."""
    stride, tokens = argument(a, SIGMOID.stride), load_i64(argument(a, SIGMOID.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, SIGMOID.x) + t * stride, argument(a, SIGMOID.y) + t * stride
        for i in range(0, argument(a, SIGMOID.columns) * 4, 64):
            store_f32x16(y + i, sigmoid_f32x16(load_f32x16(x + i)))


@kernel
def softplus(a, part, parts, thread):
    """y = log(1 + e^(x + bias))."""
    stride, tokens, bias = (
        argument(a, SOFTPLUS.stride),
        load_i64(argument(a, SOFTPLUS.count)),
        argument(a, SOFTPLUS.bias),
    )
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, SOFTPLUS.x) + t * stride, argument(a, SOFTPLUS.y) + t * stride
        for i in range(0, argument(a, SOFTPLUS.columns) * 4, 64):
            store_f32x16(y + i, softplus_f32x16(load_f32x16(x + i) + load_f32x16(bias + i)))
