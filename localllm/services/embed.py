"""Vectors of many texts: what stands behind `localllm embed`, and those that are kept by a text's content."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from localllm.arch.vision.clip import is_pair
from localllm.engine.options import EngineOptions
from localllm.errors import UsageError
from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.files.gguf.file import GGUFFile
from localllm.files.text_file import decode_text
from localllm.frozen import frozen
from localllm.generation.embedding.embedder import Embedder, EmbedOptions, ShownImage
from localllm.images.opened import read_source
from localllm.quant.cache import cache_folder
from localllm.services.records import IMAGE, Record
from localllm.text.tokenizer import Tokenizer

SAMPLE = 1 << 16  # bytes of a model's beginning and end that tell it from others
KEY = 16  # bytes that stand for a text


@frozen
class EmbedJob:
    """Which model, and how its vectors are made."""

    path: str
    options: EmbedOptions
    engine: EngineOptions
    pooling: str | None = None
    sees: bool = False  # whether there are images among the texts


@contextmanager
def embedder(job: EmbedJob) -> Iterator[Any]:
    """The model, open: an Embedder, or a PairEmbedder for pictures, too. Raises ModelError, MemoryLimitError,
    UsageError."""
    file = GGUFFile.open(job.path)
    made: Any
    if is_pair(file):
        from localllm.generation.embedding import clip_embedder as pair_embedding  # seldom needed

        if job.pooling is not None:
            raise UsageError("--pooling: a model of pictures and texts says itself how their rows become vectors")
        made = pair_embedding.PairEmbedder(file, job.engine)
    elif job.sees:
        raise UsageError(f"{job.path}: this model makes no vectors of images, as one of CLIP's does")
    else:
        made = Embedder(file, Tokenizer.from_metadata(file.metadata), job.engine, job.pooling)
    try:
        yield made
    finally:
        made.close()


def text_of(record: Record, field: str) -> "str | ShownImage":
    """A record's text: the line, or the object's field; or its image. Raises UsageError."""
    if record.error:
        raise UsageError(record.error)
    if isinstance(record.input, str | ShownImage):
        return record.input
    if is_image(record):
        return ShownImage(record.input[IMAGE])
    text = record.input.get(field)
    if not isinstance(text, str):
        raise UsageError(f'record {record.id!r} has no text "{field}"; --field NAME names another')
    return text


def is_image(record: Record) -> bool:
    """Whether there is an image to read, and no text."""
    if isinstance(record.input, ShownImage):
        return True
    return isinstance(record.input, dict) and isinstance(record.input.get(IMAGE), str) and "text" not in record.input


def key_of(given: str | ShownImage) -> str:
    """What a text or an image is known by: its content. Raises UsageError."""
    if isinstance(given, str):
        return given
    return "\0" + hashlib.sha256(read_source(given.source)[1]).hexdigest()


def files_below(names: Sequence[str]) -> list[str]:
    """Files, and those in folders, in the order of their names; hidden ones are left out. Raises UsageError."""
    found: list[str] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = (
                one for one in path.rglob("*") if not any(part.startswith(".") for part in one.relative_to(path).parts)
            )
            found += sorted(str(one) for one in inside if one.is_file())
        elif path.is_file():
            found.append(name)
        else:
            raise UsageError(f"{name}: no such file or folder")
    return found


def file_text(path: str) -> str:
    """A file's text. Raises UsageError for one that is not UTF-8."""
    try:
        return decode_text(Path(path).read_bytes(), path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def nearest(query: np.ndarray, vectors: np.ndarray, top: int) -> list[tuple[int, float]]:
    """The vectors most alike to a query, float32 [numbers], all of length 1: numbers and cosines, best first."""
    cosines = vectors @ query
    order = np.argsort(-cosines, kind="stable")[:top]
    return [(int(number), float(cosines[number])) for number in order]


class VectorCache:
    """Vectors of texts that a model has read before, in the user's cache folder, by the texts' content.

    Attributes:
        found: how many texts had one.
    """

    def __init__(self, job: EmbedJob, width: int):
        """width: numbers of a vector."""
        self._path = cache_folder() / "vectors" / fingerprint(job)
        self._width, self.found = width, 0
        data = np.frombuffer(read_checksummed(self._path) or b"", np.uint8)
        size = KEY + 4 * width
        rows = data[: len(data) // size * size].reshape(-1, size)
        self._places = {row.tobytes(): number for number, row in enumerate(rows[:, :KEY])}
        self._known = rows[:, KEY:].copy().view(np.float32)

    def vectors(self, texts: Sequence[str], make: Callable[[list[str]], np.ndarray]) -> np.ndarray:
        """A vector of each text, float32 [texts, width]; `make` is asked for those that are new, which are kept."""
        keys = [hashlib.blake2b(text.encode(errors="replace"), digest_size=KEY).digest() for text in texts]
        rows = np.empty((len(texts), self._width), np.float32)
        old = [number for number, key in enumerate(keys) if key in self._places]
        new = [number for number, key in enumerate(keys) if key not in self._places]
        if old:
            rows[old] = self._known[[self._places[keys[number]] for number in old]]
        if new:
            rows[new] = make([texts[number] for number in new])
            self._keep([keys[number] for number in new], rows[new])
        self.found += len(old)
        return rows

    def _keep(self, keys: list[bytes], rows: np.ndarray) -> None:
        """For later starts; a folder that cannot be written costs only time."""
        for key, row in zip(keys, range(len(self._known), len(self._known) + len(keys)), strict=True):
            self._places[key] = row
        self._known = np.concatenate((self._known, rows))
        order = sorted(self._places, key=self._places.__getitem__)
        ids = np.frombuffer(b"".join(order), np.uint8).reshape(-1, KEY)
        known = np.ascontiguousarray(self._known[[self._places[key] for key in order]]).view(np.uint8)
        with suppress(OSError):
            write_checksummed(self._path, np.concatenate((ids, known), axis=1).tobytes())


def fingerprint(job: EmbedJob) -> str:
    """Of the model and of how its vectors are made."""
    o = job.options
    told: list[Any] = [o.dims, o.normalize, o.role, o.overflow, job.pooling, job.engine.context]
    found, size = hashlib.sha256(repr(told).encode()), Path(job.path).stat().st_size
    with open(job.path, "rb") as file:
        found.update(b"%d" % size + file.read(SAMPLE))
        for place in range(1, 9):
            file.seek(size * place // 9)
            found.update(file.read(SAMPLE // 8))
    return found.hexdigest()[:32]
