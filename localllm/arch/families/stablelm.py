"""StableLM 1.6B, 3B and 2 (Bellagente et al. 2024, arXiv 2402.17834), Orion 14B (arXiv 2401.12246).

Unlike llama: layer norms; RoPE rotates only the beginning of a head, in pairs half the rotated dimensions apart;
queries, keys and values may have biases. The 12B model normalizes each head of queries and keys, and its feed-forward
network reads what attention reads.
"""

from localllm.arch.attention import (
    LAYER_EPSILON,
    TransformerHyperparameters,
    attend,
    normalize_heads_by_layer_norm,
    project_qkv,
)
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(
        **TransformerHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    )


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    w.require("output")
    return apply_decoder(b, w, h, block, norm=make_final_layer_norm(b, w, h))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    y = b.layer_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    q, k = normalize_heads_by_layer_norm(b, w, h, q, k)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    if norm := w.get("ffn_norm"):
        y = b.layer_norm(x, norm, h.epsilon)
    return b.add(x, apply_gated_feed_forward(b, w, y, b.swiglu))


CHECKPOINTS = {
    "StableLmForCausalLM StableLMEpochForCausalLM": {
        "layer": "attention gated attn_norm",
        "parts": {"parallel": ("", "ffn_norm"), "head_norms": ("@llama.list_head_norm_tensors", "")},
        "biased": "norms output_norm", "partial_rope": True, "layer_norm": "layer_norm_eps",
        "read": "@llama.read_stablelm",
        "defaults": {"partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
    },
    "OrionForCausalLM": {
        "arch": "orion", "layer": "attention gated norms", "biased": "norms output_norm",
        "reads": {"max_position_embeddings": "max_sequence_length|max_position_embeddings|model_max_length"},
        "metadata": {"tensor_data_layout": "Meta AI original pth"},  # unused
        "read": "@llama.read_orion",
    },
}  # fmt: skip
