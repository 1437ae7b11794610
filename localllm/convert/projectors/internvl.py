"""Convert the projector of InternVL 2.5, 3 and 3.5 in transformers' layout: InternViT, a norm, two matrices."""

from functools import partial

from localllm.arch.vision.internvl import LARGE
from localllm.convert.config import CheckpointConfig
from localllm.convert.projectors.parts import (
    EncoderSizes,
    Parts,
    ProjectorDeclaration,
    ProjectorTensor,
    VisionConfig,
    declare_tensor,
    declare_with_bias,
    read_encoder_sizes,
    repeat_in_layers,
)
from localllm.convert.transforms import reshape

EPSILON = 1e-6  # epsilon of norms that config.json may omit
LEAST_TILES, MOST_TILES = 1, 12  # defaults of preprocessor_config.json


def read_internvl(c: VisionConfig) -> ProjectorDeclaration:
    """Read the configuration of InternVL. Raises ModelError."""
    c.whole.require_value("vision_feature_layer", -1)
    c.whole.require_value("vision_feature_select_strategy", "default")
    c.whole.require_value("projector_hidden_act", "gelu")
    c.vision.require_value("hidden_act", "gelu")
    c.vision.require_value("use_mean_pooling", True)
    h = read_encoder_sizes(c, side=read_side(c.vision, "image_size"), patch=read_side(c.vision, "patch_size"))
    merge = round(1 / c.whole.read_number("downsample_ratio", 0.5))
    if h.side // h.patch % max(merge, 1):
        raise c.whole.make_error(
            f"downsample_ratio: {h.side // h.patch} patches per side must be divisible by the merge size {merge}"
        )
    metadata = {
        "projector_type": "internvl",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.read_number("layer_norm_eps", EPSILON),
        "vision.projector.scale_factor": merge,
        "vision.preproc_min_tiles": c.pictures.read_count("min_patches", LEAST_TILES),
        "vision.preproc_max_tiles": c.pictures.read_count("max_patches", MOST_TILES),
    }
    together = merge**2 * h.width
    parts = {
        "v.class_embd": ProjectorTensor("embeddings.cls_token", (1, 1, h.width), partial(reshape, shape=(h.width,))),
        "v.position_embd.weight": ProjectorTensor(
            "embeddings.position_embeddings",
            (1, h.patches + 1, h.width),
            partial(reshape, shape=(h.patches + 1, h.width)),
        ),
        **declare_with_bias("v.patch_embd", "embeddings.patch_embeddings.projection", *h.convolution),
        **repeat_in_layers(h.layers, "encoder.layer", list_layer_tensors(c, h)),
        **declare_with_bias("mm.model.mlp.0", "layer_norm", together),
        **declare_with_bias("mm.model.mlp.1", "linear_1", h.out, together),
        **declare_with_bias("mm.model.mlp.3", "linear_2", h.out, h.out),
    }
    return ProjectorDeclaration(h, metadata, parts)


def read_side(config: CheckpointConfig, name: str) -> int:
    """Read a side length, which config.json may repeat as [side, side]. Raises ModelError if the two differ."""
    value = config.get(name)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise config.make_error(f"{name} must be the same for both sides")
        value = value[0]
    return CheckpointConfig({name: value}, config.path).read_count(name)


def list_layer_tensors(c: VisionConfig, h: EncoderSizes) -> Parts:
    """List a layer's tensors. Raises ModelError for query and key norms that GGUF's readers would not apply."""
    is_large, biased = (h.width, h.layers) == LARGE, c.vision.read_flag("attention_bias", False)
    c.vision.require_value("norm_type", "rms_norm" if is_large else "layer_norm")
    normed = c.vision.read_flag("use_qk_norm", False)
    if normed and not is_large:
        raise c.vision.make_error(
            "use_qk_norm must be false with norm_type layer_norm: GGUF's readers would ignore the norms"
        )
    norm, matrix = (declare_tensor if is_large else declare_with_bias), declare_with_bias if biased else declare_tensor
    return {
        **norm("ln1", "layernorm_before", h.width),
        **norm("ln2", "layernorm_after", h.width),
        **(declare_tensor("attn_q_norm", "attention.q_norm", h.width) if normed else {}),
        **(declare_tensor("attn_k_norm", "attention.k_norm", h.width) if normed else {}),
        **matrix("attn_q", "attention.q_proj", h.width, h.width),
        **matrix("attn_k", "attention.k_proj", h.width, h.width),
        **matrix("attn_v", "attention.v_proj", h.width, h.width),
        **declare_with_bias("attn_out", "attention.projection_layer", h.width, h.width),
        **declare_with_bias("ffn_up", "mlp.fc1", h.hidden, h.width),
        **declare_with_bias("ffn_down", "mlp.fc2", h.width, h.hidden),
        "ls1.weight": ProjectorTensor("lambda_1", (h.width,)),
        "ls2.weight": ProjectorTensor("lambda_2", (h.width,)),
    }
