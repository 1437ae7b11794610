"""Adapters merged into a model's matrices, against those merged into its checkpoint; DoRA above all."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from checkpoint import random_tensor, write_family, write_json, write_safetensors

from localllm.convert import open_folder
from localllm.convert.peft import open_peft
from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.errors import UnsupportedError
from localllm.files.gguf.file import GGUFFile
from localllm.quantizing.adapters import merge_adapters, write_adapter
from tests.unit.convert.families.test_families import facts, shapes_of
from tests.unit.convert.test_hyperparameters import write_gguf
from tests.unit.convert.test_peft import RANK, read

FACTOR = 2.0
Weights = dict[str, np.ndarray]


class DoraAdapter:
    """A random DoRA adapter of some of a checkpoint's matrices: A, B and the length of each output's weights."""

    def __init__(self, variant: str, names: list[str], seed: int = 0, is_transposed: bool = False):
        rng, shapes = np.random.default_rng(seed), shapes_of(variant)
        self.names, self.is_transposed = names, is_transposed
        sizes = {name: reversed(shapes[name]) if is_transposed else shapes[name] for name in names}
        self.matrices = {
            name: (rng.standard_normal((RANK, columns)), rng.standard_normal((rows, RANK)), rng.uniform(0.5, 2, rows))
            for name, (rows, columns) in sizes.items()
        }

    def write(self, folder: Path, **settings: object) -> Path:
        folder.mkdir()
        settings = {"use_dora": True, "fan_in_fan_out": self.is_transposed} | settings
        write_json(
            folder / "adapter_config.json",
            {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * FACTOR} | settings,
        )
        ends = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        write_safetensors(folder / "adapter_model.safetensors", [
            (f"base_model.model.{name.removesuffix('.weight')}.{end}", "F32", matrix.astype(np.float32))
            for name, matrices in self.matrices.items() for end, matrix in zip(ends, matrices, strict=True)
        ])  # fmt: skip
        return folder

    def merge(self, base: Weights, weights: Weights, scale: float) -> None:
        """Change weights, in which other adapters may be merged: norms are those of the base model's matrices."""
        for name, (a, b, magnitude) in self.matrices.items():
            old, now = (each[name].T if self.is_transposed else each[name] for each in (base, weights))
            update = scale * FACTOR * b @ a
            lengths = np.linalg.norm(old + update, axis=1)
            now = (magnitude / lengths)[:, None] * (now + update)
            weights[name] = now.T if self.is_transposed else now


def read_weights(variant: str) -> Weights:
    return {name: random_tensor(name, tuple(shape))[1].astype(np.float64) for name, shape in shapes_of(variant).items()}


def convert(folder: Path, variant: str, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the GGUF tensors of a variant with other weights."""
    write_family(folder, facts(variant)["config"], shapes_of(variant))
    write_safetensors(
        folder / "model.safetensors", [(name, "F32", each.astype(np.float32)) for name, each in weights.items()]
    )
    return {tensor.name: read(tensor) for tensor in open_folder(folder).tensors}


def list_layer_matrices(variant: str, *ends: str) -> list[str]:
    return [name for name in shapes_of(variant) if name.endswith(tuple(f"{end}.weight" for end in ends))]


MATRICES = {
    "llama": ("q_proj", "k_proj", "down_proj", "lm_head"),  # permuted rows
    "phi3": ("qkv_proj", "gate_up_proj"),  # fused
    "gpt2": ("c_attn", "c_fc", "attn.c_proj"),  # stored as [columns, rows]
    "deepseek2": ("kv_b_proj", "q_proj", "experts.1.up_proj"),  # split into heads, of which one is transposed; stacked
    "falcon": ("query_key_value",),  # rows in another order
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba"),  # split
}


def check_merged(tmp_path: Path, variant: str, adapters: list[tuple[DoraAdapter, float]]) -> None:
    base, merged = read_weights(variant), read_weights(variant)
    for adapter, scale in adapters:
        adapter.merge(base, merged, scale)
    expected = convert(tmp_path / "merged", variant, merged)
    convert(tmp_path / "base", variant, base)
    folders = [adapter.write(tmp_path / f"adapter{number}") for number, (adapter, _) in enumerate(adapters)]
    for folder in folders:
        write_json(folder / "config.json", facts(variant)["config"])
    scales = [(str(folder), scale) for folder, (_, scale) in zip(folders, adapters, strict=True)]
    source = merge_adapters(open_folder(tmp_path / "base"), scales)
    computed = {tensor.name: read(tensor) for tensor in source.tensors}
    assert computed.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_allclose(computed[name], numbers, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("scale", [1.0, 0.5, -1.0, 0.0])
@pytest.mark.parametrize("variant", MATRICES)
def test_dora_is_merged_as_into_the_checkpoint(tmp_path, variant, scale):
    names = list_layer_matrices(variant, *MATRICES[variant])
    check_merged(tmp_path, variant, [(DoraAdapter(variant, names, is_transposed=variant == "gpt2"), scale)])


def test_several_dora_adapters_are_merged_one_after_another(tmp_path):
    """Use the norms of the base model's matrices, not of matrices that other adapters have changed."""
    names = list_layer_matrices("llama", "q_proj", "up_proj")
    check_merged(tmp_path, "llama", [(DoraAdapter("llama", names, seed), 1.0 - seed / 4) for seed in range(3)])


def test_rows_are_merged_alike_in_any_portions(tmp_path):
    names = list_layer_matrices("gpt2", "c_attn")
    convert(tmp_path / "base", "gpt2", read_weights("gpt2"))
    folder = DoraAdapter("gpt2", names, is_transposed=True).write(tmp_path / "adapter")
    source = merge_adapters(open_folder(tmp_path / "base"), [(str(folder), 1.0)])
    (tensor,) = (tensor for tensor in source.tensors if tensor.name == "blk.0.attn_qkv.weight")
    whole, height = tensor.read_rows(0, tensor.shape[0]), tensor.shape[0]
    for size in (1, 7, 64):
        portions = [tensor.read_rows(first, min(first + size, height)) for first in range(0, height, size)]
        np.testing.assert_allclose(
            np.concatenate(portions).view(np.float32), whole.view(np.float32), rtol=1e-6, atol=1e-7
        )


def test_dora_of_a_zero_row_leaves_it_zero(tmp_path):
    weights, adapter = read_weights("llama"), DoraAdapter("llama", list_layer_matrices("llama", "0.mlp.down_proj"))
    (name,) = adapter.names
    weights[name][3] = adapter.matrices[name][1][3] = 0
    convert(tmp_path / "base", "llama", weights)
    source = merge_adapters(open_folder(tmp_path / "base"), [(str(adapter.write(tmp_path / "adapter")), 1.0)])
    (tensor,) = (tensor for tensor in source.tensors if tensor.name == "blk.0.ffn_down.weight")
    assert np.isfinite(read(tensor)).all() and not read(tensor)[3].any()


# ---- where it cannot be used


@pytest.fixture
def dora(tmp_path):
    """Return the path of a GGUF file, and a DoRA adapter for it."""
    path = tmp_path / "model.gguf"
    write_gguf(path, open_folder(write_family(tmp_path / "base", facts("llama")["config"], shapes_of("llama"))))
    return path, DoraAdapter("llama", list_layer_matrices("llama", "q_proj")).write(tmp_path / "dora")


def test_running_with_dora_is_refused_with_the_command_that_merges(dora):
    file = GGUFFile.open(dora[0])
    adapter = open_peft(str(dora[1]), file.metadata, file.tensors)
    with pytest.raises(UnsupportedError) as refused:
        Engine(file, EngineOptions(1, lora=((adapter, 1.0),)))
    command = f"localllm quantize BASE OUT --lora {dora[1]}"
    assert str(refused.value) == f"{dora[1]}: is a DoRA adapter: merge it with `{command}`"
    with pytest.raises(UnsupportedError, match="is a DoRA adapter: merge it"):
        write_adapter(adapter, dora[1] / "adapter.gguf", "F32")


def test_other_magnitudes_are_another_adapter(dora, tmp_path):
    file = GGUFFile.open(dora[0])
    other = DoraAdapter("llama", list_layer_matrices("llama", "q_proj"))
    for _, _, magnitude in other.matrices.values():
        magnitude += 1
    folders = dora[1], other.write(tmp_path / "other")
    digests = {open_peft(str(folder), file.metadata, file.tensors).digest for folder in folders}
    assert len(digests) == 2
