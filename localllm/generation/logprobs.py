"""Log probabilities of tokens by the model's own logits, before sampling options."""

from typing import NamedTuple

import numpy as np

from localllm.generation.sampling.sampler import log_total


class TokenLogprob(NamedTuple):
    """A token and the natural logarithm of its probability according to the model's own logits."""

    token: int
    logprob: float


class LikelyToken(NamedTuple):
    """A token of the response's text, and the likeliest alternatives, best first."""

    chosen: TokenLogprob
    likeliest: tuple[TokenLogprob, ...]


def token_logprobs(row: np.ndarray, token: int, count: int) -> LikelyToken:
    """Return a token's log probability and the `count` likeliest tokens.

    row: logits, float32 [vocab].
    """
    total = log_total(row)
    best = np.argpartition(row, -count)[-count:] if count else np.empty(0, np.int64)
    best = best[np.argsort(-row[best], kind="stable")]
    likeliest = tuple(TokenLogprob(int(other), float(row[other]) - total) for other in best)
    return LikelyToken(TokenLogprob(token, float(row[token]) - total), likeliest)
