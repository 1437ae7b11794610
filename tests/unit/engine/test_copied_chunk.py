"""Test copying tokens from the middle of another sequence: keys are rotated to their new positions."""

from pathlib import Path

import numpy as np
import pytest
import tiny_model
from tiny_hybrid import write_tiny_hybrid
from tiny_model import write_tiny_model

from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile

TOKENS = np.random.default_rng(5).integers(0, 256, 400).tolist()


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


@pytest.fixture
def opened():
    """Return a function that opens engines and closes them after the test."""
    engines = []

    def open_engine(path: Path, kv_type: str = "f32", backend: str = "cpu") -> Engine:
        engines.append(Engine(GGUFFile.open(path), EngineOptions(2, 2048, kv_type, backend)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def one_layer(tmp_path, monkeypatch) -> Path:
    """Write a model whose keys and values depend on their own tokens only."""
    monkeypatch.setattr(tiny_model, "LAYERS", 1)
    return write_tiny_model(tmp_path / "one.gguf", context=2048)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize(("begin", "first", "count"), [(40, 170, 101), (200, 7, 130), (64, 64, 64), (0, 3, 65)])
def test_copied_tokens_equal_computed_ones_in_a_model_of_one_layer(
    opened, one_layer, backend, kv_type, begin, first, count
):
    """Copy to earlier, later and the same positions, across pages."""
    engine = opened(one_layer, kv_type, backend)
    source, got, alone = (engine.sequence() for _ in range(3))
    source.append(TOKENS[:300], "none")
    if begin:
        got.append(TOKENS[100 : 100 + begin], "none")
    assert engine.append_copies(got, source, first, count)
    assert (got.exact, got.tokens[begin:]) == (begin, TOKENS[first : first + count])
    alone.append(got.tokens, "none")
    bound = {"f32": 1e-10, "f16": 1e-6, "q8_0": 1e-4}.get(kv_type, 2e-2)  # keys are rounded twice
    assert nmse(*(some.append(TOKENS[350:390], "all") for some in (got, alone))) < bound
    expected = engine.sequence()
    expected.append(TOKENS[:300], "none")  # the other one is as it was
    np.testing.assert_array_equal(source.append([7]), expected.append([7]))


def test_a_sequence_is_exact_up_to_its_first_copied_token(opened, one_layer):
    engine = opened(one_layer)
    source, got = engine.sequence(), engine.sequence()
    source.append(TOKENS[:300], "none")
    got.append(TOKENS[:80], "none")
    engine.append_copies(got, source, 100, 50)
    fork = got.fork()
    assert fork.exact == got.exact == 80
    fork.truncate(80)
    assert fork.exact > 10**6 and got.exact == 80


def test_tokens_whose_windows_were_dropped_cannot_be_copied(opened, model_path):
    engine = opened(model_path("gemma3"))
    source, got = engine.sequence(), engine.sequence()
    for _ in range(2):
        source.append(TOKENS * 2, "none")
    got.append(TOKENS[:10], "none")
    assert not engine.append_copies(got, source, 0, 64)
    assert len(got.tokens) == 10 and got.append([7]).shape[0] == 1
    assert engine.append_copies(got, source, 1500, 64)


def make_edit(engine: Engine, skipped: int, filled: bool):
    """Return a sequence with the first 130 tokens, a gap and 90 copied tokens; filled: compute the gap first."""
    source, edited = engine.sequence(), engine.sequence()
    source.append(TOKENS[:300], "none")
    edited.append(TOKENS[:130], "none")
    gap = TOKENS[320 : 320 + skipped]
    if filled:
        edited.append(gap, "none", kernel_tokens=8)
        assert engine.append_copies(edited, source, 170, 90)
    else:
        assert engine.append_copies(edited, source, 170, 90, gap)
        assert edited.gaps == [(130, 130 + skipped)] and edited.exact == 130
    assert edited.tokens == [*TOKENS[:130], *gap, *TOKENS[170:260]]
    return edited


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("skipped", [1, 9, 70])
def test_a_gap_is_computed_in_the_run_of_the_tokens_after_the_copies(opened, model_path, kv_type, skipped):
    """Compute the same bits as with a run of its own."""
    engine = opened(model_path("llama-Q8_0"), kv_type)
    edited, expected = (make_edit(engine, skipped, filled) for filled in (False, True))
    runs, run = [], engine.backend.run
    engine.backend.run = lambda spans, precise: runs.append([len(span.ids) for span in spans]) or run(spans, precise)
    row = edited.append([7], kernel_tokens=8)
    assert runs == [[skipped, 1]] and not edited.gaps
    np.testing.assert_array_equal(row, expected.append([7], kernel_tokens=8))
    np.testing.assert_array_equal(edited.append([8, 9], "all"), expected.append([8, 9], "all"))


def test_gaps_of_several_chunks_are_computed_together(opened, model_path):
    engine = opened(model_path("llama-Q8_0"))
    first, second, source = make_edit(engine, 5, False), make_edit(engine, 5, True), engine.sequence()
    source.append(TOKENS[:300], "none")
    assert engine.append_copies(first, source, 20, 64, [11, 12])
    assert first.gaps == [(130, 135), (225, 227)]
    second.append([11, 12], "none", kernel_tokens=8)
    assert engine.append_copies(second, source, 20, 64)
    rows = engine.run([(first, [7]), (engine.sequence(), [3])], "last", True, [8, 8])
    np.testing.assert_array_equal(rows[0], second.append([7], kernel_tokens=8))


def test_forks_and_truncated_sequences_compute_what_a_gap_lacks(opened, model_path):
    engine = opened(model_path("llama-Q8_0"))
    edited, expected = (make_edit(engine, 9, filled) for filled in (False, True))
    fork = edited.fork()
    assert fork.tokens == TOKENS[:130] and not fork.gaps
    exact = engine.sequence()
    exact.append(TOKENS[:130], "none")
    np.testing.assert_array_equal(fork.append([5]), exact.append([5]))
    row = edited.append([7], kernel_tokens=8)
    np.testing.assert_array_equal(row, expected.append([7], kernel_tokens=8))
    cut = make_edit(engine, 9, False)
    cut.truncate(134)
    assert cut.gaps == [(130, 134)]
    exact.truncate(130)
    exact.append(TOKENS[320:324], "none", kernel_tokens=8)
    np.testing.assert_array_equal(cut.append([7], kernel_tokens=8), exact.append([7], kernel_tokens=8))
    cut.truncate(100)
    assert not cut.gaps


def test_after_a_failed_run_the_next_one_computes_the_gap_and_the_copies(opened, model_path):
    engine = opened(model_path("llama-Q8_0"))
    edited, alone = make_edit(engine, 9, False), engine.sequence()
    run = engine.backend.run

    def fail(*_):
        raise KeyboardInterrupt

    engine.backend.run = fail
    with pytest.raises(KeyboardInterrupt):
        edited.append([7])
    engine.backend.run = run
    alone.append(TOKENS[:130], "none")
    alone.append(edited.tokens[130:], "none")
    assert nmse(edited.append([7]), alone.append([7])) < 1e-6 and not edited.gaps


def test_a_sequence_with_a_gap_can_be_shifted(opened, model_path):
    engine = opened(model_path("llama-Q8_0"))
    edited, expected = make_edit(engine, 9, False), engine.sequence()
    edited.shift(0, 64)
    assert not edited.gaps and len(edited.tokens) == 165
    expected.append(TOKENS[:130], "none")
    expected.shift(0, 64)
    expected.append(edited.tokens[66:], "none")
    assert nmse(edited.append([7]), expected.append([7])) < 1e-6


def test_layers_with_windows_and_the_reference_have_no_gaps(opened, model_path):
    for engine in (opened(model_path("gemma3")), opened(model_path("llama-Q8_0"), backend="reference")):
        source, got = engine.sequence(), engine.sequence()
        source.append(TOKENS[:100], "none")
        got.append(TOKENS[:10], "none")
        assert not engine.append_copies(got, source, 20, 64, [1, 2])
        assert len(got.tokens) == 10 and not got.gaps and engine.append_copies(got, source, 20, 64)


def test_copying_is_refused_for_recurrent_models(opened, tmp_path):
    engine = opened(write_tiny_hybrid(tmp_path / "hybrid.gguf"))
    source, got = engine.sequence(), engine.sequence()
    source.append(TOKENS[:100], "none")
    assert not engine.can_shift
    with pytest.raises(UsageError, match="recurrent layers"):
        engine.append_copies(got, source, 10, 64)
