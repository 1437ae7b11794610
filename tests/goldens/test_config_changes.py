"""What else a config.json may say, value by value: it becomes what llama.cpp's converter makes of it, or is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import edit_json, write_checkpoint
from config_changes import PATH, read, unlike, with_value

from localllm.convert import open_folder
from localllm.convert.config import Config
from localllm.convert.families.bert import labels
from localllm.convert.families.gemma import deviations
from localllm.convert.families.llama import add_mask_token, mask_token
from localllm.convert.families.qwen import interleave_heads
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.records import family_of
from localllm.convert.sentence_transformers import warn_unconverted
from localllm.errors import ModelError
from tests.unit.convert.families.test_families import facts, told_or_refused, written

CHANGES = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("variant", CHANGES)
def test_what_a_value_changes(variant: str):
    config = facts(variant)["config"]
    usual = read(config)
    assert isinstance(usual, dict), usual
    for place, cases in CHANGES[variant].items():
        for value, expected in cases:
            found = read(with_value(config, place, value))
            if isinstance(expected, str) or isinstance(found, str):
                assert found == expected, f"{place} = {value}"
            else:
                assert not unlike(found, {**usual, **expected}), f"{place} = {value}"


@pytest.mark.parametrize("variant", CHANGES)
def test_no_value_is_a_traceback(variant: str):
    """Of a kind that nobody has thought of: it is refused, or as good as any other."""
    config = facts(variant)["config"]
    for place in CHANGES[variant]:
        for odd in ([], {}, "x", -1, [None]):
            assert read(with_value(config, place, odd)), f"{place} = {odd}"


@pytest.mark.parametrize("offset", range(-1, 5))
def test_which_layers_of_jamba_attend(offset: int):
    """Every fourth, from the one with this number on."""
    found = read(facts("jamba")["config"] | {"attn_layer_offset": offset, "num_hidden_layers": 5})
    if not 0 <= offset <= 3:
        assert found == "attn_layer_offset must be below attn_layer_period, 4"
    else:
        expected = [2 if number % 4 == offset else 0 for number in range(5)]
        assert isinstance(found, dict) and found["attention.head_count_kv"] == expected


@pytest.mark.parametrize("of_layers", [None, {"1": 3}, {"1": {"head_dim": None}}])
def test_heads_of_gemma_4_that_see_all(of_layers: Any):
    """512 numbers each, if neither of the two ways to say it is taken: transformers' default."""
    found = read(with_value(facts("gemma4")["config"] | {"global_head_dim": None}, "per_layer_config", of_layers))
    assert isinstance(found, dict) and found["attention.key_length"] == 512


@pytest.mark.parametrize("variant", ["t5encoder", "bert", "nomic-bert", "jina-bert", "modern-bert", "eurobert"])
def test_what_makes_vectors_has_no_output_matrix(tmp_path: Path, variant: str):
    """Whatever config.json says of one, as that of the model that an encoder was taken from does."""
    folder = written(tmp_path, variant)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    tied = told_or_refused(folder)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert told_or_refused(folder) == tied and not isinstance(tied, str)


def test_what_belongs_to_a_checkpoint(tmp_path: Path):
    """Its files, but for folders and what was made of it."""
    folder = write_checkpoint(tmp_path / "model")
    expected = sorted(str(path) for path in folder.iterdir())
    (folder / "onnx").mkdir()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"")
    assert open_folder(folder).files == expected


def test_value_heads_of_qwen_next_in_turn():
    """Of two keys with three value heads each, of two numbers: the first of each key, the second of each, the third."""
    rows = interleave_heads({"value_heads": 6, "key_heads": 2}, 2, start=10)
    assert rows.tolist() == [10 + 2 * head + number for head in (0, 3, 1, 4, 2, 5) for number in (0, 1)]


@pytest.mark.parametrize(("variant", "changes", "expected"), [
    ("granitehybrid", {"layer_types": ["attention"] * 3},
     "at least one layer must be a Mamba 2 layer in this architecture"),
    ("granitehybrid", {"layer_types": ["attention"] * 2}, "layer_types must be mamba, attention, linear_attention, "),
    ("granitehybrid", {"layer_types": ["attention", "mamba", "x"]}, "layer_types must be mamba, attention, linear_a"),
    ("mellum", {"use_sliding_window": False}, "layer_types ["),
    ("mellum", {"use_sliding_window": False, "layer_types": ["full_attention"] * 4}, None),
    ("mellum", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, None),
    ("gemma4", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 1.5}}},
     "partial_rotary_factor 1.5 is not supported"),
    ("gemma4", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 1.0}}}, None),
    ("deepseek2", {"scoring_func": "tanh"}, "scoring_func tanh is not supported"),
])  # fmt: skip
def test_values_that_go_together(variant: str, changes: dict[str, Any], expected: str | None):
    config = {**facts(variant)["config"], **changes}
    found = read({name: value for name, value in config.items() if value is not None})
    assert isinstance(found, dict) if expected is None else str(found).startswith(expected), found


def test_mellum_without_windows_says_nothing_of_any():
    windows = read(facts("mellum")["config"])
    plain = read(facts("mellum")["config"] | {"use_sliding_window": False, "layer_types": ["full_attention"] * 4})
    assert isinstance(windows, dict) and isinstance(plain, dict)
    assert {*windows} - {*plain} >= {"attention.sliding_window"} and not [key for key in plain if "sliding" in key]


@pytest.mark.parametrize(("method", "warned"), [("group_limited_greedy", True), ("greedy", False)])
def test_groups_of_experts_are_chosen_otherwise(method: str, warned: bool):
    config = Config(facts("deepseek2")["config"] | {"topk_method": method, "n_group": 2, "topk_group": 1}, Path("c"))
    family_of(config).read(config)
    said = "GGUF's readers rank expert groups by their two best experts, but the model by the best one"
    assert (said in config.warnings) is warned


@pytest.mark.parametrize(("named", "count", "found"), [
    ({"0": "no", "10": "yes", "2": "maybe"}, None, ["no", "maybe", "yes"]), (None, None, ["LABEL_0", "LABEL_1"]),
    ({"a": "b"}, 3, ["LABEL_0", "LABEL_1", "LABEL_2"]), ([], 1, ["LABEL_0"]), ({"0": 7}, 4, ["7"]),
])  # fmt: skip
def test_what_scores_are_called(named: Any, count: int | None, found: list[str]):
    said = {"id2label": named, "num_labels": count}
    assert labels(Config({name: value for name, value in said.items() if value is not None}, Path("c"))) == found


@pytest.mark.parametrize(("said", "usual", "found"), [(None, 0, {}), (7, 0, {"tokenizer.ggml.mask_token_id": 7}),
                                                      (None, 9, {"tokenizer.ggml.mask_token_id": 9})])  # fmt: skip
def test_what_stands_for_masked_places(said: int | None, usual: int, found: dict[str, int]):
    h = add_mask_token(Config({"mask_token_id": said}, Path("c")), CheckpointFacts({}, {}, {}, False), usual)
    assert mask_token({}, h) == found and h.metadata == {"attention.causal": False}


def test_modules_that_nothing_is_made_of(tmp_path: Path):
    assert warn_unconverted(tmp_path) == []
    kinds = ["a.Transformer", "a.Pooling", "LayerNorm", "b.Normalize", "c.d.Dense", "x.Odd"]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind, "path": ""} for kind in kinds]))
    said = "the module {} of modules.json is ignored"
    assert warn_unconverted(tmp_path) == [said.format("LayerNorm"), said.format("Odd")]
    for place in ("/x", "a/../b"):
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": place}]))
        with pytest.raises(ModelError, match="the folder of a module must be relative"):
            warn_unconverted(tmp_path)


@pytest.mark.parametrize(("said", "found"), [
    (None, None), (0.0, [-np.inf] * 3), (0.5, [0.0] * 3), ([0.5, 0, 0.975], [0.0, -np.inf, 1.959964]),
    ([0.5, 0.5], ""), ([0.5, 0.5, 1], ""), ([0.5, -0.1, 0], ""), (1.0, ""), ("x", ""), ([True, 0, 0], ""),
])  # fmt: skip
def test_how_far_gates_of_gemma_3n_are_cut(said: Any, found: Any):
    config = Config({"activation_sparsity_pattern": said}, Path("c"))
    if found == "":
        with pytest.raises(ModelError, match="activation_sparsity_pattern must have 3 values from 0 to 1"):
            deviations(config, 3)
    else:
        assert deviations(config, 3) == (found and pytest.approx(found))
