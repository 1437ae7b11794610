"""Measure prefill and decode speed, and compare them with the limits of this computer.

Implements `localllm bench`. The tests are llama-bench's of llama.cpp: pp512 processes a prompt of 512 tokens, tg128
generates 128 tokens one by one, and pp512+tg128 does both in turn; "@ d4096" means that the KV cache already holds
4096 tokens. The token ids are random with a fixed seed; nothing is sampled.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, mean, stdev
from time import perf_counter
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from localllm.api import Model, open_model
from localllm.arch import load_architecture
from localllm.engine.cpu.limits import measure_peak_operations, measure_read_bandwidth
from localllm.engine.embedding_runner import EmbeddingRunner
from localllm.engine.options import EngineOptions
from localllm.engine.runs import BATCH
from localllm.engine.sequence import Sequence as AnySequence
from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.frozen import frozen
from localllm.kernels.build.objects import Progress
from localllm.kernels.machine import describe_processor, get_lane_name
from localllm.services.inspection.inspect import MatrixCosts, is_embedding_model
from localllm.system.cpu import count_usable_cores

if TYPE_CHECKING:
    from localllm.arch.rope_scaling import RopeScaling

OnStep = Callable[[str], None]  # called with a description of the step
TOKENS = 8192  # tokens of all documents in one repetition, which has at least one document


@frozen
class SpeedTestSpec:
    """A test: prefill `prompt` tokens, then decode `generated` tokens, after `depth` tokens in the cache."""

    prompt: int
    generated: int
    depth: int = 0

    @property
    def name(self) -> str:
        parts = [f"{kind}{count}" for kind, count in (("pp", self.prompt), ("tg", self.generated)) if count]
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated

    @property
    def end(self) -> int:
        """The context length that the test needs, in tokens."""
        return self.depth + self.tokens


def plan_tests(
    prompts: Sequence[int], generated: Sequence[int], combined: Sequence[tuple[int, int]], depths: Sequence[int]
) -> list[SpeedTestSpec]:
    """List the tests in llama-bench's order; a 0 in `prompts` or `generated` means none.

    Raises UsageError if no test is left.
    """
    pairs = [*((count, 0) for count in prompts), *((0, count) for count in generated), *combined]
    tests = [SpeedTestSpec(*pair, depth) for depth in depths for pair in pairs if any(pair)]
    if not tests:
        raise UsageError("no tests selected; set -p, -n or -pg to a value above 0")
    return tests


@frozen
class BenchResult:
    """The measurement of one test.

    Attributes:
        samples: tokens per second of each repetition.  bandwidth: memory bandwidth in bytes per second, of the CPU with
            as many threads or of the GPU; None if the test is not memory-bound.  peak: peak operations per second of a
            GPU's tensor cores, or of the CPU instructions used for prefill, with as many threads.  disk: bytes per
            second of weights read from the disk; 0 if they fit into memory.
    """

    test: SpeedTestSpec
    threads: int
    samples: Sequence[float]
    costs: MatrixCosts
    bandwidth: float | None = None
    peak: float | None = None
    disk: float = 0.0

    @property
    def speed(self) -> float:
        """The mean speed in tokens per second."""
        return mean(self.samples)

    @property
    def deviation(self) -> float:
        return stdev(self.samples) if len(self.samples) > 1 else 0.0

    @property
    def gb_per_s(self) -> float | None:
        """The rate at which decode reads weights, in GB per second; None with a prompt."""
        return None if self.test.prompt else self.speed * self.costs.weight_bytes / 1e9

    @property
    def share(self) -> float | None:
        """The fraction of the memory bandwidth that decode reaches.

        It can exceed 1 for a model that fits in the processor's cache.
        """
        return self.gb_per_s * 1e9 / self.bandwidth if self.gb_per_s and self.bandwidth else None

    @property
    def gops(self) -> float | None:
        """The prefill speed in 10^9 operations per second (2 per multiply-add), last logits included."""
        if self.test.generated:
            return None
        return 2 * (self.costs.per_token + self.costs.per_logits / self.test.prompt) * self.speed / 1e9

    @property
    def share_of_peak(self) -> float | None:
        """The fraction of the peak that prefill reaches."""
        return self.gops * 1e9 / self.peak if self.gops and self.peak else None

    def to_dict(self) -> dict[str, object]:
        numbers = {"tokens_per_s": self.speed, "deviation": self.deviation, "samples": list(self.samples)}
        derived = {"gb_per_s": self.gb_per_s, "share": self.share, "gops": self.gops}
        derived |= {"bandwidth_gb_per_s": self.bandwidth / 1e9} if self.bandwidth else {}
        derived |= {"share_of_peak": self.share_of_peak, "peak_gops": self.peak / 1e9} if self.peak else {}
        derived |= {"disk_gb_per_s": self.disk / 1e9} if self.disk else {}
        return {"name": self.test.name, "depth": self.test.depth, "threads": self.threads} | numbers | derived


class SpeedTestRunner:
    """Runs tests on a sequence; each position always has the same token, so that the KV cache stays valid."""

    def __init__(
        self, sequence: AnySequence, threads: int, costs: MatrixCosts, on_step: OnStep,
        limits: tuple[float, float] | None = None, read_statistics: Callable[[], dict[str, float]] = dict,
    ):  # fmt: skip
        """Prepare test runs.

        limits: of a GPU, see Engine; None: measure the CPU's.  read_statistics: Engine.get_disk_statistics.
        """
        self._limits, self._read_statistics = limits, read_statistics
        self._sequence, self._threads, self._costs, self._on_step = sequence, threads, costs, on_step
        self._ids = np.random.default_rng(0).integers(0, sequence.vocab_size, sequence.context).tolist()

    def measure(self, test: SpeedTestSpec, repetitions: int) -> BenchResult:
        """Run one test.

        The memory bandwidth is measured before every repetition, because a virtual machine's share of it changes
        within seconds; the arithmetic peak is measured once.
        """

        def report(step: str) -> None:
            self._on_step(f"{test.name} (threads: {self._threads}): {step}")

        self._fill_cache(test.depth, report)
        report("warming up")
        warm_up = SpeedTestSpec(test.prompt, min(test.generated, 1), test.depth)
        self._time_test(warm_up)
        speeds, bandwidths, read = list[float](), list[float](), self._count_read()
        bandwidth, peak = self._limits or (None, None if test.generated else measure_peak_operations(self._threads))
        for number in range(repetitions):
            report(f"run {number + 1} of {repetitions}")
            if not test.prompt and not self._limits:
                bandwidths.append(measure_read_bandwidth(self._threads))
                self._time_test(warm_up)  # the measurement has replaced the weights in the CPU caches
            speeds.append(test.tokens / self._time_test(test))
        bandwidth = mean(bandwidths) if bandwidths else bandwidth
        disk = (self._count_read() - read) / sum(test.tokens / speed for speed in speeds)
        return BenchResult(test, self._threads, speeds, self._costs, None if test.prompt else bandwidth, peak, disk)

    def _count_read(self) -> float:
        """Return the bytes of weights that were read from the disk so far."""
        return self._read_statistics().get("read_bytes", 0.0)

    def _fill_cache(self, depth: int, report: OnStep) -> None:
        """Fill the KV cache with `depth` tokens."""
        self._sequence.truncate(depth)
        for start in range(len(self._sequence.tokens), depth, BATCH):
            report(f"filling the cache, {start} of {depth} tokens")
            self._sequence.append(self._ids[start : min(start + BATCH, depth)], "none")

    def _time_test(self, test: SpeedTestSpec) -> float:
        """Run the test once after the tokens in the cache; return its duration in seconds."""
        sequence, ids, end = self._sequence.fork(), self._ids, test.depth + test.prompt
        start = perf_counter()
        if test.prompt:
            sequence.append(ids[test.depth : end])
        for position in range(end, test.end):
            sequence.append(ids[position : position + 1])
        seconds = perf_counter() - start
        sequence.close()
        return seconds


class ModelFacts(TypedDict, total=False):
    """A description of a model; size: of its weights, in bytes."""

    path: str
    arch: str
    format: str
    device: str
    size: int
    parameters: int


class Bench:
    """A benchmark of one model file.

    Attributes:
        model: a description for JSON, empty before the first test.
    """

    def __init__(self, path: str | os.PathLike[str], on_step: OnStep, on_compile: Progress | None = None):
        """Create a benchmark.

        on_step: called with a description of each step.  on_compile(done, total): called while kernels compile.
        """
        self._path, self._on_step, self._on_compile = path, on_step, on_compile
        self.model: ModelFacts = {}

    def run(
        self, tests: Sequence[SpeedTestSpec], threads: Sequence[int] | None, repetitions: int, kv_type: str,
        device: str = "cpu", gpu_layers: int | str = "auto", rope: "RopeScaling | None" = None,
        memory: int | None = None,
    ) -> Iterator[BenchResult]:  # fmt: skip
        """Yield the results of all tests with each thread count (None: the default).

        Raises the errors of open_model.
        """
        if repetitions < 1:
            raise UsageError(f"repetitions must be 1 or greater, not {repetitions}")
        context = max(test.end for test in tests)
        for count in threads or [count_usable_cores()]:
            with open_model(
                self._path,
                count,
                context,
                kv_type,
                device,
                self._on_compile,
                gpu_layers=gpu_layers,
                rope=rope,
                memory=memory,
            ) as model:
                model.engine.prepare_all()
                self.model = describe_model(model)
                costs = MatrixCosts.from_file(model.file)
                runner = SpeedTestRunner(
                    model.sequence(), count, costs, self._on_step, model.engine.limits, model.engine.get_disk_statistics
                )
                for test in tests:
                    yield runner.measure(test, repetitions)

    @property
    def lane(self) -> str:
        return get_lane_name() if self.model.get("device", "CPU") == "CPU" else "cuBLAS"

    def report(self, results: Sequence[BenchResult]) -> dict[str, object]:
        measured = [result.bandwidth / 1e9 for result in results if result.bandwidth]
        machine = {
            "cpu": describe_processor(),
            "lane": self.lane,
            "threads": count_usable_cores(),
            "bandwidth_gbs": max(measured, default=None),
        }
        return {"machine": machine, "model": self.model, "tests": [result.to_dict() for result in results]}


def describe_model(model: Model) -> ModelFacts:
    return {
        "path": model.path, "arch": model.arch, "format": model.format, "device": model.engine.device,
        "size": model.file.nbytes, "parameters": model.file.parameters,
    }  # fmt: skip


# ---- models that only compute embeddings or scores


def is_embedding_only(path: str) -> bool:
    """Return whether a model only computes embeddings or scores. Raises ModelError."""
    with GGUFFile.open(path) as file:
        return is_embedding_model(load_architecture(file)[1])


def measure_embedding(
    path: str, lengths: Sequence[int], threads: int | None, repetitions: int, on_step: Callable[[str], object],
    progress: Progress | None = None, device: str = "auto",
) -> list[dict[str, float]]:  # fmt: skip
    """Measure tokens per second (mean and deviation) for each document length, at most the model's context.

    lengths: in tokens.  on_step: called before each test. Raises ModelError, MemoryLimitError, UsageError.
    """
    file = GGUFFile.open(path)
    _, hyperparameters = load_architecture(file)
    reader = EmbeddingRunner(
        file, str(hyperparameters.pooling), EngineOptions(threads, backend=device, progress=progress)
    )
    reader.prepare_all()
    results = []
    for length in dict.fromkeys(min(length, reader.context) for length in lengths if length):
        on_step(f"documents of {length} tokens")
        count = max(TOKENS // length, 1)
        texts = np.random.default_rng(0).integers(0, reader.vocab_size, (count, length))
        reader.read(list(texts[:8]))
        speeds = [count * length / time_documents(reader, texts) for _ in range(max(repetitions, 1))]
        spread = stdev(speeds) if len(speeds) > 1 else 0.0
        speed = {"tokens_per_second": fmean(speeds), "deviation": spread, "texts_per_second": fmean(speeds) / length}
        results.append({"length": length, "texts": count, **speed})
    reader.close()
    return results


def time_documents(reader: EmbeddingRunner, texts: np.ndarray) -> float:
    """Process the documents, int [documents, tokens], once; return the duration in seconds."""
    start = perf_counter()
    reader.read(list(texts))
    return perf_counter() - start
