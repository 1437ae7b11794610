"""Runs: one call of a backend that computes some tokens of one or more sequences (a batch).

A prompt is divided into runs at positions that depend on the model only. Two prompts with a common prefix are therefore
computed identically, to the bit, up to the last end of a run within the prefix, so that one can reuse the other's
state.

Kernels for a few tokens add in another order than kernels for many, so results differ in the last bits. They are not
selected by how many tokens a run has but by `kernel_tokens`: the number of tokens in the run that would read a prompt
alone, or 1 for tokens of an answer. A token therefore gets the same bits in every run: alone, in what is left of its
run after a cached prefix, and together with other sequences.
"""

from bisect import bisect_left
from typing import NamedTuple

from localllm.kernels.cpu import FEW_TOKENS
from localllm.kernels.cpu import PRECISE_TOKENS as PRECISE_TOKENS

BATCH = 512  # most tokens of a run
FIRST, LATER = 512, 256  # tokens of a run
# Tokens at either end of a prompt that keep activations of 16 bits even in a long run: all others attend to the
# first ones, and the answer begins after the last. The error of the logits after 135 to 700 tokens of SmolLM2 is then
# 0.30 times as large (Q4_1, 14 prompts; 0.36 with the end alone, 0.21 with 16 tokens at the beginning).
EXACT = 8
# From this position on runs are shorter, so that less is read again: attention dominates there, and is as fast. In
# runs of 256 from position 0 on, SmolLM2 would read 1536 tokens 7 to 20 % slower than in runs of 512; mixtures of
# experts, which share the tokens of a run, are 11 % slower even here.
DEEP = 2048
LONG = 512  # tokens from which on a prompt is worth caching on disk: about a second of prefill


class Runs(NamedTuple):
    """The division of prompts into runs: `first` tokens per run up to position DEEP, then `later`; exact: see EXACT.

    kernel_limits: see localllm.engine.backend.Backend; empty if tokens are not computed as if they were alone.
    is_measuring: whether all activations keep 16 bits, by the same kernels for prompts of any length.
    """

    later: int = LATER
    first: int = FIRST
    exact: int = 0
    kernel_limits: tuple[int, ...] = ()
    is_measuring: bool = False

    def kernel_class(self, kernel_tokens: int) -> int:
        """Return a number that is equal for kernel_tokens whose matrix products can share a run."""
        return bisect_left(self.kernel_limits, kernel_tokens)

    def compute_alike(self, some: int, others: int) -> bool:
        """Return whether two numbers of kernel_tokens select the same kernels, of attention, too."""
        are_few = [tokens <= FEW_TOKENS for tokens in (some, others)]
        is_same = are_few[0] == are_few[1] and self.kernel_class(some) == self.kernel_class(others)
        return is_same or not self.kernel_limits

    def last_end(self, length: int) -> int:
        run = self.first if length < DEEP else self.later
        return length // run * run

    def next_end(self, position: int) -> int:
        return self.last_end(position) + (self.first if position < DEEP else self.later)

    def exact_tokens(self, count: int) -> int:
        """Return how many tokens at each end of a prompt get a run of their own; count: tokens of the whole run."""
        return self.exact if count > PRECISE_TOKENS else 0


WHOLE = Runs(1 << 40, 1 << 40)  # for encoder models, which read a text in one run
