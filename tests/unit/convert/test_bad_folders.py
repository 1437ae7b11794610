"""Test that folders that are no checkpoint are refused in one line."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import added_token, edit_json, make_weights, write_checkpoint, write_safetensors

from localllm.convert import open_folder
from localllm.convert.files import report_as_model_error
from localllm.convert.tokens import is_splitless
from localllm.errors import ModelError
from tests.unit.convert.convert_parts import LLAMA3, YARN, all_rows, refused, scaled, splits, text


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **changes)


def weights_with(dtype: str = "F32", drop: str = "", **more: np.ndarray) -> Callable[[Path], None]:
    """Return a function that writes other weights: one left out, some added."""

    def write(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = [(name, dtype, array) for name, array in (make_weights(settings) | more).items() if name != drop]
        write_safetensors(folder / "model.safetensors", tensors)

    return write


CONFIG_FILE, TOKENIZER = "config.json", "tokenizer.json"


BAD_FOLDERS: list[tuple[str, Callable[[Path], None]]] = [
    ("must have a config.json", remove(CONFIG_FILE)),
    ("config.json: not valid JSON", text(CONFIG_FILE, "{")),
    ("config.json: not valid JSON", text(CONFIG_FILE, "[" * 100000)),
    ("expected a JSON object, found list", text(CONFIG_FILE, "[]")),
    ("architecture T5Model is not supported", edit(CONFIG_FILE, architectures=["T5Model"])),
    ('"architectures" must name', edit(CONFIG_FILE, architectures=7)),
    ('"architectures" must name', edit(CONFIG_FILE, architectures=[])),
    ("the weights are quantized (quip)", edit(CONFIG_FILE, quantization_config={"quant_method": "quip"})),
    ("hidden_act must be", edit(CONFIG_FILE, hidden_act="gelu")),
    ("hidden_size must be an integer", edit(CONFIG_FILE, hidden_size="64")),
    ("num_hidden_layers must be an integer", edit(CONFIG_FILE, num_hidden_layers=10**9)),
    ("vocab_size must be an integer", edit(CONFIG_FILE, vocab_size=None)),
    ("must be divisible by num_key_value_heads", edit(CONFIG_FILE, num_key_value_heads=3)),
    ("rms_norm_eps must be a positive number", edit(CONFIG_FILE, rms_norm_eps=float("nan"))),
    ("llama3 (found longrope", edit(CONFIG_FILE, **scaled("longrope"))),
    ("(found ['yarn']", edit(CONFIG_FILE, rope_scaling={"type": ["yarn"]})),
    ("beta_fast must be 32", edit(CONFIG_FILE, **scaled("yarn", beta_fast=64, **YARN))),
    ("factor must be a positive number", edit(CONFIG_FILE, **scaled("linear"))),
    ("high_freq_factor", edit(CONFIG_FILE, **scaled("llama3", **LLAMA3 | {"low_freq_factor": 4.0}))),
    ("model.safetensors is missing", remove("model.safetensors")),
    ("not a valid safetensors file", text("model.safetensors", "")),
    ("a Git LFS pointer", text("model.safetensors", "version https://git-lfs.github.com/spec/v1")),
    ("the tensor for blk.1.ffn_up.weight", weights_with(drop="model.layers.1.mlp.up_proj.weight")),
    ("the tensor for output.weight", weights_with(drop="lm_head.weight")),
    ("not part of the architecture llama", weights_with(**{"model.layers.0.mlp.gate.weight": np.zeros((2, 64))})),
    ("not part of the architecture llama", weights_with(**{"model.layers.2.mlp.up_proj.weight": np.zeros((96, 64))})),
    (
        "[96, 64] by config.json, found [96, 32]",
        weights_with(**{"model.layers.0.mlp.up_proj.weight": np.zeros((96, 32))}),
    ),
    ("[273, 64] by config.json, found [273]", weights_with(**{"lm_head.weight": np.zeros(273)})),
    ("(found U8", weights_with("U8")),
    ("(found I64", weights_with("I64")),
    ("must have a tokenizer.json or a tokenizer.model", remove(TOKENIZER)),
    ("tokenizer.json: not valid JSON", text(TOKENIZER, "\x00")),
    ("tokenizer.json: the file must be UTF-8", text(TOKENIZER, '"\ud800"')),
    ("BPE, WordPiece or Unigram (found WordLevel)", edit(TOKENIZER, model={"type": "WordLevel", "vocab": []})),
    ("BPE must be byte-level, or SentencePiece", edit(TOKENIZER, pre_tokenizer={"type": "Whitespace"})),
    ("pre-tokenizer must be one that", edit(TOKENIZER, pre_tokenizer=splits(r"\w+"))),
    ("normalizer NFKC is not supported", edit(TOKENIZER, normalizer={"type": "NFKC"})),
    ("unexpected content", edit(TOKENIZER, normalizer=[1])),
    ("unexpected content", edit(TOKENIZER, model=None)),
    ("unexpected content", edit(TOKENIZER, model={"type": "BPE", "vocab": {"a": "b"}, "merges": []})),
    ("unexpected content", edit(TOKENIZER, model={"type": "BPE", "vocab": {"a": -1}, "merges": []})),
    ("unexpected content", edit(TOKENIZER, added_tokens=[{"id": 1}])),
    ("unexpected content", edit(TOKENIZER, post_processor={"type": "TemplateProcessing", "single": []})),
    ("are both 'he'", edit(TOKENIZER, added_tokens=[added_token(5, "he")])),
    ("lone surrogate", edit(TOKENIZER, added_tokens=[added_token(5, "\ud800")])),
]


@pytest.mark.parametrize(("problem", "spoil"), BAD_FOLDERS, ids=[f"{n}: {p}" for n, (p, _) in enumerate(BAD_FOLDERS)])
def test_bad_folders_are_refused(tmp_path: Path, problem: str, spoil: Callable[[Path], None]):
    spoil(write_checkpoint(tmp_path))
    assert problem in refused(tmp_path)


def test_folders_without_config_or_safetensors_are_refused(tmp_path: Path):
    assert "must have a config.json" in refused(tmp_path)
    assert "must have a config.json" in refused(tmp_path / "missing")
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "pickles" in refused(tmp_path)


def test_missing_files_of_a_split_checkpoint_are_named(tmp_path: Path):
    write_checkpoint(tmp_path, files=3)
    second = tmp_path / "model-00002-of-00003.safetensors"
    data = second.read_bytes()
    second.unlink()
    assert "model-00002-of-00003.safetensors: this file is missing" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "model-00002-of-00003.safetensors: this file is missing" in refused(tmp_path)
    second.write_bytes(data)
    assert len(open_folder(tmp_path).tensors) == 21


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path):
    index = write_checkpoint(tmp_path, files=2) / "model.safetensors.index.json"
    good = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    edit_json(index, weight_map=good | {"more.weight": "model-00001-of-00002.safetensors"})
    assert "tensor more.weight is not in model-00001-of-00002.safetensors" in refused(tmp_path)
    for file in ("../model.safetensors", "/etc/passwd", "a\\b.safetensors", 3, "x\x00.safetensors"):
        edit_json(index, weight_map=good | {"more.weight": file})
        assert "expected the name of a safetensors file" in refused(tmp_path)
    edit_json(index, weight_map=[])
    assert "must have a weight_map" in refused(tmp_path)
    index.unlink()
    both = tmp_path / "model-00002-of-00002.safetensors"
    both.write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    assert "is also in model-00001-of-00002.safetensors" in refused(tmp_path)


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(offsets=(0, 8))},
        {"a": entry(offsets=(4, 0))},
        {"a": entry(offsets=(-4, 0))},
        {"a": entry(offsets=(0, 4)), "b": entry(offsets=(0, 4))},
        {"a": entry(offsets=(0, 1 << 63))},
        {"a": entry(shape=(1 << 62, 1 << 62, 16))},
        {"a": entry(shape=(-1,))},
        {"a": entry(shape="1")},
        {"a": entry(dtype=7)},
        {"a": entry(dtype="F\n")},
        {"a": 1},
        {"a": {"b": {}}},
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, header: dict[str, Any]):
    write_checkpoint(tmp_path)
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(4))
    assert "safetensors" in refused(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 30, 1 << 63, (1 << 64) - 1])
def test_hostile_lengths_are_refused(tmp_path: Path, length: int):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{" * 100)
    assert "not a valid safetensors file" in refused(tmp_path)


def test_a_truncated_safetensors_file_is_refused(tmp_path: Path):
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    checkpoint = open_folder(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match="truncated"):
        all_rows(next(tensor for tensor in checkpoint.tensors if tensor.name == "output.weight"))
    assert "not a valid safetensors file" in refused(tmp_path)


@pytest.mark.parametrize(
    ("error", "message"), [(KeyError("vocab"), "no 'vocab'"), (TypeError("vocab"), "vocab"), (IndexError("far"), "far")]
)
def test_read_errors_contain_the_path_of_the_file(error: Exception, message: str):
    with (
        pytest.raises(ModelError, match=f"^x.json: has unexpected content: {message}$"),
        report_as_model_error(Path("x.json")),
    ):
        raise error


@pytest.mark.parametrize(
    ("part", "normalizer", "nothing"),
    [
        ({"type": "Metaspace", "split": False}, {}, True),
        ({"type": "Metaspace", "split": True}, {}, False),
        ({"type": "Metaspace"}, {}, False),
        ({"type": "Digits", "split": False}, {}, False),
        ({"type": "Split", "pattern": {"String": " "}}, {"type": "Replace"}, True),
        ({"type": "Split", "pattern": {"String": " "}}, {"type": "NFC"}, False),
        ({"type": "Split", "pattern": {"String": "x"}}, {"type": "Replace"}, False),
    ],
)
def test_pretokenizer_steps_that_split_nothing_are_recognized(part: Any, normalizer: Any, nothing: bool):
    assert is_splitless(part, {"normalizer": normalizer}) is nothing
