"""The architectures without experts."""

from dataclasses import replace
from typing import Any

from localllm.arch import gemma2 as gemma2_arch
from localllm.arch import gemma3 as gemma3_arch
from localllm.arch.fields import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.family import Family
from localllm.convert.hyperparameters import (
    GELU,
    PLAIN_SCALING,
    Hyperparameters,
    decoder,
    refuse_other_activations,
    rotated_numbers,
    warn_of_window,
)
from localllm.convert.layers import (
    ATTENTION,
    FEED_FORWARD,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    NORMS_BEHIND,
    ROTATED,
)
from localllm.convert.rope_scaling import rope_parameters

LLAMA_SCALING = (*PLAIN_SCALING, "llama3")
TIED = {"tie_word_embeddings": True}


def llama(config: Config, scalings: tuple[str, ...] = LLAMA_SCALING) -> Hyperparameters:
    """Llama and what is built like it; its GGUF says two things that others leave to its readers."""
    h = decoder(config, scalings=scalings)
    warn_of_window(config)
    return h.plus(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"])


def mistral3(config: Config) -> Hyperparameters:
    """The language model of Mistral Small 3; Ministral 3 stretches its context, and says how fast queries grow."""
    h = llama(config, ("bordered", "yarn"))
    if h.metadata.get("rope.scaling.type") != "yarn":
        return h
    rope = rope_parameters(config)
    rope.only("attention_factor")
    rope.only("mscale", 1)
    return h.plus(
        rope__scaling__attn_factor=None,
        rope__scaling__yarn_log_multiplier=rope.number("mscale_all_dim"),
        attention__temperature_scale=rope.number("llama_4_scaling_beta"),
    )


def granite(config: Config) -> Hyperparameters:
    """Four factors; its heads are always parts of the width."""
    return llama(config).plus(
        attention__key_length=None,
        attention__value_length=None,
        attention__scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=config.number("logits_scaling", 1.0),
    )


def smollm3(config: Config) -> Hyperparameters:
    """GGUF's readers rotate nothing in every fourth layer."""
    h = llama(config)
    rotated = [int((number + 1) % 4 != 0) for number in range(h.sizes["layers"])]
    config.only("no_rope_layer_interval", 4)
    config.only("no_rope_layers", rotated)
    return h


def qwen(config: Config) -> Hyperparameters:
    h = decoder(config, scalings=LLAMA_SCALING)
    warn_of_window(config)
    return h


def phi3(config: Config) -> Hyperparameters:
    """Fused matrices, and factors for long contexts."""
    h = decoder(config, scalings=("longrope", "su"), whole_heads=False)
    warn_of_window(config)
    queries, keys = h.sizes["queries"], h.sizes["keys"]
    context = h.metadata["context_length"]
    return h.plus(
        {"fused_rows": queries + 2 * keys, "both_hidden": 2 * h.sizes["hidden"]},
        attention__key_length=None,
        attention__value_length=None,
        attention__sliding_window=config.count("sliding_window", 0),
        rope__dimension_count=rotated_numbers(config, h.sizes["head_dim"]),
        rope__scaling__original_context_length=rope_parameters(config).count(
            "original_max_position_embeddings", context
        ),
    )


def gemma(config: Config) -> Hyperparameters:
    """Its first checkpoints say "gelu" and mean the other one."""
    return of_gemma(config, (*GELU, "gelu"))


def of_gemma(config: Config, activations: tuple[str, ...] = GELU) -> Hyperparameters:
    """What all Gemmas say. Their heads always have a length of their own; the output matrix is the embedding."""
    config.only("use_bidirectional_attention", False)
    config.only("tie_word_embeddings", True)
    return decoder(config, activations=activations)


def gemma2(config: Config) -> Hyperparameters:
    """Layers in turn with a window and without."""
    h = of_gemma(config)
    config.windows([number % 2 == 0 for number in range(h.sizes["layers"])])
    refuse_other_scale(config, h, gemma2_arch.LAYERS_OF_27B)
    return h.plus(
        attn_logit_softcapping=config.number("attn_logit_softcapping"),
        final_logit_softcapping=config.number("final_logit_softcapping"),
        attention__sliding_window=config.count("sliding_window"),
    )


def gemma3(config: Config) -> Hyperparameters:
    """Five layers of six with a window, which rotate with a base of their own."""
    h = of_gemma(config)
    config.only("sliding_window_pattern", 6)
    config.windows([number % 6 != 5 for number in range(h.sizes["layers"])])
    refuse_other_scale(config, h, gemma3_arch.LAYERS_OF_27B)
    if config.get("attn_logit_softcapping") is not None:
        raise config.refusal("attn_logit_softcapping is not supported")
    local = config.section("rope_parameters").section("sliding_attention")
    cap = config.get("final_logit_softcapping")
    return h.plus(
        rope__freq_base_swa=local.number("rope_theta", config.number("rope_local_base_freq", 10000.0)),
        final_logit_softcapping=None if cap is None else config.number("final_logit_softcapping"),
        attention__sliding_window=config.count("sliding_window"),
    )


def refuse_other_scale(config: Config, h: Hyperparameters, exception: int) -> None:
    """Raise ModelError if scores are not scaled as GGUF's readers do: by heads, in the model of so many layers by the
    width over the heads."""
    sizes = h.sizes
    usual = sizes["width"] // sizes["heads"] if sizes["layers"] == exception else sizes["head_dim"]
    config.only("query_pre_attn_scalar", usual)


def olmo3(config: Config) -> Hyperparameters:
    """OLMo 2 and, where some layers have a window, 3."""
    h = decoder(config)
    config.only("clip_qkv", None)
    if config.get("sliding_window") is None:
        return h
    windows = [(number + 1) % 4 != 0 for number in range(h.sizes["layers"])]
    config.windows(windows)
    return h.plus(
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows,
        rope__freq_base_swa=h.metadata["rope.freq_base"],
    )


def starcoder2(config: Config) -> Hyperparameters:
    """Layer norms."""
    h = decoder(config, activations=GELU)
    warn_of_window(config)
    config.only("use_bias", True)
    return h.plus(
        attention__layer_norm_rms_epsilon=None,
        attention__layer_norm_epsilon=config.number("norm_epsilon", 1e-5),
    )


def gpt2(config: Config) -> Hyperparameters:
    """Other names, and nothing is rotated."""
    refuse_other_activations(config, GELU)
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    width, heads, context = config.count("n_embd"), config.count("n_head"), config.count("n_positions")
    if width % heads:
        raise config.refusal(f"{heads} heads of {width} numbers make no sense")
    sizes = {
        "vocab": config.count("vocab_size"),
        "layers": config.count("n_layer", most=MOST_LAYERS),
        "width": width,
        "fused_rows": 3 * width,
        "queries": width,
        "hidden": config.count("n_inner", 4 * width),
        "context": context,
    }
    metadata: dict[str, Any] = {
        "block_count": sizes["layers"],
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": sizes["hidden"],
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
    }
    return Hyperparameters(sizes, metadata, {}, config.flag("tie_word_embeddings"))


LLAMA = Family("llama", {**ATTENTION, **GATED, **NORMS_BEFORE}, llama, rotated=ROTATED)
MISTRAL3 = replace(LLAMA, arch="mistral3", read=mistral3, sees=True)
QWEN2 = Family("qwen2", LLAMA.layer, qwen, biased=("attn_q", "attn_k", "attn_v"))
QWEN3 = Family("qwen3", {**ATTENTION, **HEAD_NORMS, **GATED, **NORMS_BEFORE}, qwen)
SMOLLM3 = replace(LLAMA, arch="smollm3", read=smollm3, defaults=TIED | {"rope_theta": 2e6})
GRANITE = replace(LLAMA, arch="granite", read=granite)
OLMO2 = Family(
    "olmo2",
    {**ATTENTION, "attn_q_norm": ("queries",), "attn_k_norm": ("keys",), **GATED, **NORMS_BEHIND},
    olmo3,
    defaults={"rms_norm_eps": 1e-5},
)
PHI3 = Family(
    "phi3",
    {
        "attn_qkv": ("fused_rows", "width"),
        "attn_output": ("width", "queries"),
        "ffn_up": ("both_hidden", "width"),
        "ffn_down": ("width", "hidden"),
        **NORMS_BEFORE,
    },
    phi3,
    defaults={"rms_norm_eps": 1e-5},
)
GEMMA = Family(
    "gemma", LLAMA.layer, gemma, offset_norms=True, defaults=TIED | {"head_dim": 256, "max_position_embeddings": 8192}
)
GEMMA2 = Family(
    "gemma2",
    {**ATTENTION, **GATED, **NORMS_BEFORE, **NORMS_BEHIND},
    gemma2,
    offset_norms=True,
    defaults={
        **GEMMA.defaults,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA3 = Family(
    "gemma3",
    {**ATTENTION, **HEAD_NORMS, **GATED, **NORMS_BEFORE, **NORMS_BEHIND},
    gemma3,
    offset_norms=True,
    defaults={  # Gemma 3's config.json says little more than what differs from these
        **TIED,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "rope_theta": 1e6,
    },
    sees=True,
)
NORMS_AND_MATRICES = ("attn_norm", "ffn_norm", "output_norm", "attn_output", "ffn_up", "ffn_down")
STARCODER2 = Family(
    "starcoder2",
    {**ATTENTION, **FEED_FORWARD, **NORMS_BEFORE},
    starcoder2,
    biased=("attn_q", "attn_k", "attn_v", *NORMS_AND_MATRICES),
    defaults=TIED | {"max_position_embeddings": 4096},
)
GPT2 = Family(
    "gpt2",
    {"attn_qkv": ("fused_rows", "width"), "attn_output": ("width", "queries"), **FEED_FORWARD, **NORMS_BEFORE},
    gpt2,
    whole={"position_embd": ("context", "width")},
    transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    biased=("attn_qkv", *NORMS_AND_MATRICES),
    defaults=TIED | {"n_positions": 1024},
)
