"""A model's matrices in a card's memory."""

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cuda_card import Card


class CardWeights:
    """Uploaded once, used by all programs."""

    def __init__(self, card: Card):
        self._card = card
        self._places: dict[tuple[str, int, tuple[int, ...]], int] = {}

    def address(self, weight: Weight) -> int:
        """Where a matrix is; it goes to the card now if it is not there."""
        key = weight.name, weight.first_row, weight.shape
        if key not in self._places:
            data = np.ascontiguousarray(weight.tensor.data).reshape(-1).view(np.uint8)
            self._places[key] = self._card.allocate(len(data))
            self._card.upload(self._places[key], data)
        return self._places[key]
