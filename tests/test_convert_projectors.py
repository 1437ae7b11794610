"""Projectors out of checkpoints: the tensors that a checkpoint was written from come back, byte for byte.

The checkpoints are written from the projectors whose rows transformers has computed (tests/models/projectors.py), under
transformers' names, so that what is made of them sees what transformers sees.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import edit_json, write_json, write_safetensors
from engines import bound
from models.projectors import PictureGolden, projector, shown
from PIL import Image
from test_convert import all_rows
from test_goldens import nmse

from localllm.convert import open_projector
from localllm.engine.pictures import PictureReader
from localllm.errors import ModelError
from localllm.files.gguf_file import GGUFFile

Tensors = dict[str, np.ndarray]
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
    """By transformers' names: `names` of those that are there once and of a layer's; layers: the list of these."""
    found = {}
    for name, values in tensors.items():
        stem, end = name.rsplit(".", 1)
        layer = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", stem)
        found[f"{layers}.{layer[1]}.{names[layer[2]]}.{end}" if layer else f"{names[stem]}.{end}"] = values
    return found


def of_gemma3(tensors: Tensors, tower: str = "vision_tower.vision_model.", head: str = "") -> Tensors:
    """tower, head: what stands before the names."""
    rest = dict(tensors)
    norm, matrix = rest.pop("mm.soft_emb_norm.weight"), rest.pop("mm.input_projection.weight")
    found = {f"{tower}{name}": values for name, values in renamed(rest, SIGLIP, "encoder.layers").items()}
    found[f"{head}multi_modal_projector.mm_soft_emb_norm.weight"] = norm.astype(np.float64) - 1
    return found | {f"{head}multi_modal_projector.mm_input_projection_weight": matrix}


def gemma3(rows: int, side: int) -> dict[str, Any]:
    """config.json."""
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
    """Queries, keys and values in one matrix, and both frames' patches in one convolution."""
    rest = dict(tensors)
    rest["v.patch_embd.weight"] = np.stack((rest["v.patch_embd.weight"], rest.pop("v.patch_embd.weight.1")), axis=2)
    for name in [name for name in rest if ".attn_q." in name]:
        parts = [rest.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        rest[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    return {f"{tower}{name}": values for name, values in renamed(rest, QWEN | network, "blocks").items()}


def qwen(architecture: str, **vision: Any) -> dict[str, Any]:
    """config.json, where the language model's numbers are beside vision_config."""
    shared = {"num_heads": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {
        "architectures": [architecture], "hidden_size": 96, "vision_config": shared | vision,
    }  # fmt: skip


QWEN2_CONFIG = qwen("Qwen2VLForConditionalGeneration", depth=2, embed_dim=96, hidden_size=96, mlp_ratio=2)
QWEN25_CONFIG = qwen(
    "Qwen2_5_VLForConditionalGeneration", depth=4, hidden_size=96, intermediate_size=112, out_hidden_size=96,
    fullatt_block_indexes=[1, 3], window_size=112, hidden_act="silu",
)  # fmt: skip
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "gemma3": (gemma3(4, 56), of_gemma3),
    "gemma3_odd": (gemma3(25, 75), lambda tensors: of_gemma3(tensors, "model.vision_tower.", "model.")),
    "idefics3": (IDEFICS3_CONFIG, of_idefics3),
    "qwen2vl": (QWEN2_CONFIG, lambda tensors: of_qwen(tensors, QWEN_NETWORK)),
    "qwen25vl": (QWEN25_CONFIG, lambda tensors: of_qwen(tensors, QWEN25_NETWORK, "model.visual.")),
}
# What config.json does not say of pictures of any size: llama.cpp writes this side, transformers has this epsilon.
SIDES = {"qwen2vl": {"side": 560}, "qwen25vl": {"side": 560}}
EPSILON = "clip.vision.attention.layer_norm_epsilon"


def written(folder: Path, name: str) -> Path:
    """The checkpoint of a declared projector."""
    config, under_their_names = CHECKPOINTS[name]
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", PREPARED)
    tensors = dict([TEXT, *under_their_names(projector(name).tensors).items()])
    stored = [(name, "F64" if values.dtype == np.float64 else "F32", values) for name, values in tensors.items()]
    write_safetensors(folder / "model.safetensors", stored)
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_projector(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_same_projector(tmp_path, name):
    """Names, shapes, bytes, and all that readers are told."""
    wanted, found = projector(name, **SIDES.get(name, {})), open_projector(written(tmp_path, name))
    assert {tensor.name: tensor.shape for tensor in found.tensors} == {
        name: values.shape for name, values in wanted.tensors.items()
    }
    for tensor in found.tensors:
        assert tensor.format.name == "F32"
        numbers = all_rows(tensor).view(np.float32).reshape(tensor.shape)
        assert np.array_equal(numbers, wanted.tensors[tensor.name]), tensor.name
    for key, value in (wanted.metadata | ({EPSILON: 1e-6} if name in SIDES else {})).items():
        assert (
            np.allclose(found.metadata[key], value, rtol=1e-6)
            if isinstance(value, float | np.ndarray)
            else (found.metadata[key] == value)
        ), key


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_sees_what_transformers_sees(tmp_path, cli, name):
    """The rows of two pictures by the file that the command makes; the goldens have an epsilon of their own."""
    path = tmp_path / "mmproj.gguf"
    more = "--mmproj", "--force", "--override-kv", f"{EPSILON}=float:0.001"
    code, _, err = cli("quantize", str(written(tmp_path / "model", name)), str(path), "F32", *more)
    assert code == 0, err
    reader, golden = PictureReader(GGUFFile.open(path)), PictureGolden.load(name)
    images = [reader.family.prepared(reader.hyperparameters, Image.fromarray(image)) for image in shown(name)]
    rows = np.concatenate([reader.read(picture) for image in images for picture in image.pictures])
    reader.close()
    assert nmse(golden.some(rows), golden.trained) < bound(1e-10, 1e-6)


def test_halves_become_smaller_files(tmp_path, cli):
    """BF16, as published: convolutions become F32, for readers take no other; and a name beside the folder."""
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
    ("a model that does not see", lambda f: edit_json(f / "config.json", vision_config=None)),
    ("vision_config: expected an object", lambda f: edit_json(f / "config.json", vision_config=[])),
    ("made of Blip2", lambda f: edit_json(f / "config.json", architectures=["Blip2ForConditionalGeneration"])),
    ("mm_tokens_per_image", lambda f: edit_json(f / "config.json", mm_tokens_per_image=25)),
    ("are quantized", lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "gptq"})),
    ("preprocessor_config.json: this file is missing", lambda f: (f / "preprocessor_config.json").unlink()),
    ("image_mean should be a list", lambda f: edit_json(f / "preprocessor_config.json", image_mean=[1])),
    ("no place in projectors", lambda f: change_tensors(f, **{"vision_tower.extra.weight": np.ones(3)})),
    ("has the shape", lambda f: change_tensors(f, **{"vision_tower.vision_model.post_layernorm.bias": np.ones(3)})),
    (
        "no tensor post_layernorm.bias",
        lambda f: change_tensors(f, drop="vision_tower.vision_model.post_layernorm.bias"),
    ),
]


def change_tensors(folder: Path, drop: str = "", **more: np.ndarray) -> None:
    tensors = of_gemma3(projector("gemma3").tensors) | more
    tensors.pop(drop, None)
    write_safetensors(folder / "model.safetensors", [(name, "F32", values) for name, values in tensors.items()])


def test_what_smolvlm_need_not_say(tmp_path):
    """The sizes that transformers takes then, by which a small encoder is refused."""
    folder = written(tmp_path, "idefics3")
    edit_json(folder / "config.json", architectures=["SmolVLMForConditionalGeneration"], vision_config={})
    assert "expected [1152, 3, 32, 32] by config.json" in refused(folder)


@pytest.mark.parametrize("whole", [None, [], [1, 2], [0.5], [1]])
def test_windows_that_readers_cannot_know(tmp_path, whole):
    """Which layers see all is told as one number."""
    folder = written(tmp_path, "qwen25vl")
    edit_json(folder / "config.json", vision_config=QWEN25_CONFIG["vision_config"] | {"fullatt_block_indexes": whole})
    assert "fullatt_block_indexes" in refused(folder)


@pytest.mark.parametrize("problem, change", REFUSALS)
def test_refused(tmp_path, problem, change):
    change(written(tmp_path, "gemma3"))
    assert problem in refused(tmp_path)
    assert "\n" not in refused(tmp_path)


def test_what_the_encoder_does_not_read(tmp_path):
    """Numbers of positions, and SigLIP's own head, are left out as llama.cpp's converter leaves them out."""
    count = len(open_projector(written(tmp_path, "gemma3")).tensors)
    tower = "vision_tower.vision_model."
    change_tensors(tmp_path, **{f"{tower}head.probe": np.ones(3), f"{tower}embeddings.position_ids": np.ones(3)})
    assert len(open_projector(tmp_path).tensors) == count


def test_of_a_file(tmp_path, cli):
    (tmp_path / "model.gguf").touch()
    code, _, err = cli("quantize", str(tmp_path / "model.gguf"), "Q8_0", "--mmproj")
    assert code == 2 and "checkpoint's folder" in err
