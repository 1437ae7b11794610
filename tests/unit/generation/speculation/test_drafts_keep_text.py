"""Test that drafts never change a text: all model types, greedy and with 20 seeds, alone and in a batch."""

import itertools

import numpy as np
import pytest
from models import write_model
from step_costs import Free

from localllm import api
from localllm.generation.model_methods import gather_options
from localllm.generation.speculation import acceptance as speculation
from localllm.generation.speculation import speculator as leaps
from localllm.generation.speculation.acceptance import MAX_DRAFT_TOKENS

KINDS = {"dense": "llama", "experts": "qwen3moe", "latent": "deepseek2_v3", "recurrent": "mamba2", "both": "qwen35moe"}
DRAWN = [{"temperature": 0}, *({"temperature": 1.0, "seed": seed} for seed in range(20))]
LENGTH = 40
BIAS = {token: 12.0 for token in range(40, 46)}  # few tokens come, so that they come again


@pytest.fixture(autouse=True)
def _free(monkeypatch):
    monkeypatch.setattr(speculation, "StepCostModel", Free)
    monkeypatch.setattr(leaps, "StepCostModel", Free)


@pytest.fixture(params=[*KINDS.values()], ids=[*KINDS])
def model(request, tmp_path):
    with api.open_model(write_model(request.param, tmp_path / "model.gguf"), 2, 256, cache=False) as opened:
        yield opened


def prompt(seed: int) -> list[int]:
    """Return tokens most of which repeat."""
    some = np.random.default_rng(seed).integers(40, 46, 12).tolist()
    return [*some, 7, *some]


def test_drafts_do_not_change_a_single_answer(model):
    guessed = right = 0
    for seed, drawn in enumerate(DRAWN):
        answers = [
            model.generate(prompt(seed), LENGTH, speculate=how, logit_bias=BIAS, **drawn) for how in ("off", "ngram")
        ]
        texts = ["".join(answer) for answer in answers]
        assert answers[0].tokens == answers[1].tokens and texts[0] == texts[1], drawn
        assert answers[0].finish_reason == answers[1].finish_reason
        guessed, right = guessed + answers[1].drafted, right + answers[1].accepted
    assert right > 2 * len(DRAWN) and guessed > right, (
        "some guesses are right and some are wrong, or this shows nothing"
    )


@pytest.mark.sampled
@pytest.mark.slow
def test_drafts_do_not_change_answers_of_a_batch(model):
    """Draft for two answers at once."""
    longest = 0
    run = model.engine.run

    def watched(asked, logits, precise, kernel_tokens):
        nonlocal longest
        longest = max(longest, *(len(ids) for _, ids in asked)) if logits == "all" else longest
        return run(asked, logits, precise, kernel_tokens)

    model.engine.run = watched
    results = []
    for how in ("off", "auto"):
        asked = [
            model.session.request(prompt(seed), gather_options(LENGTH, (), drawn | {"logit_bias": BIAS}, how), key=seed)
            for seed, drawn in enumerate(DRAWN)
        ]
        batch = model.batch(iter(asked), parallel=2)
        finished = sorted(itertools.chain.from_iterable(batch), key=lambda request: request.key)
        batch.close()
        results.append([(request.answers[0].tokens, request.answers[0].finish_reason) for request in finished])
        assert (longest > 1) == (how == "auto")
    assert results[0] == results[1] and len(results[0]) == len(DRAWN)
    assert longest <= MAX_DRAFT_TOKENS + 1


@pytest.mark.parametrize("kind", ["dense", "recurrent"])
def test_drafts_do_not_change_a_constrained_answer(kind, tmp_path):
    """Draft forced tokens, too."""
    pattern = "(abc|abd|b){3,9}"
    with api.open_model(write_model(KINDS[kind], tmp_path / "model.gguf"), 2, 256, cache=False) as model:
        right = 0
        for drawn in DRAWN:
            answers = [
                model.generate(prompt(1), LENGTH, speculate=how, regex=pattern, **drawn) for how in ("off", "ngram")
            ]
            texts = ["".join(answer) for answer in answers]
            assert answers[0].tokens == answers[1].tokens and texts[0] == texts[1], drawn
            right += answers[1].accepted
        assert right > len(DRAWN)
