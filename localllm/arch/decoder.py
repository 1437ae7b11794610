"""The common frame of decoders: embed tokens, apply the layers, normalize, multiply by the output matrix."""

from collections.abc import Callable
from typing import Any

from localllm.arch.attention import Transformer
from localllm.arch.pooling import pool_texts
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights

Norm = Callable[[Activation], Activation]


def decoder(
    b: Builder,
    w: Weights,
    h: Any,
    block: Callable[..., Activation],
    x: Activation | None = None,
    norm: Norm | None = None,
    **shared: Any,
) -> Activation:
    """Compute the logits of the requested tokens, float32 [wanted, vocab].

    block(b, the layer's weights, h, the layer's state, x, **shared) applies one layer. x: the first layer's input, the
    tokens' embeddings if None.  norm: the final norm, RMSNorm with output_norm if None. h has layer_states() and
    epsilon. Without an output matrix, the embedding matrix is used.
    """
    x = b.embed_inputs(lambda: b.embed(w.token_embd, b.ids)) if x is None else x
    for state in h.layer_states():
        x = block(b, w.block(state.layer), h, state, b.tap_layer_input(x, state.layer), **shared)
    return last(b, w, h, b.tap_layer_input(x, h.layers), norm)


def last(b: Builder, w: Weights, h: Any, x: Activation, norm: Norm | None = None) -> Activation:
    """Compute the requested tokens' logits from the last layer's output, or a row for each text with h.pooling."""
    ignore_mtp_layers(b, w, h)
    normed = norm or (lambda x: b.rms_norm(x, w.output_norm, h.epsilon))
    if h.pooling:
        b.ignore(w.get("output"), w.bias("output"))
        return pool_texts(b, w, h, normed(x))
    b.ignore(w.get("cls.output"), w.bias("cls.output"))
    x = b.select(b.export_hidden(normed(x)), b.wanted) if b.reveals else normed(b.select(x, b.wanted))
    return b.linear(x, w.get("output") or w.token_embd)


def ignore_mtp_layers(b: Builder, w: Weights, h: Any) -> None:
    """Mark the tensors of MTP layers as used (Gloeckle et al. 2024); a file may lack them. Raises ModelError."""
    for layer in range(h.layers, h.layers + h.mtp_layers):
        if tensors := (block := w.block(layer)).all():
            block.require("nextn.eh_proj").shaped(h.width, 2 * h.width)
            b.ignore(*tensors)


def layer_norm_of(b: Builder, w: Weights, h: Transformer) -> Norm:
    """Return LayerNorm (Ba et al. 2016) as the final norm."""
    w.require_biases("output_norm")
    return lambda x: b.layer_norm(x, w.output_norm, h.epsilon)
