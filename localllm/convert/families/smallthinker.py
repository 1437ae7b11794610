"""SmallThinker."""

from collections.abc import Callable

from localllm.arch.families.smallthinker import PERIOD, WINDOW
from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.experts import SIGMOID, SOFTMAX
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read SmallThinker: three layers of four have a window and RoPE, or all have RoPE."""
    layers = config.count("num_hidden_layers", maximum=MOST_LAYERS)
    config.only("moe_layer_layout", [1] * layers)
    windows = [int(number % PERIOD != 0) for number in range(layers)]
    layout = config.get("sliding_window_layout")
    has_windows = isinstance(layout, list) and any(layout) and config.get("sliding_window_size") is not None
    config.only("sliding_window_layout", windows if has_windows else [0] * layers)
    config.only("rope_layout", windows if has_windows else [1] * layers)
    if has_windows:
        config.only("sliding_window_size", WINDOW)
    return declared(config).updated(
        expert_gating_func=SOFTMAX if config.flag("moe_primary_router_apply_softmax") else SIGMOID,
        attention__sliding_window=WINDOW if has_windows else None,
    )
