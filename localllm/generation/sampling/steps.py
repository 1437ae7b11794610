"""Define the sampling steps: functions from candidates to candidates that can be combined in any order.

Each cites its source. They agree with llama.cpp's, except where noted, and compute in float64 where it uses float32.
Tokens that a grammar or a bias excludes are removed from the candidates; llama.cpp sets their logits to -inf.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from localllm.errors import ConstraintError
from localllm.generation.sampling.candidates import (
    IMPOSSIBLE,
    LARGEST,
    Candidates,
    SamplerState,
    SequenceBreakers,
    hash_uniform,
)
from localllm.generation.sampling.options import CompleteOptions

COLDEST, HOTTEST = 1e-200, 1e300  # temperatures are clamped to these, to stay within float64's range
LARGEST_POWER = math.log(LARGEST)  # logarithm of the largest power that is computed
XTC_CHANCE = np.array([-1])  # in place of a token id: the key of xtc's random number
INFILL_MIN_PROBABILITY = 0.2  # infill: minimum probability of a token
ZIPF_TOKENS = 100  # most likely tokens, from which mirostat estimates the exponent of Zipf's law

# adaptive-p: logits are PEAK at the target, and fall with the square of small distances and linearly for large ones.
PEAK, SHARPNESS, WIDTH = 5.0, 10.0, 0.3


def keep_allowed(candidates: Candidates, allowed: np.ndarray) -> Candidates:
    """Keep the candidates that a mask, bool [n], allows. Raises ConstraintError if it allows none."""
    if not allowed.any():
        raise ConstraintError("the constraint allows no token at this position")
    return candidates.keep(allowed)


def logit_bias(candidates: Candidates, tokens: np.ndarray, biases: np.ndarray) -> Candidates:
    """Add biases, float64 [m], to the logits of tokens, int64 [m] (OpenAI's logit_bias).

    A bias of -inf excludes a token.
    """
    present, places = candidates.find(tokens)
    biases = biases[present]
    candidates = candidates.replace_logits(places, candidates.logits[places] + biases)
    if np.isfinite(biases).all():
        return candidates
    allowed = np.ones(len(candidates.ids), bool)
    allowed[candidates.find(tokens[present][biases == -math.inf])[1]] = False
    return keep_allowed(candidates, allowed)


def penalties(
    candidates: Candidates, recent: np.ndarray, repeat: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> Candidates:
    """Lower the logits of recent tokens, int64 [m].

    Repetition: Keskar et al. 2019 (CTRL), with llama.cpp's rule for negative logits; presence and frequency: OpenAI's.
    """
    if not len(recent):
        return candidates
    repeat, presence, frequency = max(clamp(repeat), 1 / LARGEST), clamp(presence), clamp(frequency)
    tokens, times = np.unique(recent, return_counts=True)
    present, places = candidates.find(tokens)
    old = candidates.logits[places].astype(np.float64)
    new = np.where(old <= 0, old * repeat, old / repeat) - times[present] * frequency - presence
    return candidates.replace_logits(places, new)


def clamp(number: float) -> float:
    """Clamp a number to the range of float32, so that products of two numbers do not exceed that of float64."""
    return min(max(number, -LARGEST), LARGEST)


def dry(
    candidates: Candidates,
    recent: np.ndarray,
    breakers: SequenceBreakers,
    multiplier: float,
    base: float,
    allowed_length: int,
) -> Candidates:
    """Lower the logits of tokens that would continue a repeated sequence (DRY, "don't repeat yourself").

    Source: p-e-w, 2024: https://github.com/oobabooga/text-generation-webui/pull/5677. If the last n tokens, all after
    the latest breaker, also occur earlier in `recent`, int64 [m], the logit of the token that followed them there is
    lowered by multiplier * base ** (n - allowed_length), for the largest n >= allowed_length. Tokens that contain a
    breaker are not penalized. Unlike in llama.cpp, breakers are found in the text and not by their usual tokens.
    """
    limit = min(breakers.since, len(recent))
    if len(recent) <= allowed_length or limit < allowed_length:
        return candidates
    growth = math.log(base)
    extra = int(min(limit - allowed_length, LARGEST_POWER / growth)) if growth else 0
    lengths = {
        token: length
        for token, length in find_repetitions(recent, min(limit, allowed_length + extra), allowed_length).items()
        if not breakers.occur_in(token)
    }
    tokens, exponents = np.array(list(lengths), np.int64), np.array(list(lengths.values())) - allowed_length
    present, places = candidates.find(tokens)
    losses = clamp(multiplier) * base ** exponents[present].astype(np.float64)
    return candidates.replace_logits(places, candidates.logits[places] - losses)


def find_repetitions(recent: np.ndarray, limit: int, least: int) -> dict[int, int]:
    """Return the tokens that followed earlier occurrences of the last tokens, each with the length of the match.

    recent: int64 [m]. Only lengths from `least` to `limit` count; a token gets its longest match.
    """
    lengths = np.zeros(len(recent) - 1, np.int64)
    ends = np.arange(len(recent) - 1)
    for length in range(limit):
        ends = ends[ends >= length]
        ends = ends[recent[ends - length] == recent[-1 - length]]
        if not len(ends):
            break
        lengths[ends] += 1
    ends = np.flatnonzero(lengths >= least)
    ends = ends[np.argsort(lengths[ends], kind="stable")]
    # The last, longest match of a token wins.
    return dict(zip(recent[ends + 1].tolist(), lengths[ends].tolist(), strict=True))


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the k most likely tokens (0: all), ranked (Fan et al. 2018, arXiv 1805.04833).

    Only tokens that reach a bound are sorted. The bound is the k-th largest of the maxima of groups of 64, so that at
    least k tokens reach it. For k = 40 of 128256 tokens this takes 0.06 ms, np.argpartition 1.1 ms, and sorting all 6.5
    ms.
    """
    if candidates.ranked:
        return candidates.keep(slice(k or None))
    groups = len(candidates.ids) // 64
    if 0 < k < groups:
        maxima = candidates.logits[: groups * 64].reshape(64, groups).max(axis=0)
        less = candidates.logits < np.partition(maxima, -k)[-k]
        candidates = candidates.keep(np.flatnonzero(~less))  # not >=, which would drop a NaN
    return candidates.rank(k or None)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keep tokens whose logits are within n standard deviations of the largest.

    Tang et al. 2024, arXiv 2411.07641.
    """
    best = float(candidates.logits[candidates.best])
    finite = candidates.logits[np.isfinite(candidates.logits)]
    with np.errstate(over="ignore"):  # logits whose squares are infinite: all tokens are kept
        deviation = float(finite.std(dtype=np.float64))
    return candidates.keep(candidates.logits >= np.float64(best - n * deviation))


def typical(candidates: Candidates, p: float) -> Candidates:
    """Keep the tokens of most typical surprise up to total probability p (locally typical sampling).

    Meister et al. 2022, arXiv 2202.00666: the tokens whose surprise is nearest to the expected surprise. If some tokens
    have probability 0, llama.cpp keeps arbitrary tokens, because its entropy is NaN.
    """
    if p >= 1:
        return candidates
    probabilities = candidates.compute_probabilities()
    surprise = -np.log(np.maximum(probabilities, IMPOSSIBLE))
    expected = float(probabilities @ surprise)
    order = np.argsort(np.abs(surprise - expected), kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), p, side="right")) + 1
    return candidates.keep(np.sort(order[:count]))


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the most likely tokens up to total probability p (nucleus sampling).

    Holtzman et al. 2019, arXiv 1904.09751.
    """
    if p >= 1:
        return candidates
    candidates = candidates if candidates.ranked else candidates.rank()
    count = int(np.searchsorted(np.cumsum(candidates.compute_probabilities()), p)) + 1
    return candidates.keep(slice(count))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens with at least p times the probability of the most likely one.

    Nguyen et al. 2024, arXiv 2407.01082.
    """
    if p <= 0:
        return candidates
    return candidates.keep(candidates.logits >= candidates.logits[candidates.best] + math.log(p))


def xtc(candidates: Candidates, probability: float, threshold: float, chance: float) -> Candidates:
    """Exclude top choices (XTC): of the tokens with at least probability `threshold`, keep only the least likely.

    Source: p-e-w, 2024: https://github.com/oobabooga/text-generation-webui/pull/6335.

    chance: a random number from 0 to 1; above `probability`, nothing is excluded. Of equally likely tokens, the one
    with the highest id is kept.
    """
    if chance > probability:
        return candidates
    top = np.flatnonzero(candidates.compute_probabilities() >= max(threshold, IMPOSSIBLE))
    if len(top) < 2:
        return candidates
    least = top[::-1][np.argmin(candidates.logits[top[::-1]])]
    is_kept = np.ones(len(candidates.ids), bool)
    is_kept[top[top != least]] = False
    return candidates.keep(is_kept)


def temperature(candidates: Candidates, t: float) -> Candidates:
    """Divide the logits by t: below 1, the distribution is sharper; at 0 or below, it is greedy."""
    if t <= 0:
        return keep_likeliest(candidates)
    return Candidates(candidates.ids, candidates.logits.astype(np.float64) / max(t, COLDEST), candidates.ranked)


def dynamic_temperature(candidates: Candidates, t: float, range: float, exponent: float) -> Candidates:
    """Divide the logits by a temperature from t - range to t + range, which grows with the entropy.

    The position in this interval is the entropy, divided by its maximum for that number of tokens, to the power of the
    exponent. The idea is in Zhu et al. 2023, arXiv 2309.02772.
    """
    if len(candidates.ids) == 1:
        return candidates
    probabilities = candidates.compute_probabilities()
    probabilities = probabilities[probabilities > 0]
    entropy = -float(probabilities @ np.log(probabilities)) / math.log(len(candidates.ids))
    coldest, hottest = max(0.0, t - range), min(t + range, HOTTEST)
    return temperature(candidates, coldest + (hottest - coldest) * min(max(entropy, 0.0), 1.0) ** exponent)


def keep_likeliest(candidates: Candidates) -> Candidates:
    """Keep the most likely token, the one with the lowest id if several are equally likely."""
    best = candidates.best
    return candidates.keep(slice(best, best + 1))


def mirostat_1(candidates: Candidates, mu: float, vocab: int) -> Candidates:
    """Keep the k most likely tokens, where k gives a surprise of mu bits (Mirostat, version 1).

    Basu et al. 2021, arXiv 2007.14966: probabilities are assumed to follow Zipf's law, whose exponent is estimated.
    vocab: size of the vocabulary. llama.cpp's k differs if a power is beyond float32's range or NaN.
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
    """Keep the tokens with a surprise of at most mu bits, and the most likely one (Mirostat, version 2).

    Basu et al. 2021, arXiv 2007.14966.
    """
    best = candidates.best
    below = candidates.logits - candidates.logits[best]
    total = float(np.exp(below).sum(dtype=np.float64))
    is_kept = below >= clamp(math.log(total) - mu * math.log(2))
    is_kept[best] = True
    return candidates.keep(is_kept)


def adaptive_p(candidates: Candidates, target: float) -> Candidates:
    """Prefer tokens whose probabilities are near the target.

    Source: MrJackSpade and ddh0, https://github.com/ggml-org/llama.cpp/pull/17927. Even unlikely candidates stay
    possible, so earlier steps should remove these.
    """
    distances = np.abs(candidates.compute_probabilities() - target) / WIDTH
    logits = PEAK - SHARPNESS * distances**2 / (1 + distances)
    changed = Candidates(candidates.ids, np.where(np.isfinite(candidates.logits), logits, -math.inf))
    return changed.rank() if candidates.ranked else changed


def draw(candidates: Candidates, key: int) -> int:
    """Draw a token by its probability with the Gumbel-max trick.

    The token with the largest sum of logit and Gumbel noise is drawn. The noise of a token depends only on its id and
    the key, 64 bits. So two models with similar probabilities draw the same token most of the time, without
    communication (Daliri et al. 2024, arXiv 2408.07978).
    """
    _ = candidates.best
    noise = -np.log(-np.log(hash_uniform(candidates.ids, key)))
    return int(candidates.ids[np.argmax(candidates.logits + noise)])


def infill(
    candidates: Candidates, token_bytes: Callable[[int], bytes], ends: Collection[int], end: int | None
) -> Candidates:
    """Keep either end tokens or confident tokens, to fill in the middle of a text after top_k and top_p.

    As in llama.cpp, only end tokens stay if they are likely. Otherwise, if the text of a token is a prefix of
    another's, the likelier token gets the probability of both. If n tokens then have at least INFILL_MIN_PROBABILITY,
    each token stays that has at least 1 / (n + 1) of the total of these and the end tokens, which stay, too. If n is 0,
    the answer ends.

    token_bytes: returns the bytes of a token, b"" of a control token.  ends: end tokens.
    end: the token to end with; None if the answer may not end, so that the most likely token stays.
    """
    ranked = candidates.rank()
    probabilities, is_end = ranked.compute_probabilities(), np.isin(ranked.ids, list(ends))
    if 3 * probabilities[is_end].sum() * len(ranked.ids) > probabilities[~is_end].sum():
        return ranked.keep(is_end)
    merged = merge_prefixes(probabilities, [token_bytes(token) for token in ranked.ids.tolist()])
    is_kept = is_end | (merged >= INFILL_MIN_PROBABILITY)
    count = int((is_kept & ~is_end).sum())
    if not count:
        return ranked.keep(slice(1)) if end is None else Candidates(np.array([end]), np.ones(1), ranked=True)
    return ranked.keep(is_kept & (is_end | (merged / merged[is_kept].sum() >= 1 / (count + 1))))


def merge_prefixes(probabilities: np.ndarray, texts: Sequence[bytes]) -> np.ndarray:
    """Merge probabilities: if the text of a token is a prefix of another's, the likelier token gets the sum.

    probabilities: ranked, float64 [n]. texts: texts of the tokens.
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


# ---- the steps of the chain

Apply = Callable[[Candidates, CompleteOptions, SamplerState], Candidates]


class SamplerStep(NamedTuple):
    """A sampling step.

    Attributes:
        apply: its function.  is_on: returns whether options turn it on.
        keeps_best: whether it always keeps the most likely token.
    """

    apply: Apply
    is_on: Callable[[CompleteOptions], bool]
    keeps_best: bool = False


def apply_adaptive_p(candidates: Candidates, options: CompleteOptions, state: SamplerState) -> Candidates:
    """Apply adaptive_p, and let the state update from the token that is drawn."""
    state.watched = candidates
    return adaptive_p(candidates, min(max(2 * options.adaptive_target - state.mean, 0.0), 1.0))


def apply_infill(candidates: Candidates, options: CompleteOptions, state: SamplerState) -> Candidates:
    """Apply infill; it may choose the EOS token unless the options or a constraint forbid that."""
    assert state.tokenizer
    ends, bytes_of = state.tokenizer.end_ids, state.tokenizer.token_bytes
    eos: int | None = state.tokenizer.eos_id if state.tokenizer.eos_id in ends else min(ends, default=None)
    if eos is not None:
        is_barred = options.ignore_eos or options.logit_bias.get(eos) == -np.inf
        if is_barred or (state.allowed is not None and not state.allowed[eos]):
            eos = None
    return infill(candidates, lambda token: bytes_of(token, special=False), ends, eos)


def mirostat(candidates: Candidates, options: CompleteOptions, state: SamplerState) -> Candidates:
    """Apply mirostat 1 or 2, and let the state update from the token that is drawn."""
    is_first = options.mirostat == 1
    left = mirostat_1(candidates, state.mu, state.vocab) if is_first else mirostat_2(candidates, state.mu)
    state.watched = left
    return left


# Parameters: c, o and s are the candidates, the options and the state.
STEPS: dict[str, SamplerStep] = {
    "penalties": SamplerStep(
        lambda c, o, s: penalties(
            c, s.history.get_last(o.repeat_last_n), o.repeat_penalty, o.presence_penalty, o.frequency_penalty
        ),
        lambda o: o.repeat_last_n != 0 and (o.repeat_penalty, o.presence_penalty, o.frequency_penalty) != (1, 0, 0),
    ),
    "dry": SamplerStep(
        lambda c, o, s: dry(
            c, s.history.get_last(o.dry_penalty_last_n), s.breakers, o.dry_multiplier, o.dry_base, o.dry_allowed_length
        ),
        lambda o: o.dry_multiplier > 0 and o.dry_penalty_last_n != 0,
    ),
    "top_n_sigma": SamplerStep(
        lambda c, o, s: top_n_sigma(c, o.top_n_sigma), lambda o: o.top_n_sigma > 0, keeps_best=True
    ),
    "top_k": SamplerStep(lambda c, o, s: top_k(c, o.top_k), lambda o: o.top_k > 0, keeps_best=True),
    "typical": SamplerStep(lambda c, o, s: typical(c, o.typical), lambda o: o.typical < 1),
    "top_p": SamplerStep(lambda c, o, s: top_p(c, o.top_p), lambda o: o.top_p < 1, keeps_best=True),
    "min_p": SamplerStep(lambda c, o, s: min_p(c, o.min_p), lambda o: o.min_p > 0, keeps_best=True),
    "xtc": SamplerStep(
        lambda c, o, s: xtc(c, o.xtc_probability, o.xtc_threshold, float(hash_uniform(XTC_CHANCE, s.key)[0])),
        lambda o: o.xtc_probability > 0 and o.xtc_threshold <= 0.5,
    ),
    "temperature": SamplerStep(
        lambda c, o, s: (
            temperature(c, o.temperature)
            if o.dynatemp_range == 0 or o.mirostat
            else dynamic_temperature(c, o.temperature, o.dynatemp_range, o.dynatemp_exponent)
        ),
        lambda o: o.temperature != 1 or o.dynatemp_range > 0,
    ),
    "adaptive_p": SamplerStep(apply_adaptive_p, lambda o: o.adaptive_target >= 0, keeps_best=True),
    "infill": SamplerStep(apply_infill, lambda o: True),
    "mirostat": SamplerStep(mirostat, lambda o: o.mirostat > 0, keeps_best=True),
    "likeliest": SamplerStep(lambda c, o, s: keep_likeliest(c), lambda o: True),
}
