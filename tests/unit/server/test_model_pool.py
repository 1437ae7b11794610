"""Test the model pool: loading, unloading, memory; and stored conversations."""

import asyncio
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from localllm.files.gguf.file import GGUFFile
from localllm.server import model_pool as model_pool
from localllm.server.metrics import Metrics
from localllm.server.model_pool import ModelEntry, ModelPool, UnknownModelError
from localllm.server.page import keep_stored_details


@pytest.mark.parametrize(("texts", "known"), [("abc", "abc"), ("axc", "a"), ("ab", "ab"), ("abcd", "abc"), ("x", "")])
def test_stored_details_are_kept_up_to_the_first_changed_message(texts: str, known: str):
    """Drop the details of all messages after it."""
    old = [{"role": "user", "content": text, "tokens": 5} for text in "abc"]
    new = [{"role": "user", "content": text} for text in texts]
    messages = keep_stored_details(old, new)
    assert [message["content"] for message in messages] == [*texts]
    assert "".join(message["content"] for message in messages if "tokens" in message) == known


LARGEST = 4 * model_pool.OVERHEAD_BYTES  # what engines hold of weights
TAKES = {"a": 1, "b": 2, "c": 3, "huge": 9}  # times WORKING, which is a part of it


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a pool of models with known sizes, and the list of events."""
    happened: list[Any] = []

    def opened(path: str) -> Any:
        happened.append(f"open {path}")
        weights = (TAKES[path] - 1) * model_pool.OVERHEAD_BYTES
        return SimpleNamespace(
            memory=min(weights, LARGEST), path=path,
            engine=SimpleNamespace(
                streamed_bytes=max(weights - LARGEST, 0),
                get_disk_statistics=lambda: {"read_bytes": 7.0} if weights > LARGEST else {},
            ),
            close=lambda: happened.append(f"close {path}"),
        )  # fmt: skip

    def working(model: Any, metrics: Metrics, parallel: int | None, room: int | None) -> Any:
        happened.append((model.path, parallel, room))
        end = lambda: happened.append(f"end {model.path}")  # noqa: E731
        return SimpleNamespace(model=model, close=end, running=2, waiting=3)

    def make(memory: int | None, parallel: int | None = None) -> tuple[ModelPool, list[Any]]:
        return ModelPool({name: name for name in TAKES}, opened, Metrics(), memory, parallel), happened

    monkeypatch.setattr(model_pool, "Worker", working)
    monkeypatch.setattr(ModelEntry, "needed_bytes", property(lambda book: TAKES[book.path] * model_pool.OVERHEAD_BYTES))
    return make


def test_the_least_recently_used_model_is_unloaded(library):
    pool, happened = library(5 * model_pool.OVERHEAD_BYTES, 7)

    async def use() -> None:
        for name in ("a", "b", "a", "c"):  # the last needs all of what b has
            async with pool.use(name) as it:
                assert it.model.path == name and pool.resolve(name).active_requests == 1
            await asyncio.sleep(0.001)
        assert pool.count_requests() == (4, 6) and pool.resolve("b").model is None and pool.resolve("b").held_bytes == 0
        held = 4.0 * model_pool.OVERHEAD_BYTES
        assert await pool.measure_memory() == {
            "models_open": 2.0, "memory_held_bytes": held, "memory_allowed_bytes": 5.0 * model_pool.OVERHEAD_BYTES,
        }  # fmt: skip
        pool.resolve("a").model.memory += 300
        assert (await pool.measure_memory())["memory_held_bytes"] == held + 300
        await pool.close()

    asyncio.run(use())
    room = {name: (5 - TAKES[name]) * model_pool.OVERHEAD_BYTES for name in TAKES}
    assert happened == [
        *["open a", ("a", 7, room["a"]), "open b", ("b", 7, room["b"]), "end b", "close b"],
        *["open c", ("c", 7, room["c"]), "end a", "close a", "end c", "close c"],
    ]


def test_a_model_larger_than_memory_runs_alone(library):
    pool, happened = library(5 * model_pool.OVERHEAD_BYTES)

    async def use() -> None:
        async with pool.use("a"):
            pass
        assert pool.measure_disk() == {}
        async with pool.use("huge"):
            assert (await pool.measure_memory())["memory_held_bytes"] == 5.0 * model_pool.OVERHEAD_BYTES
            assert pool.measure_disk() == {"read_bytes": 7.0}
        await pool.close()

    asyncio.run(use())
    assert [each for each in happened if isinstance(each, str)][:4] == ["open a", "end a", "close a", "open huge"]


def test_a_model_waits_until_others_are_no_longer_used(library):
    pool, happened = library(3 * model_pool.OVERHEAD_BYTES)

    async def use() -> None:
        async def third() -> str:
            async with pool.use("c") as it:
                return it.model.path

        async with pool.use("b"):
            waiting = asyncio.ensure_future(third())
            while not pool._waiting:
                await asyncio.sleep(0.001)
            assert pool.resolve("c").worker is None
        assert await asyncio.wait_for(waiting, 60) == "c" and pool._waiting == 0

    asyncio.run(use())
    assert [each for each in happened if isinstance(each, str)] == ["open b", "end b", "close b", "open c"]


def test_models_are_resolved_by_name_or_file(library):
    books = ModelPool({"small": "s.gguf", "large": "l.gguf"}, library, Metrics()).entries
    assert [(name, book.name, book.path) for name, book in books.items()] == [
        ("small", "small", "s.gguf"), ("large", "large", "l.gguf")
    ]  # fmt: skip
    assert all(
        book.worker is book.model is None and (book.active_requests, book.last_used) == (0, 0.0)
        for book in books.values()
    )


def test_memory_is_estimated_before_a_model_is_opened(monkeypatch: pytest.MonkeyPatch):
    """Add weights, projector and working memory, and close the file again."""
    closed: list[str] = []

    @contextmanager
    def opened(path: str) -> Any:
        yield SimpleNamespace(nbytes=1000)
        closed.append(path)

    monkeypatch.setattr(GGUFFile, "open", opened)
    monkeypatch.setattr("localllm.files.models_folder.get_projector_size", lambda path: 20 if path == "m.gguf" else 0)
    assert ModelEntry("m", "m.gguf").needed_bytes == 300_001_020 and closed == ["m.gguf"]
    assert ModelEntry("n", "n.gguf").needed_bytes == 300_001_000


def test_a_pool_without_a_limit_keeps_all_models(library, tmp_path):
    pool, happened = library(None)

    async def use() -> None:
        async with pool.use(None), pool.use("huge"):
            assert await pool.measure_memory() == {
                "models_open": 2.0,
                "memory_held_bytes": 6.0 * model_pool.OVERHEAD_BYTES,
            }

    asyncio.run(use())
    assert happened[1] == ("a", None, None) and pool.resolve(None) is pool.entries["a"]
    with pytest.raises(UnknownModelError, match=rf"^model '{'x' * 100}' not found; available models: a, b, c, huge$"):
        pool.resolve("x" * 101)
    (tmp_path / "m").write_bytes(b"")
    os.utime(tmp_path / "m", (5, 77.9))
    assert (
        ModelEntry("m", str(tmp_path / "m")).created == 77
        and abs(ModelEntry("n", str(tmp_path / "n")).created - time.time()) < 99
    )
