"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060).

Unlike llama: queries and keys are normalized across all heads; rotated pairs are half a head apart; experts, whose
weights are not normalized.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_feed_forward_or_experts, read_routing


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    shared = TransformerHyperparameters.read_shared_fields(fields, interleaved=False)
    return TransformerHyperparameters(**shared, routing=read_routing(fields, normalized=False))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    q, k = b.rms_norm(q, w.attn_q_norm, h.epsilon), b.rms_norm(k, w.attn_k_norm, h.epsilon)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))


CHECKPOINTS = {
    "OlmoeForCausalLM": {
        "layer": "attention whole_norms norms experts", "only": {"norm_topk_prob": False, "clip_qkv": ()},
        "experts": "intermediate_size", "defaults": {"rms_norm_eps": 1e-5},
    },
}  # fmt: skip
