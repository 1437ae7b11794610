"""Recurrent states in GPU memory."""

from collections.abc import Sequence

import numpy as np

from localllm.arch.layer_state import Recurrent
from localllm.engine.cuda.card import Card
from localllm.engine.memory.recurrent import StateLayout


class CardStates:
    """The states of all layers, freed with the last reference."""

    def __init__(self, card: Card, size: int):
        """Allocate. Raises MemoryLimitError."""
        self._card, self.address = card, card.allocate(size)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._card.release(self.address)


class CardLayout(StateLayout):
    """A StateLayout on a GPU."""

    def __init__(self, card: Card, states: Sequence[Recurrent]):
        super().__init__(states)
        self._card = card
        self.zeros = self.from_bytes(np.zeros(self.nbytes, np.uint8))

    def new(self) -> CardStates:
        return CardStates(self._card, self.nbytes)

    def address(self, memory: object) -> int:
        assert isinstance(memory, CardStates)
        return memory.address

    def content(self, memory: object) -> np.ndarray:
        return self._card.download(self.address(memory), self.nbytes)

    def from_bytes(self, content: np.ndarray) -> CardStates:
        if content.nbytes != self.nbytes:
            raise ValueError(f"{content.nbytes} bytes for {self.nbytes}")
        memory = self.new()
        self._card.upload(memory.address, content)
        return memory
