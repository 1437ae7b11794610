"""Models that fill masked places: tokens see those behind them."""

from .declaration import TIED, UNTIED, declare
from .experts import FOUR
from .parts import ATTENTION, EXPERTS, GATED, HEAD_NORMS, NORMS, biased

QKV = ("attn_q", "attn_k", "attn_v")
MIXED = {**NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS}
ROUND = {"attention.causal": False, "rope.freq_base": 5e4}
MASKED = {
    "llada": declare("llada", {**NORMS, **ATTENTION, **GATED}, UNTIED, ROUND, kv_heads=None),
    "dream": declare("dream", {**NORMS, **biased(ATTENTION, *QKV), **GATED}, TIED, ROUND, heads=4, kv_heads=2),
    "llada_moe": declare("llada-moe", MIXED, UNTIED, ROUND, kv_heads=3, expert_hidden=40, **FOUR),
    "rnd1": declare("rnd1", MIXED, TIED, ROUND, heads=4, kv_heads=2, head_dim=32, expert_hidden=40, **FOUR),
}
