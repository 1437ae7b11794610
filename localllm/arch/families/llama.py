"""Llama (Touvron et al. 2023) and everything built like it: Mistral, Mixtral, SmolLM, ERNIE 4.5, ..."""

from localllm.arch.attention import Transformer, attend, qkv, rope_factors
from localllm.arch.decoder import decoder
from localllm.arch.feed_forward import feed_forward_or_experts, read_routing
from localllm.arch.layer_state import Paged
from localllm.arch.metadata import Fields
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights


def read(fields: Fields) -> Transformer:
    """Read the hyperparameters. Raises ModelError, also if RoPE would rotate only a part of a head."""
    shared = Transformer.shared_fields(fields, interleaved=True, rotates_all=True, own_values=True)
    if (attention := shared["attention"]).value_dim != attention.head_dim:
        if not fields.has("attention.key_length"):  # value_length or head_count is damaged
            raise fields.unsupported("keys and values of different lengths are not supported")
        lengths = f"keys of {attention.head_dim} numbers and values of {attention.value_dim}"
        fields.oddities.note(f"{lengths}, in a {fields.arch} model")
    return Transformer(**shared, routing=read_routing(fields))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    """Compute the logits of the requested tokens."""
    return decoder(b, w, h, block, factors=rope_factors(b, w, h))


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation, factors: Weight | None) -> Activation:
    """Apply one layer: attention, then the feed-forward network, each added to the residual stream."""
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, factors), w.attn_output))
    return b.add(x, feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))
