"""Matrix products of few tokens with plain numbers: a warp for each row of the matrix."""

from numba import cuda

from localllm.kernels.cuda.device import WARP, float32, lane, load_f32, load_i64, store_f32, warp_sum


def make(format_name):
    """The kernel for one format."""
    return linear_f32


def linear_f32(
    count, weights, row_bytes, rows, columns, x, x_stride, y, y_stride, scratch, scratch_bytes, bf16, bf16_stride,
    most_precise,
):  # fmt: skip
    """y = W x."""
    row = cuda.blockIdx.x * (cuda.blockDim.x // WARP) + cuda.threadIdx.x // WARP
    if row >= rows:
        return
    for token in range(load_i64(count)):
        total = float32(0)
        for column in range(lane(), columns, WARP):
            total += load_f32(weights + row * row_bytes + 4 * column) * load_f32(x + token * x_stride + 4 * column)
        total = warp_sum(total)
        if lane() == 0:
            store_f32(y + token * y_stride + 4 * row, total)
