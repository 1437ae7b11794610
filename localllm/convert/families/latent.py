"""MiniCPM 3 and Hunyuan 4: MLA, as in DeepSeek."""

import re
from collections.abc import Sequence
from dataclasses import replace

from localllm.arch.families import minicpm3 as arch
from localllm.convert.config import Config
from localllm.convert.experts import SIGMOID, leading_dense
from localllm.convert.families.deepseek2 import DEEPSEEK2, INDEXER, OF_DEEPSEEK3, deepseek2, deepseek2_layer
from localllm.convert.family import DerivedTensor, Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import GATED, NORMS_BEFORE, as_it_is, as_stored, experts_of
from localllm.convert.tensors import Shape, TensorSource, to_float32


def minicpm3(config: Config) -> CheckpointFacts:
    """Read MiniCPM 3: GGUF's readers have its factors built in; frequency factors for short and long contexts."""
    for name in ("attention_bias", "mlp_bias"):
        config.only(name, False)
    for name, value in (("scale_emb", arch.EMBEDDING_SCALE), ("scale_depth", arch.DEPTH_SCALE)):
        config.only(name, value)
    config.only("dim_model_base", arch.WIDTH)
    heads, rotated = config.count("num_attention_heads"), config.count("qk_rope_head_dim")
    h = decoder(config.updated(head_dim=rotated), scalings=("longrope",))
    if h.metadata["rope.freq_base"] != BASE:
        raise config.refusal(f"rope_theta {h.metadata['rope.freq_base']} is not supported: GGUF's readers take {BASE}")
    magnitude = h.metadata.get("rope.scaling.attn_factor")
    latent, narrow = config.count("kv_lora_rank"), config.count("q_lora_rank")
    key_dim, value_dim = config.count("qk_nope_head_dim"), config.count("v_head_dim", h.sizes["width"] // heads)
    sizes = {"latent": latent, "narrow": narrow, "latent_and_key": latent + rotated, "values": heads * value_dim}
    sizes |= {"queries": heads * (key_dim + rotated), "both_rows": heads * (key_dim + value_dim)}
    return h.updated(
        sizes,
        vocab_size=h.sizes["vocab"],
        attention__q_lora_rank=narrow,
        attention__kv_lora_rank=latent,
        attention__key_length=key_dim + rotated,
        attention__value_length=None if value_dim == h.sizes["width"] // heads else value_dim,
        rope__dimension_count=rotated,
        rope__scaling__attn_factor=None if magnitude == 1 else magnitude,
    )


BASE = 10000.0
MINICPM3 = Family(
    "minicpm3",
    {
        **NORMS_BEFORE,
        **GATED,
        "attn_q_a": ("narrow", "width"),
        "attn_q_a_norm": ("narrow",),
        "attn_q_b": ("queries", "narrow"),
        "attn_kv_a_mqa": ("latent_and_key", "width"),
        "attn_kv_a_norm": ("latent",),
        "attn_kv_b": ("both_rows", "latent"),
        "attn_output": ("width", "values"),
    },
    minicpm3,
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
)


def hy_v4(config: Config) -> CheckpointFacts:
    """Read Hunyuan 4: several residual streams, a gate on the heads' output, and a sink per head."""
    for name in ("attention_bias", "enable_lm_head_fp32"):
        config.only(name, False)
    config.only("n_group", 1)
    config.only("topk_group", 1)
    h = deepseek2(config.updated(n_group=None, topk_group=None, first_k_dense_replace=leading_dense(config)))
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


INDEXERS = {"full": True, "shared": False}
KINDS = {"full_attention": False, "sparse_attention": True, "deepseek_sparse_attention": True}


def hy_v4_layer(sizes: Sizes, number: int) -> Layer:
    layer = {**deepseek2_layer(sizes, number), "attn_gate": as_stored("self_attn.linear_gate", "values", "width")}
    layer["attn_sinks.weight"] = as_it_is("self_attn.learnable_sink_param", "heads")
    for name, part in (("attn", "attn"), ("ffn", "mlp")):
        place = f"hc_{part}_layer.hc_pre.hc"
        layer[f"hc_{name}_fn.weight"] = in_full(f"{place}_fn", "stream_weights", "all_streams")
        layer[f"hc_{name}_base.weight"] = as_it_is(f"{place}_base", "stream_weights")
        layer[f"hc_{name}_scale.weight"] = as_it_is(f"{place}_scale", "two")
    if sizes[f"chooses_{number}"]:
        layer |= INDEXER
    return layer if number < sizes["leading_dense"] else {**layer, **experts_of(sizes, "mlp.experts")}


def in_full(name: str, *dimensions: str) -> DerivedTensor:
    """Declare a matrix that is always F32."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return to_float32(sources[0])

    return DerivedTensor(dimensions, {name: dimensions}, build)


HEAD = "model.hc_head.hc_head"
HY_V4 = replace(
    DEEPSEEK2,
    arch="hy_v4",
    layer=hy_v4_layer,
    read=hy_v4,
    whole={
        "output_hc_fn.weight": in_full(f"{HEAD}_fn", "streams", "all_streams"),
        "output_hc_base.weight": as_it_is(f"{HEAD}_base", "streams"),
        "output_hc_scale.weight": as_it_is(f"{HEAD}_scale", "one"),
    },
    named_as="deepseek2",
    unread=re.compile(r"model\.mtp_layers\..*"),
    defaults={**OF_DEEPSEEK3, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.827, "swiglu_limit": 10.0},
)
