"""Test diffusion models: logits as llama.cpp's, schedules, the order of unmasking, and the command."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engines import FAITHFUL, open_engine
from models import MASKED, model, write
from models.encoders import RowsGolden
from models.golden import kept, prompt
from models.vocabulary import vocabulary

from localllm.cli.options.diffusion import DiffusionFlags, run_diffusion
from localllm.cli.terminal.output import ProgressLine
from localllm.errors import ContextError, UnsupportedError, UsageError
from localllm.generation import diffusion as filling
from localllm.generation.diffusion import (
    CONFIDENCE,
    ENTROPY,
    MARGIN,
    ORIGIN,
    RANDOM,
    DiffusionModel,
    DiffusionOptions,
    compute_logits,
    compute_probabilities,
    count_positions_to_fill,
    denoise,
    make_diffusion_model,
    plan_steps,
    require_room,
    sample_tokens,
)
from tests.goldens.test_logits import nmse

MASK, VOCAB = 9, 10


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", MASKED)
def test_logits_equal_those_of_llama_cpp(model_path, name, backend):
    golden, tokens = RowsGolden.load(name), prompt(name, 272)
    assert model(name).digest() == golden.digest
    engine = open_engine(model_path(name), context=128, kv_type="f32", backend=backend)
    assert nmse(kept(engine.forward_full(tokens)), golden.rows) < (1e-11 if backend == "reference" else FAITHFUL)
    with pytest.raises(UnsupportedError, match="fill masked tokens"):
        engine.sequence()
    with pytest.raises(ContextError, match="512"):
        engine.forward_full([1] * 513)
    engine.close()


def certain(answer: list[int], surer: float = 0.0):
    """Return a model that knows each token, and is surer of later positions."""

    def read(tokens):
        rows = np.zeros((len(tokens), VOCAB), np.float32)
        rows[np.arange(len(tokens)), answer] = 3 + surer * np.arange(len(tokens))
        return rows

    return DiffusionModel(read, MASK, False)


def test_all_masks_are_filled_in_the_end():
    answer = [1, 2, 3, 4, 5, 6, 7, 8]
    for options in (DiffusionOptions(6, 4, 1e-3), DiffusionOptions(6, 6, block_length=2), DiffusionOptions(6, 20, 0.5)):
        states = list(denoise(certain(answer), answer[:2], options))
        assert len(states) == options.steps
        assert states[-1] == answer[2:]
        masks = [state.count(MASK) for state in states]
        assert masks == sorted(masks, reverse=True)


def test_blocks_are_filled_one_after_the_other():
    states = list(denoise(certain([0] * 10), [0, 0], DiffusionOptions(8, 4, block_length=4)))
    assert [[token == MASK for token in state] for state in states] == [
        [False] * done + [True] * (8 - done) for done in (2, 4, 6, 8)
    ]
    assert [count_positions_to_fill(DiffusionOptions(8, 6, block_length=4), step, 3, 4, 4) for step in range(3)] == [
        2,
        1,
        1,
    ]
    assert len(list(plan_steps(DiffusionOptions(8, 6, block_length=4)))) == 6


def test_the_surest_position_is_filled_first():
    first = next(denoise(certain([0] * 8, surer=0.5), [0, 0], DiffusionOptions(6, 6, block_length=6)))
    assert first == [MASK] * 5 + [0]


def test_logits_may_belong_to_the_next_position():
    answer = [1, 2, 3, 4, 5]
    shifted = certain([*answer[1:], 0])._replace(is_shifted=True)
    assert list(denoise(shifted, [1], DiffusionOptions(4, 2, 1e-3)))[-1] == answer[1:]


def test_guidance_moves_away_from_the_unconditional_logits():
    def read(tokens):
        rows = np.zeros((len(tokens), VOCAB), np.float32)
        rows[:, 3], rows[:, 4] = 1.0, 0.9 if tokens[0] != MASK else 0.0
        return rows

    plain, guided = (DiffusionOptions(1, 1, 1e-3, guidance=guidance) for guidance in (0.0, 2.0))
    assert next(denoise(DiffusionModel(read, MASK, False), [1], plain)) == [3]
    assert next(denoise(DiffusionModel(read, MASK, False), [1], guided)) == [4]


@pytest.mark.parametrize("algorithm", [ORIGIN, ENTROPY, MARGIN, RANDOM, CONFIDENCE])
def test_algorithms_repeat_with_their_seed(algorithm):
    options = DiffusionOptions(6, 6, 1e-3, algorithm=algorithm, temperature=1.0, algorithm_temperature=0.3, seed=4)
    flat = DiffusionModel(lambda tokens: np.zeros((len(tokens), VOCAB), np.float32), MASK, False)
    assert list(denoise(flat, [1], options)) == list(denoise(flat, [1], options))


def test_drawn_tokens_follow_their_probabilities():
    random, rows = np.random.default_rng(0), np.tile(np.log([0.5, 0.3, 0.15, 0.05]), (4000, 1))
    counts = Counter(sample_tokens(rows, DiffusionOptions(temperature=1.0), random)[0].tolist())
    assert abs(counts[0] / 4000 - 0.5) < 0.03
    assert abs(counts[2] / 4000 - 0.15) < 0.03
    np.testing.assert_allclose(
        compute_probabilities(rows[:1], DiffusionOptions(temperature=1.0, top_k=2))[0], [0.625, 0.375, 0, 0]
    )
    of_top_p = compute_probabilities(rows[:1], DiffusionOptions(temperature=1.0, top_p=0.6))[0]
    np.testing.assert_allclose(of_top_p, [0.625, 0.375, 0, 0])
    assert sample_tokens(rows[:1], DiffusionOptions(), random)[0].tolist() == [0]


def test_confidence_is_computed_by_each_algorithm():
    rows = np.log([[0.5, 0.4, 0.1], [0.6, 0.2, 0.2]])
    surest = {
        kind: sample_tokens(rows, DiffusionOptions(algorithm=kind), np.random.default_rng(0))[1]
        for kind in (CONFIDENCE, MARGIN, ENTROPY)
    }
    np.testing.assert_allclose(surest[CONFIDENCE], [0.5, 0.6])
    np.testing.assert_allclose(surest[MARGIN], [0.1, 0.4])
    entropy = np.log(rows.shape[1]) - 0  # of no knowledge at all
    assert (-entropy <= surest[ENTROPY]).all()
    assert (surest[ENTROPY] < 0).all()


def test_the_last_step_of_origin_fills_all_masks():
    """Fill in each step the share by which the remaining time shrinks, down to epsilon."""
    states = list(denoise(certain([0] * 101), [0], DiffusionOptions(100, 4, 0.5)))
    assert [state.count(MASK) for state in states] == [88, 76, 64, 0]


def test_steps_without_a_mask_to_fill_run_nothing():
    known, reads = certain([0] * 6), []
    counting = known._replace(read=lambda tokens: reads.append(tokens) or known.read(tokens))
    states = list(denoise(counting, [0, 0], DiffusionOptions(4, 8, block_length=2)))
    assert [state.count(MASK) for state in states] == [3, 2, 2, 2, 1, 0, 0, 0]
    assert len(reads) == 4


def test_guidance_and_shifted_logits_are_computed_exactly():
    """Include the first position, which nothing precedes."""
    plain = DiffusionModel(lambda tokens: np.outer(tokens, [1.0, 2.0]).astype(np.float32), MASK, False)
    tokens = np.array([1, 2, MASK])
    for guidance, first in ((0.0, [1, 2]), (0.5, [MASK - 1.5 * (MASK - 1), 2 * (MASK - 1.5 * (MASK - 1))])):
        options = DiffusionOptions(1, 1, 0.1, guidance=guidance)
        rows = compute_logits(plain, tokens, 1, options)
        assert rows.tolist() == [first, [2, 4], [MASK, 2 * MASK]]
        assert compute_logits(plain._replace(is_shifted=True), tokens, 1, options).tolist() == [first, first, [2, 4]]
    assert tokens.tolist() == [1, 2, MASK]


def test_algorithm_temperature_decides_the_order_of_positions():
    """Choose evenly at random, prefer sure positions when warm, take them when cold."""
    origin = next(denoise(certain([0] * 1001), [0], DiffusionOptions(1000, 4, 0.5, algorithm=ORIGIN, seed=1)))
    assert abs(origin.count(0) - 125) < 40
    assert 0 < origin[:500].count(0) < origin.count(0)
    for algorithm, temperature, expected in (
        (RANDOM, 0.0, 500), (CONFIDENCE, 100.0, 500), (CONFIDENCE, 1.0, 500), (CONFIDENCE, 1e-6, 1000),
    ):  # fmt: skip
        options = DiffusionOptions(1000, 4, 0.5, algorithm=algorithm, algorithm_temperature=temperature, seed=1)
        sure = certain([0] * 1001)._replace(read=certain([0] * 1001, surer=1e-3).read)
        chosen = np.flatnonzero(np.array(next(denoise(sure, [0], options))) == 0)
        assert len(chosen) == 125
        assert abs(chosen.mean() - (expected if expected == 500 else 999 - 62)) < (60 if expected == 500 else 1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gumbel_noise_scales_with_the_temperature(temperature):
    """Draw twice with one temperature: odds of four to one become 4 * (4 - log 4 - 1) / 9."""
    tokens, rows = np.full(4000, MASK), np.tile(temperature * np.log([4.0, 1.0]), (4000, 1))
    for has_noise, chance in ((False, 0.8), (True, 4 * (3 - np.log(4)) / 9)):
        options = DiffusionOptions(temperature=temperature, has_noise=has_noise)
        filling.fill_positions(tokens, np.arange(4000), rows, 4000, options, np.random.default_rng(2))
        assert abs((tokens == 0).mean() - chance) < 0.02
    cold = DiffusionOptions(has_noise=True)
    filling.fill_positions(tokens, np.arange(4000), rows, 4000, cold, np.random.default_rng(2))
    assert not tokens.any()


class Drawn:
    """A random generator with given numbers."""

    def __init__(self, *numbers: list):
        self.numbers = iter(numbers)

    def random(self, shape) -> np.ndarray:
        return np.array(next(self.numbers)).reshape(shape)


@pytest.mark.parametrize(
    ("numbers", "chosen"), [([0.9, 0.5, 0.1], 0), ([0.1, 0.5, 0.9], 2), ([0.0, 1e-30, 1e-19], 2), ([1e-30, 0.0, 0], 0)]
)
def test_a_larger_random_number_makes_a_choice_likelier(numbers: list[float], chosen: int):
    """Treat numbers too small to distinguish as equal."""
    noisy, placed = (
        DiffusionOptions(temperature=1.0, has_noise=True, top_k=1),
        DiffusionOptions(algorithm_temperature=1.0),
    )
    with np.errstate(all="raise"):
        tokens = np.full(1, MASK)
        filling.fill_positions(tokens, np.arange(1), np.zeros((1, 3)), 1, noisy, Drawn(numbers, [0.2]))
        assert tokens.tolist() == [chosen]
        tokens = np.full(3, MASK)
        filling.fill_positions(tokens, np.arange(3), np.zeros((3, 2)), 1, placed, Drawn(numbers))
        assert [number for number in range(3) if tokens[number] == 0] == [chosen]


def test_draws_are_bounded_by_their_limits():
    rows = np.log([[4.0, 1.0, 1.0, 2.0]])
    for options, expected in (
        (DiffusionOptions(top_k=1), [1, 0, 0, 0]),
        (DiffusionOptions(top_k=3), [0.5, 0.125, 0.125, 0.25]),  # two are equally likely
        (DiffusionOptions(top_k=4), [0.5, 0.125, 0.125, 0.25]),
        (DiffusionOptions(top_k=5), [0.5, 0.125, 0.125, 0.25]),
        (DiffusionOptions(temperature=0.5), [16 / 22, 1 / 22, 1 / 22, 4 / 22]),
        (DiffusionOptions(top_p=0.7), [2 / 3, 0, 0, 1 / 3]),
        (DiffusionOptions(top_p=0.8), [4 / 7, 1 / 7, 0, 2 / 7]),
    ):
        np.testing.assert_allclose(compute_probabilities(rows, options)[0], expected)
    assert compute_probabilities(np.zeros((1, 2)), DiffusionOptions(top_p=0.5)).tolist() == [[1, 0]]  # a half is enough
    many = np.random.default_rng(3).permutation(1000)[None] * 0.01
    assert (
        np.flatnonzero(compute_probabilities(many, DiffusionOptions(top_k=7))).tolist()
        == np.flatnonzero(many >= 9.93).tolist()
    )
    assert compute_probabilities(np.array([[1000.0, 0.0]]), DiffusionOptions()).tolist() == [[1, 0]]


def test_only_the_length_has_a_default():
    assert DiffusionOptions() == DiffusionOptions(128, 128, 0.0, 0, CONFIDENCE, 0.0, 0.0, 0.0, 0, 1.0, None, False)


@pytest.mark.parametrize("wrong", [
    {"algorithm": 5, "epsilon": 0.1}, {"algorithm": -1, "epsilon": 0.1}, {"length": 0, "epsilon": 0.1},
    {"steps": 0, "epsilon": 0.1}, {"steps": 10_001, "epsilon": 0.1}, {}, {"epsilon": 1.0}, {"block_length": -1},
    {"epsilon": 0.1, "block_length": -1}, {"epsilon": 0.1, "block_length": 4},
    {"length": 10, "steps": 5, "block_length": 4}, {"length": 8, "steps": 5, "block_length": 4},
])  # fmt: skip
def test_invalid_diffusion_options_are_refused(wrong):
    with pytest.raises(UsageError):
        next(denoise(certain([0] * 200), [1], DiffusionOptions(**wrong)))


@pytest.mark.parametrize("sensible", [
    {"algorithm": ORIGIN, "epsilon": 0.1}, {"length": 1, "steps": 1, "epsilon": 0.99},
    {"steps": 10_000, "epsilon": 0.1}, {"block_length": 128, "steps": 1}, {"block_length": 1},
])  # fmt: skip
def test_diffusion_options_at_their_bounds_are_accepted(sensible):
    next(denoise(certain([0] * 200), [1] * (200 - sensible.get("length", 128)), DiffusionOptions(**sensible)))


def test_prompt_and_masks_must_fit_the_context():
    with pytest.raises(UsageError, match="the prompt is empty"):
        next(denoise(certain([0]), [], DiffusionOptions(1, 1, 0.1)))
    require_room(512, 512)
    with pytest.raises(
        ContextError, match=r"513 tokens .the prompt and the positions to fill. exceed the limit of 512"
    ):
        require_room(513, 512)


def test_mask_token_and_shift_are_read_from_the_metadata():
    def of(mask: object, **more: object) -> DiffusionModel:
        engine = SimpleNamespace(hyperparameters=SimpleNamespace(is_diffusion=True), vocab_size=10, forward_full=len)
        return make_diffusion_model(engine, {"tokenizer.ggml.mask_token_id": mask, **more})

    assert of(0) == DiffusionModel(len, 0, True)
    assert of(np.uint32(9), **{"diffusion.shift_logits": False}) == DiffusionModel(len, 9, False)
    for mask, more in ((-1, {}), (10, {}), (None, {}), ("5", {}), (5, {"diffusion.shift_logits": 1})):
        with pytest.raises(UsageError, match="has no tokenizer"):
            of(mask, **more)


def test_a_causal_model_is_no_diffusion_model(model_path):
    engine = open_engine(model_path("llama"), context=64)
    with pytest.raises(UsageError, match="are not diffusion models"):
        make_diffusion_model(engine, {})
    engine.close()


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    """Write a file with a mask token and unshifted logits."""
    tiny = model("llada")
    more = vocabulary(272) | {"tokenizer.ggml.mask_token_id": 5, "diffusion.shift_logits": False}
    path = tmp_path_factory.mktemp("llada") / "llada.gguf"
    return write(replace(tiny, metadata=tiny.metadata | more), path)


def run(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "localllm", *words], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.sampled
@pytest.mark.slow
def test_run_denoises_reproducibly_and_refuses_unsuitable_options(llada):
    ask = ["run", str(llada), "-p", "Hi", "--raw", "--no-stdin", "-n", "12", "-s", "3", "--diffusion-steps", "6"]
    code, first, shown = run(*ask, "--diffusion-visual")
    assert (code, first, len(shown.splitlines()) >= 6) == (0, run(*ask)[1], True)
    assert first.strip() and "6/6" in shown
    code, blocks, _ = run(*ask, "--diffusion-block-length", "6", "--temp", "0")
    assert (code, bool(blocks.strip())) == (0, True)
    for words, message in (
        ([*ask, "--json"], "leave out --json"),
        ([*ask, "--diffusion-algorithm", "7"], "from 0 to 4"),
        ([*ask, "--min-p", "0.2"], "do not support min-p"),
        (["run", str(llada), "-p", "Hi", "--raw", "--no-stdin", "-n", "600"], "exceed the limit"),
        (["perplexity", str(llada), __file__], "use localllm run"),
    ):
        code, out, error = run(*words)
        assert (code != 0, out, message in error, "Traceback" in error) == (True, "", True, False), (words, error)


def test_run_refuses_diffusion_options_for_a_causal_model(model_path):
    code, out, error = run("run", str(model_path("llama")), "-p", "Hi", "--raw", "--no-stdin", "--diffusion-steps", "3")
    assert (code, out, "are not diffusion models" in error) == (2, "", True)


@pytest.mark.parametrize("visual", [False, True])
@pytest.mark.parametrize("asked", ["<mark>", [{"role": "user", "content": "q"}]])
def test_run_shows_the_masks_being_filled_on_stderr_only(asked, visual: bool, monkeypatch, capsys):
    """Encode a plain prompt with its special tokens, and a conversation by its template."""
    heard = []
    tokenizer = SimpleNamespace(
        end_ids={9}, decode=lambda ids: "".join(map(chr, ids)),
        encode=lambda text, special, bos: heard.append((text, special, bos)) or [7] * 500,
    )  # fmt: skip
    session = SimpleNamespace(encode_chat=lambda messages: heard.append(messages) or [7] * 500)
    opened = SimpleNamespace(engine=None, file=SimpleNamespace(metadata={}), tokenizer=tokenizer, session=session)
    opened.context = 9999
    steps = [[72, 1, 9], [72, 105, 9, 72]]
    monkeypatch.setattr(filling, "make_diffusion_model", lambda engine, metadata: SimpleNamespace(mask=1))
    monkeypatch.setattr(filling, "denoise", lambda model, prompt, options: heard.append(len(prompt)) or iter(steps))
    choices = SimpleNamespace(max_tokens=12, ban=[], get_sampling=lambda: {})
    run_diffusion(opened, asked, choices, DiffusionFlags(steps=2, visual=visual), ProgressLine())
    assert capsys.readouterr() == ("Hi\n", "1/2 H_\n2/2 Hi\n" * visual)
    assert heard == [("<mark>", True, True) if isinstance(asked, str) else asked, 500]
    choices.max_tokens = 13  # one more than a run of 512 takes
    with pytest.raises(ContextError):
        run_diffusion(opened, asked, choices, DiffusionFlags(), ProgressLine())
