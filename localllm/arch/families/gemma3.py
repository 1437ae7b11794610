"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786), EmbeddingGemma (Schechter Vera et al. 2025, arXiv 2509.20354).

Unlike Gemma 2: each head of queries and keys is normalized before it is rotated; of six layers, five have a sliding
window and a RoPE base of their own, without scaling; soft caps only if the file has them. In EmbeddingGemma, attention
is bidirectional: windows reach as far ahead as back; two matrices may follow the mean.
"""

from typing import ClassVar

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    normalize_heads,
    project_qkv,
    read_windows,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.encoder import count_later_tokens, count_past_tokens, read_encoder_pooling
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward
from localllm.arch.rope import read_base

LAYERS_OF_27B = 62  # the 27B model's scores are scaled by width / heads, not by the head dimension


@frozen
class Gemma3Hyperparameters(LocalRopeTransformerHyperparameters):
    """The hyperparameters of Gemma 3.

    Attributes:
        score_softcap, logit_softcap: the largest magnitudes of scores and logits, 0 for none.
    """

    score_softcap: float
    logit_softcap: float

    @property
    def scale(self) -> float:
        a = self.attention
        return (self.width // a.heads[0] if self.layers == LAYERS_OF_27B else a.head_dim) ** -0.5


@frozen
class EmbeddingGemmaHyperparameters(Gemma3Hyperparameters):
    bidirectional: ClassVar[bool] = True

    def get_window(self, layer: int) -> int | None:
        return count_past_tokens(self.windows[layer])

    def get_lookahead(self, layer: int) -> int:
        return count_later_tokens(self.windows[layer])


def read(fields: HyperparameterReader) -> Gemma3Hyperparameters:
    shared, kind = Gemma3Hyperparameters.read_shared_fields(fields, interleaved=False), Gemma3Hyperparameters
    if fields.arch == "gemma-embedding":
        shared, kind = {**shared, "pooling": read_encoder_pooling(fields)}, EmbeddingGemmaHyperparameters
    return kind(
        **shared,
        windows=read_windows(fields, period=6, default=0),
        local_rope=shared["attention"].rope.remove_scaling(read_base(fields, "rope.freq_base_swa", 10000.0)),
        score_softcap=fields.read_number("attn_logit_softcapping", 0.0),
        logit_softcap=fields.read_number("final_logit_softcapping", 0.0),
    )


def forward(b: Builder, w: Weights, h: Gemma3Hyperparameters) -> Activation:
    x = b.embed_inputs(lambda: b.scale(b.embed(w.token_embd, b.ids), h.width**0.5))
    logits = apply_decoder(b, w, h, block, x)
    return b.softcap(logits, h.logit_softcap) if h.logit_softcap and not h.pooling else logits


def block(b: Builder, w: Weights, h: Gemma3Hyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    q, k = normalize_heads(b, w, h, q, k)
    y = b.linear(attend(b, h, state, q, k, v, softcap=h.score_softcap), w.attn_output)
    x = b.add(x, b.rms_norm(y, w.post_attention_norm, h.epsilon))
    y = apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.geglu)
    return b.add(x, b.rms_norm(y, w.post_ffw_norm, h.epsilon))


CHECKPOINTS = {
    "Gemma3ForCausalLM Gemma3ForConditionalGeneration": {
        "layer": "attention head_norms gated norms norms_behind", "offset_norms": True, "sees": True,
        "activations": "gelu", "windows": 6,
        "only": {"use_bidirectional_attention": False, "tie_word_embeddings": True, "sliding_window_pattern": 6},
        "keys": {
            "final_logit_softcapping": ("final_logit_softcapping", None), "sliding_window": "attention.sliding_window",
        },
        "read": "@gemma.read_gemma3",
        "defaults": {
            "tie_word_embeddings": True, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "query_pre_attn_scalar": 256, "max_position_embeddings": 131072, "sliding_window": 4096,
            "rope_theta": 1e6,
        },
    },
    "Gemma3TextModel": {
        "arch": "gemma-embedding", "like": "Gemma3ForCausalLM", "whole": {"output_norm": "width"}, "decodes": False,
        "prefixes": "model.", "projects": True, "sees": False,
        "only": {"tie_word_embeddings": True, "sliding_window_pattern": 6},
        "keys": {"sliding_window": "attention.sliding_window"}, "read": "@gemma.read_gemma_embedding",
    },
}  # fmt: skip
