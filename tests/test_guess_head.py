"""Layers that guess, against what they mean in NumPy: read in one go, token by token, after going back, on guesses."""

from pathlib import Path

import numpy as np
import pytest
from models import Model, model, write
from models.numbers import Numbers

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
from localllm.kernels.reference import Reference, Remembered

HEADS = ["glm4moe", "hy_v3", "deepseek2_v3", "deepseek2_legacy", "qwen35", "qwen35moe", "qwen3next"]


def with_guess(name: str) -> Model:
    """A model with a layer that guesses: its own, or one made of its last layer, which attends."""
    made = model(name)
    key = f"{made.arch}.block_count"
    if made.metadata.get(f"{made.arch}.nextn_predict_layers"):
        return made
    layers, width = made.metadata[key], made.metadata[f"{made.arch}.embedding_length"]
    last = f"blk.{layers - 1}."
    tensors = {n.replace(last, f"blk.{layers}."): values for n, values in made.tensors.items() if n.startswith(last)}
    numbers = Numbers(0, name, "nextn")
    tensors[f"blk.{layers}.nextn.eh_proj.weight"] = numbers.normal((width, 2 * width), width**-0.5)
    for norm in ("enorm", "hnorm"):
        tensors[f"blk.{layers}.nextn.{norm}.weight"] = numbers.uniform((width,), 0.5, 1.5)
    more = {key: layers + 1, f"{made.arch}.nextn_predict_layers": 1}
    return Model(made.arch, made.metadata | more, made.tensors | tensors, made.formats)


@pytest.fixture(params=HEADS)
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


def text(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, 260, count).tolist()


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


@pytest.mark.parametrize("count", [2, 9, EAGER + 2, 90])
def test_what_a_layer_says(path, engine, count):
    ids = text(count)
    sequence = engine.sequence()
    engine.listen(sequence)
    sequence.append(ids[:-1])
    expected, _ = meant(path, ids, guesses=2)
    assert nmse(guessed(engine, sequence, ids, guesses=2), expected) < 1e-9


def test_token_by_token_is_the_same(path, engine):
    ids = text(50)
    sequence = engine.sequence()
    engine.listen(sequence)
    for number in range(1, len(ids)):
        sequence.append(ids[number - 1 : number])
        if number % 7 == 0:
            got = guessed(engine, sequence, ids[: number + 1], guesses=number % 3)
            assert nmse(got, meant(path, ids[: number + 1], number % 3)[0]) < 1e-9


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
    assert nmse(guessed(engine, sequence, ids[:39], 2), meant(path, ids[:39], 2)[0]) < 1e-9


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


def test_the_models_logits_are_the_same(path, tmp_path):
    """Whether somebody listens, and whether the file has the layer at all."""
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


def test_states_are_those_of_an_attending_layer(path):
    file = GGUFFile.open(path)
    _, h = architecture(file)
    assert has_guessing_layer(Weights(file.tensors), h) and guessing_state(h).layer == h.layers
