"""What else a config.json may say, value by value: it becomes what llama.cpp's converter makes of it, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint import edit_json, write_checkpoint
from config_changes import PATH, read, unlike, with_value
from test_convert_families import facts, told_or_refused, written

from localllm.convert import open_folder
from localllm.convert.families.qwen_next import in_turn

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
        assert found == "attn_layer_offset should be below attn_layer_period, 4"
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
    rows = in_turn({"value_heads": 6, "key_heads": 2}, 2, start=10)
    assert rows.tolist() == [10 + 2 * head + number for head in (0, 3, 1, 4, 2, 5) for number in (0, 1)]
