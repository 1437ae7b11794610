"""Tensors in other orders: each source yields NumPy's result, whichever rows are asked for."""

from collections.abc import Callable
from math import prod

import numpy as np
import pytest

from localllm.convert.projectors.parts import take_slice
from localllm.convert.transforms import (
    BYTES,
    DerivedSource,
    as_float32,
    from_array,
    interleave_rope_rows,
    map_values,
    pad_rows,
    permute_columns,
    reshape,
    scale_rows,
    stack,
    take_every_second,
    take_strided,
    to_column,
    to_float32,
    to_mxfp4_blocks,
    to_vector,
    transpose,
)

DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


def numbers(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """Return numbers that all differ."""
    return (np.arange(prod(shape)) + 1).reshape(shape).astype(dtype)


def source(array: np.ndarray) -> DerivedSource:
    name = next(name for name, dtype in DTYPES.items() if array.dtype == dtype)
    data = array.reshape(prod(array.shape[:-1]), -1)

    def read_rows(first: int, last: int) -> np.ndarray:
        assert 0 <= first < last <= len(data), "asked for rows that are not there"
        return data[first:last].view(np.uint8)

    return DerivedSource(name, array.shape, read_rows)


def check(derived: DerivedSource, expected: np.ndarray) -> None:
    """Check that any rows are those of the whole, as bytes of one row each."""
    assert derived.shape == expected.shape
    count = prod(expected.shape[:-1])
    flat_rows = expected.reshape(count, -1)
    for first in range(count):
        for last in range(first + 1, count + 1):
            rows = derived.read_rows(first, last)
            assert rows.dtype == np.uint8 and rows.shape == (last - first, expected.shape[-1] * BYTES[derived.dtype])
            np.testing.assert_array_equal(as_float32(np.ascontiguousarray(rows), derived.dtype), flat_rows[first:last])


@pytest.mark.parametrize(("turned", "order"), [
    (0, [0, 4, 1, 5, 2, 6, 3, 7]), (8, [0, 4, 1, 5, 2, 6, 3, 7]), (4, [0, 2, 1, 3, 4, 5, 6, 7]), (2, [*range(8)]),
])  # fmt: skip
def test_rope_pair_conversion_interleaves_the_halves_of_heads(turned: int, order: list[int]):
    array = numbers(16, 3)
    check(interleave_rope_rows(source(array), 8, turned), array.reshape(2, 8, 3)[:, order].reshape(16, 3))


def test_take_strided_takes_rows_of_each_period():
    array = numbers(12, 3)
    check(take_strided(source(array), (6, 3), period=12, start=1, step=2), array[1::2])
    check(take_strided(source(array), (2, 2, 3), period=6, start=3), array.reshape(2, 6, 3)[:, 3:5])
    check(take_strided(source(array), (2, 3, 3), period=6, start=0, step=2), array.reshape(2, 6, 3)[:, ::2])


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_matrices_stack_transpose_reshape_and_permute(dtype: type):
    array = numbers(3, 2, 4, dtype=dtype)
    check(stack([source(matrix) for matrix in array]), array)
    check(transpose(source(array)), array.swapaxes(-1, -2))
    check(transpose(source(array[0])), array[0].T)
    check(reshape(source(array), (6, 4)), array.reshape(6, 4))
    check(permute_columns(source(array), np.array([2, 0, 3, 1])), array[..., [2, 0, 3, 1]])


def test_pad_rows_appends_rows_of_zeros():
    array = numbers(3, 4)
    unpadded = source(array)
    assert pad_rows(unpadded, 3) is unpadded
    check(pad_rows(unpadded, 6), np.concatenate([array, np.zeros((3, 4), np.float32)]))


def test_columns_and_vectors_turn_into_each_other():
    vector = numbers(5)
    check(to_column(source(vector)), vector[:, None])
    vector_again = to_vector(source(vector[:, None]))
    assert vector_again.shape == (5,) and (as_float32(vector_again.read_rows(0, 1), "F32") == vector).all()
    wide = numbers(3, 6, dtype=np.float16)
    for start in (0, 1):
        check(take_every_second(source(wide), start), wide[:, start::2].astype(np.float32))


def test_functions_of_numbers_apply_to_every_row():
    array = numbers(4, 3, dtype=np.float16)
    check(map_values(source(array), np.negative), -array.astype(np.float32))
    check(to_float32(source(array)), array.astype(np.float32))
    plain = source(numbers(2, 2))
    assert to_float32(plain) is plain
    rows, one = np.array([1, 2, 3, 4], np.float32), np.array([10], np.float32)
    check(scale_rows(source(array), [rows, one]), array.astype(np.float32) * rows[:, None] * 10)
    assert scale_rows(plain, []) is plain
    assert map_values(source(array), np.negative).dtype == "F32" and from_array(np.ones(3)).shape == (3,)


def test_slices_take_a_range_of_the_first_dimension():
    array = numbers(6, 2, 4)
    check(take_slice(source(array), 2, 3), array[2:5])
    matrix, vector = numbers(6, 4), numbers(6)
    check(take_slice(source(matrix), 1, 2), matrix[1:3])
    assert (as_float32(take_slice(source(vector), 2, 3).read_rows(0, 1), "F32") == vector[2:5]).all()


def test_sixteen_bit_numbers_decode_to_float32():
    bits = np.array([[0x3F80, 0xC000, 0x7F80]], np.uint16)
    np.testing.assert_array_equal(as_float32(bits.view(np.uint8), "BF16"), [[1, -2, np.inf]])


def test_mxfp4_puts_the_first_16_codes_in_the_low_halves():
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (2, 3, 64), np.uint8)
    scale = random.integers(0, 256, (2, 3, 2), np.uint8)
    pairs = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(2, 3, 2, 16)

    def of(array: np.ndarray) -> DerivedSource:
        data = array.reshape(-1, array.shape[-1])
        return DerivedSource("U8", array.shape, lambda first, last: data[first:last])

    blocks_of = to_mxfp4_blocks(of(pairs), of(scale))
    assert (blocks_of.dtype, blocks_of.shape) == ("MXFP4", (2, 3, 64))
    for first in range(6):
        for last in range(first + 1, 7):
            blocks = blocks_of.read_rows(first, last).reshape(last - first, 2, 17)
            wanted = codes.reshape(6, 2, 32)[first:last]
            assert (blocks[..., 0] == scale.reshape(6, 2)[first:last]).all()
            assert (blocks[..., 1:] & 15 == wanted[..., :16]).all() and (blocks[..., 1:] >> 4 == wanted[..., 16:]).all()


@pytest.mark.parametrize("function", [
    lambda made: interleave_rope_rows(made, 4), transpose, lambda made: map_values(made, np.exp),
    lambda made: take_slice(made, 0, 4),
])  # fmt: skip
def test_a_source_reads_no_more_rows_than_needed(function: Callable[[DerivedSource], DerivedSource]):
    """Read one row of a head from the other half too; turn a matrix round as a whole."""
    asked = list[tuple[int, int]]()
    inner = source(numbers(2, 4, 4))
    watched = DerivedSource(
        "F32", inner.shape, lambda first, last: (asked.append((first, last)), inner.read_rows(first, last))[1]
    )
    function(watched).read_rows(0, 1)
    assert asked and max(last for _, last in asked) <= 4
