"""Measure the microseconds that it takes to choose a token of 128256, by options.

    python scripts/measure sampling [NAME...]

Each figure is the least of 5 rounds of 200 tokens, of logits that are normally distributed, after a text of 8192
tokens. Leave the machine idle. Options that the program does not know (of an earlier version) are left out.
"""

import sys
import time

import numpy as np

from localllm.errors import UsageError
from localllm.generation.sampling.sampler import Sampler, SamplingOptions

VOCAB, TEXT, TOKENS, ROUNDS = 128256, 8192, 200, 5
CASES = {
    "greedy": {"temperature": 0},
    "defaults": {},
    "greedy, repeat_penalty": {"temperature": 0, "repeat_penalty": 1.1},
    "repeat_penalty": {"repeat_penalty": 1.1},
    "repeat_penalty of all": {"repeat_penalty": 1.1, "repeat_last_n": -1},
    "dry of 64": {"dry_multiplier": 0.8, "dry_sequence_breakers": ()},
    "dry of all": {"dry_multiplier": 0.8, "dry_sequence_breakers": (), "dry_penalty_last_n": -1},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "typical": {"typical": 0.9},
    "xtc": {"xtc_probability": 0.5},
    "dynamic temperature": {"dynatemp_range": 0.5},
    "adaptive_p": {"adaptive_target": 0.5},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "temperature only": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
}


def measured(options: SamplingOptions) -> float:
    """Microseconds for a token."""
    random = np.random.RandomState(1)
    rows = [random.standard_normal(VOCAB).astype(np.float32) * 3 for _ in range(10)]
    text, best = random.randint(0, 2000, TEXT).tolist(), float("inf")
    for _ in range(ROUNDS):
        sampler = Sampler(options, VOCAB)
        for token in text:
            sampler.accept(token)
        started = time.thread_time()
        for number in range(TOKENS):
            sampler.accept(sampler.sample(rows[number % 10]))
        best = min(best, time.thread_time() - started)
    return best / TOKENS * 1e6


def main() -> None:
    for name in sys.argv[1:] or CASES:
        try:
            print(f"{name:24}{measured(SamplingOptions(**CASES[name], seed=1)):8.0f}", flush=True)
        except (TypeError, UsageError) as error:
            print(f"{name:24}  {error}")
