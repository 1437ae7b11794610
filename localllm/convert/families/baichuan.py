"""Baichuan, Xverse and Orion."""

from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.families.fused_qkv import ONE_AFTER_OTHER, split_qkv, with_fused_rows
from localllm.convert.families.layers import (
    ATTENTION,
    GATED,
    NORMS_BEFORE,
)
from localllm.convert.families.llama import LLAMA
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder

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


def xverse(config: Config) -> CheckpointFacts:
    h = decoder(config)
    return h.updated(tensor_data_layout=LAYOUT, rope__dimension_count=h.sizes["head_dim"])


XVERSE = replace(LLAMA, arch="xverse", read=xverse)


BASE = 10000.0


def orion(config: Config) -> CheckpointFacts:
    """Read Orion: layer norms, though config.json names RMS norms."""
    names = ("max_sequence_length", "max_position_embeddings", "model_max_length")
    context = next((config.get(name) for name in names if config.get(name) is not None), None)
    h = decoder(config.updated(max_position_embeddings=context))
    if h.metadata["rope.freq_base"] != BASE:
        raise config.refusal(f"rope_theta {h.metadata['rope.freq_base']} is not supported: GGUF's readers take {BASE}")
    return h.updated(
        tensor_data_layout=LAYOUT,
        attention__layer_norm_epsilon=h.metadata["attention.layer_norm_rms_epsilon"],
        attention__layer_norm_rms_epsilon=None,
    )


ORION = Family("orion", {**ATTENTION, **GATED, **NORMS_BEFORE}, orion, biased=("attn_norm", "ffn_norm", "output_norm"))
