"""Find the sequence whose cached prefix saves the most of a prompt.

A conversation can continue at the end of any of its turns, other prompts only at the end of a whole run
(localllm.engine.run) or an image: so they are read in the same runs as by a model that has read nothing before, and
the answer is the same to the bit. After prompts of up to PRECISE_TOKENS, which are read in 16 bits in any pieces, such
ones continue anywhere. Beside others a prompt is read in pieces that come to the same bits: what has read one continues
for another as far as the arithmetic is the same (localllm.generation.chunked_prefill).
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
    """The lengths of a sequence when a prompt was read and when its answer had ended (None: not yet), in tokens."""

    prompt: int
    end: int | None = None


class ReuseCandidate(NamedTuple):
    """A sequence or file whose prefix a prompt may reuse.

    Attributes:
        source: the sequence or file, None if only the length matters.  tokens: the cached tokens.  turns: the ends of
        the conversation's turns.
        aligned: how many of the tokens were read in whole runs and images; None if it can continue anywhere.
        has_logits: whether the logits after all tokens are known: the same prompt needs no prefill at all.
        segments: of the prompt that the tokens begin with, if it was prefilled in a batch.
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
        is_run: whether what follows is to be read as by a new sequence, to the bit: the end of a whole run or an image.
    """

    source: "Source | None"
    length: int
    is_run: bool = False


NOTHING = PrefixMatch(None, 0)


def longest_match(
    candidates: Iterable[ReuseCandidate], ids: Ids[int], runs: Runs, segments: PrefillSegments | None = None
) -> PrefixMatch:
    """Return the candidate with the longest usable prefix, the first of equal ones; without a source if none is usable.

    segments: of the prompt, if it is prefilled in a batch.
    """
    found = (match(candidate, ids, runs, segments) for candidate in candidates)
    best = max(found, key=lambda one: one.length, default=NOTHING)
    return best if best.length else NOTHING


def match(candidate: ReuseCandidate, ids: Ids[int], runs: Runs, segments: PrefillSegments | None = None) -> PrefixMatch:
    """Return how much of a candidate's prefix a prompt can use, perhaps nothing."""
    source, tokens, turns, aligned, has_logits, read_in = candidate
    same = common(tokens, ids)
    if read_in and segments:
        return PrefixMatch(source, reusable_prefix(same, segments, read_in) if same else 0)
    if has_logits and len(tokens) == len(ids) == same + 1 and tokens[-1] == ids[-1]:
        return PrefixMatch(source, len(ids))
    if aligned is None or (turns and max(len(ids), turns[-1].prompt) <= PRECISE_TOKENS):
        return PrefixMatch(source, same)
    ended = max((same if end is None else min(end, same) for prompt, end in turns if prompt <= same), default=0)
    length = max(ended, last_end(ids, min(same, aligned), runs))
    is_run = length < same and length == last_end(ids, min(length, aligned), runs)
    return PrefixMatch(source, length, is_run)


def common(tokens: Ids[int], ids: Ids[int]) -> int:
    """Return the length of the common prefix, without the last of `ids`."""
    same = 0
    for ours, theirs in zip(tokens, ids[:-1], strict=False):
        if ours != theirs:
            break
        same += 1
    return same
