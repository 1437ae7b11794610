"""SmallThinker (Song et al. 2025, arXiv 2507.20984).

Unlike llama: rotated pairs are half a head apart; three of four layers have a sliding window, the first one of four has
full attention without RoPE; the router reads the layer's input, before attention; experts' gates are ReLUs.
"""

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    project_qkv,
    read_local_rope,
    read_windows,
)
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import (
    FUNCTIONS,
    SOFTMAX_OF_SELECTED,
    apply_experts,
    collect_expert_matrices,
    read_routing,
)

WINDOW = 4096  # for every file with a window, as in llama.cpp
PERIOD = 4


@frozen
class SmallThinkerHyperparameters(LocalRopeTransformerHyperparameters):
    def get_rope(self, layer: int) -> RopeParameters | None:
        # In a model of four layers all have RoPE, as in llama.cpp.
        rotates = layer % PERIOD or self.layers == PERIOD or not any(self.windows)
        return super().get_rope(layer) if rotates else None


def read(fields: HyperparameterReader) -> SmallThinkerHyperparameters:
    common = SmallThinkerHyperparameters.read_shared_fields(fields, interleaved=False, rotates_all=True)
    function = fields.read_count("expert_gating_func")
    if function not in FUNCTIONS or function == SOFTMAX_OF_SELECTED:
        raise fields.make_value_error("expert_gating_func", "1 or 2")
    windows = read_windows(fields, PERIOD, default=0, all_first=True)
    return SmallThinkerHyperparameters(
        **common,
        windows=tuple(WINDOW if window else None for window in windows),
        local_rope=read_local_rope(fields, common["attention"].rope),
        routing=read_routing(fields, function),
    )


def block(b: Builder, w: Weights, h: SmallThinkerHyperparameters, state: PagedState, x: Activation) -> Activation:
    assert h.routing
    choice = b.route(b.linear(x, w.ffn_gate_inp), h.routing)
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    stacks = collect_expert_matrices(b, w, h.routing.experts)
    return b.add(x, apply_experts(b, stacks, choice, b.rms_norm(x, w.ffn_norm, h.epsilon), b.reglu))


CHECKPOINTS = {
    "SmallThinkerForCausalLM": {
        "layer": "attention norms experts",
        "tensors": {"ffn_gate_inp": "block_sparse_moe.primary_router.weight: experts width"},
        "only": {"norm_topk_prob": True, "moe_enable_early_router": True, "moe_enable_secondary_experts": False},
        "reads": {"intermediate_size": "1 * moe_ffn_hidden_size"},
        "experts": "moe_ffn_hidden_size moe_num_primary_experts moe_num_active_primary_experts",
        "amounts": {"expert_feed_forward_length": "expert_hidden"}, "read": "@llama.read_smallthinker",
    },
}  # fmt: skip
