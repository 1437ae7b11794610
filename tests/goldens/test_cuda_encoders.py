"""Rows of texts by Numba's simulated card, against the reference.

Two families and few tokens; scripts/platform/check_cuda.py has all of them.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from simulated import SimulatedCard

from localllm.engine.cuda import backend as card_texts
from localllm.engine.cuda import devices
from localllm.engine.options import EngineOptions
from localllm.kernels.table import PAGE
from tests.goldens.test_encoders import nmse, opened

TEXTS = [np.array([5, 9]), np.array([3])]


@pytest.fixture
def card(monkeypatch) -> SimulatedCard:
    """Return a simulated card instead of a real one."""
    simulated = SimulatedCard()
    monkeypatch.setattr(devices, "open_card", lambda number: simulated)
    return simulated


@pytest.mark.sampled
@pytest.mark.slow(2)
@pytest.mark.parametrize("name", ["bert", "modern_bert"])
def test_rows_on_a_card_agree_with_the_reference(model_path, card, name):
    rows = {}
    for backend in ("cuda", "reference"):
        reader = opened(model_path(name), name, backend)
        rows[backend] = reader.read(TEXTS, seconds=[1, 1] if name == "bert" else None)
        reader.close()
    assert nmse(rows["cuda"], rows["reference"]) < 1e-6
    assert not card.memory


@pytest.mark.parametrize(("context", "pages"), [(64, 8), (512, 8), (513, 9)])
def test_a_card_reads_as_many_texts_as_it_has_tables_for(monkeypatch, context, pages):
    """Count a page for the rest of each text, besides those of a run, or of the longest text."""
    opened_things, read = [], []

    def program(*given):
        opened_things.append(given)
        return SimpleNamespace(read=lambda texts, table: read.append((texts, len(table))) or np.array(texts))

    card = SimpleNamespace(name="a card", warning="slow", close=lambda: opened_things.append("closed"))
    monkeypatch.setattr(devices, "open_card", lambda number: opened_things.append(number) or card)
    monkeypatch.setattr(card_texts, "CudaCache", lambda *given: given)
    monkeypatch.setattr(card_texts, "CudaProgram", program)
    monkeypatch.setattr(card_texts, "MAX_SEQUENCES", 3)
    options = EngineOptions(backend="cuda:2")
    reader = card_texts.CudaEmbeddingRunner(["operation"], ["state"], context, options)
    cache = card, ["state"], (pages + 3) * PAGE, options.kv_cache_type, 0
    assert opened_things == [2, (card, ["operation"], cache, None, context, options, {})]
    assert (reader.name, reader.warning) == ("a card", "slow")
    for count, groups in ((1, [1]), (3, [3]), (4, [3, 1]), (7, [3, 3, 1])):
        read.clear()
        assert reader.read(range(count)).tolist() == [*range(count)]
        assert read and [(len(texts), size) for texts, size in read] == [(some, pages + 3) for some in groups]
    reader.close()
    assert opened_things.pop() == "closed"
    monkeypatch.setattr(card_texts, "CudaProgram", lambda *given: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        card_texts.CudaEmbeddingRunner(["operation"], ["state"], context, EngineOptions(backend="cuda"))
    assert opened_things[2:] == [0, "closed"]
