"""The float32 microkernel: rows of x times a tile of 16 columns. Float weights, attention scores and values all use it.

y[r, 0:16] += sum over i of x[r, i] * w[i, 0:16]
"""

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import fma_f32x16, load_f32, load_f32x16, splat_f32x16, store_f32x16, zero_f32x16


@device
def rows_8(x, x_stride, w, w_stride, n, y, y_stride):
    """Eight rows; strides in bytes."""
    x1, x2, x3, x4 = x + x_stride, x + 2 * x_stride, x + 3 * x_stride, x + 4 * x_stride
    x5, x6, x7 = x + 5 * x_stride, x + 6 * x_stride, x + 7 * x_stride
    y1, y2, y3, y4 = y + y_stride, y + 2 * y_stride, y + 3 * y_stride, y + 4 * y_stride
    y5, y6, y7 = y + 5 * y_stride, y + 6 * y_stride, y + 7 * y_stride
    t0, t1, t2, t3 = load_f32x16(y), load_f32x16(y1), load_f32x16(y2), load_f32x16(y3)
    t4, t5, t6, t7 = load_f32x16(y4), load_f32x16(y5), load_f32x16(y6), load_f32x16(y7)
    for i in range(n):
        v, k = load_f32x16(w + i * w_stride), i * 4
        t0 = fma_f32x16(splat_f32x16(load_f32(x + k)), v, t0)
        t1 = fma_f32x16(splat_f32x16(load_f32(x1 + k)), v, t1)
        t2 = fma_f32x16(splat_f32x16(load_f32(x2 + k)), v, t2)
        t3 = fma_f32x16(splat_f32x16(load_f32(x3 + k)), v, t3)
        t4 = fma_f32x16(splat_f32x16(load_f32(x4 + k)), v, t4)
        t5 = fma_f32x16(splat_f32x16(load_f32(x5 + k)), v, t5)
        t6 = fma_f32x16(splat_f32x16(load_f32(x6 + k)), v, t6)
        t7 = fma_f32x16(splat_f32x16(load_f32(x7 + k)), v, t7)
    store_f32x16(y, t0)
    store_f32x16(y1, t1)
    store_f32x16(y2, t2)
    store_f32x16(y3, t3)
    store_f32x16(y4, t4)
    store_f32x16(y5, t5)
    store_f32x16(y6, t6)
    store_f32x16(y7, t7)


@device
def rows_1(x, w, w_stride, n, y):
    """One row, in four sums so that additions need not wait for each other; n is a multiple of 4."""
    t0, t1, t2, t3 = load_f32x16(y), zero_f32x16(), zero_f32x16(), zero_f32x16()
    for i in range(0, n, 4):
        v, k = w + i * w_stride, x + i * 4
        t0 = fma_f32x16(splat_f32x16(load_f32(k)), load_f32x16(v), t0)
        t1 = fma_f32x16(splat_f32x16(load_f32(k + 4)), load_f32x16(v + w_stride), t1)
        t2 = fma_f32x16(splat_f32x16(load_f32(k + 8)), load_f32x16(v + 2 * w_stride), t2)
        t3 = fma_f32x16(splat_f32x16(load_f32(k + 12)), load_f32x16(v + 3 * w_stride), t3)
    store_f32x16(y, (t0 + t1) + (t2 + t3))


@device
def rows_any(x, x_stride, rows, w, w_stride, n, y, y_stride):
    """Any number of rows; n is a multiple of 4."""
    for r in range(0, rows - 7, 8):
        rows_8(x + r * x_stride, x_stride, w, w_stride, n, y + r * y_stride, y_stride)
    for r in range(rows // 8 * 8, rows):
        rows_1(x + r * x_stride, w, w_stride, n, y + r * y_stride)
