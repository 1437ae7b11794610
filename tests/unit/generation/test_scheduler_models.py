"""Test continuous batching with real engines: answers as alone, except for ties within rounding."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localllm import api, builtin_model
from localllm.errors import ContextError, MemoryLimitError
from localllm.generation.chunked_prefill import prefill_prompt
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.sampler import SamplingOptions
from localllm.generation.scheduler import Scheduler
from localllm.kernels.table import PAGE

GREEDY = GenerationOptions(24, sampling=SamplingOptions(temperature=0))
TIE = 0.05  # logits of SmolLM2 in 16 bits are up to 0.01 others in a run of several sequences, in 8 bits 0.8


@pytest.fixture(scope="module")
def guide():
    with api.open_model(builtin_model()) as model:
        yield model


def shortfalls(model: api.Model, prompt: list[int], tokens: list[int]) -> list[float]:
    """Return by how much each token's logit is below the largest, prefilling token by token."""
    sequence = model.sequence()
    row = prefill_prompt(sequence, prompt, None)[-1]
    gaps = []
    for token in tokens:
        gaps.append(float(row.max() - row[token]))
        row = sequence.append([token])[-1]
    sequence.close()
    return gaps


def texts(count: int) -> list[str]:
    return [f"Story {number}: " + "the cat and the dog " * (7 * number) + "went" for number in range(count)]


@pytest.mark.slow
def test_a_real_model_answers_in_a_batch_as_alone(shared: Path):
    with api.open_model(shared / "models" / "smollm2-135m-instruct-q4_1.gguf", context=1024) as model:
        prompts = [model.tokenize(text) for text in texts(6)]
        assert len(prompts[0]) < 20 and len(prompts[-1]) > 150
        for prompt, answer in zip(prompts, model.map(prompts, 16, parallel=4, temperature=0), strict=True):
            assert max(shortfalls(model, prompt, answer.tokens)) < TIE


@pytest.mark.sampled
@pytest.mark.slow
def test_preempted_answers_are_prefilled_again():
    """Fill 120 of the cache's 129 pages first."""
    with api.open_model(builtin_model(), context=512) as model:
        taken = [model.sequence() for _ in range(15)]
        for sequence in taken:
            sequence.append([5] * 510, "none")
        model.tokenizer.end_ids = frozenset()
        options = GenerationOptions(250, sampling=SamplingOptions(temperature=0))
        requests = [model.session.request([50 + number] * 70, options) for number in range(4)]
        large = model.session.request([9] * 450, GenerationOptions(100))
        with closing(Scheduler(model.engine, model.tokenizer, [*requests, large], places=127 * PAGE)) as batch:
            assert sum(map(len, batch)) == 5
        assert batch.preempted > 0
        assert isinstance(large.error, MemoryLimitError)
        for request in requests:
            assert max(shortfalls(model, request.prompt, request.answers[0].tokens)) < TIE
        assert model.engine.get_cache_usage()[0] == 120 * PAGE, "all others have gone back"


def test_the_reference_backend_has_no_memory_limit():
    with api.open_model(builtin_model(), context=64, backend="reference") as model:
        [answer] = model.map(["What"], 2, temperature=0)
        assert answer.tokens == list(alone(model, "What", 2))


def alone(model: api.Model, prompt: str | list[int], count: int) -> list[int]:
    generation = model.generate(prompt, count, temperature=0)
    assert "".join(generation) == generation.text
    return generation.tokens


def test_map_keeps_the_order_and_raises_at_the_failing_prompt(guide: api.Model):
    long = [5] * (guide.context + 1)
    answers = guide.map(["One two", [5, 6, 7], [{"role": "user", "content": "Hi"}], long], 3, temperature=0)
    assert [next(answers).text, next(answers).tokens] == [
        "".join(guide.generate("One two", 3, temperature=0)),
        alone(guide, [5, 6, 7], 3),
    ]
    assert next(answers).text == "".join(guide.chat([{"role": "user", "content": "Hi"}], 3, temperature=0))
    with pytest.raises(ContextError):
        next(answers)


def test_n_answers_of_a_request_equal_candidates(guide: api.Model):
    options = GenerationOptions(8, sampling=SamplingOptions(temperature=1.2, seed=4))
    request = guide.session.request([{"role": "user", "content": "Hi"}], options, 3)
    with closing(guide.batch([request])) as batch:
        list(batch)
    expected = guide.candidates([{"role": "user", "content": "Hi"}], 3, max_tokens=8, temperature=1.2, seed=4)
    assert [answer.text for answer in request.answers] == [answer.text for answer in expected]
    np.testing.assert_allclose([a.logprob for a in request.answers], [a.logprob for a in expected], atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "llama4",
        "mamba2",
        "qwen35",
        "lfm2",
        "deepseek2_lite",
        "qwen3moe",
        "glm_dsa_shared",
        "deepseek4",
        "qwen4exp_blocks",
    ],
)
def test_preempted_answers_continue_in_every_cache_type(model_path, name: str):
    """Run more sequences than there is room for, some with a common prefix."""
    random = np.random.default_rng(1)
    with api.open_model(model_path(name), context=512, kv_type="f32") as model:
        beginning = random.integers(0, 256, 150).tolist()
        prompts = [random.integers(0, 256, length).tolist() for length in (3, 40, 20, 130, 201)]
        prompts += [[*beginning, *prompt] for prompt in prompts[:3]]
        model.tokenizer.end_ids = frozenset()
        options = GenerationOptions(150, sampling=SamplingOptions(temperature=0))
        requests = [model.session.request(prompt, options) for prompt in prompts]
        with closing(Scheduler(model.engine, model.tokenizer, requests, 4, chunk=64, places=8 * PAGE)) as batch:
            assert sum(map(len, batch)) == len(requests)
        for request in requests:
            assert request.error is None
            assert len(request.answers[0].tokens) == 150
            assert max(shortfalls(model, request.prompt, request.answers[0].tokens)) < 0.001
        assert batch.preempted or model.engine.bytes_per_token == 0
