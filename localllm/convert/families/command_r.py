"""Command R."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Command R, whose context may exceed the positions."""
    h = declared(config)
    return h.updated(
        {"head_norms": int(config.flag("use_qk_norm"))},
        attention__layer_norm_rms_epsilon=None,
        attention__layer_norm_epsilon=config.number("layer_norm_eps", 1e-5),
        context_length=config.count("model_max_length", h.metadata["context_length"]),
        logit_scale=config.number("logit_scale"),
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
    )
