"""gpt-oss (OpenAI 2025, arXiv 2508.10925).

Unlike llama: rotated pairs are half a head apart; every second layer, from the first on, has a sliding window; each
head has a sink; biases everywhere; experts with another SwiGLU.
"""

from functools import partial

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    project_qkv,
    read_local_rope,
    read_windows,
)
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import SOFTMAX_OF_SELECTED, apply_feed_forward_or_experts, read_routing

SHARPNESS, LIMIT = 1.702, 7.0  # of its SwiGLU
BIASED = "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"


def read(fields: HyperparameterReader) -> LocalRopeTransformerHyperparameters:
    shared = LocalRopeTransformerHyperparameters.read_shared_fields(fields, interleaved=False)
    return LocalRopeTransformerHyperparameters(
        **shared,
        windows=read_windows(fields, period=2),
        local_rope=read_local_rope(fields, shared["attention"].rope),
        routing=read_routing(fields, SOFTMAX_OF_SELECTED),
    )


def block(
    b: Builder, w: Weights, h: LocalRopeTransformerHyperparameters, state: PagedState, x: Activation
) -> Activation:
    w.require_biases(*BIASED)
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, sinks=w.attn_sinks), w.attn_output))
    gate = partial(b.swiglu_limited, sharpness=SHARPNESS, limit=LIMIT)
    return b.add(
        x, apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.post_attention_norm, h.epsilon), gate)
    )


ALL = {
    "attn_sinks": "heads",
    "post_attention_norm": "width",
    "ffn_gate_inp": "experts width",
    "ffn_gate_exps.bias": "@gpt.even_biases mlp.experts.gate_up_proj_bias[experts both_hidden]: experts expert_hidden",
    "ffn_up_exps.bias": "@gpt.odd_biases mlp.experts.gate_up_proj_bias[experts both_hidden]: experts expert_hidden",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias: experts width",
}
BOTH_BLOCKS = (
    "mlp.experts.gate_up_proj_blocks[experts both_hidden width_blocks block_bytes] "
    "mlp.experts.gate_up_proj_scales[experts both_hidden width_blocks]"
)
CHECKPOINTS = {
    "GptOssForCausalLM": {
        "layer": "attn_norm attention",
        "tensors": {
            **ALL,
            "ffn_gate_exps": "@gpt.even_columns mlp.experts.gate_up_proj[experts width both_hidden]: "
            "experts expert_hidden width",
            "ffn_up_exps": "@gpt.odd_columns mlp.experts.gate_up_proj[experts width both_hidden]: "
            "experts expert_hidden width",
            "ffn_down_exps": "transpose mlp.experts.down_proj[experts expert_hidden width]: "
            "experts width expert_hidden",
        },
        "biased": "attention ffn_gate_inp", "scalings": "yarn untruncated", "windows": 2, "only": {"swiglu_limit": 7.0},
        "experts": "intermediate_size num_local_experts num_experts_per_tok|experts_per_token",
        "amounts": {"expert_feed_forward_length": "expert_hidden"},
        "keys": {"sliding_window": "attention.sliding_window"}, "read": "@gpt.read_gpt_oss",
        "defaults": {"head_dim": 64, "rope_theta": 150000.0, "rms_norm_eps": 1e-5, "sliding_window": 128},
    },
    "GptOssForCausalLM+mxfp4": {  # quantized weights that GGUF can hold unchanged
        "like": "GptOssForCausalLM",
        "tensors": {
            **ALL,
            "ffn_gate_exps": f"@gpt.even_mxfp4 {BOTH_BLOCKS}: experts expert_hidden width",
            "ffn_up_exps": f"@gpt.odd_mxfp4 {BOTH_BLOCKS}: experts expert_hidden width",
            "ffn_down_exps": "@gpt.repack_mxfp4 "
            "mlp.experts.down_proj_blocks[experts width hidden_blocks block_bytes] "
            "mlp.experts.down_proj_scales[experts width hidden_blocks]: experts width expert_hidden",
        },
    },
}  # fmt: skip
