"""DeepSeek-V2 to V3.2, GLM with DeepSeek's attention, Youtu."""

from collections.abc import Callable, Sequence

from localllm.convert.config import Config
from localllm.convert.experts import with_deepseek_experts
from localllm.convert.family import DerivedTensor, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.layers import EXPERTS, GATED, NORMS_BEFORE, SHARED_EXPERT, mtp_layer
from localllm.convert.rope_scaling import rope_parameters
from localllm.convert.tensors import Shape, TensorSource, take_strided, transpose


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read MLA: one latent row for all heads' keys and values; the first layers have no experts.

    In GGUF the heads attend to that row, as if there were a single key head.
    """
    heads = config.count("num_attention_heads")
    sizes = {"rotated": config.count("qk_rope_head_dim"), "latent": config.count("kv_lora_rank")}
    sizes |= {"key_dim": config.count("qk_nope_head_dim"), "value_dim": config.count("v_head_dim")}
    renamed = {"head_dim": sizes["rotated"], "num_key_value_heads": 1}
    h = declared(config.updated(**renamed))
    whole_key = sizes["key_dim"] + sizes["rotated"]
    sizes |= {
        "queries": heads * whole_key,
        "latent_and_key": sizes["latent"] + sizes["rotated"],
        "both_rows": heads * (sizes["key_dim"] + sizes["value_dim"]),
        "values": heads * sizes["value_dim"],
        "narrow": config.count("q_lora_rank", 0),
    }
    h = with_deepseek_experts(config, with_multiplier(config, h.updated(sizes)))
    return h.updated(
        attention__q_lora_rank=sizes["narrow"] or None,
        attention__kv_lora_rank=sizes["latent"],
        attention__key_length=sizes["latent_and_key"],
        attention__value_length=sizes["latent"],
        attention__key_length_mla=whole_key,
        attention__value_length_mla=sizes["value_dim"],
        rope__dimension_count=sizes["rotated"],
    )


def with_multiplier(config: Config, h: CheckpointFacts) -> CheckpointFacts:
    """Add YaRN's multiplier: the scores are multiplied instead of the rotated numbers; GGUF stores a tenth of it."""
    if h.metadata.get("rope.scaling.type") != "yarn":
        return h
    rope = rope_parameters(config)
    rope.only("attention_factor")
    multiplier = rope.number("mscale_all_dim")
    rope.only("mscale", multiplier)
    return h.updated(rope__scaling__attn_factor=None, rope__scaling__yarn_log_multiplier=0.1 * multiplier)


def keys_of_latents(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take the first rows of each head, transposed."""
    heads, latent, key_dim = shape
    return transpose(take_strided(sources[0], (heads, key_dim, latent), key_dim + sizes["value_dim"], 0))


def values_of_latents(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take the last rows of each head."""
    return take_strided(sources[0], shape, sizes["key_dim"] + shape[-2], sizes["key_dim"])


def layer(sizes: Sizes, number: int) -> Layer:
    both = {"self_attn.kv_b_proj.weight": ("both_rows", "latent")}
    queries: Layer = {"attn_q": ("queries", "width")}
    if sizes["narrow"]:
        queries = {"attn_q_a": ("narrow", "width"), "attn_q_a_norm": ("narrow",), "attn_q_b": ("queries", "narrow")}
    experts: Layer = {**EXPERTS, **(SHARED_EXPERT if sizes["shared_hidden"] else {})}
    if sizes["biased"]:
        experts = {**experts, "exp_probs_b.bias": ("experts",)}
    return {
        **NORMS_BEFORE,
        **queries,
        "attn_kv_a_mqa": ("latent_and_key", "width"),
        "attn_kv_a_norm": ("latent",),
        "attn_k_b": DerivedTensor(("heads", "latent", "key_dim"), both, keys_of_latents),
        "attn_v_b": DerivedTensor(("heads", "value_dim", "latent"), both, values_of_latents),
        "attn_output": ("width", "values"),
        **(GATED if number < sizes["leading_dense"] else experts),
        **mtp_layer(sizes, number),
    }


def deepseek32(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read V3.2: an indexer in every layer."""
    h = read(config, declared)
    heads, dim = config.count("index_n_heads"), config.count("index_head_dim")
    return h.updated(
        {"index_heads": heads, "index_dim": dim, "index_queries": heads * dim},
        attention__indexer__head_count=heads,
        attention__indexer__key_length=dim,
        attention__indexer__top_k=config.count("index_topk"),
        nextn_predict_layers=h.sizes["mtp_layers"] if config.get("num_nextn_predict_layers") is not None else None,
    )


def of_indexer(name: str, *dimensions: str) -> DerivedTensor:
    return DerivedTensor(
        dimensions, {f"self_attn.indexer.{name}": dimensions}, lambda sources, shape, sizes: sources[0]
    )


INDEXER: Layer = {
    "indexer.attn_q_b.weight": of_indexer("wq_b.weight", "index_queries", "narrow"),
    "indexer.attn_k.weight": of_indexer("wk.weight", "index_dim", "width"),
    "indexer.k_norm.weight": of_indexer("k_norm.weight", "index_dim"),
    "indexer.k_norm.bias": of_indexer("k_norm.bias", "index_dim"),
    "indexer.proj.weight": of_indexer("weights_proj.weight", "index_heads", "width"),
}


def glm_dsa(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read GLM: layers without an indexer attend to the keys that the last indexer selected."""
    h = deepseek32(config, declared)
    types, layers = config.get("indexer_types", ["full"] * h.sizes["layers"]), h.sizes["layers"]
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {"full", "shared"}:
        raise config.refusal(f"indexer_types should be full or shared for each of {layers} layers")
    full = [kind == "full" for kind in types]
    flags = {f"chooses_{number}": int(does) for number, does in enumerate(full)}
    flags |= {f"chooses_{layers + number}": 1 for number in range(h.sizes["mtp_layers"])}
    return h.updated(flags, attention__indexer__types=full if config.get("indexer_types") is not None else None)


def indexers(sizes: Sizes, number: int) -> Layer:
    return INDEXER if sizes[f"chooses_{number}"] else {}


def youtu(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Youtu: no experts, which GGUF states explicitly."""
    layers, hidden = config.count("num_hidden_layers"), config.count("intermediate_size")
    none = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": None, "moe_intermediate_size": hidden}
    h = read(config.updated(**none, first_k_dense_replace=layers), declared)
    return h.updated(expert_count=None, expert_used_count=None, expert_weights_scale=None)


def indexer(sizes: Sizes, number: int) -> Layer:
    return INDEXER
