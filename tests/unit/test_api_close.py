"""Test that closing a model ends its threads, whatever it was opened for and whatever happened."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_model import write_tiny_model

import localllm
from localllm.api import Model
from localllm.engine.cpu.program import TapeThreads
from localllm.engine.options import EngineOptions
from localllm.files.cache import prefix_files
from localllm.files.cache.prefix_files import PrefixChunkInfo, open_prefix, write_prefix
from localllm.quantizing.imatrix import ImportanceCollector
from localllm.services.evaluation.perplexity import PerplexityRunner

SIZE = 16  # tokens of a chunk


@pytest.fixture
def teams(monkeypatch) -> list:
    """Record what ends each team of threads that was started; it lives as long as they do."""
    begun, begin = [], TapeThreads.__init__

    def noted(self, *arguments, **named):
        begin(self, *arguments, **named)
        begun.append(self._end)

    monkeypatch.setattr(TapeThreads, "__init__", noted)
    return begun


def model(path: Path) -> Model:
    return localllm.open(path, threads=2)


def model_with_draft(path: Path) -> Model:
    opened = localllm.open(path, threads=2)
    opened.resolve_drafter(f"draft:{write_tiny_model(path.with_name('draft.gguf'), seed=1)}")
    return opened


def chunk_reader(path: Path) -> PerplexityRunner:
    reader = PerplexityRunner(path, SIZE, 2)
    list(reader.predict(np.full((1, SIZE), 5, np.int32)))
    return reader


def used_collector(path: Path) -> ImportanceCollector:
    path.with_name("text").write_text("hello world " * 40)
    opened = ImportanceCollector(path, [path.with_name("text")], path.with_name("out"), SIZE, 1, threads=2)
    list(opened.read())
    return opened


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("opened", [model, model_with_draft, chunk_reader, used_collector])
def test_threads_end_with_their_owner(
    teams: list, tmp_path: Path, opened: Callable[[Path], AbstractContextManager], is_interrupted: bool
):
    owner = opened(write_tiny_model(tmp_path / "tiny.gguf"))
    with ExitStack() as stack:
        if is_interrupted:
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        with owner as entered:
            assert entered is owner and any(team.alive for team in teams)
            if is_interrupted:
                raise KeyboardInterrupt
    assert not any(team.alive for team in teams)
    owner.close()  # a second time does nothing
    if isinstance(owner, PerplexityRunner):
        with pytest.raises(RuntimeError, match="after shutdown"):
            owner._pool.submit(int)


def fake_model(events: list[str]) -> Model:
    """Return a model whose parts record that they are closed."""

    def part(name: str, **more: object) -> SimpleNamespace:
        return SimpleNamespace(close=lambda wait=True: events.append(name if wait else f"{name} at once"), **more)

    model_made = Model.__new__(Model)
    model_made.prefixes, model_made.vision, model_made.engine = (
        part("prefixes"),
        part("vision"),
        part("engine", lock=None),
    )
    model_made.session = SimpleNamespace(cache=SimpleNamespace(collect=lambda: None))
    model_made.ngrams = SimpleNamespace(save=lambda: events.append("written"))
    model_made._draft_models, model_made._embedders, model_made._rerankers = (
        {"x": part("draft model")},
        {None: part("reader")},
        {},
    )
    return model_made


ALL = ["draft model", "engine", "prefixes", "reader", "vision", "written"]


def test_a_model_closes_all_its_parts():
    """Close the engine last, as cached prompts are read from it."""
    events: list[str] = []
    with fake_model(events):
        pass
    assert sorted(events) == ALL and events[-1] == "engine" and events[0] == "prefixes"


def test_an_error_does_not_wait_for_files():
    events: list[str] = []
    with pytest.raises(ValueError), fake_model(events):
        raise ValueError
    assert events[0] == "prefixes at once" and sorted({*events} - {"prefixes at once"}) == ALL


def test_an_embedder_is_opened_once_with_the_models_options():
    """Open one per type and pooling."""
    model_made = Model.__new__(Model)
    model_made._embedders, model_made._rerankers, model_made._threads, model_made.context = {}, {}, 3, 77
    model_made._opening, asked = threading.Lock(), []

    def make(options: EngineOptions) -> object:
        asked.append(options)
        return object()

    first = model_made._open_once(model_made._embedders, None, make)
    assert model_made._open_once(model_made._embedders, None, make) is first
    others = [
        model_made._open_once(model_made._embedders, "cls", make),
        model_made._open_once(model_made._rerankers, None, make),
    ]
    assert len({id(each) for each in (first, *others)}) == 3
    assert [(each.threads, each.context) for each in asked] == [(3, 77)] * 3


def test_a_prefix_file_is_closed_even_if_it_is_damaged(tmp_path, monkeypatch):
    """Remove a damaged one, and one with another key."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    opened, key, about = [], "0" * 32, PrefixChunkInfo("m", 3, "")
    real = open

    def noted(*arguments, **named):
        opened.append(real(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(prefix_files, "open", noted, raising=False)
    write_prefix(key, about, {"x": np.arange(9, dtype=np.uint8), "y": np.full(5, 7, np.uint8)})
    path, data = prefix_files.get_folder() / key, (prefix_files.get_folder() / key).read_bytes()
    with open_prefix(key) as kept:
        assert (kept.about, kept.parts) == (about, {"x": 9, "y": 5})
        for _ in range(2):
            assert kept.read("y").tolist() == [7] * 5 and kept.read("x").tolist() == list(range(9))
    head = len(data) - 9 - 5  # all bytes of which are behind a checksum, or are it
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(head)]
    for broken in (data[:-1], data + b"x", b"", *(data[:end] for end in range(0, head, 3)), *flipped):
        path.write_bytes(broken)
        assert open_prefix(key) is None and not path.exists()
    for at in range(head, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with open_prefix(key) as kept, pytest.raises(ValueError, match=r"[xy]: damaged"):
            assert kept.read("x" if at >= head + 9 else "y").any(), "the other one is whole"
            kept.read("x" if at < head + 9 else "y")
    path.unlink()
    (prefix_files.get_folder() / ("1" * 32)).write_bytes(data)
    assert open_prefix("1" * 32) is None, "whole, and of another key"
    count = len(opened)
    assert open_prefix(key) is None and len(opened) == count, "there is none"
    assert all(file.closed for file in opened)
