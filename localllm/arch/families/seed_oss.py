"""Seed-OSS (ByteDance 2025).

Unlike llama: rotated pairs are half a head apart; queries, keys and values have biases; the norm before the
feed-forward network is named post_attention_norm.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.families.qwen2 import read
from localllm.arch.family import Activation, Builder, PagedState, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward

__all__ = ["block", "read"]


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, w.post_attention_norm, h.epsilon), b.swiglu))


CHECKPOINTS = {
    "SeedOssForCausalLM": {
        "layer": "attention gated norms_around", "biased": "attn_q attn_k attn_v", "scalings": "linear yarn llama3",
        "only": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    },
}  # fmt: skip
