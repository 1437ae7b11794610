"""Adapters in PEFT's folders: converted, they change a model as they change its checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from checkpoint import edit_json, random_tensor, write_family, write_json, write_safetensors

from localllm.convert import open_folder
from localllm.convert.peft import open_peft
from localllm.convert.transforms import as_float32
from localllm.engine.adapters import Adapter
from localllm.errors import LocalllmError
from localllm.kernels.reference import dequantize
from tests.unit.convert.families.test_families import VARIANTS, facts, shapes_of

RANK, FACTOR = 3, 2.0
Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]
NO_MATRICES = ("norm", "conv", "embed", "wte", "wpe", "word_", "visual", "vision", "shared.weight", "rel_b", "relative")


def random_pairs(shapes: Mapping[str, list[int]], names: list[str]) -> Pairs:
    rng = np.random.default_rng(0)
    sizes = {name: (shapes[name][0], shapes[name][1]) for name in names}
    return {
        name: tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((RANK, columns), (rows, RANK)))
        for name, (rows, columns) in sizes.items()
    }


def write_adapter(folder: Path, pairs: Pairs, **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * FACTOR} | settings)
    write_safetensors(folder / "adapter_model.safetensors", [
        (f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight", "F32", matrix)
        for name, pair in pairs.items() for side, matrix in zip("AB", pair, strict=True)
    ])  # fmt: skip
    return folder


def open_base(folder: Path, variant: str):
    """Return the metadata and the tensors of a variant's GGUF file."""
    converted = open_folder(write_family(folder, facts(variant)["config"], shapes_of(variant)))
    return converted.metadata, {tensor.name: tensor for tensor in converted.tensors}


def merged_tensors(folder: Path, variant: str, pairs: Pairs) -> dict[str, np.ndarray]:
    """Return the GGUF tensors of the checkpoint with an adapter merged into it."""
    write_family(folder, facts(variant)["config"], shapes_of(variant))
    tensors = []
    for name, shape in shapes_of(variant).items():
        kind, numbers = random_tensor(name, tuple(shape), "F32")
        if name in pairs:
            a, b = (matrix.astype(np.float64) for matrix in pairs[name])
            numbers = (numbers + FACTOR * b @ a).astype(np.float32)
        tensors.append((name, kind, numbers))
    write_safetensors(folder / "model.safetensors", tensors)
    return {tensor.name: read(tensor) for tensor in open_folder(folder).tensors if tensor.format.name in ("F32", "F16")}


def read(tensor) -> np.ndarray:
    rows = int(np.prod(tensor.shape[:-1]))
    return as_float32(tensor.rows(0, rows), tensor.format.name).reshape(tensor.shape)


def matrices_of(variant: str) -> list[str]:
    return [
        name for name, shape in shapes_of(variant).items()
        if len(shape) == 2 and min(shape) > 1 and name.endswith(".weight") and not any(w in name for w in NO_MATRICES)
    ]  # fmt: skip


def convert_possible(folder: Path, variant: str, base) -> tuple[Adapter, Pairs]:
    """Convert an adapter of all matrices that belong to the language model."""
    names = matrices_of(variant)
    while True:
        pairs = random_pairs(shapes_of(variant), names)
        write_adapter(folder, pairs)
        try:
            return open_peft(str(folder), *base), pairs
        except LocalllmError as error:
            left = [name for name in names if name not in str(error)]
            if len(left) == len(names) or not left:
                raise
            names = left


@pytest.mark.sampled
@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_converted_adapter_changes_tensors_as_it_changes_the_checkpoint(tmp_path, variant, has_config):
    base = open_base(tmp_path / "base", variant)
    (tmp_path / "adapter").mkdir()
    if has_config:
        write_json(tmp_path / "adapter" / "config.json", facts(variant)["config"])
    try:
        adapter, pairs = convert_possible(tmp_path / "adapter", variant, base)
    except LocalllmError as error:
        assert "changes single numbers" in str(error) or (not has_config and "config.json" in str(error))
        return
    merged = merged_tensors(tmp_path / "merged", variant, pairs)
    for name, low_rank in adapter.low_ranks.items():
        update = low_rank.factor * dequantize(low_rank.b) @ dequantize(low_rank.a)
        np.testing.assert_allclose(read(base[1][name]) + update, merged[name], atol=1e-4 * np.abs(merged[name]).max())


@pytest.fixture
def llama(tmp_path):
    return open_base(tmp_path / "base", "llama")


def refusal(folder: Path, base) -> str:
    with pytest.raises(LocalllmError) as refused:
        open_peft(str(folder), *base)
    return str(refused.value)


NAME = "model.layers.0.self_attn.q_proj.weight"


def test_factors_follow_the_settings(tmp_path, llama):
    pairs = random_pairs(shapes_of("llama"), [NAME])

    def factor(**settings):
        adapter = open_peft(str(write_adapter(tmp_path / "a", pairs, **settings)), *llama)
        return adapter.low_ranks["blk.0.attn_q.weight"].factor

    assert factor() == FACTOR
    assert factor(lora_alpha=9) == 3.0
    assert factor(lora_alpha=9, use_rslora=True) == pytest.approx(9 / 3**0.5)
    assert factor(alpha_pattern={"q_proj": 12}) == 4.0
    assert factor(alpha_pattern={"k_proj": 12}) == FACTOR


def test_invocation_tokens_are_read(tmp_path, llama):
    folder = write_adapter(tmp_path / "a", random_pairs(shapes_of("llama"), [NAME]), alora_invocation_tokens=[5, 7])
    assert open_peft(str(folder), *llama).invocation == (5, 7)


@pytest.mark.parametrize(("settings", "message"), [
    ({"peft_type": "IA3"}, "adapters of type IA3 are not supported, only LORA"),
    ({"use_dora": True}, "adapters with DoRA are not supported: merge it with PEFT's merge_and_unload"),
    ({"lora_bias": True}, "adapters with biases (lora_bias) are not supported"),
    ({"lora_alpha": "many"}, "lora_alpha must be a number (found 'many')"),
])  # fmt: skip
def test_unsupported_settings_are_refused_by_name(tmp_path, llama, settings, message):
    folder = write_adapter(tmp_path / "a", random_pairs(shapes_of("llama"), [NAME]), **settings)
    assert message in refusal(folder, llama)


def test_other_tensors_are_refused_by_name(tmp_path, llama):
    folder = write_adapter(tmp_path / "a", random_pairs(shapes_of("llama"), [NAME]))
    whole = np.ones((4, 4), np.float32)
    write_safetensors(folder / "adapter_model.safetensors", [("base_model.model.lm_head.weight", "F32", whole)])
    assert "tensor base_model.model.lm_head.weight is not a low-rank matrix: not supported" in refusal(folder, llama)
    write_safetensors(folder / "adapter_model.safetensors", [("base_model.model.x.lora_A.weight", "F32", whole)])
    assert "the matrices of x are not a pair" in refusal(folder, llama)


def test_an_incomplete_folder_is_refused(tmp_path, llama):
    folder = write_adapter(tmp_path / "a", random_pairs(shapes_of("llama"), [NAME]))
    (folder / "adapter_model.safetensors").unlink()
    assert "there is no adapter_model.safetensors" in refusal(folder, llama)
    (folder / "adapter_config.json").unlink()
    assert "no adapter_config.json: expected a GGUF file or a folder that PEFT has saved" in refusal(folder, llama)


def test_an_adapter_of_another_model_is_refused(tmp_path, llama):
    pairs = {NAME: (np.ones((RANK, 5), np.float32), np.ones((7, RANK), np.float32))}
    message = refusal(write_adapter(tmp_path / "a", pairs), llama)
    assert "are for [7, 5] with rank 3" in message and "config.json" in message
    edit_json(write_adapter(tmp_path / "a", random_pairs(shapes_of("llama"), [NAME])) / "adapter_config.json", r=1)
    assert open_peft(str(tmp_path / "a"), *llama).low_ranks
