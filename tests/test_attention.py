"""Attention and the KV cache's storage against plain NumPy twins."""

import gguf
import numpy as np
import pytest
from kernel_calls import GUARD, Scratch, caller, count, for_any_parts, normal, output, padded, written
from localllm.engine.kv_cache import KV_TYPES

from localllm.cli import options
from localllm.engine import cpu_builder
from localllm.kernels.cpu import attention, attention_many, cache_formats
from localllm.kernels.cpu.tiles_f32 import ROWS as TILE

NAMES = ["F32", "F16", "Q8_0"]
SHAPES = [  # head dimension, key-value heads, query heads of each
    (64, 2, 1), (64, 1, 2), (64, 3, 3), (80, 1, 4), (128, 1, 5), (48, 2, 6), (20, 1, 7), (96, 1, 8), (5, 1, 1),
]  # fmt: skip
POSITIONS = [  # tokens, length with them
    (1, 1), (1, 15), (1, 16), (1, 17), (1, 255), (1, 256), (1, 257), (1, 1000), (1, 5000), (2, 2), (2, 257), (3, 300),
    (4, 1000), (5, 129), (6, 640), (7, 1000), (8, 8), (8, 300), (8, 1000), (9, 9), (9, 257), (20, 1000), (65, 65),
    (65, 300), (130, 1000),
]  # fmt: skip


@pytest.fixture(scope="module")
def call():
    return caller(["merge", *(f"{kind}-{name}" for kind in ("store", "attend") for name in NAMES)])


def nmse(got: np.ndarray, exact: np.ndarray) -> float:
    """The normalized mean square error of the worst token."""
    assert np.isfinite(got).all()
    return float((((got - exact) ** 2).sum(axis=-1) / (exact.astype(np.float64) ** 2).sum(axis=-1)).max())


# ---- the cache ------------------------------------------------------------------------------------------------------


def encoded(name: str, x: np.ndarray) -> np.ndarray:
    """Heads float32 [..., head dimension] as the cache has them: bytes [..., bytes per token]."""
    block = 32 if name == "Q8_0" else 16
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    if name != "Q8_0":
        return x.astype({"F32": np.float32, "F16": np.float16}[name]).view(np.uint8)
    *places, columns = x.shape
    blocks = x.reshape(*places, columns // 32, 32)
    scales = (np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
    inverse = np.float32(1) / np.maximum(scales.astype(np.float32), np.float32(2**-24))
    codes = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=-1).reshape(*places, columns // 32 * 34)


def decoded(name: str, data: np.ndarray, head_dim: int) -> np.ndarray:
    """What these bytes mean, float32 [..., head dimension]."""
    values = gguf.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[name])
    return values.astype(np.float32).reshape(*data.shape[:-1], -1)[..., :head_dim]


class Cache:
    """Keys and values float32 [tokens, key-value heads, head dimension] in runs of tokens; NaN in unused places."""

    def __init__(self, keys: np.ndarray, values: np.ndarray, name: str, run_lengths: list[int]):
        data = [encoded(name, side).swapaxes(0, 1) for side in (keys, values)]
        self.token_bytes, self.head_bytes = data[0].shape[2], max(run_lengths) * data[0].shape[2]
        shape = (2, keys.shape[1], max(run_lengths), self.token_bytes)
        self.memory, self.runs, start = [], np.zeros((len(run_lengths), 3), np.int64), 0
        for run, length in zip(self.runs, run_lengths, strict=True):
            memory = np.full(shape, 255, np.uint8)
            for target, source in zip(memory, data, strict=True):
                part = source[:, start : start + length]
                target[:, : part.shape[1]] = part
            run[:] = memory[0].ctypes.data, memory[1].ctypes.data, length
            self.memory.append(memory)
            start += length


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("head_dim", [64, 80, 20])
def test_store(call, name, side, head_dim):
    """Tokens go to their positions in the runs, rounded, with zeros behind each head; nothing else changes."""
    kv_heads, positions = 3, np.array([0, 15, 16, 40, 63, 64, 79], np.int64)
    empty = np.zeros((0, kv_heads, head_dim), np.float32)
    x = normal(len(positions), kv_heads * head_dim)
    x[0], x[1], x[2] = 0, 1e-7 * x[1], 1e4 * x[2]

    def compute(parts):
        cache = Cache(empty, empty, name, [16, 48, 16])
        source = padded(x)
        arguments = {"count": count(len(positions)), "positions": positions, "x": source, "stride": source.strides[0]}
        arguments |= {"runs": cache.runs, "run_count": 3, "side": 8 * side, "head_stride": cache.head_bytes}
        call(f"store-{name}", parts, **arguments, token_bytes=cache.token_bytes, heads=kv_heads, head_dim=head_dim)
        assert all((memory[1 - side] == 255).all() for memory in cache.memory)
        lengths = cache.runs[:, 2]
        assert all((memory[:, :, n:] == 255).all() for memory, n in zip(cache.memory, lengths, strict=True))
        return np.concatenate([m[side, :, :n].swapaxes(0, 1) for m, n in zip(cache.memory, lengths, strict=True)])

    got = for_any_parts(compute)
    expected = np.full_like(got, 255)
    expected[positions] = encoded(name, x.reshape(len(positions), kv_heads, head_dim))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_store_keeps_nan_for_what_it_cannot_hold(call, name):
    """Not an infinity, whose score may look like that of a masked key; in Q8_0, a block shares one fate."""
    head_dim, x = 80, normal(40, 80)
    for token, value in enumerate([np.nan, np.inf, -np.inf, 65519, 65520, -1e6, 8.4e6, -3e38]):
        x[token, 7 * token] = x[8 + token, 79] = value
    limit, block = {"F32": (np.inf, 1), "F16": (65520, 1), "Q8_0": (65520 * 127, 32)}[name]
    lost = np.pad(~(np.abs(x) < limit), [(0, 0), (0, 16)]).reshape(40, -1, block).any(axis=-1)
    empty, positions, source = np.zeros((0, 1, head_dim), np.float32), np.arange(40), padded(x)
    cache = Cache(empty, empty, name, [48])
    arguments = {"count": count(40), "positions": positions, "x": source, "stride": source.strides[0]}
    arguments |= {"runs": cache.runs, "run_count": 1, "side": 0, "head_stride": cache.head_bytes}
    call(f"store-{name}", 1, **arguments, token_bytes=cache.token_bytes, heads=1, head_dim=head_dim)
    got = decoded(name, cache.memory[0][0, 0, :40], head_dim)
    lost = np.repeat(lost, block, axis=1)[:, :head_dim]
    assert np.isnan(got[lost]).all()
    assert np.isfinite(got[~lost]).all()


def test_q8_0_is_as_near_as_8_bits_can_be():
    x = normal(1000, 64)
    steps = np.repeat(np.abs(x.reshape(1000, 2, 32)).max(axis=-1) / 127, 32, axis=-1)
    assert (np.abs(decoded("Q8_0", encoded("Q8_0", x), 64) - x) <= 0.57 * steps).all()  # half, and the rounded scale


# ---- attention ------------------------------------------------------------------------------------------------------


def test_the_tape_gives_the_kernel_the_memory_that_it_takes():
    """localllm.engine.cpu_builder has copies of these numbers, because it imports no kernel."""
    sizes = (attention.MOST_SPLITS, attention.FEW_TOKENS, attention.ROWS, attention_many.KEYS)
    assert sizes == (cpu_builder.SPLITS, cpu_builder.FEW_TOKENS, cpu_builder.ROWS, cpu_builder.KEYS)
    assert attention.ROWS % TILE == 0
    assert attention.FEW_ROWS * attention.attention_few.KEYS <= attention.ROWS * attention_many.KEYS


def attend(call, name: str, q: np.ndarray, cache: Cache, length: int, shape: tuple[int, int, int], parts: int):
    """Queries float32 [tokens, heads * head dimension], the last tokens of `length`, against the cache."""
    head_dim, kv_heads, group = shape
    heads, tokens, pad = kv_heads * group, len(q), -(-head_dim // 16) * 16
    source, y = padded(q), output(tokens, heads * head_dim)
    scratch = Scratch(4 * (attention.ROWS * (2 * pad + 64 + 32) + 2 * 64 * pad))
    partial = np.full((8 * heads * 16 + 1, pad + 32), np.nan, np.float32)
    partial[-1] = GUARD
    positions = np.arange(length - tokens, length)
    arguments = {"count": count(tokens), "positions": positions, "q": source, "q_stride": source.strides[0]}
    arguments |= {"y": y, "y_stride": y.strides[0], "runs": cache.runs, "run_count": len(cache.runs)}
    arguments |= {"head_stride": cache.head_bytes, "token_bytes": cache.token_bytes, "heads": heads}
    arguments |= {"kv_heads": kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5, "partial": partial}
    call(f"attend-{name}", parts, **arguments, **scratch.arguments)
    call("merge", parts, **arguments, **scratch.arguments)
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
@pytest.mark.parametrize("name", NAMES)
def test_attention(call, name, tokens, length):
    """Right with one run and with several, whatever lies behind the last token."""
    for shape in SHAPES:
        head_dim, kv_heads, group = shape
        keys, values = (encoded(name, normal(length, kv_heads, head_dim, seed=seed)) for seed in (1, 2))
        keys, values = (decoded(name, data, head_dim) for data in (keys, values))
        q = 3 * normal(tokens, kv_heads * group * head_dim, seed=3)  # scores of about 3: some keys matter
        exact, rounded = exact_attention(q, keys, values), -(-length // 16) * 16
        for run_lengths in ([rounded + 64], [16, 48, 16, 256, rounded + 16]):
            cache = Cache(keys, values, name, run_lengths)
            got = for_any_parts(lambda parts, a=(q, cache, length, shape): attend(call, name, *a, parts))
            assert nmse(got, exact) < 1e-11


@pytest.mark.parametrize("scale", [1e-4, 100])
def test_attention_with_flat_and_extreme_scores(call, scale):
    """All keys alike, or scores up to thousands: no overflow, and the largest wins."""
    shape, length = (64, 2, 2), 700
    keys, values = (normal(length, 2, 64, seed=seed) for seed in (1, 2))
    for tokens in (1, 8, 20):
        q = scale * 10 * normal(tokens, 256, seed=3)
        got = attend(call, "F32", q, Cache(keys, values, "F32", [704]), length, shape, 3)
        assert nmse(got, exact_attention(q, keys, values)) < 1e-7  # 3e-8 without FMA


def test_a_head_of_zeros_in_q8_0(call):
    """Its scale is zero: the keys are alike, and the result is the mean of the values."""
    keys, values = np.zeros((40, 1, 64), np.float32), decoded("Q8_0", encoded("Q8_0", normal(40, 1, 64)), 64)
    for tokens in (1, 30):
        got = attend(call, "Q8_0", normal(tokens, 64), Cache(keys, values, "Q8_0", [48]), 40, (64, 1, 1), 1)
        np.testing.assert_allclose(got[-1], values[:, 0].mean(axis=0), rtol=1e-4, atol=1e-6)


def test_the_lists_of_formats_agree():
    """They are in several places, because some of these import neither NumPy nor Numba."""
    assert list(cache_formats.STORAGE) == NAMES
    assert sorted(KV_TYPES) == sorted(options.kv_types.choices) == sorted(name.lower() for name in NAMES)
