"""Test localllm bench: the measured tests, their figures, and the output."""

import gc
import json
import os
import re
import signal
import subprocess
import weakref
from contextlib import closing
from itertools import count
from math import prod
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from fake_engine import FakeEngine, FakeSequence
from terminal import Terminal
from tiny_model import write_tiny_model

from localllm.arch import load_architecture
from localllm.arch.layer_state import KVType
from localllm.arch.weights import Weights
from localllm.cli.commands import bench as bench_command
from localllm.cli.commands.bench import NARROW, IntegerList, format_cells
from localllm.engine.cpu import limits
from localllm.engine.cpu.limits import MemoryReader, measure_peak_operations, measure_read_bandwidth
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.engine.options import EngineOptions
from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.cpu import PEAK_CHAINS, PEAK_PRODUCTS
from localllm.kernels.reference import ReferenceCache
from localllm.kernels.simd import dot_bytes, select_dot
from localllm.services import bench
from localllm.services.bench import Bench, BenchResult, SpeedTestRunner, SpeedTestSpec, plan_tests
from localllm.services.inspection.inspect import MatrixCosts
from tests.integration.test_cli import ENVIRONMENT, PROGRAM, posix

SpeedTestSpec.__test__ = False  # no test case
COSTS = MatrixCosts(weight_bytes=2_000_000, per_token=3_000_000, per_logits=1_000_000)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


# What is measured.


def test_tests_are_in_the_order_of_llama_bench():
    tests = plan_tests((512, 1024), (128,), ((64, 8),), (0, 4096))
    assert [test.name for test in tests] == [
        *("pp512", "pp1024", "tg128", "pp64+tg8"),
        *("pp512 @ d4096", "pp1024 @ d4096", "tg128 @ d4096", "pp64+tg8 @ d4096"),
    ]
    assert [(test.tokens, test.end) for test in tests[-2:]] == [(128, 4224), (72, 4168)]


def test_a_zero_turns_a_default_test_off():
    assert [test.name for test in plan_tests((0,), (128,), (), (0,))] == ["tg128"]
    assert [test.name for test in plan_tests((512,), (0,), (), (0,))] == ["pp512"]
    with pytest.raises(UsageError):
        plan_tests((0,), (0,), (), (0, 4096))


class TimedEngine(FakeEngine):
    """An engine with a known time per token; `clock` replaces perf_counter."""

    def __init__(self, *seconds_per_token: float):
        """Set the seconds per token of each call; the last holds for all further calls."""
        super().__init__(vocab_size=50, say=lambda tokens: 0, context=5000)
        self.clock, self.times = 0.0, list(seconds_per_token)
        self.known: dict[int, int] = {}  # the tokens at all positions so far

    def sequence(self) -> FakeSequence:
        return TimedSequence(self, [])


class TimedSequence(FakeSequence):
    def append(self, ids, logits="last", precise=True, kernel_tokens=0):
        times, known = self.engine.times, self.engine.known
        self.engine.clock += (times.pop(0) if len(times) > 1 else times[0]) * len(ids)
        for position, token in enumerate(ids, len(self.tokens)):
            assert known.setdefault(position, token) == token, "another token at the same position"
        return super().append(ids, logits, precise)


@pytest.fixture
def course(monkeypatch):
    """Return a function that starts a speed test over an engine, with its clock and a growing bandwidth in GB/s."""

    def prepare(engine: TimedEngine, steps: list[str] | None = None) -> SpeedTestRunner:
        monkeypatch.setattr(bench, "perf_counter", lambda: engine.clock)
        speeds = count(10, 10)
        monkeypatch.setattr(bench, "measure_read_bandwidth", lambda threads: next(speeds) * 1e9 if threads == 2 else 0)
        monkeypatch.setattr(bench, "measure_peak_operations", lambda threads: threads * 3e9)
        return SpeedTestRunner(engine.sequence(), 2, COSTS, (steps if steps is not None else []).append)

    return prepare


def test_the_warm_up_is_not_counted(course):
    engine, steps = TimedEngine(9.0, 1 / 100, 1 / 200, 1 / 300), []
    result = course(engine, steps).measure(SpeedTestSpec(64, 0), repetitions=3)
    assert result.samples == pytest.approx([100, 200, 300])
    assert (result.speed, result.deviation) == pytest.approx((200, 100))
    assert engine.calls == [(0, 64)] * 4
    assert steps == [f"pp64 (threads: 2): {step}" for step in ("warming up", "run 1 of 3", "run 2 of 3", "run 3 of 3")]


def test_reads_from_the_disk_are_told_per_second(course):
    engine, read = TimedEngine(0.5), count(0, 100)
    runner = course(engine)
    assert runner.measure(SpeedTestSpec(0, 2), 1).disk == 0
    runner._read_statistics = lambda: {"read_bytes": next(read)}
    result = runner.measure(SpeedTestSpec(0, 2), 1)
    assert result.disk == pytest.approx(100 / 1.0) and result.to_dict()["disk_gb_per_s"] == pytest.approx(1e-7)


def test_decode_runs_token_by_token_after_the_depth(course):
    engine, steps = TimedEngine(1 / 50), []
    result = course(engine, steps).measure(SpeedTestSpec(0, 3, depth=1000), repetitions=2)
    assert engine.calls == [(0, 512), (512, 488), (1000, 1), *[(1000, 1), (1000, 1), (1001, 1), (1002, 1)] * 2]
    assert result.samples == pytest.approx([50, 50])
    assert steps[0] == "tg3 @ d1000 (threads: 2): filling the cache, 0 of 1000 tokens"


def test_prefill_and_decode_can_be_timed_together(course):
    engine = TimedEngine(0.0, 0.0, 0.01, 0.5, 0.5)
    result = course(engine).measure(SpeedTestSpec(100, 2), repetitions=1)
    assert engine.calls == [(0, 100), (100, 1), (0, 100), (100, 1), (101, 1)]
    assert result.samples == pytest.approx([102 / 2])
    assert (result.gb_per_s, result.share, result.gops, result.bandwidth) == (None,) * 4


def test_a_depth_is_prefilled_only_when_needed(course):
    engine = TimedEngine(1.0)
    tests = course(engine)
    for depth in (600, 600, 0, 600):
        tests.measure(SpeedTestSpec(8, 0, depth), repetitions=1)
    assert engine.calls == [
        *((0, 512), (512, 88), (600, 8), (600, 8)),
        *((600, 8), (600, 8)),
        *((0, 8), (0, 8)),
        *((0, 512), (512, 88), (600, 8), (600, 8)),
    ]


@pytest.mark.parametrize(
    ("test", "limits", "expected"),
    [
        (SpeedTestSpec(0, 2), (9e11, 7e13), (9e11, 7e13)), (SpeedTestSpec(4, 0), (9e11, 7e13), (None, 7e13)),
        (SpeedTestSpec(4, 2), (9e11, None), (None, None)), (SpeedTestSpec(0, 2), None, (10e9, None)),
        (SpeedTestSpec(4, 0), None, (None, 6e9)),
        (SpeedTestSpec(4, 2), None, (None, None)),
    ],
)  # fmt: skip
def test_known_limits_of_a_gpu_are_not_measured(course, test: SpeedTestSpec, limits: tuple | None, expected: tuple):
    """Fill no cache again for them; a prefill test needs no bandwidth."""
    engine = TimedEngine(1.0)
    speed_test = course(engine)
    tried = SpeedTestRunner(speed_test._sequence, 2, COSTS, lambda step: None, limits)
    result = tried.measure(test, 1)
    assert (result.bandwidth, result.peak) == expected
    runs = 2 + (not test.prompt and limits is None)
    assert len(engine.calls) == (runs - 1) * (bool(test.prompt) + bool(test.generated)) + (
        bool(test.prompt) + test.generated
    )


def test_random_tokens_are_always_the_same(course):
    one, other = (course(TimedEngine(1.0)) for _ in range(2))
    assert one._ids == other._ids and len(one._ids) == 5000 and {*one._ids} == {*range(50)}


def test_the_bandwidth_is_measured_before_every_run(course):
    assert course(TimedEngine(1.0)).measure(SpeedTestSpec(0, 1), 3).bandwidth == pytest.approx(20e9)
    assert course(TimedEngine(1.0)).measure(SpeedTestSpec(1, 0), 3).bandwidth is None


# The figures.


def test_decode_figures_have_bandwidth_and_share():
    result = BenchResult(SpeedTestSpec(0, 128), 2, [900.0, 1100.0, 1000.0], COSTS, bandwidth=8e9)
    assert result.to_dict() == {
        "name": "tg128",
        "depth": 0,
        "threads": 2,
        "tokens_per_s": 1000.0,
        "deviation": 100.0,
        "samples": [900.0, 1100.0, 1000.0],
        "gb_per_s": 2.0,  # 1000 times 2 MB
        "share": 0.25,
        "bandwidth_gb_per_s": 8.0,
        "gops": None,
    }


def test_prefill_figures_have_operations_per_second():
    facts = BenchResult(SpeedTestSpec(10, 0, depth=7), 1, [500.0], COSTS).to_dict()
    assert (facts["name"], facts["depth"], facts["deviation"]) == ("pp10 @ d7", 7, 0.0)
    assert facts["gops"] == pytest.approx(2 * 500 * (3e6 + 1e6 / 10) / 1e9)
    assert (facts["gb_per_s"], facts["share"]) == (None, None)


@pytest.mark.parametrize(("width", "drawn"), [(0, True), (NARROW - 1, False), (NARROW, True)])
def test_a_narrow_terminal_gets_no_frame(width: int, drawn: bool, monkeypatch, capsys):
    monkeypatch.setattr(bench_command, "get_terminal_width", lambda: width)
    model = {"path": "m.gguf", "arch": "llama", "format": "Q8_0", "parameters": 7, "size": 9, "device": "CPU"}
    bench_command.print_results(model, [], "AVX2", True)
    out = capsys.readouterr().out
    assert ("┏" in out or "+-" in out) is drawn and "llama Q8_0, 7 weights in 9 B" in " ".join(out.split())


def test_a_row_shows_shares_of_known_limits_only():
    """Show dashes or nothing for unknown figures."""
    reading = BenchResult(SpeedTestSpec(10, 0), 1, [500.0, 700.0], COSTS, peak=7.44e9)
    assert reading.share_of_peak == pytest.approx(0.5)
    assert format_cells(reading) == ("pp10", "1", "600.00 ± 141.42", "4 GOPS, 50%", "")
    assert (reading.to_dict()["share_of_peak"], reading.to_dict()["peak_gops"]) == (reading.share_of_peak, 7.44)
    assert format_cells(BenchResult(SpeedTestSpec(10, 0), 1, [600.0], COSTS)) == (
        "pp10",
        "1",
        "600.00 ± 0.00",
        "4 GOPS",
        "",
    )
    writing = BenchResult(SpeedTestSpec(0, 128), 2, [1000.0], COSTS, bandwidth=8e9)
    assert format_cells(writing) == ("tg128", "2", "1000.00 ± 0.00", "", "2.0 of 8.0 GB/s, 25%")
    assert writing.to_dict()["bandwidth_gb_per_s"] == 8
    for nowhere in (None, 0.0):
        unknown = BenchResult(SpeedTestSpec(0, 128), 2, [1000.0], COSTS, bandwidth=nowhere, peak=nowhere)
        assert (unknown.share, unknown.share_of_peak, format_cells(unknown)[3:]) == (None, None, ("", ""))
        assert not {"bandwidth_gb_per_s", "peak_gops"} & unknown.to_dict().keys()


class Counting(ReferenceBuilder):
    """A backend that counts multiply-adds and bytes of matrix products."""

    multiply_adds = weight_bytes = 0

    def linear(self, x, weight):
        self.multiply_adds += len(x) * prod(weight.shape)
        self.weight_bytes += weight.tensor.nbytes
        return super().linear(x, weight)  # type: ignore[misc]


@pytest.mark.parametrize("tied", [False, True])
def test_costs_equal_those_of_the_matrix_products(tiny: str, tied: bool):
    file = GGUFFile.open(tiny)
    tensors = {name: tensor for name, tensor in file.tensors.items() if not (tied and name == "output.weight")}
    builder = Counting([SequenceSpan(ReferenceCache(KVType("f32", "f32")), 0, np.array([5, 6, 7]), wanted=1)], {}, 512)
    model, hyperparameters = load_architecture(file)
    model.forward(builder, Weights(tensors), hyperparameters)
    costs = MatrixCosts.from_tensors(tensors)
    assert 3 * costs.per_token + costs.per_logits == builder.multiply_adds
    assert costs.weight_bytes == builder.weight_bytes
    assert costs.per_logits == prod(tensors["token_embd.weight"].shape)


def test_the_report_has_machine_model_and_tests(monkeypatch):
    """Use the highest bandwidth of all tests, and the GPU's library as lane."""
    monkeypatch.setattr(bench, "describe_processor", lambda: "a CPU")
    monkeypatch.setattr(bench, "count_usable_cores", lambda: 3)
    monkeypatch.setattr(bench, "get_lane_name", lambda: "a lane")
    benchmark = Bench("x.gguf", print)
    results = [BenchResult(SpeedTestSpec(0, 1), 2, [5.0], COSTS, bandwidth) for bandwidth in (8e9, None, 9e9)]
    machine = {"cpu": "a CPU", "lane": "a lane", "threads": 3, "bandwidth_gbs": 9.0}
    assert benchmark.report(results) == {"machine": machine, "model": {}, "tests": [one.to_dict() for one in results]}
    assert benchmark.report([])["machine"]["bandwidth_gbs"] is None
    for device, lane in (("CPU", "a lane"), ("H100", "cuBLAS")):
        benchmark.model = {"device": device}
        assert (
            benchmark.lane == benchmark.report([])["machine"]["lane"] == lane
            and benchmark.report([])["model"] == benchmark.model
        )


# Models that make vectors.


@pytest.mark.parametrize(
    ("lookahead", "fills", "no_text"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_embedding_models_generate_no_text(lookahead: bool, fills: bool, no_text: bool, monkeypatch):
    closed: list[bool] = []
    file = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(bench, "GGUFFile", SimpleNamespace(open=lambda path: closing(file)))
    read = SimpleNamespace(bidirectional=lookahead, is_diffusion=fills)
    monkeypatch.setattr(bench, "load_architecture", lambda other: (None, read) if other is file else None)
    assert bench.is_embedding_only("x") is no_text and closed == [True]


class FakeReader:
    """A reader that takes n ms for n tokens, and twice as long the next time.

    Attributes:
        heard: the arguments of its constructor.
        events: its calls.
    """

    context, vocab_size = 64, 50
    heard: ClassVar[list[Any]] = []

    def __init__(self, *arguments: Any):
        self.events, self.now, self.slow = list[Any](), 0.0, 1
        self.heard[:] = [*arguments, self]

    def prepare_all(self) -> None:
        self.events.append("prepared")

    def read(self, texts: list[np.ndarray]) -> None:
        assert all(text.min() >= 0 and text.max() < 50 for text in texts)
        self.events.append((len(texts), len(texts[0])))
        self.now += sum(map(len, texts)) / 1000 * self.slow
        self.slow = 1 if self.slow == 2 else 2

    def close(self) -> None:
        self.events.append("closed")


def test_texts_of_each_length_are_timed(monkeypatch):
    """Run 8192 tokens at a time after a warm-up; a long text alone, and at most the model's context."""
    h, progress = SimpleNamespace(pooling="mean"), []
    monkeypatch.setattr(bench, "GGUFFile", SimpleNamespace(open=lambda path: path))
    monkeypatch.setattr(bench, "load_architecture", lambda file: (None, h))
    monkeypatch.setattr(bench, "EmbeddingRunner", FakeReader)
    monkeypatch.setattr(bench, "perf_counter", lambda: FakeReader.heard[-1].now)
    rows = bench.measure_embedding("m", [16, 0, 512, 64, 3], 5, 2, progress.append, print, "cpu")
    *arguments, reader = FakeReader.heard
    assert arguments == ["m", "mean", EngineOptions(5, backend="cpu", progress=print)]
    assert progress == ["documents of 16 tokens", "documents of 64 tokens", "documents of 3 tokens"]
    assert reader.events == [
        "prepared", (8, 16), (512, 16), (512, 16), (8, 64), (128, 64), (128, 64), (8, 3), (2730, 3), (2730, 3), "closed"
    ]  # fmt: skip
    assert [(one["length"], one["texts"]) for one in rows] == [(16, 512), (64, 128), (3, 2730)]
    speeds = [[500, 1000], [1000, 500], [500, 1000]]
    for one, both in zip(rows, speeds, strict=True):
        assert one["tokens_per_second"] == pytest.approx(750) and one["deviation"] == pytest.approx(stdev(both))
        assert one["texts_per_second"] == pytest.approx(750 / one["length"])
    monkeypatch.setattr(FakeReader, "context", 10_000)
    (row,) = bench.measure_embedding("m", [10_000], None, 0, progress.append)
    assert (row["texts"], row["deviation"], row["length"]) == (1, 0.0, 10_000)
    assert FakeReader.heard[2] == EngineOptions(None, backend="auto", progress=None)
    assert FakeReader.heard[-1].events == ["prepared", (1, 10_000), (1, 10_000), "closed"]


# The memory.


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [1024, 1024 * 7, 1024 * 4099])
def test_the_memory_is_read_completely(threads: int, size: int):
    reader = MemoryReader(threads, size)
    reader.words[:] = np.random.default_rng(size).integers(-(1 << 63), 1 << 63, len(reader.words), np.int64)
    reader.results[:] = -1
    assert reader.run() > 0
    whole = np.bitwise_xor.reduce(reader.words.reshape(-1, 8), axis=0)
    np.testing.assert_array_equal(np.bitwise_xor.reduce(reader.results, axis=0), whole)
    reader.close()


def test_bandwidth_is_bytes_per_second(monkeypatch):
    reader = MemoryReader(1, 1 << 20)
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(limits, "perf_counter", lambda: next(clock))
    assert reader.run() == 1 << 19
    reader.close()


def test_measured_memory_is_freed():
    reader = MemoryReader(2, 1024)
    reader.run()
    words = weakref.ref(reader.words)
    reader.close()
    del reader
    gc.collect()
    assert words() is None


def test_peak_operations_are_those_of_the_fastest_pass(monkeypatch):
    """Run seven rounds of bytes that are 1, as are the initial sums."""
    monkeypatch.setattr(limits, "PEAK_ROUNDS", 7)
    seconds, memories = iter([4.0, 2.0, *[8.0] * 8]), []
    ones_of_numpy = limits.np.ones

    def ones(*shape):
        memories.append(ones_of_numpy(*shape))
        return memories[-1]

    def timed(walkers):
        taken = next(seconds)
        if taken == 4.0:  # once, for sums of words are the bytes of the next pass
            walkers.run()
        return taken

    monkeypatch.setattr(limits, "time_run", timed)
    monkeypatch.setattr(limits.np, "ones", ones)
    monkeypatch.setattr(limits, "has_tiles", lambda: False)
    assert measure_peak_operations(2) == 2 * 8 * 7 * PEAK_PRODUCTS / 2
    sums = memories[0].reshape(8, -1)[:, 128 : 128 + 64 * PEAK_CHAINS]
    in_words = select_dot() is dot_bytes  # two products each, otherwise four in a number of 32 bits
    assert {*sums.view(np.int16 if in_words else np.int32).flat} == {0x0101 + 7 * 2 if in_words else 0x01010101 + 7 * 4}
    monkeypatch.setattr(limits, "get_lane_name", lambda: "portable")
    assert measure_peak_operations(2) is None


def test_the_fastest_pass_is_the_bandwidth(monkeypatch):
    class FakeReader:
        speeds = iter([3.0, 9.0, *[5.0] * 8])
        closed, sizes = 0, []

        def __init__(self, threads, size):
            assert threads == 2 and size % 1024 == 0
            self.sizes.append(size)

        def run(self):
            return next(self.speeds)

        def close(self):
            FakeReader.closed += 1

    rooms = iter([1 << 40, 400_000_000])
    monkeypatch.setattr(limits, "get_available_memory", lambda: next(rooms))
    monkeypatch.setattr(limits, "MemoryReader", FakeReader)
    assert measure_read_bandwidth(2) == 9.0
    with pytest.raises(RuntimeError):  # nothing left to read
        measure_read_bandwidth(2)
    assert FakeReader.closed == 2
    assert FakeReader.sizes[0] == limits.BUFFER_BYTES and 99_000_000 < FakeReader.sizes[1] <= 100_000_000


# The command.


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", (0,)), ("512,1024", (512, 1024)), ("9999999", (9999999,)), ("007", (7,))]
)
def test_lists_of_numbers_are_parsed(text: str, numbers: tuple[int, ...]):
    assert IntegerList(0)(text) == numbers


@pytest.mark.parametrize(
    "text", ["", ",", "1,", ",1", "1,,2", "-1", "+1", "1.5", "1 2", "1_0", "x", "10000000", "²", "٣"]
)
def test_invalid_lists_of_numbers_are_refused(text: str):
    with pytest.raises(ValueError):
        IntegerList(0)(text)


def test_lists_have_a_fixed_length_and_minimum():
    assert IntegerList(1, 2)("1,2") == (1, 2)
    for text in ("1", "1,2,3", "0,1"):
        with pytest.raises(ValueError):
            IntegerList(1, 2)(text)


def run(*arguments: str) -> bytes:
    """Run the program; return stdout, and fail if it exits with an error or writes to stderr."""
    done = subprocess.run([*PROGRAM, "bench", *arguments], capture_output=True, timeout=120, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


@pytest.mark.sampled
@pytest.mark.slow
def test_bench_prints_a_json_object(tiny: str):
    asked = ["-p", "16,8", "-n", "4", "-pg", "8,2", "-d", "0,600", "-r", "2", "-t", "2,1"]
    report = json.loads(run(tiny, *asked, "--json"))
    assert report.keys() == {"machine", "model", "tests"}
    machine, model, tests = report["machine"], report["model"], report["tests"]
    assert machine.keys() == {"cpu", "lane", "threads", "bandwidth_gbs"}
    assert machine["threads"] >= 1 and machine["cpu"] and machine["bandwidth_gbs"] > 0
    file = GGUFFile.open(tiny)
    size = {"size": file.nbytes, "parameters": file.parameters}
    assert model == {"path": tiny, "arch": "llama", "format": "F32", "device": "CPU"} | size
    names = ["pp16", "pp8", "tg4", "pp8+tg2"]
    names += [f"{name} @ d600" for name in names]
    assert [test["name"] for test in tests] == names * 2
    assert [test["threads"] for test in tests] == [2] * 8 + [1] * 8
    shares = []
    for test in tests:
        assert len(test["samples"]) == 2
        assert (test["tokens_per_s"], test["deviation"]) == pytest.approx(
            (mean(test["samples"]), stdev(test["samples"]))
        )
        assert (test["gops"] is not None) == ("tg" not in test["name"])
        assert (test["gb_per_s"] is not None) == (test["share"] is not None) == ("pp" not in test["name"])
        assert ("share_of_peak" in test) == ("pp" in test["name"] and "tg" not in test["name"])
        shares += [test["gb_per_s"] / test["share"]] if test["share"] else []
    assert max(shares) == pytest.approx(machine["bandwidth_gbs"])


NUMBER = r"\d+\.\d\d ± \d+\.\d\d"
READING = rf"\| tiny \| pp16 \| 1 \| {NUMBER} \| \d+ GOPS, \d+% \|  \|\n"
WRITING = rf"\| tiny \| tg4 @ d8 \| 1 \| {NUMBER} \|  \| \d+\.\d of \d+\.\d GB/s, \d+% \|\n"
HEADER = r"\| model \| test \| threads \| tokens/s \| arithmetic, [a-z0-9-]+ \| weights read \|\n"
HEADER += r"\|( --- \|){2}( --: \|){4}\n"


@pytest.mark.sampled
@pytest.mark.slow
def test_bench_prints_markdown_to_a_pipe(tiny: str):
    out = run(tiny, "-p", "16", "-n", "0", "-r", "1", "-t", "1").decode()
    assert re.fullmatch(HEADER + READING, out)
    out = run(tiny, "-p", "0", "-n", "4", "-d", "8", "-r", "3", "-t", "1", "--md").decode()
    assert re.fullmatch(HEADER + WRITING, out)


@posix
def test_bench_prints_a_table_and_progress_to_a_terminal(tiny: str):
    terminal = Terminal("bench", tiny, "-p", "16", "-n", "0", "-r", "1", "-t", "1")
    assert terminal.end() == 0
    seen = terminal.seen
    assert "measuring pp16 (threads: 1): run 1 of 1" in seen
    assert re.search(rf"│ pp16 │       1 │ {NUMBER} │ +\d+ GOPS, +\d+% │", seen)
    assert "tiny: llama F32" in seen


@posix
def test_bench_prints_markdown_to_a_terminal_on_request(tiny: str):
    terminal = Terminal("bench", tiny, "-p", "16", "-n", "0", "-r", "1", "-t", "1", "--md")
    assert terminal.end() == 0
    assert re.search(READING, terminal.seen.replace("\r\n", "\n"))


@posix
@pytest.mark.parametrize("form", ["--md", "--json"])
def test_ctrl_c_prints_the_results_so_far(tmp_path: Path, form: str):
    path = str(write_tiny_model(tmp_path / "tiny.gguf", context=1_000_000))
    terminal = Terminal("bench", path, "-p", "16", "-n", "900000", "-r", "1", "-t", "1", form)
    terminal.expect("tg900000 .*: run 1 of 1")
    terminal.signal(signal.SIGINT)
    assert terminal.end() == 130
    seen = terminal.seen.replace("\r\n", "\n")
    assert "Traceback" not in seen
    if form == "--md":
        assert re.search(READING + "$", seen)
    else:
        assert [test["name"] for test in json.loads(seen[seen.index("{") :])["tests"]] == ["pp16"]


@posix
def test_ctrl_c_before_the_first_result_prints_nothing(tiny: str):
    terminal = Terminal("bench", tiny, "-p", "0", "-n", "400", "-d", "9000000", "-r", "1", "-t", "1", "--md")
    terminal.expect("filling the cache, 512 of 9000000")
    terminal.signal(signal.SIGINT)
    assert terminal.end() == 130
    assert "Traceback" not in terminal.seen
    assert "tokens/s" not in terminal.seen


def test_a_model_name_cannot_break_the_table(tiny: str, tmp_path: Path):
    if os.name != "posix":
        pytest.skip("such names are possible on POSIX only")
    path = tmp_path / "a|b\nc.gguf"
    path.symlink_to(tiny)
    out = run(str(path), "-p", "16", "-n", "0", "-r", "1", "-t", "1").decode()
    assert re.fullmatch(HEADER + READING.replace("tiny", r"a\\\|b c"), out)


def test_zero_repetitions_are_refused(tiny: str):
    with pytest.raises(UsageError):
        list(Bench(tiny, lambda step: None).run([SpeedTestSpec(1, 0)], [1], 0, "f16"))
