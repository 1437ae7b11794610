"""The files of the prefix cache: states of prompt beginnings in files, in chunks, shared by processes.

A chunk is what a whole run has read (localllm.engine.run), or ends with an image: tokens after it are read in the same
runs, whether it was cached or not, and every bit is the same. An image's ids follow from its pixels and its encoder, so
another image makes another key. The last chunk of a prompt has its logits, too. The key of a chunk is a hash chain of
all tokens up to its end, which begins with the model's fingerprint.

A conversation, whose turns are read in other runs, has keys of its own: it is restored as it was read then.
"""

import hashlib
import sys
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.arch.layer_state import Recurrent
from localllm.engine.forks import lock_for
from localllm.engine.image_tokens import chunk_ends, is_worth_caching, last_end
from localllm.engine.memory.fingerprint import fingerprint, state_of
from localllm.engine.memory.sequence_state import PagedStore, PrefixChunk, StoredPrefix
from localllm.engine.sequence import Sequence
from localllm.errors import LocalllmError, MemoryLimitError
from localllm.files.cache.prefix_files import (
    PrefixAbout,
    PrefixFile,
    mark_used,
    open_prefix,
    prune,
    remove,
    size_limit,
    size_limit_on_disk,
    write_prefix,
)
from localllm.files.gguf.file import GGUFFile

if TYPE_CHECKING:
    from localllm.engine.engine import Engine


class DamagedError(Exception):
    """Raised when a file's contents are invalid."""


class CachedPrefix(NamedTuple):
    """A sequence that has read a prompt, with logits, float32 [1, vocab]; or whole runs at its beginning."""

    sequence: Sequence
    logits: np.ndarray | None


class PendingWrite(NamedTuple):
    """A sequence that waits to be written."""

    sequence: Sequence
    logits: np.ndarray | None
    is_conversation: bool


class PrefixStore:
    """The files of one model. A thread of its own writes them.

    Attributes:
        warning: why something could not be cached, in one line, or None.
    """

    def __init__(self, engine: "Engine", file: GGUFFile):
        self.warning: str | None = None
        self._engine, self._file, self._name = engine, file, file.path.replace("\\", "/").rpartition("/")[2]
        self._root, self._ended = b"", size_limit() == 0
        try:
            self._state = state_of(file)
        except OSError:  # a private file, which no other process finds
            self._ended = True
        states = engine.hyperparameters.states()
        self._window = max((state.window or 0 for state in states if not isinstance(state, Recurrent)), default=0)
        self._is_recurrent = any(isinstance(state, Recurrent) for state in states)
        self.lock = lock_for(self)
        self._thread: threading.Thread | None = None
        self._waiting: PendingWrite | None = None

    # ---- finding ----

    def find_prefix(self, ids: Ids[int], most: int = sys.maxsize, is_conversation: bool = False) -> StoredPrefix | None:
        """Find the longest stored prefix of these tokens, at most `most`: whole runs, or all."""
        if self._ended or not is_worth_caching(ids):
            return None
        with suppress(OSError), ExitStack() as stack:  # the model's file may be gone
            pieces, opened = self._pieces(ids, is_conversation), list[PrefixFile]()
            for piece in pieces:
                kept = open_prefix(piece.key) if piece.last <= most else None
                if kept is None:
                    break
                opened.append(stack.enter_context(kept))
            count = next((n for n in range(len(opened), 0, -1) if self._is_enough(pieces, opened[:n])), 0)
            end = pieces[count - 1].last
            has_logits = end == len(ids) and not is_conversation
            return StoredPrefix(ids[:end], tuple(pieces[:count]), has_logits, is_conversation) if count else None
        return None

    def _is_enough(self, pieces: list[PrefixChunk], opened: list[PrefixFile]) -> bool:
        """Tell whether a sequence can continue after the opened chunks.

        All, or with at least one token left to compute.
        """
        end = pieces[len(opened) - 1].last
        if len(opened) < len(pieces) and end == pieces[-1].last:
            return False
        return all(
            self._required_parts(piece, end) <= kept.parts.keys() for piece, kept in zip(pieces, opened, strict=False)
        )

    def _required_parts(self, piece: PrefixChunk, end: int) -> set[str]:
        """List the parts of a chunk that are read after `end` tokens."""
        needed = {"pages"}
        if self._window and piece.last > end - self._window:
            needed.add("windows")
        if self._is_recurrent and piece.last == end:
            needed.add("states")
        return needed

    def load(self, stored: StoredPrefix) -> CachedPrefix | None:
        """Restore a sequence. None if a file is damaged, which is removed, or memory is short."""
        engine, end = self._engine, len(stored.ids)
        sequence, logits = engine.sequence(), None
        store = paged_store(sequence)
        try:
            for piece in stored.pieces:
                with self._open_chunk(piece) as kept:
                    parts = {name: kept.read(name) for name in self._required_parts(piece, end)}
                    with engine.lock:
                        store.put(piece.first, piece.last, parts)
                    if stored.has_logits and piece is stored.pieces[-1]:
                        logits = kept.read("logits").view(np.float32).reshape(1, engine.vocab_size)
        except (DamagedError, MemoryLimitError):
            sequence.close()
            return None
        except BaseException:
            sequence.close()
            raise
        sequence.tokens[:] = stored.ids
        sequence.images = engine.images_among(stored.ids)
        sequence.aligned = 0 if stored.is_conversation else last_end(stored.ids, end, engine.runs)
        mark_used(piece.key for piece in stored.pieces)
        return CachedPrefix(sequence, logits)

    @contextmanager
    def _open_chunk(self, piece: PrefixChunk) -> Iterator[PrefixFile]:
        """Open a chunk's file. Raises DamagedError if it is gone or invalid; then it is removed."""
        kept = open_prefix(piece.key)
        if kept is None:
            raise DamagedError
        with kept:
            try:
                yield kept
            except (ValueError, KeyError, OSError):
                remove(piece.key)
                raise DamagedError from None

    def _pieces(self, ids: Ids[int], is_conversation: bool = False) -> list[PrefixChunk]:
        """List the chunks: all that end with a whole run or an image, and the rest, perhaps empty. Raises OSError."""
        if state_of(self._file) != self._state:
            raise OSError(f"{self._file.path} has changed")
        if not self._root:
            self._root = fingerprint(self._file, self._state, self._engine.operations, self._engine.kv_type)
        places = [0, *chunk_ends(ids, self._engine.runs), len(ids)]
        root = hashlib.blake2b(self._root, person=b"conversation").digest() if is_conversation else self._root
        pieces, key, tokens = list[PrefixChunk](), root, np.asarray(ids, np.int64)
        for first, last in pairwise(places):
            is_end = len(pieces) == len(places) - 2
            chain = hashlib.blake2b(tokens[first:last].tobytes(), digest_size=32, key=key, person=b"end" * is_end)
            key = chain.digest()
            pieces.append(PrefixChunk(chain.hexdigest()[:32], first, last))
        return pieces

    # ---- keeping ----

    def keep(self, sequence: Sequence, logits: np.ndarray | None, is_conversation: bool = False) -> None:
        """Queue a sequence that has read a prompt for writing, and take ownership of it.

        logits: float32 [1, vocab], after the prompt; None: keep only the whole runs at its beginning, or all of it if
        it is a conversation. An older pending write is dropped.
        """
        with self.lock:
            unwanted, self._waiting = self._waiting, PendingWrite(sequence, logits, is_conversation)
            if self._ended:
                unwanted, self._waiting = self._waiting, None
            elif self._thread is None:
                self._thread = threading.Thread(target=self._write, name="prefixes", daemon=True)
                with suppress(RuntimeError):  # the interpreter is exiting
                    self._thread.start()
        if unwanted:
            unwanted.sequence.close()

    def _write(self) -> None:
        """Write queued prefixes until the queue is empty."""
        while True:
            with self.lock:
                read, self._waiting = self._waiting, None
                if read is None or self._ended:
                    self._thread = None
                    return
            try:
                self._write_pieces(read)
                prune()
            except (OSError, MemoryError, LocalllmError) as error:
                reason = getattr(error, "strerror", None) or str(error) or "not enough memory"
                self.warning, self._ended = f"cannot write the prefix cache: {reason}", True
            finally:
                read.sequence.close()

    def _write_pieces(self, read: PendingWrite) -> None:
        """Write the chunks that no file has. Raises OSError, LocalllmError."""
        room, before, pieces = size_limit_on_disk(0), "", self._pieces(read.sequence.tokens, read.is_conversation)
        kept = list[str]()
        for piece in pieces:
            is_known = read.logits is not None if piece is pieces[-1] else piece.last <= read.sequence.aligned
            if self._ended or room < 0 or not (is_known or read.is_conversation):
                break
            room -= self._write_piece(piece, before, read, read.logits if piece is pieces[-1] else None)
            before = piece.key
            kept.append(before)
        mark_used(kept)

    def _write_piece(self, piece: PrefixChunk, before: str, read: PendingWrite, logits: np.ndarray | None) -> int:
        """Write a chunk if no file has it, or has less of it; returns its bytes."""
        store = paged_store(read.sequence)
        names = {*store.parts(piece.first, piece.last)}
        if kept := open_prefix(piece.key):
            with kept:
                if names <= kept.parts.keys():
                    return 0
        parts = {name: store.part(name, piece.first, piece.last) for name in names}
        if logits is not None:
            parts["logits"] = logits.reshape(-1).view(np.uint8)
        write_prefix(piece.key, PrefixAbout(self._name, piece.last, before), parts)
        return sum(data.nbytes for data in parts.values())

    @property
    def is_writing(self) -> bool:
        return self._thread is not None

    def close(self, wait: bool = True) -> None:
        """Finish pending writes (or drop them) and stop the thread."""
        thread = self._thread
        if wait and not self._ended and thread is not None and thread.is_alive():
            thread.join()
        self._ended = True


def paged_store(sequence: Sequence) -> PagedStore:
    """Return a sequence's state if it can be copied: the reference backend's cannot, and is not cached."""
    store = sequence.store
    assert isinstance(store, PagedStore)
    return store
