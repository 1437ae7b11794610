"""Store the tokens of earlier answers, with an index, for n-gram speculation: one file per vocabulary.

    count      number of tokens, 4 bytes, little-endian
    tokens     int32 each
    places     int32 each, the index; see localllm.generation.speculation.ngram

The files are written atomically, begin with a checksum, and only the user can read them.
"""

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from localllm.errors import LocalllmError
from localllm.files.cache.checksummed_cache import read_checksummed, remove_oldest, write_checksummed
from localllm.system.files import get_cache_folder

MAX_VOCABULARIES = 16  # vocabularies


def get_folder() -> Path:
    return get_cache_folder() / "written"


def read_texts(name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the tokens and the index of a vocabulary, int32 each; None if the file is missing or damaged."""
    content = read_checksummed(get_folder() / name)
    if not content:
        return None
    (count,) = struct.unpack_from("<I", content)
    tokens, places = np.split(np.frombuffer(content, "<i4", offset=4), [count])
    return tokens, places


def write_texts(name: str, tokens: np.ndarray, places: np.ndarray) -> None:
    """Write the tokens and the index of a vocabulary, and remove files of the oldest ones. Raises OSError."""
    content = struct.pack("<I", len(tokens)) + tokens.astype("<i4").tobytes() + places.astype("<i4").tobytes()
    write_checksummed(get_folder() / name, content)
    remove_oldest(get_folder(), MAX_VOCABULARIES)


def list_files() -> list[tuple[int, int, float]]:
    """Return the token count, size in bytes and time of writing (seconds since 1970) of each file."""
    rows = list[tuple[int, int, float]]()
    for path in list_paths():
        with suppress(FileNotFoundError):
            if texts := read_texts(path.name):
                state = path.stat()
                rows.append((len(texts[0]), state.st_size, state.st_mtime))
    return rows


def remove_all() -> int:
    """Remove all files and return their total size in bytes. Raises LocalllmError."""
    freed = 0
    for path in list_paths():
        try:
            size = path.stat().st_size
            path.unlink()
            freed += size
        except FileNotFoundError:  # another program was faster
            pass
        except OSError as error:
            raise LocalllmError(f"{path}: cannot be removed: {error.strerror}") from None
    return freed


def list_paths() -> list[Path]:
    """Return the paths of all files; empty if the folder does not exist."""
    with suppress(FileNotFoundError):
        return list(get_folder().iterdir())
    return []
