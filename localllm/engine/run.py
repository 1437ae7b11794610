"""A run, one call of a backend: the tokens of some sequences, and how a program is told of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from localllm.kernels.arguments import SEQUENCE
from localllm.kernels.cpu import ALL_IN_TILES

BATCH = 512  # tokens in one run at most
PRECISE_TOKENS = 128  # up to so many, activations keep 16 bits


class Span(NamedTuple):
    """What a run does for one sequence."""

    store: Any  # what the backend keeps for the sequence; here a PageTable or a HybridStore
    position: int  # of the first token
    ids: np.ndarray  # int64
    wanted: int  # of how many tokens, the last ones, logits are returned


def int64_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Memory of this process."""
    return np.zeros(shape, np.int64)


class Header:
    """What changes from run to run, at fixed addresses, int64."""

    def __init__(self, tokens: int = BATCH, zeros: Callable[[tuple[int, ...]], np.ndarray] = int64_zeros):
        """tokens: the most of a run; zeros: memory for an array of some shape."""
        # How many tokens, tokens whose logits are wanted, sequences; the most tokens whose activations keep 16 bits;
        # where the logits go, and whether some are not numbers.
        self.numbers = zeros((6,))
        self.token_count, self.wanted_count, self.sequence_count = (self.numbers[i : i + 1] for i in range(3))
        self.most_precise, self.logits, self.flaws = (self.numbers[i : i + 1] for i in range(3, 6))
        self.ids, self.positions, self.owners, self.wanted = (zeros((tokens,)) for _ in range(4))
        self.sequences = zeros((tokens, len(SEQUENCE)))
        self.most_precise_stored = zeros((1,)) + BATCH  # for keys and values, whose error all later tokens see
        self.few_counts = zeros((2,))  # tokens and wanted ones, if they are too few for tiles, else 0

    def fill(self, spans: Sequence[Span], precise: bool, logits: np.ndarray) -> None:
        """Describe a run; logits: float32 [wanted, vocab], which it will write."""
        first = wanted = 0
        for number, span in enumerate(spans):
            count = len(span.ids)
            end, length = first + count, span.position + count
            self.ids[first:end] = span.ids
            self.positions[first:end] = np.arange(span.position, length)
            self.owners[first:end] = number
            self.sequences[number] = first, count, length, *span.store.addresses
            self.wanted[wanted : wanted + span.wanted] = np.arange(end - span.wanted, end)
            first, wanted = end, wanted + span.wanted
        self.numbers[:] = first, wanted, len(spans), PRECISE_TOKENS if precise else 1, logits.ctypes.data, 0
        self.few_counts[:] = [count if count < ALL_IN_TILES else 0 for count in (first, wanted)]
