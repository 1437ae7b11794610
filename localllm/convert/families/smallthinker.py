"""SmallThinker."""

from localllm.arch.families.smallthinker import PERIOD, WINDOW
from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.families.deepseek import SIGMOID, SOFTMAX
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import ATTENTION, EXPERTS, NORMS_BEFORE, as_stored


def smallthinker(config: Config) -> CheckpointFacts:
    """Read SmallThinker: three layers of four have a window and RoPE, or all have RoPE."""
    for name, value in (("norm_topk_prob", True), ("moe_enable_early_router", True)):
        config.only(name, value)
    config.only("moe_enable_secondary_experts", False)
    layers, hidden = config.count("num_hidden_layers", maximum=MOST_LAYERS), config.count("moe_ffn_hidden_size")
    config.only("moe_layer_layout", [1] * layers)
    windows = [int(number % PERIOD != 0) for number in range(layers)]
    layout = config.get("sliding_window_layout")
    has_windows = isinstance(layout, list) and any(layout) and config.get("sliding_window_size") is not None
    config.only("sliding_window_layout", windows if has_windows else [0] * layers)
    config.only("rope_layout", windows if has_windows else [1] * layers)
    if has_windows:
        config.only("sliding_window_size", WINDOW)
    active_key = "moe_num_active_primary_experts"
    h = decoder(config.updated(intermediate_size=hidden))
    h = with_experts(config, h, "moe_ffn_hidden_size", "moe_num_primary_experts", active_key)
    return h.updated(
        expert_feed_forward_length=hidden,
        expert_gating_func=SOFTMAX if config.flag("moe_primary_router_apply_softmax") else SIGMOID,
        attention__sliding_window=WINDOW if has_windows else None,
    )


SMALLTHINKER = Family(
    "smallthinker",
    {
        **ATTENTION,
        **NORMS_BEFORE,
        **EXPERTS,
        "ffn_gate_inp": as_stored("block_sparse_moe.primary_router", *EXPERTS["ffn_gate_inp"]),
    },
    smallthinker,
)
