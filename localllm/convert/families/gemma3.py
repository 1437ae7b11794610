"""Gemma 3."""

from collections.abc import Callable

from localllm.arch.families.gemma3 import LAYERS_OF_27B
from localllm.convert.config import Config
from localllm.convert.families.gemma2 import with_usual_scale
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Gemma 3: five layers of six have a window and a RoPE base of their own."""
    h = with_usual_scale(config, declared(config), LAYERS_OF_27B)
    if config.get("attn_logit_softcapping") is not None:
        raise config.refusal("attn_logit_softcapping is not supported")
    return with_local_base(config, h)


def with_local_base(config: Config, h: CheckpointFacts) -> CheckpointFacts:
    """Add the RoPE base of layers with a window."""
    local = config.section("rope_parameters").section("sliding_attention")
    return h.updated(rope__freq_base_swa=local.number("rope_theta", config.number("rope_local_base_freq", 10000.0)))
