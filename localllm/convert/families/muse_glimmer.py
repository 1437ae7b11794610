"""Muse Glimmer's language model."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts, windows_of


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Muse Glimmer: three layers of four have a window and RoPE; head norms have one weight. Raises ModelError."""
    scale = np.array([config.number("qk_scale_factor")], np.float32)
    h = declared(config)
    base, windows = h.metadata["rope.freq_base"], windows_of(config, h.sizes["layers"], period=4)
    config.only("layer_rope_theta", [base if window else 0 for window in windows])
    return replace(h, factors={"attn_q_norm": [scale]}).updated(attention__sliding_window_pattern=windows)
