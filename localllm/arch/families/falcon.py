"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867).

Unlike llama: layer norms; attention and feed-forward network read the same residual stream (in the smaller model,
after the same norm), and both outputs are added to it; GELU without a gate; queries, keys and values from one matrix;
rotated pairs are half a head apart.
"""

from localllm.arch.attention import LAYER_EPSILON, TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_ungated_feed_forward


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(
        **TransformerHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    )


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, norm=make_final_layer_norm(b, w, h))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    y, second_norm = b.layer_norm(x, w.attn_norm, h.epsilon), w.get("attn_norm_2")
    q, k, v = project_qkv(b, w, h, state.layer, b.layer_norm(x, second_norm, h.epsilon) if second_norm else y)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_ungated_feed_forward(b, w, y, b.gelu))


CHECKPOINTS = {
    "FalconForCausalLM RWForCausalLM": {
        "layer": "attn_norm feed_forward", "parts": {"two_norms": ("second_norm", "")},
        "tensors": {
            "attn_qkv": "grouped self_attention.query_key_value.weight: fused_rows width",
            "attn_output": "width queries",
        },
        "biased": "attn_norm second_norm output_norm", "activations": "gelu exact_gelu", "approximated": "activation",
        "layer_norm": "layer_norm_epsilon", "only": {"alibi": False, "bias": False, "parallel_attn": True},
        "sizes": {"fused_rows": "queries + 2 * keys"}, "metadata": {"tensor_data_layout": "jploski"},
        "read": "@gpt.read_falcon", "defaults": {"activation": "gelu", "tie_word_embeddings": True},
    },
}  # fmt: skip
