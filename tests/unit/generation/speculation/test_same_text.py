"""What a model says does not depend on guesses: every kind of model, greedy and with 20 seeds, alone and in a batch."""

import itertools

import numpy as np
import pytest
from models import write_model
from step_costs import Free

from localllm import api
from localllm.generation.model_methods import gather_options
from localllm.generation.speculation import acceptance as speculation
from localllm.generation.speculation import speculator as leaps
from localllm.generation.speculation.acceptance import MOST

KINDS = {"dense": "llama", "experts": "qwen3moe", "latent": "deepseek2_v3", "recurrent": "mamba2", "both": "qwen35moe"}
DRAWN = [{"temperature": 0}, *({"temperature": 1.0, "seed": seed} for seed in range(20))]
LENGTH = 40
BIAS = {token: 12.0 for token in range(40, 46)}  # few tokens come, so that they come again


@pytest.fixture(autouse=True)
def _free(monkeypatch):
    monkeypatch.setattr(speculation, "StepCostModel", Free)
    monkeypatch.setattr(leaps, "StepCostModel", Free)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def model(request, tmp_path):
    with api.open_model(write_model(request.param, tmp_path / "model.gguf"), 2, 256, cache=False) as opened:
        yield opened


def prompt(seed: int) -> list[int]:
    """Tokens of which most come twice."""
    some = np.random.default_rng(seed).integers(40, 46, 12).tolist()
    return [*some, 7, *some]


def test_alone(model):
    guessed = right = 0
    for seed, drawn in enumerate(DRAWN):
        said = [
            model.generate(prompt(seed), LENGTH, speculate=how, logit_bias=BIAS, **drawn) for how in ("off", "ngram")
        ]
        texts = ["".join(answer) for answer in said]
        assert said[0].tokens == said[1].tokens and texts[0] == texts[1], drawn
        assert said[0].finish_reason == said[1].finish_reason
        guessed, right = guessed + said[1].drafted, right + said[1].accepted
    assert right > 2 * len(DRAWN) and guessed > right, (
        "some guesses are right and some are wrong, or this shows nothing"
    )


@pytest.mark.sampled
@pytest.mark.slow
def test_in_a_batch(model):
    """Two answers at once, which both have guesses."""
    longest = 0
    run = model.engine.run

    def watched(asked, logits, precise, kernel_tokens):
        nonlocal longest
        longest = max(longest, *(len(ids) for _, ids in asked)) if logits == "all" else longest
        return run(asked, logits, precise, kernel_tokens)

    model.engine.run = watched
    found = []
    for how in ("off", "auto"):
        asked = [
            model.session.request(prompt(seed), gather_options(LENGTH, (), drawn | {"logit_bias": BIAS}, how), key=seed)
            for seed, drawn in enumerate(DRAWN)
        ]
        batch = model.batch(iter(asked), parallel=2)
        finished = sorted(itertools.chain.from_iterable(batch), key=lambda request: request.key)
        batch.close()
        found.append([(request.answers[0].tokens, request.answers[0].finish_reason) for request in finished])
        assert (longest > 1) == (how == "auto")
    assert found[0] == found[1] and len(found[0]) == len(DRAWN)
    assert longest <= MOST + 1


@pytest.mark.parametrize("kind", ["dense", "recurrent"])
def test_within_a_constraint(kind, tmp_path):
    """Tokens that must come are guessed, too."""
    pattern = "(abc|abd|b){3,9}"
    with api.open_model(write_model(KINDS[kind], tmp_path / "model.gguf"), 2, 256, cache=False) as model:
        right = 0
        for drawn in DRAWN:
            said = [
                model.generate(prompt(1), LENGTH, speculate=how, regex=pattern, **drawn) for how in ("off", "ngram")
            ]
            texts = ["".join(answer) for answer in said]
            assert said[0].tokens == said[1].tokens and texts[0] == texts[1], drawn
            right += said[1].accepted
        assert right > len(DRAWN)
