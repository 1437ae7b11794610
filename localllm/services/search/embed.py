"""Embed many documents, with a cache of vectors. Implements `localllm embed`."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from localllm.arch.vision.clip import is_clip
from localllm.engine.options import EngineOptions
from localllm.errors import UsageError
from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.files.documents import is_document, read_document
from localllm.files.gguf.file import GGUFFile
from localllm.files.text_file import UTF16_MARKS, decode_text
from localllm.frozen import frozen
from localllm.generation.embedding.embedder import Embedder, EmbedOptions, ShownImage
from localllm.generation.embedding.reranker import Reranker
from localllm.images.opened import read_source
from localllm.services.records.lines import IMAGE, Record
from localllm.services.search.files import MAX_FILE_BYTES, read_text
from localllm.services.search.passages import Passage, split_passages
from localllm.system.files import get_cache_folder
from localllm.text.tokenizer import Tokenizer

SAMPLE_BYTES = 1 << 16  # bytes of a model file to hash
KEY_BYTES = 16  # bytes of a document's hash
CUT_VERSION = 2  # version of vector truncation: 2 applies a layer norm first, for models that need it


@frozen
class EmbedJob:
    """A model, and the options for embedding with it."""

    path: str
    options: EmbedOptions
    engine: EngineOptions
    pooling: str | None = None
    has_images: bool = False


class AnyEmbedder(Protocol):
    """An Embedder, which gets no images, or a PairEmbedder."""

    chunk: int
    width: int
    context: int
    tokens: int
    warnings: list[str]

    def embed(
        self,
        texts: Iterable[str | ShownImage],
        options: EmbedOptions | None = None,
        progress: Callable[[int], object] | None = None,
        /,
    ) -> np.ndarray: ...

    def tokenize(self, text: str | ShownImage, options: EmbedOptions, name: str, /) -> list[list[int]]: ...

    def get_usual_role(self, role: str, /) -> str | None: ...

    def close(self) -> None: ...


@contextmanager
def open_embedder(job: EmbedJob) -> "Iterator[AnyEmbedder]":
    """Open the model: an Embedder, or a PairEmbedder for a CLIP model.

    Raises ModelError, MemoryLimitError, UsageError.
    """
    file = GGUFFile.open(job.path)
    result: AnyEmbedder
    if is_clip(file):
        from localllm.generation.embedding import clip_embedder  # seldom needed

        if job.pooling is not None:
            raise UsageError("pooling cannot be set for a model of images and texts")
        result = clip_embedder.ClipEmbedder(file, job.engine)
    elif job.has_images:
        raise UsageError(f"{job.path}: the model cannot embed images; use a CLIP model")
    else:
        embedder_opened = Embedder(file, Tokenizer.from_metadata(file.metadata, file.oddities), job.engine, job.pooling)
        result = cast(AnyEmbedder, embedder_opened)  # there are no images, as checked above
    try:
        yield result
    finally:
        result.close()


@contextmanager
def open_reranker(path: str, options: EngineOptions) -> Iterator[Reranker]:
    file = GGUFFile.open(path)
    result = Reranker(file, Tokenizer.from_metadata(file.metadata, file.oddities), options)
    try:
        yield result
    finally:
        result.close()


def get_document(record: Record, field: str) -> "str | ShownImage":
    """Return a record's text (a line, or a field of an object), or its image. Raises UsageError."""
    if record.error:
        raise UsageError(record.error)
    if isinstance(record.input, str | ShownImage):
        return record.input
    fields = record.input if isinstance(record.input, dict) else {}
    if is_image(record):
        return ShownImage(fields[IMAGE])
    text = fields.get(field)
    if not isinstance(text, str):
        raise UsageError(f'record {record.id!r} has no string in the field "{field}"; name another field')
    return text


def is_image(record: Record) -> bool:
    """Return whether a record has an image and no text."""
    if isinstance(record.input, ShownImage):
        return True
    return isinstance(record.input, dict) and isinstance(record.input.get(IMAGE), str) and "text" not in record.input


def get_cache_key(item: str | ShownImage) -> str:
    """Return the cache key of a document: the text itself, or a hash of the image. Raises UsageError."""
    if isinstance(item, str):
        return item
    return "\0" + hashlib.sha256(read_source(item.source)[1]).hexdigest()


def list_files(names: Sequence[str]) -> list[str]:
    """List the named files, and the non-hidden files in named folders, sorted. Raises UsageError."""
    paths: list[str] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = (
                file
                for file in path.rglob("*")
                if not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
            paths += sorted(str(file) for file in inside if file.is_file())
        elif path.is_file():
            paths.append(name)
        else:
            raise UsageError(f"{name}: no such file or folder")
    return paths


def read_text_file(path: str) -> str:
    """Read a text file or the text of a document.

    Raises UsageError for a text that is not UTF-8 or UTF-16, and for a document that cannot be read; a zero byte means
    binary.
    """
    if is_document(path):
        return read_document(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if b"\0" in data and not data.startswith(UTF16_MARKS):
        raise UsageError(f"{path}: expected a text file, found a binary file")
    return decode_text(data, path)


def read_passages(path: str, size: int) -> list[Passage]:
    """Split a text file into passages of about `size` characters. Raises UsageError if it is binary or too large."""
    text = read_text(path)
    if text is None:
        read_text_file(path)  # raises the reason
        raise UsageError(f"{path}: the file exceeds the limit of {MAX_FILE_BYTES >> 20} MB")
    return split_passages(path, text, size)


def find_nearest(query: np.ndarray, vectors: np.ndarray, top: int) -> list[tuple[int, float]]:
    """Return the vectors closest to a query as (index, cosine), best first.

    query, vectors: float32, of length 1.
    """
    cosines = vectors @ query
    order = np.argsort(-cosines, kind="stable")[:top]
    return [(int(number), float(cosines[number])) for number in order]


def group_similar(vectors: np.ndarray, threshold: float) -> list[list[int]]:
    """Group vectors: each has a cosine of at least `threshold` with another one of its group.

    vectors: float32 [documents, width], of length 1. Returns indices, the largest group first, without groups of one.
    """
    owner = np.arange(len(vectors))
    for number in range(1, len(vectors)):
        near = np.flatnonzero(vectors[:number] @ vectors[number] >= threshold - 1e-6)
        if len(near):
            joined = np.unique(owner[near])
            owner[np.isin(owner, joined)] = owner[number] = joined[0]
    groups = [np.flatnonzero(owner == each).tolist() for each in np.unique(owner)]
    return sorted((group for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


class VectorCache:
    """A cache of embeddings in the user's cache folder, by the hash of a document.

    Attributes:
        found: count of documents that were cached.
    """

    def __init__(self, job: EmbedJob, width: int):
        """Open the cache for a job's model and options; width: elements of a vector."""
        self._path = get_cache_folder() / "vectors" / compute_fingerprint(job)
        self._width, self.found = width, 0
        data = np.frombuffer(read_checksummed(self._path) or b"", np.uint8)
        size = KEY_BYTES + 4 * width
        rows = data[: len(data) // size * size].reshape(-1, size)
        self._rows = {row.tobytes(): number for number, row in enumerate(rows[:, :KEY_BYTES])}
        self._vectors = rows[:, KEY_BYTES:].copy().view(np.float32)

    def embed(self, texts: Sequence[str], make: Callable[[list[str]], np.ndarray]) -> np.ndarray:
        """Return the documents' vectors, float32 [documents, width]; make: embeds those that are not cached."""
        keys = [*map(hash_text, texts)]
        rows = np.empty((len(texts), self._width), np.float32)
        old = [number for number, key in enumerate(keys) if key in self._rows]
        new = [number for number, key in enumerate(keys) if key not in self._rows]
        if old:
            rows[old] = self._vectors[[self._rows[keys[number]] for number in old]]
        if new:
            rows[new] = make([texts[number] for number in new])
            self._store([keys[number] for number in new], rows[new])
        self.found += len(old)
        return rows

    def _store(self, keys: list[bytes], rows: np.ndarray) -> None:
        """Add vectors to the cache; ignore a file that cannot be written."""
        for key, row in zip(keys, range(len(self._vectors), len(self._vectors) + len(keys)), strict=True):
            self._rows[key] = row
        self._vectors = np.concatenate((self._vectors, rows))
        order = sorted(self._rows, key=self._rows.__getitem__)
        ids = np.frombuffer(b"".join(order), np.uint8).reshape(-1, KEY_BYTES)
        vectors = np.ascontiguousarray(self._vectors[[self._rows[key] for key in order]]).view(np.uint8)
        with suppress(OSError):
            write_checksummed(self._path, np.concatenate((ids, vectors), axis=1).tobytes())


def hash_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=KEY_BYTES).digest()


def compute_fingerprint(job: EmbedJob) -> str:
    """Hash the model and the options that determine a vector; return 32 hexadecimal digits."""
    o = job.options
    cut = [] if o.dims is None else [CUT_VERSION]
    options = [o.dims, o.normalize, o.role, o.overflow, job.pooling, job.engine.context, *cut]
    hash, size = hashlib.sha256(repr(options).encode()), Path(job.path).stat().st_size
    with open(job.path, "rb") as file:
        hash.update(b"%d" % size + file.read(SAMPLE_BYTES))
        for part in range(1, 9):
            file.seek(size * part // 9)
            hash.update(file.read(SAMPLE_BYTES // 8))
    return hash.hexdigest()[:32]
