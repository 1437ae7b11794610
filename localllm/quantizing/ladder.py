"""Quantize a model to several types in one pass: each tensor is read once, and encoded once for each format.

All files are written tensor by tensor, as NAME.part, and renamed when all of them are complete. The number of tensors
on the disk is recorded every few seconds, so that an interrupted command can resume.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from time import monotonic, perf_counter
from typing import NamedTuple

import numpy as np

from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.gguf.writer import alignment_of, build_header
from localllm.files.safe_file import ExclusiveWriter
from localllm.frozen import frozen
from localllm.kernels.dequantize_rows import Widener, can_widen
from localllm.quant.encode import encode
from localllm.quant.formats import BY_NAME, RECIPES, Recipe
from localllm.quantizing.clamped_weights import ClampedWeights
from localllm.quantizing.ladder_files import STATE, PartFile, State, Written
from localllm.quantizing.plan import OnProgress, QuantizePlan, TensorJob
from localllm.quantizing.quantize import default_output, find_type, mean_squares, with_path
from localllm.quantizing.rewrite import check_files
from localllm.quantizing.source_guard import SourceGuard
from localllm.services.inspection.validate import dequantize_finite

BY_SIZE = sorted(RECIPES.values(), key=lambda recipe: -BY_NAME[recipe.base].bytes / BY_NAME[recipe.base].block)
TYPES = [recipe.name for recipe in BY_SIZE if recipe.ladder == "always"]
WITH_IMPORTANCE = [recipe.name for recipe in BY_SIZE if recipe.ladder == "imatrix"]
NAME = "{type}"  # placeholder for the type in an output's name
SAVE_EVERY = 5  # seconds
VERSION = 1  # of the procedure; part of the key by which interrupted work is found


@frozen
class Rung:
    """One type: its plan and the paths of its files."""

    recipe: Recipe
    plan: QuantizePlan
    paths: Sequence[str]


@frozen
class Result:
    """The result of one type.

    Attributes:
        seconds: its share of the encoding time; a search shared by several types counts in equal parts.
    """

    recipe: Recipe
    plan: QuantizePlan
    files: Sequence[Written]
    seconds: float


def parse_types(text: str | None, has_importance: bool) -> list[Recipe]:
    """Parse a comma-separated list of types; None: the default ones. Raises UsageError."""
    names = [*TYPES, *(WITH_IMPORTANCE if has_importance else ())] if text is None else text.split(",")
    recipes: dict[str, Recipe] = {}
    for name in filter(None, (name.strip() for name in names)):
        recipe = find_type(name)
        if recipe is None:
            raise UsageError(f"--types: {name[:40]} is not a type; localllm quantize --help lists them")
        recipes[recipe.name] = recipe
    if not recipes:
        raise UsageError("--types: expected types separated by commas, e.g. Q8_0,Q4_K_M")
    return [*recipes.values()]


def output_for(path: str, out: str | None, recipe: Recipe, projector: bool = False) -> str:
    """Return the path of the file for one of several types. Raises UsageError.

    out: a path that contains {type}, or an existing folder; None: next to the input.
    """
    usual = default_output(path, recipe, projector)
    if out is None:
        return usual
    if NAME in out:
        return out.replace(NAME, "copy" if recipe.base == "" else recipe.name)
    if os.path.isdir(out):
        return os.path.join(out, os.path.basename(usual))
    raise UsageError(f"{out}: expected a folder, or a name with {NAME} in it, for several types")


class Ladder:
    """Files of several types that are written together."""

    def __init__(
        self,
        rungs: Sequence[Rung],
        inputs: Sequence[str],
        threads: int,
        on_progress: OnProgress,
        is_strict: bool = False,
    ):
        """Prepare the files; is_strict: clamped weights are an error. Raises UsageError for equal names."""
        self._rungs, self._threads, self._on_progress = rungs, threads, on_progress
        self._source = rungs[0].plan.source
        self._clamped = ClampedWeights(is_strict)
        paths = [path for rung in rungs for path in rung.paths]
        if len({*paths}) < len(paths):
            raise UsageError("two types would go to the same file")
        self._files = [self._part_files(rung) for rung in rungs]
        self._jobs = [rung.plan.jobs for rung in rungs]
        self._names = [job.tensor.name for job in self._jobs[0]]
        self._guard = rungs[0].plan.guard
        self._state = State(os.path.realpath(rungs[0].paths[0]) + STATE, self._key())
        self._inputs = inputs

    @property
    def resumes(self) -> bool:
        """Return whether an earlier run left its files."""
        names = self._names[: self._state.done]
        return self._state.done > 0 and all(file.has(file.length(names)) for group in self._files for file in group)

    @property
    def warnings(self) -> list[str]:
        """Return the warnings about clamped weights, after `run`."""
        return self._clamped.lines()

    def check(self) -> None:
        """Check the output paths. Raises UsageError if they must not be written, LocalllmError for a full disk."""
        files = [file for group in self._files for file in group]
        need = sum(file.nbytes - size_of(file.path) for file in files)
        for number, rung in enumerate(self._rungs):
            is_named = self.resumes and self._state.done == len(self._names)
            check_files([rung.paths[0]] if is_named else rung.paths, self._inputs, need if number == 0 else 0)

    @staticmethod
    def _part_files(rung: Rung) -> list[PartFile]:
        return [
            PartFile(
                os.path.realpath(path),
                build_header(metadata, [job.output for job in jobs], alignment_of(metadata)),
                jobs,
                alignment_of(metadata),
            )
            for path, (metadata, jobs) in zip(rung.paths, rung.plan.files, strict=True)
        ]

    def _key(self) -> str:
        """Return the key of the work: its source, its types, and the importance matrix."""
        key = hashlib.sha256(repr((VERSION, self._guard.identity)).encode())
        for rung, files in zip(self._rungs, self._files, strict=True):
            for path, file in zip(rung.paths, files, strict=True):
                key.update(f"{os.path.realpath(path)}\0{file.nbytes}\0".encode())
            for metadata, jobs in rung.plan.files:
                key.update(build_header(metadata, [job.output for job in jobs], alignment_of(metadata)))
                for job in jobs:
                    key.update(b"" if job.importance is None else job.importance.tobytes())
        return key.hexdigest()

    def run(self, widener: Widener) -> list[Result]:
        """Write all files. Raises ModelError for a weight that is not finite, LocalllmError."""
        files = [file for group in self._files for file in group]
        with ExitStack() as stack:
            for file in files:
                stack.enter_context(ExclusiveWriter(file.target))
                stack.callback(file.close)
            finished = self._state.done if self.resumes else 0
            self._state.done = finished
            for file in files:
                file.open(file.length(self._names[:finished]) if finished else 0)
            try:
                self._write(widener, finished)
                self._guard.check()
            except ModelError as error:
                for file in files:
                    file.discard()
                self._state.remove()
                raise with_path(error, self._source.path) from None
            self._save()
            results = [self._finished(rung, group) for rung, group in zip(self._rungs, self._files, strict=True)]
        self._state.remove()
        return results

    def _finished(self, rung: Rung, files: Sequence[PartFile]) -> Result:
        return Result(rung.recipe, rung.plan, [file.finish() for file in files], self._state.seconds[rung.recipe.name])

    def _save(self) -> None:
        for file in (file for group in self._files for file in group):
            file.sync()
        self._state.save()

    def _write(self, widener: Widener, finished: int) -> None:
        """Write the tensors, beginning with number `finished`."""
        count, saved = self._weights(finished), monotonic()
        places = [places_of(group, rung) for group, rung in zip(self._files, self._rungs, strict=True)]
        with ThreadPoolExecutor(self._threads, "quantize") as executor:
            tasks = self._tasks(widener, finished)
            queue: deque[Future[Encoded]] = deque()
            try:
                for number in range(finished, len(self._names)):
                    name, jobs = self._names[number], [rung[number] for rung in self._jobs]
                    for first, last in jobs[0].ranges():
                        queue.extend(map(executor.submit, islice(tasks, self._threads + 2 - len(queue))))
                        encoded = queue.popleft().result()
                        for job, place in zip(jobs, places, strict=True):
                            place[name].write(encoded.rows[job.format.name])
                        self._account(encoded, jobs)
                        count += (last - first) * jobs[0].tensor.shape[-1]
                        self._on_progress(count, name)
                        jobs[0].tensor.release_rows(first, last)
                    for place in places:
                        place[name].pad()
                    self._state.done = number + 1
                    if monotonic() - saved > SAVE_EVERY:
                        self._save()
                        saved = monotonic()
            finally:
                executor.shutdown(wait=True, cancel_futures=True)

    def _weights(self, finished: int) -> int:
        return sum(int(np.prod(job.tensor.shape)) for job in self._jobs[0][:finished])

    def _account(self, encoded: "Encoded", jobs: Sequence[TensorJob]) -> None:
        """Add the seconds of the searches to those of the types that use them, in equal parts."""
        names = [job.format.name for job in jobs]
        for rung, name in zip(self._rungs, names, strict=True):
            seconds = self._state.seconds.get(rung.recipe.name, 0.0)
            share = encoded.seconds[name] / names.count(name) / self._threads  # threads that search at the same time
            self._state.seconds[rung.recipe.name] = seconds + share

    def _tasks(self, widener: Widener, finished: int) -> Iterator[Callable[[], "Encoded"]]:
        for number in range(finished, len(self._names)):
            jobs = {rung[number].format.name: rung[number] for rung in self._jobs}
            importance = importance_for([*jobs.values()], widener)
            for first, last in next(iter(jobs.values())).ranges():
                yield partial(encode_rows, widener, jobs, importance, self._clamped, first, last)


def places_of(files: Sequence[PartFile], rung: Rung) -> dict[str, PartFile]:
    """Map the names of a type's tensors to the files that they go to."""
    parts = zip(files, rung.plan.files, strict=True)
    return {job.tensor.name: file for file, (_, jobs) in parts for job in jobs}


def importance_for(jobs: Sequence[TensorJob], widener: Widener) -> np.ndarray | None:
    """Return the importance of a tensor's columns, the same for all formats: float32 [matrices, columns]."""
    for job in jobs:
        if job.importance is not None:
            return job.importance
        if job.makes_logits and not job.is_copied:
            return mean_squares(widener, job.tensor)
    return None


class Encoded(NamedTuple):
    """Rows of a tensor in several formats, uint8 [rows, bytes], and the seconds that each took."""

    rows: Mapping[str, np.ndarray]
    seconds: Mapping[str, float]


def encode_rows(
    widener: Widener,
    jobs: Mapping[str, TensorJob],
    importance: np.ndarray | None,
    clamped: ClampedWeights,
    first: int,
    last: int,
) -> Encoded:
    """Encode rows of a tensor in all its formats. Raises ModelError for a weight that is not finite."""
    tensor = next(iter(jobs.values())).tensor
    rows, seconds = dict[str, np.ndarray](), dict[str, float]()
    weights = dequantize_finite(widener, tensor, first, last) if can_widen(tensor.format) else None
    weight = None if importance is None else importance[first // tensor.shape[-2]]
    for name, job in jobs.items():
        start = perf_counter()
        if job.is_copied:
            rows[name] = np.ascontiguousarray(tensor.rows(first, last))
        else:
            assert weights is not None
            rows[name] = encode(name, weights, weight if job.format.block > 1 else None)
            clamped.check(tensor.name, job.format, weights, rows[name])
        seconds[name] = perf_counter() - start
    return Encoded(rows, seconds)


def size_of(path: str) -> int:
    """Return the size of a file, 0 if there is none."""
    return os.path.getsize(path) if os.path.isfile(path) else 0


class Sequel:
    """Types that are quantized one after the other; an interrupted command resumes with the first missing one."""

    def __init__(self, rungs: Sequence[Rung], texts: Sequence[str]):
        """Load the state of an interrupted run; texts: files besides the source that the result depends on."""
        self._rungs, guard = rungs, SourceGuard([*rungs[0].plan.source.files, *texts])
        state_key = (
            VERSION,
            guard.identity,
            [(rung.recipe.name, *map(os.path.realpath, rung.paths)) for rung in rungs],
        )
        self._state = State(
            os.path.realpath(rungs[0].paths[0]) + STATE, hashlib.sha256(repr(state_key).encode()).hexdigest()
        )

    def run(self, make: Callable[[Rung], None]) -> list[Result]:
        """Quantize all types, each by `make`."""
        state, results = self._state, []
        for number, rung in enumerate(self._rungs):
            if number >= state.done or not all(map(os.path.isfile, rung.paths)):
                start = perf_counter()
                make(rung)
                state.seconds[rung.recipe.name], state.done = perf_counter() - start, number + 1
                state.save()
            files = [describe_file(path) for path in rung.paths]
            results.append(Result(rung.recipe, rung.plan, files, state.seconds[rung.recipe.name]))
        state.remove()
        return results


def describe_file(path: str) -> Written:
    """Describe a finished file. Raises LocalllmError."""
    try:
        with open(path, "rb") as file:
            return Written(path, os.path.getsize(path), hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise LocalllmError(f"{path}: cannot be read: {error.strerror or error}") from None
