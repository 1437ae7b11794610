"""Splits texts into chunks of the same number of tokens, as llama-perplexity and llama-imatrix do."""

from collections.abc import Sequence

import numpy as np

from localllm.errors import UsageError
from localllm.text.tokenizer import Tokenizer


def split_chunks(tokens: Sequence[int], size: int, limit: int | None = None) -> np.ndarray:
    """Split tokens into at most `limit` chunks, int32 [chunks, size]; the remaining tokens are dropped.

    Raises UsageError if there are too few tokens for one chunk.
    """
    if size < 4:
        raise UsageError(f"context should be 4 or greater, not {size}")
    if limit is not None and limit < 1:
        raise UsageError(f"chunks should be 1 or greater, not {limit}")
    count = len(tokens) // size
    if count == 0:
        raise UsageError(f"the text has {len(tokens)} tokens, fewer than a chunk of {size}")
    count = count if limit is None else min(count, limit)
    return np.array(tokens[: count * size], np.int32).reshape(count, size)


def with_bos(chunk: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """Return a chunk's token ids, the first of which is replaced by BOS if the model uses BOS."""
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return chunk.tolist() if bos is None else [bos, *chunk[1:].tolist()]
