"""EXAONE 3."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts, rotary_dims


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read EXAONE 3, which rotates a share of width / heads numbers."""
    h = declared(config)
    return h.updated(
        attention__layer_norm_epsilon=h.metadata["attention.layer_norm_rms_epsilon"],
        rope__dimension_count=rotary_dims(config, h.sizes["width"] // h.sizes["heads"]),
    )
