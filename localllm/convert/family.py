"""Declare how the checkpoints of an architecture become GGUF files."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from localllm.convert.hyperparameters import CheckpointHyperparameters, Reader
from localllm.convert.safetensors_files import StoredTensor
from localllm.convert.transforms import FUNCTIONS, Build, Shape, Sizes, TensorSource, take_strided, transpose
from localllm.frozen import frozen

Dimensions = tuple[str, ...]  # a shape, by names of CheckpointFacts.sizes
NUMBERS, BYTES = ("F64", "F32", "F16", "BF16"), ("U8",)  # safetensors types


@frozen
class DerivedTensor:
    """A GGUF tensor that is computed from stored tensors, or stored under another name or shape."""

    dimensions: Dimensions
    of: Mapping[str, Dimensions]  # stored names, after the layer's number, and their shapes
    build: Build
    dtypes: tuple[str, ...] = NUMBERS
    needed: bool = True


Layer = Mapping[str, Dimensions | DerivedTensor]  # by GGUF names without "blk.N." and ".weight"


@frozen
class CheckpointFamily:
    """The declaration of an architecture's checkpoints: tensors, row orders and hyperparameters.

    Every matrix may have a bias.
    """

    arch: str  # general.architecture
    layer: Callable[[Sizes, int], Layer]  # returns a layer's tensors, by sizes and index
    read: Reader
    whole: Layer | Callable[[Sizes], Layer] = field(default_factory=dict)  # further tensors outside layers
    last_norm: str = "output_norm"  # "": the norm has no weights
    rotated: tuple[str, ...] = ()  # matrices that rotate halves of a head, where GGUF rotates pairs
    parted: tuple[str, ...] = ()  # matrices that rotate pairs, where GGUF rotates halves
    transposed: tuple[str, ...] = ()  # matrices that are stored transposed
    offset_norms: bool = False  # norms multiply by 1 + weight
    biased: tuple[str, ...] = ()  # tensors that must have a bias
    bare: tuple[str, ...] = ()  # tensors whose GGUF names do not end with .weight
    defaults: Mapping[str, object] = field(default_factory=dict)  # values that config.json may omit
    sees: bool = False  # has vision tensors, which are ignored
    decodes: bool = True  # computes logits: has an output norm, and an output matrix unless tied
    prefixes: tuple[str, ...] = ()  # prefixes of tensor names that are removed
    renamed: Mapping[str, str] = field(default_factory=dict)  # stored to GGUF names, both without suffix
    unread: re.Pattern[str] | None = None  # names, without prefixes, of tensors that are ignored
    projects: bool = False  # may have Dense modules after pooling
    named_as: str = ""  # architecture whose tensor names gguf's table has, if it lacks this one
    vocabulary: str = ""  # tokenizer.ggml.model of SentencePiece vocabularies, if not "llama"
    named: Callable[[str, int], str] | None = None  # maps a tensor's name and the number of layers to a name gguf knows
    more: Mapping[str, object] = field(default_factory=dict)  # metadata with full keys
    of_tensors: Callable[[Mapping[str, StoredTensor], CheckpointHyperparameters], Mapping[str, object]] | None = (
        None  # more metadata
    )


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
PACKED_SHAPES = {
    PACKED: (("experts", "both_hidden", "width"), ("experts", "width", "expert_hidden")),
    TRANSPOSED: (("experts", "width", "both_hidden"), ("experts", "expert_hidden", "width")),
}


def list_expert_tensors(sizes: Sizes, prefix: str) -> Layer:
    """List the tensors of experts, stored as one tensor per expert or as stacks.

    In a stack, gate and up projections are the two halves of one matrix. prefix: of their names in the checkpoint.
    """
    if not sizes["packed"]:
        return EXPERTS
    is_transposed, (both, down) = sizes["packed"] == TRANSPOSED, PACKED_SHAPES[sizes["packed"]]

    def whole(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return transpose(sources[0]) if is_transposed else sources[0]

    def half(number: int) -> DerivedTensor:
        def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
            return take_strided(whole(sources, shape, sizes), shape, 2 * shape[-2], number * shape[-2])

        return DerivedTensor(EXPERTS["ffn_up_exps"], {f"{prefix}.gate_up_proj": both}, build)

    of_down = DerivedTensor(EXPERTS["ffn_down_exps"], {f"{prefix}.down_proj": down}, whole)
    return {**EXPERTS, "ffn_gate_exps": half(0), "ffn_up_exps": half(1), "ffn_down_exps": of_down}


ROTATED = ("attn_q", "attn_k")  # matrices that GGUF rotates by adjacent pairs


def list_mtp_tensors(sizes: Sizes, number: int) -> Layer:
    """List what a multi-token prediction layer adds to an ordinary one, under DeepSeek's names.

    Embedding, norm and output matrix are optional, because the model's own can be used.
    """
    if number < sizes["layers"] - sizes["mtp_layers"]:
        return {}
    return {
        "nextn.eh_proj.weight": rename_tensor("eh_proj", "width", "both_inputs"),
        "nextn.enorm.weight": rename_tensor("enorm", "width"),
        "nextn.hnorm.weight": rename_tensor("hnorm", "width"),
        "nextn.embed_tokens.weight": rename_tensor("embed_tokens", "vocab", "width", needed=False),
        "nextn.shared_head_norm.weight": rename_tensor("shared_head.norm", "width", needed=False),
        "nextn.shared_head_head.weight": rename_tensor("shared_head.head", "vocab", "width", needed=False),
    }


def rename_tensor(name: str, *dimensions: str, needed: bool = True) -> DerivedTensor:
    """Declare a tensor of a layer that is stored under another name."""
    return DerivedTensor(dimensions, {f"{name}.weight": dimensions}, FUNCTIONS["same"], needed=needed)


def keep_tensor(name: str, *dimensions: str) -> DerivedTensor:
    """Declare a tensor of a layer whose stored name is `name` and whose values are unchanged."""
    return DerivedTensor(dimensions, {name: dimensions}, FUNCTIONS["same"])


def keep_float32(name: str, *dimensions: str) -> DerivedTensor:
    """Declare a matrix that is converted to F32 whatever format it is stored in."""
    return DerivedTensor(dimensions, {name: dimensions}, FUNCTIONS["full"])
