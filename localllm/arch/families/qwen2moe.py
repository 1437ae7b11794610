"""Qwen 1.5 and 2 with experts (Yang et al. 2024, arXiv 2407.10671).

Unlike Qwen 2: experts, whose weights are not normalized, and a shared one, whose output is gated.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.families.olmoe import read
from localllm.arch.family import Activation, Builder, PagedState, Weights
from localllm.arch.feed_forward import apply_feed_forward_or_experts, apply_gated_shared_expert

__all__ = ["block", "read"]


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_gated_shared_expert))


CHECKPOINTS = {
    "Qwen2MoeForCausalLM": {
        "like": "Qwen2ForCausalLM", "layer": "attention norms experts shared_expert",
        "tensors": {"ffn_gate_inp_shexp": "one width"},
        "only": {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "experts": "moe_intermediate_size num_experts|num_local_experts",
        "sizes": {"shared_hidden": "shared_expert_intermediate_size", "one": "1"},
        "amounts": {
            "expert_feed_forward_length": "expert_hidden", "expert_shared_feed_forward_length": "shared_hidden",
        },
    },
}  # fmt: skip
