"""Several residual streams (hyper-connections: Zhu et al. 2024, arXiv 2409.19606), as in Hunyuan 4.

The input of each sublayer (attention, feed-forward network) is a weighted sum of the streams, and its output is added
to each stream with a weight. All these weights are computed from all streams together; they are sigmoids plus a small
constant.
"""

import numpy as np

from localllm.arch.metadata import HyperparameterReader
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights
from localllm.frozen import frozen


@frozen
class ResidualStreamHyperparameters:
    """The count of residual streams and the constants of their mixing weights."""

    count: int
    epsilon: float  # added to every weight
    magnitude: float  # factor of the weights for adding


def read_residual_streams(fields: HyperparameterReader) -> ResidualStreamHyperparameters:
    """Read the hyper_connection.* keys. Raises ModelError."""
    epsilon, magnitude = (fields.read_number(f"hyper_connection.{name}") for name in ("epsilon", "magnitude"))
    return ResidualStreamHyperparameters(fields.read_count("hyper_connection.count"), epsilon, magnitude)


def concat_streams(b: Builder, streams: list[Activation]) -> Activation:
    """Concatenate the streams, [tokens, width] each, to [tokens, streams * width]."""
    first, *rest = streams
    for stream in rest:
        first = b.concat_heads(first, stream, 1)
    return first


def compute_mixing_logits(
    b: Builder, epsilon: float, count: int, flat: Activation, fn: Weight, scales: Weight, base: Weight
) -> list[Activation]:
    """Compute the weights' logits, one [tokens, streams] for each of `scales`.

    flat: the streams, [tokens, streams * width].  epsilon: epsilon of the norm before the matrix `fn`.  count: number
    of streams.
    """
    mixes = b.linear(b.rms_norm(flat, None, epsilon), fn)
    factors, offsets = scales.read_vector(), base.read_vector()
    b.ignore(scales, base)
    base.require_shape(count * len(factors))
    parts = np.split(offsets, len(factors))
    return [
        b.add_vector(b.scale(b.slice_columns(mixes, i * count, (i + 1) * count), float(factor)), part)
        for i, (factor, part) in enumerate(zip(factors, parts, strict=True))
    ]


def reduce_streams(
    b: Builder, r: ResidualStreamHyperparameters, streams: list[Activation], gates: Activation
) -> Activation:
    """Sum the streams by their weights.

    gates: the weights' logits, [tokens, streams].
    """
    y = None
    for i, x in enumerate(streams):
        gated = b.sigmoid_gate(x, b.slice_columns(gates, i, i + 1))
        gated = b.add(gated, b.scale(x, r.epsilon))
        y = gated if y is None else b.add(y, gated)
    return y


def add_to_streams(
    b: Builder, r: ResidualStreamHyperparameters, streams: list[Activation], y: Activation, gates: Activation
) -> list[Activation]:
    """Add the sublayer output y to each stream, scaled by that stream's weight.

    gates: the weights' logits, [tokens, streams].
    """
    added = []
    for i, x in enumerate(streams):
        gated = b.scale(b.sigmoid_gate(y, b.slice_columns(gates, i, i + 1)), r.magnitude)
        added.append(b.add(x, b.add(gated, b.scale(y, r.epsilon))))
    return added


def enter_sublayer(
    b: Builder, w: Weights, r: ResidualStreamHyperparameters, epsilon: float, streams: list[Activation], name: str
) -> tuple[Activation, Activation]:
    """Return the input of a sublayer, and the logits of the weights for adding its output.

    name: attn or ffn.  epsilon: epsilon of the norm before the weights' matrix.
    """
    fn, scales, base = (w.require(f"hc_{name}_{part}") for part in ("fn", "scale", "base"))
    flat = concat_streams(b, streams)
    of_sum, of_adding = compute_mixing_logits(b, epsilon, r.count, flat, fn, scales.require_shape(2), base)
    return reduce_streams(b, r, streams, of_sum), of_adding
