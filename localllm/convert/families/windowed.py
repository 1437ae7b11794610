"""Mellum 2, Laguna, MiMo-V2, Command A with experts, Granite 4 with windows."""

import re
from collections.abc import Sequence
from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.experts import SIGMOID, SOFTMAX, leading_dense, with_experts
from localllm.convert.families.llama import GRANITE, granite
from localllm.convert.family import Family, Layer, Sizes
from localllm.convert.hyperparameters import SLIDING, CheckpointFacts, decoder, rotary_dims, windows_of
from localllm.convert.layers import (
    ATTENTION,
    EXPERTS,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    ROTATED,
    SHARED_EXPERT,
    as_it_is,
    as_stored,
)

Sized = dict[str, int]


def by_layer(name: str, values: Sequence[int]) -> Sized:
    """Name a size of each layer."""
    return {f"{name}_{number}": int(value) for number, value in enumerate(values)}


def local_rope(config: Config) -> Config:
    """Return RoPE of layers with a window. Raises ModelError if it is scaled, which GGUF's readers do not support."""
    rope = config.section("rope_parameters").section(SLIDING)
    rope.only("rope_type", "default")
    return rope


def mellum(config: Config) -> CheckpointFacts:
    """Read Mellum 2: windows with the same RoPE base; experts in every layer."""
    config.only("norm_topk_prob", True)
    config.only("num_nextn_predict_layers", 0)
    h = decoder(config, scalings=("yarn",))
    layers, base = h.sizes["layers"], h.metadata["rope.freq_base"]
    config.only("mlp_layer_types", ["sparse"] * layers)
    count = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    h = with_experts(config, h, "moe_intermediate_size", count)
    h = h.updated(expert_feed_forward_length=h.sizes["expert_hidden"])
    windows = windows_of(config, layers, period=1)
    if not config.flag("use_sliding_window", True) or config.get("sliding_window") is None:
        config.only("layer_types", ["full_attention"] * layers)
        return h
    rope = local_rope(config)
    rope.only("rope_theta", base)
    return h.updated(
        rope__freq_base_swa=rope.get("rope_theta"),
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows,
    )


ROPE = {"full_attention": {"rope_theta": 5e5}, SLIDING: {"rope_theta": 10000.0}}
MELLUM = Family(
    "mellum",
    {**ATTENTION, **HEAD_NORMS, **NORMS_BEFORE, **EXPERTS},
    mellum,
    named_as="qwen3moe",
    defaults={"head_dim": 128, "norm_topk_prob": True, "sliding_window": 1024, "rope_parameters": ROPE},
)


def laguna(config: Config) -> CheckpointFacts:
    """Read Laguna: the number of heads differs by layer; a gate per head or per number; the first layers are dense."""
    for name, value in (("attention_bias", False), ("moe_apply_router_weight_on_input", False)):
        config.only(name, value)
    config.only("moe_router_logit_softcapping", 0.0)
    h = with_experts(config, decoder(config, scalings=("yarn",), whole_heads=False), "moe_intermediate_size")
    layers, dim, hidden = h.sizes["layers"], h.sizes["head_dim"], h.sizes["expert_hidden"]
    heads = config.get("num_attention_heads_per_layer", [h.sizes["heads"]] * layers)
    if not isinstance(heads, list) or len(heads) != layers or not all(type(n) is int and 0 < n < 1e6 for n in heads):
        raise config.refusal(f"num_attention_heads_per_layer should be {layers} numbers of heads")
    config.only("gating", True, "per-head", "per-element")
    config.only("gating_types", [str(config.get("gating", "per-head")).replace("True", "per-head")] * layers)
    gates = [dim if config.get("gating") == "per-element" else 1] * layers
    windows, shared = windows_of(config, layers, period=1), config.count("shared_expert_intermediate_size")
    sizes = {"shared_hidden": shared, "leading_dense": leading_dense(config)}
    sizes |= by_layer("queries", [n * dim for n in heads])
    sizes |= by_layer("gates", [n * each for n, each in zip(heads, gates, strict=True)])
    h = h.updated(
        sizes,
        vocab_size=h.sizes["vocab"],
        attention__head_count=heads,
        expert_feed_forward_length=hidden,
        expert_shared_feed_forward_length=shared,
        expert_weights_norm=True,
        expert_weights_scale=config.number("moe_routed_scaling_factor", 1.0),
        expert_gating_func=SIGMOID,
        leading_dense_block_count=sizes["leading_dense"],
        rope__dimension_count=rotary_dims(config, dim),
    )
    if not any(windows):
        return h
    rope = local_rope(config)
    if windows != [number % 4 != 0 for number in range(layers)]:
        raise config.refusal("layer_types: windows in other layers than usual are not supported")
    return h.updated(
        attention__sliding_window=config.count("sliding_window"),
        rope__freq_base_swa=rope.number("rope_theta", 10000.0),
        rope__dimension_count_swa=rotary_dims(Config({"rope_parameters": rope.content}, config.path), dim),
    )


def laguna_layer(sizes: Sizes, number: int) -> Layer:
    queries, gates = f"queries_{number}", f"gates_{number}"
    attention: Layer = {**ATTENTION, "attn_q": (queries, "width"), "attn_output": ("width", queries)}
    gate: Layer = {"attn_gate": as_stored("self_attn.g_proj", gates, "width")}
    bias: Layer = {"exp_probs_b.bias": as_it_is("mlp.experts.e_score_correction.bias", "experts")}
    shared: Layer = {
        name: as_stored(f"mlp.shared_expert.{name[4:-6]}_proj", *shape) for name, shape in SHARED_EXPERT.items()
    }
    feeds: Layer = GATED if number < sizes["leading_dense"] else {**EXPERTS, **shared, **bias}
    return {**attention, **gate, **HEAD_NORMS, **NORMS_BEFORE, **feeds}


LAGUNA = Family(
    "laguna",
    laguna_layer,
    laguna,
    named_as="dots1",
    defaults={
        "head_dim": 128,
        "sliding_window": 512,
        "rope_parameters": {**ROPE, "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    },
)


def mimo2(config: Config) -> CheckpointFacts:
    """Read MiMo-V2: other key heads in layers with a window; values shorter than keys."""
    for name, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("norm_topk_prob", True)):
        config.only(name, value)
    for name, value in (("add_swa_attention_sink_bias", True), ("add_full_attention_sink_bias", False)):
        config.only(name, value)
    for name in ("head_dim", "num_attention_heads", "v_head_dim"):
        config.only(f"swa_{name}", config.get(name))
    config.only("n_shared_experts", 0)
    config.only("routed_scaling_factor", 1.0)
    renamed = {"rms_norm_eps": config.number("layernorm_epsilon", 1e-5)}
    h = decoder(config.updated(**renamed), whole_heads=False)
    h = with_experts(config, h, "moe_intermediate_size", "n_routed_experts")
    layers, dim = h.sizes["layers"], config.count("v_head_dim")
    windows, mixes = (flags(config, name, layers) for name in ("hybrid_layer_pattern", "moe_layer_freq"))
    local = config.count("swa_num_key_value_heads", h.sizes["kv_heads"])
    kv_heads = [local if window else h.sizes["kv_heads"] for window in windows]
    scale = config.get("attention_value_scale")
    groups = ("n_group", "topk_group")
    return h.updated(
        {
            **by_layer("keys", [n * h.sizes["head_dim"] for n in kv_heads]),
            **by_layer("values", [n * dim for n in kv_heads]),
            **by_layer("window", windows),
            **by_layer("mixes", mixes),
            "seen": h.sizes["heads"] * dim,
        },
        attention__head_count_kv=kv_heads,
        attention__value_length=dim,
        attention__value_scale=None if scale is None else config.number("attention_value_scale"),
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=[*map(int, windows)],
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_gating_func=SIGMOID,
        expert_group_count=config.get(groups[0]) and config.count(groups[0]),
        expert_group_used_count=config.get(groups[1]) and config.count(groups[1]),
        rope__dimension_count=rotary_dims(config, h.sizes["head_dim"]),
        rope__freq_base_swa=config.number("swa_rope_theta", 10000.0),
    )


def flags(config: Config, name: str, layers: int) -> list[int]:
    """Read a list of 0 or 1 per layer."""
    values = config.get(name)
    if (
        not isinstance(values, list)
        or len(values) != layers
        or not all(type(value) is int and value in (0, 1) for value in values)
    ):
        raise config.refusal(f"{name} should be 0 or 1 for each of {layers} layers")
    return values


def mimo2_layer(sizes: Sizes, number: int) -> Layer:
    attention: Layer = {
        "attn_q": ("queries", "width"),
        "attn_k": (f"keys_{number}", "width"),
        "attn_v": (f"values_{number}", "width"),
        "attn_output": ("width", "seen"),
    }
    sinks: Layer = {"attn_sinks.weight": as_it_is("self_attn.attention_sink_bias", "heads")}
    mixture: Layer = {**EXPERTS, "exp_probs_b.bias": ("experts",)}
    feeds: Layer = mixture if sizes[f"mixes_{number}"] else GATED
    return {**attention, **(sinks if sizes[f"window_{number}"] else {}), **NORMS_BEFORE, **feeds}


MIMO2 = Family("mimo2", mimo2_layer, mimo2, unread=re.compile(r"model\.mtp\..*"))


def cohere2moe(config: Config) -> CheckpointFacts:
    """Read Command A with experts: attention and feed-forward network share a norm; the first layers are dense."""
    for name, value in (("attention_bias", False), ("prefix_dense_sliding_window_pattern", 1)):
        config.only(name, value)
    config.only("shared_expert_combination_strategy", "average")
    config.only("num_nextn_predict_layers", 0)
    function = config.get("expert_selection_fn", "softmax")
    config.only("expert_selection_fn", "softmax", "sigmoid")
    if function == "softmax":  # of the selected experts
        config.only("norm_topk_prob", True)
    hidden = config.count("prefix_dense_intermediate_size", config.count("intermediate_size"))
    h = with_experts(config, decoder(config.updated(intermediate_size=hidden)), "intermediate_size")
    shared, epsilon = config.count("num_shared_experts", 0), config.get("rms_norm_eps")
    centered = {
        "attention__layer_norm_rms_epsilon": None if epsilon is None else h.metadata["attention.layer_norm_rms_epsilon"]
    }
    if epsilon is None or config.get("layer_norm_eps") is not None:
        centered["attention__layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-5)
    leading, of_experts = leading_dense(config), h.sizes["expert_hidden"]
    return h.updated(
        {"leading_dense": leading, "shared_hidden": shared * of_experts},
        vocab_size=h.sizes["vocab"],
        logit_scale=config.number("logit_scale"),
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows_behind(config, h.sizes["layers"], leading),
        expert_feed_forward_length=of_experts,
        expert_gating_func={"softmax": SOFTMAX, "sigmoid": SIGMOID}[function],
        expert_weights_norm=config.flag("norm_topk_prob", True),
        expert_shared_count=shared or None,
        expert_shared_feed_forward_length=shared * of_experts or None,
        leading_dense_block_count=leading,
        rope__dimension_count=h.sizes["head_dim"],
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
        **centered,
    )


def windows_behind(config: Config, layers: int, leading: int) -> list[bool]:
    """Mark the layers with a window: after the first `leading` layers, all but the last of every four."""
    usual = [number % 4 != 3 and number >= 0 for number in range(-leading, layers - leading)]
    return usual if config.get("layer_types") is None else windows_of(config, layers)


def cohere2moe_layer(sizes: Sizes, number: int) -> Layer:
    mixture: Layer = {**EXPERTS, **(SHARED_EXPERT if sizes["shared_hidden"] else {})}
    return {**ATTENTION, "attn_norm": ("width",), **(GATED if number < sizes["leading_dense"] else mixture)}


COHERE2MOE = Family(
    "cohere2moe",
    cohere2moe_layer,
    cohere2moe,
    named_as="dots1",
    defaults={
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
    },
)


def granite_swa(config: Config) -> CheckpointFacts:
    """Read Granite 4 with windows: a sink per head; some layers may have no RoPE."""
    for name in ("attention_bias", "mlp_bias"):
        config.only(name, False)
    h = granite(config.updated(sliding_window=None))
    layers, base = h.sizes["layers"], h.metadata["rope.freq_base"]
    if config.get("layer_types") is None:
        types = ["full_attention" if number % 4 == 0 else SLIDING for number in range(layers)]
        config = config.updated(layer_types=types)
    thetas = config.get("layer_rope_theta", [base] * layers)
    if not isinstance(thetas, list) or len(thetas) != layers or not {*map(str, thetas)} <= NO_ROPE | {str(base)}:
        raise config.refusal(f"layer_rope_theta should be {base} or 0 for each of {layers} layers")
    rotates = [str(theta) not in NO_ROPE for theta in thetas]
    if config.get("no_rope_layers"):
        rotates = [*map(bool, flags(config, "no_rope_layers", layers))]
    return h.updated(
        attention__rope_pattern=None if all(rotates) and not config.get("no_rope_layers") else rotates,
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows_of(config, layers),
    )


NO_ROPE = {"0", "0.0", "None"}  # base of layers without RoPE
SINKS: Layer = {"attn_sinks.weight": as_it_is("self_attn.sinks", "heads")}
GRANITE_SWA = replace(
    GRANITE,
    arch="granite_swa",
    layer={**ATTENTION, **SINKS, **GATED, **NORMS_BEFORE},
    read=granite_swa,
    rotated=ROTATED,
    named_as="granite",
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 128},
)


def granitemoe_swa(config: Config) -> CheckpointFacts:
    """Read Granite 4 with windows and experts, next to a shared network with a fused gate and up projection."""
    h = with_experts(config, granite_swa(config), "intermediate_size", "num_local_experts")
    shared = config.count("shared_intermediate_size", 0)
    sizes = {"both_hidden": 2 * h.sizes["expert_hidden"], "shared_hidden": shared, "both_shared": 2 * shared}
    return h.updated(sizes, expert_shared_feed_forward_length=shared or None)


def granitemoe_swa_layer(sizes: Sizes, number: int) -> Layer:
    both, down = ("experts", "both_hidden", "width"), EXPERTS["ffn_down_exps"]
    experts: Layer = {
        "ffn_gate_inp": as_stored("block_sparse_moe.router", "experts", "width"),
        "ffn_gate_up_exps": as_it_is("block_sparse_moe.experts.gate_up_proj", *both),
        "ffn_down_exps": as_it_is("block_sparse_moe.experts.down_proj", *down),
    }
    shared: Layer = {
        "ffn_up_shexp": as_stored("shared_mlp.input_linear", "both_shared", "width"),
        "ffn_down_shexp": as_stored("shared_mlp.output_linear", "width", "shared_hidden"),
    }
    return {**ATTENTION, **SINKS, **NORMS_BEFORE, **experts, **(shared if sizes["shared_hidden"] else {})}


GRANITEMOE_SWA = replace(GRANITE_SWA, layer=granitemoe_swa_layer, read=granitemoe_swa, defaults={"sliding_window": 128})
