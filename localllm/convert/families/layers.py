"""What layers hold, in parts that architectures share: names in GGUF, and shapes by the names of sizes."""

ATTENTION = {
    "attn_q": ("queries", "width"),
    "attn_k": ("keys", "width"),
    "attn_v": ("keys", "width"),
    "attn_output": ("width", "queries"),
}
HEAD_NORMS = {"attn_q_norm": ("head_dim",), "attn_k_norm": ("head_dim",)}
FEED_FORWARD = {"ffn_up": ("hidden", "width"), "ffn_down": ("width", "hidden")}
GATED = {"ffn_gate": ("hidden", "width"), **FEED_FORWARD}
NORMS_BEFORE = {"attn_norm": ("width",), "ffn_norm": ("width",)}
NORMS_BEHIND = {"post_attention_norm": ("width",), "post_ffw_norm": ("width",)}
EXPERTS = {
    "ffn_gate_inp": ("experts", "width"),
    "ffn_gate_exps": ("experts", "expert_hidden", "width"),
    "ffn_up_exps": ("experts", "expert_hidden", "width"),
    "ffn_down_exps": ("experts", "width", "expert_hidden"),
}
SHARED_EXPERT = {
    "ffn_gate_shexp": ("shared_hidden", "width"),
    "ffn_up_shexp": ("shared_hidden", "width"),
    "ffn_down_shexp": ("width", "shared_hidden"),
}

ROTATED = ("attn_q", "attn_k")  # by pairs of neighbours
