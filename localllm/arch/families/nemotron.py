"""Nemotron 3 and 4, Minitron (Parmar et al. 2024, arXiv 2402.16819), Jais 2 (Inception 2025).

Unlike llama: layer norms (the file's weights include the 1 that is added to them); squared ReLU without a gate; RoPE
rotates only the beginning of a head, in pairs half the rotated dimensions apart.
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
    if h.arch == "nemotron":
        w.require("output")
    return apply_decoder(b, w, h, block, norm=make_final_layer_norm(b, w, h))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.layer_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_ungated_feed_forward(b, w, b.layer_norm(x, w.ffn_norm, h.epsilon), b.relu_squared))


CHECKPOINTS = {
    "NemotronForCausalLM": {
        "layer": "attention feed_forward norms", "offset_norms": True, "biased": "norms output_norm",
        "activations": "relu2", "scalings": "linear", "partial_rope": True,
        "only": {"attention_bias": False, "mlp_bias": False}, "amounts": {"vocab_size": "vocab"},
        "keys": {"norm_eps": ("attention.layer_norm_rms_epsilon", 1e-5)}, "unsaid": {"rope.scaling.type": "none"},
        "layer_norm": "norm_eps",
        "defaults": {"hidden_act": "relu2", "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
    },
    "Jais2ForCausalLM": {
        "arch": "jais2", "layer": "attention feed_forward norms", "biased": "attention feed_forward norms output_norm",
        "activations": "relu2", "layer_norm": "layer_norm_eps", "only": {"attention_bias": True, "mlp_bias": True},
        "amounts": {"rope.dimension_count": "head_dim"},
        "defaults": {"hidden_act": "relu2", "max_position_embeddings": 8192},
    },
}  # fmt: skip
