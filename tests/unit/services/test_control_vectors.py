"""Control vectors made from prompts: directions against NumPy, and the files that --control-vector reads."""

import json

import numpy as np
import pytest
from models import write_model

from localllm.arch import load_architecture
from localllm.arch.layer_state import KVType
from localllm.arch.weights import Weights
from localllm.engine.adapter_file import read_control_vector
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.engine.options import EngineOptions
from localllm.errors import ContextError, ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.reference import ReferenceCache
from localllm.services.control_vectors import (
    StateReader,
    compute_directions,
    read_prompts,
    require_pairs,
    write_control_vector,
)

PROMPTS = ["the cat sat on the mat", "a", "two words " * 40]


def reference_states(path, ids: list[int]) -> np.ndarray:
    """Return the outputs of all layers for the last token in NumPy, float32 [layers, width]."""
    file = GGUFFile.open(path)
    family, h = load_architecture(file)
    builder = ReferenceBuilder([SequenceSpan(ReferenceCache(KVType.parse("f32")), 0, np.array(ids), 1)], {}, h.context)
    builder.layer_inputs = dict.fromkeys(range(1, h.layers + 1))
    family.forward(builder, Weights(file.tensors), h)
    return np.stack([builder.layer_inputs[layer][-1] for layer in range(1, h.layers + 1)])


@pytest.mark.parametrize("family", ["llama", "qwen3moe", "mamba2", "gemma3", "qwen35"])
def test_states_are_the_outputs_of_the_layers_after_the_last_token(family, tmp_path):
    path = write_model(family, tmp_path / "model.gguf")
    with StateReader(path, EngineOptions(2, kv_type="f32")) as reader:
        encoded = [reader.encode(prompt) for prompt in PROMPTS]
        states = [*reader.read(PROMPTS)]
        assert reader.arch == GGUFFile.open(path).metadata["general.architecture"]
    for ids, outputs in zip(encoded, states, strict=True):
        expected = reference_states(path, ids)[1:]
        assert outputs.shape == expected.shape and np.abs(outputs - expected).max() < 0.02 * np.abs(expected).max()


def test_a_prompt_longer_than_a_run_shows_its_last_token(tmp_path):
    path = write_model("llama", tmp_path / "model.gguf")
    with StateReader(path, EngineOptions(2, 2000, "f32")) as reader:
        text = "hidden states " * 100
        ids = reader.encode(text)
        assert 512 < len(ids) <= 2000
        (outputs,) = reader.read([text])
    expected = reference_states(path, ids)[1:]
    assert np.abs(outputs - expected).max() < 0.02 * np.abs(expected).max()


def test_a_vector_moves_the_output_of_the_layer_that_it_was_made_from(tmp_path):
    path = write_model("llama", tmp_path / "model.gguf")
    rng = np.random.default_rng(1)
    options = EngineOptions(2, kv_type="f32")
    with StateReader(path, options) as reader:
        (before,) = reader.read(["a"])
    directions = rng.standard_normal(before.shape).astype(np.float32)
    write_control_vector(tmp_path / "v.gguf", "llama", directions)
    vectors = ((str(tmp_path / "v.gguf"), 0.5),)
    changed = EngineOptions(2, kv_type="f32", control_vectors=vectors, control_layers=(1, 1))
    with StateReader(path, changed) as reader:
        (after,) = reader.read(["a"])
    np.testing.assert_allclose(after[0], before[0] + 0.5 * directions[0], atol=1e-5)


# ---- directions


def random_states() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    positive, negative = rng.standard_normal((2, 7, 3, 24)).astype(np.float32)
    return positive + np.float32(0.8) * rng.standard_normal((3, 24)).astype(np.float32), negative


def test_mean_is_the_difference_of_the_means():
    positive, negative = random_states()
    directions = compute_directions(positive, negative, "mean")
    expected = [positive[:, layer].mean(axis=0) - negative[:, layer].mean(axis=0) for layer in range(3)]
    np.testing.assert_allclose(directions, expected, atol=1e-5)
    assert directions.dtype == np.float32


def test_pca_is_the_eigenvector_of_the_largest_eigenvalue():
    positive, negative = random_states()
    for flipped in (1, -1):
        first, second = (positive, negative)[::flipped]
        directions = compute_directions(first, second, "pca")
        for layer, direction in enumerate(directions):
            differences = flipped * (positive - negative)[:, layer].astype(np.float64)
            largest = np.linalg.eigh(differences.T @ differences)[1][:, -1]
            length = np.linalg.norm(direction)
            assert abs(direction @ largest) / length == pytest.approx(1, abs=1e-6)
            assert (differences @ direction).mean() / length == pytest.approx(length, rel=1e-5)


def test_states_that_do_not_differ_are_refused():
    positive, _ = random_states()
    for method in ("mean", "pca"):
        with pytest.raises(UsageError, match="the positive and the negative prompts must differ"):
            compute_directions(positive, positive, method)


def test_the_file_has_llama_cpps_keys_and_is_read_again(tmp_path):
    directions = np.random.default_rng(0).standard_normal((3, 24)).astype(np.float32)
    assert write_control_vector(tmp_path / "v.gguf", "llama", directions) == directions.nbytes
    with GGUFFile.open(tmp_path / "v.gguf", needed=()) as file:
        assert {key: file.metadata[key] for key in file.metadata} == {
            "general.architecture": "controlvector", "controlvector.model_hint": "llama",
            "controlvector.layer_count": 3,
        }  # fmt: skip
    read = read_control_vector(tmp_path / "v.gguf", 24, 4)
    assert [*read] == [1, 2, 3]
    np.testing.assert_array_equal(np.stack([*read.values()]), directions)


# ---- prompts


def test_prompts_are_lines_or_json_lines():
    assert read_prompts(b"one\n\ntwo <|im_end|>\n", "a.txt") == ["one", "two <|im_end|>"]
    messages = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "a\nb"}, {"messages": messages}]
    assert read_prompts("".join(f"{json.dumps(line)}\n" for line in lines).encode(), "a.jsonl") == ["a\nb", messages]


@pytest.mark.parametrize(("data", "message"), [
    (b"\n", "a.jsonl: the file contains no prompts"),
    (b'{"text": "a"}\n', 'a.jsonl: record 1 must have a "prompt" or "messages"'),
    (b"{\n", "a.jsonl: line 1 is not JSON"),
])  # fmt: skip
def test_wrong_prompts_are_refused(data, message):
    with pytest.raises(UsageError, match=message):
        read_prompts(data, "a.jsonl")


def test_unequal_numbers_of_prompts_are_refused():
    with pytest.raises(UsageError, match=r"same number of prompts \(found 2 and 1\)"):
        require_pairs(["a", "b"], ["c"])


def test_models_without_such_layers_are_refused(tmp_path):
    for family in ("t5", "bert"):
        path = write_model(family, tmp_path / f"{family}.gguf")
        with pytest.raises(ModelError, match=f"not supported for {family} models"):
            StateReader(path, EngineOptions(1))


def test_an_architecture_that_does_not_export_its_layers_is_refused(tmp_path):
    path = write_model("deepseek4", tmp_path / "model.gguf")
    with pytest.raises(UnsupportedError, match="hidden states of deepseek4 models cannot be read"):
        StateReader(path, EngineOptions(1))


def test_a_prompt_longer_than_the_context_is_refused(tmp_path):
    path = write_model("llama", tmp_path / "model.gguf")
    with StateReader(path, EngineOptions(1, 2)) as reader, pytest.raises(ContextError):
        next(reader.read(["a longer prompt"]))
