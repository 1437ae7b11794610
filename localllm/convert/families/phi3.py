"""Phi 3, 3.5 and 4, and Phi 3.5 with experts."""

from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder, rotary_dims, warn_of_window
from localllm.convert.layers import ATTENTION, EXPERTS, NORMS_BEFORE
from localllm.convert.rope_scaling import rope_parameters


def phi3(config: Config) -> CheckpointFacts:
    """Read Phi 3: fused matrices, and factors for long contexts."""
    h = decoder(config, scalings=("longrope", "su"), whole_heads=False)
    warn_of_window(config)
    queries, keys = h.sizes["queries"], h.sizes["keys"]
    context = h.metadata["context_length"]
    return h.updated(
        {"fused_rows": queries + 2 * keys, "both_hidden": 2 * h.sizes["hidden"]},
        attention__sliding_window=config.count("sliding_window", 0),
        rope__dimension_count=rotary_dims(config, h.sizes["head_dim"]),
        rope__scaling__original_context_length=rope_parameters(config).count(
            "original_max_position_embeddings", context
        ),
    )


PHI3 = Family(
    "phi3",
    {
        "attn_qkv": ("fused_rows", "width"),
        "attn_output": ("width", "queries"),
        "ffn_up": ("both_hidden", "width"),
        "ffn_down": ("width", "hidden"),
        **NORMS_BEFORE,
    },
    phi3,
    defaults={"rms_norm_eps": 1e-5},
)


def phimoe(config: Config) -> CheckpointFacts:
    """Read Phi 3.5 MoE: biases, and two experts per token."""
    config.only("attention_bias", True)
    config.only("lm_head_bias", True)
    config.only("num_experts_per_tok", 2)
    config.warnings.append(UNLIKE)
    return with_experts(config, phi3(config), "intermediate_size", "num_local_experts")


UNLIKE = "GGUF's readers take norms without mean and add up both experts' weights to 1, which the model does not"
PHIMOE = Family(
    "phimoe",
    {**ATTENTION, **NORMS_BEFORE, **EXPERTS},
    phimoe,
    biased=(*ATTENTION, *NORMS_BEFORE, "output_norm", "output"),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "attention_bias": False, "lm_head_bias": False},
)
