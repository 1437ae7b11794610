"""Define the state that a backend keeps for a sequence, and the prefixes of sequences on disk."""

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np


class SequenceState(Protocol):
    """The state that a backend keeps for one sequence."""

    def prepare(self, length: int, count: int) -> None:
        """Allocate memory for `count` tokens after the first `length`, unless it has it. Raises MemoryLimitError."""

    def fork(self, length: int) -> "SequenceState":
        """Return a state that shares the first `length` tokens."""
        ...

    def truncate(self, length: int) -> int:
        """Drop all but the first `length` tokens; return how many remain, which may be fewer."""
        ...

    def shift(self, keep: int, count: int) -> int:
        """Drop `count` tokens after the first `keep`; return how many remain, which may be none.

        Keys of later tokens stay unchanged: the backend rotates them afterwards.
        """
        ...

    def append_copies(self, source: Self, first: int, length: int, count: int, skipped: int) -> bool:
        """Copy `count` tokens of another state, from position `first` on, after the first `length` and a gap.

        Both states have the same type. Keys are copied unchanged: the backend rotates them afterwards. skipped: number
        of tokens in the gap, for which memory is allocated. Returns False if the other state lacks some of the tokens,
        or if there can be no gap. Raises MemoryLimitError.
        """
        ...

    def close(self) -> None:
        """Free the memory."""


@runtime_checkable
class PagedStore(SequenceState, Protocol):
    """A state whose sections can be copied to files and back.

    Attributes:
        table: page indices, int64.
        addresses: addresses of the table, and of recurrent states before and after a run.
    """

    @property
    def table(self) -> np.ndarray: ...

    @property
    def addresses(self) -> tuple[int, int, int]: ...

    def list_sections(self, first: int, last: int) -> list[str]:
        """Return the names of the sections that store tokens [first, last); `first` begins a page."""
        ...

    def copy_section(self, name: str, first: int, last: int) -> np.ndarray:
        """Return a copy of one section of tokens [first, last), uint8."""
        ...

    def put(self, first: int, last: int, parts: Mapping[str, np.ndarray]) -> None:
        """Insert tokens [first, last) from sections of another state. Raises MemoryLimitError, ValueError."""


class PrefixChunk(NamedTuple):
    """Tokens [first, last) of a prompt, and the key of their file in the cache."""

    key: str
    first: int
    last: int


class StoredPrefix(NamedTuple):
    """The chunks on disk that hold the first tokens of a prompt or conversation.

    Attributes:
        has_logits: the logits after the last token are stored, too; then `ids` is the whole prompt.
    """

    ids: Ids[int]
    pieces: tuple[PrefixChunk, ...]
    has_logits: bool = False
    is_conversation: bool = False
