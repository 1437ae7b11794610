"""Falcon H1."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from localllm.convert.config import Config
from localllm.convert.families.mamba2 import MAMBA2, NORM, OF_HYBRIDS, states_of, with_states
from localllm.convert.family import Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Falcon H1: attention and Mamba 2 side by side; muP multipliers are folded into the matrices."""
    h = declared(config)
    config.only("tie_word_embeddings", False)
    if config.flag("mamba_rms_norm", False):
        config.only("mamba_norm_before_gate", False)
    inner = config.count("mamba_d_ssm", config.count("mamba_expand", 2) * h.sizes["width"])
    sizes = states_of(config, h.sizes["width"], inner, "mamba_", OF_HYBRIDS)
    flags = {"has_norm": int(config.flag("mamba_rms_norm", False))}
    h = with_states(h.updated(flags), sizes)
    return replace(h, factors=factors_of(config, h.sizes))


def factors_of(config: Config, sizes: Sizes) -> dict[str, list[np.ndarray]]:
    """Return muP's multipliers, by matrix."""

    def factor(name: str) -> np.ndarray:
        return np.array([config.number(f"{name}_multiplier", 1.0)], np.float32)

    groups = sizes["groups"] * sizes["state"]
    rows = [sizes["inner"], sizes["inner"], groups, groups, sizes["state_heads"]]
    of_parts = np.array(config.numbers("ssm_multipliers", len(rows)), np.float32)
    of_gate, of_down = np.array(config.numbers("mlp_multipliers", 2), np.float32)
    attention = factor("attention_in")
    return {
        "token_embd": [factor("embedding")],
        "output": [factor("lm_head")],
        "attn_q": [attention],
        "attn_k": [factor("key"), attention],
        "attn_v": [attention],
        "attn_output": [factor("attention_out")],
        "ffn_gate": [of_gate[None]],
        "ffn_down": [of_down[None]],
        "ssm_in": [factor("ssm_in"), np.repeat(of_parts, rows)],
        "ssm_out": [factor("ssm_out")],
    }


def mixer(sizes: Sizes, number: int) -> Layer:
    return {**MAMBA2, **(NORM if sizes["has_norm"] else {})}
