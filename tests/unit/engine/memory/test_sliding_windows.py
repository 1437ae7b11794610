"""Layers with a window keep what the window needs: the rest goes back to the system, and nobody reads it again."""

import numpy as np
import pytest

from localllm.arch.layer_state import SLACK, KVType, Paged
from localllm.engine.engine import Engine
from localllm.engine.memory import page_table
from localllm.engine.options import EngineOptions
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.table import PAGE

WINDOW = 16  # of the golden gemma3
TOKENS = np.random.default_rng(7).integers(0, 256, 600).tolist()


@pytest.fixture
def engine(model_path, monkeypatch):
    monkeypatch.setattr(page_table, "SLACK", 2 * PAGE)
    engine = Engine(GGUFFile.open(model_path("gemma3")), EngineOptions(2, 1024, "f32"))
    yield engine
    engine.close()


def alone(engine: Engine, tokens: list[int]) -> np.ndarray:
    """The logits after the tokens, by a sequence that has lost nothing."""
    sequence = engine.sequence()
    logits = sequence.append(tokens)  # in runs of 512, of which the first loses nothing before the last
    sequence.close()
    return logits


def read(engine: Engine, count: int):
    """A sequence that has read TOKENS in small runs."""
    sequence = engine.sequence()
    for start in range(0, count, 50):
        logits = sequence.append(TOKENS[start : min(start + 50, count)])
    return sequence, logits


def test_what_no_window_needs_goes_back(engine):
    cache, given = engine.backend._cache, []
    give_back = cache.give_back
    cache.give_back = lambda pages, local=False: given.append((list(pages), local)) or give_back(pages, local)
    sequence, logits = read(engine, 500)
    lost = sequence.store._dropped
    assert lost == (450 - WINDOW - 2 * PAGE) // (2 * PAGE) * 2
    assert given == [(list(sequence.store.table[i : i + 2]), True) for i in range(0, lost, 2)]
    cache.use(sequence.store.table[:lost])  # so that it can be read, also on Windows
    for pages, token_bytes in cache._views(local=True):
        assert not pages[:, sequence.store.table[:lost]].any()
        assert pages[:, sequence.store.table[lost], :token_bytes].any()
    np.testing.assert_allclose(logits, alone(engine, TOKENS[:500]), atol=1e-4)


def test_going_back(engine):
    """Within the slack a sequence keeps what it has; further back it begins again, and says the same."""
    sequence, _ = read(engine, 500)
    assert sequence.truncate(400) == 400
    np.testing.assert_allclose(sequence.append(TOKENS[400:420]), alone(engine, TOKENS[:420]), atol=1e-4)
    kept = sequence.truncate(200)
    np.testing.assert_allclose(sequence.append(TOKENS[kept:210]), alone(engine, TOKENS[:210]), atol=1e-4)


def test_what_was_moved_for_nothing_goes_back(engine):
    """Keys are turned in all pages, also in those that no window needs, which the system had."""
    sequence, _ = read(engine, 500)
    lost = sequence.store._dropped
    sequence.shift(0, 2 * PAGE)
    assert sequence.store._dropped == lost - 2 > 0
    sequence.append(TOKENS[500:501])
    engine.backend._cache.use(sequence.store.table[: lost - 2])
    for pages, _ in engine.backend._cache._views(local=True):
        assert not pages[:, sequence.store.table[: lost - 2]].any()


@pytest.mark.parametrize("length", [100, 70])
def test_what_forks_share_stays(engine, length):
    """Of 70 tokens, those that the window sees are on two pages."""
    sequence, _ = read(engine, length)
    fork = sequence.fork()
    sequence.append(TOKENS[length:500])
    sequence.append(TOKENS[500:501])
    assert sequence.store._dropped > 0 == fork.store._dropped
    np.testing.assert_allclose(fork.append(TOKENS[length:110]), alone(engine, TOKENS[:110]), atol=1e-4)
    fork.close()
    sequence.append(TOKENS[501:502])
    assert sequence.store._dropped > 0
    second = sequence.fork()
    np.testing.assert_allclose(second.append(TOKENS[502:504]), alone(engine, TOKENS[:504]), atol=1e-4)


def test_a_fork_has_lost_what_the_original_has(engine):
    """Who went back further than windows reach holds nothing until it reads again, nor do its forks."""
    for length in (2 * PAGE, 2 * PAGE + 5):
        sequence, _ = read(engine, 500)
        assert sequence.truncate(length) == length
        fork = sequence.fork()
        np.testing.assert_allclose(fork.append([7]), alone(engine, [*TOKENS[:length], 7]), atol=1e-4)
        fork.close()
        sequence.close()


def test_estimates():
    state = Paged(0, kv_heads=2, key_dim=64, value_dim=64, window=WINDOW)
    assert state.bytes(100, KVType()) == 100 * 2 * 2 * 128
    assert state.bytes(100000, KVType()) == (WINDOW + 2 * SLACK) * 2 * 2 * 128
