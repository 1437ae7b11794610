"""Read checkpoints of Mamba and of hybrids that combine attention with Mamba, Mamba 2 or convolutions.

The hybrids are Jamba, Granite 4, Bamba, Falcon H1, LFM2 and Nemotron H. A layer has at most one of these mixers, except
in Falcon H1, whose layers have attention and Mamba 2 in parallel.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from localllm.arch.metadata import MAX_LAYERS
from localllm.convert.config import CheckpointConfig
from localllm.convert.family import ATTENTION, DerivedTensor, Layer
from localllm.convert.hyperparameters import (
    CheckpointHyperparameters,
    Reader,
    add_experts,
    count_rotary_dims,
    name_layer_sizes,
    read_layer_types,
    refuse_other_activations,
)
from localllm.convert.transforms import FUNCTIONS, Shape, Sizes, TensorSource, as_float32, from_array, to_column

CONTEXT = 1 << 20  # unlimited; GGUF's readers need a value


def read_mamba(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Mamba (Gu and Dao 2023, arXiv 2312.00752). Raises ModelError."""
    refuse_other_activations(config, ("silu", "swish"))
    config.require_value("use_conv_bias", True)
    width = config.read_count("hidden_size")
    inner, state = config.read_count("intermediate_size", 2 * width), config.read_count("state_size", 16)
    rank = config.get("time_step_rank")
    rank = -(-width // 16) if rank in (None, "auto") else config.read_count("time_step_rank")
    kernel, layers = config.read_count("conv_kernel", 4), config.read_count("num_hidden_layers", maximum=MAX_LAYERS)
    if inner != 2 * width:
        raise config.make_error(f"intermediate_size must be twice the hidden_size {width} (found {inner})")
    sizes = {
        "vocab": config.read_count("vocab_size"),
        "layers": layers,
        "width": width,
        "inner": inner,
        "both_inner": 2 * inner,
        "state": state,
        "kernel": kernel,
        "rank": rank,
        "rank_and_states": rank + 2 * state,
        "one": 1,
    }
    metadata = {
        **describe_recurrent(config, layers, width),
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
        "ssm.dt_b_c_rms": False,
    }
    return CheckpointHyperparameters(sizes, metadata, {}, config.read_flag("tie_word_embeddings"))


def describe_recurrent(config: CheckpointConfig, layers: int, width: int) -> dict[str, Any]:
    """Build the metadata of models without attention."""
    return {
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": width,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.read_number("layer_norm_epsilon", 1e-5),
    }


def read_falcon_mamba(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Falcon Mamba: Mamba with norms on the inputs of the scan."""
    h = read_mamba(config, declared)
    config.require_value("mixer_rms_eps", config.read_number("layer_norm_epsilon", 1e-5))
    return h.update(ssm__dt_b_c_rms=True)


def read_state_sizes(config: CheckpointConfig, inner: int, prefix: str, names: dict[str, str]) -> dict[str, int]:
    """Read the sizes of a Mamba 2 layer. Raises ModelError if they contradict each other.

    inner: width of the scan. names: keys of config.json, by what they hold. prefix: of these keys.
    """
    heads, head_dim, groups, state, kernel = (config.read_count(prefix + names[name]) for name in names)
    if inner != heads * head_dim or inner % groups or heads % groups:
        raise config.make_error(
            f"{heads} heads of dimension {head_dim} in {groups} groups do not match the inner width {inner}"
        )
    return {
        "state_heads": heads,
        "groups": groups,
        "state": state,
        "inner": inner,
        "inner_of_group": inner // groups,
        "convolved": inner + 2 * groups * state,
        "into_state": 2 * inner + 2 * groups * state + heads,
        "kernel": kernel,
        "one": 1,
    }


def add_state_metadata(h: CheckpointHyperparameters, sizes: dict[str, int]) -> CheckpointHyperparameters:
    """Add Mamba 2's sizes and their GGUF keys, ssm.*."""
    return h.update(
        sizes,
        ssm__conv_kernel=sizes["kernel"],
        ssm__inner_size=sizes["inner"],
        ssm__state_size=sizes["state"],
        ssm__time_step_rank=sizes["state_heads"],
        ssm__group_count=sizes["groups"],
    )


MAMBA2_KEYS = {"heads": "num_heads", "dim": "head_dim", "groups": "n_groups", "state": "state_size",
             "kernel": "conv_kernel"}  # fmt: skip
HYBRID_KEYS = {"heads": "n_heads", "dim": "d_head", "groups": "n_groups", "state": "d_state", "kernel": "d_conv"}


def read_mamba2(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Mamba 2 (Dao and Gu 2024, arXiv 2405.21060)."""
    refuse_other_activations(config, ("silu", "swish"))
    config.require_value("use_conv_bias", True)
    config.require_value("use_bias", False)
    config.require_value("rms_norm", True)
    width, layers = config.read_count("hidden_size"), config.read_count("num_hidden_layers", maximum=MAX_LAYERS)
    sizes = read_state_sizes(config, config.read_count("expand", 2) * width, "", MAMBA2_KEYS)
    metadata = describe_recurrent(config, layers, width)
    sizes_of_model = {"vocab": config.read_count("vocab_size"), "layers": layers, "width": width}
    return add_state_metadata(
        CheckpointHyperparameters(sizes_of_model, metadata, {}, config.read_flag("tie_word_embeddings")), sizes
    )


def convert_rates(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Convert logarithms of decay rates, a stored vector, to GGUF's column of negative rates."""
    return FUNCTIONS["decay"]([to_column(sources[0])], shape, sizes)


def view_as_rows(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Reshape a stored vector to a matrix."""
    return from_array(as_float32(sources[0].read_rows(0, 1), sources[0].dtype).reshape(shape))


def list_mamba2_tensors(prefix: str) -> Layer:
    """List the tensors of a Mamba 2 layer except its norm.

    prefix: of their stored names.
    """
    return {
        "ssm_in": ("into_state", "width"),
        "ssm_conv1d": DerivedTensor(
            ("convolved", "kernel"), {f"{prefix}.conv1d.weight": ("convolved", "one", "kernel")}, FUNCTIONS["reshape"]
        ),
        "ssm_conv1d.bias": ("convolved",),
        "ssm_dt.bias": DerivedTensor(("state_heads",), {f"{prefix}.dt_bias": ("state_heads",)}, FUNCTIONS["same"]),
        "ssm_a": DerivedTensor(("state_heads", "one"), {f"{prefix}.A_log": ("state_heads",)}, convert_rates),
        "ssm_d": DerivedTensor(
            ("state_heads", "one"), {f"{prefix}.D": ("state_heads",)}, lambda s, shape, _: to_column(s[0])
        ),
        "ssm_out": ("width", "inner"),
    }


def declare_norm(prefix: str) -> Layer:
    """Declare Mamba 2's norm, which applies to each group of heads.

    prefix: of its stored name.
    """
    return {
        "ssm_norm": DerivedTensor(("groups", "inner_of_group"), {f"{prefix}.norm.weight": ("inner",)}, view_as_rows)
    }


MAMBA2, NORM = list_mamba2_tensors("mamba"), declare_norm("mamba")


def add_mamba2(config: CheckpointConfig, h: CheckpointHyperparameters, inner: int) -> CheckpointHyperparameters:
    """Add sizes and metadata of Mamba 2 by the keys of hybrids. Raises ModelError.

    inner: width of the scan.
    """
    config.require_value("mamba_conv_bias", True)
    config.require_value("mamba_proj_bias", False)
    heads, groups = config.read_count("mamba_n_heads"), config.read_count("mamba_n_groups")
    if inner != heads * config.read_count("mamba_d_head") or heads % groups:
        raise config.make_error(f"{heads} heads in {groups} groups do not match the inner width {inner}")
    kernel = config.read_count("mamba_d_conv", 4)
    sizes = read_state_sizes(config.update(mamba_d_conv=kernel), inner, "mamba_", HYBRID_KEYS)
    state = sizes.pop("state")
    return h.update(
        sizes,
        ssm__conv_kernel=kernel,
        ssm__state_size=state,
        ssm__group_count=groups,
        ssm__inner_size=inner,
        ssm__time_step_rank=heads,
    )


def mark_attention_layers(h: CheckpointHyperparameters, attends: Sequence[bool]) -> CheckpointHyperparameters:
    """Give key heads to the layers with attention, and 0 to all others."""
    kv_heads = [h.sizes["kv_heads"] if does else 0 for does in attends]
    return h.update(name_layer_sizes("attends", attends), attention__head_count_kv=kv_heads)


def list_mamba2_layer_tensors(sizes: Sizes, number: int) -> Layer:
    return {**list_mamba2_tensors("mixer"), **declare_norm("mixer")}


def read_jamba(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Jamba: Mamba layers and attention without RoPE; experts in every few layers."""
    h = declared(config)
    layers, width = h.sizes["layers"], h.sizes["width"]
    kernel, state = config.read_count("mamba_d_conv", 4), config.read_count("mamba_d_state", 16)
    inner, rank = config.read_count("mamba_expand", 2) * width, config.get("mamba_dt_rank")
    rank = -(-width // 16) if rank in (None, "auto") else config.read_count("mamba_dt_rank")
    sizes = {"kernel": kernel, "state": state, "inner": inner, "both_inner": 2 * inner, "rank": rank, "one": 1}
    sizes |= {"rank_and_states": rank + 2 * state, "expert_hidden": h.sizes["hidden"]}
    experts, every = config.read_count("num_experts", 16), mark_periodic(config, "expert", layers, 2, 1)
    sizes |= {"experts": experts} | name_layer_sizes("mixes", [does and experts > 1 for does in every])
    h = mark_attention_layers(h.update(sizes), mark_periodic(config, "attn", layers, 8, 4))
    return h.update(
        ssm__conv_kernel=kernel,
        ssm__state_size=state,
        ssm__inner_size=inner,
        ssm__time_step_rank=rank,
        expert_count=experts,
        expert_used_count=config.read_count("num_experts_per_tok", 2),
    )


def mark_periodic(config: CheckpointConfig, name: str, layers: int, period: int, offset: int) -> list[bool]:
    """Mark every `period`-th layer from `offset` on.

    name: prefix of the keys that override both. Raises ModelError.
    """
    period, offset = config.read_count(f"{name}_layer_period", period), config.get(f"{name}_layer_offset", offset)
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise config.make_error(f"{name}_layer_offset must be below {name}_layer_period, {period}")
    return [number % period == offset for number in range(layers)]


GRANITE_KINDS = {"mamba": False, "attention": True, "linear_attention": False, "full_attention": True}


def read_granitehybrid(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Granite 4: Mamba 2 layers and attention without RoPE, with or without experts. Raises ModelError."""
    h = declared(config)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    kinds = read_layer_types(config, "layer_types", h.sizes["layers"], GRANITE_KINDS, kinds)
    attends = [GRANITE_KINDS[kind] for kind in kinds]
    if all(attends):
        raise config.make_error("at least one layer must be a Mamba 2 layer in this architecture")
    h = add_mamba2(config, h, config.read_count("mamba_expand", 2) * h.sizes["width"])
    h = mark_attention_layers(h, attends)
    experts, shared = config.read_count("num_local_experts", 0), config.read_count("shared_intermediate_size")
    sizes = {"experts": experts, "shared_hidden": shared, "both_shared": 2 * shared}
    sizes |= {"expert_hidden": h.sizes["hidden"], "both_hidden": 2 * h.sizes["hidden"]}
    h = h.update(
        sizes, context_length=CONTEXT, rope__scaling__finetuned=False, expert_shared_feed_forward_length=shared
    )
    if not experts:
        config.require_value("shared_intermediate_size", h.sizes["hidden"])
    return h.update(expert_count=experts, expert_used_count=config.read_count("num_experts_per_tok", 0))


def read_bamba(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Bamba: Mamba 2 layers, and attention with partial RoPE in some. Raises ModelError."""
    dims = config.get("attn_rotary_emb")
    head_dim = config.read_count("hidden_size") // config.read_count("num_attention_heads")
    renamed = config
    if dims is not None:
        renamed = config.update(partial_rotary_factor=config.read_count("attn_rotary_emb") / head_dim)
    h = declared(renamed)
    indices, layers = config.get("attn_layer_indices"), h.sizes["layers"]
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < layers for index in indices):
        raise config.make_error(f"attn_layer_indices must be a list of some of the {layers} layers")
    rotated_dims = count_rotary_dims(renamed, h.sizes["head_dim"])
    h = add_mamba2(config, h, config.read_count("mamba_expand", 2) * h.sizes["width"])
    h = mark_attention_layers(h.update({"rotated_dims": rotated_dims}), [number in indices for number in range(layers)])
    return h.update(vocab_size=h.sizes["vocab"], rope__dimension_count=rotated_dims, rope__scaling__finetuned=True)


def list_granitehybrid_tensors(sizes: Sizes, number: int) -> Layer:
    return ATTENTION if sizes[f"attends_{number}"] else {**MAMBA2, **NORM}


def read_falcon_h1(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Falcon H1: attention and Mamba 2 in parallel. muP multipliers are folded into the matrices."""
    h = declared(config)
    config.require_value("tie_word_embeddings", False)
    if config.read_flag("mamba_rms_norm", False):
        config.require_value("mamba_norm_before_gate", False)
    inner = config.read_count("mamba_d_ssm", config.read_count("mamba_expand", 2) * h.sizes["width"])
    h = add_state_metadata(h, read_state_sizes(config, inner, "mamba_", HYBRID_KEYS))
    h = h.update({"has_norm": int(config.read_flag("mamba_rms_norm", False))})
    return replace(h, factors=compute_factors(config, h.sizes))


def compute_factors(config: CheckpointConfig, sizes: Sizes) -> dict[str, list[np.ndarray]]:
    """Compute muP's multipliers of each matrix."""

    def factor(name: str) -> np.ndarray:
        return np.array([config.read_number(f"{name}_multiplier", 1.0)], np.float32)

    groups = sizes["groups"] * sizes["state"]
    rows = [sizes["inner"], sizes["inner"], groups, groups, sizes["state_heads"]]
    of_parts = np.array(config.read_numbers("ssm_multipliers", len(rows)), np.float32)
    of_gate, of_down = np.array(config.read_numbers("mlp_multipliers", 2), np.float32)
    attention = factor("attention_in")
    return {
        "token_embd": [factor("embedding")],
        "output": [factor("lm_head")],
        "attn_q": [attention],
        "attn_k": [factor("key"), attention],
        "attn_v": [attention],
        "attn_output": [factor("attention_out")],
        "ffn_gate": [of_gate[None]],
        "ffn_down": [of_down[None]],
        "ssm_in": [factor("ssm_in"), np.repeat(of_parts, rows)],
        "ssm_out": [factor("ssm_out")],
    }


def list_falcon_h1_tensors(sizes: Sizes, number: int) -> Layer:
    return {**MAMBA2, **(NORM if sizes["has_norm"] else {})}


NEMOTRON_KEYS = {"heads": "mamba_num_heads", "dim": "mamba_head_dim", "groups": "n_groups", "state": "ssm_state_size",
               "kernel": "conv_kernel"}  # fmt: skip
STATES, ATTENDS, FEEDS = 0, 1, 2  # types of layers
NEMOTRON_KINDS = {"M": STATES, "*": ATTENDS, "-": FEEDS, "E": FEEDS, "mamba": STATES, "linear_attention": STATES}
NEMOTRON_KINDS |= {"attention": ATTENDS, "full_attention": ATTENDS, "mlp": FEEDS, "moe": FEEDS}
EXPERT_KINDS = ("E", "moe")


def read_nemotron_h(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Nemotron H: layers of attention, Mamba 2, or feed-forward network alone; no RoPE. Raises ModelError."""
    kinds = classify_layers(config)
    renamed = {"num_hidden_layers": len(kinds), "rope_parameters": None, "rope_scaling": None}
    h = declared(config.update(**renamed))
    inner = config.read_count("mamba_num_heads") * config.read_count("mamba_head_dim")
    h = add_state_metadata(h, read_state_sizes(config, inner, "", NEMOTRON_KEYS))
    hidden = config.read_count("moe_intermediate_size") if has_experts(config) else h.sizes["hidden"]
    epsilon = config.read_number(
        "layer_norm_epsilon", config.read_number("rms_norm_eps", config.read_number("norm_eps", 1e-5))
    )
    return h.update(
        name_layer_sizes("kind", kinds) | name_layer_sizes("feeds", [kind == FEEDS for kind in kinds]),
        context_length=CONTEXT,
        feed_forward_length=[hidden if kind == FEEDS else 0 for kind in kinds],
        attention__head_count_kv=[h.sizes["kv_heads"] if kind == ATTENDS else 0 for kind in kinds],
        attention__key_length=h.sizes["head_dim"],
        attention__value_length=h.sizes["head_dim"],
        attention__layer_norm_rms_epsilon=None,
        attention__layer_norm_epsilon=epsilon,
        rope__dimension_count=h.sizes["head_dim"],
        rope__freq_base=None,
        rope__scaling__finetuned=False,
    )


def parse_layer_types(config: CheckpointConfig) -> list[str]:
    """Return the type of each layer as config.json writes it, a letter or a word. Raises ModelError."""
    kinds = config.get("hybrid_override_pattern", config.get("layers_block_type"))
    if not isinstance(kinds, str | list) or not kinds or not {*map(str, kinds)} <= NEMOTRON_KINDS.keys():
        raise config.make_error(f"layers_block_type must be a list of {', '.join(NEMOTRON_KINDS)}")
    return [*kinds]


def classify_layers(config: CheckpointConfig) -> list[int]:
    kinds = parse_layer_types(config)
    config.require_value("num_hidden_layers", len(kinds))
    if {NEMOTRON_KINDS[kind] for kind in kinds} != {STATES, ATTENDS, FEEDS}:
        raise config.make_error("the layers must include attention, Mamba 2 and feed-forward networks")
    if {kind in EXPERT_KINDS for kind in kinds if NEMOTRON_KINDS[kind] == FEEDS} == {True, False}:
        raise config.make_error("all feed-forward networks must have experts, or none")
    return [NEMOTRON_KINDS[kind] for kind in kinds]


def has_experts(config: CheckpointConfig) -> bool:
    """Return whether the feed-forward layers have experts."""
    return any(kind in EXPERT_KINDS for kind in parse_layer_types(config))


def read_nemotron_h_moe(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Nemotron H with experts without gates, and a shared expert."""
    h = add_experts(config, read_nemotron_h(config, declared), "moe_intermediate_size", "n_routed_experts")
    shared = config.read_count("moe_shared_expert_intermediate_size")
    return h.update(
        {"shared_hidden": shared},
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_feed_forward_length=shared,
        expert_shared_count=1,
        expert_weights_norm=config.read_flag("norm_topk_prob", True),
        expert_weights_scale=config.read_number("routed_scaling_factor", 1.0),
        expert_group_count=1,
        expert_group_used_count=1,
    )


def select_nemotron_h(config: CheckpointConfig) -> str:
    """Return the name of the record for Nemotron H with experts, or without."""
    return "NemotronHForCausalLM+experts" if has_experts(config) else "NemotronHForCausalLM"


def list_nemotron_h_tensors(sizes: Sizes, number: int) -> Layer:
    """List the tensors of an attention or Mamba 2 layer; none for a feed-forward layer."""
    kind = sizes[f"kind_{number}"]
    return ATTENTION if kind == ATTENDS else list_mamba2_layer_tensors(sizes, number) if kind == STATES else {}


def read_lfm2(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read LFM2: layers of short convolutions or of attention."""
    epsilon = {"rms_norm_eps": config.read_number("norm_eps", 1e-5), "intermediate_size": compute_hidden_size(config)}
    h = declared(config.update(**epsilon))
    kinds = read_layer_types(config, "layer_types", h.sizes["layers"], ("conv", "full_attention"))
    taps = config.read_count("conv_L_cache", 3)
    sizes = {"taps": taps, "one": 1, "into_gates": 3 * h.sizes["width"]}
    return mark_attention_layers(h.update(sizes), [kind != "conv" for kind in kinds]).update(shortconv__l_cache=taps)


def compute_hidden_size(config: CheckpointConfig) -> int:
    """Return the feed-forward size, rounded as in transformers unless block_auto_adjust_ff_dim is false."""
    hidden = config.read_count("block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size")
    if not config.read_flag("block_auto_adjust_ff_dim", True):
        return hidden
    multiple = config.read_count("block_multiple_of", 256)
    hidden = int(config.read_number("block_ffn_dim_multiplier", 1.0) * int(2 * hidden / 3))
    return -(-hidden // multiple) * multiple


def read_lfm2_moe(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read LFM2 with experts after the first, dense layers."""
    h = read_lfm2(config.update(block_auto_adjust_ff_dim=False), declared)
    leading = config.read_count("num_dense_layers", 2)
    return h.update({"leading_dense": leading}, leading_dense_block_count=leading)
