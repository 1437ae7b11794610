"""OLMo 1 to 3, and OLMoE, which has experts."""

from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.families.experts import with_experts
from localllm.convert.families.layers import ATTENTION, EXPERTS, GATED, NORMS_BEFORE, NORMS_BEHIND, ROTATED
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder


def olmo(config: Config) -> CheckpointFacts:
    """Read OLMo 1: layer norms without weights; queries, keys and values may be clamped."""
    config.only("attention_bias", False)
    limit = None if config.get("clip_qkv") is None else config.number("clip_qkv")
    return decoder(config).updated(
        attention__layer_norm_rms_epsilon=None, attention__layer_norm_epsilon=1e-5, attention__clamp_kqv=limit
    )


def olmo3(config: Config) -> CheckpointFacts:
    """Read OLMo 2 and, where some layers have a window, 3."""
    h = decoder(config)
    config.only("clip_qkv", None)
    if config.get("sliding_window") is None:
        return h
    windows = [(number + 1) % 4 != 0 for number in range(h.sizes["layers"])]
    config.windows(windows)
    local = config.section("rope_parameters").section("sliding_attention")
    return h.updated(
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows,
        rope__freq_base_swa=local.number("rope_theta", h.metadata["rope.freq_base"]),
    )


def olmoe(config: Config) -> CheckpointFacts:
    config.only("norm_topk_prob", False)
    config.only("clip_qkv", None)
    return with_experts(config, decoder(config), "intermediate_size")


OLMO = Family("olmo", {**ATTENTION, **GATED}, olmo, last_norm="", rotated=ROTATED)
OLMO2 = Family(
    "olmo2",
    {**ATTENTION, "attn_q_norm": ("queries",), "attn_k_norm": ("keys",), **GATED, **NORMS_BEHIND},
    olmo3,
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = replace(OLMO2, defaults={**OLMO2.defaults, "sliding_window": 4096, "rope_theta": 5e5})
OLMOE = Family(
    "olmoe",
    {**ATTENTION, "attn_q_norm": ("queries",), "attn_k_norm": ("keys",), **NORMS_BEFORE, **EXPERTS},
    olmoe,
    defaults=OLMO2.defaults,
)
