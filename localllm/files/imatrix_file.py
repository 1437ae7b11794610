"""Read and write importance matrices: mean squared activations per column, which guide quantizing.

llama.cpp's GGUF layout: general.type "imatrix", imatrix.datasets (names of the calibration texts), imatrix.chunk_count
and imatrix.chunk_size (tokens). Each matrix NAME of the model has two tensors: NAME.in_sum2, float32 [matrices,
columns], sums of squared activations, and NAME.counts, float32 [matrices, 1], token counts. A stack of experts has one
row per expert; otherwise `matrices` is 1 and the tensors are vectors. Other tensors are ignored.

llama.cpp's older layout (.dat) can be read, too. It is a sequence of little-endian int32 and float32: the number of
matrices; for each the length of its name, the name, a number of calls n, the number of values, and the values, mean
squares times n; then the number of chunks, the length of the text's name, and the name.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import MAGIC, printable
from localllm.files.gguf.writer import OutputTensor, write_gguf

SUMS_SUFFIX, COUNTS_SUFFIX = ".in_sum2", ".counts"
CHUNK_SIZE = 512  # tokens, for files without imatrix.chunk_size
RUN_KEY = "localllm.imatrix.run"


@dataclass(frozen=True, eq=False)
class SquaredActivations:
    """Sums of squared activations of a matrix, or of each expert of a stack."""

    sums: np.ndarray  # float32 [matrices, columns] of squared activations
    counts: np.ndarray  # float64 [matrices], whole numbers of tokens

    def average(self) -> np.ndarray:
        """Return the mean per column, float32 [matrices, columns]; 1 for an expert that received no token."""
        counts = self.counts[:, None]
        return np.where(counts > 0, self.sums / np.maximum(counts, 1), 1).astype(np.float32)

    def merge(self, other: "SquaredActivations") -> "SquaredActivations":
        """Return the sum of both. Raises ValueError if the shapes differ."""
        if self.sums.shape != other.sums.shape:
            raise ValueError(f"{list(self.sums.shape)} and {list(other.sums.shape)}")
        return SquaredActivations(self.sums + other.sums, self.counts + other.counts)


@dataclass(frozen=True, eq=False)
class ImportanceMatrix:
    """The squared activations of all matrices of a model, measured on calibration texts."""

    squares: Mapping[str, SquaredActivations]  # by tensor name, as blk.0.attn_q.weight
    datasets: Sequence[str] = ()  # names of the texts
    chunks: int = 0
    chunk_size: int = CHUNK_SIZE  # tokens
    run: str = ""  # in an unfinished file, a key that identifies the computation

    def merge(self, other: "ImportanceMatrix") -> "ImportanceMatrix":
        """Return the sum of both, as if one run had continued the other.

        Raises UsageError if they are of different models.
        """
        squares = dict(self.squares)
        for name, squares_there in other.squares.items():
            try:
                squares[name] = squares[name].merge(squares_there) if name in squares else squares_there
            except ValueError as error:
                raise UsageError(f"the importance matrices are of different models: {name} is {error}") from None
        datasets = [*self.datasets, *(name for name in other.datasets if name not in self.datasets)]
        tokens = self.chunks * self.chunk_size + other.chunks * other.chunk_size
        return replace(self, squares=squares, datasets=datasets, chunks=tokens // self.chunk_size)


def load_imatrix(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Load mean squared activations by tensor name: float32 [columns], or [experts, columns].

    In the older layout, experts have [experts * columns]. Raises ModelError.
    """
    means = {name: squares.average() for name, squares in read_imatrix(path).squares.items()}
    return {name: mean[0] if len(mean) == 1 else mean for name, mean in means.items()}


def read_imatrix(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """Read an importance matrix in either layout.

    Raises ModelError if it is invalid, UsageError if the file cannot be read.
    """
    path = os.fsdecode(path)
    try:
        with open(path, "rb") as file:
            is_gguf = file.read(4) == MAGIC
    except OSError as error:
        raise UsageError(f"{printable(path, 4096)}: cannot be read: {error.strerror}") from None
    matrix = read_gguf(path) if is_gguf else read_legacy(path)
    for name, squares in matrix.squares.items():
        if not (np.isfinite(squares.sums).all() and (squares.sums >= 0).all()):
            raise ModelError(
                f"{printable(path, 4096)}: the squares of {printable(name)} must not be negative or infinite"
            )
    return matrix


def read_gguf(path: str) -> ImportanceMatrix:
    with GGUFFile.open(path) as file:
        names = [name.removesuffix(SUMS_SUFFIX) for name in file.tensors if name.endswith(SUMS_SUFFIX)]
        if not names:
            raise ModelError(f"{printable(path, 4096)}: not an importance matrix")
        squares = {name: read_squares(file, name) for name in names}
        size = get_positive_integer(file.metadata, "imatrix.chunk_size", CHUNK_SIZE)
        chunks, run = get_positive_integer(file.metadata, "imatrix.chunk_count", 0), file.metadata.get(RUN_KEY)
        datasets = file.metadata.get("imatrix.datasets")
        texts = [str(text) for text in datasets] if isinstance(datasets, list) else []
        return ImportanceMatrix(squares, texts, chunks, size, run if isinstance(run, str) else "")


def read_squares(file: GGUFFile, name: str) -> SquaredActivations:
    """Read the sums and counts of a matrix. Raises ModelError."""
    sums, counts = file.tensors[name + SUMS_SUFFIX], file.tensors.get(name + COUNTS_SUFFIX)
    if counts is None or {sums.format.name, counts.format.name} != {"F32"}:
        raise ModelError(f"{printable(file.path, 4096)}: {printable(name)} must have sums and counts in F32")
    columns = sums.shape[-1]
    rows = np.ascontiguousarray(sums.data).view(np.float32).reshape(-1, columns).copy()
    tokens = np.ascontiguousarray(counts.data).view(np.float32).reshape(-1).astype(np.float64)
    if len(tokens) not in (1, len(rows)) or not (np.isfinite(tokens).all() and (tokens >= 0).all()):
        raise ModelError(f"{printable(file.path, 4096)}: {printable(name)} must have one count per row of its sums")
    return SquaredActivations(rows, np.broadcast_to(np.rint(tokens), len(rows)))


def get_positive_integer(metadata: Mapping[str, object], key: str, default: int) -> int:
    """Return a value of the metadata, or the default if it is not a positive integer."""
    value = metadata.get(key)
    return value if isinstance(value, int) and value > 0 else default


def read_legacy(path: str) -> ImportanceMatrix:
    """Read the older layout (.dat), in which all experts of a stack share a count. Raises ModelError."""
    data, squares = memoryview(Path(path).read_bytes()), {}
    try:
        entries, data = read_number(data)
        if not 0 < entries <= len(data):
            raise ValueError
        for _ in range(entries):
            name, data = read_string(data)
            calls, data = read_number(data)
            values, data = read_number(data)
            if values < 1 or calls < 0 or 4 * values > len(data):
                raise ValueError
            with np.errstate(over="ignore"):  # read_imatrix refuses infinite numbers
                sums = np.frombuffer(data[: 4 * values], "<f4")[None] * np.float32(CHUNK_SIZE)
            squares[name], data = (
                SquaredActivations(sums, np.array([max(calls, 1) * CHUNK_SIZE], float)),
                data[4 * values :],
            )
        chunks, data = read_number(data) if data else (0, data)
        dataset, data = read_string(data) if data else ("", data)
    except (ValueError, UnicodeDecodeError):
        raise ModelError(f"{printable(path, 4096)}: not an importance matrix of llama.cpp (.gguf or .dat)") from None
    return ImportanceMatrix(squares, [dataset] if dataset else [], max(chunks, 0))


def read_number(data: memoryview) -> tuple[int, memoryview]:
    """Read an int32 and return it with the remaining data. Raises ValueError at the end of the data."""
    if len(data) < 4:
        raise ValueError
    return int.from_bytes(data[:4], "little", signed=True), data[4:]


def read_string(data: memoryview) -> tuple[str, memoryview]:
    """Read a string that its length precedes, and return it with the remaining data. Raises ValueError."""
    length, data = read_number(data)
    if not 0 <= length <= len(data):
        raise ValueError
    return bytes(data[:length]).decode(), data[length:]


def write_imatrix(path: str | os.PathLike[str], matrix: ImportanceMatrix) -> None:
    """Write an importance matrix in the GGUF layout, atomically. Raises LocalllmError."""
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(matrix.datasets) or ["unknown"],  # llama-quantize takes the first without asking
        "imatrix.chunk_count": matrix.chunks,
        "imatrix.chunk_size": matrix.chunk_size,
    }
    outputs = [output for name, squares in sorted(matrix.squares.items()) for output in build_tensors(name, squares)]
    write_gguf(path, metadata | ({RUN_KEY: matrix.run} if matrix.run else {}), outputs)


def build_tensors(name: str, squares: SquaredActivations) -> tuple[OutputTensor, OutputTensor]:
    """Build the two tensors of a matrix in the GGUF layout."""
    is_single, counts = len(squares.sums) == 1, squares.counts.astype(np.float32)
    return (
        OutputTensor.from_array(name + SUMS_SUFFIX, squares.sums[0] if is_single else squares.sums),
        OutputTensor.from_array(name + COUNTS_SUFFIX, counts if is_single else counts[:, None]),
    )
