"""Convert the projectors of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose patches span two frames of a video."""

from functools import partial
from math import isqrt

import numpy as np

from localllm.arch.vision.qwen2vl import WINDOW
from localllm.convert.projectors.parts import (
    EncoderSizes,
    Part,
    Parts,
    ProjectorFacts,
    SeeingConfig,
    in_layers,
    sizes_of,
    slice_of,
    with_bias,
)
from localllm.convert.transforms import take_strided

MERGE, FRAMES = 2, 2  # readers' defaults: patches per side that become one row, and frames
EPSILON = 1e-6  # epsilon of the norms, in no config.json
SIDE = 560  # pixels; llama.cpp's converter writes it, though images may have any size
NAMES = {"layers": "depth", "heads": "num_heads"}


def qwen2vl(c: SeeingConfig) -> ProjectorFacts:
    """Read Qwen2-VL. Raises ModelError."""
    c.vision.only("hidden_act", "quick_gelu")
    width = c.vision.count("embed_dim")
    hidden = int(width * c.vision.number("mlp_ratio", 4.0))
    h = sizes_of(c, NAMES, side=SIDE, width=width, hidden=hidden)
    metadata = shared_metadata(c, "qwen2vl_merger")
    norms = {**with_bias("ln1", "norm1", h.width), **with_bias("ln2", "norm2", h.width)}
    network = {
        **with_bias("ffn_up", "mlp.fc1", h.hidden, h.width),
        **with_bias("ffn_down", "mlp.fc2", h.width, h.hidden),
    }
    parts = {**around(h), **with_bias("v.post_ln", "merger.ln_q", h.width)}
    return ProjectorFacts(h, metadata, parts | in_layers(h.layers, "blocks", norms | attention(h) | network))


def qwen25vl(c: SeeingConfig) -> ProjectorFacts:
    """Read Qwen2.5-VL: the last of every few layers has full attention, the others windows.

    Raises ModelError.
    """
    c.vision.only("hidden_act", "silu")
    c.vision.only("window_size", WINDOW)
    h = sizes_of(c, NAMES, side=SIDE)
    full_blocks = c.vision.get("fullatt_block_indexes")
    pattern = (
        full_blocks[0] + 1 if isinstance(full_blocks, list) and full_blocks and isinstance(full_blocks[0], int) else 0
    )
    if pattern < 1 or full_blocks != list(range(pattern - 1, h.layers, pattern)):
        raise c.vision.refusal("fullatt_block_indexes must be layers at a regular interval")
    metadata = shared_metadata(c, "qwen2.5vl_merger") | {"use_silu": True, "vision.n_wa_pattern": pattern}
    layer = {
        "ln1.weight": Part("norm1.weight", (h.width,)),
        "ln2.weight": Part("norm2.weight", (h.width,)),
        **attention(h),
        **with_bias("ffn_gate", "mlp.gate_proj", h.hidden, h.width),
        **with_bias("ffn_up", "mlp.up_proj", h.hidden, h.width),
        **with_bias("ffn_down", "mlp.down_proj", h.width, h.hidden),
    }
    parts = {**around(h), "v.post_ln.weight": Part("merger.ln_q.weight", (h.width,))}
    return ProjectorFacts(h, metadata, parts | in_layers(h.layers, "blocks", layer))


def shared_metadata(c: SeeingConfig, kind: str) -> dict[str, object]:
    """Build the metadata that Qwen2-VL and Qwen2.5-VL share."""
    c.vision.only("spatial_merge_size", MERGE)
    c.vision.only("temporal_patch_size", FRAMES)
    return {"projector_type": kind, "vision.attention.layer_norm_epsilon": EPSILON}


def around(h: EncoderSizes) -> dict[str, Part]:
    """List the tensors before and after the layers."""
    together = MERGE**2 * h.width
    return {
        **frames(h),
        **with_bias("mm.0", "merger.mlp.0", together, together),
        **with_bias("mm.2", "merger.mlp.2", h.out, together),
    }


def frames(h: EncoderSizes) -> Parts:
    """Split the convolution of two frames into one per frame."""
    return {
        f"v.patch_embd.weight{name}": Part(
            "patch_embed.proj.weight",
            (h.width, 3, FRAMES, h.patch, h.patch),
            partial(take_strided, shape=h.convolution, period=FRAMES * h.patch, start=frame * h.patch),
        )
        for frame, name in enumerate(("", ".1"))
    }


def attention(h: EncoderSizes) -> dict[str, Part]:
    """Split queries, keys and values, which are stored in one matrix."""
    parts = with_bias("attn_out", "attn.proj", h.width, h.width)
    for number, name in enumerate(("attn_q", "attn_k", "attn_v")):
        slicer = partial(slice_of, first=number * h.width, count=h.width)
        for ours, part in with_bias(name, "attn.qkv", 3 * h.width, h.width).items():
            parts[ours] = Part(part.theirs, part.shape, slicer)
    return parts


def qwen3vl(c: SeeingConfig) -> ProjectorFacts:
    """Read Qwen3-VL, some of whose layers feed layers of the language model. Raises ModelError."""
    c.vision.only("hidden_act", "gelu_pytorch_tanh")
    places, patch = c.vision.count("num_position_embeddings"), c.vision.count("patch_size")
    if isqrt(places) ** 2 != places:
        raise c.vision.refusal(f"num_position_embeddings must be a square number (found {places})")
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
    return ProjectorFacts(
        h, metadata, {**qwen3vl_around(h), **in_layers(h.layers, "blocks", layer), **networks(h, deep)}
    )


def deep_layers(c: SeeingConfig, layers: int) -> list[int]:
    """Return the indices of the layers with a DeepStack merger, in order. Raises ModelError."""
    indexes = c.vision.get("deepstack_visual_indexes", [])
    is_plain = isinstance(indexes, list) and all(type(number) is int and 0 <= number < layers for number in indexes)
    if not is_plain or indexes != sorted(set(indexes)):
        raise c.vision.refusal(f"deepstack_visual_indexes must be ascending layer indices below {layers}")
    return list(indexes)


def qwen3vl_around(h: EncoderSizes) -> Parts:
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
