"""Convert the projectors of Qwen3-VL and Qwen 3.5: Qwen2-VL's with a position table and DeepStack mergers."""

from math import isqrt

import numpy as np

from localllm.convert.projectors.parts import (
    EncoderSizes,
    Part,
    Parts,
    ProjectorFacts,
    SeeingConfig,
    in_layers,
    sizes_of,
    with_bias,
)
from localllm.convert.projectors.qwen2vl import MERGE, NAMES, frames, shared_metadata


def qwen3vl(c: SeeingConfig) -> ProjectorFacts:
    """Read the configuration. Raises ModelError."""
    c.vision.only("hidden_act", "gelu_pytorch_tanh")
    places, patch = c.vision.count("num_position_embeddings"), c.vision.count("patch_size")
    if isqrt(places) ** 2 != places:
        raise c.vision.refusal(f"num_position_embeddings: {places} is not a square number")
    h = sizes_of(c, NAMES, patch=patch, side=isqrt(places) * patch)
    deep, flags = deep_layers(c, h.layers), np.zeros(h.layers, bool)
    flags[deep] = True
    metadata: dict[str, object] = {
        **shared_metadata(c, "qwen3vl_merger"),
        "use_gelu": True,
        "vision.spatial_merge_size": MERGE,
        "vision.is_deepstack_layers": flags,
    }
    layer = {
        **with_bias("ln1", "norm1", h.width),
        **with_bias("ln2", "norm2", h.width),
        **with_bias("attn_qkv", "attn.qkv", 3 * h.width, h.width),
        **with_bias("attn_out", "attn.proj", h.width, h.width),
        **with_bias("ffn_up", "mlp.linear_fc1", h.hidden, h.width),
        **with_bias("ffn_down", "mlp.linear_fc2", h.width, h.hidden),
    }
    return ProjectorFacts(h, metadata, {**around(h), **in_layers(h.layers, "blocks", layer), **networks(h, deep)})


def deep_layers(c: SeeingConfig, layers: int) -> list[int]:
    """Return the numbers of the layers with a DeepStack merger, in the mergers' order. Raises ModelError."""
    indexes = c.vision.get("deepstack_visual_indexes", [])
    is_plain = isinstance(indexes, list) and all(type(number) is int and 0 <= number < layers for number in indexes)
    if not is_plain or indexes != sorted(set(indexes)):
        raise c.vision.refusal(f"deepstack_visual_indexes: expected numbers of layers below {layers} in their order")
    return list(indexes)


def around(h: EncoderSizes) -> Parts:
    """List the tensors before and after the layers."""
    together = MERGE**2 * h.width
    return {
        **frames(h),
        "v.patch_embd.bias": Part("patch_embed.proj.bias", (h.width,)),
        "v.position_embd.weight": Part("pos_embed.weight", (h.patches, h.width)),
        **with_bias("v.post_ln", "merger.norm", h.width),
        **with_bias("mm.0", "merger.linear_fc1", together, together),
        **with_bias("mm.2", "merger.linear_fc2", h.out, together),
    }


def networks(h: EncoderSizes, deep: list[int]) -> Parts:
    """List a norm and two matrices for each DeepStack merger."""
    parts: dict[str, Part] = {}
    together = MERGE**2 * h.width
    for number, layer in enumerate(deep):
        ours, source = f"v.deepstack.{layer}", f"deepstack_merger_list.{number}"
        parts |= with_bias(f"{ours}.norm", f"{source}.norm", together)
        parts |= with_bias(f"{ours}.fc1", f"{source}.linear_fc1", together, together)
        parts |= with_bias(f"{ours}.fc2", f"{source}.linear_fc2", h.out, together)
    return parts
