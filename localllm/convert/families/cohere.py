"""Read checkpoints of Command A with experts."""

from localllm.convert.config import CheckpointConfig
from localllm.convert.hyperparameters import (
    SCORES,
    CheckpointHyperparameters,
    Reader,
    add_experts,
    count_leading_dense,
    list_windows,
)


def read(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Command A with experts: parallel attention and feed-forward network, dense first layers."""
    function = config.get("expert_selection_fn", "softmax")
    if function == "softmax":  # of the selected experts
        config.require_value("norm_topk_prob", True)
    hidden = config.read_count("prefix_dense_intermediate_size", config.read_count("intermediate_size"))
    h = add_experts(config, declared(config.update(intermediate_size=hidden)), "intermediate_size")
    shared, epsilon = config.read_count("num_shared_experts", 0), config.get("rms_norm_eps")
    rms_epsilon = None if epsilon is None else h.metadata["attention.layer_norm_rms_epsilon"]
    centered = {"attention__layer_norm_rms_epsilon": rms_epsilon}
    if epsilon is None or config.get("layer_norm_eps") is not None:
        centered["attention__layer_norm_epsilon"] = config.read_number("layer_norm_eps", 1e-5)
    leading, of_experts = count_leading_dense(config), h.sizes["expert_hidden"]
    return h.update(
        {"leading_dense": leading, "shared_hidden": shared * of_experts},
        attention__sliding_window_pattern=mark_windows_beyond_dense(config, h.sizes["layers"], leading),
        expert_feed_forward_length=of_experts,
        expert_gating_func=SCORES[function],
        expert_shared_count=shared or None,
        expert_shared_feed_forward_length=shared * of_experts or None,
        leading_dense_block_count=leading,
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
        **centered,
    )


def mark_windows_beyond_dense(config: CheckpointConfig, layers: int, leading: int) -> list[bool]:
    """Mark the layers with a sliding window.

    Without layer_types, these are all but the last of every four after the first `leading` layers.
    """
    usual = [number % 4 != 3 and number >= 0 for number in range(-leading, layers - leading)]
    return usual if config.get("layer_types") is None else list_windows(config, layers)
