"""Layers that predict the token after the next one (multi-token prediction: DeepSeek-V3, 2024, arXiv 2412.19437).

Such a layer reads a token together with the model's hidden state of the token before, and predicts the next one.
Its own output then takes the place of the model's hidden state, so that it can draft further tokens.
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

    Hidden states of all tokens, in place of the model's, and logits of the wanted ones.
    """

    made: Activation
    logits: Activation


def mtp_output(
    b: Builder, w: Weights, h: Any, made: Activation, block: Callable[..., Activation], norm: Norm | None = None
) -> MtpOutput:
    """Compute the output of the first multi-token prediction layer.

    made: the model's hidden state of the token before each one, after its last norm, float32 [tokens, width]; block: as
    of decoder, of an attending layer; norm: of a row with a weight, RMSNorm if None. Embeddings, the last norm and the
    output matrix are the model's where the layer has none of its own. Raises ModelError.
    """
    own, normed = w.block(h.layers), norm or (lambda x, weight: b.rms_norm(x, weight, h.epsilon))
    x = normed(b.embed(own.get("nextn.embed_tokens") or w.token_embd, b.ids), own.require("nextn.enorm"))
    x = b.concat_heads(x, normed(made, own.require("nextn.hnorm")), 1)
    x = b.linear(x, own.require("nextn.eh_proj").shaped(h.width, 2 * h.width))
    x = block(b, own, h, guessing_state(h), x)
    x = normed(x, own.get("nextn.shared_head_norm") or w.output_norm)
    head = own.get("nextn.shared_head_head") or w.get("output") or w.token_embd
    return MtpOutput(x, b.linear(b.select(x, b.wanted), head))


def guessing_state(h: Hyperparameters) -> State:
    """Return the layer's state."""
    return replace(h, layers=h.layers + 1).states()[h.layers]


def has_guessing_layer(w: Weights, h: Hyperparameters) -> bool:
    """Return whether the file has the tensors of `mtp_output`: it may lack them, and Ling 2 has other norms."""
    own = w.block(h.layers)
    return h.guessing > 0 and own.get("nextn.eh_proj") is not None and own.get("layer_output_norm") is None
