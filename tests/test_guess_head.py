"""Layers that guess, against what they mean in NumPy: read in one go, token by token, after going back, on guesses."""

import json
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from engines import FAITHFUL
from models import model, write
from models.golden import kept
from models.guessing import GUESSES, MADE, OWN, text, with_guess

from localllm import api
from localllm.arch import architecture
from localllm.arch.guessing import guessing_state, has_guessing_layer
from localllm.arch.storage import KVType
from localllm.arch.weights import Weights
from localllm.engine.engine import Engine
from localllm.engine.guess_head import EAGER
from localllm.engine.options import EngineOptions
from localllm.engine.run import Span
from localllm.errors import UsageError
from localllm.files.gguf_file import GGUFFile
from localllm.generation import leaps, speculation
from localllm.generation.leaps import FEW
from localllm.generation.speculation import StepCosts
from localllm.kernels.reference import Reference
from localllm.kernels.remembered import Remembered

HEADS = [*OWN, *MADE]


@pytest.fixture(params=[pytest.param(name, marks=[] if name == "qwen35" else pytest.mark.sampled) for name in HEADS])
def path(request, tmp_path) -> Path:
    return write(with_guess(request.param), tmp_path / "model.gguf")


@pytest.fixture
def engine(path):
    engine = Engine(GGUFFile.open(path), EngineOptions(2, 300, "f32"))
    yield engine
    engine.close()


def meant(path: Path, ids: list[int], guesses: int = 0) -> tuple[np.ndarray, list[int]]:
    """The logits of the layer behind a text that the model has read but for its last token, and behind so many of its
    own guesses; and these."""
    file = GGUFFile.open(path)
    model, h = architecture(file)
    weights, kept = Weights(file.tensors), KVType.of("f32")
    reads = Reference([Span(Remembered(kept), 0, np.array(ids[:-1]), 1)], {}, 300)
    reads.reveals = True
    model.forward(reads, weights, h)
    before = np.concatenate([np.zeros_like(reads.revealed[:1]), reads.revealed])
    layer = Remembered(kept)
    made, logits = model.guess(Reference([Span(layer, 0, np.array(ids), 1)], {}, 300), weights, h, before)
    rows, found = [logits[0]], [int(logits[0].argmax())]
    for place in range(len(ids), len(ids) + guesses):
        span = Span(layer, place, np.array(found[-1:]), 1)
        made, logits = model.guess(Reference([span], {}, 300), weights, h, made[-1:])
        rows.append(logits[0])
        found.append(int(logits[0].argmax()))
    return np.array(rows), found


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


def guessed(engine: Engine, sequence, ids: list[int], guesses: int = 0) -> np.ndarray:
    """The logits of the layer, which follows the sequence, behind this text and behind its own guesses."""
    follower = sequence.listener
    rows = [follower.append(ids[len(follower.tokens) :])[0]]
    for _ in range(guesses):
        rows.append(follower.append([int(rows[-1].argmax())])[0])
    follower.truncate(len(follower.tokens))  # forgets what it read on guesses
    return np.array(rows)


@pytest.mark.parametrize("name", HEADS)
def test_what_llama_cpp_says(name, tmp_path):
    """Measured: 4e-12 at most."""
    made = with_guess(name)
    with np.load(GUESSES) as golden:
        assert str(golden[f"{name} digest"]) == made.digest(), "record it anew: scripts/record_guesses.py"
        expected = golden[name]
    file = GGUFFile.open(write(made, tmp_path / "model.gguf"))
    module, h = architecture(file)
    weights, ids, kept_as = Weights(file.tensors), np.array(text()), KVType.of("f32")
    reads = Reference([Span(Remembered(kept_as), 0, ids, 0)], {}, 300)
    reads.reveals = True
    module.forward(reads, weights, h)
    before = np.concatenate([np.zeros_like(reads.revealed[:1]), reads.revealed[:-1]])
    layer = Reference([Span(Remembered(kept_as), 0, ids, len(ids))], {}, 300)
    assert nmse(kept(module.guess(layer, weights, h, before).logits), expected) < 1e-10


@pytest.mark.parametrize("count", [2, 9, EAGER + 2, 90])
def test_what_a_layer_says(path, engine, count):
    ids = text(count)
    sequence = engine.sequence()
    engine.listen(sequence)
    sequence.append(ids[:-1])
    expected, _ = meant(path, ids, guesses=2)
    assert nmse(guessed(engine, sequence, ids, guesses=2), expected) < FAITHFUL


def test_token_by_token_is_the_same(path, engine):
    ids = text(50)
    sequence = engine.sequence()
    engine.listen(sequence)
    for number in range(1, len(ids)):
        sequence.append(ids[number - 1 : number])
        if number % 7 == 0:
            got = guessed(engine, sequence, ids[: number + 1], guesses=number % 3)
            assert nmse(got, meant(path, ids[: number + 1], number % 3)[0]) < FAITHFUL


def test_wrong_drafts_leave_no_trace(path, engine):
    """What the model has made of tokens that are taken back is not what it makes of others at their places."""
    ids, wrong = text(40), text(6, seed=2)
    sequence = engine.sequence()
    engine.listen(sequence)
    sequence.append(ids[:20])
    for end in range(21, 39):
        guessed(engine, sequence, ids[:end], guesses=3)
        sequence.append([ids[end - 1], *wrong[: end % 5]], "all")
        sequence.truncate(end)
    assert nmse(guessed(engine, sequence, ids[:39], 2), meant(path, ids[:39], 2)[0]) < FAITHFUL


def test_a_text_whose_beginning_nobody_heard(engine):
    """It knows less, and says something all the same; further back it begins anew."""
    ids, sequence = text(60), engine.sequence()
    sequence.append(ids[:30])
    follower = engine.listen(sequence)
    assert engine.listen(sequence) is follower
    sequence.append(ids[30:40])
    assert follower.begin == 30 and np.isfinite(follower.append(ids[30:41])).all()
    sequence.truncate(10)
    sequence.append(ids[10:15])
    assert follower.begin in (10, 0)  # of a recurrent model, which reads it again from where it can
    assert np.isfinite(follower.append(ids[follower.begin : 16])).all()


def test_the_models_logits_are_the_same(path):
    """Whether somebody listens."""
    ids, rows = text(70), []
    for listens in (False, True):
        file = GGUFFile.open(path)
        engine = Engine(file, EngineOptions(2, 300, "f32"))
        sequence = engine.sequence()
        if listens:
            engine.listen(sequence)
        rows.append(np.concatenate([sequence.append(ids[:-3]), sequence.append(ids[-3:], "all")]))
        engine.close()
    np.testing.assert_array_equal(*rows)


def test_closed_sequences_give_their_pages_back(engine):
    for _ in range(20):
        sequence = engine.sequence()
        engine.listen(sequence)
        sequence.append(text(200))
        sequence.close()
    follower = engine.listen(engine.sequence())
    assert follower.engine._backend.places()[0] == 0


def test_who_has_no_such_layer_says_so(tmp_path):
    file = GGUFFile.open(write(model("llama"), tmp_path / "llama.gguf"))
    engine = Engine(file, EngineOptions(1, 300))
    with pytest.raises(UsageError, match="has no layer that guesses"):
        engine.listen(engine.sequence())
    engine.close()


class Free(StepCosts):
    """Whatever a step has, it costs the same: every guess is read."""

    are_known = True

    def of(self, tokens: int) -> float:
        return 1.0

    def of_time(self, seconds: float) -> float:
        return 0.0


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_texts_are_the_same(path, seed, monkeypatch):
    """Whatever the layer says, and whether it is asked."""
    monkeypatch.setattr(speculation, "StepCosts", Free)
    drawn = {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    answers = {}
    with api.open_model(path, threads=2, context=300, cache=False) as model:
        for how in ("off", "mtp", "auto"):
            generation = model.generate(text(30), 60, speculate=how, **drawn)
            answers[how] = "".join(generation), generation.tokens, generation.drafted > 0
    assert answers["mtp"][:2] == answers["auto"][:2] == answers["off"][:2]
    is_long = len(answers["off"][1]) > 1  # one that ends at once has no guesses
    assert [drafted for _, _, drafted in answers.values()] == [False, is_long, is_long]


def test_a_conversation_goes_on(path):
    """The layer goes on with it, from where the cache does."""
    with api.open_model(path, threads=2, context=300, cache=False) as model:
        first = model.generate(text(40), 8, speculate="mtp", temperature=0)
        "".join(first)
        prompt = [*text(40), *first.tokens, *text(9, seed=5)]
        again = model.generate(prompt, 30, speculate="mtp", temperature=0)
        "".join(again)
        assert again.cached_tokens > 40
    with api.open_model(path, threads=2, context=300, cache=False) as model:
        alone = model.generate(prompt, 30, speculate="off", temperature=0)
        "".join(alone)
    assert again.tokens == alone.tokens


def test_forgetting_the_beginning_is_refused(path):
    with (
        api.open_model(path, threads=1, context=300, cache=False) as model,
        pytest.raises(UsageError, match="know no text whose beginning is forgotten"),
    ):
        model.generate(text(4), 4, speculate="mtp", on_overflow="shift")


def test_states_are_those_of_an_attending_layer(path):
    file = GGUFFile.open(path)
    _, h = architecture(file)
    assert has_guessing_layer(Weights(file.tensors), h) and guessing_state(h).layer == h.layers


@pytest.mark.parametrize(("name", "said"), [("qwen35", "1 layer, * MB, used"), ("hy_v3", "1 layer, * MB, used")])
def test_inspect_shows_the_layer(name, said, tmp_path, cli):
    path = write(with_guess(name), tmp_path / "model.gguf")
    (line,) = [line for line in cli("inspect", path)[1].splitlines() if line.startswith("guesses")]
    assert fnmatch(line.removeprefix("guesses").strip(), said.replace("MB", "?B")), line
    facts = json.loads(cli("inspect", path, "--json")[1])["guessing"]
    assert facts["layers"] == 1 and facts["used"] and facts["bytes"] > 10_000
    other = write(model("llama"), tmp_path / "llama.gguf")
    assert json.loads(cli("inspect", other, "--json")[1])["guessing"] == {"layers": 0, "bytes": 0, "used": False}
    assert "guesses" not in cli("inspect", other)[1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, FEW + 1])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_batches_say_the_same(path, count, seed, monkeypatch):
    """Few answers are guessed ahead, also when they are the last of many."""
    drawn = {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    monkeypatch.setattr(leaps, "StepCosts", Free)
    prompts, found, steps = [text(20 + 7 * n, seed=n) for n in range(count)], [], []
    for how in ("off", "auto"):
        with api.open_model(path, threads=2, context=300, cache=False) as model:
            chosen = [api.options(60 - 6 * n, (), drawn, how) for n in range(count)]
            asked = zip(prompts, chosen, strict=True)
            requests = [model.session.request(prompt, options) for prompt, options in asked]
            batch, taken = model.batch(iter(requests)), Counter[int]()
            run = model.engine.run

            def counted(asked, logits, precise, run=run, taken=taken):
                taken.update(len(ids) for _, ids in asked if logits == "all")
                return run(asked, logits, precise)

            model.engine.run = counted
            for _ in batch:
                pass
            batch.close()
            found.append([request.answers[0].tokens for request in requests])
            steps.append(taken)
    assert found[0] == found[1]
    assert not steps[0]
    assert max(steps[1], default=0) > 1 or min(map(len, found[1])) < 4  # they have ended at once


def test_one_is_guessed_for_beside_one_that_is_not(path):
    with api.open_model(path, threads=2, context=300, cache=False) as model:
        requests = [
            model.session.request(text(30, seed=n), api.options(30, (), {"temperature": 0}, how), key=n)
            for n, how in enumerate(("off", "mtp"))
        ]
        for _ in (batch := model.batch(iter(requests))):
            pass
        batch.close()
        for n, request in enumerate(requests):
            alone = model.generate(text(30, seed=n), 30, temperature=0, speculate="off")
            assert "".join(alone) == request.answers[0].text
