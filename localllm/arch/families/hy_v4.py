"""Hunyuan 4 (Tencent 2026).

Unlike DeepSeek-V3.2: several residual streams; attention's output is gated; each head has a sink; experts' gates and up
projections are clamped; RoPE rotates the end of an indexer's heads, and some files have no indexer.
"""

from collections.abc import Sequence

from localllm.arch.decoder import ignore_mtp_layers
from localllm.arch.families.deepseek2 import DeepSeek2Hyperparameters, project_low_rank_queries, read_latent_attention
from localllm.arch.families.deepseek32 import (
    IndexerHyperparameters,
    attend_to_selected,
    find_index_state,
    read_indexer,
    select_indexed_keys,
)
from localllm.arch.families.maple import make_limited_swiglu
from localllm.arch.families.step35 import read_activation_limits
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    HyperparameterReader,
    LatentState,
    PagedState,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_feed_forward_or_experts, apply_shared_expert, read_file_routing
from localllm.arch.hyper_connections import (
    ResidualStreamHyperparameters,
    add_to_streams,
    compute_mixing_logits,
    concat_streams,
    enter_sublayer,
    read_residual_streams,
    reduce_streams,
)
from localllm.arch.rope import read_rope


@frozen
class Hunyuan4Hyperparameters(DeepSeek2Hyperparameters):
    """The hyperparameters of Hunyuan 4.

    Attributes:
        limits: by layer, the limit of experts' gates and up projections, 0 for none.
    """

    streams: ResidualStreamHyperparameters
    indexer: IndexerHyperparameters | None
    limits: tuple[float, ...]

    def list_states(self) -> Sequence[LatentState | PagedState]:
        return [*super().list_states(), *(self.indexer.list_states() if self.indexer else ())]


def read(fields: HyperparameterReader) -> Hunyuan4Hyperparameters:
    fields.read_count("attention.key_length_mla")
    common = read_latent_attention(fields)
    rope, layers = read_rope(fields, common["rope"].dims, True), common["layers"]
    common |= {"rope": rope, "scale": (common["key_dim"] + rope.dims) ** -0.5}
    indexer = None
    if fields.read_count("attention.indexer.top_k", 0):
        indexer = read_indexer(fields, rope, True, [0] * layers, at_end=True, epsilon=common["epsilon"])
    return Hunyuan4Hyperparameters(
        **common,
        routing=read_file_routing(fields),
        streams=read_residual_streams(fields),
        indexer=indexer,
        limits=read_activation_limits(fields, "swiglu_clamp_exp", fields.read_layer_count()),
    )


def forward(b: Builder, w: Weights, h: Hunyuan4Hyperparameters) -> Activation:
    ignore_mtp_layers(b, w, h)
    streams, selected = [b.embed(w.token_embd, b.ids)] * h.streams.count, None
    for state in h.list_layer_states():
        block = w.get_layer(state.layer)
        y, gates = enter_sublayer(b, block, h.streams, h.epsilon, streams, "attn")
        y = b.rms_norm(y, block.attn_norm, h.epsilon)
        narrow = project_low_rank_queries(b, block, h.epsilon, y)
        if h.indexer and (index := find_index_state(h.indexer, state.layer)):
            selected = select_indexed_keys(b, block, h.indexer, index, narrow, y)
        scores = AttentionScores(h.heads, h.scale, chosen=selected, sinks=block.attn_sinks)
        attended = attend_to_selected(b, block, h, state, scores, narrow, y)
        attended = b.multiply(attended, b.sigmoid(b.linear(y, block.attn_gate)))
        streams = add_to_streams(b, h.streams, streams, b.linear(attended, block.attn_output), gates)
        y, gates = enter_sublayer(b, block, h.streams, h.epsilon, streams, "ffn")
        y = apply_feed_forward(b, block, h, state.layer, b.rms_norm(y, block.ffn_norm, h.epsilon))
        streams = add_to_streams(b, h.streams, streams, y, gates)
    rows = [b.select(x, b.wanted) for x in streams]
    flat, scales = concat_streams(b, rows), w.output_hc_scale.require_shape(1)
    (gates,) = compute_mixing_logits(b, h.epsilon, h.streams.count, flat, w.output_hc_fn, scales, w.output_hc_base)
    return b.linear(b.rms_norm(reduce_streams(b, h.streams, rows, gates), w.output_norm, h.epsilon), w.output)


def apply_feed_forward(b: Builder, w: Weights, h: Hunyuan4Hyperparameters, layer: int, x: Activation) -> Activation:
    """Apply a dense network, or experts with clamped gates and a shared one without clamping."""
    if not w.get("ffn_gate_inp", by_layer=True):
        return apply_feed_forward_or_experts(b, w, h.routing, x, b.swiglu)
    y = apply_feed_forward_or_experts(b, w, h.routing, x, make_limited_swiglu(b, h.limits[layer]))
    return b.add(y, apply_shared_expert(b, w, x, b.swiglu))


CHECKPOINTS = {
    "HYV4ForCausalLM": {
        "like": "DeepseekV2ForCausalLM", "layer": "@hunyuan.list_hy_v4_tensors",
        "whole": {
            "output_hc_fn.weight": "full model.hc_head.hc_head_fn: streams all_streams",
            "output_hc_base.weight": "model.hc_head.hc_head_base: streams",
            "output_hc_scale.weight": "model.hc_head.hc_head_scale: one",
        },
        "named_as": "deepseek2", "unread": r"model\.mtp_layers\..*",
        "only": {"rope_interleave": True, "moe_layer_freq": 1, "attention_bias": False, "enable_lm_head_fp32": False},
        "read": "@hunyuan.read_hy_v4",
        "defaults": {
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_shared_experts": 1,
            "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.827, "swiglu_limit": 10.0,
        },
    },
}  # fmt: skip
