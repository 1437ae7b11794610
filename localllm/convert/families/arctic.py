"""Snowflake Arctic."""

from localllm.convert.config import Config
from localllm.convert.families.experts import with_experts
from localllm.convert.families.layers import ATTENTION, EXPERTS, ROTATED, as_stored
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder


def arctic(config: Config) -> CheckpointFacts:
    """Read Arctic: experts next to a dense network as wide as the model."""
    for name in ("use_residual", "parallel_attn_mlp_res"):
        config.only(name, True)
    config.only("moe_layer_frequency", 1)
    h = with_experts(config, decoder(config), "intermediate_size", "num_local_experts")
    return h.updated(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"])


SQUARE = ("width", "width")


ARCTIC = Family(
    "arctic",
    {
        **ATTENTION,
        "attn_norm": ("width",),
        "ffn_norm": as_stored("residual_layernorm", "width"),
        "ffn_gate": as_stored("residual_mlp.w1", *SQUARE),
        "ffn_up": as_stored("residual_mlp.w3", *SQUARE),
        "ffn_down": as_stored("residual_mlp.w2", *SQUARE),
        "ffn_norm_exps": as_stored("post_attention_layernorm", "width"),
        **EXPERTS,
    },
    arctic,
    rotated=ROTATED,
    named_as="llama",  # using gguf's table for it would change that of all others
)
