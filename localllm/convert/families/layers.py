"""What layers hold, in parts that architectures share: names in GGUF, and shapes by the names of sizes."""

from localllm.convert.family import Layer, MadeOf, Sizes

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


def guessing_layer(sizes: Sizes, number: int) -> Layer:
    """What a layer behind the others has besides, which guesses the token behind the next one, in DeepSeek's names.
    Embeddings, norm and output matrix may be the model's."""
    if number < sizes["layers"] - sizes["guessing"]:
        return {}
    return {
        "nextn.eh_proj.weight": as_stored("eh_proj", "width", "both_inputs"),
        "nextn.enorm.weight": as_stored("enorm", "width"),
        "nextn.hnorm.weight": as_stored("hnorm", "width"),
        "nextn.embed_tokens.weight": as_stored("embed_tokens", "vocab", "width", needed=False),
        "nextn.shared_head_norm.weight": as_stored("shared_head.norm", "width", needed=False),
        "nextn.shared_head_head.weight": as_stored("shared_head.head", "vocab", "width", needed=False),
    }


def as_stored(name: str, *dimensions: str, needed: bool = True) -> MadeOf:
    """A tensor of a layer that has another name."""
    return MadeOf(dimensions, {f"{name}.weight": dimensions}, lambda sources, shape, sizes: sources[0], needed=needed)
