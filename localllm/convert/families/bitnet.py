"""BitNet b1.58."""

from collections.abc import Sequence

import numpy as np

from localllm.convert.config import Config
from localllm.convert.family import DerivedTensor, Family, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import (
    ATTENTION,
    GATED,
    NORMS_BEFORE,
)
from localllm.convert.tensors import Shape, TensorSource, as_float32, from_array


def bitnet(config: Config) -> CheckpointFacts:
    """Read BitNet: norms before the last matrices; ternary weights."""
    config.only("attention_bias", False)
    h = decoder(config)
    return h.updated(rope__scaling__type="linear", rope__scaling__factor=1.0)


def of_three(name: str, *dimensions: str) -> DerivedTensor:
    """Declare a ternary matrix: the rounded sign times the mean magnitude (Ma et al. 2024)."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        numbers = as_float32(sources[0].rows(0, shape[0]), sources[0].dtype)
        inverse = np.float32(1) / np.float32(max(np.abs(numbers).mean(dtype=np.float64), 1e-5))
        return from_array(np.clip(np.round(numbers * inverse), -1, 1) / inverse)

    return DerivedTensor(dimensions, {f"{name}.weight": dimensions}, build)


OF_THREE = {
    **{name: f"self_attn.{its}_proj" for name, its in zip(ATTENTION, "qkvo", strict=True)},
    **{name: f"mlp.{name[4:]}_proj" for name in GATED},
}


BITNET = Family(
    "bitnet",
    {
        **{name: of_three(its, *{**ATTENTION, **GATED}[name]) for name, its in OF_THREE.items()},
        **NORMS_BEFORE,
        "attn_sub_norm": ("width",),
        "ffn_sub_norm": ("hidden",),
    },
    bitnet,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "relu2"},
)
