"""Gemma 2."""

from collections.abc import Callable

from localllm.arch.families.gemma2 import LAYERS_OF_27B
from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Gemma 2: every other layer has a window."""
    return with_usual_scale(config, declared(config), LAYERS_OF_27B)


def with_usual_scale(config: Config, h: CheckpointFacts, exception: int) -> CheckpointFacts:
    """Raise ModelError if scores are not scaled as GGUF's readers do.

    They scale by the head length; in the model with `exception` layers by width / heads.
    """
    sizes = h.sizes
    usual = sizes["width"] // sizes["heads"] if sizes["layers"] == exception else sizes["head_dim"]
    config.only("query_pre_attn_scalar", usual)
    return h
