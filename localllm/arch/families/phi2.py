"""Phi 1, 1.5 and 2 (Li et al. 2023, arXiv 2309.05463; Javaheripi et al. 2023).

Unlike llama: attention and feed-forward network read the same layer norm and are added together; GELU without a gate;
biases everywhere, also for the logits; RoPE rotates only the beginning of a head, in pairs half the rotated dimensions
apart.
"""

from localllm.arch.attention import LAYER_EPSILON, Transformer, attend, qkv
from localllm.arch.decoder import decoder, layer_norm_of
from localllm.arch.family import Activation, Builder, Fields, Paged, Weights
from localllm.arch.feed_forward import plain


def read(fields: Fields) -> Transformer:
    return Transformer(**Transformer.shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    w.require_biases("output")
    return decoder(b, w, h, block, norm=layer_norm_of(b, w, h))


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation) -> Activation:
    y = b.layer_norm(x, w.attn_norm, h.epsilon)
    q, k, v = qkv(b, w, h, state.layer, y)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, plain(b, w, y, b.gelu))


CHECKPOINTS = {
    "PhiForCausalLM": {
        "layer": "attention feed_forward attn_norm", "biased": "attention feed_forward attn_norm output_norm output",
        "activations": "gelu", "partial_rope": True, "layer_norm": "layer_norm_eps",
        "only": {"qk_layernorm": False, "tie_word_embeddings": False},
        "defaults": {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
