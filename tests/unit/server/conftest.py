"""Provide a worker without a thread."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from localllm.server import model_pool as model_pool
from localllm.server import worker
from localllm.server.worker import Worker


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a worker whose thread does nothing, and all its batches."""
    batches: list[Any] = []

    def begin(source: Any, parallel: int | None, *, live: bool, memory: int | None) -> Any:
        assert (parallel, live, memory) == (4, True, 99)
        batch = SimpleNamespace(waiting=[1], running=[1, 2], dropped=[], closed=0)
        batch.cancel = batch.dropped.append
        batch.close = lambda: setattr(batch, "closed", batch.closed + 1)
        batches.append(batch)
        return batch

    no_thread = SimpleNamespace(start=lambda: None, join=lambda: None)
    stand_in = SimpleNamespace(Condition=threading.Condition, Thread=lambda **_: no_thread)
    counted: list[Any] = []
    count = {
        name: lambda each, name=name: counted.append((name, each)) for name in ("record_finished", "record_cancelled")
    }
    histogram = {name: SimpleNamespace(add=lambda each, name=name: counted.append((name, each)))
                 for name in ("first_token", "between_tokens")}  # fmt: skip
    monkeypatch.setattr(worker, "threading", stand_in)
    model: Any = SimpleNamespace(batch=begin)
    metrics: Any = SimpleNamespace(**count, **histogram)
    return Worker(model, metrics, 4, 99), batches, counted
