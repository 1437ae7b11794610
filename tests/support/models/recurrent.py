"""Models with recurrent layers, some of which attend as well."""

from .declaration import EMBEDDING, TIED, UNTIED, Dims, Shapes, declare
from .experts import FOUR, ROUTER_BIAS, SHARED_GATE
from .parts import ATTENTION, ATTN_NORM, EXPERTS, GATED, HEAD_NORMS, NORMS, SHARED_EXPERT, biased, norms

MAMBA = {
    **ATTN_NORM,
    "ssm_in.weight": "2 * inner, width",
    **biased({"ssm_conv1d.weight": "inner, taps"}),
    "ssm_x.weight": "rank + 2 * state, inner",
    **biased({"ssm_dt.weight": "inner, rank"}),
    "ssm_a": "inner, state",
    "ssm_d": "inner",
    "ssm_out.weight": "width, inner",
}
MAMBA2 = {
    **ATTN_NORM,
    "ssm_in.weight": "2 * inner + 2 * groups * state + rank, width",
    **biased({"ssm_conv1d.weight": "inner + 2 * groups * state, taps"}),
    "ssm_dt.bias": "rank",
    "ssm_a": "rank, 1",
    "ssm_d": "rank, 1",
    "ssm_norm.weight": "groups, inner // groups",
    "ssm_out.weight": "width, inner",
}
CONVOLUTION = {
    "shortconv.conv.weight": "width, taps",
    "shortconv.in_proj.weight": "3 * width, width",
    "shortconv.out_proj.weight": "width, width",
}
DELTA_NET = {
    "attn_qkv.weight": "2 * groups * state + inner, width",
    "attn_gate.weight": "inner, width",
    "ssm_conv1d.weight": "2 * groups * state + inner, taps",
    "ssm_dt.bias": "rank",
    "ssm_a": "rank",
    "ssm_norm.weight": "inner // rank",
    "ssm_out.weight": "width, inner",
}
STRENGTHS = {"ssm_beta.weight": "rank, width", "ssm_alpha.weight": "rank, width"}
GATED_ATTENTION = {**ATTENTION, "attn_q.weight": "2 * heads * head_dim, width", **HEAD_NORMS}
MIXTURE = {**EXPERTS, **SHARED_EXPERT, **SHARED_GATE}


def ssm(d: Dims) -> dict:
    """Metadata of state spaces."""
    found = {"ssm.inner_size": d.inner, "ssm.state_size": d.state, "ssm.conv_kernel": d.taps}
    return {**found, "ssm.time_step_rank": d.rank, "ssm.group_count": d.groups}


def lfm2(arch: str, dense: int, **dims):
    """Every second layer attends; the first `dense` have no experts."""

    def layer(d: Dims, number: int) -> Shapes:
        mix = {**ATTENTION, **HEAD_NORMS} if number % 2 else CONVOLUTION
        return {**NORMS, **mix, **(GATED if number < dense else {**EXPERTS, **ROUTER_BIAS})}

    def metadata(d: Dims) -> dict:
        found = {"attention.head_count_kv": [d.kv_heads * (i % 2) for i in range(d.layers)]}
        found |= {"shortconv.l_cache": d.taps, "rope.freq_base": 1e6}
        return found | ({"expert_gating_func": 2, "leading_dense_block_count": dense} if dense < d.layers else {})

    whole = {**EMBEDDING, "token_embd_norm.weight": "width"}
    return declare(arch, layer, whole, metadata, taps=3, layers=4, **dims)


def qwen35(arch: str, strengths: Shapes, feed_forward: Shapes, more: dict, **dims):
    """Every fourth layer attends."""

    def layer(d: Dims, number: int) -> Shapes:
        mix = {**DELTA_NET, **strengths} if (number + 1) % 4 else GATED_ATTENTION
        return {**norms("attn_norm", "post_attention_norm"), **mix, **feed_forward}

    def metadata(d: Dims) -> dict:
        shared = {"expert_shared_feed_forward_length": d.shared_hidden} if feed_forward is MIXTURE else {}
        return {**ssm(d), "rope.freq_base": 1e7, "full_attention_interval": 4, **shared, **more}

    sizes = {"layers": 4, "width": 64, "hidden": 96, "heads": 2, "kv_heads": 1, "head_dim": 64, "rotated": 16}
    sizes |= {"inner": 128, "state": 32, "taps": 4, "rank": 4, "groups": 2}
    return declare(arch, layer, UNTIED, metadata, **sizes, **dims)


SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
NO_HEADS = {"heads": 0, "kv_heads": None, "hidden": 0, "width": 128, "inner": 256, "taps": 4, "rank": 8}
RECURRENT = {
    "mamba": declare("mamba", MAMBA, TIED, ssm, state=16, groups=0, **NO_HEADS),
    "mamba_normalized": declare(
        "mamba", MAMBA, UNTIED, lambda d: {**ssm(d), "ssm.dt_b_c_rms": True}, state=16, groups=0, **NO_HEADS
    ),
    "mamba2": declare("mamba2", MAMBA2, UNTIED, ssm, state=32, groups=1, **NO_HEADS),
    "mamba2_groups": declare("mamba2", MAMBA2, TIED, ssm, state=16, groups=2, **NO_HEADS),
    "lfm2": lfm2("lfm2", dense=4),
    "lfm2moe": lfm2("lfm2moe", dense=1, expert_hidden=32, **FOUR),
    "qwen35": qwen35("qwen35", STRENGTHS, GATED, SECTIONS),
    "qwen35moe": qwen35("qwen35moe", STRENGTHS, MIXTURE, SECTIONS, expert_hidden=32, shared_hidden=48, **FOUR),
    "qwen3next": qwen35(
        "qwen3next", {"ssm_ba.weight": "2 * rank, width"}, MIXTURE, {}, expert_hidden=32, shared_hidden=48, **FOUR
    ),
}
