"""Confidence intervals of proportions, and McNemar's test of two proportions on the same questions."""

from math import comb, sqrt

Z = 1.95996398454  # the 97.5th percentile of the normal distribution


def wilson_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of `count` of `total` (Wilson 1927, doi:10.1080/01621459.1927.10502953)."""
    if not total:
        return 0.0, 1.0
    share, z = count / total, Z * Z / total
    half = sqrt(z * (4 * share * (1 - share) + z)) / 2
    return max(0.0, (share + z / 2 - half) / (1 + z)), min(1.0, (share + z / 2 + half) / (1 + z))


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of the hypothesis that both models are equally good (McNemar 1947).

    only_first, only_second: number of questions that only this model answered right; under the hypothesis, each of them
    is a toss of a fair coin.
    """
    total, least = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(total, count) for count in range(least + 1)) / (1 << total))
