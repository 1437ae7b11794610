"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a draft head of one layer, in a file of its own.

It reads a token together with a row computed from the inputs of three of the target model's layers at the token before.
After a drafted token, its own output takes the place of that row. A file may lack the embeddings and the output matrix,
which are then the target model's; a reduced vocabulary is a list of the target's tokens.
"""

from typing import NamedTuple

import numpy as np

from localllm.arch.attention import TransformerHyperparameters, attend, select_rope_factors
from localllm.arch.decoder import MtpOutput
from localllm.arch.family import Activation, Builder, HyperparameterReader, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward

COUNT = 3  # of the target's layers


@frozen
class Eagle3Hyperparameters(TransformerHyperparameters):
    """The hyperparameters of an EAGLE-3 head.

    Attributes:
        target_layers: the layers whose inputs are read; the layer count represents the last one's output.
        target_width: the target's width.
        norms_inputs: whether to normalize the concatenated inputs.
        adds_normed: whether to add attention's output to the normalized row instead of the row.
    """

    target_layers: tuple[int, ...]
    target_width: int
    norms_inputs: bool
    adds_normed: bool


class HeadAndTarget(NamedTuple):
    """The tensors of the draft head's file, and those of the target model."""

    own: Weights
    model: Weights


def read(fields: HyperparameterReader) -> Eagle3Hyperparameters:
    shared = TransformerHyperparameters.read_shared_fields(fields, interleaved=True, rotates_all=True)
    layers = fields.read_raw("target_layers")
    if not isinstance(layers, np.ndarray) or layers.shape != (COUNT,) or layers.dtype.kind not in "iu":
        raise fields.make_value_error("target_layers", f"{COUNT} layer indices")
    if (layers < 0).any() or len(set(layers.tolist())) < COUNT:
        raise fields.make_value_error("target_layers", f"{COUNT} different layers")
    if shared["layers"] != 1:
        raise fields.make_error(f"block_count of an EAGLE-3 head must be 1 (found {shared['layers']})")
    return Eagle3Hyperparameters(
        **shared,
        target_layers=tuple(layers.tolist()),
        target_width=fields.read_count("target_hidden_size"),
        norms_inputs=fields.read_flag("norm_before_fc", False),
        adds_normed=fields.read_flag("norm_before_residual", False),
    )


def fuse(b: Builder, pair: HeadAndTarget, h: Eagle3Hyperparameters, inputs: Activation) -> Activation:
    """Project the inputs of the target's layers, [tokens, 3 * target_width], to float32 [tokens, width]."""
    w, columns = pair.own, COUNT * h.target_width
    if h.norms_inputs:
        inputs = b.rms_norm(inputs, w.require("enc.output_norm").require_shape(columns), h.epsilon)
    return b.linear(inputs, w.require("fc").require_shape(h.width, columns))


def draft(b: Builder, pair: HeadAndTarget, h: Eagle3Hyperparameters, hidden: Activation) -> MtpOutput:
    """Compute the layer's output for tokens, and its logits.

    hidden: the row of the token before each one, float32 [tokens, width].
    """
    w, a, (state,) = pair.own.get_layer(0), h.attention, h.list_states()
    x = b.rms_norm(b.embed(pair.own.get("token_embd") or pair.model.token_embd, b.ids), w.attn_norm, h.epsilon)
    normed = b.rms_norm(hidden, w.require("attn_norm_2"), h.epsilon)
    both = b.concat_heads(x, normed, 1)
    counts = a.heads[0], state.kv_heads, state.kv_heads
    shapes = [(count * a.head_dim, 2 * h.width) for count in counts]
    matrices = [w.attn_q, w.attn_k, w.attn_v]
    q, k, v = (b.linear(both, matrix.require_shape(*shape)) for matrix, shape in zip(matrices, shapes, strict=True))
    x = b.linear(attend(b, h, state, q, k, v, select_rope_factors(b, pair.own, h)), w.attn_output)
    x = b.add(x, normed if h.adds_normed else hidden)
    x = b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))
    head = pair.own.get("output") or pair.model.get("output") or pair.model.token_embd
    return MtpOutput(x, b.linear(b.rms_norm(b.select(x, b.wanted), pair.own.output_norm, h.epsilon), head))
