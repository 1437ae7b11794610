"""Low-rank updates: CPU and simulated GPU against NumPy."""

import numpy as np
import pytest
from kernel_calls import caller, count, for_any_parts, normal, output, padded, written
from simulated import launch

from localllm.kernels.table import MAX_ADAPTERS

FORMATS = {"F32": np.float32, "F16": np.float16}
FACTOR = float(np.float32(0.7))


@pytest.fixture(scope="module")
def call():
    return caller([*(f"add_low_rank-{name}" for name in (*FORMATS, "BF16")), "add_scaled"])


def scales_of(tokens: int) -> np.ndarray:
    """Return scales of a run of 20 tokens; those of every third one are 0."""
    scales = normal(20, MAX_ADAPTERS, seed=5)
    scales[::3] = 0
    return scales


def check(call, name: str, tokens: int, x: np.ndarray, update: np.ndarray, where: dict, token_of: list[int], **more):
    before = normal(tokens, update.shape[1], seed=7)
    scales, x_rows = scales_of(20), padded(x)
    arguments = {"scales": scales, "adapter": 3, "factor": FACTOR, "x": x_rows, "x_stride": x_rows.strides[0]}
    arguments |= {"pairs": 0, "used": 1, "rows": 0, **where, **more, "columns": update.shape[1]}
    if "rank" in more:
        arguments |= {"scratch": np.zeros((4, 1 << 12), np.uint8), "scratch_bytes": 1 << 12}

    def run(function):
        y = output(tokens, update.shape[1])
        y[:tokens, : update.shape[1]] = before
        function(name, y=y, stride=y.strides[0], count=count(tokens), **arguments)
        return written(y, tokens, update.shape[1])

    expected = before + np.float32(FACTOR) * scales[token_of, 3][:, None] * update
    for computed in (
        for_any_parts(lambda parts: run(lambda name, **values: call(name, parts, **values))),
        run(lambda name, **values: launch(name, tokens, **values)),
    ):
        np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-5)
        is_off = scales[token_of, 3] == 0
        np.testing.assert_array_equal(computed[is_off], before[is_off])


ROWS = {
    "all tokens": lambda tokens: ({}, list(range(tokens))),
    "requested ones": lambda tokens: (
        {"rows": np.arange(tokens)[::-1].astype(np.int64) + 2}, list(range(tokens + 1, 1, -1)),
    ),
    "pairs of tokens and experts": lambda tokens: (
        {"pairs": np.arange(tokens, dtype=np.int64)[::-1].copy(), "used": 2},
        [pair // 2 for pair in range(tokens - 1, -1, -1)],
    ),
    "pairs of requested tokens": lambda tokens: (
        {"pairs": np.arange(tokens, dtype=np.int64), "used": 2, "rows": np.arange(3, 20, dtype=np.int64)},
        [pair // 2 + 3 for pair in range(tokens)],
    ),
}  # fmt: skip


def describe_matrix(weights: np.ndarray) -> dict:
    """Return the arguments of B's matrix; its rows are padded with values that must not be used."""
    stored = np.pad(weights, ((0, 0), (0, -weights.shape[1] % 16)), constant_values=99)
    return {"rank": weights.shape[0], "weights": stored, "row_bytes": stored.strides[0]}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("tokens", "rank", "columns"), [(1, 1, 1), (3, 5, 16), (13, 17, 33), (9, 2, 70)])
def test_add_low_rank_adds_a_scaled_product(call, tokens, rank, columns, rows):
    x, weights = normal(tokens, rank), normal(rank, columns, seed=1)
    where, token_of = ROWS[rows](tokens)
    for name, kind in FORMATS.items():
        stored = weights.astype(kind)
        update, more = x @ stored.astype(np.float32), describe_matrix(stored)
        check(call, f"add_low_rank-{name}", tokens, x, update, where, token_of, **more)


def test_add_low_rank_reads_bf16(call):
    x, weights = normal(5, 4), normal(4, 40, seed=1)
    words = (weights.view(np.uint32) >> 16).astype(np.uint16)
    numbers = (words.astype(np.uint32) << 16).view(np.float32)
    check(call, "add_low_rank-BF16", 5, x, x @ numbers, {}, list(range(5)), **describe_matrix(words))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (6, 48), (9, 35)])
def test_add_scaled_adds_scaled_rows(call, tokens, columns, rows):
    x = normal(tokens, columns)
    check(call, "add_scaled", tokens, x, x, *ROWS[rows](tokens))
