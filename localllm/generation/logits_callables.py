"""Functions of a program that see the logits of each token before it is drawn, and change them or end the answer.

They are called once for each token, in order, also in speculative decoding: a guess counts only if it is what
is drawn then.
"""

from typing import TYPE_CHECKING

import numpy as np

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.generation.options import GenerationOptions


def ends_answer(options: "GenerationOptions", ids: list[int], row: np.ndarray) -> bool:
    """Return whether the stopping criterion, if there is one, ends an answer after these tokens.

    ids: of the prompt and the answer.  row: logits after them, float32 [vocab].
    """
    criterion = options.stopping_criteria
    return criterion is not None and bool(criterion([*ids], row.copy()))


def processed_logits(options: "GenerationOptions", ids: list[int], row: np.ndarray) -> np.ndarray:
    """Return the logits that a token is drawn from, float32 [vocab]: those of the processor, if there is one.

    Raises UsageError for others than it can be drawn from.
    """
    if options.logits_processor is None:
        return row
    made = np.asarray(options.logits_processor([*ids], row.copy()))
    if made.shape != row.shape or made.dtype.kind != "f":
        raise UsageError(f"logits_processor should return logits of the shape {row.shape}, not {made.shape}")
    if not np.isfinite(made.max()):
        raise UsageError("logits_processor should leave a finite logit to one token at least, and no other infinity")
    return made.astype(np.float32, copy=False)
