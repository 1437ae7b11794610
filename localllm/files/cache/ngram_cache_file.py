"""Files of what was written before, as tokens with an index: one for each vocabulary, in the user's cache folder.

    count      of tokens, 4 bytes, little-endian
    tokens     int32 each
    places     int32 each, the index; localllm.generation.speculation.ngram_cache says of what

They appear whole, behind a checksum, and can be read by the user only.
"""

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from localllm.errors import LocalllmError
from localllm.files.cache.checksummed_cache import read_kept, write_kept
from localllm.files.cache.validated_cache import forget_oldest
from localllm.quant.cache import cache_folder

MOST = 16  # vocabularies


def folder() -> Path:
    return cache_folder() / "written"


def read_texts(name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Tokens and index of a vocabulary; None if there are none, or the file is damaged."""
    content = read_kept(folder() / name)
    if not content:
        return None
    (count,) = struct.unpack_from("<I", content)
    tokens, places = np.split(np.frombuffer(content, "<i4", offset=4), [count])
    return tokens, places


def write_texts(name: str, tokens: np.ndarray, places: np.ndarray) -> None:
    """Raises OSError."""
    content = struct.pack("<I", len(tokens)) + tokens.astype("<i4").tobytes() + places.astype("<i4").tobytes()
    write_kept(folder() / name, content)
    forget_oldest(folder(), MOST)


def sizes() -> list[tuple[int, int, float]]:
    """Of each file: tokens, bytes, and when it was written, in seconds since 1970."""
    found = list[tuple[int, int, float]]()
    for path in paths():
        with suppress(FileNotFoundError):
            if texts := read_texts(path.name):
                state = path.stat()
                found.append((len(texts[0]), state.st_size, state.st_mtime))
    return found


def clear() -> int:
    """Remove all of them; how many bytes they had. Raises LocalllmError if some cannot be removed."""
    freed = 0
    for path in paths():
        try:
            size = path.stat().st_size
            path.unlink()
            freed += size
        except FileNotFoundError:  # another program was faster
            pass
        except OSError as error:
            raise LocalllmError(f"{path}: cannot be removed: {error.strerror}") from None
    return freed


def paths() -> list[Path]:
    """Of all files; none if there is no folder."""
    with suppress(FileNotFoundError):
        return list(folder().iterdir())
    return []
