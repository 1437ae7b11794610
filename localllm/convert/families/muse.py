"""Muse Glimmer's language model."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localllm.arch.families.muse_glimmer import BEHIND
from localllm.convert.config import Config
from localllm.convert.families.gemma3n import windows_of
from localllm.convert.family import DerivedTensor, Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import ATTENTION, GATED, ROTATED, as_stored
from localllm.convert.tensors import Shape, TensorSource, from_array, map_values


def muse_glimmer(config: Config) -> CheckpointFacts:
    """Read Muse Glimmer: three layers of four have a window and RoPE; head norms have one weight. Raises ModelError."""
    config.only("attention_bias", False)
    config.only("post_norm_eps", BEHIND)
    h = decoder(config)
    base, windows = h.metadata["rope.freq_base"], windows_of(config, h.sizes["layers"], period=4)
    config.only("layer_rope_theta", [base if window else 0 for window in windows])
    h = replace(h, factors={"attn_q_norm": [np.array([config.number("qk_scale_factor")], np.float32)]})
    return h.updated(
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows,
        logit_scale=config.number("output_multiplier"),
        final_logit_softcapping=config.number("final_logit_softcapping"),
    )


def with_offset(name: str) -> DerivedTensor:
    """Declare a norm that multiplies by 1 + weight."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return map_values(sources[0], lambda numbers: numbers + 1)

    return DerivedTensor(("width",), {f"{name}.weight": ("width",)}, build)


def ones(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return from_array(np.ones(shape, np.float32))


LAYER: Layer = {
    **ATTENTION,
    "attn_q_norm": DerivedTensor(("head_dim",), {}, ones),
    "attn_k_norm": DerivedTensor(("head_dim",), {}, ones),
    "attn_gate": as_stored("self_attn.gate_proj", "queries", "width"),
    **GATED,
    "attn_norm": with_offset("input_layernorm"),
    "post_attention_norm": with_offset("post_attention_layernorm"),
    "ffn_norm": with_offset("pre_feedforward_layernorm"),
    "post_ffw_norm": with_offset("post_feedforward_layernorm"),
}
MUSE_GLIMMER = Family(
    "muse-glimmer",
    LAYER,
    muse_glimmer,
    rotated=ROTATED,
    sees=True,
    named_as="gemma3",
    unread=re.compile(r"(model\.)?vision_(adapter|projection)\..*"),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 2048},
)
