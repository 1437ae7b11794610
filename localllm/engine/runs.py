"""Divide prompts into runs: calls of a backend that compute tokens of one or more sequences (a batch).

A prompt is divided into runs at positions that depend on the model only. Two prompts with a common prefix are therefore
computed identically, to the bit, up to the last end of a run within the prefix, so that one can reuse the other's
state.

Kernels for few tokens add in another order than kernels for many, so results differ in the last bits. Kernels are
therefore not selected by the number of tokens in a run but by `kernel_tokens`: the number of tokens that the run would
have if it prefilled the prompt alone, or 1 for tokens of an answer. A token thus gets the same bits in every run:
alone, in the rest of its run after a cached prefix, and together with other sequences.
"""

from bisect import bisect_left
from typing import NamedTuple

from localllm.kernels.cpu import FEW_TOKENS
from localllm.kernels.cpu import PRECISE_TOKENS as PRECISE_TOKENS

BATCH = 512  # maximum number of tokens in a run
UNLIMITED = 1 << 40  # more tokens than any prompt has
FIRST_RUN, LATER_RUN = 512, 256  # tokens of a run before and from position DEEP on
# Tokens at either end of a prompt that keep activations of 16 bits even in a long run: all others attend to the
# first ones, and the answer begins after the last. The error of the logits after 135 to 700 tokens of SmolLM2 is then
# 0.30 times as large (Q4_1, 14 prompts; 0.36 with the end alone, 0.21 with 16 tokens at the beginning).
EXACT_TOKENS = 8
# From this position on runs are shorter, so that less is recomputed: attention dominates there, and is as fast. In
# runs of 256 from position 0 on, SmolLM2 would prefill 1536 tokens 7 to 20 % slower than in runs of 512; mixtures of
# experts, which share the tokens of a run, are 11 % slower even beyond this position.
DEEP_POSITION = 2048
MIN_CACHED_TOKENS = 512  # longer prompts are worth caching on disk: about a second of prefill


class RunPlan(NamedTuple):
    """The division of prompts into runs: `first` tokens per run up to DEEP_POSITION, then `later`.

    exact: see EXACT_TOKENS. kernel_limits: see localllm.engine.backend.Backend; empty if results may depend on the
    other tokens of a run. is_measuring: all activations keep 16 bits, by the same kernels for prompts of any length.
    """

    later: int = LATER_RUN
    first: int = FIRST_RUN
    exact: int = 0
    kernel_limits: tuple[int, ...] = ()
    is_measuring: bool = False

    def find_kernel_class(self, kernel_tokens: int) -> int:
        """Return the index of the kernel range; tokens of equal index can share a run's matrix products."""
        return bisect_left(self.kernel_limits, kernel_tokens)

    def uses_same_kernels(self, some: int, others: int) -> bool:
        """Return whether two values of kernel_tokens select the same kernels, including those of attention."""
        are_few = [tokens <= FEW_TOKENS for tokens in (some, others)]
        is_same = are_few[0] == are_few[1] and self.find_kernel_class(some) == self.find_kernel_class(others)
        return is_same or not self.kernel_limits

    def find_last_end(self, length: int) -> int:
        run = self.first if length < DEEP_POSITION else self.later
        return length // run * run

    def find_next_end(self, position: int) -> int:
        run = self.first if position < DEEP_POSITION else self.later
        return position // run * run + run

    def count_exact_tokens(self, count: int) -> int:
        """Return how many tokens at each end of a prompt get a separate run.

        count: tokens of the whole run.
        """
        return self.exact if count > PRECISE_TOKENS else 0


SINGLE_RUN = RunPlan(UNLIMITED, UNLIMITED)  # for encoder models, which process a text in one run
