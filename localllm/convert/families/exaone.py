"""EXAONE 3 and 4, and K-EXAONE."""

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts, Reader, rotary_dims, with_sigmoid_experts


def exaone(config: Config, declared: Reader) -> CheckpointFacts:
    """Read EXAONE 3, which rotates a share of width / heads dimensions."""
    h = declared(config)
    return h.updated(
        attention__layer_norm_epsilon=h.metadata["attention.layer_norm_rms_epsilon"],
        rope__dimension_count=rotary_dims(config, h.sizes["width"] // h.sizes["heads"]),
    )


def exaone4(config: Config, declared: Reader) -> CheckpointFacts:
    """Read EXAONE 4: in the large model, only layers with a window have RoPE."""
    h = declared(config)
    if config.get("sliding_window") is None:
        config.windows([False] * h.sizes["layers"])
        return h
    return h.updated(
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=exaone4_windows(config, h.sizes["layers"]),
    )


def exaone4_windows(config: Config, layers: int) -> list[bool]:
    """Return whether each layer has a window: by layer_types, or a pattern like LLLG or 4.

    The last layer has none.
    """
    pattern, types = config.get("sliding_window_pattern", 4), config.get("layer_types")
    if isinstance(types, list) and len(types) == layers and {*types} <= {"sliding_attention", "full_attention"}:
        return [kind == "sliding_attention" for kind in types]
    if isinstance(pattern, str) and pattern and {*pattern} <= {*"LG"} and types is None:
        return [pattern[number % len(pattern)] == "L" for number in range(layers)]
    if types is not None:
        raise config.refusal("layer_types must be sliding_attention or full_attention for each layer")
    period = config.count("sliding_window_pattern", 4)
    return [(number + 1) % period != 0 for number in range(layers)]


def exaone_moe(config: Config, declared: Reader) -> CheckpointFacts:
    """Read K-EXAONE: windows as in EXAONE 4."""
    h = with_sigmoid_experts(config, exaone4(config, declared))
    return h.updated(
        leading_dense_block_count=h.sizes["leading_dense"],
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
    )
