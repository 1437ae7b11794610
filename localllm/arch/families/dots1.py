"""dots.llm1 (rednote 2025, arXiv 2506.05767), Ling 2 (Ant 2025, arXiv 2510.22115), Hunyuan 3 (Tencent 2026).

Unlike Qwen 3: layers after the first ones have experts and a shared one; files name the router's score function.
Ling 2 rotates a part of each head; it and Hunyuan 3, whose scores are sigmoids, may have MTP
layers.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, normalize_heads, project_qkv
from localllm.arch.decoder import MtpOutput, apply_mtp_layer
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, apply_shared_expert, read_file_routing


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    common = TransformerHyperparameters.read_shared_fields(
        fields, interleaved=False, rotates_all=fields.arch != "bailingmoe2"
    )
    function = SIGMOID if fields.arch == "hy_v3" else None
    return TransformerHyperparameters(**common, routing=read_file_routing(fields, function))


def block(
    b: Builder,
    w: Weights,
    h: TransformerHyperparameters,
    state: PagedState,
    x: Activation,
    factors: Weight | None = None,
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, *normalize_heads(b, w, h, q, k), v, factors), w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_shared_expert))


def draft(b: Builder, w: Weights, h: TransformerHyperparameters, hidden: Activation) -> MtpOutput:
    return apply_mtp_layer(b, w, h, hidden, block)


CHECKPOINTS = {
    "Dots1ForCausalLM": {
        "layer": "attention head_norms norms",
        "parts": {"< leading_dense": ("gated", "experts shared_expert router_bias")}, "read": "@deepseek.read_dots1",
        "defaults": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    },
    "BailingMoeV2ForCausalLM": {
        "arch": "bailingmoe2", "layer": "norms",
        "parts": {"< leading_dense": ("gated", "experts shared_expert exp_probs_b.bias")},
        "tensors": {
            "attn_qkv": "attention.query_key_value.weight: fused_rows width",
            "attn_output": "attention.dense.weight: width queries",
            "attn_q_norm": "attention.query_layernorm.weight: head_dim",
            "attn_k_norm": "attention.key_layernorm.weight: head_dim",
            "exp_probs_b.bias": "mlp.gate.expert_bias: experts",
        },
        "scalings": "yarn", "partial_rope": True,
        "only": {
            "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True, "num_nextn_predict_layers": 0,
            "score_function": ("sigmoid", "softmax"),
        },
        "experts": "moe_intermediate_size",
        "sizes": {"fused_rows": "queries + 2 * keys", "leading_dense": "first_k_dense_replace=0"},
        "amounts": {
            "vocab_size": "vocab", "leading_dense_block_count": "leading_dense",
            "expert_feed_forward_length": "expert_hidden", "expert_shared_count": "num_shared_experts",
        },
        "keys": {"routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": ("expert_weights_norm", False)},
        "read": "@deepseek.read_bailing2",
    },
    "HYV3ForCausalLM": {
        "arch": "hy_v3", "layer": "attention head_norms norms mtp",
        "parts": {"< leading_dense": ("gated", "experts shared_expert exp_probs_b")},
        "tensors": {"exp_probs_b": "mlp.expert_bias: experts"}, "bare": "exp_probs_b",
        "named": "@hunyuan.rename_shared_norm", "named_as": "dots1",
        "only": {"scoring_func": "sigmoid", "moe_router_use_sigmoid": True}, "experts": "moe_intermediate_size",
        "read": "@hunyuan.read_hy_v3",
        "keys": {"router_scaling_factor": ("expert_weights_scale", 1.0), "route_norm": ("expert_weights_norm", True)},
        "defaults": {"rms_norm_eps": 1e-5, "rope_theta": 11158840.0, "head_dim": 128, "router_scaling_factor": 2.826},
    },
}  # fmt: skip
