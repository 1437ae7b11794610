"""The runs in which a prompt is read: where they end depends on nothing but the model and the place in the prompt.

So of two prompts that begin alike, what they have in common is computed in the same way, to the bit, as far as the last
end of a run within it: what was read of the one can stand for what would be read of the other.
"""

from typing import NamedTuple

from localllm.engine.run import PRECISE_TOKENS

FIRST, LATER = 512, 256  # tokens of a run
# Tokens at the beginning and at the end of a prompt that keep 16 bits though they are of a longer run: all others look
# at the first ones, and the answer begins with the last. The logits behind 135 to 700 tokens of SmolLM2 are 0.30 times
# as far from the exact ones then (Q4_1, 14 prompts; 0.36 with the end alone, 0.21 with 16 at the beginning).
EXACT = 8
# From here on runs are short, so that less is read once more: reading is attention by then, and as fast. In runs of 256
# from the beginning on, SmolLM2 would read 1536 tokens 7 to 20 % slower than in runs of 512; where experts share the
# tokens of a run, 11 % slower even here.
DEEP = 2048
LONG = (
    512  # tokens of a prompt: of more, what was read is worth keeping (a second's work), and nothing is read otherwise
)


class Runs(NamedTuple):
    """Of one model; later: tokens of a run from DEEP on; first: before; exact: see EXACT."""

    later: int = LATER
    first: int = FIRST
    exact: int = 0

    def last_end(self, length: int) -> int:
        """Where the last whole run ends within so many tokens."""
        run = self.first if length < DEEP else self.later
        return length // run * run

    def next_end(self, position: int) -> int:
        """Where the run ends in which the token at this place is read."""
        return self.last_end(position) + (self.first if position < DEEP else self.later)

    def exact_tokens(self, count: int) -> int:
        """How many tokens at an end of a prompt are a run of their own, if they are of a run of so many."""
        return self.exact if count > PRECISE_TOKENS else 0


WHOLE = Runs(1 << 40, 1 << 40)  # of an encoder, which reads a text at once
