"""Arctic (Snowflake 2024).

Unlike llama: experts, with a norm of their own, read the layer's input, beside attention and feed-forward network.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.families.llama import read as read_llama
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_feed_forward_or_experts, apply_gated_feed_forward


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    fields.read_count("expert_count")  # raises if it is 0
    return read_llama(fields)


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    y = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y = b.add(y, apply_gated_feed_forward(b, w, b.rms_norm(y, w.ffn_norm, h.epsilon), b.swiglu))
    return b.add(y, apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm_exps, h.epsilon), b.swiglu))


CHECKPOINTS = {
    "ArcticForCausalLM": {
        "layer": "attention attn_norm experts", "rotated": True,
        "named_as": "llama",  # gguf's table for Arctic would change that of all others
        "tensors": {
            "ffn_norm": "residual_layernorm.weight: width", "ffn_gate": "residual_mlp.w1.weight: width width",
            "ffn_up": "residual_mlp.w3.weight: width width", "ffn_down": "residual_mlp.w2.weight: width width",
            "ffn_norm_exps": "post_attention_layernorm.weight: width",
        },
        "only": {"use_residual": True, "parallel_attn_mlp_res": True, "moe_layer_frequency": 1},
        "experts": "intermediate_size num_local_experts",
        "amounts": {"vocab_size": "vocab", "rope.dimension_count": "head_dim"},
    },
}  # fmt: skip
