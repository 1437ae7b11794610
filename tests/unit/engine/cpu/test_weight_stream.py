"""Weights larger than memory: the same bits as in memory, for any budget, slow disks, errors and interrupted runs."""

import os
import random
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from adapters import random_adapter, supported_names
from models import write_model

from localllm.arch.weights import count_table_bytes
from localllm.engine import backend
from localllm.engine.cpu import memory_watch, read_ahead, weight_stream
from localllm.engine.cpu.expert_cache import ExpertCache, ExpertStack, Mixture
from localllm.engine.cpu.memory_watch import MAX_LEFT, MIN_LEFT, MemoryWatch
from localllm.engine.cpu.read_ahead import ReadAhead
from localllm.engine.cpu.weight_stream import SLOTS, choose_held, choose_slot_bytes
from localllm.engine.engine import Engine
from localllm.engine.lower import tape
from localllm.engine.options import EngineOptions
from localllm.errors import MemoryLimitError, ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.system.direct_reads import DirectFile

IDS = [5, 17, 99, 3, 200, 41, 7]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> GGUFFile:
    return GGUFFile.open(write_model("llama", tmp_path_factory.mktemp("streamed") / "llama.gguf"))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Stream matrices of any size, in slices of few matrices and reads of one block."""
    monkeypatch.setattr(weight_stream, "MIN_STREAMED_BYTES", 1)
    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", read_ahead.BLOCK)
    monkeypatch.setattr(tape, "MAX_SLICE_BYTES", 1 << 12)
    monkeypatch.setattr(backend, "WORKING_BYTES", 0)
    monkeypatch.setattr(weight_stream, "measure_reads", lambda reads: 0.0)
    monkeypatch.setattr(memory_watch, "get_private_memory", lambda: 0)  # the limits are below Python's own use


def open_engine(file: GGUFFile, share: float | None, **options) -> Engine:
    """Open a model with memory for a share of its file; None: as much as there is."""
    memory = None if share is None else int(share * file.nbytes)
    return Engine(file, EngineOptions(2, 64, "f32", memory=memory, **options))


def run_engine(engine: Engine) -> np.ndarray:
    sequence = engine.sequence()
    rows = [sequence.append(IDS, "all"), *(sequence.append([id]) for id in IDS[:4])]
    sequence.close()
    return np.concatenate(rows)


def test_tables_of_embeddings_need_no_memory(tmp_path):
    file = GGUFFile.open(write_model("gemma3n", tmp_path / "gemma3n.gguf"))
    tables = count_table_bytes(file.tensors)
    assert 0 < tables < file.nbytes
    open_with = lambda memory: Engine(file, EngineOptions(2, 64, "f32", memory=memory))  # noqa: E731
    whole, streamed = open_with(file.nbytes - tables), open_with(file.nbytes - tables - 1)
    assert whole.get_disk_statistics() == {} != streamed.get_disk_statistics()
    assert np.array_equal(run_engine(whole), run_engine(streamed))


def stream_of(engine: Engine) -> weight_stream.WeightStream:
    return engine._backend._programs[0]._streaming


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3moe", "llama4", "deepseek2_v3", "gpt_oss", "mamba2"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_streamed_weights_give_the_same_bits(family, share, tmp_path):
    file = GGUFFile.open(write_model(family, tmp_path / "model.gguf"))
    whole, streamed = open_engine(file, None), open_engine(file, share)
    for _ in range(3):
        np.testing.assert_array_equal(run_engine(streamed), run_engine(whole))
    whole.close()
    streamed.close()


def test_a_streaming_plan_stays_within_its_budget(llama):
    whole, plans = open_engine(llama, None), []
    assert stream_of(whole) is None and whole.warning is None
    for share in (0.0, 0.4, 0.8):
        engine = open_engine(llama, share)
        plans.append(stream_of(engine).plan)
        assert "GB are read for each token; the disk reads 0.0 GB/s" in engine.warning
        engine.close()
    whole.close()
    assert plans[0].held <= plans[1].held < plans[2].held < llama.nbytes
    assert len({plan.held + plan.streamed for plan in plans}) == 1


def test_streamed_weights_can_have_adapters(llama):
    lora = ((random_adapter(llama, supported_names(llama)), 1.0),)
    whole, streamed = open_engine(llama, None, lora=lora), open_engine(llama, 0.3, lora=lora)
    np.testing.assert_array_equal(run_engine(streamed), run_engine(whole))
    whole.close()
    streamed.close()


def test_a_slow_disk_changes_no_bit(llama, monkeypatch):
    read_into, chance = DirectFile.read_into, random.Random(1)

    def read_slowly(*arguments):
        time.sleep(chance.random() / 1000)
        return read_into(*arguments)

    whole = open_engine(llama, None)
    expected = run_engine(whole)
    monkeypatch.setattr(DirectFile, "read_into", read_slowly)
    streamed = open_engine(llama, 0.3)
    np.testing.assert_array_equal(run_engine(streamed), expected)
    assert streamed.get_disk_statistics()["waited_s"] > 0 and whole.get_disk_statistics() == {}
    whole.close()
    streamed.close()


@pytest.mark.parametrize(("family", "share"), [("llama", 0.75), ("llama", 0.85), ("qwen3moe", 0.6), ("qwen3moe", 0.9)])
def test_memory_given_back_and_taken_again_changes_no_bit(family, share, tmp_path, monkeypatch):
    """Let the system run short of memory at random moments, by random amounts."""
    file, chance, returned = GGUFFile.open(write_model(family, tmp_path / "model.gguf")), random.Random(3), []
    whole, streamed = open_engine(file, None), open_engine(file, share)
    expected = run_engine(whole)
    np.testing.assert_array_equal(run_engine(streamed), expected)

    def measure(self, taken):
        returned.append(taken)
        return chance.choice([0, 0, file.nbytes // 8, -min(taken, file.nbytes // 4)])

    monkeypatch.setattr(MemoryWatch, "measure", measure)
    for _ in range(6):
        np.testing.assert_array_equal(run_engine(streamed), expected)
    assert 0 == min(returned) < max(returned) < file.nbytes
    monkeypatch.setattr(MemoryWatch, "measure", lambda self, taken: -taken)
    run_engine(streamed)
    assert streamed.get_disk_statistics()["returned_bytes"] == 0
    whole.close()
    streamed.close()


def test_a_watch_requests_memory_when_half_of_the_rest_is_used(monkeypatch):
    left, watch = [400 << 20], MemoryWatch()
    monkeypatch.setattr(memory_watch, "get_available_memory", lambda: left[0])
    monkeypatch.setattr(memory_watch, "CHECK_SECONDS", 0.0)
    assert watch.measure(0) == 0
    left[0] = 250 << 20
    assert watch.measure(0) == 0
    left[0] = 150 << 20
    assert watch.measure(0) == 250 << 20
    left[0] = 500 << 20
    assert watch.measure(250 << 20) == 0
    left[0] = 700 << 20
    assert watch.measure(250 << 20) == -(100 << 20)
    left[0] = 10 << 30
    assert watch.measure(250 << 20) == -(250 << 20)
    assert MIN_LEFT < 200 << 20 < MAX_LEFT


def test_a_watch_keeps_a_process_below_its_limit(monkeypatch):
    used, watch = [700 << 20], MemoryWatch(limit=800 << 20)
    monkeypatch.setattr(memory_watch, "get_available_memory", lambda: 1 << 40)
    monkeypatch.setattr(memory_watch, "get_private_memory", lambda: used[0])
    monkeypatch.setattr(memory_watch, "CHECK_SECONDS", 0.0)
    assert watch.measure(0) == 0
    used[0] = 770 << 20
    assert watch.measure(0) == 70 << 20
    used[0] = 600 << 20
    assert watch.measure(70 << 20) == -(50 << 20)


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
@pytest.mark.parametrize("number", range(0, 60, 2))
def test_an_error_of_the_disk_ends_one_run_only(tmp_path, monkeypatch, family, number):
    read_into, left = DirectFile.read_into, [number]

    def fail_once(*arguments):
        left[0] -= 1
        if left[0] == -1:
            raise OSError(5, "Input/output error")
        return read_into(*arguments)

    file = GGUFFile.open(write_model(family, tmp_path / "model.gguf"))
    whole = open_engine(file, None)
    expected = run_engine(whole)
    monkeypatch.setattr(DirectFile, "read_into", fail_once)
    streamed = open_engine(file, 0.3 if family == "llama" else 0.6)
    with pytest.raises(ModelError, match=r"model\.gguf: cannot be read: Input/output error"):
        for _ in range(3):
            run_engine(streamed)
    np.testing.assert_array_equal(run_engine(streamed), expected)
    whole.close()
    streamed.close()


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_an_interrupted_run_can_be_repeated(tmp_path, monkeypatch, family):
    file = GGUFFile.open(write_model(family, tmp_path / "model.gguf"))
    whole, streamed = open_engine(file, None), open_engine(file, 0.3 if family == "llama" else 0.6)
    expected, wait = run_engine(whole), ReadAhead.wait
    for at in range(0, len(stream_of(streamed)._placed.slices), 3):

        def interrupt(self, index, at=at):
            if index == at:
                raise KeyboardInterrupt
            wait(self, index)

        monkeypatch.setattr(ReadAhead, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_engine(streamed)
        monkeypatch.setattr(ReadAhead, "wait", wait)
        np.testing.assert_array_equal(run_engine(streamed), expected)
    whole.close()
    streamed.close()


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be removed or shortened on Windows")
def test_a_file_that_vanishes_or_shrinks_is_one_line(tmp_path):
    for change, message in ((os.remove, "cannot be read: No such file"), (lambda p: os.truncate(p, 4096), "shorter")):
        path = write_model("llama", tmp_path / "model.gguf")
        file = GGUFFile.open(path)
        streamed = open_engine(file, 0.3)
        streamed.close()
        ahead, read = stream_of_reads(file), []
        change(path)
        ahead = ReadAhead(ahead)
        with pytest.raises(ModelError, match=message) as error:
            for index in range(len(read) or 3):
                ahead.wait(index)
        assert "\n" not in str(error.value)
        ahead.close()
        ahead.join()


def stream_of_reads(file: GGUFFile) -> list[read_ahead.Slice]:
    """Return slices that read the tensors of a file."""
    slices = []
    for index, tensor in enumerate(file.tensors.values()):
        place = file.locate(tensor.data)
        assert place is not None
        matrix = weight_stream.Matrix({}, tensor.data, *place)
        slices.append(read_ahead.Slice(index, matrix.move(np.zeros(matrix.size, np.uint8), 0), None))
    return slices


@pytest.mark.parametrize("family", ["qwen3moe", "gpt_oss", "llama4"])
def test_experts_are_cached_within_their_budget(family, tmp_path):
    """Check the cache after each token of a long run, and that chosen experts leave and come back."""
    file = GGUFFile.open(write_model(family, tmp_path / "model.gguf"))
    whole, streamed = open_engine(file, None), open_engine(file, 0.75)
    stream, expected, found = stream_of(streamed), whole.sequence(), streamed.sequence()
    cache, plan = stream.cache, stream.plan
    assert 0 < plan.cached < plan.experts
    for id in range(40):
        np.testing.assert_array_equal(found.append([id]), expected.append([id]))
        cached = sum(int(each.is_cached.sum()) * each.nbytes for each in cache.mixtures)
        assert cached == plan.cached - cache._free <= plan.cached
    statistics = streamed.get_disk_statistics()
    assert statistics["expert_hits"] > 0 and statistics["read_bytes"] > plan.experts
    assert statistics["expert_misses"] > sum(each.experts for each in cache.mixtures)
    whole.close()
    streamed.close()


def test_an_expert_that_is_used_often_stays(monkeypatch):
    """Use expert 0 in each run of a mixture whose cache has room for three of eight."""
    monkeypatch.setattr(ExpertStack, "give_back", lambda self, number: None)
    monkeypatch.setattr(ExpertStack, "list_reads", lambda self, number: iter(()))
    stack = ExpertStack(SimpleNamespace(stage=0), np.zeros((8, 2, 5), np.uint8), "path", 0)
    mixture = Mixture(None, None, [stack], None, 0)
    ahead = ReadAhead([])
    cache = ExpertCache([mixture], 3 * mixture.nbytes, ahead)
    for number in range(1, 30):
        chosen = np.array([0, 1 + number % 7])
        monkeypatch.setattr(Mixture, "read_chosen_experts", lambda self, chosen=chosen: chosen)
        cache.request(mixture)
        assert mixture.is_cached[chosen].all() and mixture.is_cached.sum() <= 3
    assert cache.misses == 1 + 29 and cache.hits == 28
    ahead.close()
    ahead.join()


def test_closing_ends_the_readers(llama):
    streamed = open_engine(llama, 0.3)
    threads = stream_of(streamed)._ahead._threads
    assert all(thread.is_alive() for thread in threads)
    streamed.close()
    assert not any(thread.is_alive() for thread in threads)


def test_memory_that_cannot_be_allocated_is_refused(llama, monkeypatch):
    def refuse(size, huge):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(weight_stream, "MemoryRegion", refuse)
    with pytest.raises(MemoryLimitError, match="GB of memory for weights cannot be allocated"):
        open_engine(llama, 0.3)


def test_slots_are_as_small_as_memory_asks_for():
    layers = [30, 60, 10] * 8
    assert choose_slot_bytes([*layers, 400]) == 60
    assert choose_slot_bytes([*layers, 100]) == 60
    assert choose_slot_bytes([*layers, 61]) == 61
    assert choose_slot_bytes([5]) == 5


def test_each_section_of_the_tape_holds_its_share():
    sizes = [10] * 30 + [400]
    held = choose_held(sizes, 400 + 150, 10)
    assert held[-1] and sum(held) == 16
    assert all(4 <= sum(held[first : first + 10]) <= 6 for first in range(0, 30, 10))
    assert not any(choose_held([10] * 5, -1, 10)) and all(choose_held([10] * 5, 50, 10))
    assert SLOTS > 1
