"""GLM 5.3 Flash."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.experts import SIGMOID, leading_dense, with_experts
from localllm.convert.families.deepseek2 import INDEXER
from localllm.convert.families.kimi_linear import latent, matrices, rates
from localllm.convert.family import DerivedTensor, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.layers import EXPERTS, GATED, NORMS_BEFORE, SHARED_EXPERT, as_it_is, in_full

KINDS, LOWEST = {"linear_attention", "indexed_attention", "full_attention"}, -5.0


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read GLM 5.3 Flash: delta-rule layers, and MLA layers that select pools of keys."""
    section, heads, narrow = config.section("linear_attn_config"), config.count("num_attention_heads"), "q_lora_rank"
    section.only("num_heads", heads)
    h = declared(config.updated(num_key_value_heads=1, head_dim=None))
    h = with_experts(config, h, "moe_intermediate_size", "n_routed_experts")
    layers, kinds, types = h.sizes["layers"], config.get("layer_types"), config.get("indexer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= KINDS:
        raise config.refusal(f"layer_types should be {', '.join(sorted(KINDS))} for each of {layers} layers")
    attends = [kind != "linear_attention" for kind in kinds]
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {"full", "shared"}:
        raise config.refusal(f"indexer_types should be full or shared for each of {layers} layers")
    row, key_dim, value_dim = (config.count(n) for n in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    dim, taps, lowest = (
        section.count("head_dim"),
        section.count("short_conv_kernel_size"),
        section.get("gate_lower_bound"),
    )
    if lowest is None and section.flag("safe_gate", True):
        lowest = LOWEST
    leading, shared, limit = leading_dense(config), config.count("n_shared_experts"), config.get("swiglu_limit")
    sizes = {f"attends_{number}": int(does) for number, does in enumerate(attends)}
    sizes |= {f"chooses_{number}": int(kind == "full") for number, kind in enumerate(types)}
    sizes |= {"latent": row, "latent_and_key": row, "key_dim": key_dim, "value_dim": value_dim, "one": 1, "taps": taps}
    sizes |= {"queries": heads * key_dim, "values": heads * value_dim, "both_rows": heads * (key_dim + value_dim)}
    sizes |= {"narrow": config.count(narrow), "delta": heads * dim, "delta_dim": dim, "leading_dense": leading}
    return with_pools(config, h).updated(
        sizes | {"shared_hidden": shared * h.sizes["expert_hidden"]},
        attention__head_count_kv=[int(does) for does in attends],
        attention__layer_norm_epsilon=1e-6,
        attention__q_lora_rank=sizes["narrow"],
        attention__kv_lora_rank=row,
        attention__key_length=row,
        attention__value_length=row,
        attention__key_length_mla=key_dim,
        attention__value_length_mla=value_dim,
        attention__indexer__types=[kind == "full" for kind in types],
        rope__dimension_count=0,
        rope__freq_base=None,
        ssm__conv_kernel=taps,
        kda__head_dim=dim,
        kda__gate_lower_bound=lowest,
        leading_dense_block_count=leading,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_count=shared,
        expert_weights_scale=config.number("routed_scaling_factor"),
        expert_weights_norm=config.flag("norm_topk_prob", True),
        swiglu_clamp_exp=[config.number("swiglu_limit")] * layers if limit else None,
        swiglu_clamp_shexp=[config.number("swiglu_limit")] * layers if limit else None,
    )


def with_pools(config: Config, h: CheckpointFacts) -> CheckpointFacts:
    """Add indexers and residual streams."""
    config.only("scoring_func", "sigmoid")
    heads, dim, pool, streams = (config.count(n) for n in ("index_n_heads", "index_head_dim", "index_kpool", "hc_mult"))
    sizes = {"index_heads": heads, "index_dim": dim, "index_queries": heads * dim, "pool": pool, "three": 3}
    sizes |= {"all_streams": streams * h.sizes["width"], "stream_weights": (2 + streams) * streams}
    return h.updated(
        sizes,
        attention__indexer__head_count=heads,
        attention__indexer__key_length=dim,
        attention__indexer__top_k=config.count("index_topk"),
        attention__indexer__kpool=pool,
        attention__indexer__kpool_select_tail=True,
        hyper_connection__count=streams,
        hyper_connection__sinkhorn_iterations=config.count("hc_sinkhorn_iters"),
        hyper_connection__epsilon=config.number("hc_eps"),
        expert_gating_func=SIGMOID if config.get("scoring_func") else None,
        expert_group_count=config.get("n_group") and config.count("n_group", maximum=1),
        expert_group_used_count=config.get("topk_group") and config.count("topk_group", maximum=1),
    )


POOLS: Layer = {
    **INDEXER,
    "indexer_compressor_gate.weight": in_full("self_attn.indexer.index_kpool_compress_gate", "index_dim", "width"),
    "indexer_compressor_ape.weight": in_full("self_attn.indexer.index_kpool_compress_ape", "pool", "index_dim"),
}


STREAMS: Layer = {
    name: build
    for part in ("attn", "ffn")
    for name, build in {
        f"hc_{part}_fn.weight": in_full(f"hc_{part}_fn", "stream_weights", "all_streams"),
        f"hc_{part}_base.weight": as_it_is(f"hc_{part}_base", "stream_weights"),
        f"hc_{part}_scale.weight": as_it_is(f"hc_{part}_scale", "three"),
    }.items()
}


QUERIES = ("queries", "narrow")


def layer(sizes: Sizes, number: int) -> Layer:
    rate: Layer = {"ssm_a": DerivedTensor(("heads",), {"self_attn.A_log": ("heads",)}, rates)}
    mixer: Layer = {**matrices(sizes), **rate}
    if sizes[f"attends_{number}"]:
        queries: Layer = {"attn_q_a": ("narrow", "width"), "attn_q_a_norm": ("narrow",), "attn_q_b": QUERIES}
        mixer = {**{name: its for name, its in latent(sizes).items() if name != "attn_q"}, **queries}
        mixer = {**mixer, **(POOLS if sizes[f"chooses_{number}"] else {})}
    feeds: Layer = {**EXPERTS, **SHARED_EXPERT, "exp_probs_b.bias": ("experts",)}
    return {**NORMS_BEFORE, **STREAMS, **mixer, **(GATED if number < sizes["leading_dense"] else feeds)}
