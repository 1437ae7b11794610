"""Compare every CPU kernel with NumPy, called as the tape does: by address, with an array of int64."""

import itertools
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
from kernel_calls import (
    GUARD,
    Scratch,
    at_end_of_page,
    by_format,
    caller,
    count,
    dequantized,
    for_any_parts,
    normal,
    output,
    padded,
    vector,
    wanted,
    written,
)

from localllm.kernels import cpu
from localllm.kernels.cpu.matmul.gemm_f16_words import SLAB
from localllm.kernels.cpu.matmul.gemm_int8 import BYTE_OFFSET, get_scale_span
from localllm.kernels.cpu.matmul.gemm_int16 import MAX_BYTE_CODE
from localllm.kernels.cpu.matmul.kernel_variants import get_max_few_fast, get_max_few_tokens
from localllm.kernels.formats import FAMILIES, load_group_format
from localllm.kernels.machine import get_lane
from localllm.kernels.table import QUANTIZE
from localllm.quant.encode import ENCODERS, encode
from localllm.quant.formats import BY_NAME, list_float_offsets

QUANTIZED = {name: load_group_format(name) for name in FAMILIES}
LANE = get_lane()  # that the kernels are compiled for
HAS_BF16 = "BF16" in cpu.HALVES
OF_HALVES = [kind.kernel for kind in cpu.HALVES.values()]
PLAIN = ["F32", "F16", "BF16"]
SPOILED = 17  # a row
GENERIC = ["NVFP4", "Q3_K", "IQ4_XS", "Q8_0"]  # Q8_0 takes this path if its columns are no multiple of 64
ROWWISE = [
    "quantize", *OF_HALVES, "rms_norm", "layer_norm", "add", "swiglu", "gelu", "relu_squared", "clamp",
    "scale", "scale_by_position", "select", "slice_columns", "concat_heads", "angles", "rope", "logits",
]  # fmt: skip
FORMATS = {"embed": [*PLAIN, *GENERIC, "Q4_1", "Q6_K"], "linear_float": [*PLAIN, *GENERIC]}


@pytest.fixture(scope="module")
def call(request):
    formats = FORMATS | {"linear_quantized": list(QUANTIZED)}
    names = [*ROWWISE, *(f"{kind}-{name}" for kind, names in formats.items() for name in names)]
    return caller(wanted(request, names, kind_of))


def kind_of(test: str) -> str:
    """Return the type of kernel that a test calls, by its name."""
    return "embed" if "embed" in test else "linear_float" if "float" in test else "linear_quantized"


def random_matrix(name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a random matrix: its bytes, and its weights as float32 [rows, columns]."""
    if name in PLAIN:
        data = gguf.quantize(normal(rows, columns), gguf.GGMLQuantizationType[name]).view(np.uint8)
    else:
        generator = np.random.default_rng([rows, columns])
        blocks = generator.integers(0, 256, (rows * columns // BY_NAME[name].block, BY_NAME[name].bytes), np.uint8)
        for field in scale_fields(name):
            write_scales(name, blocks, field, generator.uniform(-0.01, 0.01, len(blocks)))
        if name == "MXFP4":
            blocks[:, 0] = generator.integers(118, 124, len(blocks))  # exponents
        if name == "NVFP4":
            blocks[:, 4::8] = blocks[:, 4::8] & 0xF0 | 7  # 6, the largest number, in every group, as quantizers have it
        data = blocks.reshape(rows, -1)
    return at_end_of_page(data), dequantized(name, data).reshape(rows, columns)


def scale_fields(name: str) -> tuple[int, ...]:
    """Return the offsets of a block's float16 scales."""
    return (48,) if name == "IQ1_M" else list_float_offsets(name)


def write_scales(name: str, blocks: np.ndarray, field: int, scales: np.ndarray) -> None:
    """Write scales to the float16 field of blocks, uint8 [blocks, bytes]."""
    bits = scales.astype("<f2").view("<u2")
    if name != "IQ1_M":
        blocks[:, field : field + 2] = bits.reshape(-1, 1).view(np.uint8)
        return
    for word in range(4):  # which has it in the upper quarters of four 16-bit words
        high = blocks[:, field + 1 + 2 * word]
        high[:] = high & 15 | (bits >> 4 * word & 15) << 4


def spoiled(name: str, data: np.ndarray, rows: int, value: float) -> Iterator[np.ndarray]:
    """Yield copies of the matrix with `value` as a scale or weight of row SPOILED, in its first and last blocks."""
    if name in PLAIN:
        bits = np.array([value], np.float16 if name == "F16" else np.float32).view(np.uint8)[-BY_NAME[name].bytes :]
        for place in (0, -1):
            copy = at_end_of_page(data)
            copy.reshape(rows, -1, len(bits))[SPOILED, place] = bits
            yield copy
        return
    for field in scale_fields(name):
        for place in (0, 1, -2, -1):
            copy = at_end_of_page(data)
            blocks = copy.reshape(rows, -1, BY_NAME[name].bytes)[SPOILED]
            write_scales(name, blocks[place:][:1], field, np.array([value]))
            yield copy


def assert_spoiled(y: np.ndarray, rows: slice | int = slice(None), tokens: slice | int = slice(None)) -> None:
    """Check that no output in these rows and tokens is finite, and that all others are."""
    expected = np.ones(y.shape, bool)
    expected[tokens, rows] = False
    np.testing.assert_array_equal(np.isfinite(y), expected)


def product_error(got: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    """Return the normalized mean square error of x W^T, of the worst token, relative to the product's terms."""
    assert np.isfinite(got).all()
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    size = (x**2 @ (weights**2).T).sum(axis=1)
    return float((((got - x @ weights.T) ** 2).sum(axis=1) / size).max())


def test_lists_of_types_agree():
    """Compare the list of localllm.kernels.cpu, which does not import Numba."""
    assert {name: format.sub_block for name, format in QUANTIZED.items()} == cpu.SUB_BLOCK
    assert set(PLAIN) == cpu.FLOAT_FORMATS


# ---- row by row -----------------------------------------------------------------------------------------------------

TOKENS = [0, 1, 2, 7, 33]
COLUMNS = [5, 16, 64, 100, 576]


@pytest.mark.sampled("name")
@pytest.mark.parametrize("name", FORMATS["embed"])
def test_embedding_rows_are_dequantized_and_keep_nan(call, name):
    columns = {32: 96, 64: 128, 256: 512}.get(BY_NAME[name].block, 100)
    data, weights = random_matrix(name, 20, columns)
    ids = np.array([19, 0, SPOILED, SPOILED, 7, 19, 1], np.int64)

    def compute(parts, data=data):
        y = output(len(ids), columns)
        matrix = {"weights": data, "row_bytes": data.nbytes // 20, "columns": columns}
        call(f"embed-{name}", parts, count=count(len(ids)), ids=ids, x=y, stride=y.strides[0], **matrix)
        return written(y, len(ids), columns)

    np.testing.assert_array_equal(for_any_parts(compute), weights[ids])
    for value in (np.nan, np.inf):
        for matrix in spoiled(name, data, 20, value):
            np.testing.assert_array_equal(np.isfinite(compute(1, matrix)).all(axis=1), ids != SPOILED)


GROUPS = [(5, 5), (15, 5), (16, 16), (64, 64), (60, 20), (100, 100), (96, 32), (576, 576), (576, 192)]  # columns, group


def grouped(x: np.ndarray, group: int) -> np.ndarray:
    return x.reshape(len(x), x.shape[1] // group, group).astype(np.float64)


def norm(call, name: str, parts: int, x: np.ndarray, in_place: bool, **given) -> np.ndarray:
    """Compute a norm of x, whose result may overwrite x."""
    (tokens, columns), source = x.shape, padded(x)
    y = output(tokens, columns)
    if in_place:
        y[:tokens, :columns] = x
        source = y
    shape = {"count": count(tokens), "columns": columns, "stride": y.strides[0]}
    call(name, parts, x=source, y=y, **shape, **given, epsilon=1e-3)
    return written(y, tokens, columns)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("columns", "group"), GROUPS)
def test_rms_norm_agrees_with_numpy_and_keeps_nan(call, tokens, columns, group, in_place):
    x, weight = normal(tokens, columns), normal(columns)

    def compute(parts):
        return norm(call, "rms_norm", parts, x, in_place, weight=vector(weight), group=group)

    exact = grouped(x, group)
    exact = exact / np.sqrt((exact**2).mean(axis=2, keepdims=True) + 1e-3) * weight.reshape(-1, group)
    np.testing.assert_allclose(for_any_parts(compute), exact.reshape(x.shape), rtol=1e-6)
    if tokens == 7:
        x[[1, 2, 3], [0, 4, 3]] = np.nan, -np.inf, 1e30
        assert_spoiled(compute(1), tokens=slice(1, 4), rows=slice(0, group))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("columns", "group"), GROUPS)
def test_layer_norm_agrees_with_numpy_and_keeps_nan(call, tokens, columns, group, in_place):
    x, weight, bias = normal(tokens, columns) + 3, normal(columns, seed=1), normal(columns, seed=2)

    def compute(parts):
        vectors = {"weight": vector(weight), "bias": vector(bias), "group": group}
        return norm(call, "layer_norm", parts, x, in_place, **vectors)

    exact = grouped(x, group)
    exact = (exact - exact.mean(axis=2, keepdims=True)) / np.sqrt(exact.var(axis=2, keepdims=True) + 1e-3)
    exact = exact.reshape(x.shape) * weight + bias
    np.testing.assert_allclose(for_any_parts(compute), exact, rtol=1e-5, atol=1e-5)
    if tokens == 7:
        x[[1, 2, 3], [0, 4, 3]] = np.nan, -np.inf, 1e30
        assert_spoiled(compute(1), tokens=slice(1, 4), rows=slice(0, group))


def gelu(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


FUNCTIONS = {  # of single values: NumPy's, and further arguments
    "gelu": (gelu, {}),
    "relu_squared": (lambda x: np.maximum(x, 0) ** 2, {}),
    "clamp": (lambda x: np.clip(x, -1.5, 1.5), {"limit": 1.5}),
    "scale": (lambda x: x * 0.3, {"factor": 0.3}),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_elementwise_functions_agree_with_numpy(call, tokens, columns, function):
    """Check also that exactly the infinite inputs give infinite outputs."""
    x, (twin, given) = 3 * normal(tokens, columns), FUNCTIONS[function]
    x[:, :2] = 50, -50

    def compute(parts):
        y, source = output(tokens, columns), padded(x)
        call(function, parts, count=count(tokens), x=source, y=y, stride=y.strides[0], columns=columns, **given)
        return written(y, tokens, columns)

    np.testing.assert_allclose(for_any_parts(compute), twin(x), rtol=1e-6, atol=1e-6)
    if tokens == 7:
        x[2:5, 4] = np.nan, np.inf, -np.inf
        np.testing.assert_array_equal(np.isfinite(compute(1)), np.isfinite(x))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("offset", [0, 1])
def test_scaling_by_position_agrees_with_numpy(call, columns, offset):
    positions, slope, length = np.array([0, 15, 16, 31, 32, 131071], np.int64), 0.1, 16
    x = normal(len(positions), columns)

    def compute(parts):
        y = output(len(x), columns)
        vectors = {"x": padded(x), "positions": positions, "y": y, "stride": y.strides[0], "columns": columns}
        call("scale_by_position", parts, count=count(len(x)), slope=slope, length=length, offset=offset, **vectors)
        return written(y, len(x), columns)

    exact = x * (1 + slope * np.log((positions + offset) // length + 1))[:, None]
    np.testing.assert_allclose(for_any_parts(compute), exact, rtol=1e-6)


@pytest.mark.parametrize(("first", "end"), [(0, 100), (0, 16), (3, 4), (84, 100), (17, 60)])
def test_slicing_copies_columns(call, first, end):
    x = normal(7, 100)

    def compute(parts):
        y, source = output(7, end - first), padded(x)
        vectors = {"x": source, "x_stride": source.strides[0], "y": y, "stride": y.strides[0]}
        groups = {"groups": 1, "period": 100}
        call("slice_columns", parts, count=count(7), first=first, columns=end - first, **groups, **vectors)
        return written(y, 7, end - first)

    np.testing.assert_array_equal(for_any_parts(compute), x[:, first:end])


@pytest.mark.parametrize(("first", "end", "period"), [(0, 20, 50), (20, 50, 50), (3, 4, 5), (0, 100, 100)])
def test_slicing_copies_columns_of_every_group(call, first, end, period):
    x, columns = normal(7, 100), (end - first) * 100 // period

    def compute(parts):
        y, source = output(7, columns), padded(x)
        vectors = {"x": source, "x_stride": source.strides[0], "y": y, "stride": y.strides[0]}
        groups = {"groups": 100 // period, "period": period, "columns": columns}
        call("slice_columns", parts, count=count(7), first=first, **groups, **vectors)
        return written(y, 7, columns)

    exact = x.reshape(7, -1, period)[:, :, first:end].reshape(7, -1)
    np.testing.assert_array_equal(for_any_parts(compute), exact)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("heads", "left", "right"), [(1, 5, 7), (4, 32, 16), (3, 20, 33)])
def test_concatenating_heads_alternates_both_inputs(call, heads, left, right, shared):
    x, z = normal(7, heads * left), normal(7, right if shared else heads * right, seed=1)

    def compute(parts):
        y, first, second = output(7, heads * (left + right)), padded(x), padded(z)
        vectors = {"x": first, "x_stride": first.strides[0], "z": second, "z_stride": second.strides[0]}
        vectors |= {"x_columns": left, "z_columns": right, "y": y, "stride": y.strides[0]}
        call("concat_heads", parts, count=count(7), heads=heads, shared=shared, **vectors)
        return written(y, 7, heads * (left + right))

    of_z = np.broadcast_to(z.reshape(7, -1, right), (7, heads, right))
    exact = np.concatenate((x.reshape(7, heads, left), of_z), axis=2).reshape(7, -1)
    np.testing.assert_array_equal(for_any_parts(compute), exact)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_adding_rows_or_a_bias_agrees_with_numpy(call, tokens, columns):
    x, z = normal(tokens, columns, seed=1), normal(tokens, columns, seed=2)
    bias = normal(columns)

    def compute(parts, other, stride):
        y = output(tokens, columns)
        vectors = {"x": padded(x), "z": other, "z_stride": stride, "y": y, "stride": y.strides[0]}
        call("add", parts, count=count(tokens), columns=columns, **vectors)
        return written(y, tokens, columns)

    stride = padded(x).strides[0]
    np.testing.assert_array_equal(for_any_parts(lambda parts: compute(parts, padded(z), stride)), x + z)
    np.testing.assert_array_equal(for_any_parts(lambda parts: compute(parts, vector(bias), 0)), x + bias)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_swiglu_agrees_with_numpy(call, tokens, columns):
    gate, up = 10 * normal(tokens, columns, seed=1), normal(tokens, columns, seed=2)
    gate[:, 0], gate[:, 1] = 1e4, -1e4

    def compute(parts):
        y = output(tokens, columns)
        vectors = {"gate": padded(gate), "up": padded(up), "y": y, "stride": y.strides[0]}
        call("swiglu", parts, count=count(tokens), columns=columns, **vectors)
        return written(y, tokens, columns)

    with np.errstate(over="ignore"):
        exact = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(for_any_parts(compute), exact, rtol=1e-6, atol=1e-30)


def test_selecting_copies_rows(call):
    x, rows = normal(40, 100), np.array([39, 0, 7, 7], np.int64)

    def compute(parts):
        y = output(len(rows), 100)
        vectors = {"x": padded(x), "rows": rows, "y": y, "stride": y.strides[0], "columns": 100}
        call("select", parts, count=count(len(rows)), **vectors)
        return written(y, len(rows), 100)

    np.testing.assert_array_equal(for_any_parts(compute), x[rows])


@pytest.mark.parametrize("columns", [1, 15, 100, 1000])
def test_logits_are_copied_and_infinite_ones_flagged(call, columns):
    x = normal(3, columns)

    def compute(parts, rows=3):
        y, flaws = np.full((rows + 1, columns), GUARD), np.zeros(1, np.int64)
        arguments = {"x": padded(x), "columns": columns, "y": np.array([y.ctypes.data]), "flaws": flaws}
        call("logits", parts, count=count(rows), stride=arguments["x"].strides[0], **arguments)
        assert (y[-1] == GUARD).all()
        return y[:-1], flaws[0] > 0

    np.testing.assert_array_equal(for_any_parts(lambda parts: compute(parts)[0]), x)
    assert not compute(7)[1]
    for flaw, place in itertools.product((np.nan, np.inf, -np.inf), (0, columns // 2, columns - 1)):
        x[2, place] = flaw
        assert compute(7)[1]
        assert not compute(7, rows=2)[1]
        x[2, place] = 0


@pytest.mark.parametrize("pairs", [1, 10, 16, 40])
def test_angles_agree_with_numpy(call, pairs):
    positions = np.array([0, 1, 2, 511, 131071], np.int64)
    frequencies = 10000.0 ** (-np.arange(pairs) / pairs)

    def compute(parts):
        table = np.full((len(positions) + 1, 2, pairs), GUARD)
        arguments = {"positions": positions, "before": 3, "frequencies": frequencies, "pairs": pairs, "table": table}
        call("angles", parts, count=count(len(positions)), **arguments, factor=1.25)
        assert (table[-1] == GUARD).all()
        return table[:-1]

    angles = np.outer(positions - 3, frequencies)
    exact = 1.25 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(for_any_parts(compute), exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "dims"), [(64, 64), (80, 32), (20, 20), (6, 2)])
def test_rope_rotates_the_first_dimensions_of_each_head(call, head_dim, dims, interleaved):
    """Compare with complex numbers, in place or elsewhere."""
    tokens, heads, pairs = 7, 3, dims // 2
    x = normal(tokens, heads * head_dim)
    angles = np.random.default_rng(0).uniform(-3, 3, (tokens, pairs))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    step, apart = (2, 1) if interleaved else (1, pairs)

    def compute(parts, in_place):
        y, source = output(tokens, heads * head_dim), padded(x)
        if in_place:
            y[:tokens, : heads * head_dim] = x
            source = y
        arguments = {"x": source, "y": y, "stride": y.strides[0], "heads": heads, "head_dim": head_dim}
        call("rope", parts, count=count(tokens), **arguments, table=table, pairs=pairs, step=step, apart=apart)
        return written(y, tokens, heads * head_dim)

    exact = x.reshape(tokens, heads, head_dim).astype(np.float64)
    real, imaginary = (np.s_[:dims:2], np.s_[1:dims:2]) if interleaved else (np.s_[:pairs], np.s_[pairs:dims])
    turned = (exact[:, :, real] + 1j * exact[:, :, imaginary]) * np.exp(1j * angles)[:, None]
    exact[:, :, real], exact[:, :, imaginary] = turned.real, turned.imag
    for in_place in (True, False):
        got = for_any_parts(lambda parts, in_place=in_place: compute(parts, in_place))
        np.testing.assert_allclose(got, exact.reshape(x.shape), rtol=1e-5, atol=1e-6)


# ---- matrix products ------------------------------------------------------------------------------------------------

BATCHES = [0, 1, 2, 7, 8, 9, 65, 130]


def linear_float(
    call, name: str, data, rows: int, x: np.ndarray, halves=None, most_precise=0, parts=1, kernel_tokens: int = 0
) -> np.ndarray:
    """Multiply a matrix by the rows of x; halves: these in 16 bits, for more tokens than most_precise."""
    (tokens, columns), source = x.shape, padded(x)
    y, scratch = output(tokens, rows), Scratch(max(cpu.FLOAT_SCRATCH, 4 * columns))
    arguments = {"weights": data, "row_bytes": data.nbytes // rows, "rows": rows, "columns": columns}
    arguments |= {"x": source, "x_stride": source.strides[0], "y": y, "y_stride": y.strides[0]}
    arguments |= {"halves": 0, "halves_stride": 0}
    if halves is not None:
        arguments |= {"halves": halves, "halves_stride": halves.strides[0]}
    arguments |= {"most_precise": most_precise, "kernel_tokens": count(kernel_tokens or tokens), **scratch.arguments}
    call(f"linear_float-{name}", parts, count=count(tokens), **arguments)
    scratch.check()
    return written(y, tokens, rows)


def round_bf16(call, x: np.ndarray) -> np.ndarray:
    """Return activations as the bits of BF16, uint16 [padded tokens, padded columns]."""
    (tokens, columns), source = x.shape, padded(x)
    halves = np.full(source.shape, 7, np.uint16)
    vectors = {"x": source, "stride": source.strides[0], "y": halves, "y_stride": halves.strides[0]}
    call("round_bf16", 3, count=count(tokens), columns=columns, **vectors)
    assert (halves[:, -(-columns // 16) * 16 :] == 7).all(), "wrote behind the padding"
    return halves


@pytest.mark.parametrize("tokens", BATCHES)
@pytest.mark.parametrize("name", FORMATS["linear_float"])
@by_format
def test_float_products_agree_with_numpy(call, name, tokens):
    block = BY_NAME[name].block
    shapes = [(1, 64), (5, 192), (17, 576), (33, 320)]
    shapes += {1: [(3, 20), (16, 100)], 32: [(3, 96), (16, 32)], 64: [], 256: []}[block]
    for rows, columns in shapes if block < 256 else [(1, 256), (17, 512), (33, 768)]:
        data, weights = random_matrix(name, rows, columns)
        x = normal(tokens, columns)

        got = for_any_parts(
            lambda parts, data=data, rows=rows, x=x: linear_float(call, name, data, rows, x, parts=parts)
        )
        assert tokens == 0 or product_error(got, x, weights) < 1e-11


@pytest.mark.parametrize("tokens", [1, 4, 9])
@pytest.mark.parametrize("name", FORMATS["linear_float"])
@by_format
def test_nan_stays_visible_in_float_products(call, name, tokens):
    rows, columns = 33, 512
    data, _ = random_matrix(name, rows, columns)
    x = normal(tokens, columns)
    for value in (np.nan, np.inf):
        for matrix in spoiled(name, data, rows, value):
            assert_spoiled(linear_float(call, name, matrix, rows, x), rows=SPOILED)
        for column in (0, 33, columns - 1):
            bad = x.copy()
            bad[-1, column] = value
            assert_spoiled(linear_float(call, name, data, rows, bad), tokens=-1)


@pytest.mark.skipif(not HAS_BF16, reason="needs AVX512-BF16")
def test_nan_stays_visible_in_bf16_products(call):
    data, _ = random_matrix("BF16", 33, 512)
    x = normal(9, 512)
    for value in (np.nan, np.inf):
        for matrix in spoiled("BF16", data, 33, value):
            assert_spoiled(linear_float(call, "BF16", matrix, 33, x, round_bf16(call, x)), rows=SPOILED)
        bad = x.copy()
        bad[4, 500] = value
        assert_spoiled(linear_float(call, "BF16", data, 33, bad, round_bf16(call, bad)), tokens=4)


@pytest.mark.skipif(not HAS_BF16, reason="needs AVX512-BF16")
@pytest.mark.parametrize("tokens", [9, 65])
def test_bf16_products_round_activations_of_large_batches(call, tokens):
    """Their error is 3e-6; smaller batches use float32."""
    for rows, columns in ((1, 64), (17, 576), (33, 1100), (64, 1024)):
        data, weights = random_matrix("BF16", rows, columns)
        x = normal(tokens, columns)
        halves = round_bf16(call, x)
        rounded = (halves[:tokens, :columns].astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(rounded, x, rtol=2**-8)
        for most, expected in ((tokens, x), (1, rounded)):
            got = linear_float(call, "BF16", data, rows, x, halves, most, parts=2)
            assert product_error(got, expected, weights) < 1e-11
            assert rows < 64 or product_error(got, x, weights) < 6e-6


def quantize_words(call, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return activations as quantize_words writes them, uint8 [padded tokens, bytes], and their values, float64."""
    (tokens, columns), source = x.shape, padded(x)
    runs = -(-columns // 32)
    words = np.full((len(source), runs * 68 + 4), 7, np.uint8)
    arguments = {"x": source, "stride": source.strides[0], "y": words, "y_stride": words.strides[0]}
    call("quantize_words", 3, count=count(tokens), columns=columns, **arguments)
    assert (words[:tokens, -4:] == 7).all() and (words[tokens:] == 7).all(), "wrote too much"
    codes = words[:tokens, : runs * 64].view(np.int16).reshape(tokens, runs, 32)
    scales = words[:tokens, runs * 64 : -4].view(np.float32)
    meant = (codes * scales[:, :, None].astype(np.float64)).reshape(tokens, runs * 32)
    assert (meant[:, columns:] == 0).all()
    return words, meant[:, :columns]


needs_words = pytest.mark.skipif("F16" not in cpu.HALVES, reason="needs AVX512-VNNI")


@needs_words
def test_quantize_words_rounds_to_14_bits(call):
    x = normal(7, 336) * np.repeat(2.0 ** np.arange(-40, 30, 10), 336).reshape(7, 336).astype(np.float32)
    x[3, 32:64] = 0
    _, got = quantize_words(call, x)
    largest = np.repeat(np.abs(np.pad(x, ((0, 0), (0, 16))).reshape(7, 11, 32)).max(axis=-1), 32, axis=1)[:, :336]
    assert (np.abs(got - x) <= largest / 8191 * 0.5001).all()


@needs_words
@pytest.mark.parametrize("tokens", [9, 65, 607])
def test_word_products_round_to_14_bits_in_large_batches(call, tokens):
    """Their error is 3e-8; smaller batches use float32."""
    for rows, columns in ((1, 32), (3, 16), (17, 592), (33, 1120), (40, 1168), (64, 1024)):
        data, weights = random_matrix("F16", rows, columns)
        x = normal(tokens, columns)
        words, meant = quantize_words(call, x)
        slabs = [weights[:, first : first + SLAB] for first in range(0, columns, SLAB)]
        largest = [np.abs(slab).max(axis=1, keepdims=True).astype(np.float32) for slab in slabs]
        both = zip(slabs, largest, strict=True)
        rounded = np.hstack([np.rint(w.astype(np.float32) * (np.float32(8191) / m)) * (m / 8191) for w, m in both])
        got = for_any_parts(
            lambda parts, data=data, rows=rows, x=x, words=words: linear_float(
                call, "F16", data, rows, x, words, parts=parts
            )
        )
        assert product_error(got, meant, rounded) < 1e-11
        assert rows < 64 or product_error(got, x, weights) < 5e-8
        precise = linear_float(call, "F16", data, rows, x, words, tokens)
        assert product_error(precise, x, weights) < 1e-11


@needs_words
def test_the_largest_words_do_not_overflow(call):
    """32 products of the largest values, all of one sign, fit 32 bits; one more would not."""
    data, x = np.full((40, 512), 2.0, np.float16), np.full((9, 512), -3.0, np.float32)
    got = linear_float(call, "F16", data.view(np.uint8), 40, x, quantize_words(call, x)[0])
    np.testing.assert_allclose(got, -6.0 * 512, rtol=1e-6)


@needs_words
def test_nan_stays_visible_in_word_products(call):
    data, _ = random_matrix("F16", 33, 512)
    x = normal(9, 512)
    for value in (np.nan, np.inf):
        for matrix in spoiled("F16", data, 33, value):
            assert_spoiled(linear_float(call, "F16", matrix, 33, x, quantize_words(call, x)[0]), rows=SPOILED)
        bad = x.copy()
        bad[4, 500] = value
        assert_spoiled(linear_float(call, "F16", data, 33, bad, quantize_words(call, bad)[0]), tokens=4)


# What `quantize` writes, without the words that both planes make.
QUANTIZED_X = [name for name in QUANTIZE._fields[QUANTIZE.high : QUANTIZE.most_precise] if name != "words"]


def quantized(x: np.ndarray, in_pairs: bool = False) -> dict[str, np.ndarray]:
    """Return what `quantize` computes, by name, with the planes in the order of the columns."""
    blocks = x.reshape(len(x), x.shape[1] // 32, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    if in_pairs:
        pairs = largest.reshape(len(x), largest.shape[1] // 2, 2)
        larger = pairs.max(axis=-1, keepdims=True)
        largest = np.where(larger <= 2 * pairs.min(axis=-1, keepdims=True), larger, pairs).reshape(largest.shape)
    finite = np.isfinite(largest)
    step = np.where(finite, largest / np.float32(127 * 256), np.float32(np.nan))
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint(blocks * (np.float32(127 * 256) / largest))
    codes = np.where((largest > 0) & finite, codes, 0).astype(np.int32)
    high = (codes + 128) >> 8
    low = codes - 256 * high
    assert np.abs(low + 0.5).max(initial=0) <= 127.5

    def sums(values, size):
        return values.reshape(len(x), x.shape[1] // size, size).sum(axis=-1, dtype=np.int32)

    def scaled_sums(values, size):
        return sums(values, size).astype(np.float32) * np.repeat(scales, 32 // size, axis=1)

    def twice(values):
        return np.repeat(values, 2, axis=1)

    planes = [plane.astype(np.int8).reshape(x.shape) for plane in (high, low)]
    scales = step[..., 0]
    both, upper = ([twice(scaled_sums(plane, 32)), scaled_sums(plane, 16)] for plane in (codes, high))
    excess = sums(high, 16).astype(np.int16).view(np.int32) if LANE.has_avx2_only else sums(high, 32) * -BYTE_OFFSET
    return dict(zip(QUANTIZED_X, [*planes, twice(scales), *both, *upper, excess], strict=True))


def as_written(x: np.ndarray, in_pairs: bool = False) -> dict[str, np.ndarray]:
    """Return what `quantize` writes."""
    results = quantized(x, in_pairs)
    both = 256 * results["high"].astype(np.int16) + results["low"]
    words = striped(both).reshape(-1, 2, 2).swapaxes(1, 2).reshape(both.shape)  # of each 4 the even ones first
    return results | {plane: striped(results[plane]) for plane in ("high", "low")} | {"words": words}


def striped(plane: np.ndarray) -> np.ndarray:
    """Reorder bytes as `quantize` writes them: 8 of each run of 32, in every 256 columns, then in every 64."""
    groups = np.split(plane, [plane.shape[1] // 256 * 256], axis=1)
    return np.concatenate([
        group.reshape(len(plane), group.shape[1] // (32 * runs), runs, 4, 8).swapaxes(2, 3).reshape(group.shape)
        for group, runs in zip(groups, (8, 2), strict=True)
    ], axis=1)  # fmt: skip


def activations(tokens: int, columns: int) -> np.ndarray:
    """Return values of many sizes: blocks of zeros, of tiny and of large ones, and outliers."""
    x = normal(tokens, columns) * np.repeat(10.0 ** np.random.default_rng(1).integers(-3, 3, columns // 32), 32)
    x = x.astype(np.float32)
    x[:, :: max(columns // 3, 1)] *= 30
    x[1::3, :32] = 0
    return x


@pytest.mark.parametrize("tokens", [0, 1, 7, 65])
@pytest.mark.parametrize("columns", [64, 192, 320])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_quantize_agrees_with_numpy_and_rounds_within_half_a_step(call, tokens, columns, in_pairs):
    x = activations(tokens, columns)
    expected, most_precise = as_written(x, in_pairs), count(tokens - in_pairs)
    expected["words"] = expected["words"] if LANE.has_avx2_only else np.full_like(expected["words"], 77)

    def compute(parts):
        results = {name: np.full((tokens + 1, *like.shape[1:]), 77, like.dtype) for name, like in expected.items()}
        source = padded(x)
        arguments = {"x": source, "stride": source.strides[0], "columns": columns, "most_precise": most_precise}
        arguments["kernel_tokens"] = count(tokens)
        call("quantize", parts, count=count(tokens), **arguments, **results)
        assert all((array[-1] == 77).all() for array in results.values()), "wrote too much"
        return results

    for parts in (1, 5):
        for name, got in compute(parts).items():
            np.testing.assert_array_equal(got[:-1], expected[name])
    exact = quantized(x, in_pairs)
    planes, scales = 256.0 * exact["high"] + exact["low"], np.repeat(exact["scales"], 16, axis=1)
    assert (np.abs(planes * scales - x) <= 0.505 * scales).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_quantize_keeps_nan_in_scales_and_sums(call, value, in_pairs):
    """Expect NaN in the scale and sum of its 32 values alone."""
    x = activations(64, 320)
    x[np.arange(64), (np.arange(64) * 33) % 320] = value
    x[40:, 5] = np.inf
    expected = as_written(x, in_pairs)
    lost = np.isnan(expected["scales"])
    assert 128 < lost.sum() < 256  # a scale is there for every 16 columns
    got = {name: np.full_like(like, 77) for name, like in expected.items()}
    source = padded(x)
    arguments = {"x": source, "stride": source.strides[0], "columns": 320, "most_precise": count(64 - in_pairs)}
    arguments["kernel_tokens"] = count(64)
    call("quantize", 1, count=count(64), **arguments, **got)
    for name in ("scales", "sums_32", "sums_16"):
        np.testing.assert_array_equal(got[name], expected[name])
    np.testing.assert_array_equal(got["high_sums_32"][~lost], expected["high_sums_32"][~lost])


def linear_quantized(
    call, name: str, data, rows: int, x: np.ndarray, precise_tokens: int, parts: int, kernel_tokens: int = 0
) -> np.ndarray:
    """The product of a matrix with the quantized rows of x. Behind the tokens, activations hold garbage."""
    tokens, columns = x.shape
    size, written_x = QUANTIZED[name].sub_block, as_written(x, (kernel_tokens or tokens) > precise_tokens)
    q = {field: np.concatenate([array, junk(8, array)]) for field, array in written_x.items()}
    y, scratch = output(tokens, rows), Scratch(cpu.compute_linear_scratch(x.shape[1]))
    arguments = {"weights": data, "row_bytes": data.nbytes // rows, "rows": rows, "columns": columns}
    arguments |= {field: q[field] for field in ("high", "low", "words", "scales", "excess")}
    arguments |= {"sums": q[f"sums_{size}"], "high_sums": q[f"high_sums_{size}"], "y": y, "y_stride": y.strides[0]}
    arguments |= {"most_precise": count(precise_tokens), "kernel_tokens": count(kernel_tokens or tokens)}
    arguments |= scratch.arguments
    call(f"linear_quantized-{name}", parts, count=count(tokens), **arguments)
    scratch.check()
    return written(y, tokens, rows)


def junk(rows: int, like: np.ndarray) -> np.ndarray:
    return np.full((rows, like.shape[1]), np.nan if like.dtype.kind == "f" else 127, like.dtype)


def quantized_shapes(name: str) -> list[tuple[int, int]]:
    """Return (rows, columns), some odd; blocks of 256 allow fewer."""
    if QUANTIZED[name].chunk:
        return [(1, 64), (5, 192), (17, 576), (33, 320), (50, 1024), (64, 1600)]
    return [(1, 256), (5, 1536), (17, 512), (33, 768), (50, 2560)]


def rescaled(call, name: str, data, rows: int, columns: int) -> np.ndarray:
    """Return the weights that many tokens are multiplied by: products with the unit matrix, float32 [rows, columns]."""
    return linear_quantized(call, name, data, rows, np.eye(columns, dtype=np.float32), 1, 1).T


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
@by_format
def test_weights_for_many_tokens_are_rounded_to_8_bits_at_most(call, name):
    """Weights are exact, or rounded in spans of 64 columns, as far as the span's largest weight allows."""
    for rows, columns in quantized_shapes(name):
        data, weights = random_matrix(name, rows, columns)
        got = rescaled(call, name, data, rows, columns)
        if get_scale_span(QUANTIZED[name]) == 32:
            rounded = 1e-6 * np.abs(weights).max()  # where codes have an offset, sums that cancel leave that much
            np.testing.assert_allclose(got, weights, rtol=2e-7, atol=rounded)
            continue
        spans = weights.reshape(rows, -1, 64)
        unit = np.abs(spans).max(axis=2) / 126  # more if a format could hold larger weights than this span has
        errors = got.reshape(spans.shape) - spans
        assert (np.abs(errors).max(axis=2) <= 0.9 * unit).all()
        assert spans.size < 10000 or (errors**2).mean() <= 1.4 * (unit**2).mean() / 12
        mean = (errors / unit[..., None]).mean()  # with the wrong sign of a half in its 32nds it is 0.015 or more
        assert spans.size < 50000 or QUANTIZED[name].minimums is None or abs(mean) < 0.008


FEW = {
    limit(name, columns)
    for limit in (get_max_few_tokens, get_max_few_fast)
    for name in QUANTIZED
    for columns in (256, 64)
}
MANY = max(FEW) + 1  # tokens, for which every format is read in tiles


@pytest.mark.sampled("name")
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, *sorted(FEW), MANY, 130])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_products_multiply_integers_exactly(call, name, tokens):
    """Use both planes, or the high one for many tokens."""
    for rows, columns in quantized_shapes(name):
        data, weights = random_matrix(name, rows, columns)
        x = activations(tokens, columns)
        in_rows = tokens <= get_max_few_fast(name, columns, LANE)
        fast = weights if in_rows else rescaled(call, name, data, rows, columns)
        in_words = LANE.has_avx2_only and not in_rows and load_group_format(name, True).largest > MAX_BYTE_CODE
        for precise_tokens, matrix in ((tokens, weights), (1, fast)):
            q = quantized(x, tokens > precise_tokens)
            low = q["low"] if tokens <= max(precise_tokens, 1) or in_words else 0.0
            rounded = (256.0 * q["high"] + low) * np.repeat(q["scales"].astype(np.float64), 16, axis=1)
            got = for_any_parts(
                lambda parts, data=data, rows=rows, x=x, precise_tokens=precise_tokens: linear_quantized(
                    call, name, data, rows, x, precise_tokens, parts
                )
            )
            assert tokens == 0 or product_error(got, rounded, matrix) < 1e-11


@pytest.mark.parametrize("name", QUANTIZED)
@by_format
def test_a_token_gets_the_same_bits_among_any_others(call, name):
    """Check the kernels of decode, of short prompts and of long ones."""
    rows, columns = 37, 576 if QUANTIZED[name].chunk else 768
    data, _ = random_matrix(name, rows, columns)
    x = activations(150, columns)
    x[::3] *= np.where(np.arange(columns) // 32 % 2, 1, 50)  # tokens with two scales for two runs, beside others
    for kernel_tokens in (1, 60, 128, 400):
        if kernel_tokens == 1 and LANE.has_avx2_only:
            continue  # one token has two sums for each row there, several have one
        together = linear_quantized(call, name, data, rows, x, 128, 1, kernel_tokens)
        for first, last in ((0, 1), (3, 10), (5, 7), (14, 75), (74, 75)):
            some = linear_quantized(call, name, data, rows, x[first:last], 128, 1, kernel_tokens)
            np.testing.assert_array_equal(some, together[first:last])


@pytest.mark.parametrize(("code", "scale"), [(0, -128), (255, 127)])
def test_the_largest_codes_and_scales_of_q6_k_do_not_overflow(call, code, scale):
    """Sums of 16 bits are multiplied by integer scales in 32 bits where there is no dot product of bytes."""
    data = np.full((16, 2, 210), code, np.uint8)
    data[..., 192:208], data[..., 208:] = np.int8(scale).view(np.uint8), np.frombuffer(np.float16(1), np.uint8)
    data = data.reshape(16, -1)
    x = np.ones((MANY, 512), np.float32) * np.where(np.arange(MANY) % 2, -1, 1)[:, None].astype(np.float32)
    got = linear_quantized(call, "Q6_K", data, 16, x, 1, 1)
    assert product_error(got, x, rescaled(call, "Q6_K", data, 16, 512)) < 1e-11


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K"])
@by_format
def test_products_of_the_widest_rows_agree_with_numpy(call, name):
    """A thread may hold all activations of one token, reordered: 53,248 columns in Llama 3.1 405B."""
    data, weights = random_matrix(name, 9, 53248)
    x = activations(1, 53248)
    q = quantized(x)
    rounded = (256.0 * q["high"] + q["low"]) * np.repeat(q["scales"].astype(np.float64), 16, axis=1)
    got = for_any_parts(lambda parts: linear_quantized(call, name, data, 9, x, 1, parts))
    assert product_error(got, rounded, weights) < 1e-11


@pytest.mark.parametrize(("tokens", "precise"), [(1, True), (4, True), (4, False), (MANY, True), (MANY, False)])
@pytest.mark.parametrize("name", QUANTIZED)
@by_format
def test_nan_spoils_only_its_row_or_token(call, name, tokens, precise):
    """A scale spoils its row for all tokens, an activation its token in all rows."""
    rows, columns = 33, 320 if QUANTIZED[name].chunk else 512
    data, _ = random_matrix(name, rows, columns)
    x = activations(tokens, columns)
    most = tokens if precise else 0
    for value in (np.nan, np.inf):
        for matrix in spoiled(name, data, rows, value):
            assert_spoiled(linear_quantized(call, name, matrix, rows, x, most, 1), rows=SPOILED)
        for column in (0, 33, columns - 1):
            bad = x.copy()
            bad[-1, column] = value
            assert_spoiled(linear_quantized(call, name, data, rows, bad, most, 1), tokens=-1)


@pytest.mark.parametrize("tokens", [1, 4, MANY])
@pytest.mark.parametrize("name", QUANTIZED)
@by_format
def test_quantized_products_are_close_to_exact_ones(call, name, tokens):
    """Both planes are within 1e-8, the high one alone within 1.2e-4. One token always takes both."""
    data = encode(name, normal(256, 512)) if name in ENCODERS else random_matrix(name, 256, 512)[0]
    weights = dequantized(name, data).reshape(256, 512)
    x = normal(tokens, 512)
    assert product_error(linear_quantized(call, name, data, 256, x, tokens, 1), x, weights) < 1e-8
    most = 1e-8 if tokens == 1 else 1.2e-4
    assert product_error(linear_quantized(call, name, data, 256, x, 1, 1), x, weights) < most
