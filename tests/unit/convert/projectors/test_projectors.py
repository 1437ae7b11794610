"""Test conversion of projectors: the tensors that a checkpoint was written from come back, byte for byte.


The checkpoints have transformers' names and the tensors of tests/support/models/projectors.py, whose rows transformers
has computed.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import config_readings
import numpy as np
import pytest
from checkpoint import edit_json, write_json, write_safetensors
from config_changes import with_value
from engines import bound
from models.projectors import PictureGolden, projector, shown
from PIL import Image
from readings import SEEING, rounded

from localllm.arch.vision.hyperparameters import MAX_SIDE
from localllm.convert import open_projector
from localllm.convert.config import CheckpointConfig
from localllm.convert.projector_folder import read_preprocessing, read_text_width
from localllm.convert.projectors import find_projector
from localllm.convert.projectors.internvl import read_internvl
from localllm.convert.projectors.llava import read_llava15
from localllm.convert.projectors.parts import VisionConfig, read_encoder_sizes
from localllm.convert.projectors.siglip import read_lfm2vl
from localllm.engine.vision_encoder import VisionEncoder
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from tests.goldens.test_logits import nmse
from tests.unit.convert.convert_parts import all_rows

Tensors = dict[str, np.ndarray]
OF_CONFIGS = config_readings.recorded()
PREPARED = {
    "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "size": {"longest_edge": 112},
}  # fmt: skip
TEXT = ("language_model.model.embed_tokens.weight", np.zeros((4, 96)))  # which is left out
SIGLIP = {
    "v.patch_embd": "embeddings.patch_embedding", "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm", "ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}  # fmt: skip
QWEN = {
    "v.patch_embd": "patch_embed.proj", "v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2",
    "ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
}  # fmt: skip


def renamed(tensors: Tensors, names: dict[str, str], layers: str) -> Tensors:
    """Rename tensors as transformers does; `layers` is the path of the list of layers."""
    by_name = {}
    for name, values in tensors.items():
        stem, end = name.rsplit(".", 1)
        layer = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", stem)
        by_name[f"{layers}.{layer[1]}.{names[layer[2]]}.{end}" if layer else f"{names[stem]}.{end}"] = values
    return by_name


def of_gemma3(tensors: Tensors, tower: str = "vision_tower.vision_model.", head: str = "") -> Tensors:
    """Rename a Gemma 3 projector; tower and head are prefixes of names."""
    rest = dict(tensors)
    norm, matrix = rest.pop("mm.soft_emb_norm.weight"), rest.pop("mm.input_projection.weight")
    by_name = {f"{tower}{name}": values for name, values in renamed(rest, SIGLIP, "encoder.layers").items()}
    by_name[f"{head}multi_modal_projector.mm_soft_emb_norm.weight"] = norm.astype(np.float64) - 1
    return by_name | {f"{head}multi_modal_projector.mm_input_projection_weight": matrix}


def gemma3(rows: int, side: int) -> dict[str, Any]:
    """Return a config.json."""
    vision = {
        "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 3,
        "image_size": side, "patch_size": 14, "layer_norm_eps": 1e-3,
    }  # fmt: skip
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": rows, "vision_config": vision,
        "text_config": {"hidden_size": 96},
    }  # fmt: skip


def of_idefics3(tensors: Tensors) -> Tensors:
    rest = dict(tensors)
    matrix = {"model.connector.modality_projection.proj.weight": rest.pop("mm.model.fc.weight")}
    names = renamed(rest, SIGLIP, "encoder.layers")
    return matrix | {f"model.vision_model.{name}": values for name, values in names.items()}


IDEFICS3_CONFIG = {
    **gemma3(0, 56), "architectures": ["Idefics3ForConditionalGeneration"], "scale_factor": 2,
}  # fmt: skip
QWEN_NETWORK = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
QWEN25_NETWORK = {"ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj"}


def of_qwen(tensors: Tensors, network: dict[str, str], tower: str = "visual.") -> Tensors:
    """Rename a Qwen projector: queries, keys and values are one matrix, patches of both frames one convolution."""
    rest = dict(tensors)
    rest["v.patch_embd.weight"] = np.stack((rest["v.patch_embd.weight"], rest.pop("v.patch_embd.weight.1")), axis=2)
    for name in [name for name in rest if ".attn_q." in name]:
        parts = [rest.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        rest[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    return {f"{tower}{name}": values for name, values in renamed(rest, QWEN | network, "blocks").items()}


def qwen(architecture: str, **vision: Any) -> dict[str, Any]:
    """Return a config.json with the language model's values beside vision_config."""
    shared = {"num_heads": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {
        "architectures": [architecture], "hidden_size": 96, "vision_config": shared | vision,
    }  # fmt: skip


QWEN2_CONFIG = qwen("Qwen2VLForConditionalGeneration", depth=2, embed_dim=96, hidden_size=96, mlp_ratio=2)
QWEN25_CONFIG = qwen(
    "Qwen2_5_VLForConditionalGeneration", depth=4, hidden_size=96, intermediate_size=112, out_hidden_size=96,
    fullatt_block_indexes=[1, 3], window_size=112, hidden_act="silu",
)  # fmt: skip
CLIP = {
    **SIGLIP, "v.pre_ln": "pre_layrnorm", "mm.0": "linear_1", "mm.2": "linear_2",
}  # fmt: skip
PIXTRAL = {
    "v.patch_embd": "patch_conv", "v.pre_ln": "ln_pre", "ln1": "attention_norm", "ln2": "ffn_norm",
    **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"}, "attn_out": "attention.o_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_gate": "feed_forward.gate_proj", "ffn_down": "feed_forward.down_proj",
    "mm.input_norm": "norm", "mm.patch_merger": "patch_merger.merging_layer", "mm.1": "linear_1", "mm.2": "linear_2",
}  # fmt: skip
INTERN = {
    "v.patch_embd": "embeddings.patch_embeddings.projection", "ln1": "layernorm_before", "ln2": "layernorm_after",
    **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"}, "attn_out": "attention.projection_layer",
    "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2", "ls1": "lambda_1", "ls2": "lambda_2", "mm.model.mlp.0": "layer_norm",
    "mm.model.mlp.1": "linear_1", "mm.model.mlp.3": "linear_2",
}  # fmt: skip
QWEN3 = {
    **QWEN, "v.position_embd": "pos_embed", "v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2", "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2",
    **{
        f"v.deepstack.{layer}.{ours}": f"deepstack_merger_list.{number}.{theirs}"
        for number, layer in enumerate((0, 2))
        for ours, theirs in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2"))
    },
}  # fmt: skip
LFM2 = {**SIGLIP, "mm.input_norm": "layer_norm", "mm.1": "linear_1", "mm.2": "linear_2"}


def in_towers(tensors: Tensors, tower: str, head: str = "multi_modal_projector.") -> Tensors:
    """Add prefixes to the names of the encoder and of the rest of the projector."""
    ends = "linear_", "layer_norm.", "norm.", "patch_merger."
    return {(head if name.startswith(ends) else tower) + name: values for name, values in tensors.items()}


def of_llava(tensors: Tensors) -> Tensors:
    """Rename a LLaVA projector, with another layer and norm that are not used."""
    rest = dict(tensors)
    newline = {"image_newline": rest.pop("v.image_newline")} if "v.image_newline" in rest else {}
    by_name = {"embeddings.class_embedding": rest.pop("v.class_embd"), "post_layernorm.bias": np.ones(96)}
    by_name |= {"encoder.layers.2.mlp.fc1.bias": np.ones(112)} | renamed(rest, CLIP, "encoder.layers")
    return newline | in_towers(by_name, "vision_tower.vision_model.")


def of_pixtral(tensors: Tensors) -> Tensors:
    """Rename a Pixtral projector: pairs are halves of a head, and the line break is one row of the embedding."""
    rest, heads = dict(tensors), 3
    end = rest.pop("v.token_embd.img_break")
    for name in [name for name in rest if ".attn_q." in name or ".attn_k." in name]:
        rest[name] = rest[name].reshape(heads, -1, 2, 96).swapaxes(1, 2).reshape(96, 96)
    by_name = in_towers(renamed(rest, PIXTRAL, "transformer.layers"), "vision_tower.")
    return by_name | {TEXT[0]: np.stack([np.full(96, 7.0), end, np.zeros(96)])}


def of_internvl(tensors: Tensors) -> Tensors:
    rest = dict(tensors)
    by_name = {
        "embeddings.cls_token": rest.pop("v.class_embd")[None, None],
        "embeddings.position_embeddings": rest.pop("v.position_embd.weight")[None],
    }
    by_name |= renamed(rest, INTERN, "encoder.layer")
    by_name = {re.sub(r"(lambda_\d).weight", r"\1", name): values for name, values in by_name.items()}
    return in_towers(by_name, "model.vision_tower.", "model.multi_modal_projector.")


def of_qwen3(tensors: Tensors) -> Tensors:
    rest = dict(tensors)
    rest["v.patch_embd.weight"] = np.stack((rest["v.patch_embd.weight"], rest.pop("v.patch_embd.weight.1")), axis=2)
    return {f"model.visual.{name}": values for name, values in renamed(rest, QWEN3, "blocks").items()}


def of_lfm2(tensors: Tensors) -> Tensors:
    """Rename an LFM2 projector, whose patches have interleaved colours."""
    rest = dict(tensors)
    rest["v.patch_embd.weight"] = rest["v.patch_embd.weight"].transpose(0, 2, 3, 1).reshape(96, -1)
    by_name = renamed(rest, LFM2, "encoder.layers")
    return in_towers(by_name, "model.vision_tower.vision_model.", "model.multi_modal_projector.")


def config_of(architecture: str, vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a config.json; vision adds to the usual sizes."""
    sizes = {name: value for name, value in gemma3(0, 56)["vision_config"].items() if value is not None}
    text = {"hidden_size": 96, "vocab_size": 3}
    whole = {"architectures": [architecture], "text_config": text, **more}
    return {**whole, "vision_config": {name: value for name, value in (sizes | vision).items() if value is not None}}


LLAVA, PIXTRAL_NAME = "LlavaForConditionalGeneration", {"model_type": "pixtral", "hidden_act": "silu"}
LLAVA_CONFIG = config_of(LLAVA, {"model_type": "clip_vision_model", "num_hidden_layers": 3}, vision_feature_layer=-2)
LLAVA16_CONFIG = {
    **LLAVA_CONFIG, "architectures": ["LlavaNextForConditionalGeneration"],
    "image_grid_pinpoints": [[112, 56], [56, 112], [112, 112], [56, 168], [168, 56]],
}  # fmt: skip
PIXTRAL_CONFIG = config_of(LLAVA, {**PIXTRAL_NAME, "image_size": 60, "patch_size": 20})
MISTRAL3_CONFIG = config_of("Mistral3ForConditionalGeneration", PIXTRAL_NAME, multimodal_projector_bias=True)
INTERN_CONFIG = config_of(
    "InternVLForConditionalGeneration", {"image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True}
)
QWEN3_CONFIG = config_of(
    "Qwen3VLForConditionalGeneration",
    {
        "depth": 4, "num_heads": 3, "patch_size": 16, "num_position_embeddings": 36, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "deepstack_visual_indexes": [0, 2], "hidden_act": "gelu_pytorch_tanh",
    },
)  # fmt: skip
LFM2_CONFIG = config_of(
    "Lfm2VlForConditionalGeneration",
    {"model_type": "siglip2_vision_model", "image_size": None, "num_patches": 9, "patch_size": 32},
    projector_hidden_size=112,
)
BREAK = {"added_tokens_decoder": {"0": {"content": "<unk>"}, "1": {"content": "[IMG_BREAK]"}}}
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "gemma3": (gemma3(4, 56), of_gemma3),
    "gemma3_odd": (gemma3(25, 75), lambda tensors: of_gemma3(tensors, "model.vision_tower.", "model.")),
    "idefics3": (IDEFICS3_CONFIG, of_idefics3),
    "qwen2vl": (QWEN2_CONFIG, lambda tensors: of_qwen(tensors, QWEN_NETWORK)),
    "qwen25vl": (QWEN25_CONFIG, lambda tensors: of_qwen(tensors, QWEN25_NETWORK, "model.visual.")),
    "qwen3vl": (QWEN3_CONFIG, of_qwen3),
    "qwen35": (
        {
            **QWEN3_CONFIG,
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "vision_config": QWEN3_CONFIG["vision_config"] | {"depth": 2, "deepstack_visual_indexes": []},
        },
        of_qwen3,
    ),
    "llava": (LLAVA_CONFIG, of_llava),
    "llava16": (LLAVA16_CONFIG, of_llava),
    "llava_feature": (LLAVA_CONFIG | {"vision_feature_layer": [-3]}, of_llava),
    "pixtral": (PIXTRAL_CONFIG, of_pixtral),
    "mistral3": (MISTRAL3_CONFIG, of_pixtral),
    "internvl": (INTERN_CONFIG, of_internvl),
    "lfm2": (LFM2_CONFIG, of_lfm2),
}
# What config.json does not say of pictures of any size: llama.cpp writes this side, transformers has this epsilon.
# Layers that do not count are left out.
SIZES = {"qwen2vl": {"side": 560}, "qwen25vl": {"side": 560}, "llava_feature": {"layers": 1}}
OWN_EPSILON = {"qwen2vl": 1e-6, "qwen25vl": 1e-6, "qwen3vl": 1e-6, "qwen35": 1e-6, "pixtral": 1e-5, "mistral3": 1e-5}
EPSILON = "clip.vision.attention.layer_norm_epsilon"


def written(folder: Path, name: str) -> Path:
    """Write the checkpoint of a declared projector."""
    config, under_their_names = CHECKPOINTS[name]
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", PREPARED)
    write_json(folder / "tokenizer_config.json", BREAK)
    tensors = dict([TEXT, *under_their_names(projector(name).tensors).items()])
    stored = [(name, "F64" if values.dtype == np.float64 else "F32", values) for name, values in tensors.items()]
    write_safetensors(folder / "model.safetensors", stored)
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_projector(folder)
    return str(caught.value)


def read_projector(folder: Path, content: dict[str, Any]) -> dict[str, Any] | str:
    """Read sizes, metadata and shapes of tensors from a config.json, or return why it is refused."""
    config = CheckpointConfig(content, folder / "config.json")
    try:
        read = find_projector(config)
        facts = read(
            VisionConfig(
                config, config.get_section("vision_config"), read_preprocessing(folder), read_text_width(config)
            )
        )
    except ModelError as error:
        return str(error).replace(f"{folder / 'config.json'}: ", "")
    result = {**vars(facts.encoder), **{name: value for name, value in facts.metadata.items() if value is not None}}
    result |= {re.sub(r"\.\d+\.", ".*.", name): list(part.shape) for name, part in facts.parts.items()}
    return {name: rounded(value) for name, value in result.items()}


def small_files(folder: Path) -> Path:
    """Write the files besides config.json that determine a projector's sizes."""
    write_json(folder / "preprocessor_config.json", PREPARED)
    write_json(folder / "tokenizer_config.json", BREAK)
    return folder


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if f"{SEEING}{name}" in OF_CONFIGS])
def test_other_config_values_give_the_recorded_readings(tmp_path, name):
    """Vary them as tests/goldens/test_metadata_readings.py does for language models."""
    folder, config, values = small_files(tmp_path), CHECKPOINTS[name][0], OF_CONFIGS[f"{SEEING}{name}"]
    usual = read_projector(folder, config)
    assert isinstance(usual, dict), usual
    for place, known in values.items():
        for value, expected in known.items():
            reading = read_projector(folder, with_value(config, place, json.loads(value)))
            assert config_readings.unlike(reading, usual) == expected, f"{place} = {value}"


@pytest.mark.parametrize(("side", "patch", "fits"), [
    (MAX_SIDE, 14, True), (MAX_SIDE + 1, 14, False), (56, 56, True), (56, 57, False), (56, 14, True),
])  # fmt: skip
def test_picture_and_patch_sizes_must_fit(side: int, patch: int, fits: bool):
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 9, "num_attention_heads": 2}
    vision = CheckpointConfig({**sizes, "image_size": side, "patch_size": patch}, Path("config.json"))
    seeing = VisionConfig(vision, vision, vision, 6)
    if fits:
        assert read_encoder_sizes(seeing).patches == (side // patch) ** 2
    else:
        with pytest.raises(
            ModelError,
            match="vision_config: hidden_size must be divisible by num_attention_heads, and image_size must be",
        ):
            read_encoder_sizes(seeing)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_converted_projector_has_the_declared_tensors_and_metadata(tmp_path, name):
    wanted, converted = projector(name, **SIZES.get(name, {})), open_projector(written(tmp_path, name))
    assert {tensor.name: tensor.shape for tensor in converted.tensors} == {
        name: values.shape for name, values in wanted.tensors.items()
    }
    for tensor in converted.tensors:
        assert tensor.format.name == "F32"
        numbers = all_rows(tensor).view(np.float32).reshape(tensor.shape)
        assert np.array_equal(numbers, wanted.tensors[tensor.name]), tensor.name
    for key, value in (wanted.metadata | ({EPSILON: OWN_EPSILON[name]} if name in OWN_EPSILON else {})).items():
        assert (
            np.allclose(converted.metadata[key], value, rtol=1e-6)
            if isinstance(value, float | np.ndarray)
            else (converted.metadata[key] == value)
        ), key


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_converted_projector_gives_the_rows_of_transformers(tmp_path, cli, name):
    """Compare two pictures; the goldens have another epsilon."""
    path = tmp_path / "mmproj.gguf"
    more = "--mmproj", "--force", "--override-kv", f"{EPSILON}=float:0.001"
    code, _, err = cli("quantize", str(written(tmp_path / "model", name)), str(path), "F32", *more)
    assert code == 0, err
    reader, golden = VisionEncoder(GGUFFile.open(path)), PictureGolden.load(name)
    images = [reader.family.prepare(reader.hyperparameters, Image.fromarray(image)) for image in shown(name)]
    rows = np.concatenate([reader.read(picture) for image in images for picture in image.pictures])
    reader.close()
    assert nmse(golden.some(rows), golden.trained) < bound(1e-10, 1e-6)


def test_bf16_projectors_stay_small_except_for_convolutions(tmp_path, cli):
    """Readers take convolutions in F32 only; the file's name goes beside the folder."""
    folder = written(tmp_path / "Sees", "gemma3")
    tensors = of_gemma3(projector("gemma3").tensors)
    write_safetensors(folder / "model.safetensors", [(name, "BF16", values) for name, values in tensors.items()])
    formats = {tensor.name: tensor.format.name for tensor in open_projector(folder).tensors}
    assert formats["v.patch_embd.weight"] == formats["mm.input_projection.weight"] == "F32"
    assert formats["v.blk.1.ffn_up.weight"] == "BF16" and formats["v.blk.1.ffn_up.bias"] == "F32"
    code, _, err = cli("quantize", str(folder), "Q8_0", "--mmproj")
    assert code == 0, err
    with GGUFFile.open(tmp_path / "mmproj-Sees-Q8_0.gguf") as file:
        assert file.tensors["v.blk.0.attn_q.weight"].format.name == "Q8_0"


REFUSALS: list[tuple[str, Callable[[Path], Any]]] = [
    ("the model has no vision encoder", lambda f: edit_json(f / "config.json", vision_config=None)),
    ("vision_config must be an object", lambda f: edit_json(f / "config.json", vision_config=[])),
    ("the projector of Blip2", lambda f: edit_json(f / "config.json", architectures=["Blip2ForConditionalGeneration"])),
    ("mm_tokens_per_image", lambda f: edit_json(f / "config.json", mm_tokens_per_image=25)),
    ("are quantized", lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "quip"})),
    (
        "preprocessor_config.json: the preprocessing of images is missing",
        lambda f: (f / "preprocessor_config.json").unlink(),
    ),
    ("image_mean must be a list", lambda f: edit_json(f / "preprocessor_config.json", image_mean=[1])),
    ("not part of projectors", lambda f: change_tensors(f, **{"vision_tower.extra.weight": np.ones(3)})),
    (
        "expected the shape",
        lambda f: change_tensors(f, **{"vision_tower.vision_model.post_layernorm.bias": np.ones(3)}),
    ),
    (
        "the tensor post_layernorm.bias is missing",
        lambda f: change_tensors(f, drop="vision_tower.vision_model.post_layernorm.bias"),
    ),
]


def change_tensors(folder: Path, drop: str = "", **more: np.ndarray) -> None:
    tensors = of_gemma3(projector("gemma3").tensors) | more
    tensors.pop(drop, None)
    write_safetensors(folder / "model.safetensors", [(name, "F32", values) for name, values in tensors.items()])


def test_smolvlm_without_sizes_gets_transformers_defaults(tmp_path):
    """Expect an error, because a small encoder does not have these sizes."""
    folder = written(tmp_path, "idefics3")
    edit_json(folder / "config.json", architectures=["SmolVLMForConditionalGeneration"], vision_config={})
    assert "expected the shape [1152, 3, 32, 32] by config.json" in refused(folder)


@pytest.mark.parametrize("whole", [None, [], [1, 2], [0.5], [1]])
def test_windows_that_readers_cannot_represent_are_refused(tmp_path, whole):
    """The layers with full attention are written as one number."""
    folder = written(tmp_path, "qwen25vl")
    edit_json(folder / "config.json", vision_config=QWEN25_CONFIG["vision_config"] | {"fullatt_block_indexes": whole})
    assert "fullatt_block_indexes" in refused(folder)


@pytest.mark.parametrize("problem, change", REFUSALS)
def test_broken_gemma_3_projectors_are_refused(tmp_path, problem, change):
    change(written(tmp_path, "gemma3"))
    assert problem in refused(tmp_path)
    assert "\n" not in refused(tmp_path)


def vision(name: str, **changes: Any) -> dict[str, Any]:
    return {"vision_config": CHECKPOINTS[name][0]["vision_config"] | changes}


OTHER_REFUSALS: list[tuple[str, str, dict[str, Any]]] = [
    ("model_type must be", "llava", vision("llava", model_type="siglip_vision_model")),
    ("hidden_act must be", "llava", vision("llava", hidden_act="gelu")),
    ("vision_feature_layer must be one layer", "llava", {"vision_feature_layer": [-2, -3]}),
    ("vision_feature_layer must be one layer", "llava", {"vision_feature_layer": 4}),
    ("vision_feature_layer must be one layer", "llava", {"vision_feature_layer": 0}),
    ("select_strategy must be", "llava", {"vision_feature_select_strategy": "full"}),
    ("image_grid_pinpoints", "llava16", {"image_grid_pinpoints": [[56, 57]]}),
    ("image_grid_pinpoints", "llava16", {"image_grid_pinpoints": []}),
    ("image_grid_pinpoints", "llava16", {"image_grid_pinpoints": [[56, 112, 56]]}),
    ("hidden_act must be", "pixtral", vision("pixtral", hidden_act=None)),
    ("rope_theta must be", "pixtral", vision("pixtral", rope_theta=500.0)),
    ("rope_theta must be", "mistral3", vision("mistral3", rope_parameters={"rope_theta": 500.0})),
    ("rms_norm_eps must be", "mistral3", {"rms_norm_eps": 1e-6}),
    ("linear_1.bias is not part of", "mistral3", {"multimodal_projector_bias": False}),
    ("the same for both sides", "internvl", vision("internvl", image_size=[56, 70])),
    ("the merge size 3", "internvl", {"downsample_ratio": 0.33}),
    ("use_qk_norm", "internvl", vision("internvl", use_qk_norm=True)),
    ("norm_type must be", "internvl", vision("internvl", norm_type="rms_norm")),
    ("temporal_patch_size", "qwen25vl", vision("qwen25vl", temporal_patch_size=3)),
    ("spatial_merge_size", "qwen25vl", vision("qwen25vl", spatial_merge_size=3)),
    (
        "num_position_embeddings must be a square number (found 35",
        "qwen3vl",
        vision("qwen3vl", num_position_embeddings=35),
    ),
    ("deepstack_visual_indexes", "qwen3vl", vision("qwen3vl", deepstack_visual_indexes=[2, 0])),
    ("deepstack_visual_indexes", "qwen3vl", vision("qwen3vl", deepstack_visual_indexes=[0, 4])),
    ("num_patches must be a square number (found 8", "lfm2", vision("lfm2", num_patches=8)),
    ("linear_1.weight: expected the shape", "lfm2", {"projector_hidden_size": 96}),
]


@pytest.mark.parametrize("problem, name, changes", OTHER_REFUSALS)
def test_broken_projectors_of_other_families_are_refused(tmp_path, problem, name, changes):
    edit_json(written(tmp_path, name) / "config.json", **changes)
    assert problem in refused(tmp_path)
    assert "\n" not in refused(tmp_path)


QWEN_ONLY = "hidden_act spatial_merge_size temporal_patch_size"
# Of which readers know one value: in vision_config, and beside it.
ONLY = {
    "gemma3": ("hidden_act", ""), "idefics3": ("hidden_act", ""), "qwen2vl": (QWEN_ONLY, ""),
    "qwen25vl": (f"{QWEN_ONLY} window_size", ""), "qwen3vl": (QWEN_ONLY, ""), "qwen35": (QWEN_ONLY, ""),
    "llava": (
        "hidden_act model_type", "multimodal_projector_bias projector_hidden_act vision_feature_select_strategy",
    ),
    "llava16": ("hidden_act", "use_image_newline_parameter projector_hidden_act"),
    "pixtral": ("hidden_act rope_theta", "projector_hidden_act vision_feature_layer"),
    "mistral3": ("hidden_act rope_theta", "projector_hidden_act vision_feature_layer rms_norm_eps"),
    "internvl": (
        "hidden_act norm_type use_mean_pooling",
        "projector_hidden_act vision_feature_layer vision_feature_select_strategy",
    ),
    "lfm2": ("hidden_act model_type", "projector_hidden_act vision_feature_layer"),
}  # fmt: skip


@pytest.mark.parametrize("name", ONLY)
def test_config_values_that_readers_do_not_know_are_named(tmp_path, name):
    config, folder = CHECKPOINTS[name][0], written(tmp_path, name)
    inner, outer = (names.split() for names in ONLY[name])
    for changes in (*(vision(name, **{key: "odd"}) for key in inner), *({key: "odd"} for key in outer)):
        write_json(folder / "config.json", config | changes)
        (key,) = [key for key, value in {**changes, **changes.get("vision_config", {})}.items() if value == "odd"]
        assert f"{key} must be" in refused(folder), key


@pytest.mark.parametrize("token", [{}, {"9": {"content": "[IMG_BREAK]"}}, {"x": 1}, [1]])
def test_a_missing_line_break_token_is_refused(tmp_path, token):
    write_json(written(tmp_path, "pixtral") / "tokenizer_config.json", {"added_tokens_decoder": token})
    assert "[IMG_BREAK]" in refused(tmp_path) or "unexpected content" in refused(tmp_path)


def test_the_line_break_token_is_found_in_tokenizer_json(tmp_path):
    (written(tmp_path, "mistral3") / "tokenizer_config.json").unlink()
    write_json(tmp_path / "tokenizer.json", {"added_tokens": [{"id": 1, "content": "[IMG_BREAK]"}]})
    tensors = {tensor.name: all_rows(tensor) for tensor in open_projector(tmp_path).tensors}
    wanted = projector("mistral3").tensors["v.token_embd.img_break"]
    assert np.array_equal(tensors["v.token_embd.img_break"].view(np.float32).reshape(-1), wanted)


def test_the_large_internvl_has_rms_norms_and_no_attention_biases():
    """Expect norms of queries and keys, too."""
    path = Path("config.json")
    sizes = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12800}
    values_of_vision = {**sizes, "image_size": 448, "patch_size": 14, "norm_type": "rms_norm", "use_qk_norm": True}
    facts = read_internvl(
        VisionConfig(
            CheckpointConfig({}, path),
            CheckpointConfig(values_of_vision, path),
            CheckpointConfig({"max_patches": 6}, path),
            5120,
        )
    )
    assert {name for name in facts.parts if ".44." in name and "ffn" not in name} == {
        f"v.blk.44.{name}"
        for name in (
            *(f"{one}.weight" for one in ("ln1", "ln2", "ls1", "ls2", "attn_q_norm", "attn_k_norm")),
            *(f"attn_{one}.weight" for one in ("q", "k", "v", "out")), "attn_out.bias",
        )
    }  # fmt: skip
    assert facts.metadata["vision.preproc_max_tiles"] == 6


@pytest.mark.parametrize(("family", "sides", "expected"), [
    (read_internvl, (448, 14), {"attention.layer_norm_epsilon": 1e-6, "projector.scale_factor": 2,
                           "preproc_min_tiles": 1, "preproc_max_tiles": 12}),
    (read_lfm2vl, (None, None), {"attention.layer_norm_epsilon": 1e-6, "projector.scale_factor": 2}),
    (read_llava15, (336, 14), {"attention.layer_norm_epsilon": 1e-5, "feature_layer": [23]}),
])  # fmt: skip
def test_missing_vision_config_values_get_transformers_defaults(
    family, sides: tuple[int | None, int | None], expected: dict[str, Any]
):
    path = Path("config.json")
    sizes = {"hidden_size": 64, "num_hidden_layers": 24, "num_attention_heads": 4, "intermediate_size": 96}
    sizes |= dict(zip(("image_size", "patch_size"), sides, strict=True))
    facts = family(
        VisionConfig(CheckpointConfig({}, path), CheckpointConfig(sizes, path), CheckpointConfig({}, path), 5120)
    )
    assert {key: facts.metadata[f"vision.{key}"] for key in expected} == expected
    if family is read_lfm2vl:
        assert (facts.encoder.side, facts.encoder.patch, facts.parts["mm.1.weight"].shape) == (256, 16, (2560, 256))


def test_a_missing_width_of_llama_is_4096(tmp_path):
    edit_json(written(tmp_path, "llava") / "config.json", text_config={"model_type": "llama"})
    assert "expected the shape [4096, 96] by config.json" in refused(tmp_path)


def test_tensors_that_the_encoder_does_not_read_are_left_out(tmp_path):
    """Leave out position ids and SigLIP's own head, as llama.cpp's converter does."""
    count = len(open_projector(written(tmp_path, "gemma3")).tensors)
    tower = "vision_tower.vision_model."
    change_tensors(tmp_path, **{f"{tower}head.probe": np.ones(3), f"{tower}embeddings.position_ids": np.ones(3)})
    assert len(open_projector(tmp_path).tensors) == count


def test_a_projector_of_a_gguf_file_is_refused(tmp_path, cli):
    (tmp_path / "model.gguf").touch()
    code, _, err = cli("quantize", str(tmp_path / "model.gguf"), "Q8_0", "--mmproj")
    assert code == 2 and "folder of a Hugging Face checkpoint" in err
