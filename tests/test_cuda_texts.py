"""Rows of texts by a card that is Numba's simulator, against the reference.

Two families and few tokens; scripts/check_cuda.py has all of them.
"""

import numpy as np
import pytest
from simulated import SimulatedCard
from test_texts import nmse, opened

from localllm.engine.cuda import devices

TEXTS = [np.array([5, 9]), np.array([3])]


@pytest.fixture
def card(monkeypatch) -> SimulatedCard:
    """What there is instead of a card."""
    made = SimulatedCard()
    monkeypatch.setattr(devices, "open_card", lambda number: made)
    return made


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", ["bert", "modern_bert"])
def test_rows(model_path, card, name):
    found = {}
    for backend in ("cuda", "reference"):
        reader = opened(model_path(name), name, backend)
        found[backend] = reader.read(TEXTS, seconds=[1, 1] if name == "bert" else None)
        reader.close()
    assert nmse(found["cuda"], found["reference"]) < 1e-6
    assert not card.memory
