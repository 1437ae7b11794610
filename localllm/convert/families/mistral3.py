"""Mistral Small 3 and Ministral 3."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.rope_scaling import rope_parameters


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read the language model of Mistral Small 3; Ministral 3 adds YaRN and a temperature by position."""
    h = declared(config)
    if h.metadata.get("rope.scaling.type") != "yarn":
        return h
    rope = rope_parameters(config)
    rope.only("attention_factor")
    rope.only("mscale", 1)
    return h.updated(
        rope__scaling__attn_factor=None,
        rope__scaling__yarn_log_multiplier=rope.number("mscale_all_dim"),
        attention__temperature_scale=rope.number("llama_4_scaling_beta"),
    )
