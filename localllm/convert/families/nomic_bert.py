"""Nomic Embed."""

from collections.abc import Callable

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.families.bert import encoder
from localllm.convert.hyperparameters import CheckpointFacts


def nomic_facts(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Nomic Embed: GPT-2's names, RoPE, SwiGLU, or experts in every other layer."""
    experts = config.get("moe_every_n_layers") or 0
    config.only("activation_function", "gelu" if experts else "swiglu")
    config.only("prenorm", False)
    config.only("rotary_emb_fraction", 1.0, 1)
    config.only("rotary_emb_interleaved", False)
    config.only("rotary_emb_scale_base")
    config.only("moe_every_n_layers", 0, 2)
    width, heads = config.count("n_embd"), config.count("n_head")
    trained = config.count("max_trained_positions", 2048)
    context = min(config.count("n_positions"), trained) if not experts else 512  # the context that both are trained for
    plain = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": config.count("n_inner")}
    plain |= {"num_hidden_layers": config.count("n_layer", maximum=MOST_LAYERS)}
    h = encoder(Config({**config.content, **plain}, config.path), context, config.number("layer_norm_epsilon", 1e-12))
    h = h.updated({"fused_rows": 3 * width}, rope__freq_base=config.number("rotary_emb_base", 10000.0))
    if not experts:
        return h
    count = config.count("num_experts")
    metadata = {"expert_count": count, "expert_used_count": config.count("moe_top_k"), "moe_every_n_layers": 2}
    return h.updated(
        {
            "experts": count,
            "stacked": count * plain["intermediate_size"],
            **{f"mixes_{number}": number % 2 for number in range(h.sizes["layers"])},
        },
        **metadata,
    )


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Nomic Embed under its publisher's names, or under transformers' (only for the model without experts)."""
    if config.get("n_embd") is not None:
        return nomic_facts(config, declared)
    config.only("hidden_act", "silu")
    rope = config.section("rope_parameters")
    rope.only("rope_type", "default")
    rope.only("partial_rotary_factor", 1.0, 1)
    h = encoder(config, config.count("max_position_embeddings", 2048), config.number("layer_norm_eps", 1e-12))
    base = rope.number("rope_theta", config.number("rope_theta", 1000.0))
    return h.updated({"fused_rows": 3 * h.sizes["width"]}, rope__freq_base=base)


def select(config: Config) -> str:
    """Name the record of a model with experts, or without."""
    return "NomicBertModel+experts" if config.get("moe_every_n_layers") else "NomicBertModel"
