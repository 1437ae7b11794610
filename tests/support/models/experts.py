"""Decoders with a mixture of experts."""

from .declaration import UNTIED, Dims, Shapes, declare
from .dense import QKV, YARN
from .parts import ATTENTION, EXPERTS, GATED, HEAD_NORMS, NORMS, SHARED_EXPERT, WHOLE_NORMS, biased, norms

FOUR = {"experts": 4, "used": 2}
MIXTURE = {**NORMS, **ATTENTION, **EXPERTS}
SHARED_GATE = {"ffn_gate_inp_shexp.weight": "width"}
ROUTER_BIAS = {"exp_probs_b.bias": "experts"}

COMPRESSED_QUERIES = {
    "attn_q_a.weight": "q_rank, width",
    "attn_q_a_norm.weight": "q_rank",
    "attn_q_b.weight": "heads * (nope + rotated), q_rank",
}
QUERIES = {"attn_q.weight": "heads * (nope + rotated), width"}
LATENT = {
    "attn_kv_a_mqa.weight": "kv_rank + rotated, width",
    "attn_kv_a_norm.weight": "kv_rank",
    "attn_output.weight": "width, heads * value",
}
ABSORBED = {"attn_k_b.weight": "heads, kv_rank, nope", "attn_v_b.weight": "heads, value, kv_rank"}
NOT_ABSORBED = {"attn_kv_b.weight": "heads * (nope + value), kv_rank"}


def deepseek2(queries: Shapes, more: Shapes, **dims):
    """Declare DeepSeek 2, whose first layer is dense; queries, more: tensors; q_rank 0: no latent queries."""
    bias = ROUTER_BIAS if dims.get("router") else {}

    def layer(d: Dims, number: int) -> Shapes:
        mixture = {**EXPERTS, **bias, **SHARED_EXPERT}
        return {**NORMS, **queries, **LATENT, **more, **(mixture if number else GATED)}

    def metadata(d: Dims) -> dict:
        absorbed = "attn_k_b.weight" in more
        found = {"attention.q_lora_rank": d.q_rank, "attention.kv_lora_rank": d.kv_rank}
        found |= {"attention.key_length": d.kv_rank + d.rotated if absorbed else d.nope + d.rotated}
        found |= {"attention.value_length": d.kv_rank if absorbed else d.value}
        if absorbed:
            found |= {"attention.key_length_mla": d.nope + d.rotated, "attention.value_length_mla": d.value}
        found |= {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_weights_scale": d.weights_scale}
        found |= {**YARN, "rope.scaling.factor": d.factor, "rope.scaling.yarn_log_multiplier": d.log_multiplier}
        return {**found, **d.router}

    defaults = {"heads": 4, "kv_heads": 1 if more is ABSORBED else 4, "kv_rank": 64, "nope": 32, "value": 32}
    defaults |= {"rotated": 32, "experts": 4, "expert_hidden": 64, "shared_hidden": 64, "weights_scale": 1.0}
    defaults |= {"router": {}, "log_multiplier": 0.0707}
    return declare("deepseek2", layer, UNTIED, metadata, **{**defaults, **dims})


MOE = {
    "llama_moe": declare("llama", MIXTURE, metadata={"rope.freq_base": 1e6}, rotated=32, **FOUR),
    "qwen3moe": declare(
        "qwen3moe", {**MIXTURE, **HEAD_NORMS}, metadata={"rope.freq_base": 1e6},
        hidden=128, heads=4, kv_heads=2, head_dim=64, expert_hidden=64, **FOUR,
    ),
    "olmoe": declare("olmoe", {**MIXTURE, **WHOLE_NORMS}, kv_heads=3, **FOUR),
    "qwen2moe": declare(
        "qwen2moe", {**NORMS, **biased(ATTENTION, *QKV), **EXPERTS, **SHARED_GATE, **SHARED_EXPERT},
        metadata=lambda d: {"rope.freq_base": 1e6, "expert_shared_feed_forward_length": d.shared_hidden},
        kv_heads=3, expert_hidden=32, shared_hidden=96, **FOUR,
    ),
    "granitemoe": declare("granitemoe", MIXTURE, metadata={
        "logit_scale": 4.0, "embedding_scale": 10.0, "residual_scale": 0.7, "attention.scale": 0.2,
    }, rotated=32, epsilon=0.09, **FOUR),
    "gpt_oss": declare(
        "gpt-oss", {
            **norms("attn_norm", "post_attention_norm"), **biased(ATTENTION), "attn_sinks.weight": "heads",
            **biased(EXPERTS),
        },
        metadata={
            **YARN, "rope.freq_base": 1.5e5, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
        },
        hidden=96, heads=4, kv_heads=2, head_dim=32, window=16, expert_hidden=64, **FOUR,
    ),
    "llama4": declare(
        "llama4", {**MIXTURE, **SHARED_EXPERT}, metadata={"rope.freq_base": 5e5, "interleave_moe_layer_step": 1},
        layers=4, width=64, heads=2, rotated=32, experts=4, used=1, expert_hidden=64, shared_hidden=64,
    ),
    "deepseek2_legacy": deepseek2({**COMPRESSED_QUERIES}, NOT_ABSORBED, q_rank=64, factor=8.0),
    "deepseek2_lite": deepseek2(QUERIES, ABSORBED, q_rank=0, factor=40.0),
    "deepseek2_v3": deepseek2(
        COMPRESSED_QUERIES, ABSORBED, q_rank=96, factor=4.0, log_multiplier=0.1, weights_scale=2.5,
        experts=8, used=3, expert_hidden=32, shared_hidden=32, router={
            "expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2,
        },
    ),
}  # fmt: skip
