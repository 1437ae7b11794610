"""Reading a prompt: a chunk of tokens at a time."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence
    from localllm.generation.overflow import Rolling

CHUNK = 512  # tokens per prefill step; between steps, progress is shown and Ctrl-C is heard


def read_prompt(
    sequence: "Sequence | Rolling", prompt: list[int], on_progress: Callable[[int, int], None] | None
) -> np.ndarray:
    """Read what the sequence does not hold of a prompt; the logits after it, float32 [1, vocab]."""
    begin, progress = len(sequence.tokens), on_progress or (lambda done, total: None)
    for start in range(begin, len(prompt), CHUNK):
        progress(start - begin, len(prompt) - begin)
        last = start + CHUNK >= len(prompt)
        logits = sequence.append(prompt[start : start + CHUNK], "last" if last else "none")
    return logits
