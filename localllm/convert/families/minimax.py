"""MiniMax-Text-01, M1 and M2."""

from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.families.deepseek import SIGMOID
from localllm.convert.family import Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder, rotary_dims
from localllm.convert.layers import (
    ATTENTION,
    EXPERTS,
    NORMS_BEFORE,
    as_stored,
)

ROUTER_BIAS: Layer = {"exp_probs_b.bias": ("experts",)}


def minimax01(config: Config) -> CheckpointFacts:
    """Read MiniMax-Text-01: every eighth layer has softmax attention; residuals are scaled norms."""
    kinds = ("full_attention", "linear_attention", "mlp")
    for kind in kinds:
        config.only(f"layernorm_{kind}_beta", 1)
        config.only(f"layernorm_{kind}_alpha", config.get(f"layernorm_{kinds[0]}_alpha"))
    config.only("postnorm", True)
    config.only("shared_intermediate_size", 0)
    h = with_experts(config, decoder(config, whole_heads=False), "intermediate_size", "num_local_experts")
    attends = [number % 8 == 7 for number in range(h.sizes["layers"])]
    config.only("attn_type_list", [*map(int, attends)])
    flags = {f"attends_{number}": int(does) for number, does in enumerate(attends)}
    return h.updated(
        {**flags, "fused_rows": 3 * h.sizes["queries"]},
        residual_scale=config.number(f"layernorm_{kinds[0]}_alpha", 1.0),
        rope__dimension_count=config.count("rotary_dim"),
    )


def minimax01_layer(sizes: Sizes, number: int) -> Layer:
    lightning: Layer = {
        "attn_qkv": as_stored("self_attn.qkv_proj", "fused_rows", "width"),
        "attn_gate": as_stored("self_attn.output_gate", "queries", "width"),
        "attn_norm_2": as_stored("self_attn.norm", "queries"),
        "attn_output": as_stored("self_attn.out_proj", "width", "queries"),
    }
    return {**(ATTENTION if sizes[f"attends_{number}"] else lightning), **NORMS_BEFORE, **EXPERTS}


MINIMAX01 = Family("minimax-01", minimax01_layer, minimax01, named_as="minimax-m2")


def minimax_m2(config: Config) -> CheckpointFacts:
    """Read MiniMax M2: experts in every layer, partial RoPE, norms over all queries and over all keys."""
    config.only("use_qk_norm", True)
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    h = with_experts(config, decoder(config, whole_heads=False), "intermediate_size", "num_local_experts")
    return h.updated(
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_gating_func=SIGMOID,
        rope__dimension_count=config.count("rotary_dim", rotary_dims(config, h.sizes["head_dim"])),
    )


MINIMAX_M2 = Family(
    "minimax-m2",
    {**ATTENTION, "attn_q_norm": ("queries",), "attn_k_norm": ("keys",), **NORMS_BEFORE, **EXPERTS, **ROUTER_BIAS},
    minimax_m2,
    defaults={"rope_theta": 5e6, "scoring_func": "sigmoid"},
)
