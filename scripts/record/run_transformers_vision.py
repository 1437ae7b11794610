#!/usr/bin/env python3
"""Run small vision encoders in transformers, in float64, for scripts/record/record_pictures.py.

Needs a Python that has torch and transformers.

Reads a job per line of stdin, as JSON: {"kind": of the projector, "tensors": .npz, "config": {...}, "pixels": .npz of
[3, rows, columns] each, "out": path}; writes an .npz with `rows`, float32 [rows of all pictures, width]. With "text":
{...}, "text_tensors": .npz, "tokens": .npz of `tokens` and "grids" also `logits`, float32 [vocab], see
transformers_text.py.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
from transformers.models.idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector, Idefics3VisionTransformer
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, image_size_to_num_patches
from transformers_text import logits
from transformers_towers import TOWERS

LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
WHOLE = {"v.patch_embd": "embeddings.patch_embedding", "v.position_embd": "embeddings.position_embedding",
         "v.pre_ln": "pre_layrnorm", "v.post_ln": "post_layernorm"}  # fmt: skip


def tower_name(name: str) -> str | None:
    """Return a tensor's in transformers; None for one of the projector."""
    if name == "v.class_embd":
        return "embeddings.class_embedding"
    stem, _, end = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{end}"
    if stem.startswith("v.blk."):
        _, _, layer, part = stem.split(".")
        return f"encoder.layers.{layer}.{LAYER[part]}.{end}"
    return None


def filled(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Load weights into a model; only unused ones may be missing."""
    missing, unexpected = module.double().load_state_dict(tensors, strict=False)
    assert not unexpected and all(
        "position_ids" in name or "post_layernorm" in name or "head" in name for name in missing
    )
    return module.eval()


def gemma3(tower: dict, mm: dict, config: dict, pixels: torch.Tensor) -> torch.Tensor:
    vision = filled(SiglipVisionModel(SiglipVisionConfig(**config["vision"], vision_use_head=False)), tower)
    per_side = config["vision"]["image_size"] // config["vision"]["patch_size"] // config["merge"]
    of = SimpleNamespace(vision_config=vision.config, merge_text_config=SimpleNamespace(hidden_size=config["out"]),
                         mm_tokens_per_image=per_side**2)  # fmt: skip
    weights = {"mm_soft_emb_norm.weight": mm["mm.soft_emb_norm.weight"] - 1,
               "mm_input_projection_weight": mm["mm.input_projection.weight"]}  # fmt: skip
    return filled(Gemma3MultiModalProjector(of), weights)(vision(pixels).last_hidden_state)


def idefics3(tower: dict, mm: dict, config: dict, pixels: torch.Tensor) -> torch.Tensor:
    vision = filled(Idefics3VisionTransformer(Idefics3VisionConfig(**config["vision"])), tower)
    of = SimpleNamespace(scale_factor=config["merge"], vision_config=vision.config,
                         merge_text_config=SimpleNamespace(hidden_size=config["out"]))  # fmt: skip
    connector = filled(Idefics3Connector(of), {"modality_projection.proj.weight": mm["mm.model.fc.weight"]})
    return connector(vision(pixels).last_hidden_state)


def mlp(tower: dict, mm: dict, config: dict, pixels: torch.Tensor) -> torch.Tensor:
    vision = filled(CLIPVisionModel(CLIPVisionConfig(**config["vision"], hidden_act="quick_gelu")), tower)
    rows = vision(pixels, output_hidden_states=True).hidden_states[config["layer"]][:, 1:]
    rows = torch.nn.functional.gelu(rows @ mm["mm.0.weight"].T + mm["mm.0.bias"])
    return rows @ mm["mm.2.weight"].T + mm["mm.2.bias"]


def put_together(
    rows: torch.Tensor, tensors: dict, config: dict, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of LLaVA 1.6's images with line ends and without bars, and the expanded tokens."""
    v, sizes = config["vision"], [tuple(size) for size in config["sizes"]]
    per_square = (v["image_size"] // v["patch_size"]) ** 2
    counts = [image_size_to_num_patches(size, config["cuts"], v["image_size"]) for size in sizes]
    of = SimpleNamespace(vision_config=SimpleNamespace(**v), image_grid_pinpoints=config["cuts"])
    squares = rows.reshape(-1, per_square, rows.shape[1]).split(counts)
    packed, _ = LlavaNextModel.pack_image_features(
        SimpleNamespace(config=of), squares, torch.tensor(sizes), "default", tensors["v.image_newline"]
    )
    kept, number = [], 0
    for place, token in enumerate(tokens.tolist()):
        if token >= 0:
            kept.append(token)
        elif place == 0 or tokens[place - 1] >= 0:
            kept += [-1] * len(packed[number])
            number += 1
    return torch.cat(packed), torch.tensor(kept)


FAMILIES = {"gemma3": gemma3, "idefics3": idefics3, "mlp": mlp}


def read(path: str) -> dict[str, torch.Tensor]:
    """Read a tensor as float64."""
    with np.load(path) as file:
        return {name: torch.from_numpy(np.array(values, np.float64)) for name, values in file.items()}


@torch.no_grad()
def run(job: dict) -> None:
    tensors, kind = read(job["tensors"]), job["kind"]
    pictures = [pixels[None] for pixels in read(job["pixels"]).values()]
    if kind in TOWERS:
        rows = torch.cat([TOWERS[kind](tensors, job["config"], picture)[0] for picture in pictures])
    else:
        tower = {other: values for name, values in tensors.items() if (other := tower_name(name))}
        mm = {name: values for name, values in tensors.items() if name.startswith("mm.")}
        rows = torch.cat([FAMILIES[kind](tower, mm, job["config"], picture)[0] for picture in pictures])
    found = {"rows": rows}
    if "text" in job:
        tokens = read(job["tokens"])["tokens"].long()
        if "cuts" in job["config"]:
            rows, tokens = put_together(rows, tensors, job["config"], tokens)
        found["logits"] = logits(job["text"], read(job["text_tensors"]), tokens, rows, job["grids"])
    np.savez(job["out"], **{name: values.numpy().astype(np.float32) for name, values in found.items()})


if __name__ == "__main__":
    for line in sys.stdin:
        run(json.loads(line))
