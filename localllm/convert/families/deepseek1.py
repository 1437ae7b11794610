"""DeepSeek's first model with experts."""

from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.families.deepseek import SOFTMAX
from localllm.convert.family import Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import (
    ATTENTION,
    EXPERTS,
    GATED,
    NORMS_BEFORE,
    ROTATED,
    SHARED_EXPERT,
)


def deepseek(config: Config) -> CheckpointFacts:
    """Read DeepSeek MoE: experts next to shared ones, after the first layers."""
    for name, value in (("scoring_func", "softmax"), ("norm_topk_prob", False), ("moe_layer_freq", 1)):
        config.only(name, value)
    h = decoder(config, scalings=())
    h = with_experts(config, h, "moe_intermediate_size", "n_routed_experts")
    return early_experts(config, h, config.count("n_shared_experts")).updated(
        rope__scaling__type="none", expert_gating_func=None if config.get("scoring_func") is None else SOFTMAX
    )


def early_experts(config: Config, h: CheckpointFacts, shared: int) -> CheckpointFacts:
    """Add what similar models share."""
    leading, hidden = config.count("first_k_dense_replace", 0), h.sizes["expert_hidden"]
    return h.updated(
        {"leading_dense": leading, "shared_hidden": shared * hidden},
        vocab_size=h.sizes["vocab"],
        rope__dimension_count=h.sizes["head_dim"],
        leading_dense_block_count=leading,
        expert_feed_forward_length=hidden,
        expert_weights_scale=1.0,
        expert_shared_count=shared,
    )


def deepseek_layer(sizes: Sizes, number: int) -> Layer:
    feeds: Layer = GATED if number < sizes["leading_dense"] else {**EXPERTS, **SHARED_EXPERT}
    return {**ATTENTION, **NORMS_BEFORE, **feeds}


DEEPSEEK = Family("deepseek", deepseek_layer, deepseek, rotated=ROTATED)
