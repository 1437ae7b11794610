"""Dense decoders: one declaration per family and variant."""

import numpy as np

from .declaration import EMBEDDING, TIED, UNTIED, Dims, Shapes, declare
from .parts import (
    ATTENTION,
    ATTN_NORM,
    GATED,
    HALVES,
    HEAD_NORMS,
    JOINED,
    NORMS,
    PLAIN,
    POST_NORMS,
    WHOLE_NORMS,
    biased,
    norms,
)

LLAMA = {**NORMS, **ATTENTION, **GATED}
QKV = ("attn_q", "attn_k", "attn_v")
WIDE = {"width": 128, "heads": 4, "kv_heads": 2}
FULL = {"kv_heads": 3}  # as many heads of keys as of queries
BIASED_HEAD = biased(UNTIED, "output_norm")
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32}
ROPE_FREQS = {"rope_freqs.weight": "head_dim // 2"}


def gemma4(d: Dims, number: int) -> Shapes:
    """Every third layer attends to all, with heads of another size; the last `shared` read keys of others."""
    whole = number % 3 == 2
    sizes = {"head_dim": "head_dim"} if whole else {"head_dim": "head_dim_swa", "value_dim": "head_dim_swa"}
    attention = {**ATTENTION, **HEAD_NORMS}
    if number >= d.layers - d.shared:
        attention = {name: shape for name, shape in attention.items() if name[:6] not in ("attn_k", "attn_v")}
    if whole and d.values_are_keys:
        attention.pop("attn_v.weight", None)
    for name, size in sizes.items():
        attention = {key: shape.replace(name, size) for key, shape in attention.items()}
    inputs = {"inp_gate.weight": "layer_width, width", "proj.weight": "width, layer_width"}
    scale = {"layer_output_scale.weight": "1"}
    return {**NORMS, **attention, **GATED, **POST_NORMS, **scale, **inputs, **norms("post_norm")}


def gemma4_fields(d: Dims) -> dict:
    found = {"attention.key_length_swa": d.head_dim_swa, "attention.value_length_swa": d.head_dim_swa}
    found |= {"rope.dimension_count_swa": d.head_dim_swa, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
    found |= {"attention.sliding_window_pattern": [number % 3 < 2 for number in range(d.layers)]}
    found |= {"attention.shared_kv_layers": d.shared, "embedding_length_per_layer_input": d.layer_width}
    return {**found, "final_logit_softcapping": 6.0}


def gemma4_experts(d: Dims, number: int) -> Shapes:
    """Experts beside each network."""
    return {
        **gemma4(d, number), **norms("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"),
        "ffn_gate_inp.weight": "experts, width", "ffn_gate_inp.scale": "width",
        "ffn_gate_up_exps.weight": "experts, 2 * expert_hidden, width",
        "ffn_down_exps.weight": "experts, width, expert_hidden", "ffn_down_exps.scale": "experts",
    }  # fmt: skip


def gemma4_expert_fields(d: Dims) -> dict:
    found = {"expert_count": d.experts, "expert_used_count": d.used, "expert_feed_forward_length": d.expert_hidden}
    return {**gemma4_fields(d), **found}


GEMMA4 = {
    **TIED,
    "per_layer_token_embd.weight": "vocab, layers * layer_width",
    "per_layer_model_proj.weight": "layers * layer_width, width",
    "per_layer_proj_norm.weight": "layer_width",
    "rope_freqs.weight": "head_dim // 2",
}
GEMMA4_VALUES = {
    # A frequency divided by 1e30 is none.
    "rope_freqs.weight": lambda n, shape: np.where(np.arange(*shape) < shape[0] // 4, 1, 1e30).astype("f4"),
    # Scores are not scaled: large ones would make of llama.cpp's rounded GELU whatever they like.
    "attn_q_norm.weight": lambda n, shape: n.uniform(shape, 0.2, 0.6),
    "attn_k_norm.weight": lambda n, shape: n.uniform(shape, 0.2, 0.6),
}
GEMMA4_SIZES = {
    "layers": 3, "width": 64, "hidden": 96, "heads": 2, "kv_heads": 1, "head_dim": 64, "head_dim_swa": 32,
    "rotated": 64, "window": 12, "layer_width": 32, "shared": 0, "values_are_keys": False,
}  # fmt: skip

DENSE = {
    # The base of the quantized files: all rows are multiples of 256.
    "llama": declare("llama", LLAMA, width=256, hidden=256, heads=8, kv_heads=2, vocab=320, rotated=32, epsilon=1e-5),
    "llama_keylen": declare("llama", LLAMA, metadata={"rope.freq_base": 1e6}, **WIDE, head_dim=64, rotated=64),
    "llama_bias": declare("llama", {**NORMS, **biased(ATTENTION), **biased(GATED)}, **WIDE, rotated=32),
    "llama_ropefreqs": declare("llama", LLAMA, {**UNTIED, **ROPE_FREQS}, **WIDE, rotated=32),
    "llama_linear": declare(
        "llama", LLAMA, metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, **WIDE, rotated=32
    ),
    "llama_yarn": declare("llama", LLAMA, metadata=YARN, **WIDE, rotated=32, context=256),
    "llama_tied": declare("llama", LLAMA, TIED, **WIDE, rotated=32),
    "qwen2": declare("qwen2", {**NORMS, **biased(ATTENTION, *QKV), **GATED}, metadata={"rope.freq_base": 1e5}, **WIDE),
    "qwen3": declare("qwen3", {**LLAMA, **HEAD_NORMS}, TIED, {"rope.freq_base": 1e6}, heads=4, kv_heads=2, head_dim=64),
    "internlm2": declare("internlm2", LLAMA, metadata={"rope.freq_base": 1e6}, **WIDE),
    "exaone": declare("exaone", LLAMA, {**UNTIED, **ROPE_FREQS}, {"rope.freq_base": 1e6}, **WIDE, rotated=32),
    "exaone4": declare(
        "exaone4", {**ATTENTION, **HEAD_NORMS, **GATED, **POST_NORMS}, TIED, {"rope.freq_base": 1e6}, **WIDE
    ),
    "smollm3": declare("smollm3", LLAMA, TIED, {"rope.freq_base": 5e4}, layers=4, rotated=32),
    "mistral3": declare(
        "mistral3", LLAMA, TIED, {
            **YARN, "rope.freq_base": 1e6, "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 0.25,
            "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1,
        }, **WIDE, head_dim=64, rotated=64, context=256,
    ),
    "minicpm": declare(
        "minicpm", LLAMA, metadata={"embedding_scale": 12.0, "residual_scale": 0.7, "logit_scale": 2.0},
        width=128, heads=4, kv_heads=4, rotated=32, epsilon=0.09,
    ),
    "granite": declare("granite", LLAMA, metadata={
        "embedding_scale": 12.0, "residual_scale": 0.6, "logit_scale": 6.0, "attention.scale": 0.25,
        "rope.freq_base": 5e4,
    }, **WIDE, rotated=32, epsilon=0.09),
    "bitnet": declare("bitnet", {
        **LLAMA, "attn_sub_norm.weight": "heads * head_dim", "ffn_sub_norm.weight": "hidden",
    }, TIED, {"rope.freq_base": 5e5, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, **WIDE, rotated=32),
    "olmo": declare(
        "olmo", {**ATTENTION, **GATED}, {**EMBEDDING, "output.weight": "vocab, width"}, {"attention.clamp_kqv": 1.5},
        norm="layer", **FULL,
    ),
    "olmo2": declare(
        "olmo2", {**ATTENTION, **WHOLE_NORMS, **GATED, **POST_NORMS}, metadata={"rope.freq_base": 5e5}, **FULL
    ),
    "olmo3": declare("olmo2", {**ATTENTION, **WHOLE_NORMS, **GATED, **POST_NORMS}, metadata={
        **YARN, "rope.freq_base": 5e5, "attention.sliding_window_pattern": [True, True, True, False],
        "rope.scaling.attn_factor": 1.2, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
    }, layers=4, width=64, heads=2, kv_heads=2, window=12),
    # LayerNorm
    "gpt2": declare(
        "gpt2", {**biased(NORMS), **biased(JOINED), **biased(PLAIN)},
        {**biased(TIED, "output_norm"), "position_embd.weight": "context, width"},
        norm="layer", kv_heads=None, context=128,
        values={"position_embd.weight": lambda n, shape: n.normal(shape, 0.3)},
    ),
    "gptneox": declare(
        "gptneox", {**biased(NORMS), **biased(JOINED), **biased(PLAIN)}, BIASED_HEAD, {"use_parallel_residual": True},
        norm="layer", kv_heads=None, rotated=8,
    ),
    "gptneox_seqres": declare(
        "gptneox", {**biased(NORMS), **biased(JOINED), **biased(PLAIN)}, BIASED_HEAD, {"use_parallel_residual": False},
        norm="layer", kv_heads=None, rotated=32,
    ),
    "falcon": declare(
        "falcon", {**biased(ATTN_NORM), **JOINED, **PLAIN}, BIASED_HEAD, {"tensor_data_layout": "jploski"},
        norm="layer", width=128, heads=4, hidden=160,
    ),
    "falcon_40b": declare(
        "falcon", {**biased(norms("attn_norm", "attn_norm_2")), **JOINED, **PLAIN}, BIASED_HEAD,
        {"tensor_data_layout": "jploski"}, norm="layer", **WIDE, hidden=128,
    ),
    "mpt": declare(
        "mpt", {**NORMS, **JOINED, **PLAIN}, TIED, {"attention.max_alibi_bias": 8.0},
        norm="layer", width=128, heads=4, kv_heads=4,
    ),
    "phi2": declare(
        "phi2", {**biased(ATTN_NORM), **biased(ATTENTION), **biased(PLAIN)}, biased(UNTIED, "output_norm", "output"),
        norm="layer", rotated=16, **FULL,
    ),
    "starcoder2": declare(
        "starcoder2", {**biased(NORMS), **biased(ATTENTION), **biased(PLAIN)}, biased(TIED, "output_norm"),
        {"rope.freq_base": 1e6}, norm="layer", **WIDE,
    ),
    "nemotron": declare(
        "nemotron", {**biased(NORMS), **ATTENTION, **PLAIN}, BIASED_HEAD, {"rope.freq_base": 2e4},
        norm="layer", **WIDE, rotated=16,
    ),
    "stablelm": declare(
        "stablelm", {**biased(NORMS), **biased(ATTENTION, *QKV), **GATED}, BIASED_HEAD,
        {"use_parallel_residual": False}, norm="layer", rotated=8, **FULL,
    ),
    "stablelm_12b": declare(
        "stablelm", {
            **biased(ATTN_NORM), **ATTENTION, **GATED,
            "attn_q_norm.weight": "heads, head_dim", "attn_k_norm.weight": "kv_heads, head_dim",
        }, BIASED_HEAD, {"use_parallel_residual": True}, norm="layer", **WIDE, rotated=8,
    ),
    "command_r": declare(
        "command-r", {**ATTN_NORM, **ATTENTION, **GATED}, TIED,
        {"rope.freq_base": 8e6, "logit_scale": 0.25, "rope.scaling.type": "none"}, norm="layer", **FULL,
    ),
    "cohere2": declare(
        "cohere2", {**ATTN_NORM, **ATTENTION, **GATED}, TIED,
        {"rope.freq_base": 5e4, "logit_scale": 0.25, "rope.scaling.type": "none"},
        norm="layer", layers=4, window=13, rotated=32,
    ),
    # Gate and up in one
    "phi3": declare(
        "phi3", {**NORMS, **JOINED, **HALVES}, UNTIED,
        {"rope.freq_base": 3e4, "rope.scaling.original_context_length": 4096},
        width=128, heads=4, kv_heads=4, rotated=32, window=2047, context=4096,
    ),
    "phi3_longrope": declare(  # the short factors
        "phi3", {**NORMS, **JOINED, **HALVES},
        {**UNTIED, "rope_factors_long.weight": "rotated // 2", "rope_factors_short.weight": "rotated // 2"},
        {"rope.scaling.original_context_length": 1024, "rope.scaling.attn_factor": 1.1},
        **WIDE, rotated=32, window=2047, context=4096,
    ),
    "phi3_longrope_long": declare(
        "phi3", {**NORMS, **JOINED, **HALVES},
        {**UNTIED, "rope_factors_long.weight": "rotated // 2", "rope_factors_short.weight": "rotated // 2"},
        {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2},
        **WIDE, rotated=32, window=2047, context=4096,
    ),
    "glm4": declare(
        "glm4", {**NORMS, **biased(ATTENTION, *QKV), **HALVES, **POST_NORMS}, **WIDE, rotated=16
    ),
    "glm4_seeing": declare(  # of GLM 4.1V
        "glm4", {**NORMS, **biased(ATTENTION, *QKV), **HALVES, **POST_NORMS},
        UNTIED, {"rope.dimension_sections": [2, 3, 3, 0]}, **WIDE, rotated=16,
    ),
    # Gemma
    "gemma": declare("gemma", LLAMA, TIED, width=128, heads=2, kv_heads=1, head_dim=96),
    "gemma2": declare(
        "gemma2", {**LLAMA, **POST_NORMS}, TIED, {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0},
        layers=4, width=64, heads=4, kv_heads=2, head_dim=32, window=16,
    ),
    "gemma3": declare(
        "gemma3", {**LLAMA, **HEAD_NORMS, **POST_NORMS}, TIED, {"rope.freq_base": 1e6},
        layers=7, width=64, hidden=96, heads=2, kv_heads=1, head_dim=64, window=16,
    ),
    "gemma3_ropescale": declare(
        "gemma3", {**LLAMA, **HEAD_NORMS, **POST_NORMS}, TIED,
        {"rope.freq_base": 1e5, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        layers=6, width=64, heads=2, kv_heads=1, head_dim=32, window=12,
    ),
    "gemma4": declare("gemma4", gemma4, GEMMA4, gemma4_fields, GEMMA4_VALUES, **GEMMA4_SIZES),
    "gemma4_shared": declare(
        "gemma4", gemma4, GEMMA4, gemma4_fields, GEMMA4_VALUES, **{**GEMMA4_SIZES, "layers": 6, "shared": 3}
    ),
    "gemma4_experts": declare(
        "gemma4", gemma4_experts, GEMMA4, gemma4_expert_fields, GEMMA4_VALUES,
        **{**GEMMA4_SIZES, "experts": 8, "used": 3, "expert_hidden": 48},
    ),
    "gemma4_values_are_keys": declare(
        "gemma4", gemma4, GEMMA4, gemma4_fields, GEMMA4_VALUES, **{**GEMMA4_SIZES, "values_are_keys": True}
    ),
}  # fmt: skip
