"""Gemma (Gemma Team 2024, arXiv 2403.08295).

Unlike llama: embeddings times sqrt(width); GELU; rotated pairs are half a head apart; the output matrix is the
embedding matrix. The file's norms include the 1 that Gemma adds to their weights.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(**TransformerHyperparameters.read_shared_fields(fields, interleaved=False))


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, b.scale(b.embed(w.token_embd, b.ids), h.width**0.5))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.geglu))


CHECKPOINTS = {
    "GemmaForCausalLM": {
        "layer": "attention gated norms", "offset_norms": True,
        "activations": "gelu exact_gelu",  # the first checkpoints say "gelu" and mean the tanh approximation
        "only": {"use_bidirectional_attention": False, "tie_word_embeddings": True},
        "defaults": {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192},
    },
}  # fmt: skip
