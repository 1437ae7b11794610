"""Mixtures of experts: sizes and metadata that architectures share."""

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def with_experts(
    config: Config, h: CheckpointFacts, hidden: str, count: str = "num_experts", active_key: str = "num_experts_per_tok"
) -> CheckpointFacts:
    """Add sizes and metadata of experts, by the names that config.json has for them."""
    experts, active = config.count(count), config.count(active_key)
    if active > experts:
        raise config.refusal(f"a token cannot go to {active} of {experts} experts")
    return h.updated(
        {"experts": experts, "expert_hidden": config.count(hidden)}, expert_count=experts, expert_used_count=active
    )
