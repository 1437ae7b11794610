"""Read checkpoints of MiMo-V2."""

from localllm.convert.config import CheckpointConfig
from localllm.convert.family import Layer, keep_tensor
from localllm.convert.hyperparameters import CheckpointHyperparameters, Reader, name_layer_sizes, read_layer_flags
from localllm.convert.transforms import Sizes


def read(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read MiMo-V2: layers with a sliding window have their own count of key heads; values are shorter than keys."""
    for name in ("head_dim", "num_attention_heads", "v_head_dim"):
        config.require_value(f"swa_{name}", config.get(name))
    h = declared(config)
    layers, dim = h.sizes["layers"], config.read_count("v_head_dim")
    windows, mixes = (read_layer_flags(config, name, layers) for name in ("hybrid_layer_pattern", "moe_layer_freq"))
    local = config.read_count("swa_num_key_value_heads", h.sizes["kv_heads"])
    kv_heads = [local if window else h.sizes["kv_heads"] for window in windows]
    scale = config.get("attention_value_scale")
    return h.update(
        {
            **name_layer_sizes("keys", [n * h.sizes["head_dim"] for n in kv_heads]),
            **name_layer_sizes("values", [n * dim for n in kv_heads]),
            **name_layer_sizes("window", windows),
            **name_layer_sizes("mixes", mixes),
            "seen": h.sizes["heads"] * dim,
        },
        attention__head_count_kv=kv_heads,
        attention__value_length=dim,
        attention__value_scale=None if scale is None else config.read_number("attention_value_scale"),
        attention__sliding_window_pattern=[*map(int, windows)],
        expert_group_count=config.get("n_group") and config.read_count("n_group"),
        expert_group_used_count=config.get("topk_group") and config.read_count("topk_group"),
    )


def list_layer_tensors(sizes: Sizes, number: int) -> Layer:
    attention: Layer = {
        "attn_q": ("queries", "width"),
        "attn_k": (f"keys_{number}", "width"),
        "attn_v": (f"values_{number}", "width"),
        "attn_output": ("width", "seen"),
    }
    sinks: Layer = {"attn_sinks.weight": keep_tensor("self_attn.attention_sink_bias", "heads")}
    return {**attention, **(sinks if sizes[f"window_{number}"] else {})}
