"""Confidence intervals of shares, and a test of two that were measured on the same questions."""

from math import comb, sqrt

Z = 1.95996398454  # of the normal distribution's middle 95 %


def wilson_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of `count` of `total` (Wilson 1927, doi:10.1080/01621459.1927.10502953)."""
    if not total:
        return 0.0, 1.0
    share, z = count / total, Z * Z / total
    half = sqrt(z * (4 * share * (1 - share) + z)) / 2
    return max(0.0, (share + z / 2 - half) / (1 + z)), min(1.0, (share + z / 2 + half) / (1 + z))


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value that two shares on the same questions are equal (McNemar 1947).

    only_first, only_second: questions that one answered right and the other did not. Under equality each falls on
    either side like a fair coin.
    """
    total, least = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(total, count) for count in range(least + 1)) / (1 << total))
