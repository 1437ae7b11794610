"""EuroBERT, NeoBERT, and Llama as an encoder.

EuroBERT: Boizard et al. 2025, arXiv 2503.05500. NeoBERT: Le Breton et al. 2025, arXiv 2502.19587. Llama as an encoder:
Llama-Embed-Nemotron, NVIDIA 2025, arXiv 2511.07025.

They are computed as llama, except that attention is bidirectional, whatever the files say, as in llama.cpp.
"""

from localllm.arch.attention import attend, project_qkv
from localllm.arch.decoder import apply_decoder, pool_texts
from localllm.arch.encoder import EncoderHyperparameters, read_encoder_pooling
from localllm.arch.families import llama
from localllm.arch.families.bert import OTHER_HEADS
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward, read_routing


def read(fields: HyperparameterReader) -> EncoderHyperparameters:
    is_llama = fields.arch == "llama-embed"
    shared = EncoderHyperparameters.read_shared_fields(
        fields, interleaved=fields.arch != "eurobert", rotates_all=is_llama
    )
    routing = read_routing(fields) if is_llama else None
    return EncoderHyperparameters(**shared, pooling=read_encoder_pooling(fields), routing=routing)


def forward(b: Builder, w: Weights, h: EncoderHyperparameters) -> Activation:
    if h.arch == "llama-embed":
        return llama.forward(b, w, h)
    if h.arch == "eurobert":
        return apply_decoder(b, w, h, block)
    x = b.embed(w.token_embd, b.ids)
    for state in h.list_states():
        x = block(b, w.get_layer(state.layer), h, state, x)
    return pool_texts(b, w, h, b.rms_norm(x, w.require("enc.output_norm"), h.epsilon))


def block(b: Builder, w: Weights, h: EncoderHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))


CHECKPOINTS = {
    "EuroBertModel": {
        "layer": "attention gated norms", "whole": {"output_norm": "width"}, "decodes": False, "prefixes": "model.",
        "unread": OTHER_HEADS, "scalings": "",
        "only": {"attention_bias": False, "mlp_bias": False},
        "metadata": {"attention.causal": False, "rope.scaling.type": "none"}, "read": "@bert.read_eurobert",
        "defaults": {"rms_norm_eps": 1e-5, "rope_theta": 250000.0},
    },
}  # fmt: skip
