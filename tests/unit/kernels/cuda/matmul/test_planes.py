"""Compare planes of quantized weights, and products with them, with NumPy, in Numba's CUDA simulator."""

import numpy as np
import pytest
from cuda_planes import dequantized
from kernel_calls import dequantized as weights_of
from simulated import launch

from localllm.kernels.cuda import compute_grid
from localllm.kernels.cuda.matmul.planes import (
    FLOAT_FORMATS,
    PLANES,
    compute_plane_offset,
    compute_row_bytes,
    get_storage_format,
)
from localllm.quant.formats import BY_NAME, FORMATS, list_float_offsets

random = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers():
    """Reset the random numbers, whatever tests ran before."""
    global random
    random = np.random.default_rng(0)


def aligned(*shape: int, kind=np.uint8) -> np.ndarray:
    """Return zeros that begin at a multiple of 16 bytes."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    buffer = np.zeros(size + 16, np.uint8)
    start = -buffer.ctypes.data % 16
    return buffer[start : start + size].view(kind).reshape(shape)


def blocks_of(name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a random matrix as in a file, with scales of both signs, and its weights, float32."""
    format = BY_NAME[name]
    blocks = random.integers(0, 256, (rows * columns // format.block, format.bytes), np.uint8)
    for field in list_float_offsets(name):
        scales = random.uniform(-0.01, 0.01, len(blocks)).astype("<f2")
        blocks[:, field : field + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(118, 124, len(blocks))
    weights = weights_of(name, blocks)
    return blocks, weights.reshape(rows, columns)


def planes_of(name: str, blocks: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return the planes of a matrix, uint8 [rows, row_bytes], made in two parts that end within rows."""
    planes, format = aligned(rows, compute_row_bytes(name, columns)), BY_NAME[name]
    middle = len(blocks) // 2
    for first, last in ((0, middle), (middle, len(blocks))):
        launch(
            f"to_planes-{name}", 1, blocks=np.ascontiguousarray(blocks[first:last]), first=first * format.block,
            last=last * format.block, columns=columns, planes=planes, row_bytes=planes.strides[0],
        )  # fmt: skip
    return planes


def matrix(name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix as on the GPU, and its weights as float32."""
    if name not in FLOAT_FORMATS:
        blocks, weights = blocks_of(name, rows, columns)
        return planes_of(name, blocks, rows, columns), weights
    weights = random.normal(0, 1, (rows, columns)).astype(np.float32)
    if name == "BF16":
        weights = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
    data = {"F16": weights.astype(np.float16), "BF16": (weights.view(np.uint32) >> 16).astype(np.uint16)}.get(
        name, weights
    )
    stored = aligned(rows, compute_row_bytes(name, columns))
    stored[:, : data.itemsize * columns] = data.view(np.uint8)
    return stored, data.astype(np.float32) if name == "F16" else weights


def activations(tokens: int, columns: int) -> np.ndarray:
    """Return random rows padded to 16 columns."""
    x = aligned(tokens, -(-columns // 16) * 16, kind=np.float32)
    x[:, :columns] = random.normal(0, 1, (tokens, columns))
    x[:, columns:] = np.nan
    return x


def quantized(x: np.ndarray, count: int, columns: int) -> dict[str, np.ndarray]:
    """Quantize activations for products."""
    room = len(x)
    result = {
        "codes": aligned(room, 4, columns // 32, 16, kind=np.int8),
        "scales": aligned(room, columns // 32, kind=np.float32),
        "sums": aligned(room, columns // 16, kind=np.float32),
    }
    launch("quantize_planes", room, count=np.array([count]), x=x, stride=x.strides[0], columns=columns, **result)
    return result


def error(y: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    """Return the mean squared error of y [tokens, rows], relative to results of random signs."""
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    return float(((y - x @ weights.T) ** 2).mean() / (x**2 @ weights.T**2).mean())


def columns_for(name: str, units: int) -> int:
    """Return about `units` times 32 columns, in whole blocks."""
    return -(-32 * units // BY_NAME[name].block) * BY_NAME[name].block


@pytest.mark.parametrize("name", PLANES)
def test_planes_dequantize_to_the_weights(name):
    columns = 3 * columns_for(name, 1)
    blocks, weights = blocks_of(name, 2, columns)
    planes = planes_of(name, blocks, 2, columns)
    np.testing.assert_array_equal(dequantized(name, planes, columns), weights)


@pytest.mark.parametrize("name", PLANES)
def test_planes_are_as_large_as_the_file(name):
    for columns in (576, 2048, 4096):
        if columns % BY_NAME[name].block == 0:
            file = BY_NAME[name].row_bytes(columns)
            assert compute_plane_offset(name, "", columns) == file <= compute_row_bytes(name, columns) < file + 16


def test_every_type_has_a_stored_type_on_the_gpu():
    assert {get_storage_format(format.name) for format in FORMATS.values()} == {*PLANES, *FLOAT_FORMATS}


def test_quantized_planes_round_within_half_a_step_and_keep_nan():
    columns, count = 96, 3
    x = activations(4, columns)
    x[1, 40] = np.inf
    x[2, :32] = 0
    x[2, 70] = np.nan
    got = quantized(x, count, columns)
    codes = got["codes"].astype(np.int64).transpose(0, 2, 1, 3).reshape(4, 3, 2, 32)  # high and low, of each 32
    whole = 256 * codes[:, :, 0] + codes[:, :, 1]
    bad = np.isnan(got["scales"])
    assert [tuple(place) for place in np.argwhere(bad)] == [(1, 1), (2, 2)]
    values, exact = got["scales"][..., None] * whole, x[:, :columns].reshape(4, 3, 32)
    steps = np.abs(exact).max(axis=-1) / (127 * 256)
    assert (np.abs(values - exact)[:count][~bad[:count]].max(axis=-1) <= 0.51 * steps[:count][~bad[:count]]).all()
    sums = values.reshape(4, 3, 2, 16).sum(axis=-1)
    np.testing.assert_allclose(got["sums"].reshape(4, 3, 2)[:count], sums[:count], rtol=1e-6)
    assert not got["codes"][count:].any() and not got["scales"][count:].any()


@pytest.mark.parametrize("verb", ["norm", "swiglu"])
def test_fused_quantization_equals_separate_steps(verb):
    columns, count = 160, 2
    x, weight = activations(3, columns), activations(1, columns)[0]
    x[1, 0] = np.inf
    up, y = activations(3, columns), aligned(3, columns, kind=np.float32)
    common = {"count": np.array([count]), "stride": x.strides[0], "columns": columns}
    if verb == "norm":
        kernels, given = ("rms_norm", "norm_quantize"), {"x": x, "weight": weight, "group": columns, "epsilon": 1e-5}
    else:
        kernels, given = ("swiglu", "swiglu_quantize"), {"gate": x, "up": up}
    launch(kernels[0], 3, **common, **given, y=y)
    apart = quantized(y, count, columns)
    together = {key: aligned(*value.shape, kind=value.dtype) for key, value in apart.items()}
    launch(kernels[1], 3, **common, **given, y=x, **together)
    np.testing.assert_allclose(x[:count], y[:count], rtol=1e-6)
    np.testing.assert_allclose(together["scales"], apart["scales"], rtol=1e-6)
    whole = [256 * given["codes"][:, :2].astype(int) + given["codes"][:, 2:] for given in (apart, together)]
    assert np.abs(whole[0] - whole[1]).max() <= 1
    np.testing.assert_allclose(together["sums"], apart["sums"], rtol=1e-4, atol=1e-3)


# Formats, tokens that kernels are made for and tokens there are, rows, units of 32 columns.
CASES = [
    *((name, 1, 1, 3, 2) for name in PLANES),
    *((name, 8, 8, 2, 2) for name in ("Q8_0", "Q2_K", "Q3_K", "Q4_K")),
    ("Q4_0", 4, 3, 5, 9), ("Q4_1", 2, 2, 1, 1), ("Q6_K", 2, 1, 2, 24), ("Q8_0", 8, 5, 3, 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "most", "count", "rows", "units"), CASES)
def test_products_of_planes_agree_with_numpy(name, most, count, rows, units):
    columns = columns_for(name, units)
    weights, exact = matrix(name, rows, columns)
    x, y = activations(most, columns), np.full((most, rows + 1), np.float32(7.25))
    launch(
        f"linear_planes-{most}-{name}", most, count=np.array([count]), weights=weights, row_bytes=weights.strides[0],
        rows=rows, columns=columns, **quantized(x, count, columns), y=y, y_stride=y.strides[0], active=0,
        active_count=0, expert_bytes=0, experts=1,
    )  # fmt: skip
    assert error(y[:count, :rows], x[:count, :columns], exact) < 1e-8
    assert (y[count:] == 7.25).all() and (y[:, rows:] == 7.25).all()


@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_products_of_experts_on_a_gpu_agree_with_numpy(name):
    """Use three of four experts, one with more rows than the kernel takes at a time."""
    rows, columns, most = 3, 64, 2
    weights, exact = matrix(name, 4 * rows, columns)
    active = np.array([[3, 0, 3], [0, 3, 1], [1, 4, 2]], np.int64)
    x, y = activations(6, columns), np.full((7, rows), np.float32(7.25))
    inputs = quantized(x, 6, columns) if name == "Q8_0" else {"x": x, "x_stride": x.strides[0]}
    kind = "linear_planes" if name == "Q8_0" else "linear_plain"
    launch(
        f"{kind}-{most}-{name}", 6, count=0, weights=weights, row_bytes=weights.strides[0], rows=rows, columns=columns,
        **inputs, y=y, y_stride=y.strides[0], active=active, active_count=np.array([3]),
        expert_bytes=rows * weights.strides[0], experts=4,
    )  # fmt: skip
    for expert, first, count in active:
        own = slice(first, first + count)
        assert error(y[own], x[own, :columns], exact.reshape(4, rows, columns)[expert]) < 1e-8
    assert (y[6] == 7.25).all()


@pytest.mark.parametrize("kernel", ["linear_planes-2-Q8_0", "linear_plain-2-F16"])
def test_grids_have_blocks_for_all_experts(kernel):
    """Launch blocks for all experts, because only the running kernel knows how many are used."""
    arguments = {"rows": 3, "columns": 64, "active_count": np.zeros(1, np.int64), "experts": 4}
    assert compute_grid(kernel, arguments, 6).y == 4 and compute_grid(kernel, arguments, 2).y == 2


@pytest.mark.parametrize("name", FLOAT_FORMATS)
@pytest.mark.parametrize(("most", "count", "rows", "columns"), [(1, 1, 5, 72), (8, 3, 2, 45)])
def test_products_of_plain_weights_on_a_gpu_agree_with_numpy(name, most, count, rows, columns):
    weights, exact = matrix(name, rows, columns)
    x, y = activations(most, columns), np.full((most, rows), np.float32(7.25))
    launch(
        f"linear_plain-{most}-{name}", most, count=np.array([count]), weights=weights, row_bytes=weights.strides[0],
        rows=rows, columns=columns, x=x, x_stride=x.strides[0], y=y, y_stride=y.strides[0], active=0, active_count=0,
        expert_bytes=0, experts=1,
    )  # fmt: skip
    assert error(y[:count], x[:count, :columns], exact) < 1e-12
    assert (y[count:] == 7.25).all()


def test_infinite_activations_and_scales_stay_visible():
    """Expect no change of other tokens and rows."""
    columns = 64
    blocks, exact = blocks_of("Q8_0", 3, columns)
    blocks.reshape(3, 2, -1)[1, 1, :2] = np.array([np.inf], "<f2").view(np.uint8)
    weights = planes_of("Q8_0", blocks, 3, columns)
    x, y = activations(2, columns), np.zeros((2, 3), np.float32)
    x[1, 5] = np.inf
    launch(
        "linear_planes-2-Q8_0", 2, count=np.array([2]), weights=weights, row_bytes=weights.strides[0], rows=3,
        columns=columns, **quantized(x, 2, columns), y=y, y_stride=y.strides[0], active=0, active_count=0,
        expert_bytes=0, experts=1,
    )  # fmt: skip
    assert not np.isfinite(y[1]).any() and not np.isfinite(y[0, 1])
    assert error(y[:1, ::2], x[:1], exact[::2]) < 1e-8


@pytest.mark.parametrize("name", PLANES)
def test_unpacked_planes_are_the_weights_in_float16(name):
    columns = columns_for(name, 1)
    weights, exact = matrix(name, 3, columns)
    y = aligned(3, columns, kind=np.float16)
    launch(f"unpack-{name}", 1, weights=weights, row_bytes=weights.strides[0], columns=columns, first=1, rows=2, y=y)
    np.testing.assert_array_equal(y[:2], exact[1:].astype(np.float16))
    assert not y[2].any()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", *FLOAT_FORMATS])
def test_embedding_rows_on_a_gpu_are_dequantized(name):
    columns = 256 if name in PLANES else 45
    weights, exact = matrix(name, 3, columns)
    x = aligned(3, -(-columns // 16) * 16, kind=np.float32)
    launch(
        f"embed-{name}", 3, count=np.array([2]), weights=weights, row_bytes=weights.strides[0], columns=columns,
        ids=np.array([2, 0, 1]), x=x, stride=x.strides[0],
    )  # fmt: skip
    np.testing.assert_allclose(x[:2, :columns], exact[[2, 0]], rtol=1e-6)
    assert not x[2].any()
