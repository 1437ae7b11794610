"""Divide prompts into runs whose ends depend on the model and the position only.

Two prompts with the same beginning are therefore computed identically, to the bit, up to the last end of a run within
it, and the state of one can be reused for the other.
"""

from typing import NamedTuple

from localllm.engine.run import PRECISE_TOKENS

FIRST, LATER = 512, 256  # tokens of a run
# Tokens at the beginning and at the end of a prompt that keep 16 bits though they are of a longer run: all others
# attend to the first ones, and the answer begins with the last. The logits after 135 to 700 tokens of SmolLM2 are then
# 0.30 times as far from the exact ones (Q4_1, 14 prompts; 0.36 with the end alone, 0.21 with 16 at the beginning).
EXACT = 8
# From here on runs are short, so that less is read again: attention dominates by then, and is as fast. In runs of 256
# from the beginning on, SmolLM2 would read 1536 tokens 7 to 20 % slower than in runs of 512; where experts share the
# tokens of a run, 11 % slower even here.
DEEP = 2048
LONG = 512  # tokens of a prompt from which on it is worth caching: a second's work


class Runs(NamedTuple):
    """The runs of one model; later: tokens of a run from DEEP on; first: before; exact: see EXACT."""

    later: int = LATER
    first: int = FIRST
    exact: int = 0

    def last_end(self, length: int) -> int:
        """Return where the last whole run ends within `length` tokens."""
        run = self.first if length < DEEP else self.later
        return length // run * run

    def next_end(self, position: int) -> int:
        """Return where the run with the token at this position ends."""
        return self.last_end(position) + (self.first if position < DEEP else self.later)

    def exact_tokens(self, count: int) -> int:
        """Return how many tokens at an end of a prompt get a run of their own within a run of `count`."""
        return self.exact if count > PRECISE_TOKENS else 0


WHOLE = Runs(1 << 40, 1 << 40)  # of an encoder, which reads a text at once
