"""Test context shift: tokens move, keys are rotated, and the rest equals a newly computed sequence."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import tiny_model
from engines import FAITHFUL
from models import DECLARATIONS
from tiny_hybrid import write_tiny_hybrid
from tiny_model import write_tiny_model

from localllm.arch.layer_state import PagedState
from localllm.arch.rope import RopeParameters
from localllm.engine.engine import Engine
from localllm.engine.lower.activation import ALL, Activation
from localllm.engine.memory import page_table
from localllm.engine.operations.elementwise import Elementwise
from localllm.engine.operations.registry import OPERATIONS
from localllm.engine.options import EngineOptions
from localllm.engine.trace.rope_shift import find_key_rotations, find_rotation
from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.table import PAGE

TOKENS = np.random.default_rng(5).integers(0, 256, 700).tolist()
BACKENDS = ["cpu", "reference"]
KINDS = ["f32", "f16", "q8_0", "q4_0", "k=q4_1,v=f16"]
# Of the tiny models: rotations of every kind, parts of heads, latent rows, keys that are normalized after they are
# rotated, heads that rotate nothing, distances instead of positions, windows, states that layers share.
MODELS = [
    "gptneox", "phi2", "deepseek2_legacy", "deepseek2_v3", "llama4", "smollm3", "gemma3", "gemma4", "exaone4", "mpt",
    "phi3_longrope", "llama_yarn",
]  # fmt: skip


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


@pytest.fixture
def one_layer(tmp_path, monkeypatch) -> Path:
    """Write a model whose keys and values depend on their own tokens only."""
    monkeypatch.setattr(tiny_model, "LAYERS", 1)
    return write_tiny_model(tmp_path / "one.gguf", context=1024)


@pytest.fixture
def opened():
    """Return a function that opens engines and closes them after the test."""
    engines = []

    def open_engine(path: Path, kv_type: str = "f32", backend: str = "cpu", context: int = 1024) -> Engine:
        engines.append(Engine(GGUFFile.open(path), EngineOptions(2, context, kv_type, backend)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def shifted(engine: Engine, keep: int, count: int, tokens: list[int] = TOKENS[:600]):
    """Return a sequence that has read the tokens and dropped some."""
    sequence = engine.sequence()
    sequence.append(tokens, "none")
    sequence.shift(keep, count)
    return sequence


@pytest.mark.sampled
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_type", KINDS)
@pytest.mark.parametrize(("keep", "count"), [(4, 64), (0, 256), (64, 128), (70, 448), (0, 576), (88, 512), (600, 0)])
def test_a_shifted_sequence_equals_the_rest_alone_with_one_layer(opened, one_layer, backend, kv_type, keep, count):
    engine = opened(one_layer, kv_type, backend)
    left = TOKENS[:keep] + TOKENS[keep + count : 600]
    sequence, alone = shifted(engine, keep, count), engine.sequence()
    assert sequence.tokens == left
    if left:
        alone.append(left, "none")
    got, expected = (some.append(TOKENS[600:640], "all") for some in (sequence, alone))
    bound = {"f32": 1e-10, "f16": 1e-6, "q8_0": 1e-4}.get(kv_type, 2e-2)  # keys are rounded twice
    assert nmse(got, expected) < bound


@pytest.mark.slow
@pytest.mark.sampled("kv_type", always=("f32", "f16", "q8_0"))  # to compile the kernels of others takes five seconds
@pytest.mark.parametrize("kv_type", KINDS)
def test_repeated_shifts_agree_with_the_reference(opened, tmp_path, kv_type):
    """Shift twice, and append in between."""
    path, rows = write_tiny_model(tmp_path / "tiny.gguf", context=1024), []
    for backend in BACKENDS:
        sequence = shifted(opened(path, kv_type, backend), 4, 320)
        sequence.append(TOKENS[:300], "none")
        sequence.shift(4, 192)
        rows.append(sequence.append(TOKENS[600:], "all"))
    bound = {"f32": FAITHFUL, "f16": 1e-7, "q8_0": 1e-5}.get(kv_type, 1e-3)
    assert nmse(*rows) < bound


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_shifts_of_every_type_of_rope_agree_with_the_reference(opened, model_path, name):
    path, rows = model_path(name), []
    for backend in BACKENDS:
        sequence = shifted(opened(path, "f32", backend), 4, 128, TOKENS[:300])
        rows.append(sequence.append(TOKENS[600:640], "all"))
    assert nmse(*rows) < 1e-8


def test_dropped_tokens_still_influence_deeper_layers(opened, tmp_path):
    engine = opened(write_tiny_model(tmp_path / "tiny.gguf", context=1024))
    alone = engine.sequence()
    alone.append(TOKENS[:4] + TOKENS[324:600], "none")
    got, expected = shifted(engine, 4, 320).append([7]), alone.append([7])
    assert 1e-6 < nmse(got, expected) < 0.5


def test_forks_are_not_shifted_with_their_original(opened, tmp_path):
    engine = opened(write_tiny_model(tmp_path / "tiny.gguf", context=1024))
    sequence = engine.sequence()
    sequence.append(TOKENS[:600], "none")
    fork, before = sequence.fork(), sequence.fork()
    sequence.shift(70, 128)
    expected = before.append([7])
    np.testing.assert_array_equal(fork.append([7]), expected)
    second = sequence.fork()
    np.testing.assert_array_equal(second.append([7]), sequence.append([7]))
    for some in (sequence, fork, before, second):
        some.close()
    assert not engine.backend.room.pages.references.any()


def test_dropped_pages_are_returned(opened, tmp_path):
    engine = opened(write_tiny_model(tmp_path / "tiny.gguf", context=1024))
    sequence = shifted(engine, 4, 448)
    assert np.count_nonzero(engine.backend.room.pages.references) == -(-(600 - 448) // PAGE)
    sequence.truncate(50)
    got, alone = sequence.append(TOKENS[:20], "all"), engine.sequence()
    alone.append(TOKENS[:4] + TOKENS[452:498], "none")
    assert nmse(got, alone.append(TOKENS[:20], "all")) < 0.5
    assert len(sequence.tokens) == 70


def test_shifting_a_sequence_without_its_first_windows_runs_it_again(opened, model_path, monkeypatch):
    """Layers with a window have dropped the first tokens: where they would be attended to, all tokens run again."""
    monkeypatch.setattr(page_table, "SLACK", 2 * PAGE)
    engine = opened(model_path("gemma3"))
    sequence = engine.sequence()
    for start in range(0, 600, 50):
        sequence.append(TOKENS[start : start + 50], "none")
    assert sequence.store._dropped > 0
    sequence.shift(4, 576)  # 24 tokens are left, and the window is 16
    alone = engine.sequence()
    alone.append(TOKENS[:4] + TOKENS[580:600], "none")
    assert nmse(sequence.append([7, 8], "all"), alone.append([7, 8], "all")) < FAITHFUL
    longer = engine.sequence()
    for start in range(0, 600, 50):
        longer.append(TOKENS[start : start + 50], "none")
    longer.shift(4, 256)
    assert longer.store._dropped > 0
    reference = shifted(opened(model_path("gemma3"), backend="reference"), 4, 256)
    assert nmse(longer.append([7, 8], "all"), reference.append([7, 8], "all")) < 1e-8


def test_an_interrupted_shift_keeps_the_tokens(opened, tmp_path):
    """Run them again, however many keys were rotated before."""
    engine = opened(write_tiny_model(tmp_path / "tiny.gguf", context=1024))
    sequence, alone = shifted(engine, 0, 0), engine.sequence()
    turn = engine.backend.rotate_keys

    def interrupted(*arguments):
        turn(*arguments)
        raise KeyboardInterrupt

    engine.backend.rotate_keys = interrupted
    with pytest.raises(KeyboardInterrupt):
        sequence.shift(70, 128)
    assert sequence.tokens == TOKENS[:600]
    alone.append(TOKENS[:600], "none")
    assert nmse(sequence.append([7]), alone.append([7])) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("keep", "count"), [(-1, 64), (0, -64), (0, 65), (0, 640), (37, 576)])
def test_shifts_of_invalid_ranges_are_refused(opened, one_layer, backend, keep, count):
    sequence = opened(one_layer, backend=backend).sequence()
    sequence.append(TOKENS[:600], "none")
    with pytest.raises(UsageError, match="cannot drop"):
        sequence.shift(keep, count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_that_cannot_shift_say_why(opened, model_path, tmp_path, backend):
    for path, reason in (
        (write_tiny_hybrid(tmp_path / "hybrid.gguf"), "recurrent"),
        (model_path("gpt2"), "absolute position"),
    ):
        with pytest.raises(UsageError, match=f"context shift is not supported.*{reason}"):
            opened(path, backend=backend, context=128).require_shift()


@pytest.mark.slow
def test_every_architecture_shifts_or_says_why_not(model_path):
    """No architecture may compute keys in a way that the check does not recognize.


    Hunyuan and Maincoder normalize keys after the rotation, so that they cannot be told from others any more.
    """
    refused = set()
    for name in DECLARATIONS:
        try:
            Engine(GGUFFile.open(model_path(name)), EngineOptions(1, 64))._find_rotations()
        except UsageError as error:
            refused.add(name)
            reasons = ("recurrent", "position embeddings")
            if name.startswith(("hunyuan", "maincoder")):
                reasons = ("'rms_norm' changes keys after RoPE",)
            assert any(reason in str(error) for reason in reasons), name
    assert {"gpt2", "mamba"} <= refused
    assert not refused & {"llama", *MODELS}


NEOX, PAIRS = RopeParameters(32, 32, False), RopeParameters(32, 8, True)


class Said(dict):
    """Operations by their output."""

    def __call__(self, verb: str, *inputs: Activation, columns: int = 64, **given: object) -> Activation:
        """Add an operation; arguments that are not given do not matter."""
        output = Activation(ALL, columns)
        kind = OPERATIONS.get(verb)
        names = [each.name for each in fields(kind)][2:] if kind else []
        more = [given.get(name) for name in names] if kind else [verb, {}]
        self[output] = (kind or Elementwise)(inputs, output, *more)
        return output


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def product(said: Said) -> Activation:
    return said("linear", Activation(ALL, 64))


def turned(said: Said, x: Activation) -> tuple[list[float], int, int] | str | None:
    """Return how keys are rotated (frequencies, step, apart), or why they cannot be."""
    try:
        turn = find_rotation(said, x, 32, 0)
    except UsageError as error:
        return str(error)
    return None if turn is None else (turn.frequencies.tolist(), turn.step, turn.apart)


def test_rotations_of_keys_are_recognized_through_later_operations(said: Said, product: Activation):
    """Check pairs anywhere in a head, operations before the rotation, and harmless ones after it."""
    neox, pairs = (said("rope", product, rope=rope, divisors=None) for rope in (NEOX, PAIRS))
    slow = said("rope", product, rope=NEOX, divisors=np.full(16, 2, np.float32))
    expected = NEOX.compute_frequencies().tolist()
    assert turned(said, neox) == (expected, 1, 16)
    assert turned(said, slow) == ([each / 2 for each in expected], 1, 16)
    assert turned(said, pairs) == (PAIRS.compute_frequencies().tolist(), 2, 1)
    assert turned(said, said("scale", pairs)) == turned(said, pairs)
    still = said("linear", Activation(ALL, 48), columns=48)
    behind = said("concat_heads", still, neox, heads=2)
    assert turned(said, behind) == ([0] * 24 + expected, 1, 16)
    assert turned(said, said("concat_heads", still, pairs, heads=2)) == (
        [0] * 12 + PAIRS.compute_frequencies().tolist(),
        2,
        1,
    )
    assert turned(said, said("concat_heads", neox, still, heads=2)) == (expected, 1, 16)
    for never in (product, said("concat_heads", still, product, heads=2), said("add", product, said("linear", neox))):
        assert turned(said, never) is None
    ones, uneven = np.full(32, 2.0), np.arange(32.0)
    assert turned(said, said("rms_norm", neox, group=32, vector=ones)) == (expected, 1, 16)
    assert turned(said, said("rms_norm", product, group=32, vector=uneven)) is None
    for verb, x in (
        ("rms_norm", said("rms_norm", neox, group=32, vector=uneven)),
        ("rms_norm", said("rms_norm", neox, group=64, vector=ones)),
        ("add", said("add", product, neox)), ("concat_heads", said("concat_heads", pairs, neox, heads=2)),
    ):  # fmt: skip
        assert turned(said, x) == f"context shift is not supported: '{verb}' changes keys after RoPE"


def test_states_with_rotated_keys_are_those_that_an_operation_fills(said: Said, product: Activation):
    """Include the keys of attention and of key selection."""
    keys = said("rope", product, rope=NEOX, divisors=None)
    states = [PagedState(number, 2, 32, 32) for number in range(4)]
    said("attend", product, keys, product, state=states[0], choices=None)
    said("attend", product, product, product, state=states[1], choices=None)
    said("attend", product, state=states[2], choices=None)  # keys of another layer
    said("select_keys", product, keys, state=states[2])
    said("attend", product, keys, state=states[3], choices=keys)  # and what was chosen of them
    rotated = find_key_rotations([*said.values()], states)
    assert {state.layer: turn.apart for state, turn in rotated.items()} == {0: 16, 2: 16}
    said("embed_positions", product)
    with pytest.raises(UsageError, match="absolute position embeddings"):
        find_key_rotations([*said.values()], [])
