"""Compare each operation on vectors with NumPy, at unaligned addresses."""

import operator
from ctypes import CFUNCTYPE, c_int64, c_void_p, cast

import numpy as np
import pytest
from llvmlite import ir
from numba import njit

from localllm.kernels import simd
from localllm.kernels.machine import Lane, get_lane
from localllm.kernels.simd import arithmetic, threads, vectors
from localllm.kernels.simd import bytes as bytes_


def random(dtype, count: int, seed: int = 0) -> np.ndarray:
    """Return random bytes for integers, values around zero for floats, misaligned by one byte."""
    generator = np.random.default_rng(seed)
    data = np.frombuffer(bytearray(count * np.dtype(dtype).itemsize + 1), np.uint8)[1:].view(dtype)
    if data.dtype.kind == "f":
        data[:] = 10 * generator.standard_normal(count)
    else:
        data.view(np.uint8)[:] = generator.integers(0, 256, data.nbytes)
    return data


def result(dtype, count: int, kernel, *arguments) -> np.ndarray:
    """Return what `kernel(out, *arguments)` writes to `out`; arrays are passed as addresses."""
    out = random(dtype, count + 1, seed=99)
    guard = out[count].copy()
    njit(kernel)(*[value.ctypes.data if isinstance(value, np.ndarray) else value for value in (out, *arguments)])
    assert out[count].tobytes() == guard.tobytes(), "wrote too much"
    return out[:count]


def widened_bf16(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


X, Y, Z = (random(np.float32, 16, seed) for seed in (1, 2, 3))
BYTES = random(np.uint8, 64)
LOADS = {
    np.float32: {16: (simd.load_f32x16, simd.store_f32x16), 8: (simd.load_f32x8, simd.store_f32x8)},
    np.uint8: {64: (simd.load_u8x64, simd.store_u8x64), 16: (simd.load_u8x16, simd.store_u8x16)},
}


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "dtype"),
    [
        (simd.load_u8, np.uint8),
        (simd.load_i8, np.int8),
        (simd.load_u16, np.uint16),
        (simd.load_u32, np.uint32),
        (simd.load_i32, np.int32),
        (simd.load_i64, np.int64),
        (simd.load_f16, np.float16),
        (simd.load_f32, np.float32),
        (simd.load_f64, np.float64),
    ],
)
def test_scalar_loads_return_python_values_of_each_type(load, dtype):
    values = random(dtype, 8)
    if values.dtype.kind in "iu":
        values[:2] = np.iinfo(dtype).max, np.iinfo(dtype).min
    at = njit(lambda address: load(address))
    loaded = [at(values.ctypes.data + i * values.itemsize) for i in range(8)]
    assert loaded == values.tolist()
    assert type(loaded[0]) is type(values.tolist()[0])


def test_a_bf16_load_widens_to_float32():
    halves = random(np.float32, 8).view(np.uint16)[1::2].copy()
    at = njit(lambda address: simd.load_bf16(address))
    assert [at(halves.ctypes.data + 2 * i) for i in range(8)] == widened_bf16(halves).tolist()


@pytest.mark.parametrize(("dtype", "lanes"), [(dtype, lanes) for dtype, pairs in LOADS.items() for lanes in pairs])
def test_vectors_are_loaded_and_stored(dtype, lanes):
    load, store = LOADS[dtype][lanes]
    values = random(dtype, lanes)
    np.testing.assert_array_equal(result(dtype, lanes, lambda out, x: store(out, load(x)), values), values)


def test_converting_loads_widen_or_repeat_values():
    halves = X.astype(np.float16)
    upper = X.view(np.uint16)[1::2].copy()
    loaded = result(np.float32, 16, lambda out, x: simd.store_f32x16(out, simd.load_f16x16(x)), halves)
    np.testing.assert_array_equal(loaded, halves)
    loaded = result(np.float32, 16, lambda out, x: simd.store_f32x16(out, simd.load_bf16x16(x)), upper)
    np.testing.assert_array_equal(loaded, widened_bf16(upper))
    loaded = result(np.uint8, 64, lambda out, x: simd.store_u8x64(out, simd.load_splat_8(x)), BYTES)
    np.testing.assert_array_equal(loaded, np.tile(BYTES[:8], 8))
    for load, lanes in ((simd.load_splat_f16x8, 8), (simd.load_splat_f16x16, 16)):
        store = LOADS[np.float32][lanes][1]
        loaded = result(np.float32, lanes, lambda out, x, load=load, store=store: store(out, load(x)), halves)
        np.testing.assert_array_equal(loaded, np.full(lanes, halves[0], np.float32))


def test_scalar_stores_write_their_size():
    assert result(np.float32, 1, lambda out, x: simd.store_f32(out, np.float32(x)), 1.5) == [1.5]
    assert result(np.int64, 1, lambda out, x: simd.store_i64(out, x), -(2**40)) == [-(2**40)]
    assert result(np.int32, 1, lambda out, x: simd.store_i32(out, x), -(2**30)) == [-(2**30)]
    stored = result(np.uint8, 8, lambda out, x: simd.store_u8x8(out, simd.load_u8x8(x)), BYTES)
    np.testing.assert_array_equal(stored, BYTES[:8])


def test_a_float16_store_rounds_to_nearest():
    for value in (0.1, -65504.0, 2.0**-24, 1 + 2.0**-11):
        got = result(np.float16, 1, lambda out, x: simd.store_f16(out, simd.load_f32(x)), np.array([value], np.float32))
        assert got[0] == np.float16(value)


ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)


def converted(kernel, source: np.ndarray, dtype) -> np.ndarray:
    """Return a kernel's results for 16 values at a time."""
    compiled, target = njit(kernel), np.empty(source.size, dtype)
    for i in range(0, source.size, 16):
        compiled(target.ctypes.data + i * target.itemsize, source.ctypes.data + i * source.itemsize)
    return target


@pytest.mark.parametrize("widen", [vectors.widen_half, vectors.widen_half_anywhere])
def test_every_float16_widens_to_float32(widen):
    load = simd.make_load(simd.f32x16, simd.ir.VectorType(simd.I16, 16), widen)
    got = converted(lambda out, x: simd.store_f32x16(out, load(x)), ALL_HALVES, np.float32)
    np.testing.assert_array_equal(got, ALL_HALVES.view(np.float16).astype(np.float32))
    assert (np.signbit(got) == (ALL_HALVES >= 1 << 15)).all()


def between(coarse: np.ndarray) -> np.ndarray:
    """Return `coarse`, the midpoints between its values, and their neighbours, as float32."""
    bits = coarse.view(np.uint32).astype(np.int64)
    middle = (bits[:-1] + bits[1:]) // 2 + np.array([[-1], [0], [1]])
    values = np.concatenate([coarse, middle.astype(np.uint32).view(np.float32).reshape(-1)])
    extremes = [np.inf, -np.inf, np.nan, 65519.99, 65520, 1e6, -3e38, 2.0**-25, 2.0**-25 * 1.0000002, 1e-45]
    values = np.concatenate([values, np.array(extremes, np.float32)])
    return np.resize(values, -(-values.size // 16) * 16)


@pytest.mark.parametrize("narrow", [vectors.narrow_half, vectors.narrow_half_anywhere])
def test_float32_to_float16_rounds_to_nearest_even(narrow):
    values = between(ALL_HALVES.view(np.float16).astype(np.float32))
    store = simd.make_narrow_store(simd.f32x16, narrow)
    got = converted(lambda out, x: store(out, simd.load_f32x16(x)), values, np.float16)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(got, expected)
    assert (np.signbit(got) == np.signbit(expected))[~np.isnan(expected)].all()


def test_float32_to_bfloat16_rounds_to_nearest_even():
    values = between(widened_bf16(ALL_HALVES))
    got = converted(lambda out, x: simd.store_bf16x16(out, simd.load_f32x16(x)), values, np.uint16)
    bits = values.view(np.uint32).astype(np.int64)
    expected = widened_bf16(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))
    expected[np.isnan(values)] = np.nan
    np.testing.assert_array_equal(widened_bf16(got), expected)


def test_prefetching_any_address_is_harmless():
    njit(lambda: simd.prefetch(8))()


# ---- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [operator.add, operator.sub, operator.mul])
@pytest.mark.parametrize("lanes", [8, 16])
def test_float_operators_agree_with_numpy(function, lanes):
    load, store = LOADS[np.float32][lanes]
    got = result(np.float32, lanes, lambda out, x, y: store(out, function(load(x), load(y))), X, Y)
    np.testing.assert_array_equal(got, function(X, Y)[:lanes])


@pytest.mark.parametrize("lanes", [8, 16])
def test_negation_agrees_with_numpy(lanes):
    load, store = LOADS[np.float32][lanes]
    np.testing.assert_array_equal(result(np.float32, lanes, lambda out, x: store(out, -load(x)), X), -X[:lanes])


@pytest.mark.parametrize("function", [operator.add, operator.sub, operator.mul, operator.and_, operator.or_])
def test_integer_operators_agree_with_numpy(function):
    def kernel(out, x, y):
        a, b = simd.int_f32x16(simd.load_f32x16(x)), simd.int_f32x16(simd.load_f32x16(y))
        simd.store_i32x16(out, function(a, b))

    expected = function((1000 * X).astype(np.int32), (1000 * Y).astype(np.int32))
    np.testing.assert_array_equal(result(np.int32, 16, kernel, 1000 * X, 1000 * Y), expected)


@pytest.mark.parametrize(
    ("function", "lanes"),
    [(f, n) for n in (16, 32, 64) for f in (operator.and_, operator.or_, operator.xor) if (f, n) != (operator.xor, 16)],
)
def test_byte_operators_agree_with_numpy(function, lanes):
    x, y = random(np.uint8, lanes, 1), random(np.uint8, lanes, 2)
    if lanes == 32:

        def kernel(out, x, y):
            simd.store_u8x64(out, simd.twice_u8x32(function(simd.load_u8x32(x), simd.load_u8x32(y))))

        np.testing.assert_array_equal(result(np.uint8, 64, kernel, x, y), np.tile(function(x, y), 2))
    else:
        load, store = LOADS[np.uint8][lanes]
        got = result(np.uint8, lanes, lambda out, x, y: store(out, function(load(x), load(y))), x, y)
        np.testing.assert_array_equal(got, function(x, y))


def test_a_float16_is_repeated_in_all_lanes():
    bits = int(X.astype(np.float16).view(np.uint16)[0])
    got = result(np.float32, 16, lambda out, x: simd.store_f32x16(out, simd.splat_f16x16(x)), bits | 5 << 16)
    np.testing.assert_array_equal(got, np.full(16, X[:1].astype(np.float16)[0], np.float32))


def test_constants_repeat_over_all_lanes():
    def kernel(floats, x):
        simd.store_f32x16(floats, simd.zero_f32x16())
        simd.store_f32x16(floats + 64, simd.splat_f32x16(np.float32(x)))
        simd.store_f32x8(floats + 128, simd.splat_f32x8(np.float32(x)))

    np.testing.assert_array_equal(result(np.float32, 40, kernel, 1.5), [0] * 16 + [1.5] * 24)
    ramp = simd.constant(simd.u8x64, 1, 2, 3, 255)
    constant = result(np.uint8, 64, lambda out: simd.store_u8x64(out, ramp()))
    np.testing.assert_array_equal(constant, [1, 2, 3, 255] * 16)
    halving = simd.constant(simd.f32x8, 1.0, 0.5)
    constant = result(np.float32, 8, lambda out: simd.store_f32x8(out, halving()))
    np.testing.assert_array_equal(constant, [1.0, 0.5] * 4)
    two, three = np.float32(2), np.float32(3)
    turns = result(np.float32, 8, lambda out: simd.store_f32x8(out, simd.four_times_f32x2(simd.pair_f32x2(two, three))))
    np.testing.assert_array_equal(turns, [2, 3] * 4)


@pytest.mark.skipif(not get_lane().has_instructions("fma"), reason="needs FMA")
def test_fused_multiply_add_rounds_only_once():
    load, store, fma = simd.load_f32x16, simd.store_f32x16, simd.fma_f32x16
    close = -(X * Y)  # what is left of x * y + close is the rounding error of x * y
    got = result(np.float32, 16, lambda out, x, y, z: store(out, fma(load(x), load(y), load(z))), X, Y, close)
    expected = (X.astype(np.float64) * Y + close).astype(np.float32)
    assert expected.any()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("function", "expected"), [(simd.max_f32x16, np.maximum(X, Y)), (simd.min_f32x16, np.minimum(X, Y))]
)
def test_max_and_min_return_the_second_operand_for_nan(function, expected):
    def kernel(out, x, y):
        simd.store_f32x16(out, function(simd.load_f32x16(x), simd.load_f32x16(y)))

    np.testing.assert_array_equal(result(np.float32, 16, kernel, X, Y), expected)
    for x, y in ((X, np.full_like(Y, np.nan)), (np.full_like(X, np.nan), Y)):
        np.testing.assert_array_equal(result(np.float32, 16, kernel, x, y), y)


def test_the_largest_size_of_two_vectors_is_nan_if_any_lane_is():
    kernel = njit(lambda x, y: simd.max_magnitude_f32x16(simd.load_f32x16(x), simd.load_f32x16(y)))

    def largest_size(x, y):
        return kernel(x.ctypes.data, y.ctypes.data)

    assert largest_size(X, Y) == max(np.abs(X).max(), np.abs(Y).max())
    for value in (np.inf, -np.inf, np.nan, -np.nan):
        for lane in range(32):
            numbers = np.concatenate([X, Y])
            numbers[(lane + 5) % 32], numbers[lane] = np.inf, value
            np.testing.assert_equal(largest_size(numbers[:16].copy(), numbers[16:].copy()), np.abs(value))


def test_values_above_a_limit_become_nan():
    def kernel(out, x, limit):
        simd.store_f32x16(out, simd.keep_below_f32x16(simd.load_f32x16(x), np.float32(limit)))

    x = np.array([0, -0.0, 65519, -65519, 65520, -65520, np.inf, -np.inf, np.nan, 1e-40, 1, 2, 3, 4, 5, 6], np.float32)
    got = result(np.float32, 16, kernel, x, 65520.0)
    np.testing.assert_array_equal(got, np.where(np.abs(x) < 65520, x, np.nan))
    got = result(np.float32, 16, kernel, x, np.inf)
    np.testing.assert_array_equal(got, np.where(np.isfinite(x), x, np.nan))


HALVES = np.arange(-8, 8, dtype=np.float32) / 2
POWERS = np.array([-126, -125, -64, -3, -2, -1, 0, 1, 2, 3, 10, 64, 100, 125, 126, 127], dtype=np.float32)


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [
        (simd.abs_f32x16, X, np.abs(X)),
        (simd.round_f32x16, HALVES, np.rint(HALVES)),
        (simd.raise_two, POWERS, np.ldexp(np.float32(1), POWERS.astype(int))),
        (simd.reciprocal_f32x16, X, 1 / X),
    ],
)
def test_functions_of_one_vector_agree_with_numpy(function, argument, expected):
    got = result(np.float32, 16, lambda out, x: simd.store_f32x16(out, function(simd.load_f32x16(x))), argument)
    np.testing.assert_array_equal(got, expected)


def test_fma_of_integers_agrees_with_numpy():
    """Use integers, which hide whether it rounds once or twice."""
    x, y, z = (np.round(value) for value in (X, Y, Z))

    def kernel(out, x, y, z):
        simd.store_f32x16(out, simd.fma_f32x16(simd.load_f32x16(x), simd.load_f32x16(y), simd.load_f32x16(z)))

    np.testing.assert_array_equal(result(np.float32, 16, kernel, x, y, z), x * y + z)


def test_rounding_without_an_instruction_agrees_with_numpy(monkeypatch):
    pretend(set(), monkeypatch)
    for values in (HALVES, 1e4 * X, np.float32(-(2**22)) + HALVES + 8):
        got = result(
            np.float32, 16, lambda out, x: simd.store_f32x16(out, simd.round_f32x16(simd.load_f32x16(x))), values
        )
        np.testing.assert_array_equal(got, np.rint(values))


def test_exp_is_within_two_units_in_the_last_place():
    kernel = njit(lambda out, x: simd.store_f32x16(out, simd.exp_f32x16(simd.load_f32x16(x))))
    x = np.linspace(-87, 88, 1600, dtype=np.float32)
    got = np.empty_like(x)
    for i in range(0, x.size, 16):
        kernel(got.ctypes.data + 4 * i, x.ctypes.data + 4 * i)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(got - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    edges = np.array([-np.inf, -1e4, -88, 0, 89, 1e4, np.inf, np.nan] * 2, dtype=np.float32)
    kernel(got.ctypes.data, edges.ctypes.data)
    np.testing.assert_array_equal(got[:8], [0, 0, 0, 1, np.inf, np.inf, np.inf, np.nan])


def test_exp2_is_right_to_2e_7():
    kernel = njit(lambda out, x: simd.store_f32x16(out, simd.exp2_f32x16(simd.load_f32x16(x))))
    x = np.linspace(-126, 127, 1600, dtype=np.float32)
    got = np.empty_like(x)
    for i in range(0, x.size, 16):
        kernel(got.ctypes.data + 4 * i, x.ctypes.data + 4 * i)
    precision = 2e-7 if get_lane().has_instructions("fma") else 3e-7
    np.testing.assert_allclose(got, np.exp2(x.astype(np.float64)), rtol=precision)
    edges = np.array([-np.inf, -1e30, -127, 128, 1e4, np.inf, np.nan, -np.nan] * 2, dtype=np.float32)
    kernel(got.ctypes.data, edges.ctypes.data)
    np.testing.assert_array_equal(got[:8], [0, 0, 0, np.inf, np.inf, np.inf, np.nan, np.nan])


@pytest.mark.parametrize("lane", [None, 0, 9, 15])
def test_any_above_is_true_if_one_lane_is_larger(lane):
    above = X.copy()
    if lane is not None:
        above[lane] += 1
    kernel = njit(lambda x, y: simd.any_above_f32x16(simd.load_f32x16(x), simd.load_f32x16(y)))
    assert kernel(above.ctypes.data, X.ctypes.data) == (lane is not None)


def test_reductions_agree_with_numpy():
    load_16 = simd.load_f32x16
    assert njit(lambda x: simd.sum_f32x16(load_16(x)))(X.ctypes.data) == pytest.approx(X.sum(), rel=1e-5)
    assert njit(lambda x: simd.largest_f32x16(load_16(x)))(X.ctypes.data) == X.max()
    total = njit(lambda x: simd.sum_i32x16(simd.int_f32x16(load_16(x))))((1000 * X).ctypes.data)
    assert total == (1000 * X).astype(np.int32).sum()


def test_conversions_between_lane_types_agree_with_numpy():
    def truncate(out, x):
        simd.store_i32x16(out, simd.int_f32x16(simd.load_f32x16(x)))

    def narrow(out, x):
        simd.store_u8x16(out, simd.bytes_i32x16(simd.int_f32x16(simd.load_f32x16(x))))

    def widen_signed(out, x):
        simd.store_f32x16(out, simd.float_i8x16(simd.load_u8x16(x)))

    def widen_unsigned(out, x):
        simd.store_f32x8(out, simd.float_u8x8(simd.load_u8x8(x)))

    np.testing.assert_array_equal(result(np.int32, 16, truncate, X), np.trunc(X))
    np.testing.assert_array_equal(result(np.uint8, 16, narrow, 99 * X), (99 * X).astype(np.int32).astype(np.uint8))
    np.testing.assert_array_equal(result(np.float32, 16, widen_signed, BYTES), BYTES[:16].view(np.int8))
    np.testing.assert_array_equal(result(np.float32, 8, widen_unsigned, BYTES), BYTES[:8])


# ---- moving bytes ---------------------------------------------------------------------------------------------------


def test_a_shuffle_reorders_bytes():
    order = [*range(15, -1, -1)]
    reverse = simd.make_shuffle(simd.u8x16, simd.u8x16, order)
    moved = result(np.uint8, 16, lambda out, x: simd.store_u8x16(out, reverse(simd.load_u8x16(x))), BYTES)
    np.testing.assert_array_equal(moved, BYTES[order])


@pytest.mark.parametrize(
    "vector", [(simd.u8x64, simd.load_u8x64, simd.store_u8x64), (simd.u8x16, simd.load_u8x16, simd.store_u8x16)]
)
@pytest.mark.parametrize(("left", "expected"), [(True, operator.lshift), (False, operator.rshift)])
def test_shifts_move_bits_between_neighbouring_bytes(left, expected, vector):
    kind, load, store = vector
    shift = simd.make_shift(kind, left, 0, 2, 4, 7)
    shifted = result(np.uint8, kind.lanes, lambda out, x: store(out, shift(load(x))), BYTES)
    amounts = np.tile(np.array([0, 2, 4, 7], dtype=np.uint16), kind.lanes // 8)
    np.testing.assert_array_equal(shifted.view(np.uint16), expected(BYTES[: kind.lanes].view(np.uint16), amounts))


def test_vectors_are_concatenated_and_repeated():
    def join_bytes(out, x):
        low = simd.concatenate_u8x32(simd.load_u8x16(x), simd.load_u8x16(x + 16))
        simd.store_u8x64(out, simd.concatenate_u8x64(low, simd.load_u8x32(x + 32)))

    def twice(out, x):
        simd.store_u8x64(out, simd.twice_u8x32(simd.load_u8x32(x)))

    np.testing.assert_array_equal(result(np.uint8, 64, join_bytes, BYTES), BYTES)
    np.testing.assert_array_equal(result(np.uint8, 64, twice, BYTES), np.tile(BYTES[:32], 2))


def test_an_integer_is_split_into_bytes():
    got = result(np.float32, 8, lambda out, x: simd.store_f32x8(out, simd.float_u8x8(simd.split_int64(x))), -2)
    np.testing.assert_array_equal(got, [254] + [255] * 7)


def test_gathering_float16_reads_at_a_stride():
    halves = random(np.float16, 8 * 9)
    gather = simd.make_gather_f16(18)
    emit_gather = result(np.float32, 8, lambda out, x: simd.store_f32x8(out, gather(x)), halves)
    np.testing.assert_array_equal(emit_gather, halves[::9])


def test_gathering_planes_transposes_bytes():
    gather = simd.make_gather_planes(18)

    def kernel(out, x):
        a, b, c, d = gather(x)
        simd.store_i64(out, a)
        simd.store_i64(out + 8, b)
        simd.store_i64(out + 16, c)
        simd.store_i64(out + 24, d)

    data = random(np.uint8, 8 * 18)
    got = result(np.int64, 4, kernel, data)
    np.testing.assert_array_equal(got.view(np.uint8).reshape(4, 8), data.reshape(8, 18)[:, :4].T)


def test_gathering_powers_reads_exponents_at_a_stride():
    gather = simd.make_gather_powers(3, 128)
    data = random(np.uint8, 24)
    data[::3] = 0, 1, 2, 127, 128, 129, 254, 255
    got = result(np.float32, 8, lambda out, x: simd.store_f32x8(out, gather(x)), data)
    np.testing.assert_array_equal(got, np.ldexp(1.0, data[::3].astype(int) - 128))


def test_quads_are_permuted_across_two_vectors():
    order = [15, 0, 8, 7, 7, 1, 9, 2]
    permute, other = simd.make_quads(*order), random(np.uint8, 64, 5)

    def kernel(out, x, y):
        simd.store_u8x64(out, permute(simd.load_u8x64(x), simd.load_u8x64(y)))

    expected = np.concatenate([BYTES, other]).view(np.int64)[order]
    np.testing.assert_array_equal(result(np.uint8, 64, kernel, BYTES, other).view(np.int64), expected)


def test_rotating_moves_bits_within_quads():
    rotate = simd.make_rotate(4, 0, 62, 1)
    got = result(np.uint8, 64, lambda out, x: simd.store_u8x64(out, rotate(simd.load_u8x64(x))), BYTES).view(np.uint64)
    left = np.array([4, 0, 62, 1] * 2, np.uint64)
    quads = BYTES.view(np.uint64)
    np.testing.assert_array_equal(got, quads << left | quads >> (-left.view(np.int64) % 64).view(np.uint64))


def test_a_masked_add_changes_only_lanes_whose_bit_is_set():
    add = simd.make_where([1 << i % 8 for i in range(64)], 16)
    bits = random(np.uint8, 64, 5)

    def kernel(out, x, y):
        simd.store_u8x64(out, add(simd.load_u8x64(x), simd.load_u8x64(y)))

    expected = BYTES + 16 * (bits >> np.arange(64) % 8 & 1).astype(np.uint8)
    np.testing.assert_array_equal(result(np.uint8, 64, kernel, BYTES, bits), expected)


def test_reflecting_subtracts_lanes_whose_bit_is_set():
    reflect = simd.make_reflect([1 << i % 8 for i in range(64)], 86)
    bits = random(np.uint8, 64, 5)

    def kernel(out, x, y):
        simd.store_u8x64(out, reflect(simd.load_u8x64(x), simd.load_u8x64(y)))

    chosen = (bits >> np.arange(64) % 8 & 1).astype(bool)
    np.testing.assert_array_equal(result(np.uint8, 64, kernel, BYTES, bits), np.where(chosen, 86 - BYTES, BYTES))


@pytest.mark.parametrize("width", [1, 7, 8])
def test_fields_of_words_spread_to_bytes(width):
    spread = simd.make_fields(width)

    def kernel(out, x):
        simd.store_u8x64(out, simd.twice_u8x32(spread(simd.load_u8x32(x))))

    words = BYTES[:32].view(np.uint32)[:, None]
    expected = words >> (width * np.arange(4, dtype=np.uint32)) & ((1 << width) - 1)
    np.testing.assert_array_equal(result(np.uint8, 64, kernel, BYTES), np.tile(expected.ravel(), 2))


def test_trits_are_the_digits_of_a_byte():
    every = np.arange(256, dtype=np.uint8)
    for digit in range(5):
        trits = simd.make_trits(*[digit, 0] * 32)
        for x in every.reshape(4, 64):
            got = result(np.uint8, 64, lambda out, x, trits=trits: simd.store_u8x64(out, trits(simd.load_u8x64(x))), x)
            np.testing.assert_array_equal(got[::2], [int(byte) * 3 ** (digit + 1) // 256 % 3 for byte in x[::2]])
            np.testing.assert_array_equal(got[1::2], [int(byte) * 3 // 256 for byte in x[1::2]])


def test_integers_combine_to_vectors():
    def of_quads(out, x):
        load = simd.load_i64
        simd.store_u8x64(
            out,
            simd.u8x64_of_quads(
                load(x), load(x + 8), load(x + 16), load(x + 24), load(x + 32), load(x + 40), load(x + 48), load(x + 56)
            ),
        )

    def of_words(out, x):
        a, b = np.int32(simd.load_i32(x)), np.int32(simd.load_i32(x + 4))
        simd.store_u8x64(out, simd.u8x64_of_words(a, b, a, b, a, b, a, b, b, b, a, a, a, a, b, a))

    np.testing.assert_array_equal(result(np.uint8, 64, of_quads, BYTES), BYTES)
    order = [0, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0]
    np.testing.assert_array_equal(result(np.uint8, 64, of_words, BYTES).view(np.int32), BYTES.view(np.int32)[order])


def pretend(features: set[str], monkeypatch) -> None:
    """Select the variants for a CPU with no other features."""
    if not features <= get_lane().features:
        pytest.skip(f"needs {features}")
    other = Lane("", ",".join(f"+{feature}" for feature in sorted(features)))
    for module in (arithmetic, bytes_, threads, vectors):
        monkeypatch.setattr(module, "get_lane", lambda: other)


@pytest.mark.parametrize("features", [{"avx512bw"}, {"avx2"}, {"ssse3"}, {"neon"}, set()])
def test_lookups_agree_with_numpy_on_every_instruction_set(features, monkeypatch):
    """Check also the variant without an instruction for it."""
    pretend(features, monkeypatch)
    table = [int(value) for value in random(np.uint8, 16, 7)]
    lookup, codes = simd.make_lookup(*table), BYTES & 15
    got = result(np.uint8, 64, lambda out, x: simd.store_u8x64(out, lookup(simd.load_u8x64(x))), codes)
    np.testing.assert_array_equal(got, np.array(table)[codes])


def test_flags_expand_bits_to_bytes():
    flags = simd.make_flags(16)
    expected = 16 * np.unpackbits(BYTES[:8], bitorder="little")
    got = result(np.uint8, 64, lambda out, x: simd.store_u8x64(out, flags(simd.load_i64(x))), BYTES)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("function", [simd.exp_f32x16, simd.exp2_f32x16, simd.tanh_f32x16])
def test_exp_and_tanh_keep_nan(function):
    x = np.where(np.arange(16) % 3 == 0, np.float32(np.nan), X)
    got = result(np.float32, 16, lambda out, x: simd.store_f32x16(out, function(simd.load_f32x16(x))), x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))


def test_transposing_floats_agrees_with_numpy():
    rows = random(np.float32, 16 * 19).reshape(16, 19)
    stride = rows.strides[0]
    columns = result(np.float32, 256, lambda out, x: simd.transpose_f32(x, stride, out), rows).reshape(16, 16)
    np.testing.assert_array_equal(columns, rows[:, :16].T)


def test_transposing_quads_agrees_with_numpy():
    rows = random(np.int64, 16 * 9).reshape(16, 9)
    stride = rows.strides[0]
    columns = result(np.int64, 128, lambda out, x: simd.transpose_quads(x, stride, out), rows).reshape(8, 16)
    np.testing.assert_array_equal(columns, rows[:, :8].T)


@pytest.mark.slow
@pytest.mark.parametrize("count", [-(2**31), -1, 0, 1, 15, 16, 17, 2**31 - 1])
def test_lanes_beyond_a_count_are_replaced(count):
    def kernel(out, x, count, other):
        simd.store_f32x16(out, simd.keep_lanes(simd.load_f32x16(x), count, np.float32(other)))

    for other in (-np.inf, np.nan, 0.0):
        expected = np.where(np.arange(16) < count, X, np.float32(other))
        np.testing.assert_array_equal(result(np.float32, 16, kernel, X, count, other), expected)


# ---- the int8 dot product -------------------------------------------------------------------------------------------

VNNI_256 = {"avxvnni"} if "avxvnni" in get_lane().features else {"avx512vnni", "avx512vl"}


@pytest.mark.parametrize(
    ("variant", "features"),
    [
        (simd.dot_vnni_512, {"avx512vnni", "avx512bw"}),
        (simd.dot_vnni_256, VNNI_256),
        (simd.dot_bytes, {"avx512bw", "avx2"}),
        (simd.dot_bytes, {"avx2", "ssse3"}),
        (simd.dot_bytes, {"ssse3"}),
        (simd.dot_neon_mixed, {"neon", "i8mm"}),
        (simd.dot_neon_unsigned, {"neon", "dotprod"}),
        (simd.dot_neon_unsigned, {"neon"}),
        (simd.dot_generic, {"avx512bw"}),
        (simd.dot_generic, {"avx2"}),
        (simd.dot_generic, {"sse2"}),
        (simd.dot_generic, set()),
    ],
)
@pytest.mark.parametrize("small", [False, True])
def test_dot_products_of_bytes_agree_with_numpy_on_every_instruction_set(variant, features, small, monkeypatch):
    """Check also the largest products of both signs, which must not saturate."""
    pretend(features, monkeypatch)
    if variant is not simd.dot_vnni_256 and variant is not simd.dot_generic:
        assert simd.select_dot() is variant

    @simd.operation(simd.i32x16, simd.i32x16, simd.u8x64, simd.u8x64)
    def dot(builder, accumulator, unsigned, signed):
        if small:  # as LLVM is told
            unsigned = builder.and_(unsigned, ir.Constant(simd.u8x64.llvm, [0x7F] * 64))
        return variant(builder, accumulator, unsigned, signed)

    def kernel(out, start, x, y):
        accumulator = simd.int_f32x16(simd.load_f32x16(start))
        simd.store_i32x16(out, dot(accumulator, simd.load_u8x64(x), simd.load_u8x64(y)))

    unsigned, signed = random(np.uint8, 64, 1), random(np.int8, 64, 2)
    unsigned[:8], signed[:4], signed[4:8] = 255, -128, 127
    if small:
        unsigned >>= 1
    products = unsigned.astype(np.int32) * signed.astype(np.int32)
    expected = (1000 * X).astype(np.int32) + products.reshape(16, 4).sum(axis=1)
    np.testing.assert_array_equal(result(np.int32, 16, kernel, 1000 * X, unsigned, signed), expected)


SIGNED = [{"avx2", "ssse3", "sse2"}, {"ssse3", "sse2"}, {"neon", "dotprod", "i8mm"}, {"neon", "dotprod"}, {"neon"}]


@pytest.mark.parametrize("features", SIGNED)
def test_dot_products_of_signed_bytes_agree_with_numpy(features, monkeypatch):
    pretend(features, monkeypatch)
    emit = simd.select_signed_dot()
    assert emit

    @simd.operation(simd.i32x16, simd.i32x16, simd.u8x64, simd.u8x64)
    def dot(builder, accumulator, x, y):
        return emit(builder, accumulator, x, y)

    def kernel(out, start, x, y):
        accumulator = simd.int_f32x16(simd.load_f32x16(start))
        simd.store_i32x16(out, dot(accumulator, simd.load_u8x64(x), simd.load_u8x64(y)))

    x, y = random(np.int8, 64, 1), np.maximum(random(np.int8, 64, 2), -127)
    x[:8], x[8:16], y[:4], y[4:8], y[8:12], y[12:16] = 127, -128, -127, 127, -127, 127
    products = x.astype(np.int32) * y.astype(np.int32)
    expected = (1000 * X).astype(np.int32) + products.reshape(16, 4).sum(axis=1)
    np.testing.assert_array_equal(result(np.int32, 16, kernel, 1000 * X, x, y), expected)


# ---- threads --------------------------------------------------------------------------------------------------------


def test_atomic_operations_load_store_add_and_replace():
    cell = np.array([5], dtype=np.int64)
    address = cell.ctypes.data
    assert njit(lambda a: simd.atomic_load(a))(address) == 5
    njit(lambda a, value: simd.atomic_store(a, value))(address, 7)
    assert cell == [7]
    assert njit(lambda a, value: simd.atomic_add(a, value))(address, -10) == 7
    assert cell == [-3]
    replace = njit(lambda a, expected, value: simd.atomic_replace(a, expected, value))
    assert replace(address, 0, 1) is False
    assert cell == [-3]
    assert replace(address, -3, 1) is True
    assert cell == [1]


def test_pausing_returns():
    njit(lambda: simd.cpu_pause())()


def test_functions_are_called_by_address():
    calls = []
    kernel = CFUNCTYPE(None, c_int64, c_int64, c_int64, c_int64)(lambda *arguments: calls.append(arguments))
    plain = CFUNCTYPE(None)(lambda: calls.append(()))
    njit(lambda f: simd.call_kernel(f, 11, 2, 3, 4))(cast(kernel, c_void_p).value)
    njit(lambda f: simd.call_address(f))(cast(plain, c_void_p).value)
    assert calls == [(11, 2, 3, 4), ()]
