"""Test sequences of models with states: forks and truncated ones equal newly computed ones."""

from collections.abc import Sequence

import numpy as np
import pytest
from engines import FAITHFUL, SingleEngine

from tests.goldens.test_logits import nmse, opened

NAMES = [
    "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "kimi_linear", "kimi_k3", "minimax_01", "plamo2", "gemma3n_shared",
    "falcon_h1", "granitehybrid", "jamba_moe", "nemotron_h", "graniteswitch",
]  # fmt: skip
IDS, OTHERS = np.random.default_rng(0).integers(0, 272, (2, 90))


def fresh(engine: SingleEngine, ids: Sequence[int]) -> np.ndarray:
    sequence = engine.sequence()
    rows = sequence.append(ids, "all")
    sequence.close()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_forks_and_truncated_sequences_equal_new_ones(model_path, name, backend):
    engine, most = opened(model_path(name), backend), FAITHFUL if backend == "cpu" else 1e-9
    expected, other = fresh(engine, IDS), fresh(engine, [*IDS[:30], *OTHERS[:40]])
    sequence = engine.sequence()
    sequence.append(IDS[:30], "none")
    twin = sequence.fork()
    assert nmse(twin.append(OTHERS[:20], "all"), other[30:50]) < most
    assert nmse(sequence.append(IDS[30:], "all"), expected[30:]) < most
    third = twin.fork()
    assert nmse(third.append(OTHERS[20:40], "all"), other[50:]) < most
    for place in (63, 31, 30, 29, 1, 0):  # ends of runs and between them
        assert sequence.truncate(place) == place
        assert nmse(sequence.append(IDS[place:], "all"), expected[place:]) < most
    assert twin.truncate(40) == 40
    together = engine.run([(twin, OTHERS[10:40]), (engine.sequence(), IDS[:64])], "all", True)
    assert nmse(together[0], other[40:]) < most
    assert nmse(together[1], expected[:64]) < most
    engine.close()
