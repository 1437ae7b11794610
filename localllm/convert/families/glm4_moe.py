"""GLM 4.5 to 4.7, Solar Open and dots.llm1."""

from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.families.deepseek import SIGMOID, with_deepseek_experts
from localllm.convert.family import Family, Layer, Sizes
from localllm.convert.hyperparameters import PLAIN_SCALING, CheckpointFacts, decoder, rotary_dims
from localllm.convert.layers import (
    ATTENTION,
    EXPERTS,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    SHARED_EXPERT,
    mtp_layer,
)
from localllm.convert.rope_scaling import SECTIONS

ROUTER_BIAS: Layer = {"exp_probs_b.bias": ("experts",)}


NORMS_AROUND = {"attn_norm": ("width",), "post_attention_norm": ("width",)}


def dots1(config: Config) -> CheckpointFacts:
    """Read dots.llm1: experts next to a shared one, after the first layers."""
    return with_deepseek_experts(config, decoder(config))


def glm4moe(config: Config, scalings: tuple[str, ...] = PLAIN_SCALING) -> CheckpointFacts:
    """Read GLM 4.5: partial RoPE, head norms in the largest ones.

    A multi-token prediction layer is counted even where the checkpoint lacks it.
    """
    h = with_deepseek_experts(config, decoder(config, whole_heads=False, scalings=scalings))
    mtp_layers = h.sizes["mtp_layers"]
    sizes = {"head_norms": int(config.flag("use_qk_norm", False)), "attention_bias": int(config.flag("attention_bias"))}
    return h.updated(
        sizes,
        block_count=h.sizes["layers"] + mtp_layers,
        nextn_predict_layers=mtp_layers or None,
        expert_gating_func=SIGMOID,
        rope__dimension_count=rotary_dims(config, h.sizes["head_dim"]),
    )


def glm4vmoe(config: Config) -> CheckpointFacts:
    """Read GLM 4.5V: M-RoPE."""
    return glm4moe(config, scalings=(SECTIONS,))


def dots1_layer(sizes: Sizes, number: int) -> Layer:
    feeds = GATED if number < sizes["leading_dense"] else {**EXPERTS, **SHARED_EXPERT, **ROUTER_BIAS}
    return {**ATTENTION, **HEAD_NORMS, **NORMS_BEFORE, **feeds}


def glm4moe_layer(sizes: Sizes, number: int) -> Layer:
    feeds = GATED if number < sizes["leading_dense"] else {**EXPERTS, **SHARED_EXPERT, **ROUTER_BIAS}
    heads = HEAD_NORMS if sizes["head_norms"] else {}
    return {**ATTENTION, **heads, **NORMS_AROUND, **feeds, **mtp_layer(sizes, number)}


NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


DOTS1 = Family("dots1", dots1_layer, dots1, defaults=NOAUX)


OF_GLM4MOE = {**NOAUX, "rms_norm_eps": 1e-5, "norm_topk_prob": True, "n_shared_experts": 1}


GLM4MOE = Family(
    "glm4moe",
    glm4moe_layer,
    glm4moe,
    defaults={**OF_GLM4MOE, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
)


GLM4VMOE = replace(GLM4MOE, read=glm4vmoe, sees=True)


def solar_open(config: Config) -> CheckpointFacts:
    """Read Solar Open: experts in all layers, without a key for leading dense ones."""
    config.only("first_k_dense_replace", 0)
    return glm4moe(config).updated(leading_dense_block_count=None)


SOLAR_OPEN = replace(
    GLM4MOE,
    read=solar_open,
    defaults={**OF_GLM4MOE, "rope_theta": 1e6, "head_dim": 128},
)
