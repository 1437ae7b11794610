"""Gemma 4's language model: shorter heads in layers with a window; the last layers may share keys of earlier ones."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.family import Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, windows_of
from localllm.convert.layers import EXPERTS, GATED, NORMS_BEFORE, NORMS_BEHIND, as_it_is

UNROTATED = 1e30  # divides the frequencies of pairs that do not rotate


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Gemma 4. Sizes are those of layers with full attention; with "local_", those of layers with a window."""
    layers, shared = config.count("num_hidden_layers"), config.count("num_kv_shared_layers", 0)
    windows, dim, local = windows_of(config, layers, period=6), of_whole(config, "head_dim"), config.count("head_dim")
    if shared >= layers or windows[-1]:
        raise config.refusal("the last layer should have full attention, and some layers should compute their own keys")
    kv_heads = config.count("num_key_value_heads")
    few = of_whole(config, "num_key_value_heads") if config.flag("attention_k_eq_v") else kv_heads
    rope, of_windows = (config.section("rope_parameters").section(f"{kind}_attention") for kind in ("full", "sliding"))
    renamed = {
        "head_dim": dim,
        "num_key_value_heads": few,
        "rope_parameters": {"rope_theta": rope.number("rope_theta", 1e6)},
    }
    h = declared(config.updated(**renamed))
    narrow, hidden = config.count("hidden_size_per_layer_input", 0), h.sizes["hidden"]
    wide = [hidden * (1 + (number >= layers - shared)) for number in range(layers)]
    sizes = {
        "local_dim": local,
        "local_queries": h.sizes["heads"] * local,
        "local_keys": kv_heads * local,
        "narrow": narrow,
        "all_narrow": layers * narrow,
        "own_keys": layers - shared,
        "alike": int(config.flag("attention_k_eq_v")),
        "double": 2 * hidden if config.flag("use_double_wide_mlp") else hidden,
        "one": 1,
        **{f"window_{number}": int(window) for number, window in enumerate(windows)},
    }
    if config.flag("enable_moe_block"):
        h = with_experts(config, h, "moe_intermediate_size", active_key="top_k_experts")
        sizes["both_hidden"] = 2 * h.sizes["expert_hidden"]
        h = h.updated(expert_feed_forward_length=h.sizes["expert_hidden"])
    if narrow:
        config.only("vocab_size_per_layer_input", h.sizes["vocab"])
    return replace(h, tensors={"rope_freqs.weight": rope_factors(rope, dim)}).updated(
        sizes,
        feed_forward_length=wide if config.flag("use_double_wide_mlp") else hidden,
        attention__head_count_kv=[kv_heads if window else few for window in windows] if few != kv_heads else kv_heads,
        attention__key_length=dim,
        attention__value_length=dim,
        attention__key_length_swa=local,
        attention__value_length_swa=local,
        attention__sliding_window_pattern=windows,
        attention__shared_kv_layers=shared,
        rope__freq_base_swa=of_windows.number("rope_theta", 10000.0),
        rope__dimension_count=dim,
        rope__dimension_count_swa=local,
        embedding_length_per_layer_input=narrow,
    )


def of_whole(config: Config, name: str) -> int:
    """Read a number for the layers with full attention: global_..., or given per layer, as transformers saves it."""
    of_layers = config.section("per_layer_config").content.values()
    values = [layer[name] for layer in of_layers if isinstance(layer, dict) and layer.get(name) is not None]
    if len({*map(str, values)}) > 1:
        raise config.refusal(f"per_layer_config: several values of {name} are not supported")
    key, usual = {"head_dim": ("global_head_dim", 512)}.get(name, (f"num_global_{name[4:]}", config.get(name)))
    return config.updated(**{key: config.get(key, next(iter(values), usual))}).count(key)


def rope_factors(rope: Config, dim: int) -> np.ndarray:
    """Compute the divisors of pairs' frequencies, float32 [dim / 2]: only the first pairs rotate."""
    rope.only("rope_type", "proportional")
    share = rope.number("partial_rotary_factor", 0.25)
    if share > 1:
        raise rope.refusal(f"partial_rotary_factor {share} is not supported")
    factors = np.full(dim // 2, UNROTATED, np.float32)
    factors[: int(dim * share / 2)] = 1
    return factors


def attention(sizes: Sizes, number: int) -> Layer:
    """List a layer's attention tensors; one that shares another's keys may store unused ones."""
    dim, queries, keys = ("head_dim", "queries", "keys")
    if sizes[f"window_{number}"]:
        dim, queries, keys = ("local_dim", "local_queries", "local_keys")
    values: Layer = {"attn_v": (keys, "width")} if sizes[f"window_{number}"] or not sizes["alike"] else {}
    build: Layer = {"attn_k": (keys, "width"), **values, "attn_k_norm": (dim,)}
    if number >= sizes["own_keys"]:
        named = zip(build, ("k_proj", "v_proj", "k_norm") if values else ("k_proj", "k_norm"), strict=True)
        unread = ((name, as_it_is(f"self_attn.{its}.weight", *build[name])) for name, its in named)  # type: ignore[misc]
        build = {name: replace(its, needed=False) for name, its in unread}
    return {"attn_q": (queries, "width"), **build, "attn_q_norm": (dim,), "attn_output": ("width", queries)}


MIXTURE: Layer = {
    "ffn_gate_inp": ("experts", "width"),
    "ffn_gate_inp.scale": as_it_is("router.scale", "width"),
    "ffn_gate_up_exps": as_it_is("experts.gate_up_proj", "experts", "both_hidden", "width"),
    "ffn_down_exps": as_it_is("experts.down_proj", *EXPERTS["ffn_down_exps"]),
    "ffn_down_exps.scale": as_it_is("router.per_expert_scale", "experts"),
    **{name: ("width",) for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")},
}


def layer(sizes: Sizes, number: int) -> Layer:
    inputs: Layer = {"inp_gate": ("narrow", "width"), "proj": ("width", "narrow"), "post_norm": ("width",)}
    wide: Layer = {"ffn_gate": ("double", "width"), "ffn_up": ("double", "width"), "ffn_down": ("width", "double")}
    return {
        **attention(sizes, number),
        **NORMS_BEFORE,
        **NORMS_BEHIND,
        **(GATED if number < sizes["own_keys"] else wide),
        **(inputs if sizes["narrow"] else {}),
        **(MIXTURE if "experts" in sizes else {}),
        "layer_output_scale": as_it_is("layer_scalar", "one"),
    }


def whole(sizes: Sizes) -> Layer:
    tables: Layer = {
        "per_layer_token_embd": ("vocab", "all_narrow"),
        "per_layer_model_proj": ("all_narrow", "width"),
        "per_layer_proj_norm": ("narrow",),
    }
    return tables if sizes["narrow"] else {}
