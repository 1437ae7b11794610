"""Models of 2026: adapters that tokens switch on, latent experts, blocks of keys."""

from .declaration import TIED, UNTIED, Dims, declare
from .experts import ABSORBED, COMPRESSED_QUERIES, LATENT, QUERIES, ROUTER_BIAS
from .golden import prompt
from .linear import DELTA, TAPS, kimi
from .parts import EXPERTS, GATED, JOINED, NORMS, SHARED_EXPERT

# ---- Granite Switch ----

SWITCHED = {
    "attn_q": ("heads * head_dim", "width"),
    "attn_k": ("kv_heads * head_dim", "width"),
    "attn_v": ("kv_heads * head_dim", "width"),
    "attn_output": ("width", "heads * head_dim"),
    "ffn_gate": ("hidden", "width"),
    "ffn_up": ("hidden", "width"),
    "ffn_down": ("width", "hidden"),
}
ADAPTERS = {f"{name}.lora_a": f"adapters + 1, rank, {columns}" for name, (_, columns) in SWITCHED.items()}
ADAPTERS |= {f"{name}.lora_b": f"adapters + 1, {rows}, rank" for name, (rows, _) in SWITCHED.items()}


def graniteswitch(name: str, places: list[int], whole: dict = TIED, scales: dict | None = None, **dims):
    """Declare Granite Switch; the adapters' tokens are those at some places of the prompt."""

    def metadata(d: Dims) -> dict:
        activating = [int(prompt(name, d.vocab)[place]) for place in places]
        found = {"adapters.count": len(places), "adapters.lora_rank": d.rank, "logit_scale": 1.5, **(scales or {})}
        found |= {"adapters.token_ids_activate": activating}
        return found | {"adapters.token_ids_substitute": [(token + 7) % d.vocab for token in activating]}

    layer = {**NORMS, **JOINED, **GATED, **ADAPTERS}
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 24, "adapters": len(places), "rank": 6, **dims}
    return declare("graniteswitch", layer, whole, metadata, **sizes)


SCALES = {"embedding_scale": 3.0, "residual_scale": 0.7, "attention.scale": 0.25, "adapters.router_gain": 9.0}

# ---- Kimi K3 ----

DELTA_K3 = {name: shape for name, shape in DELTA.items() if not name.startswith(("ssm_g", "ssm_a"))}
DELTA_K3 |= {"ssm_g.weight": "heads * delta, width", "ssm_a": "heads"}
NARROW = {
    "ffn_routed_down.weight": "narrow, width",
    "ffn_routed_up.weight": "width, narrow",
    "ffn_gate_inp.weight": "experts, width",
    "ffn_gate_exps.weight": "experts, expert_hidden, narrow",
    "ffn_up_exps.weight": "experts, expert_hidden, narrow",
    "ffn_down_exps.weight": "experts, narrow, expert_hidden",
    **ROUTER_BIAS,
}


def kimi_k3(kinds: str, queries: dict, mixture: dict, more: dict, **dims):
    """kinds: of layers, "a" attends. The first has no experts."""
    known = kimi(kinds, DELTA_K3)
    scores = {"attn_res_score.weight": "width", "ffn_res_score.weight": "width"}
    period = more.get("attn_res.block_size", 0)

    def layer(d: Dims, number: int) -> dict:
        mix = {**queries, **LATENT, **ABSORBED} if kinds[number] == "a" else DELTA_K3
        return {**NORMS, **mix, **(mixture if number else GATED), **(scores if period else {})}

    def metadata(d: Dims) -> dict:
        found = {**known.metadata(d), "expert_weights_norm": True, "activation.situ_beta": 1.5, **more}
        found |= {"expert_shared_count": 1} if "ffn_up_shexp.weight" in mixture else {"expert_shared_count": 0}
        found |= {"expert_latent_length": d.narrow} if "ffn_routed_up.weight" in mixture else {}
        return found | ({"attention.q_lora_rank": d.q_rank} if "attn_q_a.weight" in queries else {})

    whole = {**UNTIED, **({"output_res_score.weight": "width"} if period else {})}
    return declare("kimi-k3", layer, whole, metadata, TAPS, **{**known.dims, "narrow": 40, "q_rank": 32, **dims})


LATEST = {
    "kimi_k3": kimi_k3(
        "mamma", COMPRESSED_QUERIES | {"attn_gate.weight": "heads * value, width"},
        {**NARROW, "ffn_routed_norm.weight": "narrow", **SHARED_EXPERT},
        {"attn_res.block_size": 2, "activation.situ_linear_beta": 2.5, "kda.gate_lower_bound": -3.0}, layers=5,
    ),
    "kimi_k3_plain": kimi_k3(
        "am", QUERIES, {**EXPERTS, **ROUTER_BIAS},
        {"attn_res.block_size": 0, "activation.situ_linear_beta": 0.0, "expert_gating_func": 1},
        layers=2, delta=32,
    ),
    "graniteswitch": graniteswitch("graniteswitch", [9, 33, 20], scales=SCALES),
    "graniteswitch_plain": graniteswitch(
        "graniteswitch_plain", [9, 30], UNTIED, {"rope.scaling.finetuned": False}, layers=3, rank=5
    ),
}  # fmt: skip
