"""Provide a worker without a thread, and the page in a browser."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from browser import Tab, tab
from chat_page import SCRIPT, Page
from served import scripted, serving
from tiny_model import write_tiny_model

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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def page(browser: Tab, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """Serve two models with different weights; each test has its own origin and so its own storage."""
    from tests.integration.test_serve import THINKS

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    paths = [
        str(write_tiny_model(tmp_path / f"{name}.gguf", seed, chat_template=THINKS)) for seed, name in enumerate("ab")
    ]
    models = {
        name: lambda path=path: scripted(path, SCRIPT) for name, path in zip(("first", "second"), paths, strict=True)
    }
    browser.errors.clear()
    with serving(models) as served:
        yield Page(browser, served)
        browser.call("Page.navigate", url="about:blank")
    assert [error for error in browser.errors if "409 (Conflict)" not in error] == []
