"""Tensors of layers that many architectures share: names and shapes."""

from .declaration import Shapes

ATTENTION = {
    "attn_q.weight": "heads * head_dim, width",
    "attn_k.weight": "kv_heads * head_dim, width",
    "attn_v.weight": "kv_heads * value_dim, width",
    "attn_output.weight": "width, heads * value_dim",
}
JOINED = {
    "attn_qkv.weight": "(heads + 2 * kv_heads) * head_dim, width",
    "attn_output.weight": "width, heads * head_dim",
}
HEAD_NORMS = {"attn_q_norm.weight": "head_dim", "attn_k_norm.weight": "head_dim"}
WHOLE_NORMS = {"attn_q_norm.weight": "heads * head_dim", "attn_k_norm.weight": "kv_heads * head_dim"}
PLAIN = {"ffn_up.weight": "hidden, width", "ffn_down.weight": "width, hidden"}
GATED = {"ffn_gate.weight": "hidden, width", **PLAIN}
HALVES = {"ffn_up.weight": "2 * hidden, width", "ffn_down.weight": "width, hidden"}  # gate and up in one
EXPERTS = {
    "ffn_gate_inp.weight": "experts, width",
    "ffn_gate_exps.weight": "experts, expert_hidden, width",
    "ffn_up_exps.weight": "experts, expert_hidden, width",
    "ffn_down_exps.weight": "experts, width, expert_hidden",
}
SHARED_EXPERT = {
    "ffn_gate_shexp.weight": "shared_hidden, width",
    "ffn_up_shexp.weight": "shared_hidden, width",
    "ffn_down_shexp.weight": "width, shared_hidden",
}


def norms(*names: str) -> dict[str, str]:
    """Norms over the width."""
    return {f"{name}.weight": "width" for name in names}


ATTN_NORM = norms("attn_norm")
NORMS = norms("attn_norm", "ffn_norm")
POST_NORMS = norms("post_attention_norm", "post_ffw_norm")


def biased(shapes: Shapes, *names: str) -> dict[str, str]:
    """Return the tensors and biases for some of them, or for all."""
    chosen = [f"{name}.weight" for name in names] or list(shapes)
    biases = {name.replace(".weight", ".bias"): shapes[name].rpartition(", ")[0] or shapes[name] for name in chosen}
    return {**shapes, **biases}
