"""Gemma 2 (Riviere et al. 2024, arXiv 2408.00118).

Unlike llama: embeddings times sqrt(width); norms behind attention and feed-forward network too; every second layer sees
a window only; soft caps on the scores and on the logits; GELU; rotated pairs are half a head apart. The ones that
Gemma adds to its norms' weights are in the file already.
"""

from dataclasses import dataclass

from localllm.arch.attention import Transformer
from localllm.arch.fields import Fields
from localllm.arch.states import Paged
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights

LAYERS_OF_27B = 46  # whose queries are scaled by the width of a head, not by its length


@dataclass(frozen=True)
class Gemma2(Transformer):
    """Softcaps are the largest magnitudes of scores and logits."""

    sliding_window: int
    score_softcap: float
    logit_softcap: float

    def window(self, layer: int) -> int | None:
        """The first layer has one, every second one behind it, too."""
        return self.sliding_window if layer % 2 == 0 else None

    @property
    def scale(self) -> float:
        """Of the scores."""
        a = self.attention
        return (self.width / a.heads[0] if self.layers == LAYERS_OF_27B else a.head_dim) ** -0.5


def read(fields: Fields) -> Gemma2:
    """The hyperparameters. Raises ModelError."""
    return Gemma2(
        **Transformer.shared_fields(fields, interleaved=False),
        sliding_window=fields.count("attention.sliding_window", 4096),
        score_softcap=fields.number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.number("final_logit_softcapping", 30.0),
    )


def forward(b: Builder, w: Weights, h: Gemma2) -> Activation:
    """Logits of the wanted tokens."""
    x = b.scale(b.embed(w.token_embd, b.ids), h.width**0.5)
    for state in h.states():
        x = block(b, w.block(state.layer), h, state, x)
    x = b.rms_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    return b.softcap(b.linear(x, w.get("output") or w.token_embd), h.logit_softcap)


def block(b: Builder, w: Weights, h: Gemma2, state: Paged, x: Activation) -> Activation:
    """One layer: attention, then the feed-forward network, each normalized and added to the residual stream."""
    a = h.attention
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = b.linear(y, w.attn_q), b.linear(y, w.attn_k), b.linear(y, w.attn_v)
    q, k = b.rope(q, a.rope, b.positions), b.rope(k, a.rope, b.positions)
    y = b.attend(q, k, v, state, heads=a.heads[state.layer], scale=h.scale, softcap=h.score_softcap)
    x = b.add(x, b.rms_norm(b.linear(y, w.attn_output), w.post_attention_norm, h.epsilon))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    y = b.linear(b.geglu(b.linear(y, w.ffn_gate), b.linear(y, w.ffn_up)), w.ffn_down)
    return b.add(x, b.rms_norm(y, w.post_ffw_norm, h.epsilon))
