"""What recurrent layers keep of a sequence, in a card's memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from localllm.arch.layer_state import Recurrent
from localllm.engine.cuda.card import Card
from localllm.engine.memory.recurrent import StateLayout


class CardStates:
    """The states of all layers, given back when nobody has them any more."""

    def __init__(self, card: Card, size: int):
        """Raises MemoryLimitError."""
        self._card, self.address, self.nbytes = card, card.allocate(size), size

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._card.release(self.address)


class CardLayout(StateLayout):
    """As Layout, on a card."""

    def __init__(self, card: Card, states: Sequence[Recurrent]):
        super().__init__(states)
        self._card, self._bytes = card, self.zeros.nbytes
        self.zeros = self.filled(self.zeros.view(np.uint8))

    def new(self) -> Any:
        return CardStates(self._card, self._bytes)

    def address(self, memory: Any) -> int:
        return int(memory.address)

    def content(self, memory: Any) -> np.ndarray:
        return self._card.download(memory.address, memory.nbytes)

    def filled(self, content: np.ndarray) -> Any:
        if content.nbytes != self._bytes:
            raise ValueError(f"{content.nbytes} bytes for {self._bytes}")
        memory = self.new()
        self._card.upload(memory.address, content)
        return memory
