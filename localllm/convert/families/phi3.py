"""Phi 3, 3.5 and 4."""

from localllm.convert.config import Config
from localllm.convert.families.layers import NORMS_BEFORE
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder, rotated_numbers, warn_of_window
from localllm.convert.rope_scaling import rope_parameters


def phi3(config: Config) -> CheckpointFacts:
    """Fused matrices, and factors for long contexts."""
    h = decoder(config, scalings=("longrope", "su"), whole_heads=False)
    warn_of_window(config)
    queries, keys = h.sizes["queries"], h.sizes["keys"]
    context = h.metadata["context_length"]
    return h.plus(
        {"fused_rows": queries + 2 * keys, "both_hidden": 2 * h.sizes["hidden"]},
        attention__sliding_window=config.count("sliding_window", 0),
        rope__dimension_count=rotated_numbers(config, h.sizes["head_dim"]),
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
