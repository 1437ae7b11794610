"""The state that a backend keeps for a sequence: its cache pages and recurrent states."""

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from localllm.engine.memory.page_table import PageTable
    from localllm.engine.memory.recurrent import RecurrentState


class SequenceState(Protocol):
    """The state of one sequence."""

    def prepare(self, length: int, count: int) -> None:
        """Make room for `count` tokens after the first `length`. Raises MemoryLimitError."""

    def fork(self, length: int) -> "SequenceState":
        """Create a state that shares the first `length` tokens."""
        ...

    def truncate(self, length: int) -> int:
        """Drop all but the first `length` tokens; return how many remain, which may be fewer."""
        ...

    def shift(self, keep: int, count: int) -> int:
        """Drop `count` tokens after the first `keep`; return how many remain, which may be none.

        Keys of later tokens stay unchanged: the backend rotates them afterwards.
        """
        ...

    def append_from(self, source: Self, first: int, length: int, count: int) -> bool:
        """Copy `count` tokens of another state of this kind, from position `first` on, after the first `length`.

        Keys are copied unchanged: the backend rotates them afterwards. Return False if the other state lacks some of
        the tokens. Raises MemoryLimitError.
        """
        ...

    def close(self) -> None:
        """Drop everything."""


@runtime_checkable
class PagedStore(SequenceState, Protocol):
    """A state that can be copied, part by part, to files and back.

    Attributes:
        table: page numbers, int64.  addresses: of the table, and of recurrent states before a run and after it.
    """

    @property
    def table(self) -> np.ndarray: ...

    @property
    def addresses(self) -> tuple[int, int, int]: ...

    def parts(self, first: int, last: int) -> list[str]:
        """List the names of the parts that store tokens [first, last), see `part`; `first` begins a page."""
        ...

    def part(self, name: str, first: int, last: int) -> np.ndarray:
        """Copy a part of the state of tokens [first, last), uint8."""
        ...

    def put(self, first: int, last: int, parts: Mapping[str, np.ndarray]) -> None:
        """Insert tokens [first, last) from parts of another state. Raises MemoryLimitError, ValueError."""


class HybridState:
    """Cache pages and recurrent states; `truncate` goes back to where both can."""

    def __init__(self, pages: "PageTable", states: "RecurrentState"):
        self._pages, self._states = pages, states

    @property
    def addresses(self) -> tuple[int, int, int]:
        table, _, _ = self._pages.addresses
        return table, *self._states.addresses

    @property
    def table(self) -> np.ndarray:
        return self._pages.table

    def prepare(self, length: int, count: int) -> None:
        self._pages.prepare(length, count)
        self._states.prepare(length, count)

    def parts(self, first: int, last: int) -> list[str]:
        """List PageTable's parts, and "states" if the recurrent states after `last` tokens are known."""
        return [*self._pages.parts(first, last), *(["states"] if self._states.knows(last) else [])]

    def part(self, name: str, first: int, last: int) -> np.ndarray:
        if name != "states":
            return self._pages.part(name, first, last)
        states = self._states.after(last)
        assert states is not None
        return states

    def put(self, first: int, last: int, parts: Mapping[str, np.ndarray]) -> None:
        """Insert as PageTable does; a sequence can continue only from a `last` whose parts include "states"."""
        self._pages.put(first, last, parts)
        if "states" in parts:
            self._states.put(last, parts["states"])

    def fork(self, length: int) -> "HybridState":
        return HybridState(self._pages.fork(length), self._states.fork())

    def truncate(self, length: int) -> int:
        return self._states.truncate(self._pages.truncate(self._states.truncate(length)))

    def shift(self, keep: int, count: int) -> int:
        """Refuse: recurrent states cannot drop tokens (see localllm.engine.trace.rope_shift)."""
        raise AssertionError

    def append_from(self, source: "HybridState", first: int, length: int, count: int) -> bool:
        """Refuse, as `shift`."""
        raise AssertionError

    def close(self) -> None:
        self.truncate(0)


class PrefixChunk(NamedTuple):
    """Tokens [first, last) of a prompt, and the key of their file in the cache."""

    key: str
    first: int
    last: int


class StoredPrefix(NamedTuple):
    """The chunks on disk that hold the first tokens of a prompt or conversation.

    Attributes:
        has_logits: whether the logits after the last token are stored, too: then `ids` is the whole prompt.
    """

    ids: Ids[int]
    pieces: tuple[PrefixChunk, ...]
    has_logits: bool = False
    is_conversation: bool = False
