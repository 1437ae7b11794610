"""Models that fill masked places: logits as llama.cpp's, schedules, which places come first, and the command."""

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
from test_goldens import nmse

from localllm.cli.filling import Diffusion, fill
from localllm.cli.terminal import ProgressLine
from localllm.errors import ContextError, UnsupportedError, UsageError
from localllm.generation import filling
from localllm.generation.filling import (
    CONFIDENCE,
    ENTROPY,
    MARGIN,
    ORIGIN,
    RANDOM,
    FillingModel,
    FillingOptions,
    draw,
    filled,
    filling_model,
    how_many,
    plan,
    probabilities,
)

MASK, VOCAB = 9, 10


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", MASKED)
def test_logits(model_path, name, backend):
    golden, tokens = RowsGolden.load(name), prompt(name, 272)
    assert model(name).digest() == golden.digest
    engine = open_engine(model_path(name), context=128, kv_type="f32", backend=backend)
    assert nmse(kept(engine.read_whole(tokens)), golden.rows) < (1e-11 if backend == "reference" else FAITHFUL)
    with pytest.raises(UnsupportedError, match="fill masked places"):
        engine.sequence()
    with pytest.raises(ContextError, match="512"):
        engine.read_whole([1] * 513)
    engine.close()


def certain(answer: list[int], surer: float = 0.0):
    """A model that knows what stands in each place, and is the surer of a place the later it is."""

    def read(tokens):
        rows = np.zeros((len(tokens), VOCAB), np.float32)
        rows[np.arange(len(tokens)), answer] = 3 + surer * np.arange(len(tokens))
        return rows

    return FillingModel(read, MASK, False)


def test_all_places_are_filled_in_the_end():
    answer = [1, 2, 3, 4, 5, 6, 7, 8]
    for options in (FillingOptions(6, 4, 1e-3), FillingOptions(6, 6, block_length=2), FillingOptions(6, 20, 0.5)):
        states = list(filled(certain(answer), answer[:2], options))
        assert len(states) == options.steps
        assert states[-1] == answer[2:]
        masks = [state.count(MASK) for state in states]
        assert masks == sorted(masks, reverse=True)


def test_blocks_come_one_after_the_other():
    states = list(filled(certain([0] * 10), [0, 0], FillingOptions(8, 4, block_length=4)))
    assert [[token == MASK for token in state] for state in states] == [
        [False] * done + [True] * (8 - done) for done in (2, 4, 6, 8)
    ]
    assert [how_many(FillingOptions(8, 6, block_length=4), step, 3, 4, 4) for step in range(3)] == [2, 1, 1]
    assert len(list(plan(FillingOptions(8, 6, block_length=4)))) == 6


def test_the_surest_place_is_filled_first():
    first = next(filled(certain([0] * 8, surer=0.5), [0, 0], FillingOptions(6, 6, block_length=6)))
    assert first == [MASK] * 5 + [0]


def test_logits_may_be_for_the_place_behind():
    answer = [1, 2, 3, 4, 5]
    shifted = certain([*answer[1:], 0])._replace(is_shifted=True)
    assert list(filled(shifted, [1], FillingOptions(4, 2, 1e-3)))[-1] == answer[1:]


def test_guidance_goes_away_from_what_is_said_without_the_prompt():
    def read(tokens):
        rows = np.zeros((len(tokens), VOCAB), np.float32)
        rows[:, 3], rows[:, 4] = 1.0, 0.9 if tokens[0] != MASK else 0.0
        return rows

    plain, guided = (FillingOptions(1, 1, 1e-3, guidance=guidance) for guidance in (0.0, 2.0))
    assert next(filled(FillingModel(read, MASK, False), [1], plain)) == [3]
    assert next(filled(FillingModel(read, MASK, False), [1], guided)) == [4]


@pytest.mark.parametrize("algorithm", [ORIGIN, ENTROPY, MARGIN, RANDOM, CONFIDENCE])
def test_algorithms_repeat_with_their_seed(algorithm):
    options = FillingOptions(6, 6, 1e-3, algorithm=algorithm, temperature=1.0, algorithm_temperature=0.3, seed=4)
    flat = FillingModel(lambda tokens: np.zeros((len(tokens), VOCAB), np.float32), MASK, False)
    assert list(filled(flat, [1], options)) == list(filled(flat, [1], options))


def test_draws_are_as_likely_as_they_should_be():
    random, rows = np.random.default_rng(0), np.tile(np.log([0.5, 0.3, 0.15, 0.05]), (4000, 1))
    counts = Counter(draw(rows, FillingOptions(temperature=1.0), random)[0].tolist())
    assert abs(counts[0] / 4000 - 0.5) < 0.03
    assert abs(counts[2] / 4000 - 0.15) < 0.03
    np.testing.assert_allclose(
        probabilities(rows[:1], FillingOptions(temperature=1.0, top_k=2))[0], [0.625, 0.375, 0, 0]
    )
    of_top_p = probabilities(rows[:1], FillingOptions(temperature=1.0, top_p=0.6))[0]
    np.testing.assert_allclose(of_top_p, [0.625, 0.375, 0, 0])
    assert draw(rows[:1], FillingOptions(), random)[0].tolist() == [0]


def test_how_sure_a_place_is():
    rows = np.log([[0.5, 0.4, 0.1], [0.6, 0.2, 0.2]])
    surest = {
        kind: draw(rows, FillingOptions(algorithm=kind), np.random.default_rng(0))[1]
        for kind in (CONFIDENCE, MARGIN, ENTROPY)
    }
    np.testing.assert_allclose(surest[CONFIDENCE], [0.5, 0.6])
    np.testing.assert_allclose(surest[MARGIN], [0.1, 0.4])
    entropy = np.log(rows.shape[1]) - 0  # of no knowledge at all
    assert (-entropy <= surest[ENTROPY]).all()
    assert (surest[ENTROPY] < 0).all()


@pytest.mark.parametrize("wrong", [
    {"algorithm": 5, "epsilon": 0.1}, {"length": 0, "epsilon": 0.1}, {"steps": 0, "epsilon": 0.1}, {}, {"epsilon": 1.0},
    {"epsilon": 0.1, "block_length": 4}, {"length": 10, "steps": 5, "block_length": 4},
    {"length": 8, "steps": 5, "block_length": 4},
])  # fmt: skip
def test_options_that_make_no_sense(wrong):
    with pytest.raises(UsageError):
        next(filled(certain([0] * 200), [1], FillingOptions(**wrong)))


def test_other_models_have_no_places_to_fill(model_path):
    engine = open_engine(model_path("llama"), context=64)
    with pytest.raises(UsageError, match="write on"):
        filling_model(engine, {})
    engine.close()


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    """A file with a mask, which says that logits are for the places themselves."""
    made = model("llada")
    more = vocabulary(272) | {"tokenizer.ggml.mask_token_id": 5, "diffusion.shift_logits": False}
    path = tmp_path_factory.mktemp("llada") / "llada.gguf"
    return write(replace(made, metadata=made.metadata | more), path)


def run(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "localllm", *words], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_run(llada):
    """The same seed, the same answer; steps are shown where they are asked for; other commands say what to use."""
    ask = ["run", str(llada), "-p", "Hi", "--raw", "--no-stdin", "-n", "12", "-s", "3", "--diffusion-steps", "6"]
    code, first, shown = run(*ask, "--diffusion-visual")
    assert (code, first, len(shown.splitlines()) >= 6) == (0, run(*ask)[1], True)
    assert first.strip() and "6/6" in shown
    code, blocks, _ = run(*ask, "--diffusion-block-length", "6", "--temp", "0")
    assert (code, bool(blocks.strip())) == (0, True)
    for words, said in (
        ([*ask, "--json"], "leave out --json"),
        ([*ask, "--diffusion-algorithm", "7"], "from 0 to 4"),
        ([*ask, "--min-p", "0.2"], "know no min-p"),
        (["run", str(llada), "-p", "Hi", "--raw", "--no-stdin", "-n", "600"], "do not fit"),
        (["perplexity", str(llada), __file__], "use localllm run"),
    ):
        code, out, error = run(*words)
        assert (code != 0, out, said in error, "Traceback" in error) == (True, "", True, False), (words, error)


def test_run_of_a_model_that_writes_on(model_path):
    code, out, error = run("run", str(model_path("llama")), "-p", "Hi", "--raw", "--no-stdin", "--diffusion-steps", "3")
    assert (code, out, "write on" in error) == (2, "", True)


@pytest.mark.parametrize("visual", [False, True])
@pytest.mark.parametrize("asked", ["<mark>", [{"role": "user", "content": "q"}]])
def test_what_is_shown_while_places_are_filled(asked, visual: bool, monkeypatch, capsys):
    """A text is read with its marks and its beginning, a conversation as the template has it; stdout gets the end."""
    heard = []
    tokenizer = SimpleNamespace(
        end_ids={9}, decode=lambda ids: "".join(map(chr, ids)),
        encode=lambda text, special, bos: heard.append((text, special, bos)) or [7] * 500,
    )  # fmt: skip
    session = SimpleNamespace(encode_chat=lambda messages: heard.append(messages) or [7] * 500)
    opened = SimpleNamespace(engine=None, file=SimpleNamespace(metadata={}), tokenizer=tokenizer, session=session)
    opened.context = 9999
    steps = [[72, 1, 9], [72, 105, 9, 72]]
    monkeypatch.setattr(filling, "filling_model", lambda engine, metadata: SimpleNamespace(mask=1))
    monkeypatch.setattr(filling, "filled", lambda model, prompt, options: heard.append(len(prompt)) or iter(steps))
    choices = SimpleNamespace(max_tokens=12, drawing=lambda: {})
    fill(opened, asked, choices, Diffusion(steps=2, visual=visual), ProgressLine())
    assert capsys.readouterr() == ("Hi\n", "1/2 H_\n2/2 Hi\n" * visual)
    assert heard == [("<mark>", True, True) if isinstance(asked, str) else asked, 500]
    choices.max_tokens = 13  # one more than a run of 512 takes
    with pytest.raises(ContextError):
        fill(opened, asked, choices, Diffusion(), ProgressLine())
