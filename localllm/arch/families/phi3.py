"""Phi 3, 3.5 and 4 (Abdin et al. 2024, arXiv 2404.14219).

Unlike llama: fused projections; rotated pairs are half a head apart, or only a part of a head is rotated; LongRoPE.
Windows are ignored, as in llama.cpp, because files have wrong values.
"""

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.families.llama import forward
from localllm.arch.family import HyperparameterReader

__all__ = ["forward", "read"]


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(**TransformerHyperparameters.read_shared_fields(fields, interleaved=False))


CHECKPOINTS = {
    "Phi3ForCausalLM": {
        "layer": "fused_attention fused_gated norms", "scalings": "longrope su", "partial_rope": True,
        "window_ignored": True, "sizes": {"fused_rows": "queries + 2 * keys", "both_hidden": "2 * hidden"},
        "keys": {"sliding_window": ("attention.sliding_window", 0)}, "read": "@llama.read_phi3",
        "defaults": {"rms_norm_eps": 1e-5},
    },
}  # fmt: skip
