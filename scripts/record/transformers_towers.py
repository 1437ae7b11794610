"""Vision encoders of transformers whose tensors have other names than SigLIP's, with the weights of a GGUF file.

Each function takes all tensors, float64 torch by name, the numbers of a file, and pixels [1, 3, rows, columns]; it
returns the rows [1, rows, width of the language model].
"""

from types import SimpleNamespace

import torch
from transformers import (
    InternVLVisionConfig,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)
from transformers.models.internvl.modeling_internvl import (
    InternVLModel,
    InternVLMultiModalProjector,
    InternVLVisionModel,
)
from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlMultiModalProjector
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

Tensors = dict[str, torch.Tensor]


def ready(module: torch.nn.Module, tensors: Tensors, epsilon: float) -> torch.nn.Module:
    """With these weights, none missing and none too many, and this epsilon in all norms."""
    module.double().load_state_dict(tensors)
    for part in module.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(part, name):
                setattr(part, name, epsilon)
    return module.eval()


def renamed(tensors: Tensors, whole: dict[str, str], layer: dict[str, str], layers: str) -> Tensors:
    """By transformers' names: of tensors that are there once, of those of a layer, of the list of layers."""
    found = {}
    for name, values in tensors.items():
        stem, end = name.rsplit(".", 1)
        if stem in whole:
            found[f"{whole[stem]}.{end}"] = values
        elif layer and stem.startswith("v.blk."):
            _, _, number, part = stem.split(".")
            found[f"{layers}.{number}.{layer[part]}.{end}"] = values
    return found


def in_order_of_squares(pixels: torch.Tensor, patch: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches as Qwen's encoders take them, of two frames that are the same, and the picture's grid."""
    _, _, rows, columns = pixels.shape
    down, right = rows // patch // merge, columns // patch // merge
    cut = pixels[0].reshape(3, down, merge, patch, right, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
    cut = cut.reshape(-1, 3, 1, patch, patch).expand(-1, -1, 2, -1, -1)
    return cut.reshape(len(cut), -1), torch.tensor([[1, down * merge, right * merge]])


def with_qkv(tensors: Tensors) -> Tensors:
    """Fuse queries, keys and values, and the two frames' patch convolutions."""
    found = {name: values for name, values in tensors.items() if ".attn_" not in name or ".attn_out" in name}
    for name in tensors:
        if ".attn_q." in name:
            joined = [tensors[name.replace("attn_q", f"attn_{part}")] for part in "qkv"]
            found[name.replace("attn_q", "attn_qkv")] = torch.cat(joined)
    frames = found.pop("v.patch_embd.weight"), found.pop("v.patch_embd.weight.1")
    return {**found, "v.patch_embd.weight": torch.stack(frames, dim=2)}


QWEN = {"v.patch_embd": "patch_embed.proj", "v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}
QWEN_LAYER = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}


def qwen2vl(tensors: Tensors, config: dict, pixels: torch.Tensor) -> torch.Tensor:
    v = config["vision"]
    of = {"depth": v["num_hidden_layers"], "embed_dim": v["hidden_size"], "hidden_size": config["out"],
          "mlp_ratio": v["intermediate_size"] // v["hidden_size"], "num_heads": v["num_attention_heads"],
          "patch_size": v["patch_size"], "spatial_merge_size": config["merge"]}  # fmt: skip
    layer = {**QWEN_LAYER, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    model = Qwen2VisionTransformerPretrainedModel(Qwen2VLConfig(vision_config=of).vision_config)
    ready(model, renamed(with_qkv(tensors), QWEN, layer, "blocks"), v["layer_norm_eps"])
    patches, grid = in_order_of_squares(pixels, v["patch_size"], config["merge"])
    return model(patches, grid_thw=grid).pooler_output[None]


def qwen25vl(tensors: Tensors, config: dict, pixels: torch.Tensor) -> torch.Tensor:
    v, layers = config["vision"], config["vision"]["num_hidden_layers"]
    of = {"depth": layers, "hidden_size": v["hidden_size"], "out_hidden_size": config["out"],
          "intermediate_size": v["intermediate_size"], "num_heads": v["num_attention_heads"],
          "patch_size": v["patch_size"], "spatial_merge_size": config["merge"],
          "fullatt_block_indexes": list(range(config["pattern"] - 1, layers, config["pattern"]))}  # fmt: skip
    layer = {**QWEN_LAYER, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    model = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLConfig(vision_config=of).vision_config)
    ready(model, renamed(with_qkv(tensors), QWEN, layer, "blocks"), v["layer_norm_eps"])
    patches, grid = in_order_of_squares(pixels, v["patch_size"], config["merge"])
    return model(patches, grid_thw=grid).pooler_output[None]


DEEP = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


def qwen3vl(tensors: Tensors, config: dict, pixels: torch.Tensor) -> torch.Tensor:
    """Rows of the last layer, and beside them those of the ones that go deep."""
    v = config["vision"]
    of = {"depth": v["num_hidden_layers"], "hidden_size": v["hidden_size"], "out_hidden_size": config["out"],
          "intermediate_size": v["intermediate_size"], "num_heads": v["num_attention_heads"],
          "patch_size": v["patch_size"], "spatial_merge_size": config["merge"], "deepstack_visual_indexes":
          config["deep"], "num_position_embeddings": (v["image_size"] // v["patch_size"]) ** 2}  # fmt: skip
    whole = {"v.patch_embd": "patch_embed.proj", "v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1",
             "mm.2": "merger.linear_fc2", "v.position_embd": "pos_embed"}  # fmt: skip
    for number, layer in enumerate(config["deep"]):
        whole |= {
            f"v.deepstack.{layer}.{part}": f"deepstack_merger_list.{number}.{name}" for part, name in DEEP.items()
        }
    layer = {**QWEN_LAYER, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
    found = dict(tensors)
    frames = found.pop("v.patch_embd.weight"), found.pop("v.patch_embd.weight.1")
    found["v.patch_embd.weight"] = torch.stack(frames, dim=2)
    model = Qwen3VLVisionModel(Qwen3VLConfig(vision_config=of).vision_config)
    ready(model, renamed(found, whole, layer, "blocks"), v["layer_norm_eps"])
    patches, grid = in_order_of_squares(pixels, v["patch_size"], config["merge"])
    seen = model(patches, grid_thw=grid)
    return torch.cat((seen.pooler_output, *seen.deepstack_features), dim=1)[None]


def in_halves(tensors: Tensors, heads: int) -> Tensors:
    """Permute queries and keys from neighbouring pairs to pairs of a head's halves."""

    def halved(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)

    return {
        name: halved(values) if ".attn_q." in name or ".attn_k." in name else values for name, values in tensors.items()
    }


PIXTRAL = {"v.patch_embd": "patch_conv", "v.pre_ln": "ln_pre"}
PIXTRAL_LAYER = {"ln1": "attention_norm", "ln2": "ffn_norm", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
                 "attn_v": "attention.v_proj", "attn_out": "attention.o_proj", "ffn_up": "feed_forward.up_proj",
                 "ffn_gate": "feed_forward.gate_proj", "ffn_down": "feed_forward.down_proj"}  # fmt: skip
MISTRAL = {
    "mm.input_norm": "norm",
    "mm.patch_merger": "patch_merger.merging_layer",
    "mm.1": "linear_1",
    "mm.2": "linear_2",
}


def pixtral(tensors: Tensors, config: dict, pixels: torch.Tensor) -> torch.Tensor:
    v, merge, patch = config["vision"], config["merge"], config["vision"]["patch_size"]
    of = PixtralVisionConfig(**{**v, "hidden_act": "silu"})
    model = PixtralVisionModel(of)
    halved = in_halves(tensors, v["num_attention_heads"])
    ready(model, renamed(halved, PIXTRAL, PIXTRAL_LAYER, "transformer.layers"), v["layer_norm_eps"])
    whole = SimpleNamespace(vision_config=of, merge_text_config=SimpleNamespace(hidden_size=config["out"],
    rms_norm_eps=1e-5),
                            spatial_merge_size=merge, vision_feature_layer=-1, projector_hidden_act="gelu",
                            multimodal_projector_bias=True)  # fmt: skip
    rows = model(pixels).last_hidden_state[0]
    if "mm.patch_merger.weight" in tensors:
        projector = ready(Mistral3MultiModalProjector(whole), renamed(tensors, MISTRAL, {}, ""), v["layer_norm_eps"])
        rows = projector(rows, [pixels.shape[2:]])
    else:
        rows = ready(LlavaMultiModalProjector(whole), renamed(tensors, MISTRAL, {}, ""), v["layer_norm_eps"])(rows)
    lines = rows.reshape(pixels.shape[2] // patch // merge, pixels.shape[3] // patch // merge, -1)
    ends = tensors["v.token_embd.img_break"].expand(len(lines), 1, -1)
    return torch.cat((lines, ends), dim=1).reshape(-1, config["out"])[None, :-1]


INTERN = {"v.patch_embd": "embeddings.patch_embeddings.projection"}
INTERN_LAYER = {"ln1": "layernorm_before", "ln2": "layernorm_after", "attn_q": "attention.q_proj", "attn_k":
                "attention.k_proj", "attn_v": "attention.v_proj", "attn_out": "attention.projection_layer",
                "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2", "ls1": "lambda_1", "ls2": "lambda_2"}  # fmt: skip
INTERN_MLP = {"mm.model.mlp.0": "layer_norm", "mm.model.mlp.1": "linear_1", "mm.model.mlp.3": "linear_2"}


def internvl(tensors: Tensors, config: dict, pixels: torch.Tensor) -> torch.Tensor:
    v = {name: value for name, value in config["vision"].items() if name not in ("image_size", "patch_size")}
    sides = {name: [config["vision"][name]] * 2 for name in ("image_size", "patch_size")}
    of = InternVLVisionConfig(**v, **sides, attention_bias=True, hidden_act="gelu", use_mean_pooling=True)
    found = renamed(tensors, INTERN, INTERN_LAYER, "encoder.layer")
    found = {name.replace("lambda_1.weight", "lambda_1").replace("lambda_2.weight", "lambda_2"): values
             for name, values in found.items()}  # fmt: skip
    found["embeddings.cls_token"] = tensors["v.class_embd"].reshape(1, 1, -1)
    found["embeddings.position_embeddings"] = tensors["v.position_embd.weight"][None]
    model = ready(InternVLVisionModel(of), found, v["layer_norm_eps"])
    whole = SimpleNamespace(vision_config=of, merge_text_config=SimpleNamespace(hidden_size=config["out"]),
                            downsample_ratio=1 / config["merge"], projector_hidden_act="gelu")  # fmt: skip
    rows = model(pixels).last_hidden_state[:, 1:]
    side = int(rows.shape[1] ** 0.5)
    rows = InternVLModel.pixel_shuffle(None, rows.reshape(1, side, side, -1), scale_factor=whole.downsample_ratio)
    projector = ready(InternVLMultiModalProjector(whole), renamed(tensors, INTERN_MLP, {}, ""), 1e-5)
    return projector(rows.reshape(1, -1, rows.shape[-1]))


SIGLIP2 = {"v.patch_embd": "embeddings.patch_embedding", "v.position_embd": "embeddings.position_embedding",
           "v.post_ln": "post_layernorm"}  # fmt: skip
SIGLIP2_LAYER = {"ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
                 "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1",
                 "ffn_down": "mlp.fc2"}  # fmt: skip
LFM2_MLP = {"mm.input_norm": "layer_norm", "mm.1": "linear_1", "mm.2": "linear_2"}


def lfm2(tensors: Tensors, config: dict, pixels: torch.Tensor) -> torch.Tensor:
    v, merge, patch = config["vision"], config["merge"], config["vision"]["patch_size"]
    of = {name: value for name, value in v.items() if name != "image_size"}
    of = Siglip2VisionConfig(**of, num_patches=(v["image_size"] // patch) ** 2, vision_use_head=False)
    found = renamed(tensors, SIGLIP2, SIGLIP2_LAYER, "encoder.layers")
    convolution = found["embeddings.patch_embedding.weight"]
    found["embeddings.patch_embedding.weight"] = convolution.permute(0, 2, 3, 1).reshape(len(convolution), -1)
    model = ready(Siglip2VisionModel(of), found, v["layer_norm_eps"])
    rows, columns = pixels.shape[2] // patch, pixels.shape[3] // patch
    cut = pixels[0].reshape(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
    everywhere = torch.ones((1, rows * columns), dtype=torch.long)
    seen = model(cut, everywhere, torch.tensor([[rows, columns]])).last_hidden_state
    whole = SimpleNamespace(vision_config=of, merge_text_config=SimpleNamespace(hidden_size=config["out"]),
                            downsample_factor=merge, projector_use_layernorm=True, projector_bias=True,
                            projector_hidden_size=len(tensors["mm.1.bias"]), projector_hidden_act="gelu")  # fmt: skip
    projector = ready(Lfm2VlMultiModalProjector(whole), renamed(tensors, LFM2_MLP, {}, ""), 1e-5)
    return projector(seen.reshape(1, rows, columns, -1)).reshape(1, -1, config["out"])


TOWERS = {
    "lfm2": lfm2,
    "internvl": internvl,
    "pixtral": pixtral,
    "qwen2vl_merger": qwen2vl,
    "qwen2.5vl_merger": qwen25vl,
    "qwen3vl_merger": qwen3vl,
}
