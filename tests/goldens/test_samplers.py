"""Steps of sampling against llama.cpp's, as scripts/record/record_llama_samplers.py has recorded them.

llama.cpp computes in float32, we in float64: probabilities agree to 4 digits.
"""

import json

import numpy as np
import pytest
from project import ROOT

from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.sampling.sampler import Sampler

RECORDED = json.loads((ROOT / "tests/goldens/llama_samplers.json").read_text())
VOCAB = RECORDED["vocab"]


class Pieces:
    """Stand for a tokenizer with the recorded pieces."""

    end_ids = frozenset([2])

    @staticmethod
    def token_bytes(token: int, special: bool) -> bytes:
        return RECORDED["pieces"][token].encode("latin-1")


def logits(seed: int, minus_infinity: bool) -> np.ndarray:
    """Draw logits as the script does."""
    random = np.random.RandomState(seed)
    row = (random.standard_normal(VOCAB) * 3).astype(np.float32)
    if minus_infinity:
        row[random.rand(VOCAB) < 0.3] = -np.inf
    return row


def options_of(case: dict) -> SamplingOptions:
    options = dict(case["options"])
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    return SamplingOptions(**options, seed=1)


@pytest.mark.parametrize(
    "case",
    RECORDED["cases"],
    ids=lambda case: f"{case['options']} after {len(case['before'])} {case['minus_infinity']}",
)
def test_a_step_keeps_llama_cpps_tokens_and_probabilities(case: dict):
    sampler = Sampler(options_of(case), VOCAB, Pieces())
    sampler.read(case["before"])
    for seed, step in enumerate(case["steps"]):
        row = logits(seed, case["minus_infinity"])
        ids, probabilities = sampler.compute_distribution(row)
        ours = {token: p for token, p in zip(ids.tolist(), probabilities.tolist(), strict=True) if p}
        theirs = {token: p for token, p in zip(step["ids"] or range(VOCAB), step["probabilities"], strict=True) if p}
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)
        if step["drawn"] is not None:  # go on with the token that it drew
            sampler.sample(row)
            sampler._state.drawn = step["drawn"]
            sampler.accept(step["drawn"])
