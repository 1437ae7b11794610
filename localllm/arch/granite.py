"""Granite 3, with experts or without (IBM 2024, Granite 3.0 Language Models).

Unlike llama: factors for the embeddings, for what is added to the residual stream, for the scores, and for the logits.
"""

from localllm.arch.attention import Transformer, attend, qkv, rope_factors
from localllm.arch.experts import gated_or_mixture, read_routing, shared
from localllm.arch.fields import Fields
from localllm.arch.rope import Rope
from localllm.arch.states import Paged
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights
from localllm.frozen import frozen


@frozen
class Granite(Transformer):
    """Logits are divided by their scale."""

    embedding_scale: float
    residual_scale: float
    score_scale: float
    logit_scale: float
    rotated: bool = True
    has_shared: bool = False  # an expert that every token goes to

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.score_scale

    def rope(self, layer: int) -> Rope | None:
        return self.attention.rope if self.rotated else None


def read(fields: Fields) -> Granite:
    """The hyperparameters. Raises ModelError."""
    common = Granite.shared_fields(fields, interleaved=True)
    return Granite(
        **common,
        routing=read_routing(fields),
        embedding_scale=fields.number("embedding_scale", 0.0) or 1.0,
        residual_scale=fields.number("residual_scale", 0.0) or 1.0,
        score_scale=fields.number("attention.scale", 0.0) or common["attention"].head_dim ** -0.5,
        logit_scale=fields.factor("logit_scale"),
        has_shared=fields.count("expert_shared_feed_forward_length", 0) > 0,
        rotated=fields.flag("rope.scaling.finetuned", True),
    )


def forward(b: Builder, w: Weights, h: Granite) -> Activation:
    """Logits of the wanted tokens."""
    x, factors = b.scale(b.embed(w.token_embd, b.ids), h.embedding_scale), rope_factors(b, w, h)
    for state in h.states():
        x = block(b, w.block(state.layer), h, state, x, factors)
    x = b.rms_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    return b.scale(b.linear(x, w.get("output") or w.token_embd), 1 / h.logit_scale)


def block(b: Builder, w: Weights, h: Granite, state: Paged, x: Activation, factors: Weight | None) -> Activation:
    """One layer: attention, then the feed-forward network, each scaled and added to the residual stream."""
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    y = b.linear(attend(b, h, state, q, k, v, factors), w.attn_output)
    x = b.add(x, b.scale(y, h.residual_scale))
    y, beside = b.rms_norm(x, w.ffn_norm, h.epsilon), shared if h.has_shared else None
    y = gated_or_mixture(b, w, h.routing, y, b.swiglu, beside)
    return b.add(x, b.scale(y, h.residual_scale))
