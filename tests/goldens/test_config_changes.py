"""Other values in a config.json: each becomes what llama.cpp's converter makes of it, or is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import edit_json, write_checkpoint
from config_changes import PATH, read, unlike, with_value

from localllm.convert import open_folder
from localllm.convert.config import CheckpointConfig
from localllm.convert.families.bert import read_labels
from localllm.convert.families.gemma import compute_deviations
from localllm.convert.families.llama import add_mask_token, mask_token
from localllm.convert.families.qwen import interleave_heads
from localllm.convert.hyperparameters import CheckpointHyperparameters
from localllm.convert.records import find_family
from localllm.convert.sentence_transformers import warn_unconverted
from localllm.errors import ModelError
from tests.unit.convert.families.test_families import facts, told_or_refused, written

CHANGES = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("variant", CHANGES)
def test_a_changed_value_has_the_recorded_effect(variant: str):
    config = facts(variant)["config"]
    usual = read(config)
    assert isinstance(usual, dict), usual
    for place, cases in CHANGES[variant].items():
        for value, expected in cases:
            read_values = read(with_value(config, place, value))
            if isinstance(expected, str) or isinstance(read_values, str):
                assert read_values == expected, f"{place} = {value}"
            else:
                assert not unlike(read_values, {**usual, **expected}), f"{place} = {value}"


@pytest.mark.parametrize("variant", CHANGES)
def test_a_config_value_of_any_type_is_read_or_refused(variant: str):
    """Put in kinds of values that nobody has thought of."""
    config = facts(variant)["config"]
    for place in CHANGES[variant]:
        for odd in ([], {}, "x", -1, [None]):
            assert read(with_value(config, place, odd)), f"{place} = {odd}"


@pytest.mark.parametrize("offset", range(-1, 5))
def test_jamba_attends_in_layers_by_its_offset(offset: int):
    """Expect every fourth layer, from the one with this number on."""
    values = read(facts("jamba")["config"] | {"attn_layer_offset": offset, "num_hidden_layers": 5})
    if not 0 <= offset <= 3:
        assert values == "attn_layer_offset must be below attn_layer_period, 4"
    else:
        expected = [2 if number % 4 == offset else 0 for number in range(5)]
        assert isinstance(values, dict) and values["attention.head_count_kv"] == expected


@pytest.mark.parametrize("of_layers", [None, {"1": 3}, {"1": {"head_dim": None}}])
def test_gemma_4_heads_default_to_512_numbers(of_layers: Any):
    """Expect transformers' default where neither of the two ways to say it is taken."""
    values = read(with_value(facts("gemma4")["config"] | {"global_head_dim": None}, "per_layer_config", of_layers))
    assert isinstance(values, dict) and values["attention.key_length"] == 512


@pytest.mark.parametrize("variant", ["t5encoder", "bert", "nomic-bert", "jina-bert", "modern-bert", "eurobert"])
def test_an_encoder_never_has_an_output_matrix(tmp_path: Path, variant: str):
    """Ignore config.json, which is often that of the model that the encoder was taken from."""
    folder = written(tmp_path, variant)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    tied = told_or_refused(folder)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert told_or_refused(folder) == tied and not isinstance(tied, str)


def test_checkpoint_files_leave_out_folders_and_gguf_files(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "model")
    expected = sorted(str(path) for path in folder.iterdir())
    (folder / "onnx").mkdir()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"")
    assert open_folder(folder).files == expected


def test_value_heads_of_qwen_next_are_interleaved():
    """Take two keys with three value heads of two numbers: the first of each key, the second of each, the third."""
    rows = interleave_heads({"value_heads": 6, "key_heads": 2}, 2, start=10)
    assert rows.tolist() == [10 + 2 * head + number for head in (0, 3, 1, 4, 2, 5) for number in (0, 1)]


@pytest.mark.parametrize(("variant", "changes", "expected"), [
    ("granitehybrid", {"layer_types": ["attention"] * 3},
     "at least one layer must be a Mamba 2 layer in this architecture"),
    ("granitehybrid", {"layer_types": ["attention"] * 2}, "layer_types must be mamba, attention, linear_attention, "),
    ("granitehybrid", {"layer_types": ["attention", "mamba", "x"]}, "layer_types must be mamba, attention, linear_a"),
    ("mellum", {"use_sliding_window": False}, "layer_types must be "),
    ("mellum", {"use_sliding_window": False, "layer_types": ["full_attention"] * 4}, None),
    ("mellum", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, None),
    ("gemma4", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 1.5}}},
     "partial_rotary_factor must be at most 1 (found 1.5"),
    ("gemma4", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 1.0}}}, None),
    ("deepseek2", {"scoring_func": "tanh"}, "scoring_func must be "),
])  # fmt: skip
def test_values_that_contradict_each_other_are_refused(variant: str, changes: dict[str, Any], expected: str | None):
    config = {**facts(variant)["config"], **changes}
    values = read({name: value for name, value in config.items() if value is not None})
    assert isinstance(values, dict) if expected is None else str(values).startswith(expected), values


def test_mellum_without_windows_writes_none():
    windows = read(facts("mellum")["config"])
    plain = read(facts("mellum")["config"] | {"use_sliding_window": False, "layer_types": ["full_attention"] * 4})
    assert isinstance(windows, dict) and isinstance(plain, dict)
    assert {*windows} - {*plain} >= {"attention.sliding_window"} and not [key for key in plain if "sliding" in key]


@pytest.mark.parametrize(("method", "warned"), [("group_limited_greedy", True), ("greedy", False)])
def test_choosing_expert_groups_otherwise_is_warned_of(method: str, warned: bool):
    config = CheckpointConfig(
        facts("deepseek2")["config"] | {"topk_method": method, "n_group": 2, "topk_group": 1}, Path("c")
    )
    find_family(config).read(config)
    warning = "GGUF's readers rank expert groups by their two best experts, but the model by the best one"
    assert (warning in config.warnings) is warned


@pytest.mark.parametrize(("named", "count", "expected"), [
    ({"0": "no", "10": "yes", "2": "maybe"}, None, ["no", "maybe", "yes"]), (None, None, ["LABEL_0", "LABEL_1"]),
    ({"a": "b"}, 3, ["LABEL_0", "LABEL_1", "LABEL_2"]), ([], 1, ["LABEL_0"]), ({"0": 7}, 4, ["7"]),
])  # fmt: skip
def test_labels_of_scores_are_read_or_numbered(named: Any, count: int | None, expected: list[str]):
    settings = {"id2label": named, "num_labels": count}
    assert (
        read_labels(CheckpointConfig({name: value for name, value in settings.items() if value is not None}, Path("c")))
        == expected
    )


@pytest.mark.parametrize(("token", "usual", "expected"), [(None, 0, {}), (7, 0, {"tokenizer.ggml.mask_token_id": 7}),
                                                      (None, 9, {"tokenizer.ggml.mask_token_id": 9})])  # fmt: skip
def test_the_mask_token_is_the_configured_or_the_usual_one(token: int | None, usual: int, expected: dict[str, int]):
    h = add_mask_token(
        CheckpointConfig({"mask_token_id": token}, Path("c")), CheckpointHyperparameters({}, {}, {}, False), usual
    )
    assert mask_token({}, h) == expected and h.metadata == {"attention.causal": False}


def test_unconverted_modules_are_warned_of(tmp_path: Path):
    assert warn_unconverted(tmp_path) == []
    kinds = ["a.Transformer", "a.Pooling", "LayerNorm", "b.Normalize", "c.d.Dense", "x.Odd"]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind, "path": ""} for kind in kinds]))
    warning = "the module {} of modules.json is ignored"
    assert warn_unconverted(tmp_path) == [warning.format("LayerNorm"), warning.format("Odd")]
    for place in ("/x", "a/../b"):
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": place}]))
        with pytest.raises(ModelError, match="the folder of a module must be relative"):
            warn_unconverted(tmp_path)


@pytest.mark.parametrize(("shares", "expected"), [
    (None, None), (0.0, [-np.inf] * 3), (0.5, [0.0] * 3), ([0.5, 0, 0.975], [0.0, -np.inf, 1.959964]),
    ([0.5, 0.5], ""), ([0.5, 0.5, 1], ""), ([0.5, -0.1, 0], ""), (1.0, ""), ("x", ""), ([True, 0, 0], ""),
])  # fmt: skip
def test_gates_of_gemma_3n_are_cut_at_the_given_share(shares: Any, expected: Any):
    config = CheckpointConfig({"activation_sparsity_pattern": shares}, Path("c"))
    if expected == "":
        with pytest.raises(ModelError, match="activation_sparsity_pattern must have 3 values from 0 to 1"):
            compute_deviations(config, 3)
    else:
        assert compute_deviations(config, 3) == (expected and pytest.approx(expected))
