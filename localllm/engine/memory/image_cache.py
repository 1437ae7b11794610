"""What an encoder has made of images, kept from process to process: in the files of localllm.files.cache.prefix_files.

The key of one is made of the image's digest, which begins with a fingerprint of the projector, and of what prepares
images: so what is found is what would be made.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np

from localllm.arch.kv_cache_types import KVType
from localllm.engine.memory.fingerprint import fingerprint, state_of
from localllm.engine.operations.operation import Operation
from localllm.errors import LocalllmError
from localllm.files.cache.prefix_files import (
    PrefixAbout,
    mark_used,
    open_prefix,
    prune,
    remove,
    size_limit,
    write_prefix,
)
from localllm.files.gguf.file import GGUFFile

COUNTS, ROWS = "counts", "rows"  # parts of a file: int64 [lots of rows]; float32, the rows of all, one behind the other


def projector_fingerprint(file: GGUFFile, operations: Sequence[Operation], preparing: Sequence[ModuleType]) -> bytes:
    """What an image's rows depend on besides its pixels: 32 bytes. preparing: packages that prepare images. Raises
    OSError."""
    import PIL  # there is an image

    key = hashlib.blake2b(fingerprint(file, state_of(file), operations, KVType.of("f32")), digest_size=32)
    key.update(PIL.__version__.encode())
    for module in preparing:
        for folder in module.__path__:
            for source in sorted(Path(folder).glob("*.py")):
                key.update(source.read_bytes())
    return key.digest()


class SeenRows:
    """The files of one projector."""

    def __init__(self, name: str, width: int):
        """name: the projector's, for lists; width: of a row."""
        self._name, self._width = name, width

    def find(self, digest: bytes) -> list[np.ndarray] | None:
        """The rows of each lot of an image, float32 [rows, width], if a file has them."""
        kept, key = open_prefix(key_of(digest)) if size_limit() else None, key_of(digest)
        if kept is None:
            return None
        try:
            with kept:
                counts, rows = kept.read(COUNTS).view(np.int64), kept.read(ROWS).view(np.float32)
                if counts.min(initial=0) < 0 or int(counts.sum()) * self._width != len(rows):
                    raise ValueError
        except (ValueError, KeyError, OSError):
            remove(key)
            return None
        mark_used([key])
        return np.split(rows.reshape(-1, self._width), np.cumsum(counts)[:-1])

    def keep(self, digest: bytes, rows: Sequence[np.ndarray]) -> None:
        """Write them; a folder that cannot be written costs only time."""
        if size_limit() == 0:
            return
        counts = np.array([len(lot) for lot in rows], np.int64)
        parts = {
            COUNTS: counts.view(np.uint8),
            ROWS: np.concatenate(rows).astype(np.float32).reshape(-1).view(np.uint8),
        }
        with suppress(OSError, LocalllmError):
            write_prefix(key_of(digest), PrefixAbout(self._name, int(counts.sum()), ""), parts)
            prune()


def key_of(digest: bytes) -> str:
    """The name of a file."""
    return hashlib.blake2b(digest, digest_size=16, person=b"image").hexdigest()
