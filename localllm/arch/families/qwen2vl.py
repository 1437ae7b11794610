"""The language models of vision models: Qwen2-VL and Qwen2.5-VL (arXiv 2409.12191, 2502.13923), PaddleOCR-VL (2025).

They are computed as Qwen 2 (PaddleOCR-VL without biases), with M-RoPE.
"""

from dataclasses import replace

from localllm.arch.attention import Transformer
from localllm.arch.families import llama, qwen2
from localllm.arch.family import Fields
from localllm.arch.rope import SECTIONS, with_sections

__all__ = ["forward", "read"]

forward = llama.forward


def read(fields: Fields) -> Transformer:
    """Read the hyperparameters. Raises ModelError, also for a file without sections."""
    h = qwen2.read(fields)
    if fields.raw(SECTIONS) is None:
        raise fields.error(f"no {fields.key(SECTIONS)} in the metadata")
    return replace(h, attention=replace(h.attention, rope=with_sections(fields, h.attention.rope)))


CHECKPOINTS = {
    "Qwen2VLForConditionalGeneration Qwen2VLModel Qwen2_5_VLForConditionalGeneration": {
        "like": "Qwen2ForCausalLM", "sees": True, "scalings": "mrope",
        "defaults": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    },
    "PaddleOCRVLForConditionalGeneration": {
        "arch": "paddleocr", "like": "Ernie4_5ForCausalLM", "sees": True, "scalings": "mrope",
        "unread": r"(mlp_AR|model\.projector)\..*",
        "defaults": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128},
    },
}  # fmt: skip
