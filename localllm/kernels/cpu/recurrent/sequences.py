"""Reads the fields of a SEQUENCE that kernels of recurrent layers need: its tokens in the run, its states."""

from localllm.kernels.cpu.signature import argument, device
from localllm.kernels.table import SEQUENCE

SEQUENCE_BYTES = 8 * len(SEQUENCE)


@device
def tokens_of(sequence):
    """Return the number of a sequence's first token in the run, and the number of its tokens there."""
    return argument(sequence, SEQUENCE.first), argument(sequence, SEQUENCE.count)


@device
def states_of(sequence, offset):
    """Return the addresses of a part of the state, `offset` bytes from its beginning: before the run, and after it."""
    return argument(sequence, SEQUENCE.state) + offset, argument(sequence, SEQUENCE.next_state) + offset
