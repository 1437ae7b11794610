"""Compare attention on a GPU, in Numba's simulator, with NumPy."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from simulated import launch

from localllm.arch.layer_state import ON_GPU
from localllm.engine.cuda.lowering import FewTokenAttention
from localllm.kernels.table import PAGE, SEQUENCE

NOWHERE = 1000.0  # at positions of the cache that must not be read
random = np.random.default_rng(0)


class Shape(NamedTuple):
    key_dim: int
    value_dim: int
    kv_heads: int
    group: int  # query heads of each


class Cache:
    """Keys or values of some sequences in pages, as `bytes`, uint8 [heads, positions, bytes]."""

    def __init__(self, kind: str, heads: int, dim: int, pages: int):
        self.kind, self.dim = kind, dim
        block = 16 if kind.startswith("F") else 32
        self.numbers = np.full((heads, pages * PAGE, -(-dim // block) * block), NOWHERE, np.float32)

    def put(self, places: np.ndarray, x: np.ndarray) -> None:
        """Store x [tokens, heads, dim] at these positions, padded as the cache does."""
        self.numbers[:, places] = 0
        self.numbers[:, places, : self.dim] = x.swapaxes(0, 1)

    @property
    def bytes(self) -> np.ndarray:
        kind = gguf.GGMLQuantizationType[self.kind]
        return np.ascontiguousarray(gguf.quantize(self.numbers, kind).view(np.uint8))

    @property
    def kept(self) -> np.ndarray:
        """Return the stored values, float32 [heads, positions, dim]."""
        return gguf.dequantize(self.bytes, gguf.GGMLQuantizationType[self.kind]).reshape(self.numbers.shape)[
            ..., : self.dim
        ]


class Run(NamedTuple):
    """Tokens of some sequences as in a header, and their tables of pages."""

    owners: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    tables: list[np.ndarray]


def run(spans: list[tuple[int, int]]) -> Run:
    """Return a run of spans (tokens in the run, length with them) whose pages are scattered."""
    needed = [-(-length // PAGE) for _, length in spans]
    pages = random.permutation(sum(needed)).astype(np.int64)
    tables = np.split(pages, np.cumsum(needed)[:-1])
    sequences = np.zeros((len(spans), len(SEQUENCE)), np.int64)
    sequences[:, SEQUENCE.table] = [table.ctypes.data for table in tables]
    sequences[:, SEQUENCE.count], sequences[:, SEQUENCE.length] = np.array(spans).T
    sequences[:, SEQUENCE.first] = np.cumsum(sequences[:, SEQUENCE.count]) - sequences[:, SEQUENCE.count]
    owners = np.repeat(np.arange(len(spans)), [count for count, _ in spans])
    positions = np.concatenate([np.arange(length - count, length) for count, length in spans])
    return Run(owners, positions, sequences, tables)


def places(table: np.ndarray, length: int) -> np.ndarray:
    at = np.arange(length)
    return table[at // PAGE] * PAGE + at % PAGE


def expected(
    shape: Shape, run: Run, q: np.ndarray, keys: np.ndarray, values: np.ndarray, window=0, chunked=False, softcap=0.0,
    slopes=None, sinks=None, lookahead=0, period=1, logs=False,
) -> np.ndarray:  # fmt: skip
    """Compute softmax(q k^T / sqrt(key_dim)) v in float64, token by token: [tokens, heads * value_dim]."""
    rows, heads = q.reshape(len(q), -1, shape.key_dim).astype(np.float64), shape.kv_heads * shape.group
    result, sums = np.empty((len(q), heads, shape.value_dim)), np.empty((len(q), heads))
    for token, (owner, position) in enumerate(zip(run.owners, run.positions, strict=True)):
        first = 0 if not window else position // window * window if chunked else max(position + 1 - window, 0)
        length = min(position + 1 + lookahead, run.sequences[owner, SEQUENCE.length])
        seen = places(run.tables[owner], length)[first:]
        distances = np.abs(position - np.arange(first, length))
        for head in range(heads):
            scores = keys[head // shape.group, seen] @ rows[token, head] / np.sqrt(shape.key_dim)
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            scores = scores - (0 if slopes is None else float(slopes[head]) * distances)
            scores[np.arange(first + 1, length + 1) % period != 0] = -np.inf
            sink = -np.inf if sinks is None else float(sinks[head])
            top = max(scores.max(), sink)
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(sink - top)
            result[token, head] = weights @ values[head // shape.group, seen] / total
            sums[token, head] = np.log(total) + top
    return np.hstack((result.reshape(len(q), -1), *([sums] if logs else [])))


def attend_few(
    shape: Shape, run: Run, q: np.ndarray, keys: Cache, values: Cache, window=0, chunked=False, softcap=0.0,
    slopes=None, sinks=None, parts=3, chosen=None, lookahead=0, period=1, logs=False,
) -> np.ndarray:  # fmt: skip
    """Run the kernels for few tokens: float32 [tokens, heads * value_dim]."""
    few, heads = FewTokenAttention(shape.key_dim, shape.value_dim, shape.group), shape.kv_heads * shape.group
    room = len(q) + 1
    y = np.full((room, heads * (shape.value_dim + logs)), 7, np.float32)
    partial = np.full((room * heads * parts, few.partial_bytes // 4), np.nan, np.float32)
    of_keys, of_values = keys.bytes, values.bytes
    common = {"count": np.array([len(q)]), "positions": run.positions, "heads": heads, "window": window}
    common |= {"owners": run.owners, "sequences": run.sequences, "lookahead": lookahead}
    common |= {"chosen": 0 if chosen is None else chosen, "choice_stride": 0, "kv_heads": shape.kv_heads}
    common["chosen_stride"] = 0 if chosen is None else chosen.strides[0]
    common |= {"chunked": chunked, "parts": parts, "partial": partial, "partial_bytes": few.partial_bytes}
    launch(
        f"attend_few-{keys.kind}-{values.kind}-{few.bundle}-{shape.key_dim}-{shape.value_dim}"
        + ("" if chosen is None else "-chosen"), room, **common,
        q=q, q_stride=q.strides[0], keys=of_keys, values=of_values,
        key_head_stride=of_keys.strides[0], value_head_stride=of_values.strides[0], key_bytes=of_keys.shape[2],
        value_bytes=of_values.shape[2], scale=shape.key_dim**-0.5, softcap=softcap,
        slopes=0 if slopes is None else slopes, bundles=few.bundles, period=period,
    )  # fmt: skip
    launch(
        "merge_few",
        room,
        **common,
        logs=logs,
        value_dim=shape.value_dim,
        sinks=0 if sinks is None else sinks,
        y=y,
        y_stride=y.strides[0],
    )
    assert (y[-1] == 7).all()
    return y[:-1]


def content(shape: Shape, run: Run, kinds: tuple[str, str]) -> tuple[np.ndarray, Cache, Cache]:
    """Return random queries, keys and values."""
    pages = sum(map(len, run.tables))
    keys, values = (
        Cache(kind, shape.kv_heads, dim, pages)
        for kind, dim in zip(kinds, (shape.key_dim, shape.value_dim), strict=True)
    )
    for table, length in zip(run.tables, run.sequences[:, SEQUENCE.length], strict=True):
        for cache in (keys, values):
            cache.put(places(table, length), random.normal(0, 1, (length, shape.kv_heads, cache.dim)))
    q = random.normal(0, 2, (len(run.owners), shape.kv_heads * shape.group * shape.key_dim)).astype(np.float32)
    return q, keys, values


def error(got: np.ndarray, exact: np.ndarray) -> float:
    """Return the normalized mean square error of the worst token."""
    assert np.isfinite(got).all()
    return float((((got - exact) ** 2).sum(axis=-1) / (exact**2).sum(axis=-1)).max())


def check_few(kinds: tuple[str, str], shape: Shape, spans: list[tuple[int, int]], **given) -> None:
    tokens = run(spans)
    q, keys, values = content(shape, tokens, kinds)
    got = attend_few(shape, tokens, q, keys, values, **given)
    given.pop("parts", None)
    assert error(got, expected(shape, tokens, q, keys.kept, values.kept, **given)) < 1e-11


@pytest.mark.parametrize(
    ("kinds", "shape", "spans"),
    [
        (("F32", "F32"), Shape(16, 16, 1, 1), [(1, 65), (3, 260), (1, 1)]),
        (("F16", "F16"), Shape(64, 64, 2, 2), [(2, 65)]),
        (("F16", "F16"), Shape(20, 48, 1, 3), [(1, 64), (1, 15)]),
        (("Q8_0", "Q8_0"), Shape(128, 128, 1, 2), [(1, 17)]),
        (("Q8_0", "Q4_0"), Shape(32, 32, 1, 8), [(1, 40)]),
        (("Q4_1", "Q4_1"), Shape(48, 32, 1, 5), [(1, 50)]),
    ],
)
def test_attention_of_few_tokens_agrees_with_numpy(kinds, shape, spans):
    check_few(kinds, shape, spans)


@pytest.mark.parametrize(
    "given",
    [
        {"window": 70}, {"window": 100, "chunked": True}, {"softcap": 5.0}, {"window": 1, "parts": 1},
        {"window": 7, "lookahead": 6},
    ],
)  # fmt: skip
def test_windows_and_lookahead_of_few_tokens_agree_with_numpy(given):
    check_few(("F16", "F16"), Shape(16, 16, 1, 2), [(2, 201)], **given)


def test_slopes_and_sinks_of_few_tokens_agree_with_numpy():
    slopes, sinks = np.float32([0.5, 0.1, 0.02, 0.01]), np.float32([-20, 0, 3, 20])
    check_few(("F32", "F32"), Shape(16, 16, 2, 2), [(1, 200), (1, 3)], slopes=slopes, sinks=sinks)


@pytest.mark.parametrize("period", [1, 4, 128])
def test_few_tokens_attend_to_every_nth_key_as_in_numpy(period):
    sinks = np.float32([-1, 3])
    options = {"period": period, "sinks": sinks, "logs": True}
    check_few(("F32", "F16"), Shape(32, 32, 1, 2), [(2, 140), (1, 3), (1, 300)], **options)


def test_few_tokens_with_unlimited_lookahead_agree_with_numpy():
    slopes = np.float32([0.5, 0.1])
    check_few(("F32", "F32"), Shape(16, 16, 1, 2), [(3, 70), (5, 5)], lookahead=1 << 40, slopes=slopes)


@pytest.mark.sampled
@pytest.mark.slow(3)
def test_attention_of_many_tokens_on_tensor_cores_agrees_with_numpy():
    """Run it in a process of its own, because it needs whole warps."""
    tests = Path(__file__).with_name("whole_warps.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, env={**os.environ, "SIMULATED_WARP": "32"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 12, 16, 71])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (64, 64), (128, 128), (192, 128), (256, 256), (576, 512)])
def test_heads_are_bundled_in_equal_parts_within_the_registers(key_dim, value_dim, group):
    few = FewTokenAttention(key_dim, value_dim, group)
    assert few.bundle * few.bundles >= group > few.bundle * (few.bundles - 1)
    assert few.bundle * few.bundles - group < few.bundles, "equal parts"
    numbers = 8 * (-(-key_dim // 256) + -(-value_dim // 256))  # of 32 threads, which read 8 at once
    assert few.bundle == 1 or (few.bundle <= 8 and few.bundle * numbers <= 128)
    assert few.bundles == -(-group // min(8, max(128 // numbers, 1))), "no more than it takes"
    assert few.partial_bytes % 16 == 0 and few.partial_bytes >= 4 * (value_dim + 2)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 16), (4, 2), (8, 8), (132, 3)])
def test_a_context_is_divided_so_that_the_gpu_is_full(kv_heads, group):
    """Up to 8 tokens, a token has the parts that it would have alone, and so the same bits."""
    few = FewTokenAttention(64, 64, group)
    for tokens in range(1, 17):
        blocks = kv_heads * few.bundles * (tokens if tokens > 8 else 1)
        assert 264 <= few.parts(tokens, kv_heads) * blocks < 264 + blocks
    assert few.parts(8, kv_heads) == few.parts(1, kv_heads) >= few.parts(9, kv_heads)


def test_cache_types_on_gpus_are_those_of_the_kernels():
    """Compare the list that is read before any kernel is imported."""
    from localllm.kernels.cuda.attention import cache

    assert {name.lower() for name in cache.STORAGE} == set(ON_GPU)
    assert cache.STORAGE.keys() == cache.LOADS.keys()
