"""PLM."""

from localllm.convert.config import Config
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import (
    FEED_FORWARD,
    NORMS_BEFORE,
)


def plm(config: Config) -> CheckpointFacts:
    """Read PLM: MLA, and squared ReLU."""
    heads, rotated, latent = (config.count(f"{n}") for n in ("num_attention_heads", "qk_rope_head_dim", "kv_lora_rank"))
    config.only("q_lora_rank")
    h = decoder(config.updated(head_dim=rotated), activations=("relu2",))
    key_dim, value_dim = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    sizes = {"latent": latent, "latent_and_key": latent + rotated, "values": heads * value_dim}
    sizes |= {"queries": heads * (key_dim + rotated), "both_rows": heads * (key_dim + value_dim)}
    return h.updated(
        sizes,
        vocab_size=h.sizes["vocab"],
        attention__kv_lora_rank=latent,
        attention__key_length=key_dim + rotated,
        attention__value_length=value_dim,
        rope__dimension_count=rotated,
    )


PLM = Family(
    "plm",
    {
        **NORMS_BEFORE,
        **FEED_FORWARD,
        "attn_q": ("queries", "width"),
        "attn_kv_a_mqa": ("latent_and_key", "width"),
        "attn_kv_a_norm": ("latent",),
        "attn_kv_b": ("both_rows", "latent"),
        "attn_output": ("width", "values"),
    },
    plm,
    defaults={"hidden_act": "relu2"},
)
