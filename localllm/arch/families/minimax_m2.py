"""MiniMax M2 (MiniMax 2025).

Unlike OLMoE: RoPE rotates a part of a head; the router's scores are sigmoids, with a bias for the selection only, and
weights are normalized.
"""

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.families import olmoe
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import SIGMOID, SOFTMAX, read_routing


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    function = fields.read_count("expert_gating_func")
    if function not in (SOFTMAX, SIGMOID):
        raise fields.make_value_error("expert_gating_func", f"{SOFTMAX} or {SIGMOID}")
    common = TransformerHyperparameters.read_shared_fields(fields, interleaved=False)
    return TransformerHyperparameters(**common, routing=read_routing(fields, function))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    w.require_biases("exp_probs_b")
    return olmoe.block(b, w, h, state, x)


CHECKPOINTS = {
    "MiniMaxM2ForCausalLM": {
        "layer": "attention whole_norms norms experts router_bias", "partial_rope": True,
        "only": {"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True},
        "experts": "intermediate_size num_local_experts",
        "amounts": {"expert_feed_forward_length": "expert_hidden", "rope.dimension_count": "rotary_dim=rotary_dims"},
        "metadata": {"expert_gating_func": 2}, "defaults": {"rope_theta": 5e6, "scoring_func": "sigmoid"},
    },
}  # fmt: skip
