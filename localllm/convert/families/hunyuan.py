"""Read checkpoints of HunYuan, including 3 and 4, and of Maincoder."""

from localllm.convert.config import CheckpointConfig
from localllm.convert.families import deepseek
from localllm.convert.family import Layer, keep_float32, keep_tensor, list_expert_tensors, rename_tensor
from localllm.convert.hyperparameters import (
    SIGMOID,
    CheckpointHyperparameters,
    Reader,
    add_sigmoid_experts,
    count_leading_dense,
    name_layer_sizes,
    read_uniform_value,
)
from localllm.convert.rope_scaling import find_rope_parameters
from localllm.convert.transforms import Sizes

LONGEST = 1 << 18  # HunYuan's training context, even if config.json has less


def read_maincoder(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Maincoder, whose GGUF files state RoPE's dimensions only if config.json has head_dim."""
    h = declared(config)
    return h.update(rope__dimension_count=h.sizes["head_dim"] if config.get("head_dim") is not None else None)


def read_hunyuan(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read HunYuan: RoPE before head norms, its base raised by alpha. Raises ModelError."""
    rope = config.get_section("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if rope.get("type", rope.get("rope_type")) != "dynamic":
        return declared(config)
    base = {"rope_theta": find_rope_parameters(config).read_number("rope_theta", 10000.0)}
    h = declared(config.update(rope_parameters=base, rope_scaling=None))
    alpha, dims = rope.read_number("alpha"), h.sizes["head_dim"]
    if rope.read_number("factor", 1.0) != 1:
        raise config.make_error("dynamic RoPE scaling must have the factor 1")
    return h.update(
        rope__freq_base=h.metadata["rope.freq_base"] * alpha ** (dims / (dims - 2)),
        rope__scaling__type="none",
        rope__scaling__factor=1.0,
        rope__scaling__original_context_length=LONGEST,
        context_length=LONGEST,
    )


def read_hunyuan_vl(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read HunYuan VL: four positions per token. GGUF's readers compute RoPE's base from alpha. Raises ModelError."""
    rope = find_rope_parameters(config)
    if rope.get("rope_type", rope.get("type")) not in ("dynamic", "xdrope"):
        raise config.make_error("rope_type must be dynamic or xdrope")
    counts = rope.get("xdrope_section", rope.get("mrope_section"))
    plain = {"rope_type": "default", "rope_theta": rope.read_number("rope_theta", 10000.0)}
    h = declared(config.update(rope_parameters=plain, rope_scaling=None))
    are_counts = isinstance(counts, list) and all(isinstance(count, int) and count > 0 for count in counts)
    if not are_counts or len(counts) != 4 or 2 * sum(counts) != h.sizes["head_dim"]:
        raise config.make_error(f"mrope_section must be four counts that add up to {h.sizes['head_dim'] // 2}")
    return h.update(
        rope__scaling__alpha=rope.read_number("alpha"),
        rope__scaling__type="none",
        rope__scaling__factor=rope.read_number("factor", 1.0),
        rope__scaling__original_context_length=h.metadata["context_length"],
        rope__dimension_sections=counts,
    )


def read_hunyuan_moe(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read HunYuan MoE, whose config.json may repeat some values for each layer. Raises ModelError if they differ."""
    layers = config.read_count("num_hidden_layers")
    names = ("moe_topk", "moe_intermediate_size", "num_shared_expert")
    values = {name: read_uniform_value(config, name, layers) for name in names}
    values["moe_intermediate_size"] = values["moe_intermediate_size"] or config.read_count("intermediate_size")
    return read_hunyuan(config.update(**values), declared)


def read_hy_v4(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Hunyuan 4: residual streams, a gate on the attention output, and an attention sink per head."""
    config.require_value("n_group", 1)
    config.require_value("topk_group", 1)
    plain = config.update(n_group=None, topk_group=None, first_k_dense_replace=count_leading_dense(config))
    h = deepseek.read_deepseek2(plain, declared)
    layers, streams, limit = h.sizes["layers"], config.read_count("hc_mult"), config.get("swiglu_limit")
    full = mark_indexers(config, layers)
    h = h.update(
        {
            "mtp_layers": 0,
            "streams": streams,
            "all_streams": streams * h.sizes["width"],
            "stream_weights": 2 * streams,
            "one": 1,
            "two": 2,
            "both_hidden": 2 * h.sizes["expert_hidden"],
            **name_layer_sizes("chooses", full or [False] * layers),
        },
        expert_gating_func=SIGMOID,
        swiglu_clamp_exp=[config.read_number("swiglu_limit")] * layers if limit else None,
        hyper_connection__count=streams,
        hyper_connection__epsilon=config.read_number("hc_eps"),
        hyper_connection__magnitude=config.read_number("hc_magnitude"),
    )
    return h if full is None else deepseek.add_indexer(config, h).update(attention__indexer__types=full)


INDEXERS = {"full": True, "shared": False}
KINDS = {"full_attention": False, "sparse_attention": True, "deepseek_sparse_attention": True}


def mark_indexers(config: CheckpointConfig, layers: int) -> list[bool] | None:
    """Mark the layers with an indexer; None without any. Raises ModelError."""
    types, kinds = config.get("indexer_types"), config.get("layer_types")
    if types is None and kinds is None:
        return None
    name, by_type = ("indexer_types", INDEXERS) if types is not None else ("layer_types", KINDS)
    layer_types = types if types is not None else kinds
    if not isinstance(layer_types, list) or len(layer_types) < layers or not {*map(str, layer_types)} <= by_type.keys():
        raise config.make_error(f"{name} must be {' or '.join(by_type)} for each of {layers} layers")
    full = [by_type[kind] for kind in layer_types[:layers]]
    if not full[0] and (types is not None or any(full)):
        raise config.make_error(f"{name}: the first layer must have an indexer")
    return full if any(full) else None


def list_hy_v4_tensors(sizes: Sizes, number: int) -> Layer:
    layer = {
        **deepseek.list_deepseek2_tensors(sizes, number),
        "attn_gate": rename_tensor("self_attn.linear_gate", "values", "width"),
        "attn_sinks.weight": keep_tensor("self_attn.learnable_sink_param", "heads"),
    }
    for name, part in (("attn", "attn"), ("ffn", "mlp")):
        place = f"hc_{part}_layer.hc_pre.hc"
        layer[f"hc_{name}_fn.weight"] = keep_float32(f"{place}_fn", "stream_weights", "all_streams")
        layer[f"hc_{name}_base.weight"] = keep_tensor(f"{place}_base", "stream_weights")
        layer[f"hc_{name}_scale.weight"] = keep_tensor(f"{place}_scale", "two")
    if sizes[f"chooses_{number}"]:
        layer |= deepseek.INDEXER
    return layer if number < sizes["leading_dense"] else {**layer, **list_expert_tensors(sizes, "mlp.experts")}


def read_hy_v3(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read HunYuan 3: head norms, and experts with sigmoid routing."""
    return add_sigmoid_experts(config, declared(config))


def rename_shared_norm(name: str, layers: int) -> str:
    """Rename the final norm of the multi-token prediction layer to the name that other families use."""
    return name.replace(f"layers.{layers}.final_layernorm.", f"layers.{layers}.shared_head.norm.")
