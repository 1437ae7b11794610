"""The language models of Qwen3-VL."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read the number of DeepStack layers, too."""
    h = declared(config)
    deep = config.section("vision_config").get("deepstack_visual_indexes", [])
    return h.updated(n_deepstack_layers=len(deep) if isinstance(deep, list) else 0)
