"""Test hooks between layers: what they see and change, against the reference and against plain runs."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from models import write_model

from localllm.api import open_with_options
from localllm.engine.hooks import LayerHook
from localllm.engine.options import EngineOptions
from localllm.errors import UnsupportedError, UsageError

FAMILIES = ["llama", "qwen3moe", "mamba2", "gemma3", "qwen35"]
LONG = [(7 * number) % 60 for number in range(700)]  # two runs


def run(path: str, hook: LayerHook | None, ids: list[int], backend: str = "cpu") -> np.ndarray:
    """Return the logits after each token of a prompt and of one decode step."""
    options = EngineOptions(2, 1024, "f32", backend=backend)
    with open_with_options(path, options, cache=False) as model, closing(model.engine.sequence(hook)) as sequence:
        return np.concatenate((sequence.append(ids, "all"), sequence.append([1], "all")))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_that_changes_nothing_changes_no_bit(family: str, tmp_path: Path):
    path = str(write_model(family, tmp_path / "model.gguf"))
    hook = LayerHook(frozenset(range(2)), lambda states, layer, position: None)
    assert (run(path, hook, LONG) == run(path, None, LONG)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_steered_model_equals_the_reference(family: str, tmp_path: Path):
    path = str(write_model(family, tmp_path / "model.gguf"))

    def steer(states: np.ndarray, layer: int, position: int) -> np.ndarray:
        return states * 0.5 + np.arange(position, position + len(states))[:, None] * 0.01

    hook, ids = LayerHook(frozenset([1]), steer), LONG[:90]
    ours, reference, plain = run(path, hook, ids), run(path, hook, ids, "reference"), run(path, None, ids)
    scale = np.abs(reference).max()
    assert np.abs(ours - reference).max() < 0.02 * scale < np.abs(plain - reference).max() * 2


def test_a_hook_sees_each_token_once_with_its_position(tmp_path: Path):
    seen = list[tuple[int, int, int]]()
    hook = LayerHook(frozenset([0, 1]), lambda states, layer, position: seen.append((layer, position, len(states))))
    run(str(write_model("llama", tmp_path / "model.gguf")), hook, LONG)
    for layer in (0, 1):
        rows = [(position, count) for at, position, count in seen if at == layer]
        assert [position for position, _ in rows] == [*np.cumsum([0, *(count for _, count in rows)])][:-1]
        assert sum(count for _, count in rows) == len(LONG) + 1


def test_sequences_in_one_run_have_their_own_hooks(tmp_path: Path):
    path = str(write_model("llama", tmp_path / "model.gguf"))

    def make_hook(factor: float) -> LayerHook:
        return LayerHook(frozenset([1]), lambda states, layer, position: states * np.float32(factor))

    with open_with_options(path, EngineOptions(2, 512, "f32"), cache=False) as model:
        hooks = make_hook(2.0), None, make_hook(0.5)
        sequences = [model.engine.sequence(hook) for hook in hooks]
        together = model.step([(sequence, [3, 4, 5]) for sequence in sequences])
        alone = [model.engine.sequence(hook).append([3, 4, 5]) for hook in hooks]
        assert sequences[0].fork().hook is hooks[0]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.abs(together[0] - together[1]).max() > 0 < np.abs(together[2] - together[1]).max()


def test_a_failing_hook_leaves_the_sequence_usable(tmp_path: Path):
    path = str(write_model("llama", tmp_path / "model.gguf"))

    def fail(states: np.ndarray, layer: int, position: int) -> None:
        if not failed:
            failed.append(True)
            raise RuntimeError("no")

    failed = list[bool]()
    with open_with_options(path, EngineOptions(2, 512, "f32"), cache=False) as model:
        sequence = model.engine.sequence(LayerHook(frozenset([1]), fail))
        with pytest.raises(RuntimeError, match="no"):
            sequence.append([3, 4, 5])
        expected = model.sequence().append([3, 4, 5])
        np.testing.assert_array_equal(sequence.append([3, 4, 5]), expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_hook_that_uses_its_model_is_refused_and_other_threads_wait(backend: str, tmp_path: Path):
    path = str(write_model("llama", tmp_path / "model.gguf"))
    waiting: list[Future[np.ndarray]] = []

    def use_the_model(states: np.ndarray, layer: int, position: int) -> None:
        waiting.append(pool.submit(other.append, [3, 4, 5]))
        model.sequence().append([1])

    options = EngineOptions(2, 512, "f32", backend)
    with open_with_options(path, options, cache=False) as model, ThreadPoolExecutor(1) as pool:
        other = model.sequence()
        sequence = model.engine.sequence(LayerHook(frozenset([1]), use_the_model))
        with pytest.raises(UsageError, match="a hook must not use the model that calls it"):
            sequence.append([3, 4, 5])
        np.testing.assert_array_equal(waiting[0].result(60), model.sequence().append([3, 4, 5]))


@pytest.mark.parametrize("wrong", [lambda states: states[:1], lambda states: states.astype(str), lambda states: "x"])
def test_a_result_of_another_shape_is_refused(wrong, tmp_path: Path):
    path = str(write_model("llama", tmp_path / "model.gguf"))
    hook = LayerHook(frozenset([1]), lambda states, layer, position: wrong(states))
    with pytest.raises(UsageError, match=r"the hook of layer 1 must return floats of the shape \[90, "):
        run(path, hook, LONG[:90])


def test_layers_that_do_not_exist_are_refused(tmp_path: Path):
    path = str(write_model("llama", tmp_path / "model.gguf"))
    with open_with_options(path, EngineOptions(1), cache=False) as model:
        count = model.engine.hyperparameters.layers
        with pytest.raises(UsageError, match=f"layers must be from 0 to {count}, .* not {count + 1}"):
            model.engine.sequence(LayerHook(frozenset([count + 1]), lambda *_: None))
        with pytest.raises(UsageError, match=f"must be from 0 to {count - 1}, not {count}"):
            model.engine.sequence(LayerHook(attention_layer=count))


@pytest.mark.parametrize(("family", "layer"), [("t5", None), ("deepseek4", None), ("mamba2", 0)])
def test_models_without_such_states_are_refused(family: str, layer: int | None, tmp_path: Path):
    path = str(write_model(family, tmp_path / "model.gguf"))
    hook = LayerHook(frozenset([] if layer == 0 else [1]), lambda *_: None, layer)
    wrong = pytest.raises(UnsupportedError, match=r"cannot be read|no attention weights")
    with open_with_options(path, EngineOptions(1), cache=False) as model, wrong:
        model.engine.sequence(hook)
