"""The sequences of a run, for kernels of recurrent layers: where each has its tokens, and its state."""

from localllm.kernels.arguments import SEQUENCE
from localllm.kernels.cpu.signature import argument, device

SEQUENCE_BYTES = 8 * len(SEQUENCE)


@device
def tokens_of(sequence):
    """Return the first token of a sequence in the run, and how many it has there."""
    return argument(sequence, SEQUENCE.first), argument(sequence, SEQUENCE.count)


@device
def states_of(sequence, offset):
    """Return the source and target addresses of a part of its state."""
    return argument(sequence, SEQUENCE.state) + offset, argument(sequence, SEQUENCE.next_state) + offset
