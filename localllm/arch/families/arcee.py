"""AFM 4.5B (Arcee AI 2025). Unlike llama: the square of a ReLU instead of a gate."""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv, select_rope_factors
from localllm.arch.decoder import apply_decoder
from localllm.arch.families.llama import read
from localllm.arch.family import Activation, Builder, PagedState, Weight, Weights
from localllm.arch.feed_forward import apply_ungated_feed_forward

__all__ = ["forward", "read"]


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, factors=select_rope_factors(b, w, h))


def block(
    b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, factors), w.attn_output))
    return b.add(x, apply_ungated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.relu_squared))


CHECKPOINTS = {
    "ArceeForCausalLM": {
        "like": "LlamaForCausalLM", "layer": "attention feed_forward norms", "activations": "relu2",
        "window_ignored": False, "defaults": {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    },
}  # fmt: skip
