"""Predict how decode and prefill speed up on many cores, and on cores of two speeds.

    python scripts/measure simulate-cores MODEL [--cores 2,4,8,16,32,8+16] [--bandwidth 80] [--slow 0.5]

Times every stage of the model's tape on one thread of this computer, then plays the tape's rules (kernels/cpu/
tape_runner.py) for other computers: threads claim parts of a step, and all parts of a stage are done before the next
one starts. Claiming a part and leaving a stage cost what they cost two threads here, for each further thread as much
again as for the second one. A stage takes no less time than its weights need from memory. "8+16": eight cores, and
sixteen of the speed --slow. "fixed": the same with equal shares given to the threads in advance. --check: compares
with two threads of this computer, idle, and with a busy process beside one of them.
"""

import heapq
import multiprocessing
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from common import make_parser

from localllm.api import open_model
from localllm.engine.cpu import backend, lowering, program
from localllm.engine.cpu.program import TapeThreads
from localllm.engine.lower.tape import Buffer, KernelStep, Tape
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.table import KERNELS


class Stage(NamedTuple):
    """A stage of a run: seconds on one thread, the parts of its steps, and its bytes of weights."""

    seconds: float
    parts: tuple[int, ...]
    nbytes: int


class StageTimer:
    """Runs a tape stage by stage, as StreamingRunner; keeps the least seconds of each."""

    made: "StageTimer"

    def __init__(self, threads: TapeThreads, steps: Sequence[KernelStep]):
        self._threads, self._steps = threads, steps
        starts = [i for i, step in enumerate(steps) if not i or step.stage != steps[i - 1].stage]
        self._slices = list(zip(starts, [*starts[1:], len(steps)], strict=True))
        StageTimer.made = self
        self.forget()

    def forget(self) -> None:
        """Begin anew, for another kind of run."""
        self.seconds, self.parts = [float("inf")] * len(self._slices), [()] * len(self._slices)

    def run(self) -> None:
        """Run all stages."""
        for i, (first, end) in enumerate(self._slices):
            counts = [min(step.parts, max(1, limit_of(step))) for step in self._steps[first:end]]
            started = time.perf_counter()
            self._threads.run_steps(first, end)
            self.seconds[i], self.parts[i] = min(self.seconds[i], time.perf_counter() - started), tuple(counts)

    def stages(self, overhead: float) -> list[Stage]:
        """List the stages; overhead: seconds of a run of nothing, which are taken off."""
        sizes = [sum(weight_bytes(step) for step in self._steps[first:end]) for first, end in self._slices]
        rows = zip(self.seconds, self.parts, sizes, strict=True)
        return [Stage(max(seconds - overhead, 0.0), parts, size) for seconds, parts, size in rows]


def limit_of(step: KernelStep) -> int:
    """Return the count that limits a step's parts in the current run."""
    return step.parts if step.count is None else int(step.count.flat[0])


def weight_bytes(step: KernelStep) -> int:
    weights = step.arguments.get("weights")
    return weights.nbytes if isinstance(weights, np.ndarray) else 0


def stages_of(path: str, threads: int, tokens: int, overhead: float, rounds: int) -> list[Stage]:
    """Time the stages of a run of `tokens` tokens after 64 others."""
    streaming = partial(program.compile_program, streams=True)
    with (
        patch.object(program, "StreamingRunner", StageTimer),
        patch.object(backend, "compile_program", streaming),
        open_model(path, threads, 1024) as model,
    ):
        model.engine.prepare_all()
        sequence = model.sequence()
        sequence.append([1] * 64, "none")
        StageTimer.made.forget()
        for _ in range(rounds):
            sequence.append([1] * tokens)
            sequence.truncate(64)
        return StageTimer.made.stages(overhead)


def seconds_of_nothing(threads: int, stages: int = 2000) -> tuple[float, float]:
    """Return seconds of a run of one empty stage, and of each further one with a part for each thread."""
    library, taken = KernelLibrary({"scale", "run", "work"}), []
    for count in (1, stages):
        tape, memory, buffer = Tape(), np.zeros(64, np.float32), [Buffer(0, 0)]
        for number in range(count):
            rows = {"count": np.zeros(1, np.int64), "x": memory, "y": memory, "stride": 64, "columns": 16}
            rows |= {name: 1 for name in KERNELS["scale"].arguments._fields if name not in rows}
            tape.append(KernelStep("scale", rows, threads, None, buffer if number else [], buffer))
        walkers = TapeThreads(threads, library.addresses, tape.finish(library.addresses), keep=(library, tape))
        seconds = []
        for _ in range(30):
            started = time.perf_counter()
            walkers.run()
            seconds.append(time.perf_counter() - started)
        taken.append(min(seconds))
        walkers.close()
    return taken[0], (taken[1] - taken[0]) / (stages - 1)


class Costs(NamedTuple):
    """Seconds of leaving a stage on one thread, and more for each further thread."""

    stage: float
    thread: float


def predict(stages: Sequence[Stage], speeds: Sequence[float], costs: Costs, bandwidth: float, fixed: bool) -> float:
    """Return the seconds of a run on cores of these speeds; bandwidth: bytes per second."""
    total = 0.0
    for stage in stages:
        parts = [stage.seconds / len(stage.parts) / count for count in stage.parts for _ in range(count)]
        if fixed:
            seconds = max(share_of(parts, i, len(speeds)) / speed for i, speed in enumerate(speeds))
        else:
            ready = [(0.0, i) for i in range(len(speeds))]
            for part in parts:
                at, i = heapq.heappop(ready)
                heapq.heappush(ready, (at + part / speeds[i] + costs.thread, i))
            seconds = max(at for at, _ in ready)
        total += max(seconds, stage.nbytes / bandwidth) + costs.stage + costs.thread * (len(speeds) - 1)
    return total


def share_of(parts: Sequence[float], thread: int, threads: int) -> float:
    """Return the seconds of a thread's equal share of all parts."""
    return sum(parts[thread::threads])


def speeds_of(name: str, slow: float) -> list[float]:
    """Parse 8, or 8+16."""
    fast, _, others = name.partition("+")
    return [1.0] * int(fast) + [slow] * int(others or 0)


def spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def measure_run(path: str, tokens: int, rounds: int) -> float:
    """Return the median seconds of a run on two threads of this computer."""
    with open_model(path, 2, 1024) as model:
        model.engine.prepare_all()
        sequence = model.sequence()
        sequence.append([1] * 64, "none")
        taken = []
        for _ in range(rounds):
            started = time.perf_counter()
            sequence.append([1] * tokens)
            taken.append(time.perf_counter() - started)
            sequence.truncate(64)
        return float(np.median(taken))


def main() -> None:
    """Print a table in Markdown."""
    parser = make_parser(__doc__, "model", rounds=7, threads=False)
    parser.add_argument("--cores", default="1,2,4,8,16,32,4+4,8+16")
    parser.add_argument("--bandwidth", type=float, default=80, help="of the other computers, GB/s")
    parser.add_argument("--slow", type=float, default=0.5, help="speed of the cores behind a plus")
    parser.add_argument("--prompt", type=int, default=128, help="tokens, at most 128: more are read in several runs")
    parser.add_argument("--part", type=int, default=lowering.PART_BYTES, help="bytes of weights in a part")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    overhead, one = seconds_of_nothing(1)
    _, two = seconds_of_nothing(2)
    costs = Costs(one, max(two - one, 0.0))
    print(f"a stage: {1e6 * costs.stage:.2f} us, each further thread {1e6 * costs.thread:.2f} us\n")
    print("| cores | decode, times one core | fixed | prefill | fixed |\n|---|--:|--:|--:|--:|")
    base: dict[int, float] = {}
    timed = {tokens: stages_of(options.model, 1, tokens, overhead, options.rounds) for tokens in (1, options.prompt)}
    for name in options.cores.split(","):
        speeds, cells = speeds_of(name, options.slow), []
        for tokens, alone in timed.items():
            lowering.PART_BYTES = options.part
            shapes = stages_of(options.model, len(speeds), tokens, overhead, 1)
            stages = [Stage(a.seconds, b.parts, a.nbytes) for a, b in zip(alone, shapes, strict=True)]
            taken = [predict(stages, speeds, costs, options.bandwidth * 1e9, fixed) for fixed in (False, True)]
            base.setdefault(tokens, taken[0])
            cells += [f"{base[tokens] / each:.2f}" for each in taken]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if options.check:
        check(options.model, costs, options.prompt, options.rounds, overhead)


def check(path: str, costs: Costs, prompt: int, rounds: int, overhead: float) -> None:
    """Compare predictions with two threads here, alone and beside a process that keeps one core busy."""
    for tokens in (1, prompt):
        alone = stages_of(path, 1, tokens, overhead, rounds)
        shapes = stages_of(path, 2, tokens, overhead, 1)
        stages = [Stage(a.seconds, b.parts, a.nbytes) for a, b in zip(alone, shapes, strict=True)]
        for speeds in ([1.0, 1.0], [1.0, 0.5]):
            busy = multiprocessing.Process(target=spin, args=(0,), daemon=True)
            if speeds[1] < 1:
                busy.start()
            measured = measure_run(path, tokens, rounds)
            if speeds[1] < 1:
                busy.kill()
            dynamic, fixed = (predict(stages, speeds, costs, 1e15, way) for way in (False, True))
            print(f"{tokens} tokens, cores {speeds}: predicted {1e3 * dynamic:.1f} ms, with fixed shares "
                  f"{1e3 * fixed:.1f}, measured {1e3 * measured:.1f}", flush=True)  # fmt: skip
