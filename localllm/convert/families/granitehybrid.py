"""Granite 4, and Bamba."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.families.mamba import CONTEXT
from localllm.convert.families.mamba2 import MAMBA2, NORM, attending, with_mamba2
from localllm.convert.family import Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, rotary_dims
from localllm.convert.layers import ATTENTION

KINDS = {"mamba": False, "attention": True, "linear_attention": False, "full_attention": True}


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Granite 4: no RoPE; experts next to a shared network, or the shared network alone."""
    h = declared(config)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list) or len(kinds) != h.sizes["layers"] or not {*kinds} <= KINDS.keys():
        raise config.refusal(f"layer_types should be {', '.join(KINDS)} for each of {h.sizes['layers']} layers")
    attends = [KINDS[kind] for kind in kinds]
    if all(attends):
        raise config.refusal("a model in which all layers have attention is not supported by this architecture")
    h = with_mamba2(config, h, config.count("mamba_expand", 2) * h.sizes["width"])
    h = attending(config, h, attends)
    experts, shared = config.count("num_local_experts", 0), config.count("shared_intermediate_size")
    sizes = {"experts": experts, "shared_hidden": shared, "both_shared": 2 * shared}
    sizes |= {"expert_hidden": h.sizes["hidden"], "both_hidden": 2 * h.sizes["hidden"]}
    h = h.updated(
        sizes, context_length=CONTEXT, rope__scaling__finetuned=False, expert_shared_feed_forward_length=shared
    )
    if not experts:
        config.only("shared_intermediate_size", h.sizes["hidden"])
    return h.updated(expert_count=experts, expert_used_count=config.count("num_experts_per_tok", 0))


def bamba(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Bamba: attention with partial RoPE in some layers, Mamba 2 in the others."""
    dims = config.get("attn_rotary_emb")
    head_dim = config.count("hidden_size") // config.count("num_attention_heads")
    renamed = (
        config if dims is None else config.updated(partial_rotary_factor=config.count("attn_rotary_emb") / head_dim)
    )
    h = declared(renamed)
    indices, layers = config.get("attn_layer_indices"), h.sizes["layers"]
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < layers for index in indices):
        raise config.refusal(f"attn_layer_indices should be a list of some of {layers} layers")
    rotated_dims = rotary_dims(renamed, h.sizes["head_dim"])
    h = with_mamba2(config, h, config.count("mamba_expand", 2) * h.sizes["width"])
    h = attending(config, h.updated({"rotated_dims": rotated_dims}), [number in indices for number in range(layers)])
    return h.updated(vocab_size=h.sizes["vocab"], rope__dimension_count=rotated_dims, rope__scaling__finetuned=True)


def mixer(sizes: Sizes, number: int) -> Layer:
    return ATTENTION if sizes[f"attends_{number}"] else {**MAMBA2, **NORM}
