"""What a backend keeps for a sequence; and with recurrent layers, their states and the pages of other layers."""

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from localllm.engine.memory.page_table import PageTable
from localllm.engine.memory.recurrent import RecurrentState


class SequenceState(Protocol):
    """What a backend keeps for one sequence."""

    def prepare(self, length: int, count: int) -> None:
        """There will be `count` tokens behind the first `length`. Raises MemoryLimitError."""

    def fork(self, length: int) -> "SequenceState":
        """Another one that begins with the same `length` tokens."""
        ...

    def truncate(self, length: int) -> int:
        """Forget all but the first `length` tokens; how many are still there, which may be fewer."""
        ...

    def shift(self, keep: int, count: int) -> int:
        """Forget `count` tokens behind the first `keep`; how many there are then, which may be none.

        Keys of later tokens are as they were: the backend turns them.
        """
        ...

    def close(self) -> None:
        """Forget everything."""


@runtime_checkable
class PagedStore(SequenceState, Protocol):
    """A store whose content can be copied, part by part, to files and back.

    Attributes:
        table: int64, the numbers of its pages.  addresses: of the table, and of what recurrent layers keep before a run
            and after it.
    """

    @property
    def table(self) -> np.ndarray: ...

    @property
    def addresses(self) -> tuple[int, int, int]: ...

    def parts(self, first: int, last: int) -> list[str]:
        """What there is of the tokens `first` to `last`, the first of a page: names for `part`."""
        ...

    def part(self, name: str, first: int, last: int) -> np.ndarray:
        """A copy of it, uint8."""
        ...

    def put(self, first: int, last: int, parts: Mapping[str, np.ndarray]) -> None:
        """Have the tokens `first` to `last`, which another store had. Raises MemoryLimitError, ValueError."""


class HybridState:
    """Both go back to where both can."""

    def __init__(self, pages: PageTable, states: RecurrentState):
        self._pages, self._states = pages, states

    @property
    def addresses(self) -> tuple[int, int, int]:
        """As of PageTable."""
        table, _, _ = self._pages.addresses
        return table, *self._states.addresses

    @property
    def table(self) -> np.ndarray:
        """As of PageTable."""
        return self._pages.table

    def prepare(self, length: int, count: int) -> None:
        """There will be `count` tokens behind the first `length`. Raises MemoryLimitError."""
        self._pages.prepare(length, count)
        self._states.prepare(length, count)

    def parts(self, first: int, last: int) -> list[str]:
        """As of PageTable; and the states after `last` tokens, if they are known."""
        return [*self._pages.parts(first, last), *(["states"] if self._states.knows(last) else [])]

    def part(self, name: str, first: int, last: int) -> np.ndarray:
        """As of PageTable."""
        if name != "states":
            return self._pages.part(name, first, last)
        states = self._states.after(last)
        assert states is not None
        return states

    def put(self, first: int, last: int, parts: Mapping[str, np.ndarray]) -> None:
        """As of PageTable; only where there are states can the sequence go on."""
        self._pages.put(first, last, parts)
        if "states" in parts:
            self._states.put(last, parts["states"])

    def fork(self, length: int) -> "HybridState":
        """Another one that begins with the same `length` tokens."""
        return HybridState(self._pages.fork(length), self._states.fork())

    def truncate(self, length: int) -> int:
        """Forget all but the first `length` tokens; how many are still there, which may be fewer."""
        return self._states.truncate(self._pages.truncate(self._states.truncate(length)))

    def shift(self, keep: int, count: int) -> int:
        """Not possible: the states have met what would be forgotten (localllm.engine.trace.rope_shift refuses it)."""
        raise AssertionError

    def close(self) -> None:
        """Forget everything."""
        self.truncate(0)


class PrefixChunk(NamedTuple):
    """The tokens `first` to `last` of a prompt; the key of what was read of them."""

    key: str
    first: int
    last: int


class StoredPrefix(NamedTuple):
    """What files hold of a prompt, or of a conversation: its first tokens.

    Attributes:
        has_logits: those after the last token, too: they are all of a prompt.
    """

    ids: Ids[int]
    pieces: tuple[PrefixChunk, ...]
    has_logits: bool = False
    is_conversation: bool = False
