"""Texts as chunks of equally many tokens, cut as llama-perplexity and llama-imatrix cut them."""

from collections.abc import Sequence

import numpy as np

from localllm.errors import UsageError
from localllm.text.tokenizer import Tokenizer


def cut(tokens: Sequence[int], size: int, most: int | None = None) -> np.ndarray:
    """int32 [chunks, size], at most `most` of them; tokens that fill no chunk are left out.

    Raises UsageError if there is not even one.
    """
    if size < 4:
        raise UsageError(f"context should be 4 or above for a chunk of so many tokens, not {size}")
    if most is not None and most < 1:
        raise UsageError(f"chunks should be 1 or above, not {most}")
    count = len(tokens) // size
    if count == 0:
        raise UsageError(f"the text has {len(tokens)} tokens, and a chunk takes {size}")
    count = count if most is None else min(count, most)
    return np.array(tokens[: count * size], np.int32).reshape(count, size)


def as_read(chunk: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """The chunk as a model reads it: its first token becomes BOS if the model wants one before a text."""
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return chunk.tolist() if bos is None else [bos, *chunk[1:].tolist()]
