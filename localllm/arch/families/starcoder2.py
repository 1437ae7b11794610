"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173).

Unlike llama: layer norms; GELU without a gate; biases everywhere; rotated pairs are half a head apart.
"""

from localllm.arch.attention import LAYER_EPSILON, TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_ungated_feed_forward


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(
        **TransformerHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    )


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, norm=make_final_layer_norm(b, w, h))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.layer_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_ungated_feed_forward(b, w, b.layer_norm(x, w.ffn_norm, h.epsilon), b.gelu))


CHECKPOINTS = {
    "Starcoder2ForCausalLM": {
        "layer": "attention feed_forward norms", "biased": "attention feed_forward norms output_norm",
        "activations": "gelu", "window_ignored": True, "only": {"use_bias": True}, "layer_norm": "norm_epsilon",
        "defaults": {"tie_word_embeddings": True, "max_position_embeddings": 4096},
    },
}  # fmt: skip
