"""More decoders with a mixture of experts: those beside which one expert is for all tokens, and others."""

from collections.abc import Callable

from .declaration import TIED, UNTIED, Declaration, Dims, Shapes, declare
from .dense import QKV, YARN
from .dense2 import VISION
from .experts import FOUR, MIXTURE, ROUTER_BIAS
from .parts import (
    ATTENTION,
    ATTN_NORM,
    EXPERTS,
    GATED,
    HEAD_NORMS,
    JOINED,
    NORMS,
    POST_NORMS,
    SHARED_EXPERT,
    WHOLE_NORMS,
    biased,
    norms,
)

SIGMOID, SOFTMAX = {"expert_gating_func": 2}, {"expert_gating_func": 1}
NORMED, GROUPS = {"expert_weights_norm": True}, {"expert_group_count": 4, "expert_group_used_count": 2}
EIGHT = {"experts": 8, "used": 3, "expert_hidden": 32}
GUESSING = {
    "nextn.eh_proj.weight": "width, 2 * width",
    "nextn.enorm.weight": "width",
    "nextn.hnorm.weight": "width",
    "nextn.shared_head_norm.weight": "width",
}


def pattern(period: int, first: int = 0) -> Callable[[Dims], list[bool]]:
    """Windows but for every so many layers, from the first of them on."""
    return lambda d: [number % period != first for number in range(d.layers)]


def mixed(arch: str, always: Shapes, mixture: Shapes, metadata: dict, whole: Shapes = UNTIED, guess: Shapes = GUESSING,
          **dims) -> Declaration:  # fmt: skip
    """Declare a mixture.

    The first `dense` layers have no experts; others have the mixture, the last ones, if some guess, and more.

    metadata: what is not told by dimensions; `shared` experts are beside the others, in one whose `length` may be told.
    """

    def layer(d: Dims, number: int) -> Shapes:
        if number >= d.layers - d.guessing:
            return {**always, **(guess if "ffn_down.weight" in guess else mixture), **guess}
        return {**always, **(GATED if number < d.dense else mixture)}

    def more(d: Dims) -> dict:
        found = {"expert_shared_count": d.shared} if d.shared else {}
        found |= {"expert_shared_feed_forward_length": d.shared * d.expert_hidden} if d.length else {}
        found |= {"nextn_predict_layers": d.guessing} if d.guessing else {}
        said = {key: value(d) if callable(value) else value for key, value in metadata.items()}
        return {"leading_dense_block_count": d.dense, **found, **said}

    given = {"dense": 1, "shared": 0, "guessing": 0, "length": False, "expert_hidden": 48, **FOUR}
    return declare(arch, layer, whole, more, **{**given, **dims})


BESIDE = {
    **EXPERTS,
    **{name: shape.replace("shared_hidden", "shared * expert_hidden") for name, shape in SHARED_EXPERT.items()},
}
BIASED_BESIDE = {**BESIDE, **ROUTER_BIAS}
DECODER = {**NORMS, **ATTENTION}
QWEN = {**DECODER, **HEAD_NORMS}
GLM = {**norms("attn_norm", "post_attention_norm"), **biased(ATTENTION, *QKV)}

ROPE_FREQS = {**UNTIED, "rope_freqs.weight": "head_dim // 2"}
AFMOE = {**QWEN, **POST_NORMS, "attn_gate.weight": "heads * head_dim, width"}
GELU = {"grok", "grok_2"}  # looked up in a table of float16 by llama.cpp

MOE2 = {
    "deepseek": mixed(
        "deepseek", DECODER, BESIDE, {"rope.freq_base": 2e4, "expert_weights_scale": 1.4}, shared=2, kv_heads=3
    ),
    "bailingmoe": mixed(
        "bailingmoe", DECODER, BESIDE, {**NORMED, "expert_weights_scale": 1.0}, dense=0, shared=1, head_dim=40,
        rotated=40, **EIGHT,
    ),
    "bailingmoe_raw": mixed("bailingmoe", DECODER, BESIDE, {"expert_weights_scale": 1.5}, dense=0, shared=2),
    "ernie4_5_moe": mixed(
        "ernie4_5-moe", DECODER, BIASED_BESIDE,
        {"interleave_moe_layer_step": 1, "rope.freq_base": 5e4}, TIED, shared=2, length=True,
    ),
    "ernie4_5_moe_alone": mixed(
        "ernie4_5-moe", {**NORMS, **biased(ATTENTION, *QKV)}, EXPERTS, {"interleave_moe_layer_step": 1}, **EIGHT
    ),
    "dots1": mixed(
        "dots1", QWEN, BIASED_BESIDE, {**SIGMOID, **NORMED, "expert_weights_scale": 2.5}, shared=2, kv_heads=3, **EIGHT
    ),
    "dots1_softmax": mixed("dots1", QWEN, BESIDE, SOFTMAX, dense=0, shared=1, kv_heads=3, layers=3),
    "bailingmoe2": mixed(
        "bailingmoe2", {**NORMS, **JOINED, **HEAD_NORMS}, BIASED_BESIDE,
        {**SIGMOID, **NORMED, **GROUPS, "expert_weights_scale": 2.5},
        guess={**GUESSING, "layer_output_norm.weight": "width"}, layers=3, guessing=1, shared=1, length=True,
        rotated=16, **EIGHT,
    ),
    "glm4moe": mixed(
        "glm4moe", GLM, BIASED_BESIDE, {**SIGMOID, **NORMED, "expert_weights_scale": 1.0, "rope.freq_base": 1e6},
        layers=3, guessing=1, shared=1, head_dim=40, rotated=20,
    ),
    "glm4moe_large": mixed(  # with norms of heads, and the sections of a model that sees
        "glm4moe", {**GLM, **HEAD_NORMS}, BIASED_BESIDE,
        {**NORMED, **GROUPS, "expert_weights_scale": 2.5, "rope.dimension_sections": [2, 3, 3, 0]}, TIED,
        shared=1, rotated=16, **EIGHT,
    ),
    "minimax_m2": declare(
        "minimax-m2", {**MIXTURE, **WHOLE_NORMS, **ROUTER_BIAS}, UNTIED, {**SIGMOID, "rope.freq_base": 5e6},
        hidden=48, head_dim=40, rotated=20, experts=8, used=3, expert_hidden=48,
    ),
    "qwen3vlmoe": declare(
        "qwen3vlmoe", {**MIXTURE, **HEAD_NORMS}, TIED, VISION, hidden=64, heads=4, kv_heads=2, head_dim=32,
        expert_hidden=48, **FOUR,
    ),
    "hunyuan_moe": mixed(
        "hunyuan-moe", QWEN, BESIDE, {"rope.freq_base": 1e5}, TIED, dense=0, shared=1, length=True, hidden=48
    ),
    "exaone_moe": mixed(
        "exaone-moe", QWEN, BIASED_BESIDE, {**SIGMOID, **NORMED, **GROUPS, "expert_weights_scale": 2.5},
        guess={**GUESSING, **GATED}, layers=5, guessing=1, shared=1, window=11, **EIGHT,
    ),
    "exaone_moe_listed": mixed(
        "exaone-moe", QWEN, BESIDE, {**SOFTMAX, "attention.sliding_window_pattern": pattern(3)}, ROPE_FREQS,
        layers=3, dense=0, shared=1, window=16,
    ),
    "afmoe": mixed(
        "afmoe", AFMOE, BIASED_BESIDE,
        {**NORMED, "expert_weights_scale": 2.8, "rope.freq_base": 5e4, "rope.freq_base_swa": 2e4},
        layers=5, shared=1, window=12, **EIGHT,
    ),
    "afmoe_alone": mixed(
        "afmoe", AFMOE, {**EXPERTS, **ROUTER_BIAS}, {**SOFTMAX, "expert_weights_scale": 1.5, "expert_shared_count": 0},
        TIED, layers=4, dense=2, window=10,
    ),
    "arctic": declare("arctic", {
        **NORMS, **norms("ffn_norm_exps"), **ATTENTION, **EXPERTS, "ffn_gate.weight": "width, width",
        "ffn_up.weight": "width, width", "ffn_down.weight": "width, width",
    }, experts=8, used=3),
    "dbrx": declare(
        "dbrx", {**norms("attn_norm", "attn_output_norm"), **JOINED, **EXPERTS}, UNTIED,
        {"attention.clamp_kqv": 1.5, "rope.freq_base": 5e5}, norm="layer", **FOUR,
    ),
    "cohere2moe": mixed(
        "cohere2moe", {**ATTN_NORM, **ATTENTION}, BESIDE,
        {**NORMED, "logit_scale": 0.8, "rope.freq_base": 5e4,
         "attention.sliding_window_pattern": pattern(4)},
        TIED, norm="layer", layers=5, guessing=1, dense=1, shared=2, length=True, window=13, **EIGHT,
    ),
    "cohere2moe_rms": mixed(
        "cohere2moe", {**ATTN_NORM, **ATTENTION}, EXPERTS,
        {**SOFTMAX, "logit_scale": 0.75, "expert_weights_scale": 1.5,
         "attention.sliding_window_pattern": pattern(2, 1)}, TIED, layers=3, dense=0, window=13,
    ),
    "grok": declare(
        "grok", {**NORMS, **ATTENTION, **norms("attn_output_norm", "layer_output_norm"), **EXPERTS}, TIED,
        {"embedding_scale": 5.0, "attention.output_scale": 0.3, "router_logit_softcapping": 30.0, "logit_scale": 1.2,
         "attn_logit_softcapping": 4.0}, **FOUR,
    ),
    "grok_2": declare(
        "grok", {**NORMS, **ATTENTION, **norms("attn_output_norm", "post_ffw_norm"), **EXPERTS, **GATED}, UNTIED,
        {**YARN, "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0,
         "rope.scaling.yarn_beta_fast": 6.0, "rope.scaling.yarn_beta_slow": 1.5, "final_logit_softcapping": 4.0,
         "attention.temperature_length": 1024}, expert_hidden=48, context=256, **FOUR,
    ),
}  # fmt: skip
