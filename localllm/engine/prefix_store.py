"""Store the states of prompt prefixes on disk, in one file per chunk, shared by processes.

A chunk ends with a whole run (localllm.engine.runs) or with an image, so that the tokens after it are computed in the
same runs, to the bit, whether it was cached or not. Its key is a hash chain of the model's fingerprint and all tokens
up to its end; the ids of image rows are made of the image's pixels and encoder, so that different images have different
keys. The last chunk of a prompt also has the logits after it.

A conversation is computed in other runs, turn by turn. Its chunks have keys of their own, and restore the state bit by
bit.

The fingerprint covers what cached states depend on: weights, operations and code. Hashing all weights would take as
long as prefilling the prompt; so it covers samples of every tensor, and each model file's size, modification time and
change time in nanoseconds; programs cannot easily set the change time. A copied or moved file counts as another model,
which costs only time.
"""

import hashlib
import sys
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ids
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.arch.layer_state import KVType, RecurrentLayerState
from localllm.arch.weights import Weight
from localllm.engine.adapter_scales import AdapterScales
from localllm.engine.forks import create_lock
from localllm.engine.image_tokens import find_last_end, is_worth_caching, list_chunk_ends
from localllm.engine.lower.activation import Activation
from localllm.engine.memory.sequence_state import PagedStore, PrefixChunk, StoredPrefix
from localllm.engine.operations.operation import Operation
from localllm.engine.sequence import Sequence
from localllm.errors import LocalllmError, MemoryLimitError
from localllm.files.cache.prefix_files import (
    PrefixChunkInfo,
    PrefixFile,
    get_size_limit,
    limit_by_disk,
    mark_used,
    open_prefix,
    prune,
    remove_prefix,
    write_prefix,
)
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.build.objects import get_object_folder
from localllm.kernels.machine import has_tiles

if TYPE_CHECKING:
    from localllm.engine.engine import Engine


State = list[tuple[int, int, int]]
NO_SCALES = AdapterScales()
SAMPLES, SAMPLE = 8, 64  # evenly spaced samples per tensor, and bytes per sample


def compute_fingerprint(
    file: GGUFFile, state: State, operations: Ids[Operation], kv_type: KVType, adapters: Ids[str] = ()
) -> bytes:
    """Compute a model's fingerprint, 32 bytes.

    state: the files' versions when the model was opened. adapters: digests of its adapters.
    """
    key = hashlib.blake2b(digest_size=32)
    code = get_object_folder().name, has_tiles()
    key.update(repr((code, kv_type, state, describe_operations(operations), *adapters)).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        key.update(source.read_bytes())
    for name, tensor in file.tensors.items():
        key.update(f"{name} {tensor.format.name} {tensor.shape} ".encode() + sample_bytes(tensor.data.reshape(-1)))
    return key.digest()


def sample_bytes(data: np.ndarray) -> bytes:
    """Return SAMPLES samples of a tensor's bytes, or all bytes of a small tensor."""
    if len(data) <= SAMPLES * SAMPLE:
        return data.tobytes()
    starts = [(len(data) - SAMPLE) * i // (SAMPLES - 1) for i in range(SAMPLES)]
    return b"".join(data[start : start + SAMPLE].tobytes() for start in starts)


def describe_operations(operations: Ids[Operation]) -> list[object]:
    """Describe operations by plain values that compare by content; inputs are operation indices."""
    numbers: dict[Activation, int] = {}
    lines: list[object] = []
    for number, operation in enumerate(operations):
        inputs = [numbers[x] for x in operation.inputs]
        names = sorted(each.name for each in fields(operation) if each.name not in ("inputs", "output"))
        field_values = [(name, describe_value(getattr(operation, name))) for name in names]
        lines.append((operation.verb, inputs, operation.output.rows.name, operation.output.columns, field_values))
        numbers[operation.output] = number
    return lines


def describe_value(value: object) -> object:
    """Convert an attribute to a value whose repr is equal exactly if the attributes are equal."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, hashlib.blake2b(value.tobytes()).hexdigest()
    if isinstance(value, Weight):
        tensor, parts = value.tensor, (describe_value(value.bias), describe_value(value.scale))
        return tensor.name, tensor.format.name, tensor.shape, value.first_row, parts
    if isinstance(value, Mapping):
        return [(name, describe_value(value[name])) for name in sorted(value)]
    return repr(value)


class DamagedError(Exception):
    """A file of the cache is missing or invalid."""


class CachedPrefix(NamedTuple):
    """A restored sequence.

    logits: float32 [1, vocab] if it holds the whole prompt, otherwise None.
    """

    sequence: Sequence
    logits: np.ndarray | None


class PendingWrite(NamedTuple):
    """A sequence that is queued for writing (PrefixStore.keep)."""

    sequence: Sequence
    logits: np.ndarray | None
    is_conversation: bool


class PrefixStore:
    """The cached prefixes of one model, which a background thread writes.

    Attributes:
        warning: one line that says why the cache cannot be written, or None.
    """

    def __init__(self, engine: "Engine", file: GGUFFile):
        self.warning: str | None = None
        self._engine, self._file, self._name = engine, file, file.path.replace("\\", "/").rpartition("/")[2]
        self._root, self._ended = b"", False
        try:
            self._state = file.stat_files()
        except OSError:  # a temporary file without a name, which no other process can open
            self._ended = True
        states = engine.hyperparameters.list_states()
        self._window = max(
            (state.window or 0 for state in states if not isinstance(state, RecurrentLayerState)), default=0
        )
        self._is_recurrent = any(isinstance(state, RecurrentLayerState) for state in states)
        self.lock = create_lock(self)
        self._thread: threading.Thread | None = None
        self._waiting: PendingWrite | None = None

    @cached_property
    def _is_disabled(self) -> bool:
        """Return whether the user has set the size limit of the prefix cache to 0."""
        return get_size_limit() == 0

    # ---- lookup

    def find_prefix(
        self, ids: Ids[int], limit: int = sys.maxsize, is_conversation: bool = False,
        scales: AdapterScales = NO_SCALES,
    ) -> StoredPrefix | None:  # fmt: skip
        """Return the longest stored prefix of these tokens, of at most `limit` tokens, or None.

        scales: of adapters, for the tokens.
        """
        if self._ended or not is_worth_caching(ids) or self._is_disabled:
            return None
        with suppress(OSError), ExitStack() as stack:  # the model's file may be gone
            pieces, files = self._split_chunks(ids, scales, is_conversation), list[PrefixFile]()
            for piece in pieces:
                file = open_prefix(piece.key) if piece.last <= limit else None
                if file is None:
                    break
                files.append(stack.enter_context(file))
            count = next((n for n in range(len(files), 0, -1) if self._is_restorable(pieces, files[:n])), 0)
            end = pieces[count - 1].last
            has_logits = end == len(ids) and not is_conversation
            return StoredPrefix(ids[:end], tuple(pieces[:count]), has_logits, is_conversation) if count else None
        return None

    def _is_restorable(self, pieces: list[PrefixChunk], files: list[PrefixFile]) -> bool:
        """Return whether a sequence can continue after the opened chunks, the first ones of `pieces`.

        If they hold all tokens, the last chunk must be among them, because only that one has the logits.
        """
        end = pieces[len(files) - 1].last
        if len(files) < len(pieces) and end == pieces[-1].last:
            return False
        return all(
            self._list_required_sections(piece, end) <= file.parts.keys()
            for piece, file in zip(pieces, files, strict=False)
        )

    def _list_required_sections(self, piece: PrefixChunk, end: int) -> set[str]:
        """Return the sections of a chunk's file that a sequence needs to continue after `end` tokens."""
        names = {"pages"}
        if self._window and piece.last > end - self._window:
            names.add("windows")
        if self._is_recurrent and piece.last == end:
            names.add("states")
        return names

    def load(self, stored: StoredPrefix) -> CachedPrefix | None:
        """Restore a sequence; return None if memory is short or a file is missing or damaged.

        Damaged files are removed.
        """
        engine, end = self._engine, len(stored.ids)
        sequence, logits = engine.sequence(), None
        store = require_paged_store(sequence)
        try:
            for piece in stored.pieces:
                with self._open_chunk(piece) as file:
                    parts = {name: file.read(name) for name in self._list_required_sections(piece, end)}
                    with engine.lock:
                        store.put(piece.first, piece.last, parts)
                    if stored.has_logits and piece is stored.pieces[-1]:
                        logits = file.read("logits").view(np.float32).reshape(1, engine.vocab_size)
        except (DamagedError, MemoryLimitError):
            sequence.close()
            return None
        except BaseException:
            sequence.close()
            raise
        sequence.tokens[:] = stored.ids
        sequence.images = engine.find_images(stored.ids)
        sequence.aligned = 0 if stored.is_conversation else find_last_end(stored.ids, end, engine.runs)
        mark_used(piece.key for piece in stored.pieces)
        return CachedPrefix(sequence, logits)

    @contextmanager
    def _open_chunk(self, piece: PrefixChunk) -> Iterator[PrefixFile]:
        """Open a chunk's file. Raises DamagedError if it is missing or invalid; an invalid file is removed."""
        file = open_prefix(piece.key)
        if file is None:
            raise DamagedError
        with file:
            try:
                yield file
            except (ValueError, KeyError, OSError):
                remove_prefix(piece.key)
                raise DamagedError from None

    def _split_chunks(self, ids: Ids[int], scales: AdapterScales, is_conversation: bool = False) -> list[PrefixChunk]:
        """Split tokens into chunks that end with a whole run or an image, and the rest, which may be empty.

        Raises OSError if the model's file has changed or is gone.
        """
        if self._file.stat_files() != self._state:
            raise OSError(f"{self._file.path} has changed")
        if not self._root:
            engine = self._engine
            adapters = [adapter.digest for adapter in engine.adapters]
            self._root = compute_fingerprint(self._file, self._state, engine.operations, engine.kv_type, adapters)
        places = [0, *list_chunk_ends(ids, self._engine.runs), len(ids)]
        root = hashlib.blake2b(self._root, person=b"conversation").digest() if is_conversation else self._root
        pieces, key, tokens = list[PrefixChunk](), root, np.asarray(ids, np.int64)
        for first, last in pairwise(places):
            is_end = len(pieces) == len(places) - 2
            chain = hashlib.blake2b(tokens[first:last].tobytes(), digest_size=32, key=key, person=b"end" * is_end)
            chain.update(scales.encode_range(first, last))
            key = chain.digest()
            pieces.append(PrefixChunk(chain.hexdigest()[:32], first, last))
        return pieces

    # ---- writing

    def keep(self, sequence: Sequence, logits: np.ndarray | None, is_conversation: bool = False) -> None:
        """Queue a prefilled sequence for writing, and take ownership of it.

        logits: float32 [1, vocab], after the prompt; None: write only the whole runs at its beginning, or all tokens of
        a conversation. A sequence that is still queued is dropped.
        """
        with self.lock:
            unwanted, self._waiting = self._waiting, PendingWrite(sequence, logits, is_conversation)
            if self._ended or self._is_disabled:
                unwanted, self._waiting = self._waiting, None
            elif self._thread is None:
                self._thread = threading.Thread(target=self._write, name="prefixes", daemon=True)
                with suppress(RuntimeError):  # the interpreter is exiting
                    self._thread.start()
        if unwanted:
            unwanted.sequence.close()

    def _write(self) -> None:
        """Write queued sequences until none is left: the work of the background thread."""
        while True:
            with self.lock:
                read, self._waiting = self._waiting, None
                if read is None or self._ended:
                    self._thread = None
                    return
            try:
                self._write_chunks(read)
                prune()
            except (OSError, MemoryError, LocalllmError) as error:
                reason = getattr(error, "strerror", None) or str(error) or "not enough memory"
                self.warning, self._ended = f"cannot write the prefix cache: {reason}", True
            finally:
                read.sequence.close()

    def _write_chunks(self, read: PendingWrite) -> None:
        """Write the chunks of a sequence that are not on disk yet. Raises OSError, LocalllmError."""
        room, previous_key, pieces = (
            limit_by_disk(0),
            "",
            self._split_chunks(read.sequence.tokens, read.sequence.adapter_scales, read.is_conversation),
        )
        present = list[str]()
        for piece in pieces:
            is_known = read.logits is not None if piece is pieces[-1] else piece.last <= read.sequence.aligned
            if self._ended or room < 0 or not (is_known or read.is_conversation):
                break
            room -= self._write_chunk(piece, previous_key, read, read.logits if piece is pieces[-1] else None)
            previous_key = piece.key
            present.append(previous_key)
        mark_used(present)

    def _write_chunk(self, piece: PrefixChunk, previous_key: str, read: PendingWrite, logits: np.ndarray | None) -> int:
        """Write a chunk unless a file has all its sections; return the number of bytes written."""
        store = require_paged_store(read.sequence)
        names = {*store.list_sections(piece.first, piece.last)}
        if file := open_prefix(piece.key):
            with file:
                if names <= file.parts.keys():
                    return 0
        parts = {name: store.copy_section(name, piece.first, piece.last) for name in names}
        if logits is not None:
            parts["logits"] = logits.reshape(-1).view(np.uint8)
        write_prefix(piece.key, PrefixChunkInfo(self._name, piece.last, previous_key), parts)
        return sum(data.nbytes for data in parts.values())

    @property
    def is_writing(self) -> bool:
        return self._thread is not None

    def close(self, wait: bool = True) -> None:
        """Stop the background thread.

        wait: let it write the queued sequences first.
        """
        thread = self._thread
        if wait and not self._ended and thread is not None and thread.is_alive():
            thread.join()
        self._ended = True


def require_paged_store(sequence: Sequence) -> PagedStore:
    """Return the state of a sequence, which can be copied.

    The reference backend's state cannot, and is never cached.
    """
    store = sequence.store
    assert isinstance(store, PagedStore)
    return store
