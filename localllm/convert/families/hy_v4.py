"""Hunyuan 4."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.experts import SIGMOID, leading_dense
from localllm.convert.families import deepseek2
from localllm.convert.family import Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.layers import as_it_is, as_stored, experts_of, in_full


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Hunyuan 4: several residual streams, a gate on the heads' output, and a sink per head."""
    config.only("n_group", 1)
    config.only("topk_group", 1)
    plain = config.updated(n_group=None, topk_group=None, first_k_dense_replace=leading_dense(config))
    h = deepseek2.read(plain, declared)
    layers, streams, limit = h.sizes["layers"], config.count("hc_mult"), config.get("swiglu_limit")
    h = h.updated(
        {
            "mtp_layers": 0,
            "streams": streams,
            "all_streams": streams * h.sizes["width"],
            "stream_weights": 2 * streams,
            "one": 1,
            "two": 2,
            "both_hidden": 2 * h.sizes["expert_hidden"],
            **{f"chooses_{number}": 0 for number in range(layers)},
        },
        expert_gating_func=SIGMOID,
        swiglu_clamp_exp=[config.number("swiglu_limit")] * layers if limit else None,
        hyper_connection__count=streams,
        hyper_connection__epsilon=config.number("hc_eps"),
        hyper_connection__magnitude=config.number("hc_magnitude"),
    )
    full = choosing(config, layers)
    if full is None:
        return h
    heads, dim = config.count("index_n_heads"), config.count("index_head_dim")
    index_sizes = {"index_heads": heads, "index_dim": dim, "index_queries": heads * dim}
    return h.updated(
        index_sizes | {f"chooses_{number}": int(does) for number, does in enumerate(full)},
        attention__indexer__head_count=heads,
        attention__indexer__key_length=dim,
        attention__indexer__top_k=config.count("index_topk"),
        attention__indexer__types=full,
    )


INDEXERS = {"full": True, "shared": False}


KINDS = {"full_attention": False, "sparse_attention": True, "deepseek_sparse_attention": True}


def choosing(config: Config, layers: int) -> list[bool] | None:
    """Mark the layers with an indexer, by indexer_types or older keys; None if there is none."""
    types, kinds = config.get("indexer_types"), config.get("layer_types")
    if types is None and kinds is None:
        return None
    name, by_type = ("indexer_types", INDEXERS) if types is not None else ("layer_types", KINDS)
    layer_types = types if types is not None else kinds
    if not isinstance(layer_types, list) or len(layer_types) < layers or not {*map(str, layer_types)} <= by_type.keys():
        raise config.refusal(f"{name} should be {' or '.join(by_type)} for each of {layers} layers")
    full = [by_type[kind] for kind in layer_types[:layers]]
    if not full[0] and (types is not None or any(full)):
        raise config.refusal(f"{name}: the first layer should have an indexer")
    return full if any(full) else None


def layer(sizes: Sizes, number: int) -> Layer:
    layer = {**deepseek2.layer(sizes, number), "attn_gate": as_stored("self_attn.linear_gate", "values", "width")}
    layer["attn_sinks.weight"] = as_it_is("self_attn.learnable_sink_param", "heads")
    for name, part in (("attn", "attn"), ("ffn", "mlp")):
        place = f"hc_{part}_layer.hc_pre.hc"
        layer[f"hc_{name}_fn.weight"] = in_full(f"{place}_fn", "stream_weights", "all_streams")
        layer[f"hc_{name}_base.weight"] = as_it_is(f"{place}_base", "stream_weights")
        layer[f"hc_{name}_scale.weight"] = as_it_is(f"{place}_scale", "two")
    if sizes[f"chooses_{number}"]:
        layer |= deepseek2.INDEXER
    return layer if number < sizes["leading_dense"] else {**layer, **experts_of(sizes, "mlp.experts")}
