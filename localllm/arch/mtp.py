"""Multi-token prediction layers, which draft tokens (DeepSeek-V3, 2024, arXiv 2412.19437).

Such a layer reads a token's embedding and the model's hidden state of the token before, and predicts the next token.
To draft further tokens, its own output takes the place of the model's hidden state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import State
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights

Norm = Callable[[Activation, Weight], Activation]


class MtpOutput(NamedTuple):
    """The output of an MTP layer.

    Attributes:
        hidden: the hidden states of all tokens, which the next step reads in place of the model's.
        logits: logits of the requested tokens.
    """

    hidden: Activation
    logits: Activation


def mtp_output(
    b: Builder, w: Weights, h: Any, hidden: Activation, block: Callable[..., Activation], norm: Norm | None = None
) -> MtpOutput:
    """Compute the output of the first multi-token prediction layer. Raises ModelError.

    hidden: for each token the model's hidden state of the token before it, after the final norm, float32 [tokens,
    width].
    block: one layer, as for `decoder`.  norm: applied to a row with a weight, RMSNorm if None. Where the layer has no
    embeddings, final norm or output matrix, the model's are used.
    """
    weights, normed = w.block(h.layers), norm or (lambda x, weight: b.rms_norm(x, weight, h.epsilon))
    x = normed(b.embed(weights.get("nextn.embed_tokens") or w.token_embd, b.ids), weights.require("nextn.enorm"))
    x = b.concat_heads(x, normed(hidden, weights.require("nextn.hnorm")), 1)
    x = b.linear(x, weights.require("nextn.eh_proj").shaped(h.width, 2 * h.width))
    x = block(b, weights, h, mtp_state(h), x)
    x = normed(x, weights.get("nextn.shared_head_norm") or w.output_norm)
    head = weights.get("nextn.shared_head_head") or w.get("output") or w.token_embd
    return MtpOutput(x, b.linear(b.select(x, b.wanted), head))


def mtp_state(h: Hyperparameters) -> State:
    """Return the state of the first MTP layer."""
    return replace(h, layers=h.layers + 1).states()[h.layers]


def has_mtp_layer(w: Weights, h: Hyperparameters) -> bool:
    """Return whether the file has an MTP layer that `mtp_output` can compute; that of Ling 2 differs."""
    weights = w.block(h.layers)
    return h.mtp_layers > 0 and weights.get("nextn.eh_proj") is not None and weights.get("layer_output_norm") is None
