"""Read checkpoints of HRM-Text: two stacks of layers that run in turn; in a GGUF file the low-level one comes first."""

import re
from collections.abc import Sequence

from localllm.arch.metadata import MAX_LAYERS
from localllm.convert.config import CheckpointConfig
from localllm.convert.hyperparameters import CheckpointHyperparameters, Reader
from localllm.convert.transforms import Build, Shape, Sizes, TensorSource, take_strided

LAYER = re.compile(r"model\.([LH])_module\.layers\.([0-9]+)\.(.+)")


def read(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read HRM-Text. A layer is counted once for each pass, because each pass caches its own keys and values."""
    config.require_value("num_key_value_heads", config.get("num_attention_heads"))
    high, low = (config.read_count(f"{name}_cycles", maximum=MAX_LAYERS) for name in "HL")
    in_stack = config.read_count("num_layers_per_stack", config.get("num_hidden_layers"), maximum=MAX_LAYERS)
    h = declared(config.update(num_hidden_layers=in_stack))
    if config.read_flag("prefix_lm", True):
        config.warnings.append("attention to the prompt is causal, although the model supports bidirectional attention")
    return h.update(
        {"layers": 2 * in_stack, "all_queries": 4 * h.sizes["queries"], "both_hidden": 2 * h.sizes["hidden"]},
        block_count=in_stack * high * (low + 1),
        attention__head_count_kv=None,
        embedding_scale=config.read_number("embedding_scale", 1 / config.read_number("initializer_range", 0.02)),
        rope__dimension_count=h.sizes["head_dim"],
        hrm__layers_per_stack=in_stack,
        hrm__h_cycles=high,
        hrm__l_cycles=low,
        hrm__prefix_lm=config.read_flag("prefix_lm", True),
    )


def join_stacks(name: str, layers: int) -> str:
    """Rename a tensor as if both stacks were a single one."""
    match = LAYER.fullmatch(name)
    if not match:
        return name
    return f"model.layers.{int(match[2]) + (layers // 2 if match[1] == 'H' else 0)}.{match[3]}"


def take_matrix(number: int) -> Build:
    """Return a function that takes the `number`-th of several matrices stored below each other."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return take_strided(sources[0], shape, sizes["all_queries"], number * shape[0])

    return build


gate, queries, keys, values = map(take_matrix, range(4))
