"""Read checkpoints of Gemma 2 to 4 and EmbeddingGemma.

Gemma 3n has four residual streams, and an embedding of each token per layer. Gemma 4 has shorter heads in layers with a
sliding window.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import NormalDist

import numpy as np

from localllm.arch.families import gemma2 as arch_gemma2
from localllm.arch.families import gemma3 as arch_gemma3
from localllm.convert.config import CheckpointConfig
from localllm.convert.family import (
    ATTENTION,
    EXPERTS,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    NORMS_BEHIND,
    DerivedTensor,
    Layer,
    keep_tensor,
    rename_tensor,
)
from localllm.convert.hyperparameters import (
    CheckpointHyperparameters,
    Reader,
    add_experts,
    list_windows,
    name_layer_sizes,
    read_uniform_value,
)
from localllm.convert.transforms import Shape, Sizes, TensorSource, pad_rows, stack


def read_gemma2(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Gemma 2, whose every second layer has a sliding window."""
    return require_standard_scale(config, declared(config), arch_gemma2.LAYERS_OF_27B)


def require_standard_scale(
    config: CheckpointConfig, h: CheckpointHyperparameters, exception: int
) -> CheckpointHyperparameters:
    """Return h unchanged. Raises ModelError if scores are scaled otherwise than GGUF's readers scale them.

    They scale by the head dimension, but by width / heads if the model has `exception` layers.
    """
    sizes = h.sizes
    usual = sizes["width"] // sizes["heads"] if sizes["layers"] == exception else sizes["head_dim"]
    config.require_value("query_pre_attn_scalar", usual)
    return h


def read_gemma3(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Gemma 3, where five layers of six have a sliding window and a RoPE base of their own."""
    h = require_standard_scale(config, declared(config), arch_gemma3.LAYERS_OF_27B)
    if config.get("attn_logit_softcapping") is not None:
        raise config.make_error("attn_logit_softcapping must be null: GGUF's readers do not cap the scores")
    return add_local_base(config, h)


def add_local_base(config: CheckpointConfig, h: CheckpointHyperparameters) -> CheckpointHyperparameters:
    """Add the RoPE base of layers with a sliding window."""
    local = config.get_section("rope_parameters").get_section("sliding_attention")
    return h.update(
        rope__freq_base_swa=local.read_number("rope_theta", config.read_number("rope_local_base_freq", 10000.0))
    )


def read_gemma_embedding(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read EmbeddingGemma, whose sliding windows are symmetric. Raises ModelError."""
    if not config.read_flag("use_bidirectional_attention"):
        raise config.make_error(
            "use_bidirectional_attention must be true: a causal Gemma3TextModel computes neither logits nor embeddings"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name) is not None:
            raise config.make_error(f"{name} must be null: GGUF's readers do not cap it")
    return add_local_base(config, require_standard_scale(config, declared(config), 0))


STREAMS = 4


def read_gemma3n(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Gemma 3n, whose last layers reuse keys and values of earlier ones. Raises ModelError."""
    hidden, layers = config.get("intermediate_size"), config.read_count("num_hidden_layers")
    h = declared(config.update(intermediate_size=read_uniform_value(config, "intermediate_size")))
    shared, narrow = config.read_count("num_kv_shared_layers", 0), config.read_count("hidden_size_per_layer_input")
    if shared >= layers:
        raise config.make_error(f"num_kv_shared_layers must be below {layers}")
    windows = list_windows(config, layers)
    return add_local_base(config, h).update(
        {
            "streams": STREAMS,
            "predictions": STREAMS * STREAMS,
            "others": STREAMS - 1,
            "narrow": narrow,
            "all_narrow": layers * narrow,
            "known": config.read_count("vocab_size_per_layer_input", h.sizes["vocab"]),
            "rank": config.read_count("laurel_rank"),
            "own_keys": layers - shared,
        },
        feed_forward_length=hidden,
        attention__sliding_window_pattern=windows,
        attention__shared_kv_layers=shared,
        altup__active_idx=0,
        altup__num_inputs=STREAMS,
        embedding_length_per_layer_input=narrow,
        activation_sparsity_scale=compute_deviations(config, layers),
    )


def compute_deviations(config: CheckpointConfig, layers: int) -> list[float] | None:
    """Convert each layer's share of zeroed gates to a threshold in standard deviations above the mean.

    None without activation_sparsity_pattern. Raises ModelError.
    """
    shares = config.get("activation_sparsity_pattern")
    if shares is None:
        return None
    shares = shares if isinstance(shares, list) else [shares] * layers
    if len(shares) != layers or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares):
        raise config.make_error(f"activation_sparsity_pattern must have {layers} values from 0 to 1, one per layer")
    return [float(np.float32(NormalDist().inv_cdf(share))) if share else -inf for share in shares]


def stack_streams(name: str) -> DerivedTensor:
    """Declare the matrices of all residual streams but the first as one stack."""
    stored = {f"model.{name}.{number}.weight": ("width", "width") for number in range(STREAMS - 1)}
    return DerivedTensor(("others", "width", "width"), stored, lambda sources, shape, sizes: stack(sources))


def remove_media_rows(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Remove the rows of image and audio tokens, which have no per-layer embeddings."""
    return pad_rows(sources[0], shape[0])


GEMMA3N_WHOLE: Layer = {
    "altup_proj": stack_streams("altup_projections"),
    "altup_unembd_proj": stack_streams("altup_unembed_projections"),
    "per_layer_token_embd": DerivedTensor(
        ("vocab", "all_narrow"), {"model.embed_tokens_per_layer.weight": ("known", "all_narrow")}, remove_media_rows
    ),
    "per_layer_model_proj": ("all_narrow", "width"),
    "per_layer_proj_norm": ("narrow",),
}
GEMMA3N_LAYER: Layer = {
    **ATTENTION, **HEAD_NORMS, **GATED, **NORMS_BEFORE, **NORMS_BEHIND,
    "altup_correct_scale": keep_tensor("altup.correct_output_scale", "width"),
    "altup_correct_coef": ("streams", "streams"), "altup_router": ("streams", "width"),
    "altup_predict_coef": ("predictions", "streams"), "altup_router_norm": ("width",), "laurel_l": ("rank", "width"),
    "laurel_r": ("width", "rank"), "laurel_post_norm": ("width",), "inp_gate": ("narrow", "width"),
    "proj": ("width", "narrow"), "post_norm": ("width",),
}  # fmt: skip
# Unused tensors that published checkpoints have in layers with shared keys and values.
UNREAD_KEYS: Layer = {
    "attn_k": rename_tensor("self_attn.k_proj", "keys", "width", needed=False),
    "attn_v": rename_tensor("self_attn.v_proj", "keys", "width", needed=False),
    "attn_k_norm": rename_tensor("self_attn.k_norm", "head_dim", needed=False),
}


def list_gemma3n_tensors(sizes: Sizes, number: int) -> Layer:
    return GEMMA3N_LAYER if number < sizes["own_keys"] else {**GEMMA3N_LAYER, **UNREAD_KEYS}


UNROTATED = 1e30  # divides the frequencies of pairs that do not rotate


def read_gemma4(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Gemma 4.

    Sizes are those of layers with full attention; with the prefix "local_", those of layers with a window.
    """
    layers, shared = config.read_count("num_hidden_layers"), config.read_count("num_kv_shared_layers", 0)
    windows, dim, local = (
        list_windows(config, layers, period=6),
        read_global_integer(config, "head_dim"),
        config.read_count("head_dim"),
    )
    if shared >= layers or windows[-1]:
        raise config.make_error("the last layer must have full attention, and some layer must compute its own keys")
    kv_heads = config.read_count("num_key_value_heads")
    few = read_global_integer(config, "num_key_value_heads") if config.read_flag("attention_k_eq_v") else kv_heads
    rope, of_windows = (
        config.get_section("rope_parameters").get_section(f"{kind}_attention") for kind in ("full", "sliding")
    )
    base = {"rope_theta": rope.read_number("rope_theta", 1e6)}
    h = declared(config.update(head_dim=dim, num_key_value_heads=few, rope_parameters=base))
    narrow, hidden = config.read_count("hidden_size_per_layer_input", 0), h.sizes["hidden"]
    wide = [hidden * (1 + (number >= layers - shared)) for number in range(layers)]
    sizes = {
        "local_dim": local,
        "local_queries": h.sizes["heads"] * local,
        "local_keys": kv_heads * local,
        "narrow": narrow,
        "all_narrow": layers * narrow,
        "own_keys": layers - shared,
        "alike": int(config.read_flag("attention_k_eq_v")),
        "double": 2 * hidden if config.read_flag("use_double_wide_mlp") else hidden,
        "one": 1,
        **name_layer_sizes("window", windows),
    }
    if config.read_flag("enable_moe_block"):
        h = add_experts(config, h, "moe_intermediate_size", active_key="top_k_experts")
        sizes["both_hidden"] = 2 * h.sizes["expert_hidden"]
        h = h.update(expert_feed_forward_length=h.sizes["expert_hidden"])
    if narrow:
        config.require_value("vocab_size_per_layer_input", h.sizes["vocab"])
    return replace(h, tensors={"rope_freqs.weight": compute_rope_factors(rope, dim)}).update(
        sizes,
        feed_forward_length=wide if config.read_flag("use_double_wide_mlp") else hidden,
        attention__head_count_kv=[kv_heads if window else few for window in windows] if few != kv_heads else kv_heads,
        attention__key_length=dim,
        attention__value_length=dim,
        attention__key_length_swa=local,
        attention__value_length_swa=local,
        attention__sliding_window_pattern=windows,
        attention__shared_kv_layers=shared,
        rope__freq_base_swa=of_windows.read_number("rope_theta", 10000.0),
        rope__dimension_count=dim,
        rope__dimension_count_swa=local,
        embedding_length_per_layer_input=narrow,
    )


def read_global_integer(config: CheckpointConfig, name: str) -> int:
    """Read an integer for layers with full attention, from a global_ key or from transformers' per_layer_config."""
    of_layers = config.get_section("per_layer_config").content.values()
    values = [layer[name] for layer in of_layers if isinstance(layer, dict) and layer.get(name) is not None]
    if len({*map(str, values)}) > 1:
        raise config.make_error(f"per_layer_config: {name} must be the same for all layers with full attention")
    key, usual = {"head_dim": ("global_head_dim", 512)}.get(name, (f"num_global_{name[4:]}", config.get(name)))
    return config.update(**{key: config.get(key, next(iter(values), usual))}).read_count(key)


def compute_rope_factors(rope: CheckpointConfig, dim: int) -> np.ndarray:
    """Compute the divisors of RoPE's frequencies, float32 [dim / 2]; a huge one stops a pair from rotating."""
    rope.require_value("rope_type", "proportional")
    share = rope.read_number("partial_rotary_factor", 0.25)
    if share > 1:
        raise rope.make_error(f"partial_rotary_factor must be at most 1 (found {share})")
    factors = np.full(dim // 2, UNROTATED, np.float32)
    factors[: int(dim * share / 2)] = 1
    return factors


def list_gemma4_attention_tensors(sizes: Sizes, number: int) -> Layer:
    """List the attention tensors of a layer; keys are optional where they are shared with an earlier layer."""
    dim, queries, keys = ("head_dim", "queries", "keys")
    if sizes[f"window_{number}"]:
        dim, queries, keys = ("local_dim", "local_queries", "local_keys")
    values: Layer = {"attn_v": (keys, "width")} if sizes[f"window_{number}"] or not sizes["alike"] else {}
    own: Layer = {"attn_k": (keys, "width"), **values, "attn_k_norm": (dim,)}
    if number >= sizes["own_keys"]:
        own = {
            "attn_k": rename_tensor("self_attn.k_proj", keys, "width", needed=False),
            **({"attn_v": rename_tensor("self_attn.v_proj", keys, "width", needed=False)} if values else {}),
            "attn_k_norm": rename_tensor("self_attn.k_norm", dim, needed=False),
        }
    return {"attn_q": (queries, "width"), **own, "attn_q_norm": (dim,), "attn_output": ("width", queries)}


MIXTURE: Layer = {
    "ffn_gate_inp": ("experts", "width"),
    "ffn_gate_inp.scale": keep_tensor("router.scale", "width"),
    "ffn_gate_up_exps": keep_tensor("experts.gate_up_proj", "experts", "both_hidden", "width"),
    "ffn_down_exps": keep_tensor("experts.down_proj", *EXPERTS["ffn_down_exps"]),
    "ffn_down_exps.scale": keep_tensor("router.per_expert_scale", "experts"),
    **{name: ("width",) for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")},
}


def list_gemma4_tensors(sizes: Sizes, number: int) -> Layer:
    inputs: Layer = {"inp_gate": ("narrow", "width"), "proj": ("width", "narrow"), "post_norm": ("width",)}
    wide: Layer = {"ffn_gate": ("double", "width"), "ffn_up": ("double", "width"), "ffn_down": ("width", "double")}
    return {
        **list_gemma4_attention_tensors(sizes, number),
        **NORMS_BEFORE,
        **NORMS_BEHIND,
        **(GATED if number < sizes["own_keys"] else wide),
        **(inputs if sizes["narrow"] else {}),
        **(MIXTURE if "experts" in sizes else {}),
        "layer_output_scale": keep_tensor("layer_scalar", "one"),
    }


def list_gemma4_global_tensors(sizes: Sizes) -> Layer:
    if not sizes["narrow"]:
        return {}
    return {
        "per_layer_token_embd": ("vocab", "all_narrow"),
        "per_layer_model_proj": ("all_narrow", "width"),
        "per_layer_proj_norm": ("narrow",),
    }
