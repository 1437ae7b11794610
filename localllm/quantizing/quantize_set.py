"""Quantize a model to several types in one pass: read each tensor once, and encode it once per format.

All files are written tensor by tensor, as NAME.part, and renamed when all of them are complete. The number of finished
tensors is recorded on disk every few seconds, so that an interrupted command can resume.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.gguf.writer import build_header, get_alignment
from localllm.files.safe_file import SafeFile, WriteLock
from localllm.frozen import frozen
from localllm.kernels.dequantize_rows import RowDequantizer, can_dequantize
from localllm.quant.encode import encode
from localllm.quant.formats import BY_NAME, RECIPES, Recipe
from localllm.quantizing.plan import OnProgress, QuantizePlan, TensorJob
from localllm.quantizing.quantize import (
    ClampedWeights,
    add_path_to_error,
    compute_mean_squares,
    derive_output,
    find_type,
)
from localllm.quantizing.rewrite import check_files
from localllm.quantizing.sources import SourceGuard
from localllm.quantizing.verify import compute_sha256
from localllm.services.inspection.validate import dequantize_finite
from localllm.system.files import open_without_links, replace_file, sync_file

if TYPE_CHECKING:
    import numpy as np

BY_SIZE = sorted(RECIPES.values(), key=lambda recipe: -BY_NAME[recipe.base].bytes / BY_NAME[recipe.base].block)
DEFAULT_TYPES = [recipe.name for recipe in BY_SIZE if recipe.ladder == "always"]
IMPORTANCE_TYPES = [recipe.name for recipe in BY_SIZE if recipe.ladder == "imatrix"]
TYPE_PLACEHOLDER = "{type}"  # placeholder for the type in an output's name
SAVE_EVERY = 5  # seconds
VERSION = 1  # of the procedure; part of the key by which interrupted work is found
PART_SUFFIX, STATE_SUFFIX = ".part", ".ladder"  # suffixes of unfinished files and of the record


class WrittenFile(NamedTuple):
    """A finished file: its path, its size in bytes and its SHA-256."""

    path: str
    nbytes: int
    sha256: str


@frozen
class SetMember:
    """One type of a set: its recipe, its plan and the paths of its files."""

    recipe: Recipe
    plan: QuantizePlan
    paths: Sequence[str]


@frozen
class TypeResult:
    """The files of one type, and the time that they took.

    Attributes:
        seconds: encoding time; that of a search which several types share is divided equally.
    """

    recipe: Recipe
    plan: QuantizePlan
    files: Sequence[WrittenFile]
    seconds: float


def parse_types(text: str | None, has_importance: bool) -> list[Recipe]:
    """Parse a comma-separated list of types; None for the default ones. Raises UsageError."""
    names = [*DEFAULT_TYPES, *(IMPORTANCE_TYPES if has_importance else ())] if text is None else text.split(",")
    recipes: dict[str, Recipe] = {}
    for name in filter(None, (name.strip() for name in names)):
        recipe = find_type(name)
        if recipe is None:
            raise UsageError(f"--types: {name[:40]} must be a type; localllm quantize --help lists them")
        recipes[recipe.name] = recipe
    if not recipes:
        raise UsageError("--types: expected types separated by commas, e.g. Q8_0,Q4_K_M")
    return [*recipes.values()]


def derive_set_output(path: str, out: str | None, recipe: Recipe, projector: bool = False) -> str:
    """Return the path of the file for one of several types. Raises UsageError.

    out: a path with {type} in it, or an existing folder; None for the folder of the input.
    """
    usual = derive_output(path, recipe, projector)
    if out is None:
        return usual
    if TYPE_PLACEHOLDER in out:
        return out.replace(TYPE_PLACEHOLDER, "copy" if recipe.base == "" else recipe.name)
    if os.path.isdir(out):
        return os.path.join(out, os.path.basename(usual))
    raise UsageError(f"{out}: expected a folder, or a name with {TYPE_PLACEHOLDER} in it, for several types")


# ---- unfinished files


class PartialFile:
    """A file that is written as NAME.part and renamed when it is complete."""

    def __init__(self, path: str, metadata: Mapping[str, object], tensors: Sequence[TensorJob]):
        self.target, self._alignment = os.path.realpath(path), get_alignment(metadata)
        self.path = self.target + PART_SUFFIX
        self._header = build_header(metadata, [job.output for job in tensors], self._alignment)
        self._sizes = {job.tensor.name: job.output.nbytes for job in tensors}
        self.nbytes = len(self._header) + sum(map(self._pad_size, self._sizes.values()))
        self._digest, self._descriptor, self._position, self.is_named = hashlib.sha256(), -1, 0, False

    def _pad_size(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment

    def compute_length(self, names: Sequence[str]) -> int:
        """Return the file's length in bytes after the header and these tensors."""
        return len(self._header) + sum(self._pad_size(self._sizes[name]) for name in names if name in self._sizes)

    def open(self, kept_bytes: int) -> None:
        """Open the file with the first `kept_bytes` bytes of an earlier run. Raises LocalllmError."""
        self.is_named = kept_bytes == self.nbytes and not os.path.lexists(self.path)  # an earlier run had renamed it
        try:
            path, flags = (self.target, os.O_RDONLY) if self.is_named else (self.path, os.O_RDWR | os.O_CREAT)
            self._descriptor = open_without_links(path, flags)
            if not self.is_named:
                os.ftruncate(self._descriptor, kept_bytes)
            while self._position < kept_bytes:
                data = os.read(self._descriptor, min(kept_bytes - self._position, 1 << 24))
                self._digest.update(data)
                self._position += len(data)
        except OSError as error:
            raise self._make_error(error) from None
        if not kept_bytes:
            self.write(self._header)

    def has_bytes(self, kept_bytes: int) -> bool:
        """Return whether an earlier run has written at least this many bytes."""
        if kept_bytes == self.nbytes and not os.path.lexists(self.path):
            return os.path.isfile(self.target) and os.path.getsize(self.target) == kept_bytes
        try:
            return os.stat(self.path, follow_symlinks=False).st_size >= kept_bytes
        except OSError:
            return False

    def write(self, data: "bytes | np.ndarray") -> None:
        """Append bytes. Raises LocalllmError if the disk is full or a write fails."""
        remaining = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
        self._digest.update(remaining)
        try:
            while remaining.nbytes:
                count = os.write(self._descriptor, remaining)
                self._position += count
                remaining = remaining[count:]
        except OSError as error:
            raise self._make_error(error) from None

    def pad(self) -> None:
        self.write(bytes(self._pad_size(self._position) - self._position))

    def sync(self) -> None:
        if self.is_named:
            return
        try:
            sync_file(self._descriptor)
        except OSError as error:
            raise self._make_error(error) from None

    def finish(self) -> WrittenFile:
        try:
            if not self.is_named:
                replace_file(self.path, self.target)
        except OSError as error:
            raise self._make_error(error) from None
        return WrittenFile(self.target, self.nbytes, self._digest.hexdigest())

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _make_error(self, error: OSError) -> LocalllmError:
        return LocalllmError(f"{self.target}: cannot be written: {error.strerror or error}")


class ProgressRecord:
    """The number of finished tensors, and the seconds of each type, stored on disk."""

    def __init__(self, path: str, key: str):
        self.path, self._key = path, key
        self.done, self.seconds = 0, dict[str, float]()
        try:
            with open(path, "rb") as file:
                state = json.loads(file.read(1 << 20))
            if state["key"] == key:
                self.done, self.seconds = int(state["done"]), {name: float(n) for name, n in state["seconds"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass

    def save(self) -> None:
        """Write the record, atomically. Raises LocalllmError."""
        with SafeFile(self.path) as file:
            file.write(json.dumps({"key": self._key, "done": self.done, "seconds": self.seconds}).encode())

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)


# ---- types in one pass


class QuantizeSet:
    """Files of several types that are written together, tensor by tensor, with a record of their progress."""

    def __init__(
        self,
        members: Sequence[SetMember],
        inputs: Sequence[str],
        threads: int,
        on_progress: OnProgress,
        is_strict: bool = False,
    ):
        """Prepare the files. Raises UsageError if two types have the same output.

        is_strict: a clamped weight is an error.
        """
        self._members, self._threads, self._on_progress = members, threads, on_progress
        self._source = members[0].plan.source
        self._clamped = ClampedWeights(is_strict)
        paths = [path for member in members for path in member.paths]
        if len({*paths}) < len(paths):
            raise UsageError("two types would be written to the same file: put {type} into the name of OUT")
        self._files = [
            [
                PartialFile(path, metadata, jobs)
                for path, (metadata, jobs) in zip(each.paths, each.plan.files, strict=True)
            ]
            for each in members
        ]
        self._jobs = [member.plan.jobs for member in members]
        self._names = [job.tensor.name for job in self._jobs[0]]
        self._guard = members[0].plan.guard
        self._state = ProgressRecord(os.path.realpath(members[0].paths[0]) + STATE_SUFFIX, self._compute_key())
        self._inputs = inputs

    @property
    def resumes(self) -> bool:
        """Return whether an earlier run has left all its files, so that this one continues it."""
        names = self._names[: self._state.done]
        return self._state.done > 0 and all(
            file.has_bytes(file.compute_length(names)) for group in self._files for file in group
        )

    @property
    def warnings(self) -> list[str]:
        return self._clamped.format_lines()

    def check(self) -> None:
        """Check the output paths.

        Raises UsageError if they must not be written, LocalllmError if the disk is too full.
        """
        files = [file for group in self._files for file in group]
        need = sum(file.nbytes - (os.path.getsize(file.path) if os.path.isfile(file.path) else 0) for file in files)
        for number, member in enumerate(self._members):
            is_named = self.resumes and self._state.done == len(self._names)
            check_files([member.paths[0]] if is_named else member.paths, self._inputs, need if number == 0 else 0)

    def _compute_key(self) -> str:
        """Return a hash of the source, the types and the importance matrix, which identifies this work."""
        key = hashlib.sha256(repr((VERSION, self._guard.identity)).encode())
        for member, files in zip(self._members, self._files, strict=True):
            for path, file in zip(member.paths, files, strict=True):
                key.update(f"{os.path.realpath(path)}\0{file.nbytes}\0".encode())
            for metadata, jobs in member.plan.files:
                key.update(build_header(metadata, [job.output for job in jobs], get_alignment(metadata)))
                for job in jobs:
                    key.update(b"" if job.importance is None else job.importance.tobytes())
        return key.hexdigest()

    def run(self, widener: RowDequantizer) -> list[TypeResult]:
        """Write all files. Raises ModelError for a weight that is not finite, LocalllmError."""
        files = [file for group in self._files for file in group]
        with ExitStack() as stack:
            for file in files:
                stack.enter_context(WriteLock(file.target))
                stack.callback(file.close)
            finished = self._state.done if self.resumes else 0
            self._state.done = finished
            for file in files:
                file.open(file.compute_length(self._names[:finished]) if finished else 0)
            try:
                self._write(widener, finished)
                self._guard.check()
            except ModelError as error:
                for file in files:
                    file.discard()
                self._state.remove()
                raise add_path_to_error(error, self._source.path) from None
            self._save()
            results = [
                TypeResult(
                    each.recipe, each.plan, [file.finish() for file in group], self._state.seconds[each.recipe.name]
                )
                for each, group in zip(self._members, self._files, strict=True)
            ]
        self._state.remove()
        return results

    def _save(self) -> None:
        for file in (file for group in self._files for file in group):
            file.sync()
        self._state.save()

    def _write(self, widener: RowDequantizer, finished: int) -> None:
        """Write the tensors from index `finished` on."""
        count = sum(int(np.prod(job.tensor.shape)) for job in self._jobs[0][:finished])
        saved = monotonic()
        places = [map_files(group, member) for group, member in zip(self._files, self._members, strict=True)]
        with ThreadPoolExecutor(self._threads, "quantize") as executor:
            tasks = self._create_tasks(widener, finished)
            queue: deque[Future[EncodedRows]] = deque()
            try:
                for number in range(finished, len(self._names)):
                    name, jobs = self._names[number], [member[number] for member in self._jobs]
                    for first, last in jobs[0].divide_rows():
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

    def _account(self, encoded: "EncodedRows", jobs: Sequence[TensorJob]) -> None:
        """Add the seconds of the searches to those of the types that use them, in equal shares."""
        names = [job.format.name for job in jobs]
        for member, name in zip(self._members, names, strict=True):
            seconds = self._state.seconds.get(member.recipe.name, 0.0)
            share = encoded.seconds[name] / names.count(name) / self._threads  # threads that search at the same time
            self._state.seconds[member.recipe.name] = seconds + share

    def _create_tasks(self, widener: RowDequantizer, finished: int) -> Iterator[Callable[[], "EncodedRows"]]:
        for number in range(finished, len(self._names)):
            jobs = {member[number].format.name: member[number] for member in self._jobs}
            importance = find_shared_importance([*jobs.values()], widener)
            for first, last in next(iter(jobs.values())).divide_rows():
                yield partial(encode_rows, widener, jobs, importance, self._clamped, first, last)


def map_files(files: Sequence[PartialFile], member: SetMember) -> dict[str, PartialFile]:
    """Return the file of each tensor of a type, by name."""
    parts = zip(files, member.plan.files, strict=True)
    return {job.tensor.name: file for file, (_, jobs) in parts for job in jobs}


def find_shared_importance(jobs: Sequence[TensorJob], widener: RowDequantizer) -> np.ndarray | None:
    """Return the importance of a tensor's columns for all formats, float32 [matrices, columns], or None."""
    for job in jobs:
        if job.importance is not None:
            return job.importance
        if job.makes_logits and not job.is_copied:
            return compute_mean_squares(widener, job.tensor)
    return None


class EncodedRows(NamedTuple):
    """Rows of a tensor in several formats, uint8 [rows, bytes], and the seconds that each took."""

    rows: Mapping[str, np.ndarray]
    seconds: Mapping[str, float]


def encode_rows(
    widener: RowDequantizer,
    jobs: Mapping[str, TensorJob],
    importance: np.ndarray | None,
    clamped: ClampedWeights,
    first: int,
    last: int,
) -> EncodedRows:
    """Encode rows of a tensor in all its formats. Raises ModelError for a weight that is not finite."""
    tensor = next(iter(jobs.values())).tensor
    rows, seconds = dict[str, np.ndarray](), dict[str, float]()
    weights = dequantize_finite(widener, tensor, first, last) if can_dequantize(tensor.format) else None
    weight = None if importance is None else importance[first // tensor.shape[-2]]
    for name, job in jobs.items():
        start = perf_counter()
        if job.is_copied:
            rows[name] = np.ascontiguousarray(tensor.read_rows(first, last))
        else:
            assert weights is not None
            rows[name] = encode(name, weights, weight if job.format.block > 1 else None)
            clamped.check(tensor.name, job.format, weights, rows[name])
        seconds[name] = perf_counter() - start
    return EncodedRows(rows, seconds)


# ---- one type after the other


class SequentialSet:
    """Types that are quantized one after the other, as calibrated ones are.

    An interrupted command resumes with the first missing type.
    """

    def __init__(self, members: Sequence[SetMember], texts: Sequence[str]):
        """Load the state of an interrupted run.

        texts: paths of files that the result depends on besides the source.
        """
        self._members, guard = members, SourceGuard([*members[0].plan.source.files, *texts])
        names = [(member.recipe.name, *map(os.path.realpath, member.paths)) for member in members]
        state_key = (VERSION, guard.identity, names)
        self._state = ProgressRecord(
            os.path.realpath(members[0].paths[0]) + STATE_SUFFIX, hashlib.sha256(repr(state_key).encode()).hexdigest()
        )

    def run(self, make: Callable[[SetMember], None]) -> list[TypeResult]:
        """Quantize the types that are missing, each by `make`, and return the results of all."""
        state, results = self._state, []
        for number, member in enumerate(self._members):
            if number >= state.done or not all(map(os.path.isfile, member.paths)):
                start = perf_counter()
                make(member)
                state.seconds[member.recipe.name], state.done = perf_counter() - start, number + 1
                state.save()
            files = [WrittenFile(path, *compute_sha256(path)) for path in member.paths]
            results.append(TypeResult(member.recipe, member.plan, files, state.seconds[member.recipe.name]))
        state.remove()
        return results


# ---- reports


class Divergence(NamedTuple):
    """The divergence of a file's predictions from the original's.

    Attributes:
        mean: Kullback-Leibler divergence, in nats.  error: its standard error.
        same_top: share of tokens with the same most likely prediction, 0 to 1.
    """

    mean: float
    error: float
    same_top: float

    @property
    def cells(self) -> tuple[str, str]:
        """The divergence and the share of equal predictions, formatted for a table."""
        return f"{self.mean:.4f} ± {self.error:.4f}", f"{100 * self.same_top:.1f} %"


def build_report(results: Sequence[TypeResult], measured: Mapping[str, Divergence]) -> list[dict[str, object]]:
    """Return for each type its name, size, bits per weight, seconds, divergence if measured, and files with SHA-256."""
    return [
        {
            "type": result.recipe.name,
            "size": sum(file.nbytes for file in result.files),
            "bits_per_weight": round(result.plan.bits_per_weight, 4),
            "seconds": round(result.seconds, 2),
            **({"divergence": measured[result.recipe.name]._asdict()} if measured else {}),
            "files": [{"name": os.path.basename(f.path), "size": f.nbytes, "sha256": f.sha256} for f in result.files],
        }
        for result in results
    ]


def format_markdown(results: Sequence[TypeResult], measured: Mapping[str, Divergence]) -> str:
    """Format the types as a Markdown table for a model card."""
    titles = ["file", "type", "size", "bits per weight", *(["KL divergence", "same top token"] if measured else [])]
    lines = [format_row([*titles, "SHA-256"]), f"|---|---|{'--:|' * (len(titles) - 2)}---|"]
    for result in results:
        of_model = measured[result.recipe.name].cells if measured else ()
        for file in result.files:
            name, size = os.path.basename(file.path), f"{file.nbytes / 1e9:.2f} GB"
            size = size if file.nbytes >= 1e9 else f"{file.nbytes / 1e6:.1f} MB"
            bits = f"{result.plan.bits_per_weight:.2f}"
            lines.append(format_row([name, result.recipe.name, size, bits, *of_model, f"`{file.sha256}`"]))
    return "\n".join(lines) + "\n"


def format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
