"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867).

Unlike llama: layer norms; attention and feed-forward network read the same residual stream, in the smaller model the
same norm of it, and are added together; GELU without a gate; queries, keys and values by one matrix; rotated pairs are
half a head apart.
"""

from localllm.arch.attention import LAYER_EPSILON, Transformer, attend, qkv
from localllm.arch.feed_forward import plain
from localllm.arch.fields import Fields
from localllm.arch.states import Paged
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights


def read(fields: Fields) -> Transformer:
    """The hyperparameters. Raises ModelError."""
    return Transformer(**Transformer.shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    """Logits of the wanted tokens."""
    x = b.embed(w.token_embd, b.ids)
    for state in h.states():
        x = block(b, w.block(state.layer), h, state, x)
    w.require_biases("output_norm")
    x = b.layer_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    return b.linear(x, w.get("output") or w.token_embd)


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation) -> Activation:
    """One layer: attention and the feed-forward network, added to the residual stream."""
    y, own = b.layer_norm(x, w.attn_norm, h.epsilon), w.get("attn_norm_2")
    q, k, v = qkv(b, w, h, state.layer, b.layer_norm(x, own, h.epsilon) if own else y)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, plain(b, w, y, b.gelu))
