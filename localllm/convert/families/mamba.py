"""Mamba and Falcon Mamba."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.family import DerivedTensor, Family, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, refuse_other_activations
from localllm.convert.tensors import Shape, TensorSource, map_values, reshape

CONTEXT = 1 << 20  # unlimited; GGUF's readers need a number


def mamba(config: Config) -> CheckpointFacts:
    """Read Mamba (Gu and Dao 2023, arXiv 2312.00752)."""
    refuse_other_activations(config, ("silu", "swish"))
    config.only("use_conv_bias", True)
    width = config.count("hidden_size")
    inner, state = config.count("intermediate_size", 2 * width), config.count("state_size", 16)
    rank = config.get("time_step_rank")
    rank = -(-width // 16) if rank in (None, "auto") else config.count("time_step_rank")
    kernel, layers = config.count("conv_kernel", 4), config.count("num_hidden_layers", maximum=MOST_LAYERS)
    if inner != 2 * width:
        raise config.refusal(f"intermediate_size should be twice hidden_size {width}, is {inner}")
    sizes = {
        "vocab": config.count("vocab_size"),
        "layers": layers,
        "width": width,
        "inner": inner,
        "both_inner": 2 * inner,
        "state": state,
        "kernel": kernel,
        "rank": rank,
        "rank_and_states": rank + 2 * state,
        "one": 1,
    }
    metadata = {
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": width,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
        "ssm.dt_b_c_rms": False,
    }
    return CheckpointFacts(sizes, metadata, {}, config.flag("tie_word_embeddings"))


def decay(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Convert the stored logarithm to GGUF's negative decay rate."""
    return map_values(sources[0], lambda logarithms: -np.exp(logarithms))


def squeeze(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return reshape(sources[0], shape)


MAMBA = Family(
    "mamba",
    {
        "attn_norm": ("width",),
        "ssm_in": ("both_inner", "width"),
        "ssm_conv1d": DerivedTensor(("inner", "kernel"), {"mixer.conv1d.weight": ("inner", "one", "kernel")}, squeeze),
        "ssm_conv1d.bias": ("inner",),
        "ssm_x": ("rank_and_states", "inner"),
        "ssm_dt": ("inner", "rank"),
        "ssm_a": DerivedTensor(("inner", "state"), {"mixer.A_log": ("inner", "state")}, decay),
        "ssm_d": ("inner",),
        "ssm_out": ("width", "inner"),
    },
    mamba,
    biased=("ssm_dt",),
    defaults={"tie_word_embeddings": True},
)


def falcon_mamba(config: Config) -> CheckpointFacts:
    """Read Falcon Mamba: norms of the scan's inputs."""
    h = mamba(config)
    config.only("mixer_rms_eps", config.number("layer_norm_epsilon", 1e-5))
    return h.updated(ssm__dt_b_c_rms=True)


FALCON_MAMBA = replace(MAMBA, read=falcon_mamba)
