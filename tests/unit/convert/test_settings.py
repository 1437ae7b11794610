"""A checkpoint's settings besides its weights: sampling, settings that nobody knows, values of another kind."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint import write_checkpoint, write_json

from localllm.convert import open_folder
from tests.unit.convert.families.test_families import VARIANTS, written

ADVICE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05,
          "xtc_probability": 0.5, "xtc_threshold": 0.1, "penalty_last_n": 64, "mirostat": 2, "mirostat_tau": 5,
          "mirostat_eta": 0.1, "sequence": "top_k;temperature"}  # fmt: skip
KEYS = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.05, "xtc_probability": 0.5,
        "xtc_threshold": 0.1, "penalty_last_n": 64, "mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "sequence": "top_k;temperature"}  # fmt: skip
WHOLE = ("top_k", "penalty_last_n", "mirostat")


def converted(cli, folder: Path, *words: str) -> tuple[Path, str]:
    """Convert a folder with quantize; return the file, and the lines on stderr."""
    path = folder.parent / "made.gguf"
    code, _, err = cli("quantize", folder, path, "F32", "--force", *words)
    assert code == 0, err
    return path, err


def test_sampling_advice_is_converted_to_keys_and_defaults(tmp_path: Path, cli):
    """Write all of it in the types that llama.cpp reads, and use it as defaults of a run."""
    folder = write_checkpoint(tmp_path / "model")
    write_json(folder / "generation_config.json", ADVICE | {"do_sample": True, "eos_token_id": 2, "max_length": 99})
    path, err = converted(cli, folder)
    fields = gguf.GGUFReader(path).fields
    keys = {name.removeprefix("general.sampling."): field for name, field in fields.items() if ".sampling." in name}
    assert keys.keys() == KEYS.keys() and err == ""
    for name, field in keys.items():
        kind = "STRING" if name == "sequence" else "INT32" if name in WHOLE else "FLOAT32"
        assert field.types == [gguf.GGUFValueType[kind]], name
        assert field.contents() == (KEYS[name] if isinstance(KEYS[name], str) else pytest.approx(KEYS[name])), name
    facts = json.loads(cli("inspect", path, "--json")[1])
    assert facts["sampling"]["temperature"] == 0.6 and facts["sampling"]["top_k"] == 20


def test_sampling_takes_whole_numbers_and_both_names(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "model")
    write_json(folder / "generation_config.json", {"temperature": 1, "top_k": 40.0, "penalty_repeat": 1.2,
                                                   "repetition_penalty": 1.5, "min_p": None})  # fmt: skip
    metadata = open_folder(folder).metadata
    keys = {key: value for key, value in metadata.items() if ".sampling." in key}
    assert keys == {"general.sampling.temp": np.float32(1), "general.sampling.top_k": np.int32(40),
                     "general.sampling.penalty_repeat": np.float32(1.2)}  # fmt: skip
    assert type(keys["general.sampling.temp"]) is np.float32 and type(keys["general.sampling.top_k"]) is np.int32


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("temperature", "0.6", "a number (found 0.6)"), ("top_k", 2.5, "a whole number (found 2.5)"),
    ("top_p", [1], "a number"),
    ("min_p", True, "a number (found True)"), ("top_k", 1 << 40, "a whole number"), ("temperature", 1e300, "a number"),
])  # fmt: skip
def test_sampling_values_that_are_no_numbers_are_left_out(tmp_path: Path, name: str, value: Any, expected: str):
    folder = write_checkpoint(tmp_path / "model")
    write_json(folder / "generation_config.json", {name: value})
    opened = open_folder(folder)
    (warning,) = opened.warnings
    assert warning.startswith(f"generation_config.json: {name} must be {expected}") and warning.endswith(
        "; it is ignored"
    )
    assert not [key for key in opened.metadata if ".sampling." in key]


@pytest.mark.parametrize(("file", "settings", "unknown"), [
    ("config", {"frobnicate": 3}, ["frobnicate"]),
    ("config", {"attn_logit_softcapping": 50.0, "a": "b"}, ["attn_logit_softcapping", "a"]),
    ("config", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "odd_share": 0.5}}, ["rope_scaling.odd_share"]),
    ("config", {"residual_multiplier": 1.0, "frob": False, "frobs": [], "other": None, "more": 0}, []),
    ("config", {"torch_dtype": "bfloat16", "attention_dropout": 0.1, "transformers_version": "4.55", "use_cache": True,
                "pretraining_tp": 1, "_name_or_path": "x", "id2label": {"0": "A"}, "initializer_range": 0.02}, []),
    ("generation_config", {"typical_p": 0.9, "no_repeat_ngram_size": 3}, ["typical_p", "no_repeat_ngram_size"]),
    ("generation_config", {"typical_p": 1.0, "max_new_tokens": 99, "cache_implementation": "hybrid"}, []),
    ("tokenizer_config", {"adds_magic": True}, ["adds_magic"]),
    ("tokenizer_config", {"model_max_length": 10**30, "clean_up_tokenization_spaces": True, "padding_side": "left",
                          "tokenizer_class": "X", "legacy": True, "extra_special_tokens": {"a": "b"}}, []),
])  # fmt: skip
def test_unknown_settings_are_named(tmp_path: Path, file: str, settings: dict[str, Any], unknown: list[str]):
    folder = write_checkpoint(tmp_path / "model")
    path = folder / f"{file}.json"
    write_json(path, (json.loads(path.read_text()) if path.exists() else {}) | settings)
    expected = [f"{file}.json: ignored (unknown): {', '.join(unknown)}"] if unknown else []
    assert open_folder(folder).warnings == expected


def test_a_line_of_many_unknown_names_is_cut_short(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "model", {f"x{number}": 5 for number in range(20)})
    (warning,) = open_folder(folder).warnings
    assert warning == "config.json: ignored (unknown): x0, x1, x2, x3, x4, x5, x6, x7 and 12 more"


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_written_by_transformers_is_recognized(tmp_path: Path, variant: str):
    assert not [line for line in open_folder(written(tmp_path, variant)).warnings if "not known here" in line]


@pytest.mark.parametrize(("file", "settings", "expected"), [
    ("config", {"eos_token_id": "2"}, "config.json: eos_token_id is not a number: ignored"),
    ("config", {"pad_token_id": [0, True]}, "config.json: pad_token_id is not a number: ignored"),
    ("generation_config", {"bos_token_id": 1.5}, "generation_config.json: bos_token_id is not a number: ignored"),
    ("tokenizer_config", {"add_bos_token": "yes"}, "tokenizer_config.json: add_bos_token is yes: ignored"),
    ("tokenizer_config", {"chat_template": 5}, "tokenizer_config.json: chat_template is 5: ignored"),
    ("tokenizer_config", {"unk_token": 0}, "tokenizer_config.json: unk_token is 0: ignored"),
])  # fmt: skip
def test_settings_of_a_wrong_type_are_named_in_the_error(
    tmp_path: Path, file: str, settings: dict[str, Any], expected: str
):
    folder = write_checkpoint(tmp_path / "model")
    path = folder / f"{file}.json"
    write_json(path, (json.loads(path.read_text()) if path.exists() else {}) | settings)
    assert expected in open_folder(folder).warnings


def test_dynamic_scaling_is_refused_or_warned_of_by_name(tmp_path: Path, cli):
    for name in ("rope_scaling", "rope_parameters"):
        folder = write_checkpoint(tmp_path / name, {name: {"rope_type": "dynamic", "factor": 4.0}})
        code, _, err = cli("quantize", folder, tmp_path / "x.gguf", "F32")
        assert code == 3 and err.endswith("(found dynamic)\n")
    warnings = open_folder(written(tmp_path, "internlm3")).warnings
    assert any("rope scaling dynamic by 6.0 is ignored: beyond" in line for line in warnings)


def test_a_small_checkpoint_may_become_a_larger_file(tmp_path: Path, cli):
    """Most of the file is the vocabulary, which is no tensor; compare a GGUF file with its own size still."""
    folder = write_checkpoint(tmp_path / "model", dtype="F16")
    code, _, err = cli("quantize", folder, tmp_path / "large.gguf", "F32")
    assert (code, err) == (0, "")
    code, _, err = cli("quantize", tmp_path / "large.gguf", tmp_path / "small.gguf", "F16")
    assert code == 0
    code, _, err = cli("quantize", tmp_path / "small.gguf", tmp_path / "again.gguf", "F32")
    assert code == 2 and "would be larger than the old one" in err
