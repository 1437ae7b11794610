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

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns)).astype(np.float32)

    return {name: (matrix(RANK, columns), matrix(rows, RANK)) for name, (rows, columns) in sizes.items()}


def write_adapter(
    folder: Path, pairs: Pairs, others: Mapping[str, np.ndarray] = {}, **settings: object
) -> Path:  # fmt: skip
    """Write a PEFT folder; others: tensors besides the pairs."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * FACTOR} | settings)
    write_safetensors(folder / "adapter_model.safetensors", [
        (f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight", "F32", matrix)
        for name, pair in pairs.items() for side, matrix in zip("AB", pair, strict=True)
    ] + [(f"base_model.model.{name}", "F32", tensor) for name, tensor in others.items()])  # fmt: skip
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
    return as_float32(tensor.read_rows(0, rows), tensor.format.name).reshape(tensor.shape)


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


@pytest.mark.parametrize("variant", ["deepseek2", "deepseek3", "minicpm3", "qwen3_next", "qwen35", "mamba", "mixtral"])
def test_the_gguf_file_alone_tells_the_sizes(tmp_path, variant):
    base = open_base(tmp_path / "base", variant)
    with_config, without = (tmp_path / name for name in ("with", "without"))
    _, pairs = convert_possible(without, variant, base)
    write_json(write_adapter(with_config, pairs) / "config.json", facts(variant)["config"])
    assert open_peft(str(without), *base).digest == open_peft(str(with_config), *base).digest
    assert pairs.keys() >= {
        name for name in matrices_of(variant) if "proj" in name and not {"experts", "mtp"} & {*name.split(".")}
    }


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
    ({"lora_bias": True}, "adapters with biases (lora_bias) are not supported: merge it with PEFT first"),
    ({"modules_to_save": ["lm_head"]}, "adapters with whole modules (modules_to_save) are not supported: merge it"),
    ({"trainable_token_indices": [1, 2]}, "adapters with trained tokens (trainable_token_indices) are not supported"),
    ({"bias": "lora_only"}, "adapters with trained biases (bias) are not supported: merge it with PEFT"),
    ({"arrow_config": {"top_k": 2}}, "adapters with routing between adapters (arrow_config) are not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4 has changed the base model: save the"),
    ({"use_dora": True}, "use_dora of adapter_config.json and the tensors of adapter_model.safetensors contradict"),
    ({"lora_alpha": "many"}, "lora_alpha must be a number (found 'many')"),
])  # fmt: skip
def test_unsupported_settings_are_refused_by_name(tmp_path, llama, settings, message):
    folder = write_adapter(tmp_path / "a", random_pairs(shapes_of("llama"), [NAME]), **settings)
    assert message in refusal(folder, llama)


@pytest.mark.parametrize("settings", [
    {"init_lora_weights": "gaussian"}, {"init_lora_weights": "eva"}, {"init_lora_weights": False}, {"bias": "none"},
    {"modules_to_save": None}, {"target_parameters": ["gate.weight"]},
])  # fmt: skip
def test_settings_without_an_effect_are_accepted(tmp_path, llama, settings):
    folder = write_adapter(tmp_path / "a", random_pairs(shapes_of("llama"), [NAME]), **settings)
    assert open_peft(str(folder), *llama).low_ranks.keys() == {"blk.0.attn_q.weight"}


@pytest.mark.parametrize("name", [
    "model.embed_tokens.token_adapter.trainable_tokens_delta", "lm_head.weight", "model.norm.weight",
    "model.layers.0.self_attn.q_proj.lora_B.bias", "model.layers.0.self_attn.q_proj.bias",
])  # fmt: skip
def test_tensors_other_than_pairs_are_refused_by_name(tmp_path, llama, name):
    pairs = random_pairs(shapes_of("llama"), [NAME])
    folder = write_adapter(tmp_path / "a", pairs, others={name: np.ones(4, np.float32)})
    assert f"tensor base_model.model.{name} is not a low-rank matrix: not supported" in refusal(folder, llama)


def test_the_base_models_own_output_matrix_is_left_out(tmp_path, llama):
    """Ignore the copy that PEFT saves beside an adapter of lm_head."""
    pairs, shape = random_pairs(shapes_of("llama"), ["lm_head.weight"]), shapes_of("llama")["lm_head.weight"]
    own = {"lm_head.base_layer.weight": np.ones(shape), "lm_head.base_layer.bias": np.ones(shape[:1])}
    folder = write_adapter(tmp_path / "a", pairs, others=own)
    assert open_peft(str(folder), *llama).low_ranks.keys() == {"output.weight"}
    folder = write_adapter(tmp_path / "b", random_pairs(shapes_of("llama"), [NAME]), others=own)
    assert "has no low-rank matrices for lm_head" in refusal(folder, llama)


@pytest.mark.parametrize(("variant", "stored", "module"), [
    ("laguna", "model.layers.1.mlp.shared_expert.up_proj", "model.layers.1.mlp.shared_experts.up_proj"),
    ("nemotron_h", "backbone.layers.0.mixer.in_proj", "model.layers.0.mixer.in_proj"),
    ("lfm2_moe", "model.layers.1.feed_forward.experts.2.w3", "model.layers.1.feed_forward.experts.2.up_proj"),
])  # fmt: skip
def test_modules_named_differently_from_their_tensors_are_converted(tmp_path, variant, stored, module):
    """Map PEFT's names, which are those of transformers' modules, to the checkpoint's tensors."""
    base = open_base(tmp_path / "base", variant)
    ((_, pair),) = random_pairs(shapes_of(variant), [f"{stored}.weight"]).items()
    write_json(write_adapter(tmp_path / "a", {f"{stored}.weight": pair}) / "config.json", facts(variant)["config"])
    write_json(write_adapter(tmp_path / "b", {f"{module}.weight": pair}) / "config.json", facts(variant)["config"])
    expected, computed = (open_peft(str(tmp_path / name), *base) for name in "ab")
    assert expected.digest == computed.digest and computed.low_ranks


EXPERTS = "model.layers.1.mlp.experts"
TARGETS = ("gate_up_proj", "down_proj"), ("mlp.experts.down_proj", "mlp.experts.gate_up_proj"), ("gate_up_proj",)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("variant", ["mixtral", "qwen3moe", "deepseek3"])
def test_stacked_experts_change_each_expert(tmp_path, variant, targets):
    """PEFT adapts parameters with the matrices of all experts since transformers 5 has them."""
    base = open_base(tmp_path / "base", variant)
    tensors, rng = base[1], np.random.default_rng(1)
    gate, down = (tensors[f"blk.1.ffn_{name}_exps.weight"].shape for name in ("gate", "down"))
    shapes = {"gate_up_proj": (gate[0], 2 * gate[1], gate[2]), "down_proj": down}
    names = [name for name in shapes if any(target.endswith(name) for target in targets)]
    stacked, updates = {}, {}
    for depth, name in enumerate(reversed(names)):
        (count, rows, columns), rank = shapes[name], 2 + depth
        a, b = rng.standard_normal((count, rank, columns)), rng.standard_normal((count, rows, rank))
        updates[name] = 3.0 / rank * b @ a
        module = EXPERTS + ".base_layer" * depth
        stacked[module] = a.reshape(-1, columns), b.transpose(1, 2, 0).reshape(rows, -1)
    ranks = {rf".*\.{name}": 2 + depth for depth, name in enumerate(reversed(names))}
    folder = write_adapter(
        tmp_path / "a", {f"{name}.weight": pair for name, pair in stacked.items()}, lora_alpha=3, r=9,
        rank_pattern=ranks, target_parameters=[*targets],
    )  # fmt: skip
    low_ranks = open_peft(str(folder), *base).low_ranks
    half, gates = gate[1], updates["gate_up_proj"]
    expected = {"gate": gates[:, :half], "up": gates[:, half:]}
    if "down_proj" in names:
        expected["down"] = updates["down_proj"]
    assert low_ranks.keys() == {f"blk.1.ffn_{name}_exps.weight" for name in expected}
    for name, update in expected.items():
        each = low_ranks[f"blk.1.ffn_{name}_exps.weight"]
        np.testing.assert_allclose(each.factor * dequantize(each.b) @ dequantize(each.a), update, atol=1e-5)


def test_other_parameters_are_refused_by_name(tmp_path):
    base = open_base(tmp_path / "base", "mixtral")
    pairs = {f"{EXPERTS}.weight": (np.ones((8, 4), np.float32), np.ones((4, 8), np.float32))}
    folder = write_adapter(tmp_path / "a", pairs, target_parameters=["experts.gate_up_proj_bias"])
    message = f"adapters of {EXPERTS}.gate_up_proj_bias (target_parameters) are not supported"
    assert message in refusal(folder, base)
    folder = write_adapter(tmp_path / "a", pairs, target_parameters=["experts.down_proj"], r=3)
    assert f"r must divide 8, the ranks of {EXPERTS}.down_proj together" in refusal(folder, base)


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
    assert "adapter_model.safetensors is missing" in refusal(folder, llama)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json is missing: expected a GGUF file or a folder that PEFT has saved" in refusal(
        folder, llama
    )


def test_an_adapter_of_another_model_is_refused(tmp_path, llama):
    pairs = {NAME: (np.ones((RANK, 5), np.float32), np.ones((7, RANK), np.float32))}
    message = refusal(write_adapter(tmp_path / "a", pairs), llama)
    assert "are for [7, 5] with rank 3" in message and "config.json" in message
    edit_json(write_adapter(tmp_path / "a", random_pairs(shapes_of("llama"), [NAME])) / "adapter_config.json", r=1)
    assert open_peft(str(tmp_path / "a"), *llama).low_ranks
