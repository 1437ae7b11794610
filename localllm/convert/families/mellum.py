"""Mellum 2."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import SLIDING, CheckpointFacts, windows_of


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Mellum 2: windows with the same RoPE base; experts in every layer."""
    h = declared(config)
    layers, base = h.sizes["layers"], h.metadata["rope.freq_base"]
    config.only("mlp_layer_types", ["sparse"] * layers)
    windows = windows_of(config, layers, period=1)
    if not config.flag("use_sliding_window", True) or config.get("sliding_window") is None:
        config.only("layer_types", ["full_attention"] * layers)
        return h
    rope = local_rope(config)
    rope.only("rope_theta", base)
    return h.updated(
        rope__freq_base_swa=rope.get("rope_theta"),
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows,
    )


def local_rope(config: Config) -> Config:
    """Return RoPE of layers with a window. Raises ModelError if it is scaled, which GGUF's readers do not support."""
    rope = config.section("rope_parameters").section(SLIDING)
    rope.only("rope_type", "default")
    return rope
