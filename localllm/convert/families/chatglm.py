"""GLM."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read GLM, whose heads have width / heads numbers."""
    h = declared(config)
    if h.sizes["queries"] != h.sizes["width"]:
        raise config.refusal("head_dim should be hidden_size over num_attention_heads")
    return h.updated(attention__key_length=None, attention__value_length=None)
