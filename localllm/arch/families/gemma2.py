"""Gemma 2 (Riviere et al. 2024, arXiv 2408.00118).

Unlike Gemma: norms after attention and feed-forward network too; every second layer has a sliding window; soft
caps on the scores and on the logits.
"""

from localllm.arch.attention import WindowedTransformerHyperparameters, attend, project_qkv, read_windows
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward

LAYERS_OF_27B = 46  # the 27B model's scores are scaled by width / heads, not by the head dimension


@frozen
class Gemma2Hyperparameters(WindowedTransformerHyperparameters):
    """The hyperparameters of Gemma 2; soft caps are the largest magnitudes of scores and logits."""

    score_softcap: float
    logit_softcap: float

    @property
    def scale(self) -> float:
        a = self.attention
        return (self.width // a.heads[0] if self.layers == LAYERS_OF_27B else a.head_dim) ** -0.5


def read(fields: HyperparameterReader) -> Gemma2Hyperparameters:
    return Gemma2Hyperparameters(
        **Gemma2Hyperparameters.read_shared_fields(fields, interleaved=False),
        windows=read_windows(fields, period=2, default=4096),
        score_softcap=fields.read_number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.read_number("final_logit_softcapping", 30.0),
    )


def forward(b: Builder, w: Weights, h: Gemma2Hyperparameters) -> Activation:
    logits = apply_decoder(b, w, h, block, b.scale(b.embed(w.token_embd, b.ids), h.width**0.5))
    return b.softcap(logits, h.logit_softcap) if h.logit_softcap else logits


def block(b: Builder, w: Weights, h: Gemma2Hyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    y = b.linear(attend(b, h, state, q, k, v, softcap=h.score_softcap), w.attn_output)
    x = b.add(x, b.rms_norm(y, w.post_attention_norm, h.epsilon))
    y = apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.geglu)
    return b.add(x, b.rms_norm(y, w.post_ffw_norm, h.epsilon))


CHECKPOINTS = {
    "Gemma2ForCausalLM": {
        "layer": "attention gated norms norms_behind", "offset_norms": True, "activations": "gelu", "windows": 2,
        "only": {"use_bidirectional_attention": False, "tie_word_embeddings": True},
        "keys": {
            "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
            "sliding_window": "attention.sliding_window",
        },
        "read": "@gemma.read_gemma2",
        "defaults": {
            "tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096,
            "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    },
}  # fmt: skip
