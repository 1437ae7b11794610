"""Jina Embeddings 2 (Günther et al. 2023, arXiv 2310.19923).

Unlike BERT: bidirectional ALiBi instead of position embeddings; gated GELU, with the gate's matrix possibly in the
upper half of ffn_up; in the models for code, queries and keys are normalized, and attention's residual is added and
normalized twice.
"""

from localllm.arch.attention import attend, normalize_queries_and_keys, project_qkv
from localllm.arch.decoder import pool_texts
from localllm.arch.encoder import embed_tokens, read_encoder_fields
from localllm.arch.families.baichuan import ALIBI_BIAS
from localllm.arch.families.bert import OTHER_HEADS, BERTHyperparameters
from localllm.arch.families.mpt import compute_alibi_slopes
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward, apply_ungated_feed_forward


def read(fields: HyperparameterReader) -> BERTHyperparameters:
    return BERTHyperparameters(**read_encoder_fields(fields))


def forward(b: Builder, w: Weights, h: BERTHyperparameters) -> Activation:
    x = b.layer_norm(embed_tokens(b, w), w.token_embd_norm, h.epsilon)
    for state in h.list_states():
        layer = w.get_layer(state.layer)
        x = apply_attention(b, layer, h, state, x)
        x = b.layer_norm(b.add(apply_feed_forward(b, layer, x), x), layer.layer_output_norm, h.epsilon)
    return pool_texts(b, w, h, x)


def apply_attention(b: Builder, w: Weights, h: BERTHyperparameters, state: PagedState, x: Activation) -> Activation:
    """Add attention's output to x, and normalize once or twice."""
    q, k, v = project_qkv(b, w, h, state.layer, x)
    q, k = normalize_queries_and_keys(b, w, h, q, k)
    y = attend(b, h, state, q, k, v, slopes=compute_alibi_slopes(h.attention.heads[state.layer], ALIBI_BIAS))
    y = b.layer_norm(b.add(b.linear(y, w.attn_output), x), w.attn_output_norm, h.epsilon)
    return b.layer_norm(b.add(y, x), again, h.epsilon) if (again := w.get("attn_norm_2")) else y


def apply_feed_forward(b: Builder, w: Weights, x: Activation) -> Activation:
    """Apply the network, with or without a gate."""
    if w.get("ffn_gate") is None and w.ffn_up.shape[0] == w.ffn_down.shape[-1]:
        return apply_ungated_feed_forward(b, w, x, b.gelu_erf)
    return apply_gated_feed_forward(b, w, x, lambda gate, up: b.multiply(b.gelu_erf(gate), up))


CHECKPOINTS = {
    "JinaBertModel JinaBertForMaskedLM": {
        "layer": "attention norms_of_encoder fused_gated",
        # Models for code normalize queries and keys, and the attention's output twice.
        "parts": {"norms_heads": ("attn_q_norm attn_k_norm attn_norm_2", "")},
        "tensors": {"attn_q_norm": "width", "attn_k_norm": "width", "attn_norm_2": "width"},
        "whole": {"token_types": "types width", "token_embd_norm": "width"},
        "biased": "attention ffn_down attn_q_norm attn_k_norm attn_norm_2 token_embd_norm norms_of_encoder",
        "decodes": False, "prefixes": "bert. roberta. distilbert.",
        "unread": OTHER_HEADS, "read": "@bert.read_jina_bert",
    },
}  # fmt: skip
