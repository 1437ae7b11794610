"""Hunyuan's dense models and those with experts (Tencent 2025), the text part of HunyuanOCR, Maincoder.

Unlike llama: each head of queries and keys is normalized after its rotation; rotated pairs are half a head apart, but
not in Maincoder. One model has experts and a shared one.
"""

from dataclasses import replace

from localllm.arch.attention import (
    TransformerHyperparameters,
    normalize_heads,
    project_qkv,
    rotate_heads,
    select_rope_factors,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, AttentionScores, Builder, HyperparameterReader, PagedState, Weight, Weights
from localllm.arch.feed_forward import apply_feed_forward_or_experts, apply_shared_expert, read_routing
from localllm.arch.rope import add_sections


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    """Read the hyperparameters; alpha scales RoPE's base for a longer context (NTK). Raises ModelError."""
    h = TransformerHyperparameters(
        **TransformerHyperparameters.read_shared_fields(fields, interleaved=fields.arch == "maincoder")
    )
    rope, alpha = h.attention.rope, fields.read_number("rope.scaling.alpha", 0.0)
    if fields.arch == "hunyuan_vl":
        rope = add_sections(fields, rope)
    elif fields.has("rope.dimension_sections"):
        raise fields.make_unsupported_error(
            f"{fields.format_key('rope.dimension_sections')} is not supported in {fields.arch} models"
        )
    if alpha and fields.arch in ("maincoder", "hunyuan-moe"):
        raise fields.make_unsupported_error(
            f"{fields.format_key('rope.scaling.alpha')} is not supported in {fields.arch} models"
        )
    if alpha and rope.head_dim <= 2:
        raise fields.make_error(
            f"{fields.format_key('rope.scaling.alpha')} needs a head dimension above 2 (found {rope.head_dim})"
        )
    if alpha:
        rope = replace(rope, base=rope.base * alpha ** (rope.head_dim / (rope.head_dim - 2)))
    routing = read_routing(fields) if fields.arch == "hunyuan-moe" else None
    return replace(h, attention=replace(h.attention, rope=rope), routing=routing)


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, factors=select_rope_factors(b, w, h))


def block(
    b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    q, k = normalize_heads(b, w, h, *rotate_heads(b, h, state.layer, q, k, factors))
    y = b.attend(q, k, v, state, AttentionScores(h.attention.heads[state.layer], h.scale))
    x = b.add(x, b.linear(y, w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_shared_expert))


CHECKPOINTS = {
    "MaincoderForCausalLM": {
        "arch": "maincoder", "layer": "attention head_norms gated norms", "read": "@hunyuan.read_maincoder",
    },
    "HunYuanDenseV1ForCausalLM": {
        "arch": "hunyuan-dense", "layer": "attention head_norms gated norms", "read": "@hunyuan.read_hunyuan",
        "defaults": {"rms_norm_eps": 1e-5},
    },
    "HunYuanVLForConditionalGeneration": {
        "arch": "hunyuan_vl", "like": "HunYuanDenseV1ForCausalLM", "sees": True, "unread": r"(model\.)?vit\..*",
        "read": "@hunyuan.read_hunyuan_vl",
    },
    "HunYuanMoEV1ForCausalLM": {
        "arch": "hunyuan-moe", "like": "HunYuanDenseV1ForCausalLM",
        "layer": "attention head_norms norms experts shared_expert",
        "experts": "moe_intermediate_size num_experts moe_topk",
        "sizes": {"shared_hidden": "num_shared_expert=1 * intermediate_size"},
        "amounts": {
            "expert_feed_forward_length": "expert_hidden", "expert_shared_feed_forward_length": "shared_hidden",
            "expert_shared_count": "num_shared_expert=1",
        },
        "read": "@hunyuan.read_hunyuan_moe",
    },
}  # fmt: skip
