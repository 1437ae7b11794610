"""Laguna (Poolside 2026).

Unlike llama: three of four layers have a sliding window, and a number of heads and an unscaled RoPE of their own; each
head of queries and keys is normalized; attention's output is multiplied by softplus gates, one for each head or for
each of its numbers; all but the first layers have experts, one of them shared; rotated pairs are half the rotated
dimensions apart.
"""

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    gate_heads,
    normalize_heads,
    project_qkv,
    read_local_rope_dims,
    read_windows,
)
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, apply_shared_expert, read_file_routing


def read(fields: HyperparameterReader) -> LocalRopeTransformerHyperparameters:
    common = LocalRopeTransformerHyperparameters.read_shared_fields(fields, interleaved=False)
    local_rope = read_local_rope_dims(fields, common["attention"].rope)
    return LocalRopeTransformerHyperparameters(
        **common,
        windows=read_windows(fields, period=4, default=0, all_first=True),
        local_rope=local_rope.remove_scaling(local_rope.base),
        routing=read_file_routing(fields, SIGMOID),
    )


def block(
    b: Builder, w: Weights, h: LocalRopeTransformerHyperparameters, state: PagedState, x: Activation
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    q, k = normalize_heads(b, w, h, q, k)
    attended = attend(b, h, state, q, k, v)
    gates, is_by_head = b.softplus(b.linear(y, w.attn_gate)), w.attn_gate.shape[0] == h.attention.heads[state.layer]
    attended = gate_heads(b, h, state, attended, gates) if is_by_head else b.multiply(attended, gates)
    x = b.add(x, b.linear(attended, w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_shared_expert))


AFTER = "ffn_gate_shexp ffn_up_shexp ffn_down_shexp exp_probs_b.bias"  # with experts
CHECKPOINTS = {
    "LagunaForCausalLM": {
        "layer": "head_norms norms @laguna.list_attention_tensors", "parts": {"< leading_dense": ("gated",
        f"experts {AFTER}")},
        "tensors": {
            "exp_probs_b.bias": "mlp.experts.e_score_correction.bias: experts",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj.weight: shared_hidden width",
            "ffn_up_shexp": "mlp.shared_expert.up_proj.weight: shared_hidden width",
            "ffn_down_shexp": "mlp.shared_expert.down_proj.weight: width shared_hidden",
        },
        "named_as": "dots1", "scalings": "yarn", "partial_rope": True,
        "only": {
            "attention_bias": False, "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0,
        },
        "experts": "moe_intermediate_size",
        "amounts": {"vocab_size": "vocab", "expert_feed_forward_length": "expert_hidden"},
        "keys": {"moe_routed_scaling_factor": ("expert_weights_scale", 1.0)},
        "metadata": {"expert_weights_norm": True, "expert_gating_func": 2}, "read": "@laguna.read_laguna",
        "defaults": {
            "head_dim": 128, "sliding_window": 512,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_theta": 10000.0},
            },
        },
    },
}  # fmt: skip
