"""Whole models on a card that is Numba's simulator, against llama.cpp's logits and against the CPU.

The simulator takes seconds for a token: a few families and tokens here, all of them by scripts/check_cuda.py.
"""

import numpy as np
import pytest
from engines import open_engine
from simulated import SimulatedCard

from localllm.engine import devices

DENSE = ["llama", "qwen3", "gemma2", "phi2"]


@pytest.fixture
def card(monkeypatch) -> SimulatedCard:
    """What there is instead of a card."""
    made = SimulatedCard()
    monkeypatch.setattr(devices, "open_card", lambda number: made)
    return made


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


@pytest.mark.parametrize("name", DENSE)
def test_dense_families(shared, card, name):
    """A prompt of 3 tokens in one run, and one more."""
    golden = np.load(shared / "goldens" / "arch" / f"{name}.npz")
    engine = open_engine(shared / "goldens" / "arch" / f"{name}.gguf", context=64, kv_type="f32", backend="cuda")
    ids = golden["tokens"].tolist()
    got = np.concatenate([engine.forward(ids[:3], 0, "all"), engine.forward(ids[3:4], 3)])
    engine.close()
    assert nmse(got, golden["prefill_logits"][:4]) < 1e-6
