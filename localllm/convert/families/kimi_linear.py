"""Kimi Linear: most layers have the gated delta rule, the others MLA."""

from collections.abc import Callable, Sequence

import numpy as np

from localllm.convert.config import Config
from localllm.convert.experts import SIGMOID, SOFTMAX, leading_dense, with_experts
from localllm.convert.families.deepseek2 import keys_of_latents, values_of_latents
from localllm.convert.family import Build, DerivedTensor, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.layers import EXPERTS, GATED, NORMS_BEFORE, SHARED_EXPERT, as_stored
from localllm.convert.tensors import Shape, TensorSource, map_values, reshape


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Kimi Linear: no RoPE. config.json counts layers from 1 where it lists those with attention."""
    section, heads = config.section("linear_attn_config"), config.count("num_attention_heads")
    section.only("num_heads", heads)
    rotated, latent = config.count("qk_rope_head_dim"), config.count("kv_lora_rank")
    context = config.get("max_position_embeddings", config.get("model_max_length"))
    renamed = {"max_position_embeddings": context, "num_key_value_heads": 1, "head_dim": rotated}
    h = declared(config.updated(**renamed))
    h = with_experts(config, h, "moe_intermediate_size", active_key=USED[config.get("num_experts_per_token") is None])
    attends = attending(section, h.sizes["layers"])
    key_dim, value_dim = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    score, shared, dim = (
        config.get("moe_router_activation_func"),
        config.count("num_shared_experts"),
        section.count(HEAD),
    )
    config.only("moe_router_activation_func", "sigmoid", "softmax")
    taps, leading = section.count("short_conv_kernel_size", 4), leading_dense(config)
    return h.updated(
        {
            **{f"attends_{number}": int(does) for number, does in enumerate(attends)},
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
        attention__value_length=config.get("head_dim")
        and config.count("head_dim"),  # config.json's head_dim, of heads that do not exist
        attention__key_length_mla=key_dim + rotated,
        attention__value_length_mla=value_dim,
        rope__dimension_count=rotated,
        ssm__conv_kernel=taps,
        kda__head_dim=dim,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_count=shared,
        expert_group_used_count=config.get("topk_group"),
        expert_gating_func={"sigmoid": SIGMOID, "softmax": SOFTMAX}.get(score or "sigmoid"),
        expert_weights_scale=config.number("routed_scaling_factor"),
        leading_dense_block_count=leading,
    )


HEAD, USED = "head_dim", ("num_experts_per_token", "num_experts_per_tok")


def attending(section: Config, layers: int) -> list[bool]:
    """Mark the layers with attention. Raises ModelError if others do not have the delta rule."""
    full, kda = section.get("full_attn_layers"), section.get("kda_layers")
    if not isinstance(full, list) or not all(type(number) is int and 0 < number <= layers for number in full):
        raise section.refusal(f"full_attn_layers should be numbers from 1 to {layers}")
    attends = [number + 1 in full for number in range(layers)]
    if kda is not None and kda != [number + 1 for number in range(layers) if not attends[number]]:
        raise section.refusal("kda_layers should be those that are not in full_attn_layers")
    return attends


def of_attention(name: str, build: Build, gguf: tuple[str, ...], *stored: str) -> DerivedTensor:
    """Declare a tensor of the attention; gguf, stored: its shapes."""
    return DerivedTensor(gguf, {f"self_attn.{name}": stored}, build)


def as_declared(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return reshape(sources[0], shape)


def rates(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Convert logarithms to decay rates."""
    return map_values(sources[0], lambda logarithms: -np.exp(logarithms))


def matrices(sizes: Sizes) -> Layer:
    """List the tensors of a delta-rule layer."""
    taps, four = ("one", "delta", "one", "taps"), ("one", "one", "heads", "one")
    return {
        **{f"attn_{name}": ("delta", "width") for name in "qkv"},
        **{
            f"ssm_conv1d_{name}": of_attention(f"{name}_conv1d.weight", as_declared, taps, "delta", "one", "taps")
            for name in "qkv"
        },
        "ssm_f_a": as_stored("self_attn.f_a_proj", "delta_dim", "width"),
        "ssm_f_b": as_stored("self_attn.f_b_proj", "delta", "delta_dim"),
        "ssm_beta": as_stored("self_attn.b_proj", "heads", "width"),
        "ssm_a": of_attention("A_log", rates, four, *four),
        "ssm_g_a": as_stored("self_attn.g_a_proj", "delta_dim", "width"),
        "ssm_g_b": as_stored("self_attn.g_b_proj", "delta", "delta_dim"),
        "ssm_dt.bias": of_attention("dt_bias", lambda s, *_: s[0], ("delta",), "delta"),
        "ssm_norm": as_stored("self_attn.o_norm", "delta_dim"),
        "attn_output": ("width", "delta"),
    }


def latent(sizes: Sizes) -> Layer:
    """List the tensors of an attention layer."""
    both = {"self_attn.kv_b_proj.weight": ("both_rows", "latent")}
    return {
        "attn_q": ("queries", "width"),
        "attn_kv_a_mqa": ("latent_and_key", "width"),
        "attn_kv_a_norm": ("latent",),
        "attn_k_b": DerivedTensor(("heads", "latent", "key_dim"), both, keys_of_latents),
        "attn_v_b": DerivedTensor(("heads", "value_dim", "latent"), both, values_of_latents),
        "attn_output": ("width", "values"),
    }


def layer(sizes: Sizes, number: int) -> Layer:
    mixer = latent(sizes) if sizes[f"attends_{number}"] else matrices(sizes)
    shared: Layer = {
        name: as_stored(f"block_sparse_moe.shared_experts.{name[4:-6]}_proj", *shape)
        for name, shape in SHARED_EXPERT.items()
    }
    mixture: Layer = {**EXPERTS, **shared, "exp_probs_b.bias": ("experts",)}
    return {**NORMS_BEFORE, **mixer, **(GATED if number < sizes["leading_dense"] else mixture)}
