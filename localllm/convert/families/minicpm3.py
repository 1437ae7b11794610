"""MiniCPM 3."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read MiniCPM 3: GGUF's readers have its factors built in; frequency factors for short and long contexts."""
    heads, rotated = config.count("num_attention_heads"), config.count("qk_rope_head_dim")
    h = declared(config.updated(head_dim=rotated))
    if h.metadata["rope.freq_base"] != BASE:
        raise config.refusal(f"rope_theta {h.metadata['rope.freq_base']} is not supported: GGUF's readers take {BASE}")
    magnitude = h.metadata.get("rope.scaling.attn_factor")
    latent, narrow = config.count("kv_lora_rank"), config.count("q_lora_rank")
    key_dim, value_dim = config.count("qk_nope_head_dim"), config.count("v_head_dim", h.sizes["width"] // heads)
    sizes = {"latent": latent, "narrow": narrow, "latent_and_key": latent + rotated, "values": heads * value_dim}
    sizes |= {"queries": heads * (key_dim + rotated), "both_rows": heads * (key_dim + value_dim)}
    return h.updated(
        sizes,
        attention__q_lora_rank=narrow,
        attention__kv_lora_rank=latent,
        attention__key_length=key_dim + rotated,
        attention__value_length=None if value_dim == h.sizes["width"] // heads else value_dim,
        rope__dimension_count=rotated,
        rope__scaling__attn_factor=None if magnitude == 1 else magnitude,
    )


BASE = 10000.0
