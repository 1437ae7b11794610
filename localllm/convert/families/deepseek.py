"""DeepSeek's first model with experts, and ERNIE 4.5 with experts."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.experts import SOFTMAX
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read DeepSeek MoE: experts next to shared ones, after the first layers."""
    return declared(config).updated(expert_gating_func=None if config.get("scoring_func") is None else SOFTMAX)


def ernie(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read ERNIE 4.5, which has experts up to the last layer."""
    config.only("moe_layer_end_index", config.count("num_hidden_layers") - 1, -1)
    return declared(config)
