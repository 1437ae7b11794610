"""Read checkpoints of EXAONE 3 and 4 and of K-EXAONE."""

from localllm.convert.config import CheckpointConfig
from localllm.convert.hyperparameters import CheckpointHyperparameters, Reader, add_sigmoid_experts, count_rotary_dims


def read_exaone(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read EXAONE 3, whose RoPE may rotate only some dimensions of a head."""
    h = declared(config)
    return h.update(
        attention__layer_norm_epsilon=h.metadata["attention.layer_norm_rms_epsilon"],
        rope__dimension_count=count_rotary_dims(config, h.sizes["width"] // h.sizes["heads"]),
    )


def read_exaone4(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read EXAONE 4, whose large model has RoPE only in layers with a sliding window."""
    h = declared(config)
    if config.get("sliding_window") is None:
        config.require_windows([False] * h.sizes["layers"])
        return h
    return h.update(
        attention__sliding_window=config.read_count("sliding_window"),
        attention__sliding_window_pattern=mark_exaone4_windows(config, h.sizes["layers"]),
    )


def mark_exaone4_windows(config: CheckpointConfig, layers: int) -> list[bool]:
    """Mark the layers with a sliding window: by layer_types, or by a pattern such as LLLG or 4.

    The last layer never has one.
    """
    pattern, types = config.get("sliding_window_pattern", 4), config.get("layer_types")
    if isinstance(types, list) and len(types) == layers and {*types} <= {"sliding_attention", "full_attention"}:
        return [kind == "sliding_attention" for kind in types]
    if isinstance(pattern, str) and pattern and {*pattern} <= {*"LG"} and types is None:
        return [pattern[number % len(pattern)] == "L" for number in range(layers)]
    if types is not None:
        raise config.make_error("layer_types must be sliding_attention or full_attention for each layer")
    period = config.read_count("sliding_window_pattern", 4)
    return [(number + 1) % period != 0 for number in range(layers)]


def read_exaone_moe(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read K-EXAONE: EXAONE 4's windows, with experts."""
    h = add_sigmoid_experts(config, read_exaone4(config, declared))
    return h.update(
        leading_dense_block_count=h.sizes["leading_dense"],
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
    )
