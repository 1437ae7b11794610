"""AFM 4.5B (Arcee AI 2025). Unlike llama: the square of a ReLU instead of a gate."""

from localllm.arch.attention import Transformer, attend, qkv, rope_factors
from localllm.arch.decoder import decoder
from localllm.arch.families.llama import read
from localllm.arch.family import Activation, Builder, Paged, Weight, Weights
from localllm.arch.feed_forward import plain

__all__ = ["forward", "read"]


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    return decoder(b, w, h, block, factors=rope_factors(b, w, h))


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation, factors: Weight | None) -> Activation:
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, factors), w.attn_output))
    return b.add(x, plain(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.relu_squared))


CHECKPOINTS = {
    "ArceeForCausalLM": {
        "like": "LlamaForCausalLM", "layer": "attention feed_forward norms", "activations": "relu2",
        "window_ignored": False, "defaults": {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    },
}  # fmt: skip
