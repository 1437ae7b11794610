"""Gemma 1 to 3."""

from localllm.arch.families import gemma2 as gemma2_arch
from localllm.arch.families import gemma3 as gemma3_arch
from localllm.convert.config import Config
from localllm.convert.family import Family
from localllm.convert.hyperparameters import GELU, CheckpointFacts, decoder
from localllm.convert.layers import ATTENTION, GATED, HEAD_NORMS, NORMS_BEFORE, NORMS_BEHIND


def of_gemma(config: Config, activations: tuple[str, ...] = GELU) -> CheckpointFacts:
    """Read what all Gemmas share: an explicit head length, tied embeddings."""
    config.only("use_bidirectional_attention", False)
    config.only("tie_word_embeddings", True)
    return decoder(config, activations=activations)


def gemma2(config: Config) -> CheckpointFacts:
    """Read Gemma 2: every other layer has a window."""
    h = of_gemma(config)
    config.windows([number % 2 == 0 for number in range(h.sizes["layers"])])
    refuse_other_scale(config, h, gemma2_arch.LAYERS_OF_27B)
    return h.updated(
        attn_logit_softcapping=config.number("attn_logit_softcapping"),
        final_logit_softcapping=config.number("final_logit_softcapping"),
        attention__sliding_window=config.count("sliding_window"),
    )


def gemma3(config: Config) -> CheckpointFacts:
    """Read Gemma 3: five layers of six have a window and a RoPE base of their own."""
    h = of_gemma(config)
    config.only("sliding_window_pattern", 6)
    config.windows([number % 6 != 5 for number in range(h.sizes["layers"])])
    refuse_other_scale(config, h, gemma3_arch.LAYERS_OF_27B)
    if config.get("attn_logit_softcapping") is not None:
        raise config.refusal("attn_logit_softcapping is not supported")
    local = config.section("rope_parameters").section("sliding_attention")
    cap = config.get("final_logit_softcapping")
    return h.updated(
        rope__freq_base_swa=local.number("rope_theta", config.number("rope_local_base_freq", 10000.0)),
        final_logit_softcapping=None if cap is None else config.number("final_logit_softcapping"),
        attention__sliding_window=config.count("sliding_window"),
    )


def refuse_other_scale(config: Config, h: CheckpointFacts, exception: int) -> None:
    """Raise ModelError if scores are not scaled as GGUF's readers do.

    They scale by the head length; in the model with `exception` layers by width / heads.
    """
    sizes = h.sizes
    usual = sizes["width"] // sizes["heads"] if sizes["layers"] == exception else sizes["head_dim"]
    config.only("query_pre_attn_scalar", usual)


TIED = {"tie_word_embeddings": True}
GEMMA2 = Family(
    "gemma2",
    {**ATTENTION, **GATED, **NORMS_BEFORE, **NORMS_BEHIND},
    gemma2,
    offset_norms=True,
    defaults={
        **TIED,
        "head_dim": 256,
        "max_position_embeddings": 8192,
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
    defaults={  # Gemma 3's config.json says little more than its differences from these
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
