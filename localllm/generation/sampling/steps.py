"""The steps of sampling: functions from candidates to candidates, which may be anywhere in a chain.

Each names the paper it comes from. They agree with llama.cpp's, in float64 where it has float32, except where they say
so; and tokens that are excluded (by a grammar or a bias) are no candidates here and -inf there.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

import numpy as np

from localllm.errors import ConstraintError
from localllm.generation.sampling.candidates import LARGEST, Breakers, Candidates

COLDEST, HOTTEST = 1e-200, 1e300  # temperatures beyond do the same, but would leave float64's range
LARGEST_POWER = math.log(LARGEST)  # the logarithm of the largest power that is worth computing
IMPOSSIBLE = 1e-300  # a probability that is as good as 0
INFILL_LEAST = 0.2  # infill: the probability that a token needs
ZIPF_TOKENS = 100  # from which mirostat estimates the shape of the distribution
MOST_MU = 1e300  # bits; what mirostat aims at stays finite

# adaptive-p: logits are PEAK at the target, and fall at first with the square and then in proportion to the distance.
PEAK, SHARPNESS, WIDTH = 5.0, 10.0, 0.3


def only(candidates: Candidates, allowed: np.ndarray) -> Candidates:
    """Keep the candidates with a True in allowed, bool [n]. Raises ConstraintError if there is none."""
    if not allowed.any():
        raise ConstraintError("no token is allowed here")
    return candidates.keep(allowed)


def logit_bias(candidates: Candidates, tokens: np.ndarray, biases: np.ndarray) -> Candidates:
    """Add biases float64 [m] to the logits of tokens int64 [m] (OpenAI's logit_bias); with -inf a token is excluded."""
    found, places = candidates.find(tokens)
    biases = biases[found]
    candidates = candidates.move(places, candidates.logits[places] + biases)
    if np.isfinite(biases).all():
        return candidates
    allowed = np.ones(len(candidates.ids), bool)
    allowed[candidates.find(tokens[found][biases == -math.inf])[1]] = False
    return only(candidates, allowed)


def penalties(
    candidates: Candidates, recent: np.ndarray, repeat: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> Candidates:
    """Make recent tokens int64 [m] less likely.

    Repetition: Keskar et al. 2019 (CTRL), with llama.cpp's rule for negative logits; presence and frequency: OpenAI's.
    """
    if not len(recent):
        return candidates
    repeat, presence, frequency = max(within(repeat), 1 / LARGEST), within(presence), within(frequency)
    tokens, times = np.unique(recent, return_counts=True)
    found, places = candidates.find(tokens)
    old = candidates.logits[places].astype(np.float64)
    new = np.where(old <= 0, old * repeat, old / repeat) - times[found] * frequency - presence
    return candidates.move(places, new)


def within(number: float) -> float:
    """Clamp a number to float32's range, so that no product of two exceeds float64's."""
    return min(max(number, -LARGEST), LARGEST)


def dry(
    candidates: Candidates, recent: np.ndarray, breakers: Breakers, multiplier: float, base: float, allowed_length: int
) -> Candidates:
    """Make tokens less likely that would continue with a sequence the text has had already: "don't repeat yourself".

    Source: p-e-w, 2024: https://github.com/oobabooga/text-generation-webui/pull/5677. If the last n tokens, all since a
    breaker, also occur earlier among the recent ones int64 [m], the token after them loses multiplier * base ** (n -
    allowed_length), with the largest n of at least allowed_length. A token that contains a breaker is not penalized.

    Unlike in llama.cpp, breakers are found in the text, and not by the tokens that they are usually cut into.
    """
    limit = min(breakers.since, len(recent))
    if len(recent) <= allowed_length or limit < allowed_length:
        return candidates
    growth = math.log(base)
    most = int(min(limit - allowed_length, LARGEST_POWER / growth)) if growth else 0
    lengths = {
        token: length
        for token, length in find_repetitions(recent, min(limit, allowed_length + most), allowed_length).items()
        if not breakers.are_in(token)
    }
    tokens, exponents = np.array(list(lengths), np.int64), np.array(list(lengths.values())) - allowed_length
    found, places = candidates.find(tokens)
    losses = within(multiplier) * base ** exponents[found].astype(np.float64)
    return candidates.move(places, candidates.logits[places] - losses)


def find_repetitions(recent: np.ndarray, most: int, least: int) -> dict[int, int]:
    """Find the tokens that followed earlier occurrences of the last tokens, and the lengths of these matches.

    recent: int64 [m]. Lengths go from `least` to `most`; of each token, the longest.
    """
    lengths = np.zeros(len(recent) - 1, np.int64)
    ends = np.arange(len(recent) - 1)
    for length in range(most):
        ends = ends[ends >= length]
        ends = ends[recent[ends - length] == recent[-1 - length]]
        if not len(ends):
            break
        lengths[ends] += 1
    ends = np.flatnonzero(lengths >= least)
    ends = ends[np.argsort(lengths[ends], kind="stable")]
    return dict(zip(recent[ends + 1].tolist(), lengths[ends].tolist(), strict=True))  # of equal tokens, the last stays


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the k most likely tokens (0: all), ranked (Fan et al. 2018, arXiv 1805.04833).

    At least k tokens reach the k-th largest of the maxima over 64 strided groups, so only those that do are sorted:
    0.06 ms for k = 40 of 128256, where np.argpartition takes 1.1 ms. All of them take 6.5 ms.
    """
    if candidates.ranked:
        return candidates.keep(slice(k or None))
    groups = len(candidates.ids) // 64
    if 0 < k < groups:
        maxima = candidates.logits[: groups * 64].reshape(64, groups).max(axis=0)
        less = candidates.logits < np.partition(maxima, -k)[-k]
        candidates = candidates.keep(np.flatnonzero(~less))  # and not >=, which would drop a NaN unseen
    return candidates.rank(k or None)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keep tokens whose logits are within n standard deviations of the largest (Tang et al. 2024, arXiv 2411.07641)."""
    best = float(candidates.logits[candidates.best])
    finite = candidates.logits[np.isfinite(candidates.logits)]
    return candidates.keep(candidates.logits >= np.float64(best - n * float(finite.std(dtype=np.float64))))


def typical(candidates: Candidates, p: float) -> Candidates:
    """Keep the tokens of most typical surprise up to total probability p (locally typical sampling).

    Meister et al. 2022, arXiv 2202.00666: those whose surprise is nearest to the expected one. Where some tokens are
    impossible, llama.cpp's keeps any: its entropy is not a number.
    """
    if p >= 1:
        return candidates
    probabilities = candidates.probabilities()
    surprise = -np.log(np.maximum(probabilities, IMPOSSIBLE))
    expected = float(probabilities @ surprise)
    order = np.argsort(np.abs(surprise - expected), kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), p, side="right")) + 1
    return candidates.keep(np.sort(order[:count]))


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the most likely tokens up to total probability p: the nucleus.

    Holtzman et al. 2019, arXiv 1904.09751.
    """
    if p >= 1:
        return candidates
    candidates = candidates if candidates.ranked else candidates.rank()
    count = int(np.searchsorted(np.cumsum(candidates.probabilities()), p)) + 1
    return candidates.keep(slice(count))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens with at least p times the probability of the most likely one.

    Nguyen et al. 2024, arXiv 2407.01082.
    """
    if p <= 0:
        return candidates
    return candidates.keep(candidates.logits >= candidates.logits[candidates.best] + math.log(p))


def xtc(candidates: Candidates, probability: float, threshold: float, chance: float) -> Candidates:
    """Exclude top choices: of the tokens with at least this probability, keep the least likely.

    p-e-w, 2024: https://github.com/oobabooga/text-generation-webui/pull/6335.

    chance: a random number from 0 to 1; above `probability`, nothing happens. Of equals, those with the lowest ids go.
    """
    if chance > probability:
        return candidates
    top = np.flatnonzero(candidates.probabilities() >= max(threshold, IMPOSSIBLE))
    if len(top) < 2:
        return candidates
    least = top[::-1][np.argmin(candidates.logits[top[::-1]])]
    kept = np.ones(len(candidates.ids), bool)
    kept[top[top != least]] = False
    return candidates.keep(kept)


def temperature(candidates: Candidates, t: float) -> Candidates:
    """Divide the logits by t: below 1 sharper, above 1 flatter; with 0 or below, only the most likely token stays."""
    if t <= 0:
        return likeliest(candidates)
    return Candidates(candidates.ids, candidates.logits.astype(np.float64) / max(t, COLDEST), candidates.ranked)


def dynamic_temperature(candidates: Candidates, t: float, range: float, exponent: float) -> Candidates:
    """Scale by a temperature from t - range to t + range, higher where the model is less sure.

    The idea is in Zhu et al. 2023, arXiv 2309.02772: the temperature follows the entropy, divided by the largest
    possible entropy of that many tokens, to the power of the exponent.
    """
    if len(candidates.ids) == 1:
        return candidates
    probabilities = candidates.probabilities()
    probabilities = probabilities[probabilities > 0]
    entropy = -float(probabilities @ np.log(probabilities)) / math.log(len(candidates.ids))
    coldest, hottest = max(0.0, t - range), min(t + range, HOTTEST)
    return temperature(candidates, coldest + (hottest - coldest) * min(max(entropy, 0.0), 1.0) ** exponent)


def likeliest(candidates: Candidates) -> Candidates:
    """Keep the most likely token; ties go to the lowest id."""
    best = candidates.best
    return candidates.keep(slice(best, best + 1))


def mirostat_1(candidates: Candidates, mu: float, vocab: int) -> Candidates:
    """Keep the k most likely tokens, with k for a surprise of mu bits (Mirostat, version 1).

    Basu et al. 2021, arXiv 2007.14966: probabilities are assumed to fall by Zipf's law, whose exponent is estimated;
    vocab: number of tokens.

    llama.cpp has another k if a power is out of float32's range or not a number.
    """
    first = top_k(candidates, ZIPF_TOKENS)
    logits = first.logits[np.isfinite(first.logits)].astype(np.float64)
    if len(logits) < 2:
        return first.keep(slice(1))
    falls, steps = logits[:-1] - logits[1:], np.log1p(1 / np.arange(1.0, len(logits)))
    exponent = float(falls @ steps / (steps @ steps))
    excess = exponent - 1
    factor = excess / -math.expm1(-excess * math.log(vocab)) if abs(excess) > 1e-9 else 1 / math.log(vocab)
    power = math.log(factor) + mu * math.log(2)  # the logarithm of k ** exponent
    log_k = power / exponent if exponent > 0 else math.copysign(math.inf, power)
    k = int(math.exp(log_k)) if log_k < LARGEST_POWER else len(candidates.ids)
    return top_k(candidates if k > ZIPF_TOKENS else first, max(1, k))


def mirostat_2(candidates: Candidates, mu: float) -> Candidates:
    """Keep tokens that surprise by at most mu bits, and the most likely one (Basu et al. 2021, arXiv 2007.14966)."""
    best = candidates.best
    below = candidates.logits - candidates.logits[best]
    total = float(np.exp(below).sum(dtype=np.float64))
    kept = below >= within(math.log(total) - mu * math.log(2))
    kept[best] = True
    return candidates.keep(kept)


def learnt_mu(mu: float, probability: float, target: float, rate: float) -> float:
    """Mirostat's mu after a token that was drawn with this probability: nearer to a surprise of `target` bits."""
    error = -math.log2(max(probability, IMPOSSIBLE)) - target
    return min(max(mu - rate * error, -MOST_MU), MOST_MU)


def adaptive_p(candidates: Candidates, target: float) -> Candidates:
    """Prefer tokens whose probabilities are near the target (by MrJackSpade and ddh0, llama.cpp's pull request 17927).

    Every candidate has a chance, so the steps before should have cut the unlikely ones.
    """
    distances = np.abs(candidates.probabilities() - target) / WIDTH
    logits = PEAK - SHARPNESS * distances**2 / (1 + distances)
    changed = Candidates(candidates.ids, np.where(np.isfinite(candidates.logits), logits, -math.inf))
    return changed.rank() if candidates.ranked else changed


def draw(candidates: Candidates, key: int) -> int:
    """Sample a token by its probability: the largest sum of logit and Gumbel noise (the Gumbel-max trick).

    A token's noise depends on nothing but its id and the key, 64 bits. So two models with similar probabilities draw
    the same token most of the time, without communication (Daliri et al. 2024, arXiv 2408.07978).
    """
    _ = candidates.best
    noise = -np.log(-np.log(uniform(candidates.ids, key)))
    return int(candidates.ids[np.argmax(candidates.logits + noise)])


def uniform(ids: np.ndarray, key: int) -> np.ndarray:
    """Hash ids int64 [n] to random numbers float64 [n] between 0 and 1, by SplitMix64 (Steele et al. 2014)."""
    bits = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52


def infill(
    candidates: Candidates, token_bytes: Callable[[int], bytes], ends: Collection[int], end: int | None
) -> Candidates:
    """Keep what a text in the middle goes on with, or its end: llama.cpp's, for few candidates (after top_k and top_p).

    If an end is likely, only ends stay. Else the probabilities of tokens that begin alike are added up, and tokens stay
    that have 0.2 then, and their share of what such ones have. If none has that much, the text ends.

    token_bytes: of a token, none of a control token.  ends: tokens that end an answer.  end: the one to end it with, or
    None if it may not end: then the most likely token stays.
    """
    ranked = candidates.rank()
    probabilities, is_end = ranked.probabilities(), np.isin(ranked.ids, list(ends))
    if 3 * probabilities[is_end].sum() * len(ranked.ids) > probabilities[~is_end].sum():
        return ranked.keep(is_end)
    merged = merge_beginnings(probabilities, [token_bytes(token) for token in ranked.ids.tolist()])
    kept = is_end | (merged >= INFILL_LEAST)
    count = int((kept & ~is_end).sum())
    if not count:
        return ranked.keep(slice(1)) if end is None else Candidates(np.array([end]), np.ones(1), ranked=True)
    return ranked.keep(kept & (is_end | (merged / merged[kept].sum() >= 1 / (count + 1))))


def merge_beginnings(probabilities: np.ndarray, texts: Sequence[bytes]) -> np.ndarray:
    """Add up the probabilities of tokens of which one begins with the other, with the likelier one; float64 [n].

    probabilities: ranked.
    """
    merged, is_there = probabilities.copy(), [True] * len(texts)
    order = sorted(range(len(texts)), key=texts.__getitem__)
    spelt = [texts[place] for place in order]
    for first, text in enumerate(texts):
        place, alike = bisect_left(spelt, text), list[int]()
        while text and is_there[first] and place < len(spelt) and spelt[place].startswith(text):
            alike.append(order[place])
            place += 1
        for second in sorted(alike):
            if second != first and is_there[first] and is_there[second]:
                into, out = (second, first) if merged[second] > merged[first] else (first, second)
                merged[into] += merged[out]
                merged[out], is_there[out] = 0.0, False
    return merged
