"""Compare verbs on heads, streams and columns, on CPU and simulated GPU, with the reference."""

from functools import reduce
from operator import xor

import numpy as np
import pytest
from kernel_calls import caller, count, for_any_parts, normal, output, padded, vector, written
from simulated import launch

from localllm.arch.verbs import NgramHash
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations.registry import ReferenceBuilder
from tests.unit.kernels.cpu.test_recurrent import weight

KERNELS = [
    "scale_columns", "lerp", "multiply_heads", "head_dots", "mix_streams", "softmax", "sinkhorn", "replace_ids",
    "as_column", "hash",
]  # fmt: skip
TOKENS = 5


@pytest.fixture(scope="module")
def call():
    return caller(KERNELS)


@pytest.fixture(scope="module")
def builder() -> ReferenceBuilder:
    return ReferenceBuilder([SequenceSpan(None, 0, np.zeros(TOKENS, int), TOKENS)], {}, 100)


def check(call, name: str, expected: np.ndarray, **arguments) -> None:
    """Check both kernels, and that they write nothing else."""
    columns = expected.shape[1]

    def by(function):
        y = output(TOKENS, columns)
        function(name, y=y, stride=y.strides[0], count=count(TOKENS), **arguments)
        return written(y, TOKENS, columns)

    got = for_any_parts(lambda parts: by(lambda name, **given: call(name, parts, **given)))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    on_a_card = by(lambda name, **given: launch(name, TOKENS, **given))
    np.testing.assert_allclose(on_a_card, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 20, 48])
def test_scaling_and_blending_columns_agree_with_the_reference(call, builder, columns):
    x, z, numbers = normal(TOKENS, columns), normal(TOKENS, columns, seed=1), normal(columns)
    given = {"x": padded(x), "weight": vector(numbers), "columns": columns}
    check(call, "scale_columns", builder.scale_columns(x, weight(numbers)), **given)
    check(call, "lerp", builder.lerp(x, z, weight(numbers)), z=padded(z), **given)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 1), (3, 7), (2, 16), (5, 33)])
def test_gates_and_dots_of_heads_agree_with_the_reference(call, builder, heads, head_dim):
    columns = heads * head_dim
    x, z, gates = normal(TOKENS, columns), normal(TOKENS, columns, seed=1), padded(normal(TOKENS, heads))
    given = {"x": padded(x), "heads": heads}
    check(
        call, "multiply_heads", builder.multiply_heads(x, gates[:TOKENS, :heads]), gates=gates,
        gates_stride=gates.strides[0], columns=columns, **given,
    )  # fmt: skip
    of_row = {"x_stride": padded(x).strides[0], "z": padded(z), "head_dim": head_dim}
    check(call, "head_dots", builder.head_dots(x, z, heads), **of_row, **given)


@pytest.mark.parametrize(("streams", "made", "width"), [(1, 1, 1), (4, 4, 16), (1, 3, 7), (3, 2, 21)])
def test_mixed_streams_agree_with_the_reference(call, builder, streams, made, width):
    x, weights = normal(TOKENS, streams * width), normal(TOKENS, made * streams, seed=1)
    rows, by = padded(x), padded(weights)
    check(
        call, "mix_streams", builder.mix_streams(x, weights, streams), x=rows, x_stride=rows.strides[0],
        streams=streams,
        width=width, weights=by, weights_stride=by.strides[0], columns=made * width,
    )  # fmt: skip


@pytest.mark.parametrize("columns", [1, 3, 16, 37])
def test_softmax_agrees_with_the_reference_and_keeps_nan(call, builder, columns):
    x = 5 * normal(TOKENS, columns)
    x[0] += 80
    check(call, "softmax", builder.softmax(x), x=padded(x), columns=columns)
    np.testing.assert_allclose(builder.softmax(x).sum(axis=1), 1, rtol=1e-6)
    for number in (np.nan, np.inf, -np.inf):
        x[1, columns // 2] = number
        broken = builder.softmax(x)
        assert np.isnan(broken[1]).all()
        assert np.isfinite(np.delete(broken, 1, axis=0)).all()
        for run, how in ((call, 1), (launch, TOKENS)):
            y = output(TOKENS, columns)
            run("softmax", how, x=padded(x), y=y, stride=y.strides[0], columns=columns, count=count(TOKENS))
            np.testing.assert_array_equal(np.isnan(written(y, TOKENS, columns)), np.isnan(broken))


@pytest.mark.parametrize(("size", "iterations"), [(1, 1), (4, 20), (3, 2), (17, 1)])
def test_sinkhorn_agrees_with_the_reference_and_keeps_nan(call, builder, size, iterations):
    x, given = 3 * normal(TOKENS, size * size), {"size": size, "iterations": iterations, "epsilon": 1e-6}
    check(call, "sinkhorn", builder.sinkhorn(x, **given), x=padded(x), columns=size * size, **given)
    balanced = builder.sinkhorn(x, size, 60, 1e-6).reshape(TOKENS, size, size)
    np.testing.assert_allclose(balanced.sum(axis=1), 1, atol=2e-2)
    np.testing.assert_allclose(balanced.sum(axis=2), 1, atol=2e-2)
    x[1, -1] = np.inf
    broken = builder.sinkhorn(x, **given)
    for run, how in ((call, 1), (launch, TOKENS)):
        y = output(TOKENS, size * size)
        arguments = {"x": padded(x), "y": y, "stride": y.strides[0], "columns": size * size, "count": count(TOKENS)}
        run("sinkhorn", how, **arguments, **given)
        np.testing.assert_array_equal(np.isnan(written(y, TOKENS, size * size)), np.isnan(broken))
        assert np.isnan(broken[1]).all()


def test_one_sinkhorn_step_balances_columns(builder):
    """Check a 2 x 2 matrix by hand."""
    x = np.log(np.array([[1, 3, 2, 2]], np.float32))  # softmax of rows: 1/4 3/4, 1/2 1/2
    np.testing.assert_allclose(builder.sinkhorn(x, 2, 1, 0.0), [[1 / 3, 2 / 3, 3 / 5, 2 / 5]], rtol=1e-6)


def test_ids_are_replaced_by_a_table(call, builder):
    ids, table = np.array([3, 0, 299, 7, 7]), np.random.default_rng(0).integers(0, 1 << 40, 300)
    for run, how in ((call, 1), (call, 3), (launch, TOKENS)):
        y = np.full(TOKENS + 1, -1)
        run("replace_ids", how, ids=ids, table=table, y=y, count=count(TOKENS))
        np.testing.assert_array_equal(y, [*builder.replace_ids(ids, table), -1])


def test_columns_of_ids_are_hashed_up_to_an_end_token(call, builder):
    """Hash factors have 45 bits, as in released models."""
    ids = np.array([[7, 5, 299], [299, 5, 7], [7, 299, 5], [7, -1, -1], [7, 5, -1]])
    before = np.array([[7, 5, 299], [299, 5, 7], [7, 299, 299], [7, 299, 299], [7, 5, 299]])  # 299 is an end
    factors = 0x2C9277B5D1A3, 0x5851F42D4C95, 0x14057B7EF767
    for run, how in ((call, 1), (call, 3), (launch, TOKENS)):
        y = output(TOKENS, 1)
        run("as_column", how, ids=ids[:, 0].copy(), y=y, stride=y.strides[0], count=count(TOKENS))
        np.testing.assert_array_equal(written(y, TOKENS, 1), builder.as_column(ids[:, 0]))
    tokens, table = np.float32(ids + 1), np.arange(200, dtype=np.float32)[:, None]
    for length in (2, 3):
        products = before[:, :length].astype(object) * factors[:length]
        expected = np.array([reduce(xor, row) % 97 + 101 for row in products])
        hashing = NgramHash(factors[:length], 97, 101, 299)
        np.testing.assert_array_equal(builder.embed_hashed(weight(table), tokens, hashing)[:, 0], expected)
        for run, how in ((call, 1), (call, 3), (launch, TOKENS)):
            y, x = np.full(TOKENS + 1, -1), padded(tokens)
            given = {"factors": np.array(factors[:length]), "length": length, "size": 97, "first": 101, "end": 299}
            run("hash", how, x=x, stride=x.strides[0], y=y, count=count(TOKENS), **given)
            np.testing.assert_array_equal(y, [*expected, -1])


def test_nan_stays_visible_in_dots_and_mixed_streams(builder):
    x = normal(TOKENS, 6)
    x[1, 2] = np.nan
    assert np.isnan(builder.head_dots(x, x, 2)[1, 0])
    assert np.isnan(builder.mix_streams(x, np.ones((TOKENS, 2), np.float32), 2)[1, 2])
