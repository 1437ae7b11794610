"""GLM 4.5, 4.6 and 4.7 (Zhipu AI 2025, arXiv 2508.06471), and Solar Open (Upstage 2026).

Unlike dots.llm1: only the largest models normalize heads; RoPE rotates a part of a head. The norm before the
feed-forward network has another name; vision models have M-RoPE.
"""

from dataclasses import replace

from localllm.arch.attention import TransformerHyperparameters, attend, normalize_heads, project_qkv
from localllm.arch.decoder import MtpOutput, apply_mtp_layer
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, apply_shared_expert, read_file_routing
from localllm.arch.rope import add_sections


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    common = TransformerHyperparameters.read_shared_fields(fields, interleaved=False)
    attention = common.pop("attention")
    attention = replace(attention, rope=add_sections(fields, attention.rope))
    return TransformerHyperparameters(**common, attention=attention, routing=read_file_routing(fields, SIGMOID))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    if w.get("attn_q_norm") or w.get("attn_k_norm"):
        q, k = normalize_heads(b, w, h, q, k)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y = b.rms_norm(x, w.post_attention_norm, h.epsilon)
    if w.get("ffn_gate_inp", by_layer=True):
        w.require_biases("exp_probs_b")
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_shared_expert))


def draft(b: Builder, w: Weights, h: TransformerHyperparameters, hidden: Activation) -> MtpOutput:
    return apply_mtp_layer(b, w, h, hidden, block)


SHARED_DEFAULTS = {
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rms_norm_eps": 1e-5, "norm_topk_prob": True,
    "n_shared_experts": 1,
}  # fmt: skip
CHECKPOINTS = {
    "Glm4MoeForCausalLM": {
        "layer": "attention norms_around mtp",
        "parts": {"< leading_dense": ("gated", "experts shared_expert router_bias"), "head_norms": ("head_norms", "")},
        "partial_rope": True, "read": "@deepseek.read_glm4moe",
        "defaults": {**SHARED_DEFAULTS, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
    },
    "Glm4vMoeForConditionalGeneration": {"like": "Glm4MoeForCausalLM", "sees": True, "scalings": "mrope"},
    "SolarOpenForCausalLM": {
        "like": "Glm4MoeForCausalLM", "only": {"first_k_dense_replace": 0}, "read": "@deepseek.read_solar_open",
        "defaults": {**SHARED_DEFAULTS, "rope_theta": 1e6, "head_dim": 128},
    },
}  # fmt: skip
