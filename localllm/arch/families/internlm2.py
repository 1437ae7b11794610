"""InternLM 2 and 3 (Cai et al. 2024, arXiv 2403.17297): like llama, except for the names in their checkpoints."""

from localllm.arch.families.llama import forward, read

__all__ = ["forward", "read"]


CHECKPOINTS = {
    "InternLM2ForCausalLM": {
        "layer": "gated norms",
        "tensors": {  # a group's rows are its queries, a key and a value
            "attn_q": "grouped_q attention.wqkv.weight[fused_rows width]: queries width",
            "attn_k": "grouped_k attention.wqkv.weight[fused_rows width]: keys width",
            "attn_v": "grouped_v attention.wqkv.weight[fused_rows width]: keys width",
            "attn_output": "width queries",
        },
        "only": {"bias": False},
        "reads": {"head_dim": None},
        "sizes": {"fused_rows": "queries + 2 * keys"},
        "defaults": {"rms_norm_eps": 1e-6},
    }
}  # fmt: skip
