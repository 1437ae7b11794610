"""Mixtures of experts: sizes and metadata that architectures share."""

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts

SOFTMAX, SIGMOID = 1, 2  # GGUF's numbers of the router's score functions


def with_experts(
    config: Config, h: CheckpointFacts, hidden: str, count: str = "num_experts", active_key: str = "num_experts_per_tok"
) -> CheckpointFacts:
    """Add sizes and metadata of experts, by the names that config.json has for them."""
    experts, active, size = (section.count(name) for section, name in map(config.place, (count, active_key, hidden)))
    if active > experts:
        raise config.refusal(f"a token cannot go to {active} of {experts} experts")
    return h.updated({"experts": experts, "expert_hidden": size}, expert_count=experts, expert_used_count=active)


def with_deepseek_experts(config: Config, h: CheckpointFacts) -> CheckpointFacts:
    """Add groups of experts; V3 selects by scores plus a bias."""
    h = with_experts(config, h, "moe_intermediate_size", "n_routed_experts")
    score, shared = config.get("scoring_func"), config.count("n_shared_experts", 0)
    config.only("scoring_func", "softmax", "sigmoid")
    if config.get("topk_method") == "group_limited_greedy":
        config.warnings.append(
            "expert groups are ranked by their two best experts, but the model ranks them by the best one"
        )
    leading = leading_dense(config)
    sizes = {"shared_hidden": shared * h.sizes["expert_hidden"], "leading_dense": leading}
    sizes |= {"biased": int(config.get("topk_method") == "noaux_tc")}
    sizes |= {"mtp_layers": config.count("num_nextn_predict_layers", 0), "both_inputs": 2 * h.sizes["width"]}
    return h.updated(
        sizes,
        leading_dense_block_count=leading,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_count=shared,
        expert_weights_scale=config.number("routed_scaling_factor", 1.0),
        expert_weights_norm=config.flag("norm_topk_prob") or None,
        expert_group_count=config.get("n_group") and config.count("n_group"),
        expert_group_used_count=config.get("topk_group") and config.count("topk_group"),
        expert_gating_func=None if score is None else {"softmax": SOFTMAX, "sigmoid": SIGMOID}[score],
    )


def leading_dense(config: Config) -> int:
    """Return how many of the first layers have no experts: a number, or by mlp_layer_types."""
    types = config.get("mlp_layer_types")
    if not isinstance(types, list):
        return config.count("first_k_dense_replace", 0)
    leading = types.index("sparse") if "sparse" in types else len(types)
    if types != ["dense"] * leading + ["sparse"] * (len(types) - leading):
        raise config.refusal("mlp_layer_types: dense layers after sparse ones are not supported")
    config.only("first_k_dense_replace", leading)
    return leading
