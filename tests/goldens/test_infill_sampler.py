"""The sampler for filling in against llama.cpp's, by what scripts/record/record_llama_infill.py has recorded of it."""

import json

import numpy as np
import pytest
from project import ROOT

from localllm.generation.sampling.candidates import Candidates
from localllm.generation.sampling.steps import infill

RECORDED = json.loads((ROOT / "tests/goldens/llama_infill.json").read_text())
IDS = np.array([token for token, _, _ in RECORDED["tokens"]])
IS_END = [is_end for _, _, is_end in RECORDED["tokens"]]
TEXTS = {token: text.encode() for token, text, _ in RECORDED["tokens"]}


@pytest.mark.parametrize("scale", [0.2, 2.0, 4.0])
def test_tokens_left_are_those_that_llama_cpp_leaves(scale: float):
    order, cases = np.argsort(IDS), [case for case in RECORDED["cases"] if case["scale"] == scale]
    assert len(cases) == 36
    for case in cases:
        logits = (np.random.RandomState(case["seed"]).standard_normal(len(IDS)) * scale).astype(np.float32)
        logits[IS_END] += np.float32(case["more"])
        left = infill(Candidates(IDS[order], logits[order]), TEXTS.__getitem__, {RECORDED["end"]}, RECORDED["end"])
        assert sorted(left.ids.tolist()) == case["left"], case


def test_an_end_comes_in_only_where_it_was_cut_off():
    """Keep the most likely of tokens that are all unlikely."""
    ids, logits = np.arange(10), np.linspace(1, 1.1, 10).astype(np.float32)
    texts = [bytes([97 + token]) for token in range(10)]
    assert infill(Candidates(ids, logits), texts.__getitem__, {77}, None).ids.tolist() == [9]
    assert infill(Candidates(ids, logits), texts.__getitem__, {77}, 77).ids.tolist() == [77]
