"""Chameleon (Meta 2024, arXiv 2405.09818), for text.

Unlike llama: each head of queries and keys has a layer norm with weights of its own; the larger model has its norms
after attention and feed-forward network. The logits of image tokens are set to the lowest float32.
"""

from dataclasses import replace

import numpy as np

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward

HEAD_EPSILON = 1e-5
IMAGES = slice(4, 8196)  # tokens


@frozen
class ChameleonHyperparameters(TransformerHyperparameters):
    norms_behind: bool


def read(fields: HyperparameterReader) -> ChameleonHyperparameters:
    if fields.vocab_size < IMAGES.stop:
        raise fields.make_error(f"the vocabulary must have at least {IMAGES.stop} tokens (found {fields.vocab_size})")
    common = ChameleonHyperparameters.read_shared_fields(fields, interleaved=True, rotates_all=True)
    return ChameleonHyperparameters(**common, norms_behind=fields.read_flag("swin_norm", False))


def forward(b: Builder, w: Weights, h: ChameleonHyperparameters) -> Activation:
    of_images = np.zeros(h.vocab_size, np.float32)
    of_images[IMAGES] = np.finfo(np.float32).min
    return b.add_vector(apply_decoder(b, w, h, block), of_images)


def normalize_heads(b: Builder, h: ChameleonHyperparameters, x: Activation, weight: Weight, heads: int) -> Activation:
    """Apply each head's layer norm."""
    head_dim = h.attention.head_dim
    bias = weight.bias.require_shape(heads, head_dim).flatten() if weight.bias else None
    return b.layer_norm(x, replace(weight.require_shape(heads, head_dim).flatten(), bias=bias), HEAD_EPSILON, head_dim)


def block(b: Builder, w: Weights, h: ChameleonHyperparameters, state: PagedState, x: Activation) -> Activation:
    a = h.attention

    def before(y: Activation, weight: Weight) -> Activation:
        return y if h.norms_behind else b.rms_norm(y, weight, h.epsilon)

    def behind(y: Activation, weight: Weight) -> Activation:
        return b.rms_norm(y, weight, h.epsilon) if h.norms_behind else y

    q, k, v = project_qkv(b, w, h, state.layer, before(x, w.attn_norm))
    q = normalize_heads(b, h, q, w.attn_q_norm, a.heads[state.layer])
    k = normalize_heads(b, h, k, w.attn_k_norm, a.kv_heads[state.layer])
    y = behind(b.linear(attend(b, h, state, q, k, v), w.attn_output), w.attn_norm)
    x = b.add(x, y)
    # With post-norms, the network reads attention's output instead of the residual stream, as in llama.cpp.
    y = y if h.norms_behind else before(x, w.ffn_norm)
    return b.add(x, behind(apply_gated_feed_forward(b, w, y, b.swiglu), w.ffn_norm))
