"""Qwen, 2 and 2.5 (Bai et al. 2023, Yang et al. 2024, arXiv 2309.16609, 2407.10671), openPangu (Huawei 2025).

Unlike llama: rotated pairs are half a head apart; queries, keys and values have biases. The language models of
Qwen2-VL, Qwen2.5-VL (arXiv 2409.12191, 2502.13923) and PaddleOCR-VL (2025, without biases) have M-RoPE.
"""

from dataclasses import replace

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.families.llama import forward
from localllm.arch.family import HyperparameterReader
from localllm.arch.rope import SECTIONS, add_sections

__all__ = ["forward", "read"]


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    h = TransformerHyperparameters(**TransformerHyperparameters.read_shared_fields(fields, interleaved=False))
    if fields.arch not in ("qwen2vl", "paddleocr"):
        return h
    if fields.read_raw(SECTIONS) is None:
        raise fields.make_error(f"{fields.format_key(SECTIONS)} is missing")
    return replace(h, attention=replace(h.attention, rope=add_sections(fields, h.attention.rope)))


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
    "Qwen2VLForConditionalGeneration Qwen2VLModel Qwen2_5_VLForConditionalGeneration": {
        "arch": "qwen2vl", "like": "Qwen2ForCausalLM", "sees": True, "scalings": "mrope",
        "defaults": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    },
    "PaddleOCRVLForConditionalGeneration": {
        "arch": "paddleocr", "like": "Ernie4_5ForCausalLM", "sees": True, "scalings": "mrope",
        "unread": r"(mlp_AR|model\.projector)\..*",
        "defaults": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128},
    },
}  # fmt: skip
