"""The architectures with experts, of which each token goes to a few."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from localllm.convert.config import Config
from localllm.convert.dense import GRANITE, LLAMA, OLMO2, QWEN2, QWEN3, granite, llama, qwen
from localllm.convert.family import BYTES, Family, Layer, MadeOf, Sizes
from localllm.convert.hyperparameters import Hyperparameters, decoder
from localllm.convert.layers import ATTENTION, EXPERTS, GATED, HEAD_NORMS, NORMS_BEFORE, SHARED_EXPERT
from localllm.convert.rope_scaling import rope_parameters
from localllm.convert.tensors import Shape, Source, every_second, mxfp4, spread, transposed

SOFTMAX, SIGMOID = 1, 2  # GGUF's numbers of what makes scores of a router's results


def with_experts(
    config: Config, h: Hyperparameters, hidden: str, count: str = "num_experts", used: str = "num_experts_per_tok"
) -> Hyperparameters:
    """Sizes and metadata of experts, by the names that config.json has for them."""
    experts, chosen = config.count(count), config.count(used)
    if chosen > experts:
        raise config.refusal(f"a token cannot go to {chosen} of {experts} experts")
    return h.plus(
        {"experts": experts, "expert_hidden": config.count(hidden)}, expert_count=experts, expert_used_count=chosen
    )


def mixtral(config: Config) -> Hyperparameters:
    return with_experts(config, llama(config), "intermediate_size", "num_local_experts")


def granitemoe(config: Config) -> Hyperparameters:
    h = with_experts(config, granite(config), "intermediate_size", "num_local_experts")
    return h.plus({"both_hidden": 2 * h.sizes["expert_hidden"]})


def qwen2moe(config: Config) -> Hyperparameters:
    """Beside the experts one for all tokens."""
    config.only("norm_topk_prob", False)
    h = qwen_moe(config)
    shared = config.count("shared_expert_intermediate_size")
    return h.plus({"shared_hidden": shared, "one": 1}, expert_shared_feed_forward_length=shared)


def qwen3moe(config: Config) -> Hyperparameters:
    """Weights of the chosen experts always add up to 1, as in all published checkpoints."""
    config.only("norm_topk_prob", True)
    return qwen_moe(config)


def qwen_moe(config: Config) -> Hyperparameters:
    """Experts in every layer."""
    config.only("decoder_sparse_step", 1)
    config.only("mlp_only_layers", [])
    count = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    h = with_experts(config, qwen(config), "moe_intermediate_size", count)
    return h.plus(expert_feed_forward_length=h.sizes["expert_hidden"])


def olmoe(config: Config) -> Hyperparameters:
    config.only("norm_topk_prob", False)
    config.only("clip_qkv", None)
    return with_experts(config, decoder(config), "intermediate_size")


# ---- gpt-oss


def gpt_oss(config: Config) -> Hyperparameters:
    """Layers in turn with a window and without; experts' weights in blocks of 32, if they are MXFP4."""
    h = decoder(config, scalings=("yarn", "untruncated"))
    config.windows([number % 2 == 0 for number in range(h.sizes["layers"])])
    config.only("swiglu_limit", 7.0)
    used = "num_experts_per_tok" if config.get("num_experts_per_tok") is not None else "experts_per_token"
    h = with_experts(config, h, "intermediate_size", "num_local_experts", used)
    width, hidden = h.sizes["width"], h.sizes["expert_hidden"]
    if width % 32 or hidden % 32:
        raise config.refusal(f"experts of {hidden} times {width} weights are no blocks of 32")
    blocks = {"both_hidden": 2 * hidden, "block_bytes": 16, "width_blocks": width // 32, "hidden_blocks": hidden // 32}
    return h.plus(blocks, attention__sliding_window=config.count("sliding_window"), expert_feed_forward_length=hidden)


def half_of_blocks(start: int, sources: Sequence[Source], shape: Shape, sizes: Sizes) -> Source:
    """Every second row of MXFP4 matrices: gates and what they let through take turns."""
    return spread(mxfp4(*sources), shape, 2 * shape[-2], start, 2)


def half_of_columns(start: int, sources: Sequence[Source], shape: Shape, sizes: Sizes) -> Source:
    """Every second column of matrices that are turned round."""
    return spread(transposed(sources[0]), shape, 2 * shape[-2], start, 2)


def half_of_biases(start: int, sources: Sequence[Source], shape: Shape, sizes: Sizes) -> Source:
    return every_second(sources[0], start)


EXPERT = "mlp.experts."
ONE_HALF = ("experts", "expert_hidden", "width")
DOWN = ("experts", "width", "expert_hidden")
BOTH_BIASES = {f"{EXPERT}gate_up_proj_bias": ("experts", "both_hidden")}
DOWN_BIAS = {f"{EXPERT}down_proj_bias": ("experts", "width")}
BOTH_TURNED = {f"{EXPERT}gate_up_proj": ("experts", "width", "both_hidden")}
BOTH_BLOCKS = {
    f"{EXPERT}gate_up_proj_blocks": ("experts", "both_hidden", "width_blocks", "block_bytes"),
    f"{EXPERT}gate_up_proj_scales": ("experts", "both_hidden", "width_blocks"),
}
DOWN_BLOCKS = {
    f"{EXPERT}down_proj_blocks": ("experts", "width", "hidden_blocks", "block_bytes"),
    f"{EXPERT}down_proj_scales": ("experts", "width", "hidden_blocks"),
}
GPT_OSS_LAYER: Layer = {
    "attn_norm": ("width",),
    **ATTENTION,
    "attn_sinks": ("heads",),
    "post_attention_norm": ("width",),
    "ffn_gate_inp": ("experts", "width"),
    "ffn_gate_exps.bias": MadeOf(("experts", "expert_hidden"), BOTH_BIASES, partial(half_of_biases, 0)),
    "ffn_up_exps.bias": MadeOf(("experts", "expert_hidden"), BOTH_BIASES, partial(half_of_biases, 1)),
    "ffn_down_exps.bias": MadeOf(("experts", "width"), DOWN_BIAS, lambda sources, shape, sizes: sources[0]),
}
GPT_OSS = Family(
    "gpt-oss",
    {
        **GPT_OSS_LAYER,
        "ffn_gate_exps": MadeOf(ONE_HALF, BOTH_TURNED, partial(half_of_columns, 0)),
        "ffn_up_exps": MadeOf(ONE_HALF, BOTH_TURNED, partial(half_of_columns, 1)),
        "ffn_down_exps": MadeOf(
            DOWN,
            {f"{EXPERT}down_proj": ("experts", "expert_hidden", "width")},
            lambda sources, shape, sizes: transposed(sources[0]),
        ),
    },
    gpt_oss,
    biased=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp"),
    defaults={"head_dim": 64, "rope_theta": 150000.0, "rms_norm_eps": 1e-5, "sliding_window": 128},
)
GPT_OSS_MXFP4 = replace(
    GPT_OSS,
    layer={
        **GPT_OSS_LAYER,
        "ffn_gate_exps": MadeOf(ONE_HALF, BOTH_BLOCKS, partial(half_of_blocks, 0), BYTES),
        "ffn_up_exps": MadeOf(ONE_HALF, BOTH_BLOCKS, partial(half_of_blocks, 1), BYTES),
        "ffn_down_exps": MadeOf(DOWN, DOWN_BLOCKS, lambda sources, shape, sizes: mxfp4(*sources), BYTES),
    },
)


# ---- DeepSeek-V2 and V3


def deepseek2(config: Config) -> Hyperparameters:
    """One latent row for all heads' keys and values; the first layers have no experts. In GGUF the heads see that row,
    as if there was one for all."""
    config.only("rope_interleave", True)
    config.only("moe_layer_freq", 1)
    heads = config.count("num_attention_heads")
    sizes = {"rotated": config.count("qk_rope_head_dim"), "latent": config.count("kv_lora_rank")}
    sizes |= {"key_dim": config.count("qk_nope_head_dim"), "value_dim": config.count("v_head_dim")}
    own = {"head_dim": sizes["rotated"], "num_key_value_heads": 1}
    h = decoder(Config({**config.content, **own}, config.path, config.warnings), scalings=("yarn",))
    whole_key = sizes["key_dim"] + sizes["rotated"]
    sizes |= {
        "queries": heads * whole_key,
        "latent_and_key": sizes["latent"] + sizes["rotated"],
        "both_rows": heads * (sizes["key_dim"] + sizes["value_dim"]),
        "values": heads * sizes["value_dim"],
        "narrow": config.count("q_lora_rank", 0),
    }
    h = with_deepseek_experts(config, with_multiplier(config, h.plus(sizes)))
    return h.plus(
        vocab_size=h.sizes["vocab"],
        attention__q_lora_rank=sizes["narrow"] or None,
        attention__kv_lora_rank=sizes["latent"],
        attention__key_length=sizes["latent_and_key"],
        attention__value_length=sizes["latent"],
        attention__key_length_mla=whole_key,
        attention__value_length_mla=sizes["value_dim"],
        rope__dimension_count=sizes["rotated"],
    )


def with_multiplier(config: Config, h: Hyperparameters) -> Hyperparameters:
    """YaRN leaves the rotated numbers as long as they are, and multiplies the scores instead; GGUF has a tenth of the
    model's multiplier."""
    if h.metadata.get("rope.scaling.type") != "yarn":
        return h
    rope = rope_parameters(config)
    rope.only("attention_factor")
    multiplier = rope.number("mscale_all_dim")
    rope.only("mscale", multiplier)
    return h.plus(rope__scaling__attn_factor=None, rope__scaling__yarn_log_multiplier=0.1 * multiplier)


def with_deepseek_experts(config: Config, h: Hyperparameters) -> Hyperparameters:
    """Groups of experts; V3 chooses by scores to which a bias is added."""
    h = with_experts(config, h, "moe_intermediate_size", "n_routed_experts")
    score, shared = config.get("scoring_func"), config.count("n_shared_experts", 0)
    config.only("scoring_func", "softmax", "sigmoid")
    if config.get("topk_method") == "group_limited_greedy":
        config.warnings.append("groups of experts are chosen by their two best, where the model looks at one")
    leading = config.count("first_k_dense_replace", 0)
    sizes = {"shared_hidden": shared * h.sizes["expert_hidden"], "leading_dense": leading}
    sizes |= {"biased": int(config.get("topk_method") == "noaux_tc")}
    sizes |= {"extra_layers": config.count("num_nextn_predict_layers", 0)}
    return h.plus(
        sizes,
        leading_dense_block_count=leading,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_count=shared,
        expert_weights_scale=config.number("routed_scaling_factor", 1.0),
        expert_weights_norm=config.flag("norm_topk_prob") or None,
        expert_group_count=config.get("n_group") and config.count("n_group"),
        expert_group_used_count=config.get("topk_group") and config.count("topk_group"),
        expert_gating_func=None if score is None else {"softmax": SOFTMAX, "sigmoid": SIGMOID}[score],
    )


def keys_of_latents(sources: Sequence[Source], shape: Shape, sizes: Sizes) -> Source:
    """Of each head's rows the first ones, turned round."""
    heads, latent, key_dim = shape
    return transposed(spread(sources[0], (heads, key_dim, latent), key_dim + sizes["value_dim"], 0))


def values_of_latents(sources: Sequence[Source], shape: Shape, sizes: Sizes) -> Source:
    """Of each head's rows the last ones."""
    return spread(sources[0], shape, sizes["key_dim"] + shape[-2], sizes["key_dim"])


def deepseek2_layer(sizes: Mapping[str, int], number: int) -> Layer:
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
        "attn_k_b": MadeOf(("heads", "latent", "key_dim"), both, keys_of_latents),
        "attn_v_b": MadeOf(("heads", "value_dim", "latent"), both, values_of_latents),
        "attn_output": ("width", "values"),
        **(GATED if number < sizes["leading_dense"] else experts),
    }


MIXTRAL = replace(LLAMA, layer={**ATTENTION, **NORMS_BEFORE, **EXPERTS}, read=mixtral)
QWEN2MOE = replace(
    QWEN2,
    arch="qwen2moe",
    layer={**ATTENTION, **NORMS_BEFORE, **EXPERTS, **SHARED_EXPERT, "ffn_gate_inp_shexp": ("one", "width")},
    read=qwen2moe,
)
QWEN3MOE = replace(
    QWEN3,
    arch="qwen3moe",
    layer={**ATTENTION, **HEAD_NORMS, **NORMS_BEFORE, **EXPERTS},
    read=qwen3moe,
)
OLMOE = Family(
    "olmoe",
    {**ATTENTION, "attn_q_norm": ("queries",), "attn_k_norm": ("keys",), **NORMS_BEFORE, **EXPERTS},
    olmoe,
    defaults=OLMO2.defaults,
)
BOTH_HALVES = {"block_sparse_moe.input_linear.weight": ("experts", "both_hidden", "width")}
GRANITEMOE = replace(
    GRANITE,
    arch="granitemoe",
    layer={
        **ATTENTION,
        **NORMS_BEFORE,
        **EXPERTS,
        "ffn_gate_exps": MadeOf(ONE_HALF, BOTH_HALVES, lambda s, shape, _: spread(s[0], shape, 2 * shape[-2], 0)),
        "ffn_up_exps": MadeOf(ONE_HALF, BOTH_HALVES, lambda s, shape, _: spread(s[0], shape, 2 * shape[-2], shape[-2])),
    },
    read=granitemoe,
)
DEEPSEEK2 = Family("deepseek2", deepseek2_layer, deepseek2, defaults={"topk_method": "greedy"})
DEEPSEEK3 = replace(
    DEEPSEEK2,
    defaults={
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
)
