"""Files of logits to compare models with: the layout of llama-perplexity's --kl-divergence-base.

All little-endian: "_logits_"; int32 tokens of a chunk n, vocabulary size v, number of chunks; the tokens, int32
[chunks, n]. For each chunk follow the log-probabilities of what comes after the tokens from n / 2 to n - 2: per token,
uint16 [4 + v rounded up to even]; the first 8 bytes are two float32, scale and minimum, and the other numbers mean
number * scale + minimum. What is less likely than the likeliest token by more than a factor of e^16 is stored as if it
were by that factor.
"""

import os
import shutil
import struct
from typing import Any, NamedTuple, Self

import numpy as np

from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.gguf.header import printable
from localllm.files.safe_file import SafeFile, resolve_target

MAGIC = b"_logits_"
FLOOR = np.float32(16)  # how far below the likeliest token logarithms of probabilities are kept apart
SCALED = 4  # numbers of a row before the vocabulary


def row_width(vocab_size: int) -> int:
    """Return the uint16 numbers in a row."""
    return SCALED + vocab_size + vocab_size % 2


def count_scored_tokens(size: int) -> int:
    """Return for how many tokens of a chunk there are logits."""
    return size - 1 - size // 2


def pack(logits: np.ndarray, log_sum: float, row: np.ndarray, scratch: np.ndarray) -> None:
    """Quantize one token's logits, float32 [vocab] as `scratch`, to a row; log_sum: their log_sum_exp."""
    most = logits.max()
    least = max(logits.min(), most - FLOOR)
    scale = (most - least) / np.float32(65535)
    row[:SCALED] = np.array([scale, np.float32(least - log_sum)], "<f4").view("<u2")
    np.maximum(logits, least, out=scratch)
    scratch -= least
    scratch *= 1 / scale if scale > 0 else np.float32(0)
    np.rint(scratch, out=scratch)
    row[SCALED : SCALED + len(logits)] = np.minimum(scratch, np.float32(65535), out=scratch)


def unpack(row: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Decode a row's log-probabilities to float32 [vocab]."""
    scale, minimum = row[:SCALED].view("<f4")
    np.multiply(row[SCALED : SCALED + len(out)], scale, out=out)
    out += minimum
    return out


class LogitsWriter:
    """A new file of logits, which appears at the end of a `with` block that raises nothing."""

    def __init__(self, path: str | os.PathLike[str], chunks: np.ndarray, vocab_size: int):
        """Prepare a file for chunks, int32 [chunks, tokens of a chunk].

        Raises UsageError, LocalllmError if the disk has no room.
        """
        count, size = chunks.shape
        self._file = SafeFile(resolve_target(path))
        self._header = MAGIC + struct.pack("<3i", size, vocab_size, count) + chunks.astype("<i4").tobytes()
        needed = count * count_scored_tokens(size) * row_width(vocab_size) * 2
        free = shutil.disk_usage(self._file.folder).free
        if needed > free:
            sizes = f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            raise LocalllmError(f"{os.fsdecode(path)}: {count} chunks of logits take {sizes}; use fewer with --chunks")

    def write(self, rows: np.ndarray) -> None:
        """Append rows made by `pack`, in order."""
        self._file.write(rows)

    def __enter__(self) -> Self:
        self._file.__enter__()
        self._file.write(self._header)
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


class LogitsFile(NamedTuple):
    """A file of logits, open for reading."""

    chunks: np.ndarray  # int32 [chunks, tokens of a chunk]
    vocab_size: int
    rows: np.ndarray  # uint16 [chunks, tokens with logits, numbers], mapped

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "LogitsFile":
        """Open a file. Raises ModelError for an invalid or incomplete one, UsageError if it cannot be read."""
        name = printable(os.fsdecode(path), 4096)
        try:
            with open(path, "rb") as file:
                beginning = file.read(20)
                length = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
        if len(beginning) < 20 or beginning[:8] != MAGIC:
            raise ModelError(f"{name}: not a logits file; --save-logits writes one")
        size, vocab_size, count = struct.unpack("<3i", beginning[8:])
        if min(size - 3, vocab_size, count) < 1:
            raise ModelError(f"{name}: the logits file is damaged")
        start, numbers = 20 + 4 * count * size, row_width(vocab_size)
        if length != start + count * count_scored_tokens(size) * numbers * 2:
            raise ModelError(f"{name}: the logits file is incomplete")
        chunks = np.fromfile(path, "<i4", count * size, offset=20).reshape(count, size)
        return cls(chunks, vocab_size, np.memmap(path, "<u2", "r", start, (count, count_scored_tokens(size), numbers)))
