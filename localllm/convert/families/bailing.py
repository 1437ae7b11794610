"""Ling (bailingmoe) 1 and 2."""

from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.families.deepseek import SIGMOID, SOFTMAX
from localllm.convert.families.deepseek1 import deepseek_layer, early_experts
from localllm.convert.families.fused_qkv import ONE_AFTER_OTHER, split_qkv, with_fused_rows
from localllm.convert.family import Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder, rotary_dims
from localllm.convert.layers import (
    ATTENTION,
    EXPERTS,
    GATED,
    NORMS_BEFORE,
    SHARED_EXPERT,
    as_it_is,
    as_stored,
)


def bailing(config: Config) -> CheckpointFacts:
    """Read Ling: like DeepSeek MoE, with fused QKV."""
    for name in ("norm_head", "use_bias", "use_qkv_bias", "use_qk_norm"):
        config.only(name, False)
    h = with_experts(config, decoder(config, scalings=()), "moe_intermediate_size")
    h = early_experts(config, with_fused_rows(h), config.count("num_shared_experts"))
    return h.updated(expert_weights_norm=config.flag("norm_topk_prob"))


def bailing_layer(sizes: Sizes, number: int) -> Layer:
    attention: Layer = {
        **split_qkv("attention.query_key_value", ONE_AFTER_OTHER),
        "attn_output": as_stored("attention.dense", *ATTENTION["attn_output"]),
    }
    return {**deepseek_layer(sizes, number), **attention}


BAILINGMOE = Family("bailingmoe", bailing_layer, bailing)


def bailing2(config: Config) -> CheckpointFacts:
    """Read Ling 2: head norms; experts are selected with a bias from the best groups."""
    for name, value in (("use_bias", False), ("use_qkv_bias", False), ("use_qk_norm", True)):
        config.only(name, value)
    config.only("num_nextn_predict_layers", 0)
    config.only("score_function", "sigmoid", "softmax")
    share = {"partial_rotary_factor": config.get("partial_rotary_factor", 0.5)}
    h = decoder(config.updated(**share), scalings=("yarn",), whole_heads=False)
    h = with_experts(config, h, "moe_intermediate_size")
    shared, function = config.count("num_shared_experts"), config.get("score_function")
    h = early_experts(config, with_fused_rows(h), shared)
    hidden = config.count("moe_shared_expert_intermediate_size", h.sizes["shared_hidden"])
    return h.updated(
        {"shared_hidden": hidden},
        rope__dimension_count=rotary_dims(config.updated(**share), h.sizes["head_dim"]),
        expert_shared_feed_forward_length=hidden,
        expert_weights_scale=config.number("routed_scaling_factor"),
        expert_weights_norm=config.flag("norm_topk_prob"),
        expert_gating_func=function and {"sigmoid": SIGMOID, "softmax": SOFTMAX}[function],
        expert_group_count=config.get("n_group") and config.count("n_group"),
        expert_group_used_count=config.get("topk_group") and config.count("topk_group"),
        nextn_predict_layers=config.get("num_nextn_predict_layers"),
    )


def bailing2_layer(sizes: Sizes, number: int) -> Layer:
    attention: Layer = {
        "attn_qkv": as_stored("attention.query_key_value", "fused_rows", "width"),
        "attn_output": as_stored("attention.dense", *ATTENTION["attn_output"]),
        "attn_q_norm": as_stored("attention.query_layernorm", "head_dim"),
        "attn_k_norm": as_stored("attention.key_layernorm", "head_dim"),
    }
    bias: Layer = {"exp_probs_b.bias": as_it_is("mlp.gate.expert_bias", "experts")}
    mixture: Layer = {**EXPERTS, **SHARED_EXPERT, **bias}
    return {**NORMS_BEFORE, **attention, **(GATED if number < sizes["leading_dense"] else mixture)}


BAILINGMOE2 = Family("bailingmoe2", bailing2_layer, bailing2)
