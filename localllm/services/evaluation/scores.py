"""Scores of a model's predictions for a text's tokens, and their statistics."""

from collections.abc import Sequence
from dataclasses import field
from math import comb, exp, log, sqrt
from typing import Self

import numpy as np

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.text.tokenizer import Tokenizer

Z = 1.95996398454  # the 97.5th percentile of the normal distribution
PERCENTILES = (99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1)
MIN_LOGPROB = np.float32(-16)  # tokens with a log probability below this are ignored in a divergence


def split_chunks(tokens: Sequence[int], size: int, limit: int | None = None) -> np.ndarray:
    """Split tokens into at most `limit` chunks, int32 [chunks, size]; drop the remaining tokens.

    Raises UsageError if there are too few tokens for one chunk.
    """
    if size < 4:
        raise UsageError(f"context must be 4 or greater, not {size}")
    if limit is not None and limit < 1:
        raise UsageError(f"chunks must be 1 or greater, not {limit}")
    count = len(tokens) // size
    if count == 0:
        raise UsageError(
            f"the text has {len(tokens)} tokens, but one chunk needs {size}: give a longer text, or set -c"
        )
    count = count if limit is None else min(count, limit)
    return np.array(tokens[: count * size], np.int32).reshape(count, size)


def add_bos(chunk: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """Return a chunk's token ids, with BOS in place of the first if the model uses BOS."""
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return chunk.tolist() if bos is None else [bos, *chunk[1:].tolist()]


# ---- one token ------------------------------------------------------------------------------------------------------


def log_sum_exp(logits: np.ndarray, scratch: np.ndarray) -> float:
    """Return the log-sum-exp of logits, float32 [vocab]; scratch: same shape, overwritten."""
    highest = logits.max()
    np.subtract(logits, highest, out=scratch)
    np.exp(scratch, out=scratch)
    return float(highest) + log(scratch.sum())


def compute_kl_divergence(base: np.ndarray, logits: np.ndarray, log_sum: float, scratch: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence of the logits' distribution from the base, in nats.

    base: log probabilities, float32 [vocab], overwritten.  log_sum: log_sum_exp of the logits.  scratch: overwritten.
    """
    np.subtract(base, logits, out=scratch)
    scratch += np.float32(log_sum)
    scratch[base <= MIN_LOGPROB] = 0
    np.exp(base, out=base)
    return float(base @ scratch)


# ---- all tokens -----------------------------------------------------------------------------------------------------


def make_empty_scores() -> np.ndarray:
    return np.zeros(0)


@frozen
class Prediction:
    """Cumulative scores of a text's chunks; arrays are float64 [scored tokens]."""

    chunks: int = 0
    nll: np.ndarray = field(default_factory=make_empty_scores)  # negative log probability of the text's token

    @property
    def perplexity(self) -> tuple[float, float]:
        """The perplexity, exp(mean of nll), and its standard error."""
        return exponentiate(*compute_mean_with_error(self.nll))

    def add_chunk(self, **chunk: np.ndarray) -> Self:
        """Return the scores extended by one more chunk; chunk: the arrays by name."""
        arrays = {name: np.concatenate([getattr(self, name), new]) for name, new in chunk.items()}
        return type(self)(self.chunks + 1, **arrays)

    def to_dict(self) -> dict[str, object]:
        value, error = self.perplexity
        return {"chunks": self.chunks, "tokens": len(self.nll), "perplexity": value, "error": error}


@frozen
class Comparison(Prediction):
    """Cumulative scores of a prediction, and its divergence from a base."""

    base_nll: np.ndarray = field(default_factory=make_empty_scores)
    kld: np.ndarray = field(default_factory=make_empty_scores)  # Kullback-Leibler divergence from the base, in nats
    change: np.ndarray = field(
        default_factory=make_empty_scores
    )  # difference between the probabilities of the text's token
    same_top: np.ndarray = field(default_factory=make_empty_scores)  # 1 if both have the same likeliest token, else 0

    @property
    def base_perplexity(self) -> tuple[float, float]:
        """The perplexity of the base, and its standard error."""
        return exponentiate(*compute_mean_with_error(self.base_nll))

    @property
    def ratio(self) -> tuple[float, float]:
        """The ratio of the two perplexities, and its standard error, which is small since they are correlated."""
        return exponentiate(*compute_mean_with_error(self.nll - self.base_nll))

    @property
    def rms_change(self) -> tuple[float, float]:
        """The root mean square of the change, and its standard error."""
        square, error = compute_mean_with_error(self.change**2)
        return sqrt(square), error / (2 * sqrt(square)) if square else 0.0

    def to_dict(self) -> dict[str, object]:
        return super().to_dict() | {
            "base": label_estimate(*self.base_perplexity, "perplexity"),
            "ratio": label_estimate(*self.ratio),
            "kld": compute_statistics(self.kld),
            "change": compute_statistics(self.change) | dict(zip(("rms", "rms_error"), self.rms_change, strict=True)),
            "same_top": label_estimate(*compute_mean_with_error(self.same_top)),
        }


def compute_mean_with_error(values: np.ndarray) -> tuple[float, float]:
    return float(np.mean(values)), sqrt(float(np.var(values)) / max(len(values) - 1, 1))


def exponentiate(value: float, error: float) -> tuple[float, float]:
    """Return exp of a logarithm, and the error that follows from the logarithm's error."""
    number = exp(min(value, 700.0))
    return number, number * error


def label_estimate(value: float, error: float, name: str = "mean") -> dict[str, float]:
    return {name: value, "error": error}


def compute_statistics(values: np.ndarray) -> dict[str, object]:
    """Return mean, extremes and percentiles; "50" is the median."""
    percentiles = dict(zip(map(str, PERCENTILES), np.percentile(values, PERCENTILES).tolist(), strict=True))
    return (
        label_estimate(*compute_mean_with_error(values))
        | {"maximum": float(values.max()), "minimum": float(values.min())}
        | percentiles
    )


# ---- proportions


def compute_wilson_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % score interval for `count` of `total` (Wilson 1927, doi:10.1080/01621459.1927.10502953)."""
    if not total:
        return 0.0, 1.0
    share, z = count / total, Z * Z / total
    half = sqrt(z * (4 * share * (1 - share) + z)) / 2
    return max(0.0, (share + z / 2 - half) / (1 + z)), min(1.0, (share + z / 2 + half) / (1 + z))


def compute_mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value for the hypothesis that both models are equally good (McNemar 1947).

    only_first, only_second: count of questions that only this model answered right; under the hypothesis, each of them
    is the toss of a fair coin.
    """
    total, least = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(total, count) for count in range(least + 1)) / (1 << total))
