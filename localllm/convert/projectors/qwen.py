"""Convert the projectors of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose patches span two video frames."""

from functools import partial
from math import isqrt

import numpy as np

from localllm.arch.vision.qwen2vl import WINDOW
from localllm.convert.projectors.parts import (
    EncoderSizes,
    Parts,
    ProjectorDeclaration,
    ProjectorTensor,
    VisionConfig,
    declare_with_bias,
    read_encoder_sizes,
    repeat_in_layers,
    take_slice,
)
from localllm.convert.transforms import take_strided

MERGE, FRAMES = 2, 2  # readers' defaults: patches per side that become one row, and frames
EPSILON = 1e-6  # epsilon of the norms, in no config.json
SIDE = 560  # pixels; llama.cpp's converter writes it, though images may have any size
NAMES = {"layers": "depth", "heads": "num_heads"}


def read_qwen2vl(c: VisionConfig) -> ProjectorDeclaration:
    """Read the configuration of Qwen2-VL. Raises ModelError."""
    c.vision.require_value("hidden_act", "quick_gelu")
    width = c.vision.read_count("embed_dim")
    hidden = int(width * c.vision.read_number("mlp_ratio", 4.0))
    h = read_encoder_sizes(c, NAMES, side=SIDE, width=width, hidden=hidden)
    metadata = build_shared_metadata(c, "qwen2vl_merger")
    norms = {**declare_with_bias("ln1", "norm1", h.width), **declare_with_bias("ln2", "norm2", h.width)}
    network = {
        **declare_with_bias("ffn_up", "mlp.fc1", h.hidden, h.width),
        **declare_with_bias("ffn_down", "mlp.fc2", h.width, h.hidden),
    }
    parts = {**list_outer_tensors(h), **declare_with_bias("v.post_ln", "merger.ln_q", h.width)}
    return ProjectorDeclaration(
        h, metadata, parts | repeat_in_layers(h.layers, "blocks", norms | split_attention(h) | network)
    )


def read_qwen25vl(c: VisionConfig) -> ProjectorDeclaration:
    """Read Qwen2.5-VL, where the last of every few layers has full attention and the others windows.

    Raises ModelError.
    """
    c.vision.require_value("hidden_act", "silu")
    c.vision.require_value("window_size", WINDOW)
    h = read_encoder_sizes(c, NAMES, side=SIDE)
    full_blocks = c.vision.get("fullatt_block_indexes")
    pattern = (
        full_blocks[0] + 1 if isinstance(full_blocks, list) and full_blocks and isinstance(full_blocks[0], int) else 0
    )
    if pattern < 1 or full_blocks != list(range(pattern - 1, h.layers, pattern)):
        raise c.vision.make_error("fullatt_block_indexes must be layers at a regular interval")
    metadata = build_shared_metadata(c, "qwen2.5vl_merger") | {"use_silu": True, "vision.n_wa_pattern": pattern}
    layer = {
        "ln1.weight": ProjectorTensor("norm1.weight", (h.width,)),
        "ln2.weight": ProjectorTensor("norm2.weight", (h.width,)),
        **split_attention(h),
        **declare_with_bias("ffn_gate", "mlp.gate_proj", h.hidden, h.width),
        **declare_with_bias("ffn_up", "mlp.up_proj", h.hidden, h.width),
        **declare_with_bias("ffn_down", "mlp.down_proj", h.width, h.hidden),
    }
    parts = {**list_outer_tensors(h), "v.post_ln.weight": ProjectorTensor("merger.ln_q.weight", (h.width,))}
    return ProjectorDeclaration(h, metadata, parts | repeat_in_layers(h.layers, "blocks", layer))


def build_shared_metadata(c: VisionConfig, kind: str) -> dict[str, object]:
    """Build the metadata that Qwen2-VL and Qwen2.5-VL share."""
    c.vision.require_value("spatial_merge_size", MERGE)
    c.vision.require_value("temporal_patch_size", FRAMES)
    return {"projector_type": kind, "vision.attention.layer_norm_epsilon": EPSILON}


def list_outer_tensors(h: EncoderSizes) -> dict[str, ProjectorTensor]:
    """List the tensors outside the layers."""
    together = MERGE**2 * h.width
    return {
        **split_frames(h),
        **declare_with_bias("mm.0", "merger.mlp.0", together, together),
        **declare_with_bias("mm.2", "merger.mlp.2", h.out, together),
    }


def split_frames(h: EncoderSizes) -> Parts:
    """Declare the convolution over two frames as one convolution per frame."""
    return {
        f"v.patch_embd.weight{name}": ProjectorTensor(
            "patch_embed.proj.weight",
            (h.width, 3, FRAMES, h.patch, h.patch),
            partial(take_strided, shape=h.convolution, period=FRAMES * h.patch, start=frame * h.patch),
        )
        for frame, name in enumerate(("", ".1"))
    }


def split_attention(h: EncoderSizes) -> dict[str, ProjectorTensor]:
    """Declare queries, keys and values, which are stored in one matrix."""
    parts = declare_with_bias("attn_out", "attn.proj", h.width, h.width)
    for number, name in enumerate(("attn_q", "attn_k", "attn_v")):
        slicer = partial(take_slice, first=number * h.width, count=h.width)
        for ours, part in declare_with_bias(name, "attn.qkv", 3 * h.width, h.width).items():
            parts[ours] = ProjectorTensor(part.theirs, part.shape, slicer)
    return parts


def read_qwen3vl(c: VisionConfig) -> ProjectorDeclaration:
    """Read Qwen3-VL, whose DeepStack layers also feed layers of the language model. Raises ModelError."""
    c.vision.require_value("hidden_act", "gelu_pytorch_tanh")
    places, patch = c.vision.read_count("num_position_embeddings"), c.vision.read_count("patch_size")
    if isqrt(places) ** 2 != places:
        raise c.vision.make_error(f"num_position_embeddings must be a square number (found {places})")
    h = read_encoder_sizes(c, NAMES, patch=patch, side=isqrt(places) * patch)
    deep, flags = list_deepstack_layers(c, h.layers), np.zeros(h.layers, bool)
    flags[deep] = True
    metadata: dict[str, object] = {
        **build_shared_metadata(c, "qwen3vl_merger"),
        "use_gelu": True,
        "vision.spatial_merge_size": MERGE,
        "vision.is_deepstack_layers": flags,
    }
    layer = {
        **declare_with_bias("ln1", "norm1", h.width),
        **declare_with_bias("ln2", "norm2", h.width),
        **declare_with_bias("attn_qkv", "attn.qkv", 3 * h.width, h.width),
        **declare_with_bias("attn_out", "attn.proj", h.width, h.width),
        **declare_with_bias("ffn_up", "mlp.linear_fc1", h.hidden, h.width),
        **declare_with_bias("ffn_down", "mlp.linear_fc2", h.width, h.hidden),
    }
    return ProjectorDeclaration(
        h,
        metadata,
        {
            **list_qwen3vl_outer_tensors(h),
            **repeat_in_layers(h.layers, "blocks", layer),
            **list_merger_tensors(h, deep),
        },
    )


def list_deepstack_layers(c: VisionConfig, layers: int) -> list[int]:
    """Return the indices of the layers with a DeepStack merger, in order. Raises ModelError."""
    indexes = c.vision.get("deepstack_visual_indexes", [])
    is_plain = isinstance(indexes, list) and all(type(number) is int and 0 <= number < layers for number in indexes)
    if not is_plain or indexes != sorted(set(indexes)):
        raise c.vision.make_error(f"deepstack_visual_indexes must be ascending layer indices below {layers}")
    return list(indexes)


def list_qwen3vl_outer_tensors(h: EncoderSizes) -> Parts:
    """List the tensors outside the layers."""
    together = MERGE**2 * h.width
    return {
        **split_frames(h),
        "v.patch_embd.bias": ProjectorTensor("patch_embed.proj.bias", (h.width,)),
        "v.position_embd.weight": ProjectorTensor("pos_embed.weight", (h.patches, h.width)),
        **declare_with_bias("v.post_ln", "merger.norm", h.width),
        **declare_with_bias("mm.0", "merger.linear_fc1", together, together),
        **declare_with_bias("mm.2", "merger.linear_fc2", h.out, together),
    }


def list_merger_tensors(h: EncoderSizes, deep: list[int]) -> Parts:
    """List the norm and two matrices of each DeepStack merger.

    deep: indices of the layers that have one.
    """
    parts: dict[str, ProjectorTensor] = {}
    together = MERGE**2 * h.width
    for number, layer in enumerate(deep):
        ours, source = f"v.deepstack.{layer}", f"deepstack_merger_list.{number}"
        parts |= declare_with_bias(f"{ours}.norm", f"{source}.norm", together)
        parts |= declare_with_bias(f"{ours}.fc1", f"{source}.linear_fc1", together, together)
        parts |= declare_with_bias(f"{ours}.fc2", f"{source}.linear_fc2", h.out, together)
    return parts
