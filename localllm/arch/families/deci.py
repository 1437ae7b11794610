"""Llama-Nemotron, a pruned Llama (NVIDIA 2025, arXiv 2505.00949), and DeciLM.

Unlike llama: layers differ in heads and widths. A layer without key-value heads has one matrix in place of attention,
one without heads nothing; and a layer without a feed-forward network is skipped as a whole, as in llama.cpp.
"""

from collections.abc import Sequence

from localllm.arch.attention import (
    RMS_EPSILON,
    AttentionHyperparameters,
    TransformerHyperparameters,
    attend,
    project_qkv,
    select_rope_factors,
)
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward
from localllm.arch.rope import read_rope


@frozen
class DeciHyperparameters(TransformerHyperparameters):
    feeds: tuple[bool, ...]  # by layer, whether it has a feed-forward network

    def list_states(self) -> Sequence[PagedState]:
        a = self.attention
        return [
            PagedState(layer, kv_heads, a.head_dim, a.head_dim)
            for layer, kv_heads in enumerate(a.kv_heads)
            if a.heads[layer] and kv_heads and self.feeds[layer]
        ]


def read(fields: HyperparameterReader) -> DeciHyperparameters:
    common = fields.read_common_fields()
    heads, kv_heads = (
        fields.read_counts(f"attention.{name}", common["layers"], 0) for name in ("head_count", "head_count_kv")
    )
    if not heads[0] or any(kv_count and count % kv_count for count, kv_count in zip(heads, kv_heads, strict=True)):
        raise fields.make_error(
            f"{fields.format_key('attention.head_count')} must be divisible by attention.head_count_kv in every layer"
        )
    head_dim = fields.read_count("attention.key_length", common["width"] // heads[0])
    if fields.read_count("attention.value_length", head_dim) != head_dim:
        raise fields.make_unsupported_error("attention.value_length must equal attention.key_length")
    rope = read_rope(fields, head_dim, interleaved=True)
    if rope.dims != head_dim:
        raise fields.make_error(f"{fields.format_key('rope.dimension_count')} must be {head_dim} (found {rope.dims})")
    feeds = tuple(length > 0 for length in fields.read_counts("feed_forward_length", common["layers"], 0))
    attention = AttentionHyperparameters(heads, kv_heads, head_dim, rope, head_dim)
    return DeciHyperparameters(**common, attention=attention, epsilon=fields.read_epsilon(RMS_EPSILON), feeds=feeds)


def forward(b: Builder, w: Weights, h: DeciHyperparameters) -> Activation:
    x, factors = b.embed(w.token_embd, b.ids), select_rope_factors(b, w, h)
    states = {state.layer: state for state in h.list_states()}
    for layer in range(h.layers):
        x = block(b, w.get_layer(layer), h, layer, states.get(layer), x, factors)
    x = b.rms_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    return b.linear(x, w.get("output") or w.token_embd)


def block(
    b: Builder,
    w: Weights,
    h: DeciHyperparameters,
    layer: int,
    state: PagedState | None,
    x: Activation,
    factors: Weight | None,
) -> Activation:
    """Apply one layer: attention if it has any, then the feed-forward network."""
    if not h.feeds[layer]:
        b.ignore(*w.list_weights())
        return x
    if h.attention.heads[layer]:
        y = b.rms_norm(x, w.attn_norm, h.epsilon)
        if state:
            q, k, v = project_qkv(b, w, h, layer, y)
            y = attend(b, h, state, q, k, v, factors)
        x = b.add(x, b.linear(y, w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))
