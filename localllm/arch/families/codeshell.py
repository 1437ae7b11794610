"""CodeShell (Xie et al. 2024, arXiv 2403.15747). Like StarCoder 2, but files may lack the embedding matrix."""

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.families.starcoder2 import block, read
from localllm.arch.family import Activation, Builder, Weights

__all__ = ["forward", "read"]


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    x = b.embed(w.get("token_embd") or w.require("output"), b.ids)
    return apply_decoder(b, w, h, block, x, make_final_layer_norm(b, w, h))


CHECKPOINTS = {
    "CodeShellForCausalLM": {
        "layer": "fused_attention feed_forward norms", "biased": "fused_attention feed_forward norms output_norm",
        "activations": "gelu", "layer_norm": "layer_norm_epsilon",
        "only": {"position_embedding_type": "rope", "group_query_attention": True, "scale_attn_weights": True},
        "sizes": {"fused_rows": "queries + 2 * keys"},
        "metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, "read": "@gpt.read_codeshell",
    },
}  # fmt: skip
