"""EXAONE 4."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read EXAONE 4: the large one has layers with a window, the only ones with RoPE."""
    h = declared(config)
    if config.get("sliding_window") is None:
        config.windows([False] * h.sizes["layers"])
        return h
    return h.updated(
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows_of(config, h.sizes["layers"]),
    )


def windows_of(config: Config, layers: int) -> list[bool]:
    """Return for each layer whether it has a window: layer_types, or a pattern like LLLG or 4 (the last has none)."""
    pattern, types = config.get("sliding_window_pattern", 4), config.get("layer_types")
    if isinstance(types, list) and len(types) == layers and {*types} <= {"sliding_attention", "full_attention"}:
        return [kind == "sliding_attention" for kind in types]
    if isinstance(pattern, str) and pattern and {*pattern} <= {*"LG"} and types is None:
        return [pattern[number % len(pattern)] == "L" for number in range(layers)]
    if types is not None:
        raise config.refusal("layer_types should be sliding_attention or full_attention for each layer")
    period = config.count("sliding_window_pattern", 4)
    return [(number + 1) % period != 0 for number in range(layers)]
