"""Folders that are odd, from the command line: each is converted, or told in one line what to do."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint import CONFIG, edit_json, make_weights, write_checkpoint, write_json, write_safetensors

from localllm.files.gguf.file import GGUFFile


def with_tensors(folder: Path, left_out: str = "", **more: np.ndarray) -> None:
    """Write the weights again, one of them left out, others (in whose names "__" is a dot) added."""
    weights = {name: array for name, array in make_weights(CONFIG).items() if name != left_out}
    weights |= {name.replace("__", "."): array for name, array in more.items()}
    write_safetensors(folder / "model.safetensors", [(name, "F32", array) for name, array in weights.items()])


def untied(folder: Path) -> None:
    with_tensors(folder, "lm_head.weight")


def renamed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (untied, "tensor for output.weight of the architecture llama is missing; if it is the embedding (lm_head is "
                 "tied), set tie_word_embeddings to true in config.json"),
        (renamed, "model.safetensors is missing; if model.fp16.safetensors has the weights, rename it"),
        (lambda folder: edit_json(folder / "config.json", num_hidden_layers="2"),
         'num_hidden_layers must be an integer from 1 to 4096 (found "2")'),
        (lambda folder: edit_json(folder / "config.json", rope_theta="1e4"),
         'rope_theta must be a positive number (found "1e4")'),
    ],
)  # fmt: skip
def test_an_odd_folder_is_refused_in_one_line(tmp_path: Path, cli, spoil: Callable[[Path], None], expected: str):
    folder = write_checkpoint(tmp_path / "c")
    spoil(folder)
    code, out, err = cli("quantize", folder, tmp_path / "out.gguf", "F16")
    assert code == 3 and not out and err.endswith(f"{expected}\n") and err.count("\n") == 1
    assert not (tmp_path / "out.gguf").exists()


def test_an_adapter_beside_a_model_is_not_merged_in_silence(tmp_path: Path, cli):
    folder = write_checkpoint(tmp_path / "c")
    write_json(folder / "adapter_config.json", {"peft_type": "LORA"})
    code, _, err = cli("quantize", folder, tmp_path / "out.gguf", "F16")
    warning = "adapter_config.json: the adapter in this folder is not merged: only the model is read"
    assert code == 0 and f"localllm: warning: {warning}\n" in err


def test_scales_of_an_8_bit_cache_are_left_out(tmp_path: Path, cli):
    """Leave out scalars that calibrating for vLLM adds to weights that are not quantized."""
    folder, one = write_checkpoint(tmp_path / "c"), np.ones((), np.float32)
    plain = cli("quantize", folder, tmp_path / "plain.gguf", "F16")
    with_tensors(folder, model__layers__0__self_attn__k_scale=one, model__layers__0__self_attn__v_scale=one)
    assert plain[0] == cli("quantize", folder, tmp_path / "out.gguf", "F16")[0] == 0
    assert [*GGUFFile.open(tmp_path / "out.gguf").tensors] == [*GGUFFile.open(tmp_path / "plain.gguf").tensors]
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()
