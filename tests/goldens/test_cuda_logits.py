"""Whole models on Numba's simulated card, against llama.cpp's logits and against the CPU.

A few families and tokens; all of them by scripts/platform/check_cuda.py.
"""

import numpy as np
import pytest
from engines import open_engine
from models.golden import Golden, kept
from simulated import SimulatedCard

from localllm.engine.cuda import devices

DENSE = {"llama": 1, "gemma2": 0}  # tokens that are read one by one behind the prompt


@pytest.fixture
def card(monkeypatch) -> SimulatedCard:
    """Return a simulated card instead of a real one."""
    simulated = SimulatedCard()
    monkeypatch.setattr(devices, "open_card", lambda number: simulated)
    return simulated


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


@pytest.mark.sampled
@pytest.mark.slow(3)
@pytest.mark.parametrize(("name", "more"), DENSE.items())
def test_dense_families_on_a_card_agree_with_llama_cpp(model_path, card, name, more):
    """Read a prompt of 9 tokens in one run, by the library, and some more, by our own products."""
    golden = Golden.load(name)
    engine = open_engine(model_path(name), context=64, kv_type="f32", backend="cuda")
    ids = golden.tokens.tolist()
    got = [engine.forward(ids[:9], 0, "all"), *(engine.forward([ids[i]], i) for i in range(9, 9 + more))]
    engine.close()
    assert nmse(kept(np.concatenate(got)), golden.prefill[: 9 + more]) < 1e-6
