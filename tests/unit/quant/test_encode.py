"""Compare quantizers with simpler and exhaustive ones, and encode odd matrices."""

import gguf
import numpy as np
import pytest
from kernel_calls import dequantized

from localllm.quant.encode import ENCODERS, encode
from localllm.quant.formats import BY_NAME

pytestmark = pytest.mark.sampled("name", always=("Q4_0",))  # to compile all searches takes minutes

FLOATS = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8}  # largest relative errors
# Format: (weights that share a scale, codes, whether they also share a minimum).
CODES = {
    "Q4_0": (32, 16, False),
    "Q4_1": (32, 16, True),
    "Q5_0": (32, 32, False),
    "Q5_1": (32, 32, True),
    "Q8_0": (32, 256, False),
    "Q2_K": (16, 4, True),
    "Q3_K": (16, 8, False),
    "Q4_K": (32, 16, True),
    "Q5_K": (32, 32, True),
    "Q6_K": (16, 64, False),
}  # fmt: skip
RANDOM = np.random.default_rng(11)
COLUMNS = 512
MATRICES = {
    "normal": RANDOM.standard_normal((24, COLUMNS)),
    "heavy-tailed": RANDOM.standard_t(3, (24, COLUMNS)) * 0.02,
    "shifted": RANDOM.standard_normal((24, COLUMNS)) * 0.1 - 0.2,
    "uneven": RANDOM.standard_normal((24, COLUMNS))
    * np.repeat(np.exp(RANDOM.standard_normal((24, 16)) * 2), 32, axis=1),
}
MATRICES = {name: matrix.astype(np.float32) for name, matrix in MATRICES.items()}
IMPORTANCE = np.exp(RANDOM.standard_normal(COLUMNS) * 1.5).astype(np.float32)


def decode(name: str, blocks: np.ndarray) -> np.ndarray:
    """Decode blocks to float32 [rows, columns] by another implementation."""
    return dequantized(name, blocks)


def error(weights: np.ndarray, decoded: np.ndarray, importance: np.ndarray | None) -> float:
    squares = (weights.astype(np.float64) - decoded) ** 2
    return float(np.sum(squares if importance is None else squares * importance))


def rounded(name: str, weights: np.ndarray) -> np.ndarray:
    """Round each group of weights to a grid over its range, with exact scales."""
    size, codes, has_minimum = CODES[name]
    groups = weights.astype(np.float64).reshape(-1, size)
    if has_minimum:
        low = np.minimum(groups.min(1, keepdims=True), 0 if name.endswith("K") else np.inf)
        step = (groups.max(1, keepdims=True) - low) / (codes - 1)
    else:
        low, step = 0, np.abs(groups).max(1, keepdims=True) / (codes // 2)
    step = np.maximum(step, 1e-30)
    lowest, highest = (0, codes - 1) if has_minimum else (-codes // 2, codes // 2 - 1)
    return (np.clip(np.rint((groups - low) / step), lowest, highest) * step + low).reshape(weights.shape)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_rounded_to_nearest(name: str):
    weights = np.concatenate([MATRICES["uneven"], MATRICES["normal"] * np.float32(1e-6)])
    error = np.abs(decode(name, encode(name, weights)) - weights)
    assert np.all(error <= np.maximum(np.abs(weights) * FLOATS[name], 2.0**-25 if name == "F16" else 0))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_large_floats_never_become_infinite(name: str):
    largest = np.finfo(np.float32).max
    weights = np.array([[largest, -largest, 65504, -65519, 65520, 0, -0.0, 1]], np.float32)
    decoded = decode(name, encode(name, weights))
    assert np.all(np.isfinite(decoded))
    assert np.array_equal(np.sign(decoded), np.sign(weights))
    with np.errstate(over="ignore"):
        others = decode(name, gguf.quantize(weights, gguf.GGMLQuantizationType[name]))
    assert np.array_equal(decoded[np.isfinite(others)], others[np.isfinite(others)])


@pytest.mark.parametrize("weighting", ["plain", "importance"])
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", CODES)
def test_the_error_is_less_than_that_of_rounding(name: str, matrix: str, weighting: str):
    importance = IMPORTANCE if weighting == "importance" else None
    weights = MATRICES[matrix]
    ours = error(weights, decode(name, encode(name, weights, importance)), importance)
    assert ours < error(weights, rounded(name, weights), importance)


@pytest.mark.parametrize(("name", "slack"), [("Q4_0", 1.02), ("Q5_0", 1.06), ("Q8_0", 1.25)])
def test_scales_are_nearly_the_best_of_all(name: str, slack: float):
    codes = CODES[name][1]
    bottom, top = (-127, 127) if name == "Q8_0" else (-codes // 2, codes // 2 - 1)
    weights = MATRICES["normal"][:4, :32]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[(np.abs(halves) > 1 / codes) & (np.abs(halves) < 12 / codes)].astype(np.float64)[:, None]
    best = sum(
        np.min(np.sum((row - halves * np.clip(np.rint(row / halves), bottom, top)) ** 2, axis=1)) for row in weights
    )
    assert error(weights, decode(name, encode(name, weights)), None) < best * slack


@pytest.mark.parametrize("name", CODES)
def test_importance_moves_the_error_to_less_important_columns(name: str):
    weights = MATRICES["normal"]
    plain, weighted = decode(name, encode(name, weights)), decode(name, encode(name, weights, IMPORTANCE))
    assert error(weights, weighted, IMPORTANCE) < error(weights, plain, IMPORTANCE)
    assert error(weights, weighted, None) > error(weights, plain, None)


@pytest.mark.parametrize("name", ENCODERS)
def test_only_ratios_of_the_importance_count(name: str):
    blocks = encode(name, MATRICES["normal"], IMPORTANCE)
    for factor in (2.0**-80, 2.0**80):
        assert np.array_equal(encode(name, MATRICES["normal"], IMPORTANCE * np.float32(factor)), blocks)
    alike = encode(name, MATRICES["normal"])
    assert np.array_equal(encode(name, MATRICES["normal"], np.zeros(COLUMNS, np.float32)), alike)
    half = np.where(np.arange(COLUMNS) < 256, 0, IMPORTANCE).astype(np.float32)  # whole blocks without any importance
    decoded = decode(name, encode(name, MATRICES["normal"], half))
    most = 0.37 if name == "Q1_0" else 0.3  # signs and one size leave 1 - 2 / pi of normal numbers
    assert error(MATRICES["normal"], decoded, None) < most * error(MATRICES["normal"], np.zeros(1), None)


@pytest.mark.parametrize("name", CODES)
def test_scaling_by_powers_of_two_scales_the_result(name: str):
    weights = MATRICES["normal"]
    decoded = decode(name, encode(name, weights))
    assert np.array_equal(decode(name, encode(name, weights * 8)), decoded * 8)


@pytest.mark.parametrize("name", CODES)
def test_encoding_representable_weights_loses_nearly_nothing(name: str):
    """Types with float16 scales whose codes use their whole range lose nothing."""
    weights = MATRICES["normal"]
    once = decode(name, encode(name, weights))
    again = decode(name, encode(name, once))
    allowed = 0 if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1") else 0.03
    assert error(once, again, None) <= allowed * error(weights, once, None)


@pytest.mark.parametrize("name", ENCODERS)
def test_zeros_stay_zeros(name: str):
    weights = MATRICES["normal"].copy()
    weights[0], weights[1, :256], weights[2, 256:] = 0, 0, -0.0
    decoded = decode(name, encode(name, weights))
    assert not np.any(decoded[0]) and not np.any(decoded[1, :256]) and not np.any(decoded[2, 256:])
    assert np.any(decoded[1, 256:]) and np.any(decoded[2, :256])


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-8, 1e-7, 3e-6, 1e4, 1e6, 1e30])
@pytest.mark.parametrize("name", CODES)
def test_sizes_beyond_float16_scales_are_clipped(name: str, size: float):
    """Weights that no float16 times a code can reach become too small, those below all of them zero."""
    weights = MATRICES["normal"][:2] * np.float32(size)
    for importance in (None, IMPORTANCE):
        decoded = decode(name, encode(name, weights, importance))
        assert np.all(np.isfinite(decoded))
        assert error(weights, decoded, importance) <= error(weights, np.zeros(1), importance)
        assert not np.any(decoded) or np.sum(decoded.astype(np.float64) * weights) > 0


SHAPES = {
    "one weight": lambda i: (i == 37) * 3.0,
    "one negative weight": lambda i: (i == 37) * -3.0,
    "an outlier": lambda i: np.where(i == 37, 1000, np.sin(i)),
    "constant": lambda i: 0 * i + 0.3,
    "negative constant": lambda i: 0 * i - 0.3,
    "two values": lambda i: np.where(i % 3, 0.5, -0.25),
    "positive": lambda i: 1 + np.sin(i) / 4,
    "negative": lambda i: np.sin(i) / 4 - 1,
    "ramp": lambda i: i / 512,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CODES)
def test_unusual_blocks_lose_no_more_than_by_rounding(name: str, shape: str):
    weights = np.asarray(SHAPES[shape](np.arange(COLUMNS)), np.float32)[None]
    for importance in (None, IMPORTANCE):
        ours = error(weights, decode(name, encode(name, weights, importance)), importance)
        # Scales are float16, multiples of one that the largest sub-block dictates, where rounding has exact ones.
        slack = 5e-4 if shape == "an outlier" else 3e-6
        slack *= error(weights, np.zeros(1), importance)
        assert ours <= error(weights, rounded(name, weights), importance) + slack


@pytest.mark.parametrize("name", ENCODERS)
def test_threads_and_strides_do_not_change_the_blocks(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("localllm.quant.encode.RANGE_WEIGHTS", 3 * COLUMNS)
    weights = MATRICES["uneven"]
    blocks = encode(name, weights, IMPORTANCE)
    assert blocks.shape == (24, BY_NAME[name].row_bytes(COLUMNS)) and blocks.dtype == np.uint8
    for threads in (2, 5):
        assert np.array_equal(encode(name, weights, IMPORTANCE, threads), blocks)
    strided = np.zeros((24, 2 * COLUMNS), np.float32)
    strided[:, ::2] = weights
    assert np.array_equal(encode(name, strided[:, ::2], IMPORTANCE), blocks)
    assert np.array_equal(encode(name, weights[5:6], IMPORTANCE), blocks[5:6])
    assert encode(name, weights[:0]).shape == (0, blocks.shape[1])
    assert weights.flags.writeable


def test_weights_and_importance_of_wrong_shapes_are_refused():
    weights = MATRICES["normal"]
    with pytest.raises(ValueError, match="rows of 480 weights cannot be divided into Q4_K's blocks of 256"):
        encode("Q4_K", weights[:, :480])
    with pytest.raises(ValueError, match="512 finite numbers"):
        encode("Q4_K", weights, IMPORTANCE[:-1])
    for wrong in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match="none negative"):
            encode("Q4_K", weights, np.where(np.arange(COLUMNS) == 3, wrong, IMPORTANCE))
    with pytest.raises(KeyError):
        encode("I8", weights)
