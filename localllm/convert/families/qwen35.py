"""Qwen3-Next and Qwen 3.5, with experts and without: most layers have the gated delta rule."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.family import DerivedTensor, Dimensions, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.layers import ATTENTION, HEAD_NORMS, SHARED_EXPERT, experts_of, mtp_layer
from localllm.convert.tensor_functions import FUNCTIONS
from localllm.convert.tensors import (
    Shape,
    TensorSource,
    as_float32,
    column,
    flat,
    from_array,
    map_values,
    permute_columns,
    pick_rows,
)

KINDS = {"linear_attention": False, "full_attention": True}


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read attention with gated queries, and the delta rule."""
    h = declared(config)
    keys, values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    key_dim, value_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    kernel = config.count("linear_conv_kernel_dim", 4)
    if values % keys:
        raise config.refusal(f"{values} heads cannot share the keys of {keys}")
    attends, interval = attending(config, h.sizes["layers"])
    sizes = {
        "both_queries": 2 * h.sizes["queries"],
        "key_heads": keys,
        "value_heads": values,
        "rule_values": values * value_dim,
        "value_dim": value_dim,
        "key_dim": key_dim,
        "convolved": 2 * keys * key_dim + values * value_dim,
        "all_four": 2 * (keys * key_dim + values * value_dim),
        "both_strengths": 2 * values,
        "kernel": kernel,
        "one": 1,
        "mtp_layers": int(config.get("mtp_num_hidden_layers", 1) != 0),
        "both_inputs": 2 * h.sizes["width"],
        **{f"attends_{number}": int(does) for number, does in enumerate([*attends, True])},
    }
    return h.updated(
        sizes,
        attention__key_length=h.sizes["head_dim"],
        attention__value_length=h.sizes["head_dim"],
        attention__recurrent_layers=None if config.get("layer_types") is None else [not does for does in attends],
        full_attention_interval=interval,
        ssm__conv_kernel=kernel,
        ssm__state_size=key_dim,
        ssm__group_count=keys,
        ssm__time_step_rank=values,
        ssm__inner_size=values * value_dim,
    )


def attending(config: Config, layers: int) -> tuple[list[bool], int]:
    """Mark the layers with attention; also returns their period, for files that do not list them."""
    interval, kinds = config.count("full_attention_interval", 4), config.get("layer_types")
    if kinds is None:
        return [(number + 1) % interval == 0 for number in range(layers)], interval
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= KINDS.keys():
        raise config.refusal(f"layer_types should be {' or '.join(KINDS)} for each of {layers} layers")
    return [KINDS[kind] for kind in kinds], interval


def qwen3next(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Qwen3-Next: experts in every layer, next to a shared one."""
    return with_qwen_experts(config, read(config, declared))


def qwen35(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Qwen 3.5: M-RoPE."""
    return read(with_sections(config), declared)


def qwen35moe(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    return with_qwen_experts(config, qwen35(config, declared))


def with_sections(config: Config) -> Config:
    """Add the family's M-RoPE sections."""
    rope = config.section("rope_parameters").content
    return config.updated(rope_parameters={"mrope_section": [11, 11, 10], **rope})


def with_qwen_experts(config: Config, h: CheckpointFacts) -> CheckpointFacts:
    for name, value in (("norm_topk_prob", True), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        config.only(name, value)
    shared = config.count("shared_expert_intermediate_size")
    h = with_experts(config, h, "moe_intermediate_size")
    return h.updated(
        {"shared_hidden": shared, "both_hidden": 2 * h.sizes["expert_hidden"]},
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_feed_forward_length=shared,
    )


def of_rule(
    name: str, *dimensions: str, order: Callable[[Sizes], np.ndarray], stored: Dimensions = ()
) -> DerivedTensor:
    """Declare a tensor of the delta rule; order: numbers of its stored rows; stored: its stored shape if it differs."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        numbers = order(sizes)
        matrix = sources[0] if len(shape) > 1 else column(sources[0])
        sorted_rows = pick_rows(matrix, shape, lambda rows: numbers[rows])
        return sorted_rows if len(shape) > 1 else flat(replace(sorted_rows, shape=(*shape, 1)))

    return DerivedTensor(dimensions, {f"linear_attn.{name}": stored or dimensions}, build)


def interleave_heads(sizes: Sizes, length: int, start: int = 0) -> np.ndarray:
    """Order rows of value heads, `length` each, by their place within groups that share keys: int [rows]."""
    groups = np.arange(sizes["value_heads"] * length).reshape(sizes["key_heads"], -1, length)
    return start + groups.transpose(1, 0, 2).ravel()


def interleave_values(sizes: Sizes) -> np.ndarray:
    """Order the rows of values, which follow queries and keys, as interleave_heads does."""
    keys = 2 * sizes["key_heads"] * sizes["key_dim"]
    return np.concatenate([np.arange(keys), interleave_heads(sizes, sizes["value_dim"], keys)])


def of_groups(number: slice) -> Callable[[Sizes], np.ndarray]:
    """Order rows of groups (a query, a key, values and their gates) by part; number: the part."""

    def order(sizes: Sizes) -> np.ndarray:
        groups = np.arange(sizes["all_four"]).reshape(sizes["key_heads"], -1)
        values = (groups.shape[1] - 2 * sizes["key_dim"]) // 2
        ends = np.cumsum([sizes["key_dim"], sizes["key_dim"], values])
        return np.concatenate([part.ravel() for part in np.split(groups, ends, axis=1)[number]])

    return order


def interleave_columns(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return permute_columns(sources[0], interleave_heads(sizes, sizes["value_dim"]))


def rates(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return from_array(as_float32(FUNCTIONS["decay"](sources, shape, sizes).rows(0, 1), "F32").reshape(-1))


def interleave_rates(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    numbers = as_float32(FUNCTIONS["decay"](sources, shape, sizes).rows(0, 1), "F32").reshape(-1)
    return from_array(numbers[interleave_heads(sizes, 1)])


def same(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return sources[0]


HEADS, TAPS = ("value_heads",), ("convolved", "one", "kernel")
NORM: Layer = {"ssm_norm": DerivedTensor(("value_dim",), {"linear_attn.norm.weight": ("value_dim",)}, same)}
WIDE = ("all_four", "width")
RULE_OF_NEXT: Layer = {
    **NORM,
    "attn_qkv": of_rule("in_proj_qkvz.weight", "convolved", "width", order=of_groups(slice(0, 3)), stored=WIDE),
    "attn_gate": of_rule("in_proj_qkvz.weight", "rule_values", "width", order=of_groups(slice(3, 4)), stored=WIDE),
    "ssm_ba": ("both_strengths", "width"),
    "ssm_conv1d": DerivedTensor(("convolved", "kernel"), {"linear_attn.conv1d.weight": TAPS}, FUNCTIONS["reshape"]),
    "ssm_dt.bias": DerivedTensor(HEADS, {"linear_attn.dt_bias": HEADS}, same),
    "ssm_a": DerivedTensor(HEADS, {"linear_attn.A_log": HEADS}, rates),
    "ssm_out": ("width", "rule_values"),
}
BY_ONE = lambda sizes: interleave_heads(sizes, 1)  # noqa: E731
RULE: Layer = {
    **NORM,
    "attn_qkv": of_rule("in_proj_qkv.weight", "convolved", "width", order=interleave_values),
    "attn_gate": of_rule(
        "in_proj_z.weight", "rule_values", "width", order=lambda sizes: interleave_heads(sizes, sizes["value_dim"])
    ),
    "ssm_alpha": of_rule("in_proj_a.weight", "value_heads", "width", order=BY_ONE),
    "ssm_beta": of_rule("in_proj_b.weight", "value_heads", "width", order=BY_ONE),
    "ssm_conv1d": of_rule("conv1d.weight", "convolved", "kernel", order=interleave_values, stored=TAPS),
    "ssm_dt.bias": of_rule("dt_bias", "value_heads", order=BY_ONE),
    "ssm_a": DerivedTensor(HEADS, {"linear_attn.A_log": HEADS}, interleave_rates),
    "ssm_out": DerivedTensor(
        ("width", "rule_values"), {"linear_attn.out_proj.weight": ("width", "rule_values")}, interleave_columns
    ),
}
BESIDE: Layer = {**SHARED_EXPERT, "ffn_gate_inp_shexp": ("one", "width")}
ATTENDING: Layer = {**ATTENTION, **HEAD_NORMS, "attn_q": ("both_queries", "width")}
NORMS: Layer = {"attn_norm": ("width",), "post_attention_norm": ("width",)}


def mixture(sizes: Sizes) -> Layer:
    return {**experts_of(sizes, "mlp.experts"), **BESIDE}


def with_offsets(layer: Layer) -> Layer:
    """Declare the norms of a multi-token prediction layer, which multiply by 1 + weight."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return map_values(sources[0], lambda numbers: numbers + 1)

    return {name: replace(its, build=build) if "norm" in name else its for name, its in layer.items()}  # type: ignore[type-var]


IN_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
MTP = re.compile(r"(?:model\.)?mtp\.(?:layers\.0\.)?(.+)")


def with_mtp(name: str, layers: int) -> str:
    """Rename multi-token prediction tensors to those of a layer after the others."""
    match = MTP.fullmatch(name)
    if not match:
        return name
    module, _, kind = match[1].rpartition(".")
    return f"model.layers.{layers}.{IN_MTP.get(module, module)}.{kind}"


def layer(sizes: Sizes, number: int) -> Layer:
    """List the tensors of a layer of Qwen 3.5 without its feed-forward network."""
    mixer = ATTENDING if sizes[f"attends_{number}"] else RULE
    return {**NORMS, **mixer, **with_offsets(mtp_layer(sizes, number))}


def layer_of_next(sizes: Sizes, number: int) -> Layer:
    """List those of Qwen3-Next, which stores the delta rule's matrices in other orders."""
    mixer = ATTENDING if sizes[f"attends_{number}"] else RULE_OF_NEXT
    return {**NORMS, **mixer, **with_offsets(mtp_layer(sizes, number))}


def experts(sizes: Sizes, number: int) -> Layer:
    return mixture(sizes)
