"""Test that a token's logits keep every bit however its run is divided, and with anything else in the run."""

from contextlib import closing

import numpy as np
import pytest
from engines import open_engine
from models import DECLARATIONS, QUANTIZED

import localllm
from localllm.engine.engine import Engine
from localllm.kernels.machine import get_lane

# One token adds up in two sums for each row there, several in one (kernels/cpu/matmul/gemv_int16.py).
pytestmark = pytest.mark.skipif(get_lane().has_avx2_only, reason="with AVX2 only, one token is added in another order")


def read(engine: Engine, ids: np.ndarray, sizes: list[int], kernel_tokens: int) -> np.ndarray:
    """Return the logits of all tokens, float32 [tokens, vocab], computed in runs of these sizes."""
    ends = np.cumsum(sizes)
    with closing(engine.sequence()) as sequence:
        return np.concatenate([sequence.append(some, "all", True, kernel_tokens) for some in np.split(ids, ends[:-1])])


def random_ids(engine: Engine, count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(3, engine.vocab_size, count)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", [*DECLARATIONS, *QUANTIZED])
def test_dividing_a_run_changes_no_bit(model_path, name):
    """Divide decode into single tokens, and a prompt of 40, part of which may be cached."""
    with closing(open_engine(model_path(name), context=128, kv_type="q8_0")) as engine:
        if engine.hyperparameters.start_token is not None:
            pytest.skip("an encoder reads its text whole")
        ids = random_ids(engine, 40)
        for kernel_tokens, divisions in ((1, ([1] * 40, [7, 33])), (40, ([9, 31], [39, 1]))):
            whole = read(engine, ids, [40], kernel_tokens)
            for sizes in divisions:
                np.testing.assert_array_equal(read(engine, ids, sizes, kernel_tokens), whole)


@pytest.mark.parametrize("name", ["llama-Q4_0", "llama-Q4_K_M", "llama_moe-Q4_0", "gemma2-F16", "llama-F16"])
def test_running_sequences_together_changes_no_bit(model_path, name):
    with closing(open_engine(model_path(name), context=512, kv_type="q8_0")) as engine:
        prompts = np.split(random_ids(engine, 300), [20, 70, 72, 130])
        alone = []
        for prompt in prompts:
            with closing(engine.sequence()) as sequence:
                alone.append(sequence.append(prompt, "last", True, 70)[0])
        sequences = [engine.sequence() for _ in prompts]
        together = engine.run([*zip(sequences, prompts, strict=True)], "last", True, [70] * len(prompts))
        np.testing.assert_array_equal(np.concatenate(together), alone)
        answers = engine.run([(sequence, [7]) for sequence in sequences], "last", True, [1] * len(prompts))
        for sequence, prompt, answer in zip(sequences, prompts, answers, strict=True):
            sequence.truncate(len(prompt))
            np.testing.assert_array_equal(sequence.append([7], "last", True, 1), answer)
            sequence.close()


def test_tiles_of_long_runs_change_no_bit_wherever_they_begin(model_path):
    """Check that tokens of a tile in 8 bits do not change each other."""
    with closing(open_engine(model_path("llama-Q4_K_M"), context=512)) as engine:
        ids = random_ids(engine, 400)
        whole = read(engine, ids, [400], 400)
        for sizes in ([64, 336], [193, 7, 200], [399, 1]):
            np.testing.assert_array_equal(read(engine, ids, sizes, 400), whole)


SENTENCE = "Each model is a file of weights, and each prompt is read by it in runs. "


@pytest.mark.parametrize("prompts", [
    ["Once upon a time"] * 5, [SENTENCE * 2 + str(number) for number in range(6)],
    [SENTENCE * count for count in (1, 2, 3, 5, 9)], [SENTENCE * 14] * 3,
], ids=["short and equal", "with a common beginning", "of many lengths", "long and equal"])  # fmt: skip
def test_prompts_of_a_batch_get_the_answers_that_each_gets_alone(prompts):
    with localllm.open(localllm.builtin_model(), threads=2, cache=False) as model:
        together = [
            [each.chosen for each in answer.logprobs]
            for answer in model.map(prompts, max_tokens=6, seed=7, logprobs=True)
        ]
    for prompt, expected in zip(prompts, together, strict=True):
        with localllm.open(localllm.builtin_model(), threads=1, cache=False) as model:
            answer = model.generate(prompt, 6, seed=7, logprobs=True)
            "".join(answer)
            assert [each.chosen for each in answer.logprobs] == expected
