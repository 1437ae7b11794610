"""Llama and models like it: Mistral, Mixtral, Granite, SmolLM 3, ERNIE 4.5, Seed-OSS, Arcee, MiniCPM, Pangu."""

from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.family import DerivedTensor, Family
from localllm.convert.hyperparameters import PLAIN_SCALING, CheckpointFacts, decoder, warn_of_window
from localllm.convert.layers import ATTENTION, EXPERTS, GATED, NORMS_BEFORE, ROTATED
from localllm.convert.tensors import take_strided

LLAMA_SCALING = (*PLAIN_SCALING, "llama3")


def llama(config: Config, scalings: tuple[str, ...] = LLAMA_SCALING) -> CheckpointFacts:
    """Read Llama; its GGUF files have two keys that those of other architectures lack."""
    h = decoder(config, scalings=scalings)
    warn_of_window(config)
    return h.updated(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"])


def granite(config: Config) -> CheckpointFacts:
    """Read Granite: four scaling factors."""
    return llama(config).updated(
        attention__scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=config.number("logits_scaling", 1.0),
    )


def granitemoe(config: Config) -> CheckpointFacts:
    h = with_experts(config, granite(config), "intermediate_size", "num_local_experts")
    return h.updated({"both_hidden": 2 * h.sizes["expert_hidden"]})


LLAMA = Family("llama", {**ATTENTION, **GATED, **NORMS_BEFORE}, llama, rotated=ROTATED)
GRANITE = replace(LLAMA, arch="granite", read=granite)
BOTH_HALVES = {"block_sparse_moe.input_linear.weight": ("experts", "both_hidden", "width")}
ONE_HALF = ("experts", "expert_hidden", "width")
GRANITEMOE = replace(
    GRANITE,
    arch="granitemoe",
    layer={
        **ATTENTION,
        **NORMS_BEFORE,
        **EXPERTS,
        "ffn_gate_exps": DerivedTensor(
            ONE_HALF, BOTH_HALVES, lambda s, shape, _: take_strided(s[0], shape, 2 * shape[-2], 0)
        ),
        "ffn_up_exps": DerivedTensor(
            ONE_HALF, BOTH_HALVES, lambda s, shape, _: take_strided(s[0], shape, 2 * shape[-2], shape[-2])
        ),
    },
    read=granitemoe,
)
