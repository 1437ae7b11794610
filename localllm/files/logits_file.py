"""Read and write logits for comparing models, in the layout of llama-perplexity's --kl-divergence-base.

All little-endian: "_logits_"; three int32: the tokens of a chunk n, the vocabulary size v, the number of chunks; the
tokens, int32 [chunks, n]. Then follow, for each chunk, the log-probabilities of the next token after each of the tokens
n / 2 to n - 2: a row of uint16 [4 + v rounded up to even]. The first 8 bytes of a row are two float32, scale and
minimum; each value x after them represents x * scale + minimum. A token that is less likely than e^-16 times the
likeliest is stored with that probability.
"""

import os
import shutil
import struct
from typing import NamedTuple, Self

import numpy as np

from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.gguf.header import printable
from localllm.files.safe_file import SafeFile, resolve_target

MAGIC = b"_logits_"
MAX_DISTANCE = np.float32(16)  # log-probabilities further below the likeliest token's are stored as this far below
HEADER_VALUES = 4  # uint16 numbers of a row before the vocabulary: scale and minimum


def compute_row_width(vocab_size: int) -> int:
    """Return the length of a row in uint16 values."""
    return HEADER_VALUES + vocab_size + vocab_size % 2


def count_scored_tokens(size: int) -> int:
    """Return how many tokens of a chunk of `size` tokens have logits."""
    return size - 1 - size // 2


def quantize_logits(logits: np.ndarray, log_sum: float, row: np.ndarray, scratch: np.ndarray) -> None:
    """Quantize the logits of one token into a row.

    logits: float32 [vocab]. log_sum: log(sum(exp(logits))). row: uint16 [compute_row_width(vocab)], written. scratch:
    float32 [vocab], overwritten.
    """
    top = logits.max()
    bottom = max(logits.min(), top - MAX_DISTANCE)
    scale = (top - bottom) / np.float32(65535)
    row[:HEADER_VALUES] = np.array([scale, np.float32(bottom - log_sum)], "<f4").view("<u2")
    np.maximum(logits, bottom, out=scratch)
    scratch -= bottom
    scratch *= 1 / scale if scale > 0 else np.float32(0)
    np.rint(scratch, out=scratch)
    row[HEADER_VALUES : HEADER_VALUES + len(logits)] = np.minimum(scratch, np.float32(65535), out=scratch)


def dequantize_logits(row: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Decode the log-probabilities of a row into `out`, float32 [vocab], and return it."""
    scale, minimum = row[:HEADER_VALUES].view("<f4")
    np.multiply(row[HEADER_VALUES : HEADER_VALUES + len(out)], scale, out=out)
    out += minimum
    return out


class LogitsWriter:
    """A new file of logits, which replaces `path` when its `with` block ends without an exception."""

    def __init__(self, path: str | os.PathLike[str], chunks: np.ndarray, vocab_size: int):
        """Prepare a file for the logits of chunks. Raises UsageError, and LocalllmError if the disk is too full.

        chunks: int32 [chunks, tokens of a chunk].
        """
        count, size = chunks.shape
        self._file = SafeFile(resolve_target(path))
        self._header = MAGIC + struct.pack("<3i", size, vocab_size, count) + chunks.astype("<i4").tobytes()
        nbytes = count * count_scored_tokens(size) * compute_row_width(vocab_size) * 2
        free = shutil.disk_usage(self._file.folder).free
        if nbytes > free:
            sizes = f"{nbytes / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free"
            raise LocalllmError(f"{os.fsdecode(path)}: {count} chunks of logits take {sizes}; lower --chunks")

    def write(self, rows: np.ndarray) -> None:
        """Append rows that `quantize_logits` has written, in order."""
        self._file.write(rows)

    def __enter__(self) -> Self:
        self._file.__enter__()
        self._file.write(self._header)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)


class LogitsFile(NamedTuple):
    """A file of logits, mapped into memory."""

    chunks: np.ndarray  # int32 [chunks, tokens of a chunk]
    vocab_size: int
    rows: np.ndarray  # uint16 [chunks, tokens with logits, row_width], mapped

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "LogitsFile":
        """Map a file into memory. Raises ModelError if it is invalid or incomplete, UsageError if it cannot be read."""
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
            raise ModelError(f"{name}: the logits file is damaged; write it again with --save-logits")
        start, numbers = 20 + 4 * count * size, compute_row_width(vocab_size)
        if length != start + count * count_scored_tokens(size) * numbers * 2:
            raise ModelError(f"{name}: the logits file is incomplete; write it again with --save-logits")
        chunks = np.fromfile(path, "<i4", count * size, offset=20).reshape(count, size)
        return cls(chunks, vocab_size, np.memmap(path, "<u2", "r", start, (count, count_scored_tokens(size), numbers)))
