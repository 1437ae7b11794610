"""dots.llm1, Ling 2 and HunYuan 3."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.experts import SIGMOID, SOFTMAX, leading_dense, with_deepseek_experts
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read dots.llm1: experts next to a shared one, after the first layers."""
    return with_deepseek_experts(config, declared(config))


def bailing2(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Ling 2: head norms; experts are selected with a bias from the best groups."""
    h = declared(config.updated(partial_rotary_factor=config.get("partial_rotary_factor", 0.5)))
    function = config.get("score_function")
    hidden = config.count("num_shared_experts") * h.sizes["expert_hidden"]
    hidden = config.count("moe_shared_expert_intermediate_size", hidden)
    return h.updated(
        {"shared_hidden": hidden},
        expert_shared_feed_forward_length=hidden,
        expert_gating_func=function and {"sigmoid": SIGMOID, "softmax": SOFTMAX}[function],
        expert_group_count=config.get("n_group") and config.count("n_group"),
        expert_group_used_count=config.get("topk_group") and config.count("topk_group"),
        nextn_predict_layers=config.get("num_nextn_predict_layers"),
    )


def hy_v3(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read HunYuan 3."""
    return with_sigmoid_experts(config, declared(config))


def with_sigmoid_experts(config: Config, h: CheckpointFacts) -> CheckpointFacts:
    """Add experts with sigmoid routing after the first layers, and a multi-token prediction layer."""
    hidden = config.count("num_shared_experts", 1) * h.sizes["expert_hidden"]
    sizes = {"leading_dense": leading_dense(config), "shared_hidden": hidden, "both_inputs": 2 * h.sizes["width"]}
    sizes |= {"mtp_layers": config.count("num_nextn_predict_layers", 0)}
    return h.updated(
        sizes,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_feed_forward_length=hidden,
        expert_gating_func=SIGMOID,
    )


def with_shared_norm(name: str, layers: int) -> str:
    """Rename the norm of the multi-token prediction layer."""
    return name.replace(f"layers.{layers}.final_layernorm.", f"layers.{layers}.shared_head.norm.")
