"""Find the sequence whose cached prefix saves the most of a prompt, without changing a bit of the answer.

A cached prefix can be reused up to the end of a whole run (localllm.engine.run) or an image, because the rest of the
prompt is then read in the same runs as without the cache. A conversation can also continue at the end of each of its
turns. Prompts of up to PRECISE_TOKENS tokens are read with 16-bit activations, so prefixes of any length can be reused
between them if they select the same kernels (localllm.engine.run). In a batch, a prefix can be reused as long as both
prompts are read with the same arithmetic (localllm.generation.chunked_prefill).
"""

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, NamedTuple

from localllm.engine.image_tokens import last_end
from localllm.engine.run import PRECISE_TOKENS, Runs
from localllm.generation.chunked_prefill import PrefillSegments, reusable_prefix

if TYPE_CHECKING:
    from localllm.engine.memory.sequence_state import StoredPrefix
    from localllm.engine.sequence import Sequence
    from localllm.generation.context_overflow import ShiftedSequence

    Source = Sequence | ShiftedSequence | StoredPrefix


class TurnBoundary(NamedTuple):
    """The lengths of a sequence, in tokens, after a turn's prompt and after its answer (None: not ended yet)."""

    prompt: int
    end: int | None = None


class ReuseCandidate(NamedTuple):
    """A sequence or file whose prefix a prompt may reuse.

    Attributes:
        source: the sequence or file, None if only the length matters.  tokens: the cached tokens.  turns: the ends of
        the conversation's turns.
        aligned: number of first tokens that were read in whole runs and images; None if any prefix can be reused.
        has_logits: whether the logits after the last token are known: the same prompt needs no prefill.
        segments: segments of the prompt at the beginning of the tokens, if it was prefilled in a batch.
    """

    source: "Source | None"
    tokens: Ids[int]
    turns: Ids[TurnBoundary] = ()
    aligned: int | None = None
    has_logits: bool = False
    segments: PrefillSegments | None = None


class PrefixMatch(NamedTuple):
    """The length of the prefix that a source shares with a prompt.

    Attributes:
        is_run: whether it ends where a whole run or an image ends, so that the rest is read as without a cache.
    """

    source: "Source | None"
    length: int
    is_run: bool = False


NOTHING = PrefixMatch(None, 0)


def longest_match(
    candidates: Iterable[ReuseCandidate], ids: Ids[int], runs: Runs, segments: PrefillSegments | None = None
) -> PrefixMatch:
    """Return the longest reusable prefix, the first of equal ones; NOTHING if there is none.

    segments: segments of the prompt, if it is prefilled in a batch.
    """
    matches = (match(candidate, ids, runs, segments) for candidate in candidates)
    best = max(matches, key=lambda match_here: match_here.length, default=NOTHING)
    return best if best.length else NOTHING


def match(candidate: ReuseCandidate, ids: Ids[int], runs: Runs, segments: PrefillSegments | None = None) -> PrefixMatch:
    """Return how much of a candidate's prefix a prompt can reuse; the length may be 0."""
    source, tokens, turns, aligned, has_logits, read_in = candidate
    common_length = common(tokens, ids)
    if read_in and segments:
        return PrefixMatch(source, reusable_prefix(common_length, segments, read_in) if common_length else 0)
    if has_logits and len(tokens) == len(ids) == common_length + 1 and tokens[-1] == ids[-1]:
        return PrefixMatch(source, len(ids))
    if aligned is None:
        return PrefixMatch(source, common_length)
    ended = max(
        (common_length if end is None else min(end, common_length) for prompt, end in turns if prompt <= common_length),
        default=0,
    )
    length = max(ended, last_end(ids, min(common_length, aligned), runs))
    left = next((turn.prompt for turn in turns if turn.prompt > common_length), 0)  # the prompt that differs
    if left and max(len(ids), left) <= PRECISE_TOKENS and runs.compute_alike(len(ids), left):
        length = common_length
    is_run = length < common_length and length == last_end(ids, min(length, aligned), runs)
    return PrefixMatch(source, length, is_run)


def common(tokens: Ids[int], ids: Ids[int]) -> int:
    """Return the length of the common prefix, at most len(ids) - 1."""
    count = 0
    for ours, cached in zip(tokens, ids[:-1], strict=False):
        if ours != cached:
            break
        count += 1
    return count
