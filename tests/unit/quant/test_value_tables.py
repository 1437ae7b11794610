"""Compare quantizers of types with a table of values with exhaustive ones; `gguf` decodes."""

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize, quantize

from localllm.quant import encode as encoding
from localllm.quant.formats import BY_NAME

pytestmark = pytest.mark.sampled("name", always=("IQ4_NL",))  # to compile all searches takes minutes

ENCODERS = {name: encoding.ENCODERS[name] for name in ("IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0")}
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float64)
MXFP4_VALUES = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
FLOAT16 = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)  # all of them that are >= 0

every_format = pytest.mark.parametrize("name", ENCODERS)


def encode(name: str, weights: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Encode float32 [rows, columns] to uint8 [rows, bytes]; the output is not zero before."""
    out = np.full((weights.shape[0], BY_NAME[name].row_bytes(weights.shape[1])), 0xA5, dtype=np.uint8)
    ENCODERS[name](weights, importance, out)
    return out


def decoded(name: str, weights: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    return dequantize(encode(name, weights, importance), GGMLQuantizationType[name])


def matrices(columns: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield normal and heavy-tailed weights, float32 [3, columns], with equal and with uneven importance."""
    generator = np.random.default_rng(4)
    ones, uneven = np.ones(columns, np.float32), np.exp(1.5 * generator.standard_normal(columns)).astype(np.float32)
    for weights in (generator.standard_normal((3, columns)), 0.02 * generator.standard_t(3, (3, columns))):
        for importance in (ones, uneven):
            yield weights.astype(np.float32), importance


def errors(values: np.ndarray, scales: np.ndarray, weights: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Return Σ importance (weight - scale * nearest value)² for each scale: [scales]."""
    borders = (values[1:] + values[:-1]) / 2
    nearest = values[np.searchsorted(borders, weights / scales[:, None])]
    return (importance * (weights - scales[:, None] * nearest) ** 2).sum(axis=1)


def least_iq4_nl(weights: np.ndarray, importance: np.ndarray) -> float:
    """Return the least error of a block of 32 over every float16 d."""
    largest = np.abs(weights).max()
    scales = FLOAT16[(largest / 400 < FLOAT16) & (largest / 40 > FLOAT16)]
    return errors(IQ4_VALUES, np.concatenate([scales, -scales]), weights, importance).min()


def least_iq4_xs(weights: np.ndarray, importance: np.ndarray) -> float:
    """Return a small error of a block of 256: 100 float16 values of d, every scale of the groups."""
    largest = np.abs(weights).max()
    candidates = np.linspace(largest / 127 / 34, largest / 80 / 24, 100).astype(np.float16).astype(np.float64)
    scales = np.concatenate([np.arange(-32, 0), np.arange(1, 32)])
    least = np.inf
    for d in np.concatenate([candidates, -candidates]):
        parts = zip(weights.reshape(8, 32), importance.reshape(8, 32), strict=True)
        least = min(least, sum(errors(IQ4_VALUES, d * scales, w, i).min() for w, i in parts))
    return least


def least_mxfp4(weights: np.ndarray, importance: np.ndarray) -> float:
    """Return the least error of a block of 32 over every exponent."""
    return errors(MXFP4_VALUES, 2.0 ** np.arange(-127, 126), weights, importance).min()


def least_ternary(weights: np.ndarray, importance: np.ndarray) -> float:
    """Return the least error of a block of 256 with any d: over all numbers of weights that are not 0."""
    order = np.argsort(-np.abs(weights))
    size, importance = np.abs(weights[order]).astype(np.float64), importance[order].astype(np.float64)
    gain = np.cumsum(importance * size) ** 2 / np.cumsum(importance)
    return (importance * size**2).sum() - gain.max()


@pytest.mark.parametrize(
    ("name", "columns", "least", "excess"),
    [
        ("IQ4_NL", 256, least_iq4_nl, 0.003),
        ("IQ4_XS", 512, least_iq4_xs, 0.003),
        ("MXFP4", 256, least_mxfp4, 1e-6),
        ("TQ1_0", 512, least_ternary, 0.002),
        ("TQ2_0", 512, least_ternary, 0.002),
    ],
)
def test_errors_are_close_to_the_least(name: str, columns: int, least, excess: float):
    block = BY_NAME[name].block
    for weights, importance in matrices(columns):
        error = (importance * (weights - decoded(name, weights, importance).astype(np.float64)) ** 2).sum()
        parts = zip(weights.reshape(-1, block), np.tile(importance, 3).reshape(-1, block), strict=True)
        assert error <= (1 + excess) * sum(least(w.astype(np.float64), i) for w, i in parts)


@pytest.mark.parametrize("name", ["MXFP4", "TQ1_0", "TQ2_0"])
def test_errors_are_below_those_of_rounding(name: str):
    for weights, _ in matrices(512):
        rounded = dequantize(quantize(weights, GGMLQuantizationType[name]), GGMLQuantizationType[name])
        assert np.sum((weights - decoded(name, weights)) ** 2) < np.sum((weights - rounded) ** 2)


def representable(name: str) -> np.ndarray:
    """Return weights [5, 512] that the type represents exactly: random codes, scales that are not tiny."""
    generator = np.random.default_rng(list(name.encode()))
    format = BY_NAME[name]
    blocks = generator.integers(0, 256, (5 * 512 // format.block, format.bytes), dtype=np.uint8)
    d = generator.uniform(0.01, 2, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = generator.integers(1, 250, len(blocks))
        blocks[:, 1] = 0x7F  # 6 is among the values: with 3 as the largest, another exponent would do as well
    elif name.startswith("TQ"):
        codes = generator.integers(-1, 2, (len(blocks), 256)) * d.view(np.float16).astype(np.float32)
        return codes.astype(np.float32).reshape(5, 512)
    else:
        blocks[:, :2] = d
    if name == "IQ4_XS":
        blocks[:, 2] &= 0xFC  # a scale of 0 - 32: the largest
        blocks[:, 4] &= 0xF0
    return dequantize(blocks.reshape(5, -1), GGMLQuantizationType[name])


@every_format
def test_representable_weights_are_encoded_exactly(name: str):
    weights = representable(name)
    np.testing.assert_array_equal(decoded(name, weights), weights)


@every_format
@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_rows_are_encoded_independently(name: str, rows: int):
    weights = np.random.default_rng(rows).standard_normal((7, 768)).astype(np.float32)
    importance = np.random.default_rng(8).random(768).astype(np.float32)
    one_by_one = [encode(name, weights[row : row + 1], importance) for row in range(rows)]
    together = encode(name, weights[:rows], importance)
    assert together.tobytes() == b"".join(row.tobytes() for row in one_by_one)


@every_format
def test_zeros_stay_zero(name: str):
    weights = np.random.default_rng(0).standard_normal((3, 768)).astype(np.float32)
    weights[1, 256:512] = 0
    weights[2] = 0
    assert not decoded(name, weights)[1, 256:512].any()
    assert not decoded(name, weights)[2].any()


@every_format
@pytest.mark.parametrize("size", [3e38, 1e30, 1e7, 1e-4, 1e-7, 1e-9, 1e-30, 1e-38, 1e-44])
def test_weights_of_any_size_decode_better_than_zeros(name: str, size: float):
    weights = np.random.default_rng(1).uniform(-1, 1, (2, 512)) * size
    result = decoded(name, weights.astype(np.float32)).astype(np.float64)
    assert np.isfinite(result).all()
    assert np.sum((weights - result) ** 2) <= np.sum(weights**2)
    if 1e-4 <= size <= 1e4:
        assert np.sum((weights - result) ** 2) <= 0.3 * np.sum(weights**2)


@every_format
def test_an_outlier_keeps_tiny_neighbours_finite(name: str):
    weights = np.full((1, 512), 1e-30, dtype=np.float32)
    weights[0, 7], weights[0, 300] = 1000, -1e-38
    result = decoded(name, weights)
    np.testing.assert_allclose(result[0, 7], 1000, rtol=0.3)
    assert np.isfinite(result).all()


@every_format
def test_importance_of_zero_counts_as_equal_importance(name: str):
    """Zeros within a block whose other weights matter do not disturb."""
    weights = np.random.default_rng(2).standard_normal((2, 512)).astype(np.float32)
    importance = np.zeros(512, dtype=np.float32)
    assert encode(name, weights, importance).tobytes() == encode(name, weights).tobytes()
    importance[256:] = np.tile([1, 0], 128)
    plain, important = decoded(name, weights)[:, 256::2], decoded(name, weights, importance)[:, 256::2]
    assert np.sum((weights[:, 256::2] - important) ** 2) <= np.sum((weights[:, 256::2] - plain) ** 2)
