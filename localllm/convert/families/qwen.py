"""Qwen 2, 2.5 and 3, with experts and without, and the language models of their vision models."""

from collections.abc import Callable
from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.families.experts import with_experts
from localllm.convert.families.layers import (
    ATTENTION,
    EXPERTS,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    SHARED_EXPERT,
    experts_of,
)
from localllm.convert.families.llama import LLAMA_SCALING
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder, warn_of_window
from localllm.convert.rope_scaling import SECTIONS


def qwen(config: Config) -> CheckpointFacts:
    h = decoder(config, scalings=LLAMA_SCALING)
    warn_of_window(config)
    return h


def qwen2vl(config: Config) -> CheckpointFacts:
    """Read Qwen2-VL's language model: M-RoPE."""
    h = decoder(config, scalings=(SECTIONS,))
    warn_of_window(config)
    return h


def qwen2moe(config: Config) -> CheckpointFacts:
    """Read Qwen2 MoE: a shared expert next to the routed ones."""
    config.only("norm_topk_prob", False)
    h = qwen_moe(config)
    shared = config.count("shared_expert_intermediate_size")
    return h.updated({"shared_hidden": shared, "one": 1}, expert_shared_feed_forward_length=shared)


def qwen3moe(config: Config) -> CheckpointFacts:
    """Read Qwen3 MoE: weights of selected experts always sum to 1, as in all published checkpoints."""
    config.only("norm_topk_prob", True)
    return qwen_moe(config)


def qwen_moe(config: Config, read: Callable[[Config], CheckpointFacts] = qwen) -> CheckpointFacts:
    """Read experts in every layer."""
    config.only("decoder_sparse_step", 1)
    config.only("mlp_only_layers", [])
    count = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    h = with_experts(config, read(config), "moe_intermediate_size", count)
    return h.updated(expert_feed_forward_length=h.sizes["expert_hidden"])


def seeing(h: CheckpointFacts, config: Config) -> CheckpointFacts:
    """Add the number of DeepStack layers of Qwen3-VL."""
    deep = config.section("vision_config").get("deepstack_visual_indexes", [])
    return h.updated(n_deepstack_layers=len(deep) if isinstance(deep, list) else 0)


def qwen3vl(config: Config) -> CheckpointFacts:
    return seeing(qwen2vl(config), config)


def qwen3vlmoe(config: Config) -> CheckpointFacts:
    config.only("norm_topk_prob", True)
    h = seeing(qwen_moe(config, qwen2vl), config)
    return h.updated({"both_hidden": 2 * h.sizes["expert_hidden"]})


QWEN2 = Family("qwen2", {**ATTENTION, **GATED, **NORMS_BEFORE}, qwen, biased=("attn_q", "attn_k", "attn_v"))
QWEN2VL = replace(QWEN2, arch="qwen2vl", read=qwen2vl, sees=True, defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5})
QWEN3 = Family("qwen3", {**ATTENTION, **HEAD_NORMS, **GATED, **NORMS_BEFORE}, qwen)
QWEN2MOE = replace(
    QWEN2,
    arch="qwen2moe",
    layer={**ATTENTION, **NORMS_BEFORE, **EXPERTS, **SHARED_EXPERT, "ffn_gate_inp_shexp": ("one", "width")},
    read=qwen2moe,
)
QWEN3MOE = replace(
    QWEN3,
    arch="qwen3moe",
    layer={**ATTENTION, **HEAD_NORMS, **NORMS_BEFORE, **EXPERTS},
    read=qwen3moe,
    defaults={"norm_topk_prob": False},
)
QWEN3VL = replace(QWEN3, arch="qwen3vl", read=qwen3vl, sees=True, defaults={"rope_theta": 5e5})
QWEN3VLMOE = replace(
    QWEN3VL,
    arch="qwen3vlmoe",
    layer=lambda sizes, number: {**ATTENTION, **HEAD_NORMS, **NORMS_BEFORE, **experts_of(sizes, "mlp.experts")},
    read=qwen3vlmoe,
)
