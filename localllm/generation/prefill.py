"""Reading a prompt, run by run."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from localllm.engine.image_tokens import whole_end

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence
    from localllm.generation.context_overflow import ShiftedSequence


def read_prompt(
    sequence: "Sequence | ShiftedSequence", prompt: list[int], on_progress: Callable[[int, int], None] | None
) -> np.ndarray:
    """Read what the sequence does not hold of a prompt; the logits after it, float32 [1, vocab]."""
    begin, progress = len(sequence.tokens), on_progress or (lambda done, total: None)
    start = begin
    while start < len(prompt):  # between two runs progress is shown and Ctrl-C is heard
        progress(start - begin, len(prompt) - begin)
        end = whole_end(prompt, min(sequence.engine.runs.next_end(start), len(prompt)))
        logits = sequence.append(prompt[start:end], "last" if end == len(prompt) else "none")
        start = end
    return logits
