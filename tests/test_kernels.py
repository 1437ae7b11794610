"""Every CPU kernel against a plain NumPy twin, called as the tape calls it: by address, with an array of int64."""

import ctypes
import mmap
import os

import gguf
import numpy as np
import pytest

from localllm.kernels import cpu
from localllm.kernels.cpu.blocks import UNPACK
from localllm.kernels.cpu.quantized_formats import QUANTIZED
from localllm.kernels.library import Library
from localllm.kernels.target import cpu_features
from quant.formats import BY_NAME

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
THREADS = 3
GUARD = np.float32(7.25)

HAS_BF16 = "avx512bf16" in cpu_features()
PLAIN = ["F32", "F16", "BF16"]
GENERIC = ["NVFP4", "Q3_K", "IQ4_XS", "Q8_0"]  # Q8_0 takes this path if its columns are no multiple of 64
FLOAT16_FIELDS = {  # where their blocks have float16 numbers
    (): "MXFP4 IQ1_M NVFP4",
    (0,): "Q4_0 Q5_0 Q8_0 IQ4_NL IQ4_XS IQ1_S IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S",
    (80, 82): "Q2_K",
    (0, 2): "Q4_1 Q5_1 Q4_K Q5_K",
    (52,): "TQ1_0",
    (64,): "TQ2_0",
    (108,): "Q3_K",
    (208,): "Q6_K",
}
ROWWISE = ["quantize", *["round_bf16"][:HAS_BF16], "rms_norm", "add", "swiglu", "select", "angles", "rope", "merge"]
FORMATS = {
    "embed": [*PLAIN, *GENERIC, "Q4_1", "Q6_K"],
    "linear_float": [*PLAIN, *GENERIC],
    "linear_quantized": list(QUANTIZED),
    "store": ["F32", "F16"],
    "attend": ["F32", "F16"],
}


# ---- calling a kernel -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def call():
    """A function (kernel name, parts, *arguments) that runs all parts of a step, the last part first."""
    library = Library([*ROWWISE, *(f"{kind}-{name}" for kind, names in FORMATS.items() for name in names)])

    def call(name: str, parts: int, *arguments) -> None:
        values = np.array([encoded(value) for value in arguments], np.int64)
        for part in reversed(range(parts)):
            KERNEL(library.addresses[name])(values.ctypes.data, part, parts, part % THREADS)

    return call


def encoded(value) -> int:
    """An argument as an int64: a number, the bits of a float32, or the address of an array."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return int(np.float32(value).view(np.int32)) if isinstance(value, float) else int(value)


def for_any_parts(compute) -> np.ndarray:
    """What `compute(parts)` returns, which must be the same, bit for bit, however the work is cut."""
    whole = compute(1)
    for parts in (2, 5, 40):
        np.testing.assert_array_equal(compute(parts), whole)
    return whole


def count(number: int) -> np.ndarray:
    return np.array([number], np.int64)


def padded(values: np.ndarray) -> np.ndarray:
    """Activations as the kernels take them: columns padded to 16 and tokens by 8, with NaN in all the padding."""
    memory = np.full((-(-len(values) // 8) * 8 + 8, -(-values.shape[1] // 16) * 16), np.nan, np.float32)
    memory[: len(values), : values.shape[1]] = values
    return memory


def output(tokens: int, columns: int) -> np.ndarray:
    """Memory for activations, of which the last row must stay as it is."""
    return np.full((-(-tokens // 8) * 8 + 9, -(-columns // 16) * 16), GUARD)


def written(memory: np.ndarray, tokens: int, columns: int) -> np.ndarray:
    """What a kernel wrote to an `output`."""
    assert (memory[-1] == GUARD).all(), "wrote too much"
    return memory[:tokens, :columns].copy()


class Scratch:
    """Scratch memory of `size` bytes for each thread, full of NaN, with a guard behind it."""

    def __init__(self, size: int):
        self.memory = np.full(THREADS * size // 4 + 16, np.nan, np.float32)
        self.memory[-16:] = GUARD
        self.arguments = [self.memory, size]

    def check(self) -> None:
        assert (self.memory[-16:] == GUARD).all(), "used too much scratch memory"


def at_end_of_page(data: np.ndarray) -> np.ndarray:
    """A copy behind which no memory is readable, as at the end of a mapped file: reading on is a crash."""
    size = -(-data.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    if os.name == "posix":
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + size), mmap.PAGESIZE, 0) == 0
    copy = memory[size - data.nbytes : size]
    copy[:] = data.reshape(-1).view(np.uint8)
    return copy


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def random_matrix(name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in a format: its bytes, and the weights that they mean, float32 [rows, columns]."""
    kind = gguf.GGMLQuantizationType[name]
    if name in PLAIN:
        data = gguf.quantize(normal(rows, columns), kind).view(np.uint8)
    else:
        generator = np.random.default_rng([rows, columns])
        blocks = generator.integers(0, 256, (rows * columns // BY_NAME[name].block, BY_NAME[name].bytes), np.uint8)
        (fields,) = (fields for fields, names in FLOAT16_FIELDS.items() if name in names.split())
        for field in fields:
            scales = generator.uniform(-0.01, 0.01, (len(blocks), 1)).astype("<f2")
            blocks[:, field : field + 2] = scales.view(np.uint8)
        if name == "MXFP4":
            blocks[:, 0] = generator.integers(118, 124, len(blocks))  # exponents
        if name == "IQ1_M":  # a float16 in the upper quarters of four 16-bit words
            scales = generator.uniform(-0.01, 0.01, len(blocks)).astype("<f2").view("<u2")
            for word in range(4):
                blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | (scales >> 4 * word & 15) << 4
        data = blocks.reshape(rows, -1)
    return at_end_of_page(data), gguf.dequantize(data, kind).astype(np.float32).reshape(rows, columns)


def nmse(got: np.ndarray, exact: np.ndarray) -> float:
    """The normalized mean square error of the worst token."""
    assert np.isfinite(got).all()
    return float((((got - exact) ** 2).sum(axis=-1) / (exact.astype(np.float64) ** 2).sum(axis=-1)).max())


def product_error(got: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    """The normalized mean square error of x W^T, of the worst token; what cancels out in the product counts in full."""
    assert np.isfinite(got).all()
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    size = (x**2 @ (weights**2).T).sum(axis=1)
    return float((((got - x @ weights.T) ** 2).sum(axis=1) / size).max())


def test_the_lists_of_formats_agree():
    """localllm.kernels.cpu names them without importing Numba."""
    assert {name: format.sub_block for name, format in QUANTIZED.items()} == cpu.SUB_BLOCK
    assert UNPACK.keys() - QUANTIZED.keys() == cpu.GENERIC
    assert set(PLAIN) == cpu.PLAIN


# ---- row by row -----------------------------------------------------------------------------------------------------

TOKENS = [0, 1, 2, 7, 33]
COLUMNS = [5, 16, 64, 100, 576]


@pytest.mark.parametrize("name", FORMATS["embed"])
def test_embed(call, name):
    columns = {32: 96, 64: 128, 256: 512}.get(BY_NAME[name].block, 100)
    data, weights = random_matrix(name, 9, columns)
    ids = np.array([8, 0, 3, 3, 7, 8, 1], np.int64)

    def compute(parts):
        y = output(len(ids), columns)
        call(f"embed-{name}", parts, count(len(ids)), data, data.nbytes // 9, columns, ids, y, y.strides[0])
        return written(y, len(ids), columns)

    np.testing.assert_array_equal(for_any_parts(compute), weights[ids])


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_rms_norm(call, tokens, columns):
    x, weight = normal(tokens, columns), normal(columns)

    def compute(parts):
        y, memory = output(tokens, columns), padded(x)
        call("rms_norm", parts, count(tokens), memory, padded(weight[None])[0], y, y.strides[0], columns, 1e-3)
        return written(y, tokens, columns)

    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-3) * weight
    np.testing.assert_allclose(for_any_parts(compute), exact, rtol=1e-6)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_add(call, tokens, columns):
    x, z = normal(tokens, columns, seed=1), normal(tokens, columns, seed=2)
    bias = normal(1, columns)

    def compute(parts, other, stride):
        y = output(tokens, columns)
        call("add", parts, count(tokens), padded(x), other, stride, y, y.strides[0])
        return written(y, tokens, columns)

    stride = padded(x).strides[0]
    np.testing.assert_array_equal(for_any_parts(lambda parts: compute(parts, padded(z), stride)), x + z)
    np.testing.assert_array_equal(for_any_parts(lambda parts: compute(parts, padded(bias), 0)), x + bias)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_swiglu(call, tokens, columns):
    gate, up = 10 * normal(tokens, columns, seed=1), normal(tokens, columns, seed=2)
    gate[:, 0], gate[:, 1] = 1e4, -1e4

    def compute(parts):
        y = output(tokens, columns)
        call("swiglu", parts, count(tokens), padded(gate), padded(up), y, y.strides[0])
        return written(y, tokens, columns)

    with np.errstate(over="ignore"):
        exact = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(for_any_parts(compute), exact, rtol=1e-6, atol=1e-30)


def test_select(call):
    x, rows = normal(40, 100), np.array([39, 0, 7, 7], np.int64)

    def compute(parts):
        y = output(len(rows), 100)
        call("select", parts, count(len(rows)), padded(x), rows, y, y.strides[0])
        return written(y, len(rows), 100)

    np.testing.assert_array_equal(for_any_parts(compute), x[rows])


@pytest.mark.parametrize("pairs", [1, 10, 16, 40])
def test_angles(call, pairs):
    positions = np.array([0, 1, 2, 511, 131071], np.int64)
    frequencies = 10000.0 ** (-np.arange(pairs) / pairs)

    def compute(parts):
        table = np.full((len(positions) + 1, 2, pairs), GUARD)
        call("angles", parts, count(len(positions)), positions, frequencies, pairs, table, 1.25)
        assert (table[-1] == GUARD).all()
        return table[:-1]

    angles = np.outer(positions, frequencies)
    exact = 1.25 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(for_any_parts(compute), exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "dims"), [(64, 64), (80, 32), (20, 20), (6, 2)])
def test_rope(call, head_dim, dims, interleaved):
    """A head as complex numbers, turned; dimensions beyond the first `dims` stay."""
    tokens, heads, pairs = 7, 3, dims // 2
    x = normal(tokens, heads * head_dim)
    angles = np.random.default_rng(0).uniform(-3, 3, (tokens, pairs))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    step, apart = (2, 1) if interleaved else (1, pairs)

    def compute(parts):
        y = output(tokens, heads * head_dim)
        y[:tokens, : heads * head_dim] = x
        call("rope", parts, count(tokens), y, y.strides[0], heads, head_dim, table, pairs, step, apart)
        return written(y, tokens, heads * head_dim)

    exact = x.reshape(tokens, heads, head_dim).astype(np.float64)
    real, imaginary = (np.s_[:dims:2], np.s_[1:dims:2]) if interleaved else (np.s_[:pairs], np.s_[pairs:dims])
    turned = (exact[:, :, real] + 1j * exact[:, :, imaginary]) * np.exp(1j * angles)[:, None]
    exact[:, :, real], exact[:, :, imaginary] = turned.real, turned.imag
    np.testing.assert_allclose(for_any_parts(compute), exact.reshape(x.shape), rtol=1e-5, atol=1e-6)


# ---- matrix products ------------------------------------------------------------------------------------------------

BATCHES = [0, 1, 2, 7, 8, 9, 65, 130]


@pytest.mark.parametrize("tokens", BATCHES)
@pytest.mark.parametrize("name", FORMATS["linear_float"])
def test_linear_float(call, name, tokens):
    block = BY_NAME[name].block
    shapes = [(1, 64), (5, 192), (17, 576), (33, 320)]
    shapes += {1: [(3, 20), (16, 100)], 32: [(3, 96), (16, 32)], 64: [], 256: []}[block]
    for rows, columns in shapes if block < 256 else [(1, 256), (17, 512), (33, 768)]:
        data, weights = random_matrix(name, rows, columns)
        x = normal(tokens, columns)

        def compute(parts, data=data, x=x, rows=rows, columns=columns):
            source, y = padded(x), output(tokens, rows)
            scratch = Scratch(max(cpu.FLOAT_SCRATCH, 4 * columns))
            matrix = [data, data.nbytes // rows, rows, columns]
            activations = [source, source.strides[0], y, y.strides[0]]
            call(f"linear_float-{name}", parts, count(tokens), *matrix, *activations, *scratch.arguments, 0, 0, 0)
            scratch.check()
            return written(y, tokens, rows)

        got = for_any_parts(compute)
        assert tokens == 0 or product_error(got, x, weights) < 1e-11


@pytest.mark.skipif(not HAS_BF16, reason="needs AVX512-BF16")
@pytest.mark.parametrize("tokens", [9, 65])
def test_linear_bf16(call, tokens):
    """Activations in BF16 too (an error of 3e-6), but not in a batch of up to the most tokens for float32."""
    for rows, columns in ((1, 64), (17, 576), (33, 1100), (64, 1024)):
        data, weights = random_matrix("BF16", rows, columns)
        x = normal(tokens, columns)
        source, scratch = padded(x), Scratch(cpu.FLOAT_SCRATCH)
        halves = np.zeros((len(source), source.shape[1]), np.uint16)
        call("round_bf16", 3, count(tokens), source, source.strides[0], halves, halves.strides[0])
        rounded = (halves[:tokens, :columns].astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(rounded, x, rtol=2**-8)
        for most, expected in ((tokens, x), (1, rounded)):
            y = output(tokens, rows)
            arguments = [data, data.nbytes // rows, rows, columns, source, source.strides[0], y, y.strides[0]]
            arguments += [*scratch.arguments, halves, halves.strides[0], most]
            call("linear_float-BF16", 2, count(tokens), *arguments)
            scratch.check()
            got = written(y, tokens, rows)
            assert product_error(got, expected, weights) < 1e-11
            assert rows < 64 or product_error(got, x, weights) < 6e-6


def quantized(x: np.ndarray) -> list[np.ndarray]:
    """The twin of `quantize`: high, low, scales, sums per 32 and 16, then those of the high plane as integers."""
    blocks = x.reshape(len(x), x.shape[1] // 32, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    step = largest / np.float32(127 * 256)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(largest > 0, np.rint(blocks * (np.float32(127 * 256) / largest)), 0).astype(np.int32)
    high = (codes + 128) >> 8
    low = codes - 256 * high
    assert np.abs(low + 0.5).max(initial=0) <= 127.5

    def sums(values, size):
        return values.reshape(len(x), x.shape[1] // size, size).sum(axis=-1, dtype=np.int32)

    def scaled_sums(size):
        return sums(codes, size).astype(np.float32) * np.repeat(scales, 32 // size, axis=1)

    planes = [plane.astype(np.int8).reshape(x.shape) for plane in (high, low)]
    scales = step[..., 0]
    return [*planes, scales, scaled_sums(32), scaled_sums(16), sums(high, 32), sums(high, 16)]


def striped(plane: np.ndarray) -> np.ndarray:
    """The order in which `quantize` writes bytes: 8 of each run of 32, in every 256 columns, then in every 64."""
    groups = np.split(plane, [plane.shape[1] // 256 * 256], axis=1)
    return np.concatenate([
        group.reshape(len(plane), group.shape[1] // (32 * runs), runs, 4, 8).swapaxes(2, 3).reshape(group.shape)
        for group, runs in zip(groups, (8, 2), strict=True)
    ], axis=1)  # fmt: skip


def activations(tokens: int, columns: int) -> np.ndarray:
    """Numbers of many sizes: blocks of zeros, of tiny and of large ones, and outliers."""
    x = normal(tokens, columns) * np.repeat(10.0 ** np.random.default_rng(1).integers(-3, 3, columns // 32), 32)
    x = x.astype(np.float32)
    x[:, :: max(columns // 3, 1)] *= 30
    x[1::3, :32] = 0
    return x


@pytest.mark.parametrize("tokens", [0, 1, 7, 65])
@pytest.mark.parametrize("columns", [64, 192, 320])
def test_quantize(call, tokens, columns):
    x = activations(tokens, columns)
    expected = quantized(x)
    expected[:2] = [striped(plane) for plane in expected[:2]]

    def compute(parts):
        results = [np.full((tokens + 1, *array.shape[1:]), 77, array.dtype) for array in expected]
        source = padded(x)
        call("quantize", parts, count(tokens), source, source.strides[0], columns, *results)
        assert all((array[-1] == 77).all() for array in results), "wrote too much"
        return results

    for parts in (1, 5):
        for got, exact in zip(compute(parts), expected, strict=True):
            np.testing.assert_array_equal(got[:-1], exact)
    high, low, scales, *_ = quantized(x)
    planes, scales = 256.0 * high + low, np.repeat(scales, 32, axis=1)
    assert (np.abs(planes * scales - x) <= 0.505 * scales).all()


def linear_quantized(call, name: str, data, rows: int, x: np.ndarray, precise_tokens: int, parts: int) -> np.ndarray:
    """The product of a matrix with the quantized rows of x. Behind the tokens, activations hold garbage."""
    tokens, columns = x.shape
    sub_block = QUANTIZED[name].sub_block
    high, low, scales, *sums = [np.concatenate([array, junk(8, array)]) for array in quantized(x)]
    high, low = striped(high), striped(low)
    y, scratch = output(tokens, rows), Scratch(cpu.LINEAR_SCRATCH)
    matrix = [data, data.nbytes // rows, rows, columns]
    which = sub_block == 16
    planes = [high, low, scales, sums[which], sums[2 + which]]
    target = [y, y.strides[0], precise_tokens]
    call(f"linear_quantized-{name}", parts, count(tokens), *matrix, *planes, *target, *scratch.arguments)
    scratch.check()
    return written(y, tokens, rows)


def junk(rows: int, like: np.ndarray) -> np.ndarray:
    return np.full((rows, like.shape[1]), np.nan if like.dtype.kind == "f" else 127, like.dtype)


def quantized_shapes(name: str) -> list[tuple[int, int]]:
    """(rows, columns), some odd; blocks of 256 allow fewer."""
    if QUANTIZED[name].chunk:
        return [(1, 64), (5, 192), (17, 576), (33, 320), (50, 1024), (64, 1600)]
    return [(1, 256), (5, 1536), (17, 512), (33, 768), (50, 2560)]


@pytest.mark.parametrize("tokens", BATCHES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_quantized(call, name, tokens):
    """The integers are multiplied exactly: with both planes, or the high one if there are too many tokens for both (up
    to 8 never are)."""
    for rows, columns in quantized_shapes(name):
        data, weights = random_matrix(name, rows, columns)
        x = activations(tokens, columns)
        high, low, scales, *_ = quantized(x)
        scales = np.repeat(scales.astype(np.float64), 32, axis=1)
        for precise_tokens, rounded in (
            (tokens, 256.0 * high + low),
            (1, 256.0 * high if tokens > 8 else 256.0 * high + low),
        ):
            arguments = (call, name, data, rows, x, precise_tokens)
            got = for_any_parts(lambda parts, arguments=arguments: linear_quantized(*arguments, parts))
            assert tokens == 0 or product_error(got, rounded * scales, weights) < 1e-11


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_activations_are_good_enough(call, name, tokens):
    """Against the exact product: both planes to 1e-8, the high one alone to 1e-4. One token always takes both."""
    data, weights = random_matrix(name, 256, 512)
    x = normal(tokens, 512)
    assert product_error(linear_quantized(call, name, data, 256, x, tokens, 1), x, weights) < 1e-8
    assert product_error(linear_quantized(call, name, data, 256, x, 1, 1), x, weights) < (1e-8 if tokens == 1 else 1e-4)


# ---- attention ------------------------------------------------------------------------------------------------------

SHAPES = [(64, 2, 1), (64, 3, 3), (80, 1, 4), (96, 2, 3), (20, 3, 4), (20, 1, 1)]  # head dimension, kv heads, group
POSITIONS = [  # tokens, length with them
    (1, 1), (1, 15), (1, 16), (1, 17), (1, 255), (1, 256), (1, 257), (1, 1000), (1, 5000), (2, 2), (2, 257), (7, 1000),
    (8, 8), (8, 300), (8, 1000), (9, 9), (9, 257), (9, 1000), (65, 65), (65, 300), (130, 130), (130, 1000),
]  # fmt: skip


class Cache:
    """Keys and values float32 [tokens, kv heads, head dimension] in runs of tokens; unused places hold old numbers."""

    def __init__(self, keys: np.ndarray, values: np.ndarray, name: str, run_lengths: list[int]):
        dtype = {"F32": np.float32, "F16": np.float16}[name]
        _, kv_heads, head_dim = keys.shape
        shape = (2, kv_heads, max(run_lengths), -(-head_dim // 16) * 16)
        self.token_bytes = shape[3] * dtype(0).itemsize
        self.head_bytes = shape[2] * self.token_bytes
        self.memory, self.runs, start = [], np.zeros((len(run_lengths), 3), np.int64), 0
        for run, length in zip(self.runs, run_lengths, strict=True):
            memory = np.full(shape, 1000, dtype)
            memory[..., head_dim:] = 0
            for side, source in zip(memory, (keys, values), strict=True):
                part = source[start : start + length].swapaxes(0, 1)
                side[:, : part.shape[1], :head_dim] = part
            run[:] = memory[0].ctypes.data, memory[1].ctypes.data, length
            self.memory.append(memory)
            start += length


def attend(call, name: str, q: np.ndarray, cache: Cache, length: int, shape: tuple[int, int, int], parts: int):
    """Queries float32 [tokens, heads * head dimension], the last tokens of `length`, against the cache."""
    head_dim, kv_heads, group = shape
    heads, tokens, pad = kv_heads * group, len(q), -(-head_dim // 16) * 16
    source, y = padded(q), output(tokens, heads * head_dim)
    scratch = Scratch(4 * (4 * 64 * pad + 64 * 64 + 2 * 64 + 64))
    partial = np.full((8 * heads * 16 + 1, pad + 16), np.nan, np.float32)
    partial[-1] = GUARD
    positions = np.arange(length - tokens, length)
    arguments = [count(tokens), positions, source, source.strides[0], y, y.strides[0], cache.runs, len(cache.runs)]
    arguments += [cache.head_bytes, cache.token_bytes, heads, kv_heads, head_dim, head_dim**-0.5, partial]
    call(f"attend-{name}", parts, *arguments, *scratch.arguments)
    call("merge", parts, *arguments, *scratch.arguments)
    scratch.check()
    assert (partial[-1] == GUARD).all(), "too many partial results"
    return written(y, tokens, heads * head_dim)


def exact_attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """softmax(q k / sqrt(d)) v in float64, with a loop over heads; the queries are the last tokens."""
    _, kv_heads, head_dim = keys.shape
    rows = q.reshape(len(q), -1, head_dim).astype(np.float64)
    group, result = rows.shape[1] // kv_heads, np.empty_like(rows)
    hidden = np.arange(len(keys)) > np.arange(len(keys) - len(q), len(keys))[:, None]
    for head in range(rows.shape[1]):
        scores = rows[:, head] @ keys[:, head // group].T.astype(np.float64) / np.sqrt(head_dim)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        result[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[:, head // group].astype(np.float64)
    return result.reshape(q.shape)


@pytest.mark.parametrize(("tokens", "length"), POSITIONS)
@pytest.mark.parametrize("name", ["F32", "F16"])
def test_attention(call, name, tokens, length):
    """One run and several give the same, and both are right."""
    for shape in SHAPES:
        head_dim, kv_heads, group = shape
        dtype = {"F32": np.float32, "F16": np.float16}[name]
        keys, values = (normal(length, kv_heads, head_dim, seed=n).astype(dtype).astype(np.float32) for n in (1, 2))
        q = 4 * normal(tokens, kv_heads * group * head_dim, seed=3)  # scores of about 4: a few keys matter
        exact = exact_attention(q, keys, values)
        rounded = -(-length // 16) * 16
        for run_lengths in ([rounded + 64], [16, 48, 16, 256, rounded + 16]):
            cache = Cache(keys, values, name, run_lengths)
            got = for_any_parts(lambda parts, a=(q, cache, length, shape): attend(call, name, *a, parts))
            assert nmse(got, exact) < 1e-11


@pytest.mark.parametrize("scale", [1e-4, 100])
def test_attention_with_flat_and_extreme_scores(call, scale):
    """All keys alike, or scores up to thousands: no overflow, and the largest wins."""
    shape, length = (64, 2, 2), 700
    keys, values = (normal(length, 2, 64, seed=n) for n in (1, 2))
    for tokens in (1, 8, 20):
        q = scale * 10 * normal(tokens, 256, seed=3)
        got = attend(call, "F32", q, Cache(keys, values, "F32", [704]), length, shape, 3)
        assert nmse(got, exact_attention(q, keys, values)) < 1e-8


@pytest.mark.parametrize("name", ["F32", "F16"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("head_dim", [64, 80, 20])
def test_store(call, name, side, head_dim):
    """Tokens go to their positions in the runs, rounded, with zeros behind each head; nothing else changes."""
    kv_heads, positions = 3, np.array([0, 15, 16, 40, 63, 64, 79], np.int64)
    empty = np.zeros((0, kv_heads, head_dim), np.float32)
    x = normal(len(positions), kv_heads * head_dim)

    def compute(parts):
        cache = Cache(empty, empty, name, [16, 48, 16])
        for memory in cache.memory:
            memory[...] = 1000
        source = padded(x)
        arguments = [count(len(positions)), positions, source, source.strides[0], cache.runs, 3, 8 * side]
        call(f"store-{name}", parts, *arguments, cache.head_bytes, cache.token_bytes, kv_heads, head_dim)
        assert all((memory[1 - side] == 1000).all() for memory in cache.memory)
        lengths = cache.runs[:, 2]
        assert all((memory[:, :, n:] == 1000).all() for memory, n in zip(cache.memory, lengths, strict=True))
        return np.concatenate([m[side, :, :n].swapaxes(0, 1) for m, n in zip(cache.memory, lengths, strict=True)])

    got = for_any_parts(compute)
    expected = np.full_like(got, 1000)
    expected[positions] = 0
    expected[positions, :, :head_dim] = x.reshape(len(positions), kv_heads, head_dim)
    np.testing.assert_array_equal(got, expected)


def test_attention_ignores_what_lies_behind_the_last_token(call):
    """Not even NaN or infinity, left there by tokens that have been taken back, may reach a result."""
    shape, length = (64, 1, 1), 20
    keys, values = (normal(length, 1, 64, seed=n) for n in (1, 2))
    for tokens in (1, 20):
        q, cache = normal(tokens, 64, seed=3), Cache(keys, values, "F32", [64])
        cache.memory[0][:, :, length:] = np.inf
        assert nmse(attend(call, "F32", q, cache, length, shape, 1), exact_attention(q, keys, values)) < 1e-11
