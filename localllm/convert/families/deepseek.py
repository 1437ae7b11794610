"""Read checkpoints of DeepSeek and of models that share its attention or its experts.

These are ERNIE 4.5, dots.llm1, Ling 2, GLM, Kimi Linear, Solar Open and Youtu.
"""

from collections.abc import Sequence

from localllm.convert.config import CheckpointConfig
from localllm.convert.family import (
    EXPERTS,
    GATED,
    NORMS_BEFORE,
    SHARED_EXPERT,
    DerivedTensor,
    Layer,
    keep_float32,
    keep_tensor,
    list_mtp_tensors,
    rename_tensor,
)
from localllm.convert.hyperparameters import (
    SCORES,
    SIGMOID,
    SOFTMAX,
    CheckpointHyperparameters,
    Reader,
    add_deepseek_experts,
    add_experts,
    count_leading_dense,
    name_layer_sizes,
    read_layer_types,
)
from localllm.convert.rope_scaling import find_rope_parameters
from localllm.convert.transforms import FUNCTIONS, Shape, Sizes, TensorSource, take_strided, transpose


def read_deepseek(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read DeepSeek MoE: routed experts next to shared ones; the first layers are dense."""
    return declared(config).update(expert_gating_func=None if config.get("scoring_func") is None else SOFTMAX)


def read_ernie(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read ERNIE 4.5, whose last layer must have experts, too."""
    config.require_value("moe_layer_end_index", config.read_count("num_hidden_layers") - 1, -1)
    return declared(config)


def read_deepseek2(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read multi-head latent attention (MLA), with experts after the first, dense layers.

    In GGUF the heads attend to the latent row, as if the model had a single key head.
    """
    heads = config.read_count("num_attention_heads")
    sizes = {"rotated": config.read_count("qk_rope_head_dim"), "latent": config.read_count("kv_lora_rank")}
    sizes |= {"key_dim": config.read_count("qk_nope_head_dim"), "value_dim": config.read_count("v_head_dim")}
    renamed = {"head_dim": sizes["rotated"], "num_key_value_heads": 1}
    h = declared(config.update(**renamed))
    whole_key = sizes["key_dim"] + sizes["rotated"]
    sizes |= {
        "queries": heads * whole_key,
        "latent_and_key": sizes["latent"] + sizes["rotated"],
        "both_rows": heads * (sizes["key_dim"] + sizes["value_dim"]),
        "values": heads * sizes["value_dim"],
        "narrow": config.read_count("q_lora_rank", 0),
    }
    h = add_deepseek_experts(config, add_multiplier(config, h.update(sizes)))
    return h.update(
        attention__q_lora_rank=sizes["narrow"] or None,
        attention__kv_lora_rank=sizes["latent"],
        attention__key_length=sizes["latent_and_key"],
        attention__value_length=sizes["latent"],
        attention__key_length_mla=whole_key,
        attention__value_length_mla=sizes["value_dim"],
        rope__dimension_count=sizes["rotated"],
    )


def add_multiplier(config: CheckpointConfig, h: CheckpointHyperparameters) -> CheckpointHyperparameters:
    """Add YaRN's attention multiplier, a tenth of it, as GGUF stores it.

    The multiplier applies to the scores, so that the rotated values stay unscaled.
    """
    if h.metadata.get("rope.scaling.type") != "yarn":
        return h
    rope = find_rope_parameters(config)
    rope.require_value("attention_factor")
    multiplier = rope.read_number("mscale_all_dim")
    rope.require_value("mscale", multiplier)
    return h.update(rope__scaling__attn_factor=None, rope__scaling__yarn_log_multiplier=0.1 * multiplier)


def take_latent_keys(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take the rows of keys from each head of the fused matrix, transposed."""
    heads, latent, key_dim = shape
    return transpose(take_strided(sources[0], (heads, key_dim, latent), key_dim + sizes["value_dim"], 0))


def take_latent_values(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take the rows of values from each head of the fused matrix."""
    return take_strided(sources[0], shape, sizes["key_dim"] + shape[-2], sizes["key_dim"])


BOTH_ROWS = {"self_attn.kv_b_proj.weight": ("both_rows", "latent")}
QUERIES: Layer = {"attn_q": ("queries", "width")}
NARROW_QUERIES: Layer = {
    "attn_q_a": ("narrow", "width"),
    "attn_q_a_norm": ("narrow",),
    "attn_q_b": ("queries", "narrow"),
}
LATENT: Layer = {
    "attn_kv_a_mqa": ("latent_and_key", "width"),
    "attn_kv_a_norm": ("latent",),
    "attn_k_b": DerivedTensor(("heads", "latent", "key_dim"), BOTH_ROWS, take_latent_keys),
    "attn_v_b": DerivedTensor(("heads", "value_dim", "latent"), BOTH_ROWS, take_latent_values),
    "attn_output": ("width", "values"),
}


def list_deepseek2_tensors(sizes: Sizes, number: int) -> Layer:
    experts: Layer = {**EXPERTS, **(SHARED_EXPERT if sizes["shared_hidden"] else {})}
    if sizes["biased"]:
        experts = {**experts, "exp_probs_b.bias": ("experts",)}
    return {
        **NORMS_BEFORE,
        **(NARROW_QUERIES if sizes["narrow"] else QUERIES),
        **LATENT,
        **(GATED if number < sizes["leading_dense"] else experts),
        **list_mtp_tensors(sizes, number),
    }


def read_deepseek32(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read DeepSeek V3.2: DeepSeek 2 with an indexer in every layer."""
    h = add_indexer(config, read_deepseek2(config, declared))
    mtp_layers = h.sizes["mtp_layers"] if config.get("num_nextn_predict_layers") is not None else None
    return h.update(nextn_predict_layers=mtp_layers)


def add_indexer(config: CheckpointConfig, h: CheckpointHyperparameters) -> CheckpointHyperparameters:
    heads, dim = config.read_count("index_n_heads"), config.read_count("index_head_dim")
    return h.update(
        {"index_heads": heads, "index_dim": dim, "index_queries": heads * dim},
        attention__indexer__head_count=heads,
        attention__indexer__key_length=dim,
        attention__indexer__top_k=config.read_count("index_topk"),
    )


INDEXER: Layer = {
    "indexer.attn_q_b.weight": rename_tensor("self_attn.indexer.wq_b", "index_queries", "narrow"),
    "indexer.attn_k.weight": rename_tensor("self_attn.indexer.wk", "index_dim", "width"),
    "indexer.k_norm.weight": rename_tensor("self_attn.indexer.k_norm", "index_dim"),
    "indexer.k_norm.bias": keep_tensor("self_attn.indexer.k_norm.bias", "index_dim"),
    "indexer.proj.weight": rename_tensor("self_attn.indexer.weights_proj", "index_heads", "width"),
}


def list_indexer_tensors(sizes: Sizes, number: int) -> Layer:
    return INDEXER if sizes.get(f"chooses_{number}", 1) else {}


FULL = "full", "shared"  # types of indexers


def read_glm_dsa(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read GLM with sparse attention, where a layer without an indexer uses the keys that the last one selected."""
    h = read_deepseek32(config, declared)
    types = config.get("indexer_types", ["full"] * h.sizes["layers"])
    full = [kind == "full" for kind in read_layer_types(config, "indexer_types", h.sizes["layers"], FULL, types)]
    return h.update(
        name_layer_sizes("chooses", [*full, *[True] * h.sizes["mtp_layers"]]),
        attention__indexer__types=full if config.get("indexer_types") is not None else None,
    )


def read_youtu(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Youtu: DeepSeek 2 with dense layers only."""
    layers, hidden = config.read_count("num_hidden_layers"), config.read_count("intermediate_size")
    none = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": None, "moe_intermediate_size": hidden}
    h = read_deepseek2(config.update(**none, first_k_dense_replace=layers), declared)
    return h.update(expert_count=None, expert_used_count=None, expert_weights_scale=None)


def read_glm4moe(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read GLM 4.5: partial RoPE, and head norms in the largest models.

    The multi-token prediction layer is counted even if the checkpoint lacks it.
    """
    h = add_deepseek_experts(config, declared(config))
    mtp_layers = h.sizes["mtp_layers"]
    return h.update(
        {
            "head_norms": int(config.read_flag("use_qk_norm", False)),
            "attention_bias": int(config.read_flag("attention_bias")),
        },
        block_count=h.sizes["layers"] + mtp_layers,
        nextn_predict_layers=mtp_layers or None,
        expert_gating_func=SIGMOID,
    )


def read_solar_open(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Solar Open: like GLM 4.5, with experts in all layers."""
    return read_glm4moe(config, declared).update(leading_dense_block_count=None)


def read_chatglm(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read GLM, whose head dimension must be width / heads. Raises ModelError."""
    h = declared(config)
    if h.sizes["queries"] != h.sizes["width"]:
        raise config.make_error("head_dim must equal hidden_size / num_attention_heads")
    return h.update(attention__key_length=None, attention__value_length=None)


def read_kimi_linear(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Kimi Linear: delta-rule layers, and some layers of latent attention without RoPE."""
    section, heads = config.get_section("linear_attn_config"), config.read_count("num_attention_heads")
    section.require_value("num_heads", heads)
    rotated, latent = config.read_count("qk_rope_head_dim"), config.read_count("kv_lora_rank")
    context = config.get("max_position_embeddings", config.get("model_max_length"))
    renamed = {"max_position_embeddings": context, "num_key_value_heads": 1, "head_dim": rotated}
    h = declared(config.update(**renamed))
    active = "num_experts_per_tok" if config.get("num_experts_per_token") is None else "num_experts_per_token"
    h = add_experts(config, h, "moe_intermediate_size", active_key=active)
    attends = mark_attention_layers(section, h.sizes["layers"])
    key_dim, value_dim = config.read_count("qk_nope_head_dim"), config.read_count("v_head_dim")
    score, shared = config.get("moe_router_activation_func"), config.read_count("num_shared_experts")
    dim = section.read_count("head_dim")
    config.require_value("moe_router_activation_func", "sigmoid", "softmax")
    taps, leading = section.read_count("short_conv_kernel_size", 4), count_leading_dense(config)
    return h.update(
        {
            **name_layer_sizes("attends", attends),
            "queries": heads * (key_dim + rotated),
            "latent": latent,
            "latent_and_key": latent + rotated,
            "both_rows": heads * (key_dim + value_dim),
            "key_dim": key_dim,
            "value_dim": value_dim,
            "values": heads * value_dim,
            "delta": heads * dim,
            "delta_dim": dim,
            "taps": taps,
            "one": 1,
            "leading_dense": leading,
            "shared_hidden": shared * h.sizes["expert_hidden"],
        },
        attention__head_count_kv=[int(does) for does in attends],
        attention__kv_lora_rank=latent,
        attention__key_length=latent + rotated,
        # That of heads that do not exist, if config.json has it.
        attention__value_length=config.get("head_dim") and config.read_count("head_dim"),
        attention__key_length_mla=key_dim + rotated,
        attention__value_length_mla=value_dim,
        rope__dimension_count=rotated,
        ssm__conv_kernel=taps,
        kda__head_dim=dim,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_count=shared,
        expert_group_used_count=config.get("topk_group"),
        expert_gating_func=SCORES.get(score or "sigmoid"),
        expert_weights_scale=config.read_number("routed_scaling_factor"),
        leading_dense_block_count=leading,
    )


def mark_attention_layers(section: CheckpointConfig, layers: int) -> list[bool]:
    """Mark the layers with attention. Raises ModelError unless all others are delta-rule layers.

    config.json numbers layers from 1.
    """
    full, kda = section.get("full_attn_layers"), section.get("kda_layers")
    if not isinstance(full, list) or not all(type(number) is int and 0 < number <= layers for number in full):
        raise section.make_error(f"full_attn_layers must be layer numbers from 1 to {layers}")
    attends = [number + 1 in full for number in range(layers)]
    if kda is not None and kda != [number + 1 for number in range(layers) if not attends[number]]:
        raise section.make_error("kda_layers must be the layers that are not in full_attn_layers")
    return attends


TAPS, FOUR = ("one", "delta", "one", "taps"), ("one", "one", "heads", "one")
DELTA_RULE: Layer = {
    **{f"attn_{name}": ("delta", "width") for name in "qkv"},
    **{
        f"ssm_conv1d_{name}": DerivedTensor(
            TAPS, {f"self_attn.{name}_conv1d.weight": ("delta", "one", "taps")}, FUNCTIONS["reshape"]
        )
        for name in "qkv"
    },
    "ssm_f_a": rename_tensor("self_attn.f_a_proj", "delta_dim", "width"),
    "ssm_f_b": rename_tensor("self_attn.f_b_proj", "delta", "delta_dim"),
    "ssm_beta": rename_tensor("self_attn.b_proj", "heads", "width"),
    "ssm_a": DerivedTensor(FOUR, {"self_attn.A_log": FOUR}, FUNCTIONS["decay"]),
    "ssm_g_a": rename_tensor("self_attn.g_a_proj", "delta_dim", "width"),
    "ssm_g_b": rename_tensor("self_attn.g_b_proj", "delta", "delta_dim"),
    "ssm_dt.bias": keep_tensor("self_attn.dt_bias", "delta"),
    "ssm_norm": rename_tensor("self_attn.o_norm", "delta_dim"),
    "attn_output": ("width", "delta"),
}


def list_kimi_linear_tensors(sizes: Sizes, number: int) -> Layer:
    mixer = {**QUERIES, **LATENT} if sizes[f"attends_{number}"] else DELTA_RULE
    shared: Layer = {
        name: rename_tensor(f"block_sparse_moe.shared_experts.{name[4:-6]}_proj", *shape)
        for name, shape in SHARED_EXPERT.items()
    }
    mixture: Layer = {**EXPERTS, **shared, "exp_probs_b.bias": ("experts",)}
    return {**NORMS_BEFORE, **mixer, **(GATED if number < sizes["leading_dense"] else mixture)}


KINDS, LOWEST = ("full_attention", "indexed_attention", "linear_attention"), -5.0


def read_glm5_next(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read GLM 5.3 Flash: delta-rule layers, and latent attention that selects pools of keys."""
    section, heads = config.get_section("linear_attn_config"), config.read_count("num_attention_heads")
    section.require_value("num_heads", heads)
    h = declared(config.update(num_key_value_heads=1, head_dim=None))
    h = add_experts(config, h, "moe_intermediate_size", "n_routed_experts")
    layers = h.sizes["layers"]
    attends = [kind != "linear_attention" for kind in read_layer_types(config, "layer_types", layers, KINDS)]
    full = [kind == "full" for kind in read_layer_types(config, "indexer_types", layers, FULL)]
    row, key_dim, value_dim = (config.read_count(n) for n in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    dim, taps = section.read_count("head_dim"), section.read_count("short_conv_kernel_size")
    lowest = section.get("gate_lower_bound")
    if lowest is None and section.read_flag("safe_gate", True):
        lowest = LOWEST
    leading, shared, limit = (
        count_leading_dense(config),
        config.read_count("n_shared_experts"),
        config.get("swiglu_limit"),
    )
    sizes = {**name_layer_sizes("attends", attends), **name_layer_sizes("chooses", full)}
    sizes |= {"latent": row, "latent_and_key": row, "key_dim": key_dim, "value_dim": value_dim, "one": 1, "taps": taps}
    sizes |= {"queries": heads * key_dim, "values": heads * value_dim, "both_rows": heads * (key_dim + value_dim)}
    sizes |= {
        "narrow": config.read_count("q_lora_rank"),
        "delta": heads * dim,
        "delta_dim": dim,
        "leading_dense": leading,
    }
    return add_pools(config, h).update(
        sizes | {"shared_hidden": shared * h.sizes["expert_hidden"]},
        attention__head_count_kv=[int(does) for does in attends],
        attention__layer_norm_epsilon=1e-6,
        attention__q_lora_rank=sizes["narrow"],
        attention__kv_lora_rank=row,
        attention__key_length=row,
        attention__value_length=row,
        attention__key_length_mla=key_dim,
        attention__value_length_mla=value_dim,
        attention__indexer__types=full,
        rope__dimension_count=0,
        rope__freq_base=None,
        ssm__conv_kernel=taps,
        kda__head_dim=dim,
        kda__gate_lower_bound=lowest,
        leading_dense_block_count=leading,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_count=shared,
        expert_weights_scale=config.read_number("routed_scaling_factor"),
        expert_weights_norm=config.read_flag("norm_topk_prob", True),
        swiglu_clamp_exp=[config.read_number("swiglu_limit")] * layers if limit else None,
        swiglu_clamp_shexp=[config.read_number("swiglu_limit")] * layers if limit else None,
    )


def add_pools(config: CheckpointConfig, h: CheckpointHyperparameters) -> CheckpointHyperparameters:
    """Add the sizes and metadata of pooled indexers and residual streams."""
    config.require_value("scoring_func", "sigmoid")
    pool, streams = config.read_count("index_kpool"), config.read_count("hc_mult")
    sizes = {"all_streams": streams * h.sizes["width"], "stream_weights": (2 + streams) * streams}
    return add_indexer(config, h).update(
        {**sizes, "pool": pool, "three": 3},
        attention__indexer__kpool=pool,
        attention__indexer__kpool_select_tail=True,
        hyper_connection__count=streams,
        hyper_connection__sinkhorn_iterations=config.read_count("hc_sinkhorn_iters"),
        hyper_connection__epsilon=config.read_number("hc_eps"),
        expert_gating_func=SIGMOID if config.get("scoring_func") else None,
        expert_group_count=config.get("n_group") and config.read_count("n_group", maximum=1),
        expert_group_used_count=config.get("topk_group") and config.read_count("topk_group", maximum=1),
    )


POOLS: Layer = {
    **INDEXER,
    "indexer_compressor_gate.weight": keep_float32("self_attn.indexer.index_kpool_compress_gate", "index_dim", "width"),
    "indexer_compressor_ape.weight": keep_float32("self_attn.indexer.index_kpool_compress_ape", "pool", "index_dim"),
}


STREAMS: Layer = {
    name: build
    for part in ("attn", "ffn")
    for name, build in {
        f"hc_{part}_fn.weight": keep_float32(f"hc_{part}_fn", "stream_weights", "all_streams"),
        f"hc_{part}_base.weight": keep_tensor(f"hc_{part}_base", "stream_weights"),
        f"hc_{part}_scale.weight": keep_tensor(f"hc_{part}_scale", "three"),
    }.items()
}


def list_glm5_next_tensors(sizes: Sizes, number: int) -> Layer:
    rate = DerivedTensor(("heads",), {"self_attn.A_log": ("heads",)}, FUNCTIONS["decay"])
    mixer: Layer = {**DELTA_RULE, "ssm_a": rate}
    if sizes[f"attends_{number}"]:
        mixer = {**LATENT, **NARROW_QUERIES, **(POOLS if sizes[f"chooses_{number}"] else {})}
    feeds: Layer = {**EXPERTS, **SHARED_EXPERT, "exp_probs_b.bias": ("experts",)}
    return {**NORMS_BEFORE, **STREAMS, **mixer, **(GATED if number < sizes["leading_dense"] else feeds)}


def read_dots1(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read dots.llm1: DeepSeek's experts after the first, dense layers."""
    return add_deepseek_experts(config, declared(config))


def read_bailing2(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Ling 2: head norms, and experts that are selected by biased scores within the best groups."""
    h = declared(config.update(partial_rotary_factor=config.get("partial_rotary_factor", 0.5)))
    function = config.get("score_function")
    hidden = config.read_count("num_shared_experts") * h.sizes["expert_hidden"]
    hidden = config.read_count("moe_shared_expert_intermediate_size", hidden)
    return h.update(
        {"shared_hidden": hidden},
        expert_shared_feed_forward_length=hidden,
        expert_gating_func=function and SCORES[function],
        expert_group_count=config.get("n_group") and config.read_count("n_group"),
        expert_group_used_count=config.get("topk_group") and config.read_count("topk_group"),
        nextn_predict_layers=config.get("num_nextn_predict_layers"),
    )
