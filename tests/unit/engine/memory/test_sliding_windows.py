"""Test that layers with a window keep only what it needs, and give other pages back to the system."""

import numpy as np
import pytest

from localllm.arch.layer_state import SLACK, KVType, PagedState
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
    """Return the logits after the tokens, from a sequence that has dropped nothing."""
    sequence = engine.sequence()
    logits = sequence.append(tokens)  # in runs of 512, of which the first loses nothing before the last
    sequence.close()
    return logits


def read(engine: Engine, count: int):
    """Return a sequence that has read TOKENS in small runs, and its logits."""
    sequence = engine.sequence()
    for start in range(0, count, 50):
        logits = sequence.append(TOKENS[start : min(start + 50, count)])
    return sequence, logits


def test_pages_behind_the_window_are_given_back(engine):
    cache, returned = engine.backend._cache, []
    give_back = cache.give_back
    cache.give_back = lambda pages, local=False: returned.append((list(pages), local)) or give_back(pages, local)
    sequence, logits = read(engine, 500)
    lost = sequence.store._dropped
    assert lost == (450 - WINDOW - 2 * PAGE) // (2 * PAGE) * 2
    assert returned == [(list(sequence.store.table[i : i + 2]), True) for i in range(0, lost, 2)]
    cache.use(sequence.store.table[:lost])  # so that it can be read, also on Windows
    for pages, token_bytes in cache._iterate_views(local=True):
        assert not pages[:, sequence.store.table[:lost]].any()
        assert pages[:, sequence.store.table[lost], :token_bytes].any()
    np.testing.assert_allclose(logits, alone(engine, TOKENS[:500]), atol=1e-4)


def test_truncating_beyond_the_slack_computes_the_same_logits(engine):
    """Recompute nothing within the slack."""
    sequence, _ = read(engine, 500)
    assert sequence.truncate(400) == 400
    np.testing.assert_allclose(sequence.append(TOKENS[400:420]), alone(engine, TOKENS[:420]), atol=1e-4)
    kept = sequence.truncate(200)
    np.testing.assert_allclose(sequence.append(TOKENS[kept:210]), alone(engine, TOKENS[:210]), atol=1e-4)


def test_pages_that_a_shift_touched_are_given_back_again(engine):
    """Rotate keys in all pages, also in those that were given back."""
    sequence, _ = read(engine, 500)
    lost = sequence.store._dropped
    sequence.shift(0, 2 * PAGE)
    assert sequence.store._dropped == lost - 2 > 0
    sequence.append(TOKENS[500:501])
    engine.backend._cache.use(sequence.store.table[: lost - 2])
    for pages, _ in engine.backend._cache._iterate_views(local=True):
        assert not pages[:, sequence.store.table[: lost - 2]].any()


@pytest.mark.parametrize("length", [100, 70])
def test_pages_that_forks_share_are_kept(engine, length):
    """Use 70 tokens, of which the window sees two pages."""
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


def test_a_fork_of_a_sequence_without_windows_computes_them_again(engine):
    for length in (2 * PAGE, 2 * PAGE + 5):
        sequence, _ = read(engine, 500)
        assert sequence.truncate(length) == length
        fork = sequence.fork()
        np.testing.assert_allclose(fork.append([7]), alone(engine, [*TOKENS[:length], 7]), atol=1e-4)
        fork.close()
        sequence.close()


def test_memory_estimates_stop_growing_at_the_window():
    state = PagedState(0, kv_heads=2, key_dim=64, value_dim=64, window=WINDOW)
    assert state.count_bytes(100, KVType()) == 100 * 2 * 2 * 128
    assert state.count_bytes(100000, KVType()) == (WINDOW + 2 * SLACK) * 2 * 2 * 128
