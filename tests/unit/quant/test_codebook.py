"""Compare quantizers of the i-quants with one that tries every code; `gguf` decodes."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize

from localllm.quant import encode
from localllm.quant.codebook import choose_d, load_codebook
from localllm.quant.formats import BY_NAME

pytestmark = pytest.mark.sampled("name", always=("IQ3_XXS",))  # to compile all searches takes minutes

ENCODERS = {
    name: encode.ENCODERS[name] for name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
}

every_format = pytest.mark.parametrize("name", ENCODERS)


def decoded(name: str, weights: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Encode and decode weights, float32 [rows, columns]; the output is not zero before."""
    out = np.full((weights.shape[0], BY_NAME[name].row_bytes(weights.shape[1])), 0xA5, dtype=np.uint8)
    ENCODERS[name](weights, importance, out)
    return dequantize(out, GGMLQuantizationType[name])


def error(weights: np.ndarray, result: np.ndarray, importance: np.ndarray) -> float:
    return float((importance * (weights - result.astype(np.float64)) ** 2).sum())


def some_weights(columns: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((3, columns)).astype(np.float32)


def some_importance(columns: int) -> np.ndarray:
    return np.exp(np.random.default_rng(4).standard_normal(columns)).astype(np.float32)


def least_of_vectors(name: str, scale: float, weights: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Return each vector's least error over all codes, for shifts + and -: float [2, vectors]."""
    grid = load_codebook("IQ1_S" if name == "IQ1_M" else name).grid
    w, i = weights.reshape(-1, 1, grid.shape[1]), importance.reshape(-1, 1, grid.shape[1])
    shifts = [0.125, -0.125] if name.startswith("IQ1") else [0, 0]
    return np.stack([(i * (w - scale * (grid + shift)) ** 2).sum(axis=2).min(axis=1) for shift in shifts])


def least(name: str, weights: np.ndarray, importance: np.ndarray, groups: int, multiples: np.ndarray) -> float:
    """Return a small error of a block of 256: the least for 15 values of d, all multiples and all codes."""
    weights = weights.astype(np.float64) if name.startswith("IQ1") else np.abs(weights).astype(np.float64)
    reach = load_codebook("IQ1_S" if name == "IQ1_M" else name).grid.max()
    best = np.inf
    for d in np.abs(weights).max() / reach / multiples[-1] / np.linspace(0.7, 2.2, 15):
        total = 0.0
        for w, i in zip(weights.reshape(groups, -1), importance.reshape(groups, -1), strict=True):
            vectors = np.stack([least_of_vectors(name, d * m, w, i) for m in multiples])  # [multiples, 2, vectors]
            total += vectors.sum(axis=2).min() if name == "IQ1_S" else vectors.min(axis=1).sum(axis=1).min()
        best = min(best, total)
    return best


@pytest.mark.parametrize(
    ("name", "groups", "bits"), [("IQ3_S", 8, 4), ("IQ2_S", 16, 4), ("IQ1_S", 8, 3), ("IQ1_M", 16, 3)]
)
def test_errors_are_close_to_those_of_trying_every_code(name: str, groups: int, bits: int):
    for importance in (np.ones(256, np.float32), some_importance(256)):
        weights = some_weights(256)[:2]
        result = error(weights, decoded(name, weights, importance), importance)
        assert result <= 1.02 * sum(least(name, w, importance, groups, np.arange(1, 2 << bits, 2)) for w in weights)


@every_format
def test_importance_reduces_the_error_of_important_columns(name: str):
    weights, importance = some_weights(1024), some_importance(1024)
    plain, important = decoded(name, weights), decoded(name, weights, importance)
    assert error(weights, important, importance) < error(weights, plain, importance)
    assert error(weights, plain, np.ones(1024)) < error(weights, important, np.ones(1024))


@pytest.mark.parametrize(("name", "share"), [("IQ3_XXS", 0.035), ("IQ2_XS", 0.09), ("IQ2_XXS", 0.115)])
def test_an_even_number_of_signs_costs_little(name: str, share: float):
    """For normal weights, llama.cpp's quantizers leave 0.046, 0.090 and 0.118 of the power as error."""
    weights = np.random.default_rng(6).standard_normal((8, 1024)).astype(np.float32)
    assert error(weights, decoded(name, weights), np.ones(1024)) <= share * np.sum(weights.astype(np.float64) ** 2)


@every_format
def test_encoding_decoded_weights_again_loses_little(name: str):
    weights = some_weights(1024)
    held = decoded(name, weights)
    again = decoded(name, held)
    assert error(held, again, np.ones(1024)) <= 0.05 * error(weights, held, np.ones(1024))


@every_format
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_are_encoded_independently(name: str, rows: int):
    weights, importance = some_weights(768), some_importance(768)
    one_by_one = [decoded(name, weights[row : row + 1], importance) for row in range(rows)]
    together = decoded(name, weights[:rows], importance)
    assert together.tobytes() == b"".join(row.tobytes() for row in one_by_one)


@every_format
def test_zeros_stay_zero(name: str):
    weights = some_weights(768)
    weights[1, 256:512] = 0
    weights[2] = 0
    assert not decoded(name, weights)[1, 256:512].any()
    assert not decoded(name, weights)[2].any()


@every_format
@pytest.mark.parametrize("size", [3e38, 1e7, 1, 1e-4, 1e-7, 1e-9, 1e-38, 1e-44])
def test_weights_of_any_size_decode_better_than_zeros(name: str, size: float):
    weights = np.random.default_rng(1).uniform(-1, 1, (2, 512)) * size
    result = decoded(name, weights.astype(np.float32))
    assert np.isfinite(result).all()
    assert error(weights, result, np.ones(512)) <= np.sum(weights**2)
    if 1e-4 <= size <= 1:
        assert error(weights, result, np.ones(512)) <= 0.3 * np.sum(weights**2)


@every_format
def test_an_outlier_among_zeros_stays_finite(name: str):
    weights = np.zeros((1, 512), dtype=np.float32)
    weights[0, 7], weights[0, 300] = 1000, -1e-38
    result = decoded(name, weights)
    assert np.isfinite(result).all()
    assert error(weights, result, np.ones(512)) <= 1000**2


@every_format
def test_importance_of_zero_counts_as_equal_importance(name: str):
    weights, importance = some_weights(512), np.zeros(512, dtype=np.float32)
    assert decoded(name, weights, importance).tobytes() == decoded(name, weights).tobytes()
    importance[256:] = np.tile([1, 0], 128)
    assert error(weights, decoded(name, weights, importance), importance) < error(
        weights, decoded(name, weights), importance
    )


@pytest.mark.parametrize("right", range(4))
def test_the_chosen_block_scale_minimizes_the_rounding_error_of_the_scales(right: int):
    """Groups that gain nothing, whose scale is zero, must not count."""
    shares = np.array([0.83, 0.9, 1.07, 1.21], np.float32)
    d = np.float32(0.01)
    largest = np.float32(31)
    scales = d * np.array([1, 3, 7, 0, 15, 21, 5, 0], np.float32)
    scales[2] = d * shares[right] * largest  # so that it is the greatest, and d one of those that are tried
    gains = np.array([1, 2, 0.1, 0, 3, 1, 2, 0], np.float32)
    assert choose_d(scales, gains, 31, shares) == pytest.approx(d, rel=1e-6)
