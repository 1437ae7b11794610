"""Compute log probabilities of tokens from the model's logits, before sampling options."""

from collections.abc import Sequence as Ids
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.engine.runs import PRECISE_TOKENS
from localllm.generation.sampling.sampler import log_sum_exp
from localllm.renamed import warn_of_old_name

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence


class TokenLogprob(NamedTuple):
    """A token and the natural logarithm of its probability."""

    token: int
    logprob: float


class LikelyToken(NamedTuple):
    """A generated token or a token of the prompt, and the likeliest tokens at its position, best first."""

    chosen: TokenLogprob
    likeliest: tuple[TokenLogprob, ...]


def compute_token_logprobs(row: np.ndarray, token: int, count: int) -> LikelyToken:
    """Return the log probability of a token, and the `count` likeliest tokens.

    row: logits, float32 [vocab].
    """
    total = log_sum_exp(row)
    best = np.argpartition(row, -count)[-count:] if count else np.empty(0, np.int64)
    best = best[np.argsort(-row[best], kind="stable")]
    likeliest = tuple(TokenLogprob(int(alternative), float(row[alternative]) - total) for alternative in best)
    return LikelyToken(TokenLogprob(token, float(row[token]) - total), likeliest)


def compute_prompt_logprobs(sequence: "Sequence", ids: Ids[int], count: int) -> tuple[list[LikelyToken], np.ndarray]:
    """Return the log probabilities of a prompt's tokens except the first, and the logits after it, float32 [vocab].

    sequence: an empty sequence, which is closed. count: number of likeliest tokens to return for each token.
    Activations have 16 bits, as in choices.py; runs are short, so that few logits are in memory. Raises the errors of
    Sequence.append.
    """
    logprobs, row = list[LikelyToken](), np.empty(0, np.float32)
    with closing(sequence):
        for begin in range(0, len(ids), PRECISE_TOKENS):
            rows = sequence.append(ids[begin : begin + PRECISE_TOKENS], "all", kernel_tokens=PRECISE_TOKENS)
            following = ids[begin + 1 : begin + 1 + len(rows)]
            logprobs += [compute_token_logprobs(row, token, count) for row, token in zip(rows, following, strict=False)]
            row = rows[-1].copy()
    return logprobs, row


if not TYPE_CHECKING:  # names of 0.3

    def __getattr__(name: str) -> object:
        """Return a function by its old name."""
        if name not in ("token_logprobs", "prompt_logprobs"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warn_of_old_name(name, f"compute_{name}")
        return globals()[f"compute_{name}"]
