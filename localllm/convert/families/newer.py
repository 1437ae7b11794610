"""ERNIE 4.5, Seed-OSS, Arcee's, dots.llm1, GLM 4.5 to 4.7, MiniMax M2, BitNet."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localllm.convert.config import Config
from localllm.convert.families.deepseek import SIGMOID, with_deepseek_experts
from localllm.convert.families.experts import with_experts
from localllm.convert.families.layers import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    SHARED_EXPERT,
    guessing_layer,
)
from localllm.convert.families.llama import LLAMA, LLAMA_SCALING
from localllm.convert.family import Family, Layer, MadeOf, Sizes
from localllm.convert.hyperparameters import PLAIN_SCALING, CheckpointFacts, decoder, rotated_numbers
from localllm.convert.rope_scaling import SECTIONS
from localllm.convert.tensors import Shape, TensorSource, as_float32, kept

QKV = ("attn_q", "attn_k", "attn_v")
ROUTER_BIAS: Layer = {"exp_probs_b.bias": ("experts",)}
NORMS_AROUND = {"attn_norm": ("width",), "post_attention_norm": ("width",)}


def ernie(config: Config) -> CheckpointFacts:
    config.only("use_bias", False)
    return decoder(config, scalings=LLAMA_SCALING)


def seed_oss(config: Config) -> CheckpointFacts:
    config.only("attention_bias", True)
    config.only("attention_out_bias", False)
    config.only("mlp_bias", False)
    return decoder(config, scalings=LLAMA_SCALING)


def arcee(config: Config) -> CheckpointFacts:
    """Without gates, and with squares."""
    h = decoder(config, activations=("relu2",), scalings=LLAMA_SCALING)
    return h.plus(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"])


def dots1(config: Config) -> CheckpointFacts:
    """Experts beside one for all tokens, behind the first layers."""
    return with_deepseek_experts(config, decoder(config))


def glm4moe(config: Config, scalings: tuple[str, ...] = PLAIN_SCALING) -> CheckpointFacts:
    """The same; a part of each head is rotated, the largest ones have norms of heads; a layer that guesses is counted,
    also where it is left out."""
    h = with_deepseek_experts(config, decoder(config, whole_heads=False, scalings=scalings))
    guessing = h.sizes["guessing"]
    sizes = {"head_norms": int(config.flag("use_qk_norm", False)), "attention_bias": int(config.flag("attention_bias"))}
    return h.plus(
        sizes,
        block_count=h.sizes["layers"] + guessing,
        nextn_predict_layers=guessing or None,
        expert_gating_func=SIGMOID,
        rope__dimension_count=rotated_numbers(config, h.sizes["head_dim"]),
    )


def minimax_m2(config: Config) -> CheckpointFacts:
    """Experts everywhere; a part of each head is rotated; norms of whole rows of queries and keys."""
    config.only("use_qk_norm", True)
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    h = with_experts(config, decoder(config, whole_heads=False), "intermediate_size", "num_local_experts")
    return h.plus(
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_gating_func=SIGMOID,
        rope__dimension_count=config.count("rotary_dim", rotated_numbers(config, h.sizes["head_dim"])),
    )


def dots1_layer(sizes: Sizes, number: int) -> Layer:
    feeds = GATED if number < sizes["leading_dense"] else {**EXPERTS, **SHARED_EXPERT, **ROUTER_BIAS}
    return {**ATTENTION, **HEAD_NORMS, **NORMS_BEFORE, **feeds}


def glm4vmoe(config: Config) -> CheckpointFacts:
    """The same with positions in images."""
    return glm4moe(config, scalings=(SECTIONS,))


def glm4moe_layer(sizes: Sizes, number: int) -> Layer:
    feeds = GATED if number < sizes["leading_dense"] else {**EXPERTS, **SHARED_EXPERT, **ROUTER_BIAS}
    heads = HEAD_NORMS if sizes["head_norms"] else {}
    return {**ATTENTION, **heads, **NORMS_AROUND, **feeds, **guessing_layer(sizes, number)}


ERNIE4_5 = Family(
    "ernie4_5",
    {**ATTENTION, **GATED, **NORMS_BEFORE},
    ernie,
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
)
SEED_OSS = Family("seed_oss", {**ATTENTION, **GATED, **NORMS_AROUND}, seed_oss, biased=QKV)
ARCEE = replace(
    LLAMA,
    arch="arcee",
    layer={**ATTENTION, **FEED_FORWARD, **NORMS_BEFORE},
    read=arcee,
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
)
MINIMAX_M2 = Family(
    "minimax-m2",
    {**ATTENTION, "attn_q_norm": ("queries",), "attn_k_norm": ("keys",), **NORMS_BEFORE, **EXPERTS, **ROUTER_BIAS},
    minimax_m2,
    defaults={"rope_theta": 5e6, "scoring_func": "sigmoid"},
)
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
    """Experts in all layers, of which nothing is said."""
    config.only("first_k_dense_replace", 0)
    return glm4moe(config).plus(leading_dense_block_count=None)


SOLAR_OPEN = replace(
    GLM4MOE,
    read=solar_open,
    defaults={**OF_GLM4MOE, "rope_theta": 1e6, "head_dim": 128},
)


def bitnet(config: Config) -> CheckpointFacts:
    """Norms before the last matrices; all of a layer's matrices have three values."""
    config.only("attention_bias", False)
    h = decoder(config)
    return h.plus(rope__scaling__type="linear", rope__scaling__factor=1.0)


def of_three(name: str, *dimensions: str) -> MadeOf:
    """A matrix of which only the sign is left, or nothing, times the mean of its magnitudes (Ma et al. 2024)."""

    def made(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        numbers = as_float32(sources[0].rows(0, shape[0]), sources[0].dtype)
        inverse = np.float32(1) / np.float32(max(np.abs(numbers).mean(dtype=np.float64), 1e-5))
        return kept(np.clip(np.round(numbers * inverse), -1, 1) / inverse)

    return MadeOf(dimensions, {f"{name}.weight": dimensions}, made)


OF_THREE = {
    **{name: f"self_attn.{its}_proj" for name, its in zip(ATTENTION, "qkvo", strict=True)},
    **{name: f"mlp.{name[4:]}_proj" for name in GATED},
}
BITNET = Family(
    "bitnet",
    {
        **{name: of_three(its, *{**ATTENTION, **GATED}[name]) for name, its in OF_THREE.items()},
        **NORMS_BEFORE,
        "attn_sub_norm": ("width",),
        "ffn_sub_norm": ("hidden",),
    },
    bitnet,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "relu2"},
)
