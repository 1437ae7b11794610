"""Models some layers of which attend, and others keep a matrix for each head, or are those of Mamba."""

from .declaration import TIED, UNTIED, Dims, Shapes, declare
from .experts import ABSORBED, FOUR, LATENT, QUERIES, ROUTER_BIAS
from .parts import ATTENTION, EXPERTS, GATED, HALVES, HEAD_NORMS, JOINED, NORMS, SHARED_EXPERT, biased
from .recurrent import ssm

BEHIND = {"post_attention_norm": "width", "post_ffw_norm": "width"}
AROUND_ONE = {name: lambda n, shape: n.uniform(shape, 0.5, 1.5) for name in (*BEHIND, "ssm_b_norm", "ssm_c_norm")}
AROUND_ONE["ssm_dt_norm"] = AROUND_ONE["ssm_b_norm"]
SCANNED = {
    "ssm_in.weight": "2 * inner, width",
    "ssm_conv1d.weight": "inner, taps",
    "ssm_x.weight": "64 + 2 * state, inner",
    **biased({"ssm_dt.weight": "rank, 64"}),
    "ssm_a": "rank",
    "ssm_d": "rank",
    "ssm_out.weight": "width, inner",
    "ssm_dt_norm": "64",
    "ssm_b_norm": "state",
    "ssm_c_norm": "state",
}
OWN_NORMS = {"attn_q_norm.weight": "heads, head_dim", "attn_k_norm.weight": "kv_heads, head_dim"}
DELTA = {
    **{f"attn_{name}.weight": "heads * delta, width" for name in "qkv"},
    **{f"ssm_conv1d_{name}.weight": "heads * delta, 1, taps" for name in "qkv"},
    "ssm_f_a.weight": "delta, width",
    "ssm_f_b.weight": "heads * delta, delta",
    "ssm_beta.weight": "heads, width",
    "ssm_a": "heads, 1",
    "ssm_dt.bias": "heads * delta",
    "ssm_g_a.weight": "delta, width",
    "ssm_g_b.weight": "heads * delta, delta",
    "ssm_norm.weight": "delta",
    "attn_output.weight": "width, heads * delta",
}
TAPS = {f"ssm_conv1d_{name}.weight": lambda n, shape: n.normal(shape, 0.6) for name in "qkv"}
LIGHTNING = {
    "attn_norm_2.weight": "heads * head_dim",
    "attn_qkv.weight": "3 * heads * head_dim, width",
    "attn_gate.weight": "heads * head_dim, width",
    "attn_output.weight": "width, heads * head_dim",
}


def plamo2(attends: str, whole: Shapes, **dims):
    """attends: names of layers, one letter each, and "a" attends."""

    def layer(d: Dims, number: int) -> Shapes:
        mix = {**JOINED, **OWN_NORMS} if attends[number % len(attends)] == "a" else SCANNED
        return {**NORMS, **mix, **BEHIND, **HALVES}

    def metadata(d: Dims) -> dict:
        kinds = [attends[number % len(attends)] == "a" for number in range(d.layers)]
        heads = {"attention.head_count": [d.heads * a for a in kinds]}
        return {**ssm(d), **heads, "attention.head_count_kv": [d.kv_heads * a for a in kinds], "rope.freq_base": 5e4}

    sizes = {"inner": 96, "state": 12, "taps": 4, "rank": 6, "groups": 0, "heads": 4, "kv_heads": 2, "head_dim": 32}
    return declare("plamo2", layer, whole, metadata, AROUND_ONE, **{**sizes, "layers": len(attends), **dims})


def kimi(kinds: str, recurrent: Shapes, **dims):
    """kinds: of layers, "a" attends. The first has no experts."""

    def layer(d: Dims, number: int) -> Shapes:
        mix = {**QUERIES, **LATENT, **ABSORBED} if kinds[number % len(kinds)] == "a" else recurrent
        return {**NORMS, **mix, **({**EXPERTS, **ROUTER_BIAS, **SHARED_EXPERT} if number else GATED)}

    def metadata(d: Dims) -> dict:
        lengths = {
            "key_length": d.kv_rank + d.rotated,
            "key_length_mla": d.nope + d.rotated,
            "value_length_mla": d.value,
        }
        found = {f"attention.{name}": length for name, length in lengths.items()} | {
            "attention.kv_lora_rank": d.kv_rank
        }
        found["attention.head_count_kv"] = [int(kinds[number % len(kinds)] == "a") for number in range(d.layers)]
        found |= {"ssm.conv_kernel": d.taps, "kda.head_dim": d.delta, "expert_weights_scale": 2.446}
        found |= {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2}
        return found

    sizes = {
        "heads": 3,
        "kv_heads": None,
        "kv_rank": 48,
        "nope": 24,
        "value": 20,
        "rotated": 16,
        "delta": 24,
        "taps": 4,
    }
    sizes |= {"expert_hidden": 40, "shared_hidden": 40, "layers": len(kinds), **FOUR}
    return declare("kimi-linear", layer, UNTIED, metadata, TAPS, **{**sizes, **dims})


def minimax01(more: dict, whole: Shapes, interval: int, **dims):
    def layer(d: Dims, number: int) -> Shapes:
        mix = LIGHTNING if (number + 1) % interval else ATTENTION
        return {**NORMS, **mix, **EXPERTS}

    metadata = {"residual_scale": 2.3, "rope.freq_base": 1e6, **more}
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "rotated": 16, "hidden": 48, **FOUR}
    return declare("minimax-01", layer, whole, metadata, **{**sizes, **dims})


JOINED_DELTA = {
    **{name: shape for name, shape in DELTA.items() if name[:7] not in ("attn_q.", "attn_k.", "attn_v.")},
    "attn_qkv.weight": "3 * heads * delta, width",
}
LINEAR = {
    "plamo2": plamo2("amma", TIED),
    "plamo2_untied": plamo2("am", UNTIED, rank=4, heads=6, kv_heads=3, head_dim=16),
    "plamo3": declare(
        "plamo3", {**NORMS, **JOINED, **HEAD_NORMS, **BEHIND, **HALVES}, TIED,
        {"rope.freq_base": 1e6, "rope.freq_base_swa": 2e4, "attention.sliding_window_pattern": 3}, AROUND_ONE,
        layers=4, heads=4, kv_heads=2, head_dim=32, window=13,
    ),
    "plamo3_whole": declare(
        "plamo3", {**NORMS, **JOINED, **HEAD_NORMS, **BEHIND, **HALVES}, UNTIED, {"rope.freq_base": 5e4}, AROUND_ONE,
    ),
    "kimi_linear": kimi("mmam", DELTA),
    "kimi_linear_joined": kimi("ma", JOINED_DELTA, delta=32),
    "minimax_01": minimax01({"full_attention_interval": 3}, UNTIED, 3, layers=4),
    "minimax_01_listed": minimax01(
        {"attention.recurrent_layers": [True, False]}, TIED, 2, layers=2, heads=6,
        kv_heads=3, width=64,
    ),
}  # fmt: skip
