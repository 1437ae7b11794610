"""Dense decoders that llama.cpp names beside the better known ones of dense.py."""

import re
from collections.abc import Mapping
from dataclasses import replace

from .declaration import EMBEDDING, TIED, UNTIED, Dims, declare
from .dense import BIASED_HEAD, FULL, LLAMA, QKV, ROPE_FREQS, WIDE, YARN
from .experts import COMPRESSED_QUERIES, LATENT, MOE, NOT_ABSORBED, QUERIES, ROUTER_BIAS
from .parts import (
    ATTENTION,
    ATTN_NORM,
    EXPERTS,
    GATED,
    HALVES,
    HEAD_NORMS,
    JOINED,
    NORMS,
    PLAIN,
    POST_NORMS,
    SHARED_EXPERT,
    biased,
    norms,
)

HIDDEN = {**NORMS, **ATTENTION, **PLAIN}
BIASED_JOINED = {**biased(NORMS), **biased(JOINED)}
JOINED_BIAS = {"attn_qkv.bias": "(heads + 2 * kv_heads) * head_dim"}
TABLE = {"position_embd.weight": "context, width"}
EMBEDDING_NORM = biased(norms("token_embd_norm"))
MANY = {"width": 64, "hidden": 48, "heads": 4, "kv_heads": 4}  # for models whose number of layers matters
SEED_OSS = {**norms("attn_norm", "post_attention_norm"), **biased(ATTENTION, *QKV), **GATED}
VISION = {"rope.dimension_sections": [3, 5, 4, 4], "rope.freq_base": 1e5}  # the last of 16 pairs stand still
GELU = {"spark2_5", "bloom", "codeshell", "codeshell_output", "starcoder"}  # looked up in a table by llama.cpp

MUSE = {**NORMS, **ATTENTION, **HEAD_NORMS, **GATED, **POST_NORMS, "attn_gate.weight": "heads * head_dim, width"}
SINKS = {"attn_sinks.weight": "heads"}
GRANITE = {
    "embedding_scale": 12.0, "residual_scale": 0.6, "logit_scale": 6.0, "attention.scale": 0.25, "rope.freq_base": 5e4,
    "attention.sliding_window_pattern": [True, True, False], "attention.rope_pattern": [1, 0, 1],
}  # fmt: skip
LATENT_DIMS = {"heads": 4, "kv_heads": 4, "nope": 24, "rotated": 16, "value": 32}
OF_IMAGES = {
    "vis_attn_qkv.weight": JOINED["attn_qkv.weight"], "vis_attn_output.weight": JOINED["attn_output.weight"],
    "vis_gate.weight": "hidden, width", "vis_up.weight": "hidden, width", "vis_down.weight": "width, hidden",
}  # fmt: skip
DECI = {"heads": (4, 4, 0, 4, 0, 2), "kv_heads": (2, 0, 0, 4, 0, 1), "hidden": (48, 64, 32, 0, 0, 80)}  # by layer
MIMO2_DIMS = {"heads": (4, 2, 4, 2), "kv_heads": (2, 1, 2, 2)}
MIMO2 = {
    "attention.head_count": MIMO2_DIMS["heads"], "attention.head_count_kv": MIMO2_DIMS["kv_heads"],
    "attention.sliding_window_pattern": [False, True, False, True], "attention.value_scale": 0.7,
    "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4,
}  # fmt: skip
HEAD_GATE = {"attn_gate.weight": "heads, width"}
HEADS_DIMS = {"heads": (4, 2, 6, 2), "kv_heads": (2, 1, 2, 2)}
HEADS = {
    "attention.head_count": HEADS_DIMS["heads"], "attention.head_count_kv": HEADS_DIMS["kv_heads"],
    "attention.sliding_window_pattern": [False, True, False, True],
}  # fmt: skip
LAGUNA = {
    **{name: values for name, values in HEADS.items() if "pattern" not in name}, **YARN, "rope.freq_base": 5e5,
    "rope.freq_base_swa": 2e4, "rope.dimension_count_swa": 40, "leading_dense_block_count": 1,
    "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_shared_feed_forward_length": 40,
}  # fmt: skip
OF_MIXTURE = {"layers": 4, "width": 128, "head_dim": 40, "window": 12, "experts": 4, "used": 2, "expert_hidden": 32,
              "shared_hidden": 40}  # fmt: skip
LAGUNA_DIMS = {**OF_MIXTURE, "rotated": 24, "context": 256}
STEP35 = {
    "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4, "expert_weights_norm": True, "expert_weights_scale": 2.0,
    "expert_shared_feed_forward_length": 40,
}  # fmt: skip
STEP35_DIMS = {**OF_MIXTURE, "rotated": 40}
OPENELM_DIMS = {"heads": (4, 6, 3), "kv_heads": (2, 3, 1), "hidden": (32, 64, 96)}  # by layer


def openelm(layer: int) -> dict[str, str]:
    """Return the tensors of a layer, which has dimensions of its own."""
    own = {name: str(values[layer]) for name, values in OPENELM_DIMS.items()}
    tensors = {**NORMS, **HEAD_NORMS, **JOINED, **GATED}
    return {name: with_own(shape, own) for name, shape in tensors.items()}


def latent(d: Dims) -> dict:
    """Metadata of heads whose keys and values are made of a latent row."""
    return {"attention.kv_lora_rank": d.kv_rank, "attention.key_length": d.nope + d.rotated,
            "attention.value_length": d.value, "rope.freq_base": 2e4}  # fmt: skip


def without_value_length(metadata: dict) -> dict:
    """As in released files: it is the width by the heads."""
    return {name: value for name, value in metadata.items() if name != "attention.value_length"}


def deci(layer: int) -> dict[str, str]:
    """Return a layer's parts of attention and feed-forward network."""
    own = {name: str(values[layer]) for name, values in DECI.items()}
    tensors = norms("attn_norm") if own["heads"] != "0" else {}
    if own["kv_heads"] != "0":
        tensors |= ATTENTION
    elif own["heads"] != "0":
        tensors |= {"attn_output.weight": "width, width"}
    tensors |= {**norms("ffn_norm"), **GATED} if own["hidden"] != "0" else {}
    return {name: with_own(shape, own) for name, shape in tensors.items()}


def own_heads(tensors: Mapping[str, str], layer: int) -> dict[str, str]:
    """Return a layer's tensors, with as many heads as it has."""
    own = {name: str(values[layer]) for name, values in HEADS_DIMS.items()}
    return {name: with_own(shape, own) for name, shape in tensors.items()}


def laguna(layer: int, gates: str) -> dict[str, str]:
    """Return a gate for each head or each number, experts behind the first layer."""
    mixture = {**EXPERTS, **SHARED_EXPERT, **ROUTER_BIAS}
    gate = {"attn_gate.weight": f"{gates}, width"}
    return own_heads({**NORMS, **ATTENTION, **HEAD_NORMS, **gate, **(mixture if layer else GATED)}, layer)


def step35(layer: int) -> dict[str, str]:
    """Experts behind the first layer."""
    mixture = {**EXPERTS, **SHARED_EXPERT, **ROUTER_BIAS}
    return own_heads({**NORMS, **ATTENTION, **HEAD_NORMS, **HEAD_GATE, **(mixture if layer else GATED)}, layer)


def mimo2(layer: int) -> dict[str, str]:
    """Windows and sinks in every second layer, experts behind the first."""
    own = {name: str(values[layer]) for name, values in MIMO2_DIMS.items()}
    tensors = {**NORMS, **ATTENTION, **(SINKS if layer % 2 else {}), **({**EXPERTS, **ROUTER_BIAS} if layer else GATED)}
    return {name: with_own(shape, own) for name, shape in tensors.items()}


def with_own(shape: str, own: Mapping[str, str]) -> str:
    """Return a shape with a layer's own dimensions."""
    for name, value in own.items():
        shape = re.sub(rf"\b{name}\b", value, shape)
    return shape


DENSE2 = {
    "arcee": declare("arcee", HIDDEN, metadata={**YARN, "rope.freq_base": 2e4}, **WIDE, rotated=32, context=256),
    "arcee_tied": declare("arcee", {**HIDDEN, **biased(ATTENTION, *QKV)}, {**TIED, **ROPE_FREQS}, **WIDE, rotated=32),
    "ernie4_5": declare("ernie4_5", LLAMA, TIED, {"rope.freq_base": 5e5}, **WIDE, head_dim=48),
    "xverse": declare("xverse", LLAMA, metadata={"rope.freq_base": 5e5}, **FULL),
    "seed_oss": declare("seed_oss", SEED_OSS, metadata={"rope.freq_base": 1e7}, **WIDE, head_dim=48),
    "hunyuan": declare(
        "hunyuan-dense", {**LLAMA, **HEAD_NORMS}, TIED, {"rope.freq_base": 1e5}, **WIDE, head_dim=48
    ),
    "hunyuan_alpha": declare(
        "hunyuan-dense", {**LLAMA, **HEAD_NORMS}, metadata={"rope.scaling.alpha": 50.0, "expert_count": 1}, **WIDE
    ),
    "hunyuan_vl": declare(
        "hunyuan_vl", {**LLAMA, **HEAD_NORMS}, TIED, {**VISION, "rope.scaling.alpha": 10.0}, **WIDE
    ),
    "maincoder": declare("maincoder", {**LLAMA, **HEAD_NORMS}, TIED, {"rope.freq_base": 1e6}, **WIDE, head_dim=48),
    "baichuan_7b": declare("baichuan", LLAMA, layers=32, **MANY),
    "baichuan_13b": declare("baichuan", LLAMA, layers=40, **{**MANY, "heads": 5, "width": 80, "kv_heads": 5}),
    "refact": declare("refact", LLAMA, TIED, width=120, heads=6, kv_heads=1),
    "orion": declare(
        "orion", {**biased(NORMS), **ATTENTION, **GATED}, BIASED_HEAD, {"rope.freq_base": 2e4}, norm="layer", **WIDE
    ),
    "qwen": declare(
        "qwen", {**NORMS, **JOINED, **JOINED_BIAS, "ffn_gate.weight": "hidden // 2, width",
                 "ffn_up.weight": "hidden // 2, width", "ffn_down.weight": "width, hidden // 2"},
        metadata={"rope.freq_base": 2e4}, hidden=128, width=128, heads=4, kv_heads=None,
    ),
    "qwen2vl": declare(
        "qwen2vl", {**NORMS, **biased(ATTENTION, *QKV), **GATED}, metadata=VISION, **WIDE, epsilon=1e-6
    ),
    "qwen3vl": declare("qwen3vl", {**LLAMA, **HEAD_NORMS}, TIED, VISION, **WIDE, head_dim=32),
    "paddleocr": declare("paddleocr", LLAMA, TIED, VISION, **WIDE, head_dim=32),
    "pangu": declare("pangu-embedded", {**NORMS, **biased(ATTENTION), **GATED}, TIED, {"rope.freq_base": 4e4}, **WIDE),
    "chatglm": declare(
        "chatglm", {**NORMS, **JOINED, **JOINED_BIAS, **HALVES}, metadata={"rope.freq_base": 2e4}, **WIDE, rotated=16
    ),
    "plamo": declare("plamo", {**ATTN_NORM, **ATTENTION, **GATED}, width=160, heads=5, kv_heads=1),
    "openelm": declare(
        "openelm", lambda d, layer: openelm(layer), TIED,
        {"rope.freq_base": 2e4, "attention.head_count": OPENELM_DIMS["heads"],
         "attention.head_count_kv": OPENELM_DIMS["kv_heads"], "feed_forward_length": OPENELM_DIMS["hidden"]},
        layers=3, head_dim=32,
    ),
    # LayerNorm
    "starcoder": declare(
        "starcoder", {**BIASED_JOINED, **biased(PLAIN)}, {**biased(TIED, "output_norm"), **TABLE}, norm="layer",
        context=128, values={"position_embd.weight": lambda n, shape: n.normal(shape, 0.3)},
    ),
    "codeshell": declare(
        "codeshell", {**biased(NORMS), **biased(ATTENTION), **biased(PLAIN)}, BIASED_HEAD, norm="layer", **WIDE
    ),
    "codeshell_output": declare(
        "codeshell", {**biased(NORMS), **biased(ATTENTION), **biased(PLAIN)},
        {name: shape for name, shape in BIASED_HEAD.items() if name != "token_embd.weight"}, norm="layer", **WIDE,
    ),
    "bloom": declare(
        "bloom", {**BIASED_JOINED, **biased(PLAIN)}, {**biased(TIED, "output_norm"), **EMBEDDING_NORM}, norm="layer",
        width=80, heads=5, kv_heads=5,
    ),
    "jais": declare(
        "jais", {**BIASED_JOINED, **biased(GATED)}, BIASED_HEAD, {"attention.max_alibi_bias": 8.0}, norm="layer",
        width=80, heads=5, kv_heads=5,
    ),
    "jais_no_alibi": declare("jais", {**BIASED_JOINED, **biased(GATED)}, BIASED_HEAD, norm="layer", **WIDE),
    "jais2": declare(
        "jais2", {**biased(NORMS), **biased(ATTENTION), **biased(PLAIN)}, biased(TIED, "output_norm"),
        {"rope.freq_base": 2e4}, norm="layer", **WIDE,
    ),
    # Loops, windows, latent keys, layers that differ
    "nanbeige": declare("nanbeige", LLAMA, {**UNTIED, **ROPE_FREQS}, {"num_loops": 2}, **WIDE),
    "nanbeige_skip": declare(
        "nanbeige", LLAMA, TIED, {"num_loops": 3, "skip_loop_final_norm": True, "rope.freq_base": 1e6}, **WIDE
    ),
    "nanbeige_once": declare("nanbeige", LLAMA, TIED, {"rope.freq_base": 1e6}, **WIDE),
    "mellum": declare(
        "mellum", {**NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS}, metadata={**YARN, "rope.freq_base": 5e5},
        **WIDE, head_dim=48, layers=5, window=12, experts=4, used=2, expert_hidden=32, context=256,
    ),
    "mellum_list": declare(
        "mellum", {**NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS}, metadata={
            "rope.scaling.type": "linear", "rope.scaling.factor": 4.0,
            "attention.sliding_window_pattern": [False, True, True],
        }, **WIDE, layers=3, window=12, experts=4, used=2, expert_hidden=32,
    ),
    "muse_glimmer": declare("muse-glimmer", MUSE, metadata={
        "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4, "logit_scale": 0.5, "final_logit_softcapping": 3.0,
    }, **WIDE, head_dim=48, layers=5, window=12),
    "muse_glimmer_default": declare(
        "muse-glimmer", MUSE, metadata={"rope.freq_base": 2e4, "logit_scale": 1.5}, **WIDE, layers=4, window=9
    ),
    "granite_swa": declare("granite_swa", {**LLAMA, **SINKS}, TIED, GRANITE, **WIDE, layers=3, window=12),
    "granite_swa_moe": declare(
        "granite_swa", {**NORMS, **ATTENTION, **SINKS, **EXPERTS, "ffn_up_shexp.weight": "2 * shared_hidden, width",
                        "ffn_down_shexp.weight": "width, shared_hidden"},
        metadata=lambda d: {**GRANITE, "expert_shared_feed_forward_length": d.shared_hidden},
        **WIDE, layers=3, window=12, experts=4, used=2, shared_hidden=48,
    ),
    "plm": declare(
        "plm", {**NORMS, **QUERIES, **LATENT, **NOT_ABSORBED, **PLAIN}, TIED, latent, **LATENT_DIMS, kv_rank=48
    ),
    "minicpm3": declare(
        "minicpm3", {**NORMS, **COMPRESSED_QUERIES, **LATENT, **NOT_ABSORBED, **GATED}, TIED,
        lambda d: {**without_value_length(latent(d)), "attention.q_lora_rank": d.q_rank},
        **{**LATENT_DIMS, "value": 24}, kv_rank=48, q_rank=40,
    ),
    "minicpm3_longrope": declare(
        "minicpm3", {**NORMS, **COMPRESSED_QUERIES, **LATENT, **NOT_ABSORBED, **GATED},
        {**UNTIED, "rope_factors_long.weight": "rotated // 2", "rope_factors_short.weight": "rotated // 2"},
        lambda d: {**latent(d), "attention.q_lora_rank": d.q_rank, "rope.scaling.original_context_length": 64,
                   "rope.scaling.attn_factor": 1.2}, **LATENT_DIMS, kv_rank=48, q_rank=40,
    ),
    "mistral4": replace(MOE["deepseek2_v3"], arch="mistral4"),
    "deci": declare("deci", lambda d, layer: deci(layer), {**UNTIED, **ROPE_FREQS}, {
        "rope.freq_base": 5e5, "attention.head_count": DECI["heads"], "attention.head_count_kv": DECI["kv_heads"],
        "feed_forward_length": DECI["hidden"],
    }, layers=6, width=128, head_dim=32, heads=4),
    "cogvlm": declare("cogvlm", {**NORMS, **JOINED, **GATED, **OF_IMAGES}, width=96, **FULL),
    "mimo2": declare("mimo2", lambda d, layer: mimo2(layer), metadata=MIMO2, layers=4, width=128, head_dim=48,
                     value_dim=32, rotated=16, heads=4, window=12, experts=4, used=2, expert_hidden=32),
    # Gates for heads, numbers of each layer
    "apertus": declare(
        "apertus", {**HIDDEN, **HEAD_NORMS}, {**UNTIED, **ROPE_FREQS},
        {"rope.freq_base": 2e4, "xielu.alpha_p": [0.7, -0.4], "xielu.alpha_n": [0.9, 0.2], "xielu.beta": [0.5, 0.3],
         "xielu.eps": [-1e-6, -0.1]}, **WIDE,
    ),
    "apertus_one": declare(
        "apertus", {**HIDDEN, **HEAD_NORMS}, UNTIED,
        {"xielu.alpha_p": 0.6, "xielu.alpha_n": 1.1, "xielu.beta": 0.5, "xielu.eps": -1e-6}, **WIDE, head_dim=48,
    ),
    "talkie": declare(
        "talkie", {**ATTENTION, **GATED, "attn_q_norm.weight": "heads, 1", "layer_output_scale.weight": "1"},
        {**EMBEDDING, "output.weight": "vocab, width"}, {"rope.freq_base": 2e4, "logit_scale": 0.7}, **WIDE,
        values={"layer_output_scale.weight": lambda n, shape: n.uniform(shape, 0.3, 0.9)},
    ),
    "spark2_5": declare(
        "spark2_5", lambda d, layer: own_heads({**LLAMA, **HEAD_GATE}, layer), TIED,
        {**HEADS, "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4, "rope.dimension_count_swa": 24,
         "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, width=128, head_dim=40, rotated=32, layers=4,
        window=12,
    ),
    "laguna": declare(
        "laguna", lambda d, layer: laguna(layer, "heads"), metadata=LAGUNA, **LAGUNA_DIMS,
    ),
    "laguna_elements": declare(
        "laguna", lambda d, layer: laguna(layer, "heads * head_dim"), TIED,
        {**LAGUNA, "expert_weights_norm": False, "expert_gating_func": 1}, **LAGUNA_DIMS,
    ),
    "step35": declare(
        "step35", lambda d, layer: step35(layer), {**UNTIED, "rope_freqs.weight": "head_dim // 2"},
        {**HEADS, **STEP35, "swiglu_clamp_exp": [0.0, 0.4, 0.0, 0.5], "swiglu_clamp_shexp": [0.5, 0.0, 0.4, 0.6]},
        **STEP35_DIMS,
    ),
    "step35_linear": declare(
        "step35", lambda d, layer: step35(layer), UNTIED,
        {**HEADS, **STEP35, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, **STEP35_DIMS,
    ),
    "deepseek2_ocr": declare(
        "deepseek2-ocr", lambda d, layer: {**NORMS, **ATTENTION, **({**EXPERTS, **SHARED_EXPERT} if layer else GATED)},
        TIED, {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.5},
        width=120, **FULL, experts=4, used=2, expert_hidden=24, shared_hidden=48, layers=3,
    ),
    "maple": declare("maple", {**NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS}, metadata={
        "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4, "attention.sliding_window_pattern": [True, True, False],
        "swiglu_clamp_exp": [0.5, 0.0, 0.7], "rope.scaling.type": "linear", "rope.scaling.factor": 4.0,
    }, **WIDE, head_dim=48, rotated=32, layers=3, window=12, experts=4, used=2, expert_hidden=32),
}  # fmt: skip
