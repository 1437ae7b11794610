"""Qwen, 2 and 2.5 (Bai et al. 2023, Yang et al. 2024, arXiv 2309.16609, 2407.10671), openPangu (Huawei 2025).

Unlike llama: rotated pairs are half a head apart; queries, keys and values have biases.
"""

from localllm.arch.attention import Transformer
from localllm.arch.families.llama import forward
from localllm.arch.family import Fields

__all__ = ["forward", "read"]


def read(fields: Fields) -> Transformer:
    return Transformer(**Transformer.shared_fields(fields, interleaved=False))


CHECKPOINTS = {
    "Qwen2ForCausalLM Qwen2Model KORMoForCausalLM": {
        "layer": "attention gated norms", "biased": "attn_q attn_k attn_v", "scalings": "linear yarn llama3",
        "window_ignored": True,
    },
    "Qwen2AudioForConditionalGeneration AudioFlamingo3ForConditionalGeneration": {
        "like": "Qwen2ForCausalLM", "sees": True, "unread": r"(model\.)?audio_tower\..*",
    },
    "PanguEmbeddedForCausalLM": {
        "arch": "pangu-embedded", "layer": "attention gated norms", "biased": "attention",
        "amounts": {
            "vocab_size": "vocab", "rope.dimension_count": "head_dim", "attention.key_length": "head_dim",
            "attention.value_length": "head_dim",
        },
    },
    "vision+qwen2": {"like": "Qwen2ForCausalLM", "sees": True, "unread": r"(model\.)?image_newline"},
}  # fmt: skip
