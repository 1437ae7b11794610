"""A model as something that runs: the header of a run, the tape, the threads that walk it, and where the logits lie."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from localllm.engine.tape import Buffer
from localllm.engine.threads import Threads
from localllm.kernels.arguments import SEQUENCE

BATCH = 512  # tokens in one run at most
PRECISE_TOKENS = 128  # up to so many, activations keep 16 bits


class Span(NamedTuple):
    """What a run does for one sequence."""

    store: Any  # what the backend keeps for the sequence; here a PageTable or a HybridStore
    position: int  # of the first token
    ids: np.ndarray  # int64
    wanted: int  # of how many tokens, the last ones, logits are returned


class Header:
    """What changes from run to run, at fixed addresses, int64."""

    def __init__(self) -> None:
        self.token_count, self.wanted_count, self.sequence_count = (np.zeros(1, np.int64) for _ in range(3))
        self.ids, self.positions, self.owners, self.wanted = (np.zeros(BATCH, np.int64) for _ in range(4))
        self.sequences = np.zeros((BATCH, len(SEQUENCE)), np.int64)
        # The most tokens whose activations keep 16 bits: for most matrices, and for those that make keys and values,
        # whose error all later tokens see.
        self.most_precise, self.most_precise_stored = np.zeros(1, np.int64), np.full(1, BATCH)

    def fill(self, spans: Sequence[Span], precise: bool) -> int:
        """Describe a run; returns the number of tokens whose logits are wanted."""
        first = wanted = 0
        for number, span in enumerate(spans):
            count = len(span.ids)
            end, length = first + count, span.position + count
            self.ids[first:end] = span.ids
            self.positions[first:end] = np.arange(span.position, length)
            self.owners[first:end] = number
            self.sequences[number] = first, count, length, *span.store.addresses()
            self.wanted[wanted : wanted + span.wanted] = np.arange(end - span.wanted, end)
            first, wanted = end, wanted + span.wanted
        self.token_count[0], self.wanted_count[0], self.sequence_count[0] = first, wanted, len(spans)
        self.most_precise[0] = PRECISE_TOKENS if precise else 1
        return wanted


class Program:
    """A model for the CPU.

    Attributes:
        warning: what the user should know about the kernels, in one line, or None.
    """

    def __init__(self, header: Header, threads: Threads, logits: Buffer, vocab_size: int, warning: str | None):
        self.warning = warning
        self._header, self._threads, self._logits, self._vocab_size = header, threads, logits, vocab_size

    def run(self, spans: Sequence[Span], precise: bool) -> np.ndarray:
        """Read the tokens of all spans, BATCH at most; the wanted logits, span by span: float32 [wanted, vocab]."""
        wanted = self._header.fill(spans, precise)
        self._threads.run()
        width = self._logits.stride // 4
        floats = (ctypes.c_float * (wanted * width)).from_address(self._logits.address)
        return np.ctypeslib.as_array(floats).reshape(wanted, width)[:, : self._vocab_size].copy()

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
