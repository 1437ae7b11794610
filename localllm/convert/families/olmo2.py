"""OLMo 2 and 3."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read OLMo 2 and, where some layers have a window, 3."""
    h = declared(config)
    if config.get("sliding_window") is None:
        return h
    windows = [(number + 1) % 4 != 0 for number in range(h.sizes["layers"])]
    config.windows(windows)
    local = config.section("rope_parameters").section("sliding_attention")
    return h.updated(
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows,
        rope__freq_base_swa=local.number("rope_theta", h.metadata["rope.freq_base"]),
    )
