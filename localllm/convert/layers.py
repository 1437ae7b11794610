"""Groups of a layer's tensors that architectures share: by GGUF names, with shapes as names of sizes."""

from collections.abc import Sequence

from localllm.convert.family import DerivedTensor, Layer, Sizes
from localllm.convert.tensors import Shape, TensorSource, take_strided, to_float32, transpose

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
# By the names that records have for them.
GROUPS: dict[str, Layer] = {
    "attention": ATTENTION,
    "head_norms": HEAD_NORMS,
    "norms_of_each_head": {"attn_q_norm": ("heads", "head_dim"), "attn_k_norm": ("kv_heads", "head_dim")},
    "whole_norms": {"attn_q_norm": ("queries",), "attn_k_norm": ("keys",)},
    "fused_attention": {"attn_qkv": ("fused_rows", "width"), "attn_output": ("width", "queries")},
    "feed_forward": FEED_FORWARD,
    "gated": GATED,
    "fused_gated": {"ffn_up": ("both_hidden", "width"), "ffn_down": ("width", "hidden")},
    "attn_norm": {"attn_norm": ("width",)},
    "second_norm": {"attn_norm_2": ("width",)},
    "ffn_norm": {"ffn_norm": ("width",)},
    "norms": NORMS_BEFORE,
    "norms_behind": NORMS_BEHIND,
    "norms_around": {"attn_norm": ("width",), "post_attention_norm": ("width",)},
    "norms_of_encoder": {"attn_output_norm": ("width",), "layer_output_norm": ("width",)},
    "experts": EXPERTS,
    "shared_expert": SHARED_EXPERT,
    "router_bias": {"exp_probs_b.bias": ("experts",)},
}

PACKED, TRANSPOSED = 1, 2  # ways to store the experts of a layer in one tensor
OF_PACKED = {
    PACKED: (("experts", "both_hidden", "width"), ("experts", "width", "expert_hidden")),
    TRANSPOSED: (("experts", "width", "both_hidden"), ("experts", "expert_hidden", "width")),
}


def experts_of(sizes: Sizes, prefix: str) -> Layer:
    """List experts' tensors, each stored alone or all together; prefix: of names in the checkpoint.

    Together, gate and up projections are halves of one matrix, by rows or by columns.
    """
    if not sizes["packed"]:
        return EXPERTS
    is_transposed, (both, down) = sizes["packed"] == TRANSPOSED, OF_PACKED[sizes["packed"]]

    def whole(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return transpose(sources[0]) if is_transposed else sources[0]

    def half(number: int) -> DerivedTensor:
        def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
            return take_strided(whole(sources, shape, sizes), shape, 2 * shape[-2], number * shape[-2])

        return DerivedTensor(EXPERTS["ffn_up_exps"], {f"{prefix}.gate_up_proj": both}, build)

    of_down = DerivedTensor(EXPERTS["ffn_down_exps"], {f"{prefix}.down_proj": down}, whole)
    return {**EXPERTS, "ffn_gate_exps": half(0), "ffn_up_exps": half(1), "ffn_down_exps": of_down}


ROTATED = ("attn_q", "attn_k")  # matrices that GGUF rotates by adjacent pairs


def mtp_layer(sizes: Sizes, number: int) -> Layer:
    """List the additional tensors of a multi-token prediction layer, under DeepSeek's names.

    Embedding, norm and output matrix may be the model's.
    """
    if number < sizes["layers"] - sizes["mtp_layers"]:
        return {}
    return {
        "nextn.eh_proj.weight": as_stored("eh_proj", "width", "both_inputs"),
        "nextn.enorm.weight": as_stored("enorm", "width"),
        "nextn.hnorm.weight": as_stored("hnorm", "width"),
        "nextn.embed_tokens.weight": as_stored("embed_tokens", "vocab", "width", needed=False),
        "nextn.shared_head_norm.weight": as_stored("shared_head.norm", "width", needed=False),
        "nextn.shared_head_head.weight": as_stored("shared_head.head", "vocab", "width", needed=False),
    }


def as_stored(name: str, *dimensions: str, needed: bool = True) -> DerivedTensor:
    """Declare a layer's tensor that has another name in the checkpoint."""
    return DerivedTensor(
        dimensions, {f"{name}.weight": dimensions}, lambda sources, shape, sizes: sources[0], needed=needed
    )


def as_it_is(name: str, *dimensions: str) -> DerivedTensor:
    """Declare a layer's tensor by its full GGUF name."""
    return DerivedTensor(dimensions, {name: dimensions}, lambda sources, shape, sizes: sources[0])


def in_full(name: str, *dimensions: str) -> DerivedTensor:
    """Declare a matrix that is always F32."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return to_float32(sources[0])

    return DerivedTensor(dimensions, {name: dimensions}, build)
