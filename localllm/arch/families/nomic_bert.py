"""Nomic Embed, also with experts, and Jina v3 without its adapters.

Nomic Embed: Nussbaum et al. 2024, arXiv 2402.01613; with experts: 2502.07972. Jina v3: Sturua et al. 2024, arXiv
2409.10173.

Unlike BERT, queries and keys are rotated and no positions are added. Nomic Embed uses SwiGLU; with experts, every other
layer has experts without a gate, whose weights are not normalized.
"""

from localllm.arch.decoder import pool_texts
from localllm.arch.encoder import EncoderHyperparameters, embed_tokens, read_encoder_fields
from localllm.arch.families.bert import OTHER_HEADS, apply_attention
from localllm.arch.family import Activation, Builder, HyperparameterReader, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward, apply_ungated_feed_forward, read_routing
from localllm.arch.verbs import Routing


def read(fields: HyperparameterReader) -> EncoderHyperparameters:
    scale = fields.read_number("expert_weights_scale", 0.0) or 1.0
    return EncoderHyperparameters(
        **read_encoder_fields(fields), routing=read_routing(fields, normalized=False, scale=scale)
    )


def forward(b: Builder, w: Weights, h: EncoderHyperparameters) -> Activation:
    x = b.layer_norm(embed_tokens(b, w), w.token_embd_norm, h.epsilon)
    for state in h.list_states():
        layer = w.get_layer(state.layer)
        x = apply_attention(b, layer, h, state, x)
        x = b.layer_norm(b.add(apply_feed_forward(b, layer, h, x), x), layer.layer_output_norm, h.epsilon)
    return pool_texts(b, w, h, x)


def apply_feed_forward(b: Builder, w: Weights, h: EncoderHyperparameters, x: Activation) -> Activation:
    """Apply the layer's network: gated, ungated or experts."""
    if h.routing and w.get("ffn_gate_inp", by_layer=True):
        return apply_mixture(b, w, h.routing, x)
    return (
        apply_gated_feed_forward(b, w, x, b.swiglu)
        if w.get("ffn_gate")
        else apply_ungated_feed_forward(b, w, x, b.gelu_erf)
    )


def apply_mixture(b: Builder, w: Weights, routing: Routing, x: Activation) -> Activation:
    """Apply each token's experts, and sum their weighted outputs."""
    choice = b.route(b.linear(x, w.ffn_gate_inp), routing)
    y = b.gelu_erf(b.expert_linear(b.gather(x, choice), w.ffn_up_exps, choice))
    return b.scatter(b.expert_linear(y, w.ffn_down_exps, choice), choice)


EXPERTS = {  # of every other layer, from the second one on
    "ffn_gate_inp": "experts width",
    "ffn_up_exps": "reshape mlp.experts.mlp.w1[stacked width]: experts hidden width",
    "ffn_down_exps": "turned mlp.experts.mlp.w2[stacked width]: experts width hidden",
}
CHECKPOINTS = {
    "NomicBertModel": {
        "select": "@bert.select_nomic_bert", "layer": "fused_attention gated norms_of_encoder",
        "whole": {"token_types": "types width", "token_embd_norm": "width"},
        "biased": "norms_of_encoder token_embd_norm", "decodes": False, "unread": OTHER_HEADS,
        "read": "@bert.read_nomic_bert",
    },
    "NomicBertModel+experts": {
        "arch": "nomic-bert-moe", "like": "NomicBertModel", "layer": "fused_attention norms_of_encoder",
        "parts": {"mixes": (" ".join(EXPERTS), "feed_forward")}, "tensors": EXPERTS,
        "biased": "norms_of_encoder token_embd_norm fused_attention ffn_up ffn_down",
        "unread": rf"{OTHER_HEADS}|.*\.experts\.bias", "read": "@bert.read_nomic_bert_original",
    },
}  # fmt: skip
