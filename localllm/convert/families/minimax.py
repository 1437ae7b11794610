"""Read checkpoints of MiniMax-Text-01, M1 and M3."""

from localllm.convert.config import CheckpointConfig
from localllm.convert.hyperparameters import (
    CheckpointHyperparameters,
    Reader,
    add_experts,
    count_rotary_dims,
    name_layer_sizes,
    read_layer_flags,
)


def read_minimax_01(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read MiniMax-Text-01: softmax attention in every eighth layer, lightning attention in the others."""
    for kind in ("full_attention", "linear_attention", "mlp"):
        config.require_value(f"layernorm_{kind}_alpha", config.get("layernorm_full_attention_alpha"))
    h = declared(config)
    attends = [number % 8 == 7 for number in range(h.sizes["layers"])]
    config.require_value("attn_type_list", [*map(int, attends)])
    return h.update(name_layer_sizes("attends", attends))


def read_minimax_m3(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read MiniMax M3: dense first layers; the others have experts and an indexer per key head. Raises ModelError."""
    dims, dense = (
        config.read_count("rotary_dim"),
        config.read_count("dense_intermediate_size", config.get("intermediate_size")),
    )
    h = declared(config.update(intermediate_size=dense))
    if count_rotary_dims(config, h.sizes["head_dim"]) not in (dims, h.sizes["head_dim"]):
        raise config.make_error(f"partial_rotary_factor and rotary_dim {dims} contradict each other")
    h = add_experts(config, h, "intermediate_size", "num_local_experts")
    layers, section = h.sizes["layers"], config.get_section("sparse_attention_config")
    mixes, sparse = (
        read_layer_flags(config, "moe_layer_freq", layers),
        read_layer_flags(section, "sparse_attention_freq", layers),
    )
    leading, shared = mixes.index(1) if 1 in mixes else layers, config.read_count("n_shared_experts")
    if mixes != [int(number >= leading) for number in range(layers)] or sparse != mixes:
        raise config.make_error("moe_layer_freq must be 0 in the first layers only, which lack experts and indexers")
    hidden = shared * config.read_count("shared_intermediate_size", h.sizes["expert_hidden"])
    heads, dim = section.read_count("sparse_num_index_heads"), section.read_count("sparse_index_dim")
    return h.update(
        {"leading_dense": leading, "shared_hidden": hidden, "index_dim": dim, "index_queries": heads * dim},
        rope__dimension_count=dims,
        leading_dense_block_count=leading,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_count=shared,
        attention__indexer__head_count=heads,
        attention__indexer__key_length=dim,
        attention__indexer__top_k=section.read_count("sparse_topk_blocks"),
        attention__indexer__block_size=section.read_count("sparse_block_size"),
        attention__indexer__local_blocks=section.read_count("sparse_local_block"),
    )
