"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173).

Unlike llama: layer norms; GELU without a gate; biases everywhere; rotated pairs are half a head apart.
"""

from localllm.arch.attention import LAYER_EPSILON, Transformer, attend, qkv
from localllm.arch.decoder import decoder, layer_norm_of
from localllm.arch.family import Activation, Builder, Fields, Paged, Weights
from localllm.arch.feed_forward import plain


def read(fields: Fields) -> Transformer:
    return Transformer(**Transformer.shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    return decoder(b, w, h, block, norm=layer_norm_of(b, w, h))


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation) -> Activation:
    q, k, v = qkv(b, w, h, state.layer, b.layer_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, plain(b, w, b.layer_norm(x, w.ffn_norm, h.epsilon), b.gelu))


CHECKPOINTS = {
    "Starcoder2ForCausalLM": {
        "layer": "attention feed_forward norms", "biased": "attention feed_forward norms output_norm",
        "activations": "gelu", "window_ignored": True, "only": {"use_bias": True}, "layer_norm": "norm_epsilon",
        "defaults": {"tie_word_embeddings": True, "max_position_embeddings": 4096},
    },
}  # fmt: skip
