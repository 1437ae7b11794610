"""Granite 4 with windows."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import SLIDING, CheckpointFacts, flags, windows_of

NO_ROPE = {"0", "0.0", "None"}  # base of layers without RoPE


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Granite 4 with windows: a sink per head; some layers may have no RoPE."""
    h = declared(config.updated(sliding_window=None))
    layers, base = h.sizes["layers"], h.metadata["rope.freq_base"]
    if config.get("layer_types") is None:
        types = ["full_attention" if number % 4 == 0 else SLIDING for number in range(layers)]
        config = config.updated(layer_types=types)
    thetas = config.get("layer_rope_theta", [base] * layers)
    if not isinstance(thetas, list) or len(thetas) != layers or not {*map(str, thetas)} <= NO_ROPE | {str(base)}:
        raise config.refusal(f"layer_rope_theta should be {base} or 0 for each of {layers} layers")
    rotates = [str(theta) not in NO_ROPE for theta in thetas]
    if config.get("no_rope_layers"):
        rotates = [*map(bool, flags(config, "no_rope_layers", layers))]
    return h.updated(
        attention__rope_pattern=None if all(rotates) and not config.get("no_rope_layers") else rotates,
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows_of(config, layers),
    )
