"""Cache encoded images in the files of localllm.files.cache.prefix_files, shared by processes.

The key is the image's digest, which includes a fingerprint of the projector and of the packages that preprocess images,
so that a cached image equals a newly encoded one.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np

from localllm.arch.layer_state import KVType
from localllm.engine.operations.operation import Operation
from localllm.engine.prefix_store import compute_fingerprint
from localllm.errors import LocalllmError
from localllm.files.cache.prefix_files import (
    PrefixChunkInfo,
    get_size_limit,
    mark_used,
    open_prefix,
    prune,
    remove_prefix,
    write_prefix,
)
from localllm.files.gguf.file import GGUFFile

COUNTS, ROWS = "counts", "rows"  # sections of a file: row count of each crop, int64; all rows, float32


def compute_projector_fingerprint(
    file: GGUFFile, operations: Sequence[Operation], preparing: Sequence[ModuleType]
) -> bytes:
    """Hash everything except the pixels that determines an image's rows, to 32 bytes.

    preparing: packages that preprocess images. Raises OSError.
    """
    import PIL  # needed only for images

    key = hashlib.blake2b(compute_fingerprint(file, file.stat_files(), operations, KVType.parse("f32")), digest_size=32)
    key.update(PIL.__version__.encode())
    for module in preparing:
        for folder in module.__path__:
            for source in sorted(Path(folder).glob("*.py")):
                key.update(source.read_bytes())
    return key.digest()


class EncodedImageCache:
    """The cached images of one projector."""

    def __init__(self, name: str, width: int):
        """Open the cache of a projector.

        name: shown in listings of the cache. width: length of its rows.
        """
        self._name, self._width = name, width

    def find(self, digest: bytes) -> list[np.ndarray] | None:
        """Return the rows of each crop of an image, float32 [rows, width]; None if they are not cached."""
        file, key = open_prefix(compute_file_key(digest)) if get_size_limit() else None, compute_file_key(digest)
        if file is None:
            return None
        try:
            with file:
                counts, rows = file.read(COUNTS).view(np.int64), file.read(ROWS).view(np.float32)
                if counts.min(initial=0) < 0 or int(counts.sum()) * self._width != len(rows):
                    raise ValueError
        except (ValueError, KeyError, OSError):
            remove_prefix(key)
            return None
        mark_used([key])
        return np.split(rows.reshape(-1, self._width), np.cumsum(counts)[:-1])

    def keep(self, digest: bytes, rows: Sequence[np.ndarray]) -> None:
        """Store the rows of each crop of an image; ignore errors, because a missing entry costs only time."""
        if get_size_limit() == 0:
            return
        counts = np.array([len(lot) for lot in rows], np.int64)
        parts = {
            COUNTS: counts.view(np.uint8),
            ROWS: np.concatenate(rows).astype(np.float32).reshape(-1).view(np.uint8),
        }
        with suppress(OSError, LocalllmError):
            write_prefix(compute_file_key(digest), PrefixChunkInfo(self._name, int(counts.sum()), ""), parts)
            prune()


def compute_file_key(digest: bytes) -> str:
    """Return the key of an image's file in the cache."""
    return hashlib.blake2b(digest, digest_size=16, person=b"image").hexdigest()
