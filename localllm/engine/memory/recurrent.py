"""Hold the recurrent states of a sequence, in one block for all layers that is never overwritten while shared.

A run reads the states from one block and writes the new ones to another, or to the same one if it is not shared. So a
fork shares the original's block until either continues, and a snapshot costs no copy.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from localllm.arch.layer_state import RecurrentLayerState
from localllm.errors import MemoryLimitError
from localllm.kernels.table import PAGE

LINE_FLOATS = 16  # floats of a cache line, to which blocks and the states in them are aligned
MAX_SNAPSHOTS = 4  # maximum number of snapshots of a sequence


class StateLayout:
    """The offsets of all layers' states in a block of memory; float32, last dimensions padded to 16.

    Attributes:
        zeros: a block with the initial states.  nbytes: size of a block in bytes.
    """

    zeros: object

    def __init__(self, states: Sequence[RecurrentLayerState]):
        self._offsets: dict[tuple[int, int], int] = {}
        end = 0
        for state in states:
            for number, shape in enumerate(state.shapes):
                self._offsets[state.layer, number] = 4 * end
                end += int(np.prod(shape[:-1])) * (-(-shape[-1] // LINE_FLOATS) * LINE_FLOATS)
        self._size, self.nbytes = end, 4 * end
        self.zeros = self._align(np.zeros(end + LINE_FLOATS, np.float32))

    def get_offset(self, layer: int, number: int) -> int:
        return self._offsets[layer, number]

    def allocate(self) -> object:
        """Allocate a block for the states of a sequence. Raises MemoryLimitError."""
        return self._allocate()

    def _allocate(self) -> np.ndarray:
        try:
            return self._align(np.empty(self._size + LINE_FLOATS, np.float32))
        except MemoryError:
            raise MemoryLimitError(f"no memory for the {self.nbytes / 1e6:.0f} MB of a sequence's states") from None

    def get_address(self, memory: object) -> int:
        assert isinstance(memory, np.ndarray)
        return int(memory.ctypes.data)

    def view_bytes(self, memory: object) -> np.ndarray:
        """Return the bytes of a block, uint8, perhaps a copy."""
        assert isinstance(memory, np.ndarray)
        return memory.view(np.uint8)

    def from_bytes(self, content: np.ndarray) -> object:
        """Allocate a block with this content. Raises ValueError if the size differs; MemoryLimitError."""
        if content.nbytes != self.nbytes:
            raise ValueError(f"{content.nbytes} bytes for {self.nbytes}")
        memory = self._allocate()
        memory.view(np.uint8)[:] = content
        return memory

    def _align(self, memory: np.ndarray) -> np.ndarray:
        start = -(memory.ctypes.data // 4) % LINE_FLOATS
        return memory[start : start + self._size]


class StateSnapshot(NamedTuple):
    """The states after `position` tokens."""

    position: int
    memory: object


class RecurrentState:
    """The recurrent states of a sequence, and earlier snapshots.

    Snapshots are taken before and after each run of several tokens (prompts, drafts that are verified), and at page
    boundaries; at most MAX_SNAPSHOTS of them remain. A sequence that is truncated elsewhere recomputes the tokens after
    the last snapshot before that position.

    Attributes:
        source, target: the blocks that a run reads and writes.
    """

    def __init__(self, layout: StateLayout, position: int = 0, memory: object | None = None):
        """Begin with the states after `position` tokens.

        memory: their block, possibly shared; None for zeros.
        """
        self._layout, self._position, self._snapshots = layout, position, list[StateSnapshot]()
        self.source = self.target = layout.zeros if memory is None else memory
        self._shared, self._several = True, False  # whether others use `target`; whether the last run had many tokens

    def prepare(self, length: int, count: int) -> None:
        """Prepare to advance the states from `length` tokens by `count` more."""
        assert length == self._position
        if count > 1 or self._several or length % PAGE == 0:
            self._keep(StateSnapshot(length, self.target))
        self.source = self.target
        if self._shared:
            self.target = self._layout.allocate()
        self._position, self._shared, self._several = length + count, False, count > 1

    def _keep(self, snapshot: StateSnapshot) -> None:
        """Add a snapshot; if there are too many, drop one that saves few tokens for its distance from the end."""
        if snapshot.position in (0, *(snapshot_kept.position for snapshot_kept in self._snapshots)):
            return
        self._snapshots.append(snapshot)
        self._shared = True
        if len(self._snapshots) > MAX_SNAPSHOTS:
            places = [0, *(snapshot_kept.position for snapshot_kept in self._snapshots)]
            pairs = pairwise(places[:-1])
            gains = [(place - lower) / (snapshot.position - place + 1) for lower, place in pairs]
            del self._snapshots[gains.index(min(gains))]

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the blocks that a run reads and writes."""
        return self._layout.get_address(self.source), self._layout.get_address(self.target)

    def find_states(self, length: int) -> np.ndarray | None:
        """Return the states after `length` tokens, uint8, valid until the next run; None if they are unknown."""
        blocks = [memory for position, memory in self._snapshots if position == length]
        block = self.target if length == self._position else blocks[0] if blocks else None
        return None if block is None else self._layout.view_bytes(block)

    def has_states(self, length: int) -> bool:
        return length in (self._position, *(snapshot.position for snapshot in self._snapshots))

    def put(self, length: int, states: np.ndarray) -> None:
        """Set the states after `length` tokens, uint8. Raises ValueError if the size differs."""
        memory = self._layout.from_bytes(states)
        self._position, self.source, self.target, self._shared = length, memory, memory, False

    def fork(self) -> "RecurrentState":
        """Return a copy with the same snapshots, which shares all blocks."""
        self._shared = True
        twin = RecurrentState(self._layout, self._position, self.target)
        twin._snapshots, twin._several = list(self._snapshots), self._several
        return twin

    def truncate(self, length: int) -> int:
        """Go back to the last known states within the first `length` tokens; return their token count."""
        if length != self._position:
            self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.position <= length]
            last = self._snapshots[-1] if self._snapshots else StateSnapshot(0, self._layout.zeros)
            self._position, self.target = last
            self.source = self.target
            self._shared, self._several = True, False
        return self._position
