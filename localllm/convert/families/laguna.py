"""Read checkpoints of Laguna and Mellum 2."""

from localllm.convert.config import CheckpointConfig
from localllm.convert.family import ATTENTION, Layer, rename_tensor
from localllm.convert.hyperparameters import (
    SLIDING,
    CheckpointHyperparameters,
    Reader,
    count_leading_dense,
    count_rotary_dims,
    list_windows,
    name_layer_sizes,
)
from localllm.convert.transforms import Sizes


def read_mellum(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Mellum 2: sliding windows without a RoPE base of their own; experts in every layer."""
    h = declared(config)
    layers, base = h.sizes["layers"], h.metadata["rope.freq_base"]
    config.require_value("mlp_layer_types", ["sparse"] * layers)
    windows = list_windows(config, layers, period=1)
    if not config.read_flag("use_sliding_window", True) or config.get("sliding_window") is None:
        config.require_value("layer_types", ["full_attention"] * layers)
        return h
    rope = get_local_rope(config)
    rope.require_value("rope_theta", base)
    return h.update(
        rope__freq_base_swa=rope.get("rope_theta"),
        attention__sliding_window=config.read_count("sliding_window"),
        attention__sliding_window_pattern=windows,
    )


def get_local_rope(config: CheckpointConfig) -> CheckpointConfig:
    """Return the RoPE parameters of layers with a sliding window.

    Raises ModelError if they are scaled, which GGUF's readers do not support.
    """
    rope = config.get_section("rope_parameters").get_section(SLIDING)
    rope.require_value("rope_type", "default")
    return rope


def read_laguna(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Laguna: head counts by layer, gates on the attention output, dense first layers. Raises ModelError."""
    h = declared(config)
    layers, dim = h.sizes["layers"], h.sizes["head_dim"]
    heads = config.get("num_attention_heads_per_layer", [h.sizes["heads"]] * layers)
    if not isinstance(heads, list) or len(heads) != layers or not all(type(n) is int and 0 < n < 1e6 for n in heads):
        raise config.make_error(f"num_attention_heads_per_layer must have {layers} head counts, one per layer")
    config.require_value("gating", True, "per-head", "per-element")
    config.require_value("gating_types", [str(config.get("gating", "per-head")).replace("True", "per-head")] * layers)
    gates = [dim if config.get("gating") == "per-element" else 1] * layers
    windows, shared = list_windows(config, layers, period=1), config.read_count("shared_expert_intermediate_size")
    sizes = {"shared_hidden": shared, "leading_dense": count_leading_dense(config)}
    sizes |= name_layer_sizes("queries", [n * dim for n in heads])
    sizes |= name_layer_sizes("gates", [n * each for n, each in zip(heads, gates, strict=True)])
    h = h.update(
        sizes,
        attention__head_count=heads,
        expert_shared_feed_forward_length=shared,
        leading_dense_block_count=sizes["leading_dense"],
    )
    if not any(windows):
        return h
    rope = get_local_rope(config)
    if windows != [number % 4 != 0 for number in range(layers)]:
        raise config.make_error("layer_types must have sliding_attention in the usual layers only")
    return h.update(
        attention__sliding_window=config.read_count("sliding_window"),
        rope__freq_base_swa=rope.read_number("rope_theta", 10000.0),
        rope__dimension_count_swa=count_rotary_dims(
            CheckpointConfig({"rope_parameters": rope.content}, config.path), dim
        ),
    )


def list_attention_tensors(sizes: Sizes, number: int) -> Layer:
    """List a layer's attention tensors, whose sizes depend on its head count."""
    queries, gates = f"queries_{number}", f"gates_{number}"
    gate: Layer = {"attn_gate": rename_tensor("self_attn.g_proj", gates, "width")}
    return {**ATTENTION, "attn_q": (queries, "width"), "attn_output": ("width", queries), **gate}
