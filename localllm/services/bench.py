"""How fast a model reads and writes on this computer, and how near that is to what the computer can do.

The service behind `localllm bench`. The tests are those of llama.cpp's llama-bench: pp512 reads a prompt of 512 tokens,
tg128 writes 128 tokens one by one, pp512+tg128 does one after the other; "@ d4096" says that 4096 tokens were in the
cache before. Tokens are random and always the same; nothing is sampled.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, stdev
from time import perf_counter
from typing import Any

import numpy as np

from localllm.api import Model, open_model
from localllm.engine.cpu.bandwidth import read_bandwidth
from localllm.engine.run import BATCH
from localllm.engine.sequence import Sequence as AnySequence
from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.kernels.build.library import Progress
from localllm.kernels.machine import lane_name, this_lane
from localllm.services.token_costs import MatrixCosts
from localllm.system.cpu import processor_name, usable_cores

OnStep = Callable[[str], None]  # told what is being done


@frozen
class Test:
    """Tokens to read at once, then tokens to write one by one, after `depth` others."""

    prompt: int
    generated: int
    depth: int = 0

    @property
    def name(self) -> str:
        """As llama-bench writes it."""
        parts = [f"{kind}{count}" for kind, count in (("pp", self.prompt), ("tg", self.generated)) if count]
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """What is timed."""
        return self.prompt + self.generated

    @property
    def end(self) -> int:
        """The context that it needs."""
        return self.depth + self.tokens


def plan(
    prompts: Sequence[int], generated: Sequence[int], combined: Sequence[tuple[int, int]], depths: Sequence[int]
) -> list[Test]:
    """The tests in llama-bench's order; a 0 among the first two is none. Raises UsageError if no test is left."""
    pairs = [*((count, 0) for count in prompts), *((0, count) for count in generated), *combined]
    tests = [Test(*pair, depth) for depth in depths for pair in pairs if any(pair)]
    if not tests:
        raise UsageError("there is nothing to measure: give -p, -n or -pg a number above 0")
    return tests


@frozen
class Result:
    """The measurement of one test.

    bandwidth: bytes per second that as many threads read from memory, the mean, or that a card's memory gives; None if
    the test is not about memory. peak: a card's operations per second.
    """

    test: Test
    threads: int
    samples: Sequence[float]  # tokens per second of each repetition
    costs: MatrixCosts
    bandwidth: float | None = None
    peak: float | None = None

    @property
    def speed(self) -> float:
        """The mean, in tokens per second."""
        return mean(self.samples)

    @property
    def deviation(self) -> float:
        """The samples' standard deviation, in tokens per second; 0 for a single one."""
        return stdev(self.samples) if len(self.samples) > 1 else 0.0

    @property
    def gb_per_s(self) -> float | None:
        """Weights that decode reads, in GB per second."""
        return None if self.test.prompt else self.speed * self.costs.weight_bytes / 1e9

    @property
    def share(self) -> float | None:
        """That, of the memory's bandwidth. A model that fits into the processor's cache can have more than 1."""
        return self.gb_per_s * 1e9 / self.bandwidth if self.gb_per_s and self.bandwidth else None

    @property
    def gops(self) -> float | None:
        """Billions of multiplications and additions per second in a prefill, which makes the last token's logits."""
        if self.test.generated:
            return None
        return 2 * (self.costs.per_token + self.costs.per_logits / self.test.prompt) * self.speed / 1e9

    @property
    def share_of_peak(self) -> float | None:
        """Those, of what a card's tensor cores can do."""
        return self.gops * 1e9 / self.peak if self.gops and self.peak else None

    def facts(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        numbers = {"tokens_per_s": self.speed, "deviation": self.deviation, "samples": list(self.samples)}
        derived = {"gb_per_s": self.gb_per_s, "share": self.share, "gops": self.gops}
        derived |= {"share_of_peak": self.share_of_peak} if self.peak else {}
        return {"name": self.test.name, "depth": self.test.depth, "threads": self.threads} | numbers | derived


class Course:
    """A model under test. The token at a position is always the same, so what a sequence holds stays true."""

    def __init__(
        self, sequence: AnySequence, threads: int, costs: MatrixCosts, on_step: OnStep,
        limits: tuple[float, float] | None = None,
    ):  # fmt: skip
        """limits: of a card, see Engine; None: the CPU's memory is measured."""
        self._limits = limits
        self._sequence, self._threads, self._costs, self._on_step = sequence, threads, costs, on_step
        self._ids = np.random.default_rng(0).integers(0, sequence.vocab_size, sequence.context).tolist()

    def measure(self, test: Test, repetitions: int) -> Result:
        """One test. The memory is measured before every run: what a virtual machine gets of it changes in seconds."""

        def tell(step: str) -> None:
            self._on_step(f"{test.name} (threads: {self._threads}): {step}")

        self._fill(test.depth, tell)
        tell("warming up")
        warm_up = Test(test.prompt, min(test.generated, 1), test.depth)
        self._seconds(warm_up)
        speeds, bandwidths = [], []
        for number in range(repetitions):
            tell(f"run {number + 1} of {repetitions}")
            if not test.prompt and not self._limits:
                bandwidths.append(read_bandwidth(self._threads))
                self._seconds(warm_up)  # the caches are full of what was just read
            speeds.append(test.tokens / self._seconds(test))
        bandwidth, peak = self._limits or (mean(bandwidths) if bandwidths else None, None)
        return Result(test, self._threads, speeds, self._costs, None if test.prompt else bandwidth, peak)

    def _fill(self, depth: int, tell: OnStep) -> None:
        """Have `depth` tokens in the cache."""
        self._sequence.truncate(depth)
        for start in range(len(self._sequence.tokens), depth, BATCH):
            tell(f"filling the cache, {start} of {depth} tokens")
            self._sequence.append(self._ids[start : min(start + BATCH, depth)], "none")

    def _seconds(self, test: Test) -> float:
        """How long the test takes, once, behind what fills the cache."""
        sequence, ids, written = self._sequence.fork(), self._ids, test.depth + test.prompt
        start = perf_counter()
        if test.prompt:
            sequence.append(ids[test.depth : written])
        for position in range(written, test.end):
            sequence.append(ids[position : position + 1])
        seconds = perf_counter() - start
        sequence.close()
        return seconds


class Bench:
    """A model file to be tested.

    Attributes:
        model: facts about it, ready for JSON, once a test has been run; its size is in bytes of weights.
    """

    def __init__(self, path: str | os.PathLike[str], on_step: OnStep, on_compile: Progress | None = None):
        """on_step is told what is being done, on_compile(done, total) that kernels are compiled."""
        self._path, self._on_step, self._on_compile = path, on_step, on_compile
        self.model: dict[str, Any] = {}

    def run(
        self, tests: Sequence[Test], threads: Sequence[int] | None, repetitions: int, kv_type: str,
        device: str = "cpu", gpu_layers: int | str = "auto",
    ) -> Iterator[Result]:  # fmt: skip
        """All tests with each number of threads (None: as many as other commands use). Raises as open_model does."""
        if repetitions < 1:
            raise UsageError(f"repetitions should be 1 or above, not {repetitions}")
        context = max(test.end for test in tests)
        for count in threads or [usable_cores()]:
            with open_model(
                self._path, count, context, kv_type, device, self._on_compile, gpu_layers=gpu_layers
            ) as model:
                model.engine.prepare_all()
                self.model = facts(model)
                costs = MatrixCosts.of_file(model.file)
                course = Course(model.sequence(), count, costs, self._on_step, model.engine.limits)
                for test in tests:
                    yield course.measure(test, repetitions)

    @property
    def lane(self) -> str:
        """How prompts are multiplied."""
        return lane_name() if self.model.get("device", "CPU") == "CPU" else "cuBLAS"

    def report(self, results: Sequence[Result]) -> dict[str, Any]:
        """Everything, ready for JSON; the machine's bandwidth is the highest of the tests'."""
        measured = [result.bandwidth / 1e9 for result in results if result.bandwidth]
        machine = {
            "cpu": processor(),
            "lane": self.lane,
            "threads": usable_cores(),
            "bandwidth_gbs": max(measured, default=None),
        }
        return {"machine": machine, "model": self.model, "tests": [result.facts() for result in results]}


def facts(model: Model) -> dict[str, Any]:
    """What is said of a model."""
    names = {"path": model.path, "arch": model.arch, "format": model.format, "device": model.engine.device}
    return names | {"size": model.file.nbytes, "parameters": model.file.parameters}


def processor() -> str:
    """What the processor calls itself, and what the compiler calls it."""
    return f"{processor_name()} ({this_lane().cpu})"
