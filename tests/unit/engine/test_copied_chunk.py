"""Test copying tokens from the middle of another sequence: keys are rotated to their new positions."""

from pathlib import Path

import numpy as np
import pytest
import tiny_model
from tiny_hybrid import write_tiny_hybrid
from tiny_model import write_tiny_model

from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile

TOKENS = np.random.default_rng(5).integers(0, 256, 400).tolist()


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


@pytest.fixture
def opened():
    """Return a function that opens engines and closes them after the test."""
    engines = []

    def open_engine(path: Path, kv_type: str = "f32", backend: str = "cpu") -> Engine:
        engines.append(Engine(GGUFFile.open(path), EngineOptions(2, 2048, kv_type, backend)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def one_layer(tmp_path, monkeypatch) -> Path:
    """Write a model whose keys and values depend on their own tokens only."""
    monkeypatch.setattr(tiny_model, "LAYERS", 1)
    return write_tiny_model(tmp_path / "one.gguf", context=2048)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize(("begin", "first", "count"), [(40, 170, 101), (200, 7, 130), (64, 64, 64), (0, 3, 65)])
def test_copied_tokens_equal_computed_ones_in_a_model_of_one_layer(
    opened, one_layer, backend, kv_type, begin, first, count
):
    """Copy to earlier, later and the same positions, across pages."""
    engine = opened(one_layer, kv_type, backend)
    source, got, alone = (engine.sequence() for _ in range(3))
    source.append(TOKENS[:300], "none")
    if begin:
        got.append(TOKENS[100 : 100 + begin], "none")
    assert engine.append_copies(got, source, first, count)
    assert (got.exact, got.tokens[begin:]) == (begin, TOKENS[first : first + count])
    alone.append(got.tokens, "none")
    bound = {"f32": 1e-10, "f16": 1e-6, "q8_0": 1e-4}.get(kv_type, 2e-2)  # keys are rounded twice
    assert nmse(*(some.append(TOKENS[350:390], "all") for some in (got, alone))) < bound
    expected = engine.sequence()
    expected.append(TOKENS[:300], "none")  # the other one is as it was
    np.testing.assert_array_equal(source.append([7]), expected.append([7]))


def test_a_sequence_is_exact_up_to_its_first_copied_token(opened, one_layer):
    engine = opened(one_layer)
    source, got = engine.sequence(), engine.sequence()
    source.append(TOKENS[:300], "none")
    got.append(TOKENS[:80], "none")
    engine.append_copies(got, source, 100, 50)
    fork = got.fork()
    assert fork.exact == got.exact == 80
    fork.truncate(80)
    assert fork.exact > 10**6 and got.exact == 80


def test_tokens_whose_windows_were_dropped_cannot_be_copied(opened, model_path):
    engine = opened(model_path("gemma3"))
    source, got = engine.sequence(), engine.sequence()
    for _ in range(2):
        source.append(TOKENS * 2, "none")
    got.append(TOKENS[:10], "none")
    assert not engine.append_copies(got, source, 0, 64)
    assert len(got.tokens) == 10 and got.append([7]).shape[0] == 1
    assert engine.append_copies(got, source, 1500, 64)


def test_copying_is_refused_for_recurrent_models(opened, tmp_path):
    engine = opened(write_tiny_hybrid(tmp_path / "hybrid.gguf"))
    source, got = engine.sequence(), engine.sequence()
    source.append(TOKENS[:100], "none")
    assert not engine.can_shift
    with pytest.raises(UsageError, match="recurrent layers"):
        engine.append_copies(got, source, 10, 64)
