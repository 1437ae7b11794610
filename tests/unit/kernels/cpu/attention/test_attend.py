"""Compare attention over pages and the storage of the KV cache with NumPy."""

from functools import partial
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from kernel_calls import (
    GUARD,
    Scratch,
    at_end_of_page,
    caller,
    count,
    for_any_parts,
    normal,
    output,
    padded,
    wanted,
    written,
)

from localllm.arch import layer_state as storage
from localllm.cli.registry import list_params
from localllm.engine.cpu.lowering import count_attention_scratch, count_max_units
from localllm.errors import UsageError
from localllm.kernels import reference as remembered
from localllm.kernels.cpu import ATTEND_ROWS, MAX_SPLITS, SPLIT_TOKENS
from localllm.kernels.cpu.attention import cache
from localllm.kernels.cpu.matmul.tiles_f32 import ROWS as TILE
from localllm.kernels.table import PAGE, SEQUENCE, SPLIT, UNIT
from localllm.quant.formats import IQ4_VALUES

NAMES = ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL"]
BLOCKS = NAMES[3:]
MIXTURES = ["Q8_0-Q4_0", "F16-Q4_1"]
pytestmark = pytest.mark.sampled("name", always=("F16",))


class Shape(NamedTuple):
    key_dim: int
    value_dim: int
    kv_heads: int
    group: int  # query heads of each


SHAPES = [
    Shape(64, 64, 2, 1), Shape(64, 64, 1, 2), Shape(64, 64, 3, 3), Shape(80, 80, 1, 4), Shape(128, 128, 1, 5),
    Shape(48, 48, 2, 6), Shape(20, 20, 1, 7), Shape(96, 96, 1, 8), Shape(5, 5, 1, 1), Shape(192, 128, 1, 3),
    Shape(20, 96, 2, 2),
]  # fmt: skip
POSITIONS = [  # tokens, length with them
    (1, 1), (1, 15), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 255), (1, 256), (1, 257), (1, 1000), (1, 5000),
    (2, 2), (2, 257), (3, 300), (4, 1000), (5, 129), (6, 640), (7, 1000), (8, 8), (8, 300), (8, 1000), (9, 9), (9, 257),
    (20, 1000), (65, 65), (65, 300), (130, 1000),
]  # fmt: skip
MIXED = [(1, 1), (1, 700), (20, 20), (3, 64), (40, 300), (1, 65), (8, 1000), (100, 128), (2, 257), (9, 640)]


@pytest.fixture(scope="module")
def call(request):
    stored = (f"{kind}-{name}" for kind in ("store", "recall", "attend") for name in NAMES)
    named = ["plan", "merge", "hadamard", *stored, *(f"attend-{name}" for name in MIXTURES)]
    return caller(wanted(request, named))


def nmse(got: np.ndarray, exact: np.ndarray) -> float:
    """Return the normalized mean square error of the worst token."""
    assert np.isfinite(got).all()
    return float((((got - exact) ** 2).sum(axis=-1) / (exact.astype(np.float64) ** 2).sum(axis=-1)).max())


# ---- the cache ------------------------------------------------------------------------------------------------------


def encoded(name: str, x: np.ndarray) -> np.ndarray:
    """Encode heads, float32 [..., head dimension], as the cache stores them: bytes [..., bytes per token]."""
    block = 32 if name in BLOCKS else 16
    more = np.zeros((*x.shape[:-1], -x.shape[-1] % block), np.float32)
    if name in ("Q4_1", "Q5_1") and more.size:
        more += x[..., x.shape[-1] // 32 * 32, None]  # which leaves the range as it is
    x = np.concatenate((x, more), axis=-1)
    if name == "BF16":
        return gguf.quantize(x, gguf.GGMLQuantizationType.BF16).view(np.uint8)
    if name not in BLOCKS:
        return x.astype({"F32": np.float32, "F16": np.float16}[name]).view(np.uint8)
    *places, columns = x.shape
    blocks = x.reshape(*places, columns // 32, 32)
    header, codes = MAKE[name](blocks)
    return np.concatenate([header.astype(np.float16).view(np.uint8), codes], axis=-1).reshape(*places, -1)


def q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and codes of blocks [..., 32]."""
    scales, inverse = scaled(np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127))
    return scales, np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8).view(np.uint8)


def symmetric(blocks: np.ndarray, centre: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and codes of Q4_0 or Q5_0."""
    size = np.abs(blocks).max(axis=-1, keepdims=True)
    sign = np.where(blocks.max(axis=-1, keepdims=True) == size, np.float32(-1), np.float32(1))
    scales, inverse = scaled(size / np.float32(centre))
    return sign * scales, halves(np.rint(blocks * sign * inverse) + centre, 2 * centre - 1)


def with_minimum(blocks: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and minimums of Q4_1 or Q5_1, and codes in the same order."""
    least = blocks.min(axis=-1, keepdims=True)
    scales, inverse = scaled((blocks.max(axis=-1, keepdims=True) - least) / np.float32(top))
    least = least.astype(np.float16).astype(np.float32)
    return np.concatenate([scales, least], axis=-1), halves(np.rint((blocks - least) * inverse), top)


def iq4_nl(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales that minimize squared errors weighted by the squared values, and codes of the nearest values."""
    values, x = np.float32(IQ4_VALUES), blocks.astype(np.float64)
    size, top = np.abs(x).max(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    first = np.where(top == size, -size, size) / 127 + (size == 0)
    codes = np.abs((x / first)[..., None] - values).argmin(axis=-1)
    squares = (x**2 * values[codes] ** 2).sum(axis=-1, keepdims=True)
    scales = (x**3 * values[codes]).sum(axis=-1, keepdims=True) / (squares + (size == 0))
    return scales, halves(codes, 15)


def scaled(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales as they are stored, and the factors that values are multiplied by."""
    scales = scales.astype(np.float16).astype(np.float32)
    return scales, np.float32(1) / np.maximum(scales, np.float32(2**-24))


def halves(codes: np.ndarray, top: int) -> np.ndarray:
    """Pack codes [..., 32] into bytes [..., 16], the first 16 in the low halves, after any 4 bytes of fifth bits."""
    codes = np.clip(codes, 0, top).astype(np.uint8)
    low, high = np.split(codes & 15, 2, axis=-1)
    fifth = np.packbits(codes >> 4, axis=-1, bitorder="little")
    return np.concatenate([*([fifth] if top > 15 else []), low | high << 4], axis=-1)


MAKE = {
    "Q8_0": q8_0, "Q4_0": partial(symmetric, centre=8), "Q5_0": partial(symmetric, centre=16), "IQ4_NL": iq4_nl,
    "Q4_1": partial(with_minimum, top=15), "Q5_1": partial(with_minimum, top=31),
}  # fmt: skip


def decoded(name: str, data: np.ndarray, head_dim: int) -> np.ndarray:
    """Decode these bytes to float32 [..., head dimension]."""
    values = gguf.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[name])
    return values.astype(np.float32).reshape(*data.shape[:-1], -1)[..., :head_dim]


def sides(name: str) -> tuple[str, str]:
    """Return the types of keys and values of an attention kernel."""
    of_keys, _, of_values = name.partition("-")
    return of_keys, of_values or of_keys


class Text(NamedTuple):
    """Keys and values, float32 [tokens, key-value heads, dimension], and queries [tokens, heads * dimension].


    Queries are those of the last tokens.
    """

    keys: np.ndarray
    values: np.ndarray
    q: np.ndarray


def text(name: str, shape: Shape, tokens: int, length: int, seed: int = 0) -> Text:
    """Return a random sequence whose last `tokens` of `length` are new; the cache can store its keys exactly."""
    keys, values = (
        decoded(kind, encoded(kind, normal(length, shape.kv_heads, dim, seed=3 * seed + side)), dim)
        for side, (kind, dim) in enumerate(zip(sides(name), (shape.key_dim, shape.value_dim), strict=True))
    )
    q = 3 * normal(tokens, shape.kv_heads * shape.group * shape.key_dim, seed=3 * seed + 2)  # some keys matter
    return Text(keys, values, q)


class Header:
    """The header of a run of sequences, with contiguous or scattered pages."""

    def __init__(self, tokens: list[int], lengths: list[int], scattered: bool = False, seed: int = 0):
        needed = [-(-length // PAGE) for length in lengths]
        self.pages = sum(needed) + 3
        order = np.random.default_rng(seed).permutation(self.pages) if scattered else np.arange(self.pages)
        tables = np.split(order[: sum(needed)].astype(np.int64), np.cumsum(needed)[:-1])
        self.tables = [at_end_of_page(table).view(np.int64) for table in tables]
        self.sequences = np.zeros((len(tokens), len(SEQUENCE)), np.int64)
        self.sequences[:, SEQUENCE.first] = np.cumsum([0, *tokens[:-1]])
        self.sequences[:, SEQUENCE.count], self.sequences[:, SEQUENCE.length] = tokens, lengths
        self.sequences[:, SEQUENCE.kernel_tokens] = tokens
        self.sequences[:, SEQUENCE.table] = [table.ctypes.data for table in self.tables]
        pairs = zip(tokens, lengths, strict=True)
        self.positions = np.concatenate([np.arange(length - count, length) for count, length in pairs])
        self.owners = np.repeat(np.arange(len(tokens)), tokens)
        self.count, self.sequence_count = count(sum(tokens)), count(len(tokens))

    def places(self, number: int) -> np.ndarray:
        """Return the positions in the cache of a sequence's tokens."""
        positions = np.arange(self.sequences[number, SEQUENCE.length])
        return self.tables[number][positions // PAGE] * PAGE + positions % PAGE

    def memory(self, heads: int, token_bytes: int) -> np.ndarray:
        """Return one side of a cache, bytes [heads, positions, bytes per token], all NaN; memory behind it is
        unreadable.
        """
        shape = heads, self.pages * PAGE, token_bytes
        return at_end_of_page(np.full(shape, 255, np.uint8)).reshape(shape)

    def cache(self, name: str, sides: list[np.ndarray]) -> np.ndarray:
        """Return one side of a cache filled with each sequence's float32 [tokens, heads, dimension]."""
        data = [encoded(name, side) for side in sides]
        memory = self.memory(*data[0].shape[1:])
        for number, heads in enumerate(data):
            memory[:, self.places(number)] = heads.swapaxes(0, 1)
        return memory


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 80, 20])
def test_storing_rounds_tokens_at_their_positions_and_changes_nothing_else(call, name, head_dim):
    """Check also zeros behind each head."""
    heads, tokens, lengths = 3, [4, 1, 2, 70], [4, 64, 65, 200]
    x = normal(sum(tokens), heads * head_dim)
    x[0], x[1], x[2] = 0, 1e-7 * x[1], 1e4 * x[2]
    kept = encoded(name, x.reshape(len(x), heads, head_dim))

    for scattered in (False, True):
        header = Header(tokens, lengths, scattered)

        def compute(parts, header=header):
            memory, source = header.memory(heads, kept.shape[2]), padded(x)
            arguments = {"x": source, "stride": source.strides[0], "base": memory, "head_stride": memory.strides[0]}
            arguments |= {"count": header.count, "positions": header.positions, "owners": header.owners}
            arguments |= {"sequences": header.sequences, "token_bytes": kept.shape[2], "heads": heads}
            call(f"store-{name}", parts, **arguments, head_dim=head_dim)
            return memory.copy()

        expected = header.memory(heads, kept.shape[2])
        places = np.concatenate([header.places(number)[-count:] for number, count in enumerate(tokens)])
        expected[:, places] = kept.swapaxes(0, 1)
        np.testing.assert_array_equal(for_any_parts(compute), expected)


@pytest.mark.parametrize("name", NAMES)
def test_storing_keeps_nan_for_values_out_of_range(call, name):
    """Not an infinity, whose score may look like that of a masked key; a block becomes NaN as a whole."""
    head_dim, x = 80, normal(40, 80)
    for token, value in enumerate([np.nan, np.inf, -np.inf, 65519, 65520, -1e6, 8.4e6, -3e38]):
        x[token, 7 * token] = x[8 + token, 79] = value
    limits = {"F16": 65520, "Q8_0": 65520 * 127, "Q4_0": 65520 * 8, "Q5_0": 65520 * 16, "IQ4_NL": 65520 * 127}
    limits |= {"F32": np.inf, "BF16": np.inf, "Q4_1": 65520, "Q5_1": 65520}
    limit, block = limits[name], 32 if name in BLOCKS else 1
    lost = np.pad(~(np.abs(x) < limit), [(0, 0), (0, 16)]).reshape(40, -1, block).any(axis=-1)
    header, source = Header([40], [40]), padded(x)
    memory = header.memory(1, encoded(name, x[20:21]).shape[1])
    arguments = {"count": header.count, "positions": header.positions, "owners": header.owners, "heads": 1}
    arguments |= {"sequences": header.sequences, "x": source, "stride": source.strides[0], "base": memory}
    call(f"store-{name}", 1, **arguments, head_stride=memory.strides[0], token_bytes=memory.shape[2], head_dim=head_dim)
    got = decoded(name, memory[0, :40], head_dim)
    lost = np.repeat(lost, block, axis=1)[:, :head_dim]
    assert np.isnan(got[lost]).all()
    assert np.isfinite(got[~lost]).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_rounding_errors_of_blocks_are_within_half_a_step(name):
    x = normal(1000, 64)
    blocks = x.reshape(1000, 2, 32)
    size, span = np.abs(blocks).max(axis=-1), blocks.max(axis=-1) - blocks.min(axis=-1)
    steps = {"Q8_0": size / 127, "Q4_0": size / 8, "Q5_0": size / 16, "Q4_1": span / 15, "Q5_1": span / 31}
    steps["IQ4_NL"] = size * 14 / 127  # from the last value but one to 127
    # Half, and the rounded scale; Q4_0 and Q5_0 have a code less on one side, where the scale is off by most.
    far = {"Q8_0": 0.57, "Q4_0": 1.01, "Q5_0": 1.01, "Q4_1": 0.51, "Q5_1": 0.52, "IQ4_NL": 1.1}[name]
    assert (np.abs(decoded(name, encoded(name, x), 64) - x) <= far * np.repeat(steps[name], 32, axis=-1)).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("head_dim", [64, 80, 20])
def test_the_reference_stores_the_same_values(name, head_dim):
    x = normal(100, 3, head_dim)
    expected = decoded(name, encoded(name, x), head_dim)
    got = remembered.round_heads(x, name.lower(), 1)
    assert (np.abs(got - expected) > 1e-6 * np.abs(expected)).mean() < 1e-3, "but for quotients in the middle"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 80, 20])
def test_recalling_returns_the_stored_values_and_writes_nothing_else(call, name, head_dim):
    heads, tokens, lengths = 3, [4, 1, 2, 70], [4, 64, 65, 200]
    kept = encoded(name, normal(sum(tokens), heads, head_dim))
    header = Header(tokens, lengths, scattered=True)
    memory = header.memory(heads, kept.shape[2])
    memory[:, np.concatenate([header.places(n)[-count:] for n, count in enumerate(tokens)])] = kept.swapaxes(0, 1)

    def compute(parts):
        x = output(len(kept), heads * head_dim)
        arguments = {"x": x, "stride": x.strides[0], "base": memory, "head_stride": memory.strides[0]}
        arguments |= {"count": header.count, "positions": header.positions, "owners": header.owners}
        arguments |= {"sequences": header.sequences, "token_bytes": kept.shape[2], "heads": heads}
        call(f"recall-{name}", parts, **arguments, head_dim=head_dim)
        return written(x, len(kept), heads * head_dim)

    expected = decoded(name, kept, head_dim).reshape(len(kept), -1)
    np.testing.assert_array_equal(for_any_parts(compute), expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("columns", "block"), [(5, 1), (60, 4), (6, 2), (40, 8), (240, 16), (288, 32), (576, 64), (512, 512)]
)
def test_the_hadamard_kernel_multiplies_by_an_orthonormal_matrix(call, columns, block, in_place):
    """Check also that applying it twice gives the input."""
    x = normal(33, columns)

    def compute(parts):
        source, y = padded(x), output(33, columns)
        if in_place:
            y = y[:33]
            y[:, :columns] = x
        target = {"y": y, "stride": y.strides[0], "columns": columns, "block": block}
        call("hadamard", parts, count=count(33), x=y if in_place else source, **target)
        return y[:33, :columns].copy() if in_place else written(y, 33, columns)

    got = for_any_parts(compute) if block > 1 else x
    np.testing.assert_allclose(got, remembered.hadamard(x, block), rtol=0, atol=3e-6)
    np.testing.assert_allclose(remembered.hadamard(remembered.hadamard(x, block), block), x, rtol=0, atol=3e-6)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)


def test_a_rotation_reduces_the_error_of_outliers():
    """An outlier costs the small values of its block their bits; spread over the block, it costs less."""
    x = normal(200, 64)
    x[:, 5] *= 8
    plain, turned = (remembered.round_heads(x, "q4_0", block) for block in (1, 64))
    assert ((turned - x) ** 2).sum() < 0.5 * ((plain - x) ** 2).sum()


@pytest.mark.parametrize(
    ("dims", "block"), [((128,), 128), ((96,), 32), ((80,), 16), ((192,), 64), ((576, 512), 64), ((20,), 4), ((5,), 1)]
)
def test_rotations_span_the_largest_common_power_of_two(dims, block):
    assert storage.find_rotation_size("q4_0", *dims) == block
    assert storage.find_rotation_size("q8_0", *dims) == 1


def test_cache_types_of_keys_and_values_are_parsed():
    assert storage.KVType.parse("q8_0") == ("q8_0", "q8_0")
    assert storage.KVType.parse("k=q8_0,v=q4_0") == storage.KVType.parse("v=q4_0,k=q8_0") == ("q8_0", "q4_0")
    assert storage.KVType.parse("v=q4_1") == ("f16", "q4_1")


@pytest.mark.parametrize(
    "wrong", ["", "q4", "Q8_0", "q8_0,q4_0", "k=q8_0,k=q4_0", "k=q8_0,x=q4_0", "k=,v=q4_0", "k=q8_0,", "k=q8_0;v=q4_0"]
)
def test_unknown_cache_types_are_refused(wrong):
    with pytest.raises(UsageError, match="k=q8_0,v=q4_0"):
        storage.KVType.parse(wrong)


# ---- the plan -------------------------------------------------------------------------------------------------------


def planned(
    call, header: Header, shape: Shape, window: int = 0, chunked: bool = False, lookahead: int = 0
) -> dict[str, np.ndarray]:
    """Return what `plan` writes, in no more memory than the engine gives it."""
    heads, tokens = shape.kv_heads * shape.group, int(header.count[0])
    units = np.full((count_max_units(tokens, heads, shape.kv_heads) + 1, len(UNIT)), -7, np.int64)
    splits = np.full((tokens + 1, len(SPLIT)), -7, np.int64)
    plan = {"units": units, "unit_count": count(0), "splits": splits}
    sequences = {"sequences": header.sequences, "sequence_count": header.sequence_count}
    seen = {"window": window, "chunked": chunked, "lookahead": lookahead, "cross_attention": False}
    call("plan", 1, **sequences, heads=heads, kv_heads=shape.kv_heads, **seen, **plan)
    assert (units[plan["unit_count"][0] :] == -7).all()
    assert (splits[-1] == -7).all()
    return plan


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [0, 1, 16, 100, 1000])
@pytest.mark.parametrize("group", [1, 4, 12])
@pytest.mark.parametrize(
    "runs",
    [*([run] for run in POSITIONS), MIXED, [(8, 10**5)] * 64, [(1, 5000)] * 512, [(8, 9000)] * 8 + [(448, 500)]],
    ids=lambda runs: f"{len(runs)}x{runs[0]}",
)
def test_units_cover_every_visible_key_once(call, runs, group, window, chunked):
    """Expect units of one sequence that begin at a multiple of 16 and write partial results of their own."""
    shape, (tokens, lengths) = Shape(64, 64, 2, group), map(list, zip(*runs, strict=True))
    header = Header(tokens, lengths)
    plan = planned(call, header, shape, window, chunked)
    units, splits = plan["units"][: plan["unit_count"][0]], plan["splits"][:-1]
    rows = units[:, UNIT.rows]
    assert (rows > 0).all() and (rows <= ATTEND_ROWS).all() and (units[:, UNIT.begin] % 16 == 0).all()
    unit = np.repeat(np.arange(len(units)), rows)  # of each (unit, row)
    row = np.arange(len(unit)) - np.repeat(np.cumsum(rows) - rows, rows) + units[unit, UNIT.first_row]
    token, sequence = row // group, header.owners[row // group]
    begin, end = units[unit, UNIT.begin], units[unit, UNIT.end]
    np.testing.assert_array_equal(units[unit, UNIT.table], header.sequences[sequence, SEQUENCE.table])
    assert (end <= header.sequences[sequence, SEQUENCE.length]).all()
    last = header.positions[token]
    first = first_visible(last, window, chunked)
    seen = np.maximum(np.minimum(end, last + 1) - np.maximum(begin, first), 0)
    place = units[unit, UNIT.kv_head] * len(header.owners) * group + row
    covered = np.bincount(place, weights=seen, minlength=2 * len(header.owners) * group)
    expected = np.repeat(header.positions + 1 - first_visible(header.positions, window, chunked), group)
    np.testing.assert_array_equal(covered, np.tile(expected, 2))
    order = np.lexsort((begin, place))
    again = np.diff(place[order]) == 0
    assert (begin[order][1:][again] >= end[order][:-1][again]).all(), "parts of a context overlap"
    assert (np.bincount(place) == np.tile(np.repeat(splits[:, SPLIT.count], group), 2)).all()
    assert (units[unit, UNIT.split] < splits[token, SPLIT.count]).all() and splits[:, SPLIT.count].max() <= MAX_SPLITS
    slots = splits[splits[:, SPLIT.count] > 1, SPLIT.slot]
    assert len(set(slots)) == len(slots) and (slots < SPLIT_TOKENS).all()


def first_visible(positions: np.ndarray, window: int, chunked: bool) -> np.ndarray:
    """Return the first key that each token sees."""
    if not window:
        return np.zeros_like(positions)
    return positions // window * window if chunked else np.maximum(positions + 1 - window, 0)


def test_a_plan_without_sequences_has_no_units(call):
    assert planned(call, Header([1], [1]), SHAPES[0])["unit_count"] == 2
    header = Header([1], [1])
    header.sequence_count[0] = 0
    assert planned(call, header, SHAPES[0])["unit_count"] == 0


# ---- attention ------------------------------------------------------------------------------------------------------


def test_rows_fill_whole_tiles():
    assert ATTEND_ROWS % TILE == 0


def attend(
    call, name: str, shape: Shape, texts: list[Text], parts: int = 1, *, window=0, chunked=False, softcap=0.0, slopes=0,
    sinks=0, chosen=None, lookahead=0, period=1, logs=False, **pages,
) -> list[np.ndarray]:  # fmt: skip
    """Run attention for all texts: float32 [tokens, heads * value_dim] of each, with logarithms of sums if asked."""
    heads, tokens = shape.kv_heads * shape.group, [len(text.q) for text in texts]
    header = Header(tokens, [len(text.keys) for text in texts], **pages)
    keys, values = (header.cache(kind, [text[side] for text in texts]) for side, kind in enumerate(sides(name)))
    key_dim, value_dim = (-(-dim // 16) * 16 for dim in (shape.key_dim, shape.value_dim))
    source, columns = padded(np.concatenate([text.q for text in texts])), heads * (shape.value_dim + logs)
    y = output(sum(tokens), columns)
    scratch = Scratch(count_attention_scratch(key_dim, value_dim))
    partial = np.full((min(sum(tokens), SPLIT_TOKENS) * heads * MAX_SPLITS + 1, value_dim + 32), np.nan, np.float32)
    partial[-1] = GUARD
    arguments = {"count": header.count, "positions": header.positions, "window": window, "softcap": softcap}
    arguments |= planned(call, header, shape, window, chunked, lookahead)
    arguments |= {
        "chunked": chunked,
        "sinks": sinks,
        "lookahead": lookahead,
        "cross_attention": False,
        "biases": 0,
        "reach": 0,
    }
    arguments |= {"period": period, "logs": logs}
    arguments |= {
        "chosen": 0 if chosen is None else chosen,
        "chosen_stride": 0 if chosen is None else chosen.strides[0],
        "choice_stride": 0,
    }
    arguments |= {"q": source, "q_stride": source.strides[0], "y": y, "y_stride": y.strides[0], "partial": partial}
    arguments |= {"keys": keys, "key_head_stride": keys.strides[0], "key_bytes": keys.shape[2]}
    arguments |= {"values": values, "value_head_stride": values.strides[0], "value_bytes": values.shape[2]}
    arguments |= {"heads": heads, "kv_heads": shape.kv_heads, "scale": shape.key_dim**-0.5}
    arguments |= {"key_dim": shape.key_dim, "value_dim": shape.value_dim, "slopes": slopes}
    for kernel in (f"attend-{name}", "merge"):
        call(kernel, parts, **arguments, **scratch.arguments)
    scratch.check()
    assert (partial[-1] == GUARD).all(), "too many partial results"
    return np.split(written(y, sum(tokens), columns), np.cumsum(tokens)[:-1])


def exact_attention(
    shape: Shape, text: Text, window: int = 0, softcap: float = 0.0, slopes=None, sinks=None, chunked: bool = False,
    lookahead: int = 0, period: int = 1, logs: bool = False,
) -> np.ndarray:  # fmt: skip
    """Compute softmax(q k / sqrt(d)) v in float64, with a loop over heads."""
    rows = text.q.reshape(len(text.q), -1, shape.key_dim).astype(np.float64)
    result, sums = np.empty((len(rows), rows.shape[1], shape.value_dim)), np.empty((len(rows), rows.shape[1]))
    distance = np.arange(len(text.keys) - len(rows), len(text.keys))[:, None] - np.arange(len(text.keys))
    positions = np.arange(len(text.keys) - len(rows), len(text.keys))
    hidden = (distance < -lookahead) | (np.arange(len(text.keys)) < first_visible(positions, window, chunked)[:, None])
    hidden |= np.arange(1, len(text.keys) + 1) % period != 0
    for head in range(rows.shape[1]):
        scores = rows[:, head] @ text.keys[:, head // shape.group].T.astype(np.float64) / np.sqrt(shape.key_dim)
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        scores = scores - (0 if slopes is None else slopes[head].astype(np.float64) * distance)
        scores[hidden] = -np.inf
        sink = np.full((len(rows), 1), -np.inf if sinks is None else sinks[head])
        top = np.maximum(scores.max(axis=1, keepdims=True), sink)
        weights = np.exp(scores - top)
        values = text.values[:, head // shape.group].astype(np.float64)
        total = weights.sum(axis=1, keepdims=True) + np.exp(sink - top)
        result[:, head], sums[:, head] = weights / total @ values, (np.log(total) + top)[:, 0]
    return np.hstack((result.reshape(len(rows), -1), *([sums] if logs else [])))


@pytest.mark.sampled("name")
@pytest.mark.parametrize(("tokens", "length"), POSITIONS)
@pytest.mark.parametrize("name", NAMES + MIXTURES)
def test_attention_agrees_with_numpy_wherever_pages_lie(call, name, tokens, length):
    """Check that neither the number of parts nor memory behind the last token matters."""
    for shape in SHAPES:
        only = text(name, shape, tokens, length)
        got = for_any_parts(lambda parts, shape=shape, only=only: attend(call, name, shape, [only], parts)[0])
        assert nmse(got, exact_attention(shape, only)) < 2e-11
        np.testing.assert_array_equal(attend(call, name, shape, [only], 3, scattered=True)[0], got)


@pytest.mark.parametrize("period", [1, 4, 128])
@pytest.mark.parametrize("name", ["F32", "F16-Q8_0"])
def test_attention_to_every_nth_key_and_its_logs_agree_with_numpy(call, name, period):
    """Before the first block ends, only sinks remain."""
    shape, sinks = Shape(64, 48, 1, 6), np.float32([-1, 0, 1, 2, -3, 4])
    texts = [text(name, shape, *position, seed) for seed, position in enumerate([*MIXED, (3, 3), (40, 260)])]
    got = for_any_parts(
        lambda parts: np.concatenate(
            attend(call, name, shape, texts, parts, sinks=sinks, period=period, logs=True, scattered=True)
        )
    )
    expected = [exact_attention(shape, one, sinks=sinks, period=period, logs=True) for one in texts]
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=1e-4, atol=2e-5)


def test_a_token_without_selected_keys_gives_nan(call):
    """It must not attend to its sinks alone: the scores of its keys were not finite."""
    shape, sinks = Shape(64, 64, 1, 2), np.float32([1, 2])
    only, chosen = text("F32", shape, 3, 100), np.full((3, 4), 0xFFFFFFFF, np.uint32)
    chosen[1] = 0
    got = attend(call, "F32", shape, [only], sinks=sinks, chosen=chosen)[0]
    assert (np.isnan(got).all(axis=1) == [False, True, False]).all()
    np.testing.assert_allclose(got[2], exact_attention(shape, only, sinks=sinks)[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 200, 256, 300, 999, 1000, 2000])
@pytest.mark.parametrize("shape", [Shape(64, 64, 2, 2), Shape(20, 48, 1, 5)])
def test_attention_in_windows_agrees_with_numpy(call, shape, window):
    texts = [text("F16", shape, *position, seed) for seed, position in enumerate(MIXED)]
    got = attend(call, "F16", shape, texts, 3, window=window, scattered=True)
    for rows, one in zip(got, texts, strict=True):
        assert nmse(rows, exact_attention(shape, one, window)) < 1e-11


@pytest.mark.parametrize("lookahead", [1, 15, 64, 1 << 20])
@pytest.mark.parametrize("shape", [Shape(64, 64, 2, 2), Shape(20, 48, 1, 5)])
def test_attention_with_lookahead_agrees_with_numpy(call, shape, lookahead):
    """Let tokens attend to a limited number of later tokens, or to all, as in encoders."""
    texts = [text("F16", shape, *position, seed) for seed, position in enumerate(MIXED)]
    got = attend(call, "F16", shape, texts, 3, lookahead=lookahead, scattered=True)
    for rows, one in zip(got, texts, strict=True):
        assert nmse(rows, exact_attention(shape, one, lookahead=lookahead)) < 1e-11


@pytest.mark.parametrize("chunk", [1, 15, 16, 64, 100, 256, 1000])
@pytest.mark.parametrize("shape", [Shape(64, 64, 2, 2), Shape(20, 48, 1, 5)])
def test_attention_in_chunks_agrees_with_numpy(call, shape, chunk):
    texts = [text("F16", shape, *position, seed) for seed, position in enumerate(MIXED)]
    got = attend(call, "F16", shape, texts, 3, window=chunk, chunked=True, scattered=True)
    for rows, one in zip(got, texts, strict=True):
        assert nmse(rows, exact_attention(shape, one, chunk, chunked=True)) < 1e-11


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("shape", [Shape(64, 64, 3, 1), Shape(20, 48, 2, 5)])
def test_attention_with_sinks_agrees_with_numpy(call, shape, window):
    """Check small sinks, dominating ones, and NaN, which must stay visible."""
    sinks = np.linspace(-20, 20, shape.kv_heads * shape.group, dtype=np.float32)
    texts = [text("F16", shape, *position, seed) for seed, position in enumerate(MIXED)]
    got = for_any_parts(
        lambda parts: np.concatenate(attend(call, "F16", shape, texts, parts, window=window, sinks=sinks))
    )
    exact = np.concatenate([exact_attention(shape, one, window, sinks=sinks) for one in texts])
    assert nmse(got, exact) < 1e-11
    sinks[-1] = np.nan
    for rows in attend(call, "F16", shape, texts, sinks=sinks):
        lost = np.isnan(rows).reshape(len(rows), len(sinks), -1)
        assert lost[:, -1].all() and not lost[:, :-1].any()


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("window", [0, 100])
def test_attention_with_softcap_agrees_with_numpy(call, softcap, window):
    shape = Shape(64, 64, 2, 2)
    texts = [text("F16", shape, *position, seed) for seed, position in enumerate(MIXED)]
    got = attend(call, "F16", shape, texts, 3, softcap=softcap, window=window)
    for rows, one in zip(got, texts, strict=True):
        assert nmse(rows, exact_attention(shape, one, window, softcap)) < 1e-11


@pytest.mark.parametrize("shape", [Shape(64, 64, 3, 1), Shape(20, 48, 2, 5)])
def test_attention_with_slopes_agrees_with_numpy(call, shape):
    slopes = np.float32([0.5**head for head in range(shape.kv_heads * shape.group)])
    texts = [text("F16", shape, *position, seed) for seed, position in enumerate(MIXED)]
    got = attend(call, "F16", shape, texts, 3, slopes=slopes)
    for rows, one in zip(got, texts, strict=True):
        assert nmse(rows, exact_attention(shape, one, slopes=slopes)) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES + MIXTURES)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("shape", [Shape(64, 64, 2, 1), Shape(48, 32, 2, 6)])
def test_a_sequence_gets_the_same_bits_alone_and_among_others(call, name, shape, window):
    """Check also scattered pages."""
    texts = [text(name, shape, *position, seed) for seed, position in enumerate(MIXED)]
    together = for_any_parts(lambda parts: np.concatenate(attend(call, name, shape, texts, parts, window=window)))
    alone = [attend(call, name, shape, [one], 2, window=window)[0] for one in texts]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    for seed in range(3):
        got = attend(call, name, shape, texts[::-1], 3, window=window, scattered=True, seed=seed)
        np.testing.assert_array_equal(together, np.concatenate(got[::-1]))


def test_attention_of_more_sequences_than_are_split_agrees_with_numpy(call):
    shape = Shape(32, 32, 2, 2)
    texts = [text("F16", shape, 1, 200 + 11 * seed, seed) for seed in range(100)]
    for rows, one in zip(attend(call, "F16", shape, texts, 3, scattered=True), texts, strict=True):
        assert nmse(rows, exact_attention(shape, one)) < 1e-11


@pytest.mark.parametrize("scale", [1e-4, 100])
def test_attention_with_flat_and_extreme_scores_does_not_overflow(call, scale):
    shape = Shape(64, 64, 2, 2)
    for tokens in (1, 8, 20):
        one = text("F32", shape, tokens, 700)
        one = one._replace(q=scale * 3 * one.q)
        got = attend(call, "F32", shape, [one], 3)[0]
        assert nmse(got, exact_attention(shape, one)) < 1e-7  # 3e-8 without FMA


@pytest.mark.parametrize("name", BLOCKS)
def test_a_head_of_zeros_averages_the_values(call, name):
    """Its scale is zero, so all keys are equal."""
    for tokens in (1, 30):
        one = text(name, Shape(64, 64, 1, 1), tokens, 40)
        got = attend(call, name, Shape(64, 64, 1, 1), [one._replace(keys=0 * one.keys)])[0]
        np.testing.assert_allclose(got[-1], one.values[:, 0].mean(axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("side", ["keys", "values", "q"])
@pytest.mark.parametrize(("tokens", "length"), [(1, 40), (1, 1000), (8, 300), (30, 300)])
def test_nan_in_keys_values_or_queries_stays_visible(call, side, softcap, tokens, length):
    shape = Shape(64, 64, 1, 2)
    one = text("F32", shape, tokens, length)
    if side == "q":
        one.q[:, [3, 67]] = np.nan
    else:
        getattr(one, side)[0, :, 3] = np.nan
    got = attend(call, "F32", shape, [one], softcap=softcap)[0]
    assert np.isnan(got if side != "values" else got[:, [3, 67]]).all()


def test_lists_of_cache_types_agree():
    """Compare the modules' lists, which exist because some modules import neither NumPy nor Numba."""
    assert list(cache.STORAGE) == NAMES
    lists = storage.STORAGE, remembered.ROUNDING, [name.lower() for name in NAMES]
    assert len({tuple(sorted(names)) for names in lists}) == 1
    help = next(option.help for option in list_params("run") if option.name == "kv_type")
    assert all(name.lower() in help for name in NAMES)
