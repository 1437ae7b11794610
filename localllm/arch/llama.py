"""Llama (Touvron et al. 2023) and everything built like it: Mistral, Mixtral, SmolLM, TinyLlama, ..."""

from localllm.arch.attention import Transformer, attend, qkv, rope_factors
from localllm.arch.experts import gated_or_mixture, read_routing
from localllm.arch.fields import Fields
from localllm.arch.states import Paged
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights


def read(fields: Fields) -> Transformer:
    """The hyperparameters. Raises ModelError, also if a part of a head were not rotated: no llama is so."""
    shared = Transformer.shared_fields(fields, interleaved=True)
    if (rope := shared["attention"].rope).dims != rope.head_dim:
        raise fields.error(f"{fields.key('rope.dimension_count')} is {rope.dims}, a head has {rope.head_dim}")
    return Transformer(**shared, routing=read_routing(fields))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    """Logits of the wanted tokens."""
    x, factors = b.embed(w.token_embd, b.ids), rope_factors(b, w, h)
    for state in h.states():
        x = block(b, w.block(state.layer), h, state, x, factors)
    x = b.rms_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    return b.linear(x, w.get("output") or w.token_embd)


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation, factors: Weight | None) -> Activation:
    """One layer: attention, then the feed-forward network, each added to the residual stream."""
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, factors), w.attn_output))
    return b.add(x, gated_or_mixture(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))
