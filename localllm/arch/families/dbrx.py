"""DBRX (Databricks 2024).

Unlike llama: layer norms without biases; rotated pairs are half a head apart; queries, keys and values, from one
matrix, are clamped; experts.
"""

from localllm.arch.attention import LAYER_EPSILON, attend, project_qkv
from localllm.arch.decoder import apply_decoder
from localllm.arch.families.olmo import OLMoHyperparameters
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_feed_forward_or_experts, read_routing


def read(fields: HyperparameterReader) -> OLMoHyperparameters:
    shared = OLMoHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON, rotates_all=True)
    return OLMoHyperparameters(**shared, limit=fields.read_number("attention.clamp_kqv"), routing=read_routing(fields))


def forward(b: Builder, w: Weights, h: OLMoHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, norm=lambda x: b.layer_norm(x, w.output_norm, h.epsilon))


def block(b: Builder, w: Weights, h: OLMoHyperparameters, state: PagedState, x: Activation) -> Activation:
    heads = project_qkv(b, w, h, state.layer, b.layer_norm(x, w.attn_norm, h.epsilon))
    q, k, v = (b.clamp(y, h.limit) for y in heads) if h.limit else heads
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(
        x, apply_feed_forward_or_experts(b, w, h.routing, b.layer_norm(x, w.attn_output_norm, h.epsilon), b.swiglu)
    )


CHECKPOINTS = {
    "DbrxForCausalLM": {
        "layer": "fused_attention attn_norm experts",
        "tensors": {
            "attn_output_norm": "width",
            "ffn_gate_exps": "reshape ffn.experts.mlp.w1[all_hidden width]: experts expert_hidden width",
            "ffn_up_exps": "reshape ffn.experts.mlp.v1[all_hidden width]: experts expert_hidden width",
            "ffn_down_exps": "turned ffn.experts.mlp.w2[all_hidden width]: experts width expert_hidden",
        },
        "only": {"ffn_config.moe_normalize_expert_weights": 1, "ffn_config.ffn_act_fn": {"name": "silu"}},
        "reads": {
            "hidden_size": "1 * d_model", "num_attention_heads": "1 * n_heads", "num_hidden_layers": "1 * n_layers",
            "num_key_value_heads": "attn_config.kv_n_heads=1", "max_position_embeddings": "max_seq_len=2048",
            "head_dim": None, "intermediate_size": "1 * ffn_config.ffn_hidden_size",
            "rope_theta": "attn_config.rope_theta",
        },
        "experts": "ffn_config.ffn_hidden_size ffn_config.moe_num_experts ffn_config.moe_top_k",
        "sizes": {"fused_rows": "queries + 2 * keys", "all_hidden": "experts * expert_hidden"},
        "keys": {"attn_config.clip_qkv": ("attention.clamp_kqv", None)},
        "metadata": {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5},
    },
}  # fmt: skip
