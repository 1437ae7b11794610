"""SmolLM 3."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read SmolLM 3: GGUF's readers skip RoPE in every fourth layer."""
    h = declared(config)
    config.only("no_rope_layer_interval", 4)
    config.only("no_rope_layers", [int((number + 1) % 4 != 0) for number in range(h.sizes["layers"])])
    return h
