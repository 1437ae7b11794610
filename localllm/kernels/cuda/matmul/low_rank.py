"""Low-rank updates of matrix products (LoRA): see localllm.kernels.cpu.matmul.low_rank."""

from numba import cuda, float32

from localllm.kernels.cuda import gpu
from localllm.kernels.table import MAX_ADAPTERS


@gpu.device
def load_adapter_scale(t, scales, adapter, pairs, used, rows):
    """Return the adapter's scale for row t of an activation."""
    if pairs != 0:
        t = gpu.load_i64(pairs + 8 * t) // used
    if rows != 0:
        t = gpu.load_i64(rows + 8 * t)
    return gpu.load_f32(scales + 4 * (t * MAX_ADAPTERS + adapter))


def make_add_low_rank(name):
    size = 4 if name == "F32" else 2

    def add_low_rank(
        count, scales, adapter, factor, pairs, used, rows, x, x_stride, rank, weights, row_bytes, y, stride, columns,
        scratch, scratch_bytes,
    ):  # fmt: skip
        row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        if row >= gpu.load_i64(count) or column >= columns:
            return
        scale = gpu.decode_f32(factor) * load_adapter_scale(row, scales, adapter, pairs, used, rows)
        if scale == 0:
            return
        total = float32(0)
        for r in range(rank):
            place = weights + r * row_bytes + size * column
            if name == "F32":
                weight = gpu.load_f32(place)
            elif name == "F16":
                weight = gpu.decode_f16(gpu.load_u16(place))
            else:
                weight = gpu.decode_f32(gpu.load_u16(place) << 16)
            total += gpu.load_f32(x + row * x_stride + 4 * r) * weight
        place = y + row * stride + 4 * column
        gpu.store_f32(place, gpu.load_f32(place) + scale * total)

    return add_low_rank


def add_scaled(count, scales, adapter, factor, pairs, used, rows, x, x_stride, y, stride, columns):
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < gpu.load_i64(count) and column < columns:
        scale = gpu.decode_f32(factor) * load_adapter_scale(row, scales, adapter, pairs, used, rows)
        place = y + row * stride + 4 * column
        if scale != 0:
            gpu.store_f32(place, gpu.load_f32(place) + scale * gpu.load_f32(x + row * x_stride + 4 * column))
