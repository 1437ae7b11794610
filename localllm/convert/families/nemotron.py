"""Nemotron."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Nemotron, with one epsilon for both kinds of norms."""
    h, epsilon = declared(config), config.number("norm_eps", 1e-5)
    return h.updated(
        attention__layer_norm_rms_epsilon=epsilon,  # unused
        attention__layer_norm_epsilon=epsilon,
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
    )
