"""Talkie 13B (2026).

Unlike llama: norms have no weights, but each head of queries has a factor; heads are normalized after RoPE; every layer
adds the embeddings once more, times a factor; logits have a factor; rotated pairs are half a head apart.
"""

from localllm.arch.attention import TransformerHyperparameters, project_qkv, rotate_heads
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, AttentionScores, Builder, HyperparameterReader, PagedState, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward


@frozen
class TalkieHyperparameters(TransformerHyperparameters):
    """The hyperparameters of Talkie.

    Attributes:
        logit_scale: factor of the logits.
    """

    logit_scale: float


def read(fields: HyperparameterReader) -> TalkieHyperparameters:
    return TalkieHyperparameters(
        **TalkieHyperparameters.read_shared_fields(fields, interleaved=False),
        logit_scale=fields.read_factor("logit_scale"),
    )


def forward(b: Builder, w: Weights, h: TalkieHyperparameters) -> Activation:
    w.require("output")
    x = b.rms_norm(b.embed(w.token_embd, b.ids), None, h.epsilon)
    logits = apply_decoder(b, w, h, block, x, lambda y: b.rms_norm(y, None, h.epsilon), embeddings=x)
    return b.scale(logits, h.logit_scale)


def block(
    b: Builder, w: Weights, h: TalkieHyperparameters, state: PagedState, x: Activation, embeddings: Activation
) -> Activation:
    """Apply one layer: attention, then the feed-forward network.

    Each output is added to the residual stream; then the embeddings are added, too.
    """
    heads, head_dim = h.attention.heads[state.layer], h.attention.head_dim
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, None, h.epsilon))
    q, k = rotate_heads(b, h, state.layer, q, k)
    q = b.rms_norm(q, w.attn_q_norm.require_shape(heads, 1).repeat(head_dim), h.epsilon, head_dim)
    k = b.rms_norm(k, None, h.epsilon, head_dim)
    x = b.add(x, b.linear(b.attend(q, k, v, state, AttentionScores(heads, h.scale)), w.attn_output))
    x = b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, None, h.epsilon), b.swiglu))
    return b.add(x, b.scale(embeddings, w.layer_output_scale))
