"""Recurrent states in GPU memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from localllm.arch.layer_state import Recurrent
from localllm.engine.cuda.card import Card
from localllm.engine.memory.recurrent import StateLayout


class CardStates:
    """The states of all layers, freed with the last reference."""

    def __init__(self, card: Card, size: int):
        """Allocate. Raises MemoryLimitError."""
        self._card, self.address, self.nbytes = card, card.allocate(size), size

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._card.release(self.address)


class CardLayout(StateLayout):
    """A StateLayout on a GPU."""

    def __init__(self, card: Card, states: Sequence[Recurrent]):
        super().__init__(states)
        self._card, self._bytes = card, self.zeros.nbytes
        self.zeros = self.from_bytes(self.zeros.view(np.uint8))

    def new(self) -> Any:
        return CardStates(self._card, self._bytes)

    def address(self, memory: Any) -> int:
        return int(memory.address)

    def content(self, memory: Any) -> np.ndarray:
        return self._card.download(memory.address, memory.nbytes)

    def from_bytes(self, content: np.ndarray) -> Any:
        if content.nbytes != self._bytes:
            raise ValueError(f"{content.nbytes} bytes for {self._bytes}")
        memory = self.new()
        self._card.upload(memory.address, content)
        return memory
