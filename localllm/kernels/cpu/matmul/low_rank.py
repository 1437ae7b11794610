"""Low-rank updates of matrix products: y + scale * (x A^T) B^T, the second product and the sum.

LoRA: Hu et al. 2021, arXiv 2106.09685. B is stored transposed, so that a vector holds 16 columns of y. An update has
few rows, so it is divided by columns of y: for one token as well as for many.
"""

from localllm.kernels import simd
from localllm.kernels.cpu.matmul.matmul_float import PLAIN
from localllm.kernels.cpu.signature import device, inlined, kernel, load_argument, load_argument_f32
from localllm.kernels.table import ADD_LOW_RANK, ADD_SCALED, MAX_ADAPTERS

TOKENS = 4  # that share each load of B


@device
def scale_of(t, scales, adapter, pairs, used, rows):
    """Return the adapter's scale for row t of an activation."""
    if pairs != 0:
        t = simd.load_i64(pairs + t * 8) // used
    if rows != 0:
        t = simd.load_i64(rows + t * 8)
    return simd.load_f32(scales + (t * MAX_ADAPTERS + adapter) * 4)


@inlined
def scale_at(a, row, t):
    scale = scale_of(
        t, load_argument(a, row.scales), load_argument(a, row.adapter), load_argument(a, row.pairs), load_argument(a,
        row.used),
        load_argument(a, row.rows),
    )  # fmt: skip
    return scale * load_argument_f32(a, row.factor)


def make_add_low_rank(format_name):
    width, _, load_16 = PLAIN[format_name]

    @kernel
    def add_low_rank(a, part, parts, thread):
        count, rank = simd.load_i64(load_argument(a, ADD_LOW_RANK.count)), load_argument(a, ADD_LOW_RANK.rank)
        columns, stride = load_argument(a, ADD_LOW_RANK.columns), load_argument(a, ADD_LOW_RANK.stride)
        row_bytes, x_stride = columns * width, load_argument(a, ADD_LOW_RANK.x_stride)
        vectors = (columns + 15) // 16
        first, end = vectors * part // parts * 16, vectors * (part + 1) // parts * 16
        for t in range(0, count, TOKENS):
            a0 = scale_at(a, ADD_LOW_RANK, t)
            # tokens beyond the last one repeat it, and are not stored
            t1, t2, t3 = min(t + 1, count - 1), min(t + 2, count - 1), min(t + 3, count - 1)
            a1, a2, a3 = scale_at(a, ADD_LOW_RANK, t1), scale_at(a, ADD_LOW_RANK, t2), scale_at(a, ADD_LOW_RANK, t3)
            if a0 == 0 and a1 == 0 and a2 == 0 and a3 == 0:
                continue
            x = load_argument(a, ADD_LOW_RANK.x)
            x0, x1, x2, x3 = x + t * x_stride, x + t1 * x_stride, x + t2 * x_stride, x + t3 * x_stride
            y = load_argument(a, ADD_LOW_RANK.y)
            y0, y1, y2, y3 = y + t * stride, y + t1 * stride, y + t2 * stride, y + t3 * stride
            for column in range(first, end, 16):
                w = load_argument(a, ADD_LOW_RANK.weights) + column * width
                s0, s1, s2, s3 = simd.zero_f32x16(), simd.zero_f32x16(), simd.zero_f32x16(), simd.zero_f32x16()
                for r in range(rank):
                    b = load_16(w + r * row_bytes)
                    s0 = simd.fma_f32x16(b, simd.splat_f32x16(simd.load_f32(x0 + r * 4)), s0)
                    s1 = simd.fma_f32x16(b, simd.splat_f32x16(simd.load_f32(x1 + r * 4)), s1)
                    s2 = simd.fma_f32x16(b, simd.splat_f32x16(simd.load_f32(x2 + r * 4)), s2)
                    s3 = simd.fma_f32x16(b, simd.splat_f32x16(simd.load_f32(x3 + r * 4)), s3)
                lanes, at = min(16, columns - column), column * 4
                add(y0 + at, s0, a0, lanes)
                if t + 1 < count:
                    add(y1 + at, s1, a1, lanes)
                if t + 2 < count:
                    add(y2 + at, s2, a2, lanes)
                if t + 3 < count:
                    add(y3 + at, s3, a3, lanes)

    return add_low_rank


@inlined
def add(y, numbers, scale, lanes):
    """Add scale * numbers to y; nothing for a scale of 0, so that an unused adapter changes no bit."""
    if scale != 0:
        total = simd.fma_f32x16(numbers, simd.splat_f32x16(scale), simd.load_lanes_f32x16(y, lanes))
        simd.store_lanes_f32x16(y, total, lanes)


@kernel
def add_scaled(a, part, parts, thread):
    count, columns = simd.load_i64(load_argument(a, ADD_SCALED.count)), load_argument(a, ADD_SCALED.columns)
    for t in range(count * part // parts, count * (part + 1) // parts):
        x = load_argument(a, ADD_SCALED.x) + t * load_argument(a, ADD_SCALED.x_stride)
        y, scale = load_argument(a, ADD_SCALED.y) + t * load_argument(a, ADD_SCALED.stride), scale_at(a, ADD_SCALED, t)
        for i in range(0, columns, 16):
            lanes = min(16, columns - i)
            add(y + i * 4, simd.load_lanes_f32x16(x + i * 4, lanes), scale, lanes)
