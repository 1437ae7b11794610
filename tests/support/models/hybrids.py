"""Models some layers of which attend, and others are those of Mamba."""

from .declaration import TIED, UNTIED, Dims, Shapes, declare
from .experts import FOUR, ROUTER_BIAS
from .parts import ATTENTION, ATTN_NORM, EXPERTS, GATED, NORMS, PLAIN, SHARED_EXPERT, biased
from .recurrent import MAMBA, MAMBA2, ssm

SIZES = {"inner": 192, "state": 16, "taps": 4, "rank": 6, "groups": 2, "heads": 4, "kv_heads": 2, "width": 96}
SCALES = {"embedding_scale": 5.0, "residual_scale": 0.6, "attention.scale": 0.25, "logit_scale": 0.7}
UNGATED = {
    "ffn_up_exps.weight": "experts, expert_hidden, {columns}",
    "ffn_down_exps.weight": "experts, {columns}, expert_hidden",
}
UNGATED_SHARED = {name: shape for name, shape in SHARED_EXPERT.items() if "gate" not in name}
LATENT = {"ffn_latent_down.weight": "narrow, width", "ffn_latent_up.weight": "width, narrow"}
WITHOUT_NORM = {name: shape for name, shape in MAMBA2.items() if name != "ssm_norm.weight"}
NORMED_SCAN = {"ssm_dt_norm.weight": "rank", "ssm_b_norm.weight": "state", "ssm_c_norm.weight": "state"}


def kv_heads(d: Dims, attends: str) -> dict:
    """Key-value heads by layer; attends: names of layers, one letter each, and "a" attends."""
    return {"attention.head_count_kv": [d.kv_heads * (attends[n % len(attends)] == "a") for n in range(d.layers)]}


def granite(feed_forward: Shapes, more: dict, attends: str, **dims):
    def layer(d: Dims, number: int) -> Shapes:
        return {**(ATTENTION if attends[number % len(attends)] == "a" else MAMBA2), **NORMS, **feed_forward}

    def metadata(d: Dims) -> dict:
        length = {"expert_shared_feed_forward_length": d.shared_hidden} if hasattr(d, "shared_hidden") else {}
        return {**ssm(d), **kv_heads(d, attends), **length, **more}

    return declare("granitehybrid", layer, TIED, metadata, **{**SIZES, "layers": len(attends), **dims})


def jamba(mixed: bool, **dims):
    """Every third layer attends; every second one has experts, if there are."""

    def layer(d: Dims, number: int) -> Shapes:
        mixture = {"ffn_gate_inp.weight": "experts, width", **EXPERTS}
        mix = ATTENTION if number % 3 == 2 else {**MAMBA, **NORMED_SCAN}
        return {**mix, **NORMS, **(mixture if mixed and number % 2 else GATED)}

    def metadata(d: Dims) -> dict:
        return {**ssm(d), **kv_heads(d, "mma")}

    return declare("jamba", layer, TIED, metadata, **{**SIZES, "groups": 0, "layers": 4, **dims})


def nemotron_h(arch: str, feed_forward: Shapes, kinds: str, more: dict | None = None, **dims):
    """kinds: of layers, a for attention, m for Mamba 2, f for a feed-forward network."""

    def layer(d: Dims, number: int) -> Shapes:
        return {**ATTN_NORM, **{"a": ATTENTION, "m": MAMBA2, "f": feed_forward}[kinds[number % len(kinds)]]}

    def metadata(d: Dims) -> dict:
        lengths = [d.hidden * (kinds[n % len(kinds)] == "f") for n in range(d.layers)]
        length = {"expert_shared_feed_forward_length": d.shared_hidden} if hasattr(d, "shared_hidden") else {}
        narrow = {"moe_latent_size": d.narrow} if hasattr(d, "narrow") else {}
        found = {"attention.layer_norm_epsilon": d.epsilon, "feed_forward_length": lengths}
        return {**ssm(d), **kv_heads(d, kinds), **found, **length, **narrow, **(more or {})}

    return declare(arch, layer, UNTIED, metadata, **{**SIZES, "layers": len(kinds), "head_dim": 32, **dims})


def ungated(columns: str) -> Shapes:
    """Experts without a gate, for so many columns, beside one for all tokens."""
    experts = {name: shape.format(columns=columns) for name, shape in UNGATED.items()}
    return {"ffn_gate_inp.weight": "experts, width", **ROUTER_BIAS, **experts, **UNGATED_SHARED}


MIXTURE = {**EXPERTS, **SHARED_EXPERT}
HYBRIDS = {
    "granitehybrid": granite(GATED, {**SCALES, "rope.scaling.finetuned": False}, "mma"),
    "granitehybrid_moe": granite(MIXTURE, {**SCALES, "rope.freq_base": 5e4}, "ma", shared_hidden=48, **FOUR),
    "bamba": granite(GATED, {"rope.scaling.finetuned": True}, "ma", groups=1),
    "falcon_h1": declare(
        "falcon-h1", {**MAMBA2, **ATTENTION, **GATED, "ffn_norm": "width"}, UNTIED,
        lambda d: {**ssm(d), "rope.freq_base": 1e6},
        values={"ffn_norm": lambda n, shape: n.uniform(shape, 0.5, 1.5)}, **{**SIZES, "inner": 120, "head_dim": 40},
    ),
    "falcon_h1_raw": declare(  # as most of them are
        "falcon-h1", {**WITHOUT_NORM, **ATTENTION, **GATED, "ffn_norm": "width"}, TIED, ssm,
        values={"ffn_norm": lambda n, shape: n.uniform(shape, 0.5, 1.5)}, **{**SIZES, "groups": 1, "rank": 8},
    ),
    "jamba": jamba(False),
    "jamba_moe": jamba(True, **FOUR),
    "nemotron_h": nemotron_h("nemotron_h", biased(PLAIN), "mfaf"),
    "nemotron_h_moe": nemotron_h(
        "nemotron_h_moe", ungated("width"), "mfaf", {
            "expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 2.5,
            "expert_group_count": 4, "expert_group_used_count": 2,
        }, experts=8, used=3, expert_hidden=48, shared_hidden=80,
    ),
    "nemotron_h_moe_narrow": nemotron_h(
        "nemotron_h_moe", {**ungated("narrow"), **LATENT}, "fma", {"expert_weights_scale": 1.5},
        expert_hidden=48, shared_hidden=64, narrow=32, **FOUR,
    ),
}  # fmt: skip
