"""Read the small files of a checkpoint, which are not trusted."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localllm.errors import ModelError
from localllm.files.gguf.header import printable

LFS = b"version https://git-lfs.github.com/spec/"  # the beginning of a Git LFS pointer
MAX_BYTES = 1 << 28  # the largest known tokenizer.json has 33 MB


def read_bytes(path: Path) -> bytes | None:
    """Read a file of at most 256 MiB; None if it does not exist. Raises ModelError."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"{path}: the file must have at most {MAX_BYTES} bytes (found {path.stat().st_size})")
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    refuse_lfs_pointer(path, data)
    return data


def refuse_lfs_pointer(path: Path, data: bytes) -> None:
    """Raise ModelError for a Git LFS pointer, which a clone without LFS leaves in place of a large file."""
    if data.startswith(LFS):
        raise ModelError(f"{path}: a Git LFS pointer instead of the file: run `git lfs pull` in the folder")


def read_text(path: Path) -> str | None:
    """Decode a UTF-8 file, without its byte order mark; None if it does not exist. Raises ModelError."""
    data = read_bytes(path)
    try:
        return None if data is None else data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ModelError(f"{path}: the file must be UTF-8 text") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """Parse a file that contains a JSON object; None if it does not exist. Raises ModelError."""
    text = read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


@contextmanager
def report_as_model_error(path: Path) -> Iterator[None]:
    """Turn exceptions that malformed content causes within the block into a ModelError that names the file."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path}: has unexpected content: {printable(problem)}") from None
