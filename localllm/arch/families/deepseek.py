"""DeepSeek MoE (2024, arXiv 2401.06066), Ling (Ant 2025, arXiv 2503.05139), ERNIE 4.5 with experts (Baidu 2025).

Unlike llama: layers after the first ones have experts and a shared one. Their weights are normalized in ERNIE, whose
selection has a bias, and in Ling if the file says so.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import (
    SOFTMAX,
    apply_feed_forward_or_experts,
    apply_shared_expert,
    read_file_routing,
    read_routing,
)


@frozen
class DeepSeekHyperparameters(TransformerHyperparameters):
    has_shared: bool  # there is a shared expert


def read(fields: HyperparameterReader) -> DeepSeekHyperparameters:
    common = DeepSeekHyperparameters.read_shared_fields(fields, interleaved=True, rotates_all=True)
    if fields.arch == "deepseek2-ocr":
        return read_deepseek_ocr(fields)
    if fields.arch == "ernie4_5-moe":
        has_shared = fields.read_count("expert_shared_feed_forward_length", 0) > 0
        return DeepSeekHyperparameters(**common, routing=read_routing(fields), has_shared=has_shared)
    normalized = fields.arch == "bailingmoe" and fields.read_flag("expert_weights_norm", False)
    scale = fields.read_number("expert_weights_scale", 0.0) or 1.0
    return DeepSeekHyperparameters(**common, routing=read_routing(fields, SOFTMAX, normalized, scale), has_shared=True)


def read_deepseek_ocr(fields: HyperparameterReader) -> DeepSeekHyperparameters:
    """Read the hyperparameters of DeepSeek-OCR's text model, whose rotated pairs are half a head apart.

    Raises ModelError.
    """
    common = DeepSeekHyperparameters.read_shared_fields(fields, interleaved=False, rotates_all=True)
    rope = common["attention"].rope
    if rope != RopeParameters(rope.head_dim, rope.head_dim, False, original_context=rope.original_context):
        raise fields.make_unsupported_error(f"{fields.prefix}rope.*: RoPE must have the base 10000")
    return DeepSeekHyperparameters(**common, routing=read_file_routing(fields, SOFTMAX), has_shared=True)


def block(b: Builder, w: Weights, h: DeepSeekHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y, beside = b.rms_norm(x, w.ffn_norm, h.epsilon), apply_shared_expert if h.has_shared else None
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, beside))


EARLY_EXPERTS = {
    "vocab_size": "vocab",
    "rope.dimension_count": "head_dim",
    "leading_dense_block_count": "leading_dense",
    "expert_feed_forward_length": "expert_hidden",
}
CHECKPOINTS = {
    "DeepseekForCausalLM": {
        "layer": "attention norms", "parts": {"< leading_dense": ("gated", "experts shared_expert")}, "rotated": True,
        "scalings": "", "only": {"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
        "experts": "moe_intermediate_size n_routed_experts",
        "sizes": {"leading_dense": "first_k_dense_replace=0", "shared_hidden": "n_shared_experts * expert_hidden"},
        "amounts": {**EARLY_EXPERTS, "expert_shared_count": "n_shared_experts"},
        "metadata": {"expert_weights_scale": 1.0, "rope.scaling.type": "none"}, "read": "@deepseek.read_deepseek",
    },
    "BailingMoeForCausalLM": {
        "arch": "bailingmoe", "layer": "norms", "parts": {"< leading_dense": ("gated", "experts shared_expert")},
        "tensors": {
            "attn_q": "stacked_q attention.query_key_value.weight[fused_rows width]: queries width",
            "attn_k": "stacked_k attention.query_key_value.weight[fused_rows width]: keys width",
            "attn_v": "stacked_v attention.query_key_value.weight[fused_rows width]: keys width",
            "attn_output": "attention.dense.weight: width queries",
        },
        "scalings": "", "only": {"norm_head": False, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": False},
        "experts": "moe_intermediate_size",
        "sizes": {
            "fused_rows": "queries + 2 * keys", "leading_dense": "first_k_dense_replace=0",
            "shared_hidden": "num_shared_experts * expert_hidden",
        },
        "amounts": {**EARLY_EXPERTS, "expert_shared_count": "num_shared_experts"},
        "keys": {"norm_topk_prob": ("expert_weights_norm", False)}, "metadata": {"expert_weights_scale": 1.0},
    },
    "Ernie4_5_MoeForCausalLM": {
        "arch": "ernie4_5-moe", "layer": "attention norms",
        "parts": {"< leading_dense": ("gated", "experts shared_expert exp_probs_b.bias")},
        "tensors": {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction.bias: one experts"},
        "unread": r"model\.mtp_.*", "scalings": "linear yarn llama3",
        "only": {"use_bias": False, "moe_layer_interval": 1}, "experts": "moe_intermediate_size moe_num_experts moe_k",
        "sizes": {
            "leading_dense": "moe_layer_start_index", "shared_hidden": "moe_num_shared_experts=0 * expert_hidden",
            "one": "1",
        },
        "amounts": {
            "leading_dense_block_count": "leading_dense", "expert_feed_forward_length": "expert_hidden",
            "expert_shared_count": "moe_num_shared_experts=0", "expert_shared_feed_forward_length": "?shared_hidden",
        },
        "metadata": {"interleave_moe_layer_step": 1}, "read": "@deepseek.read_ernie",
        "defaults": {
            "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "moe_layer_start_index": 1,
            "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        },
    },
}  # fmt: skip
