"""Who has opened a model closes it: its threads end with it, whatever it was opened for, and whatever happened."""

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
from localllm.engine.cpu.threads import Threads
from localllm.engine.options import EngineOptions
from localllm.files.cache import prefix_files
from localllm.files.cache.prefix_files import PrefixAbout, open_prefix, write_prefix
from localllm.quantizing.imatrix import Collector
from localllm.services.evaluation.perplexity import ChunkReader

SIZE = 16  # tokens of a chunk


@pytest.fixture
def teams(monkeypatch) -> list:
    """What ends each team of threads that has begun; it is alive as long as they are."""
    begun, begin = [], Threads.__init__

    def noted(self, *given, **named):
        begin(self, *given, **named)
        begun.append(self._end)

    monkeypatch.setattr(Threads, "__init__", noted)
    return begun


def model(path: Path) -> Model:
    return localllm.open(path, threads=2)


def with_draft_model(path: Path) -> Model:
    made = localllm.open(path, threads=2)
    made.drafter(f"draft:{write_tiny_model(path.with_name('draft.gguf'), seed=1)}")
    return made


def chunks(path: Path) -> ChunkReader:
    made = ChunkReader(path, SIZE, 2)
    list(made.predict(np.full((1, SIZE), 5, np.int32)))
    return made


def collector(path: Path) -> Collector:
    path.with_name("text").write_text("hello world " * 40)
    made = Collector(path, [path.with_name("text")], path.with_name("out"), SIZE, 1, threads=2)
    list(made.read())
    return made


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("opened", [model, with_draft_model, chunks, collector])
def test_threads_end_with_what_they_were_for(
    teams: list, tmp_path: Path, opened: Callable[[Path], AbstractContextManager], is_interrupted: bool
):
    made = opened(write_tiny_model(tmp_path / "tiny.gguf"))
    with ExitStack() as stack:
        if is_interrupted:
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        with made as entered:
            assert entered is made and any(team.alive for team in teams)
            if is_interrupted:
                raise KeyboardInterrupt
    assert not any(team.alive for team in teams)
    made.close()  # a second time does nothing
    if isinstance(made, ChunkReader):
        with pytest.raises(RuntimeError, match="after shutdown"):
            made._pool.submit(int)


def fake_model(events: list[str]) -> Model:
    """A model all of whose parts tell that they are closed."""

    def part(name: str, **more: object) -> SimpleNamespace:
        return SimpleNamespace(close=lambda wait=True: events.append(name if wait else f"{name} at once"), **more)

    made = Model.__new__(Model)
    made.prefixes, made.vision, made.engine = part("prefixes"), part("vision"), part("engine", lock=None)
    made.session = SimpleNamespace(cache=SimpleNamespace(collect=lambda: None))
    made.ngrams = SimpleNamespace(save=lambda: events.append("written"))
    made._draft_models, made._embedders, made._rerankers = {"x": part("draft model")}, {None: part("reader")}, {}
    return made


ALL = ["draft model", "engine", "prefixes", "reader", "vision", "written"]


def test_a_model_closes_all_that_it_has_opened():
    """What is kept of prompts is read from the engine: that one ends last."""
    events: list[str] = []
    with fake_model(events):
        pass
    assert sorted(events) == ALL and events[-1] == "engine" and events[0] == "prefixes"


def test_nobody_waits_for_files_after_an_error():
    events: list[str] = []
    with pytest.raises(ValueError), fake_model(events):
        raise ValueError
    assert events[0] == "prefixes at once" and sorted({*events} - {"prefixes at once"}) == ALL


def test_a_reader_is_opened_once_and_with_the_models_options():
    """Each kind, and each pooling, has its own."""
    made = Model.__new__(Model)
    made._embedders, made._rerankers, made._threads, made.context = {}, {}, 3, 77
    made._opening, asked = threading.Lock(), []

    def make(options: EngineOptions) -> object:
        asked.append(options)
        return object()

    first = made._open_once(made._embedders, None, make)
    assert made._open_once(made._embedders, None, make) is first
    others = [made._open_once(made._embedders, "cls", make), made._open_once(made._rerankers, None, make)]
    assert len({id(each) for each in (first, *others)}) == 3
    assert [(each.threads, each.context) for each in asked] == [(3, 77)] * 3


def test_a_file_of_a_prompt_is_closed_whatever_it_has(tmp_path, monkeypatch):
    """One that is damaged is gone then, and so is one of another key."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    opened, key, about = [], "0" * 32, PrefixAbout("m", 3, "")
    real = open

    def noted(*given, **named):
        opened.append(real(*given, **named))
        return opened[-1]

    monkeypatch.setattr(prefix_files, "open", noted, raising=False)
    write_prefix(key, about, {"x": np.arange(9, dtype=np.uint8), "y": np.full(5, 7, np.uint8)})
    path, data = prefix_files.folder() / key, (prefix_files.folder() / key).read_bytes()
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
    (prefix_files.folder() / ("1" * 32)).write_bytes(data)
    assert open_prefix("1" * 32) is None, "whole, and of another key"
    count = len(opened)
    assert open_prefix(key) is None and len(opened) == count, "there is none"
    assert all(file.closed for file in opened)
