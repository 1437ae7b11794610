"""The tokens of a prompt that a pool's sequences hold, for the length of a with statement."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from localllm.generation.sequence_pool import PooledSequence, SequencePool


@contextmanager
def beginning_with(pool: SequencePool, ids: Sequence[int], **how: Any) -> Iterator[PooledSequence]:
    """A sequence of a pool, as of SequencePool.begin, which is put back and collected at the end."""
    begun = pool.begin(ids, **how)
    try:
        yield begun
    finally:
        pool.put_back(begun.sequence)
    pool.collect()
