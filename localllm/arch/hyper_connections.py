"""Several residual streams (hyper-connections: Zhu et al. 2024, arXiv 2409.19606), as in Hunyuan 4.

The input of each half of a layer is a weighted sum of the streams, and its output is added to each stream with a
weight. All these weights are computed from all streams together; they are sigmoids plus a small constant.
"""

from typing import Any

import numpy as np

from localllm.arch.metadata import Fields
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights
from localllm.frozen import frozen


@frozen
class ResidualStreams:
    """The number of residual streams, the scales of their weights, and the factor of the weights for adding."""

    count: int
    more: float
    magnitude: float


def read_streams(fields: Fields) -> ResidualStreams:
    """Read the hyper_connection.* keys. Raises ModelError."""
    more, magnitude = (fields.number(f"hyper_connection.{name}") for name in ("epsilon", "magnitude"))
    return ResidualStreams(fields.count("hyper_connection.count"), more, magnitude)


def concat_streams(b: Builder, streams: list[Activation]) -> Activation:
    """Concatenate the streams."""
    first, *others = streams
    for other in others:
        first = b.concat_heads(first, other, 1)
    return first


def mixing_logits(b: Builder, h: Any, flat: Activation, fn: Weight, scales: Weight, base: Weight) -> list[Activation]:
    """Compute the logits of the weights, before their sigmoids: a list of [tokens, streams], one for each scale."""
    mixes, count = b.linear(b.rms_norm(flat, None, h.epsilon), fn), h.streams.count
    factors, offsets = scales.vector(), base.vector()
    b.ignore(scales, base)
    base.shaped(count * len(factors))
    parts = np.split(offsets, len(factors))
    return [
        b.add_vector(b.scale(b.slice_columns(mixes, i * count, (i + 1) * count), float(factor)), part)
        for i, (factor, part) in enumerate(zip(factors, parts, strict=True))
    ]


def reduce_streams(b: Builder, h: Any, streams: list[Activation], gates: Activation) -> Activation:
    """Compute the sum of the streams by their weights."""
    y = None
    for i, x in enumerate(streams):
        gated = b.sigmoid_gate(x, b.slice_columns(gates, i, i + 1))
        gated = b.add(gated, b.scale(x, h.streams.more))
        y = gated if y is None else b.add(y, gated)
    return y


def add_to_streams(b: Builder, h: Any, streams: list[Activation], y: Activation, gates: Activation) -> list[Activation]:
    """Return the streams, and what a half of a layer has made by their weights."""
    found = []
    for i, x in enumerate(streams):
        gated = b.scale(b.sigmoid_gate(y, b.slice_columns(gates, i, i + 1)), h.streams.magnitude)
        found.append(b.add(x, b.add(gated, b.scale(y, h.streams.more))))
    return found


def half(b: Builder, w: Weights, h: Any, streams: list[Activation], name: str) -> tuple[Activation, Activation]:
    """Return the input of a half of a layer, attention or feed-forward, and the logits of its weights for adding."""
    fn, scales, base = (w.require(f"hc_{name}_{part}") for part in ("fn", "scale", "base"))
    of_sum, of_adding = mixing_logits(b, h, concat_streams(b, streams), fn, scales.shaped(2), base)
    return reduce_streams(b, h, streams, of_sum), of_adding
