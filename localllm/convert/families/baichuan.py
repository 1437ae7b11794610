"""Baichuan, Xverse and Orion."""

from localllm.convert.config import Config
from localllm.convert.families.fused_qkv import ONE_AFTER_OTHER, split_qkv, with_fused_rows
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import (
    ATTENTION,
    GATED,
    NORMS_BEFORE,
)

LAYOUT = "Meta AI original pth"  # written to files, but unused


def baichuan(config: Config) -> CheckpointFacts:
    """Read Baichuan: the larger ones have ALiBi, which GGUF's readers infer from the number of layers."""
    context = config.get("max_position_embeddings", config.get("model_max_length"))
    h = with_fused_rows(decoder(config.updated(max_position_embeddings=context)))
    unsaid = {"rope_theta": "rope__freq_base", "num_key_value_heads": "attention__head_count_kv"}
    defaults: dict[str, object] = {key: None for name, key in unsaid.items() if config.get(name) is None}
    return h.updated(tensor_data_layout=LAYOUT, rope__dimension_count=h.sizes["head_dim"], **defaults)


BAICHUAN = Family(
    "baichuan",
    {
        **split_qkv("self_attn.W_pack", ONE_AFTER_OTHER),
        "attn_output": ATTENTION["attn_output"],
        **GATED,
        **NORMS_BEFORE,
    },
    baichuan,
)
