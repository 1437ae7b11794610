"""How prompts are read when several are: in which pieces, and with the arithmetic that each would meet alone.

A Generation reads a run of its prompt at a time (localllm.engine.runs). Up to PRECISE_TOKENS tokens keep activations in
16 bits, more of them in 8, so the size of the prompt's last run decides about its arithmetic. Read beside others, a
prompt should come to the same logits: so pieces of it are never read with another arithmetic. And in 8 bits keys are
quantized in blocks, so only pieces that begin with a page come to the very same bits, and only those with more than a
few tokens meet the same kernels.
"""

from typing import NamedTuple

from localllm.engine.run import BATCH, PRECISE_TOKENS
from localllm.engine.runs import Runs
from localllm.kernels.arguments import PAGE

# Operations between two steps: 0.55 s of two Zen 4 cores, which do 620e9 in a second. More at once is a little faster
# (weights are unpacked once for a run: 80 ms of a 1.2 B model), and others wait longer.
OPERATIONS = 3.4e11


class Stretch(NamedTuple):
    """Tokens with the same arithmetic."""

    end: int
    precise: bool  # activations in 16 bits


def most_between_steps(parameters: int) -> int:
    """How many tokens to read between two steps of a model of so many parameters.

    It is no matter of measured time, because the same input should meet the same runs, and give the same answers.
    """
    return max(PAGE, min(BATCH, int(OPERATIONS / (2 * parameters))))


def stretch(place: int, prompt: int, runs: Runs) -> Stretch:
    """The arithmetic of the token at this place behind or in a prompt of so many tokens, and where it may change."""
    if place >= prompt:
        return Stretch(place + PRECISE_TOKENS, True)
    start, end = runs.last_end(place), min(runs.next_end(place), prompt)
    return Stretch(end, end - start <= PRECISE_TOKENS)


def piece(place: int, end: int, precise: bool, room: int) -> int:
    """How many tokens of a stretch to read next in a run that has room for so many more; 0 if it is not worth it."""
    left = end - place
    if left <= room:
        return left
    if precise:
        return max(0, (place + room) // PAGE * PAGE - place)
    return max(0, min(room, left - PAGE)) // PAGE * PAGE


def shareable(same: int, prompt: int, other: int, runs: Runs) -> int:
    """How many of `same` equal first tokens a prompt can take over from another that has read them.

    prompt, other: how many tokens these have.
    """
    place = 0
    while place < same:
        ours, theirs = stretch(place, prompt, runs), stretch(place, other, runs)
        if ours.precise != theirs.precise:
            break
        place = min(ours.end, theirs.end)
    place = min(place, same)
    end, precise = stretch(place, prompt, runs)
    return place if precise else max(runs.last_end(place), min(place, end - PAGE) // PAGE * PAGE)
