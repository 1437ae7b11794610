"""StableLM and Orion."""

from collections.abc import Callable, Sequence

import numpy as np

from localllm.convert.config import Config
from localllm.convert.family import DerivedTensor, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.tensors import Shape, TensorSource, as_float32, from_array

BASE = 10000.0


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read StableLM: the largest has head norms, and one norm for attention and feed-forward network."""
    parallel = config.flag("use_parallel_residual")
    flags = {"head_norms": int(config.flag("qk_layernorm")), "parallel": int(parallel)}
    return declared(config).updated(flags, use_parallel_residual=parallel)


def head_norms(sizes: Sizes, number: int) -> Layer:
    """List norms that are stored per head."""
    heads = {"q": sizes["heads"], "k": sizes["kv_heads"]}
    return {f"attn_{kind}_norm": of_heads(kind, count) for kind, count in heads.items()}


def of_heads(kind: str, heads: int) -> DerivedTensor:
    """Stack norms that are stored per head; kind: q or k in the checkpoint."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return from_array(np.concatenate([as_float32(source.rows(0, 1), source.dtype) for source in sources]))

    stored = {f"self_attn.{kind}_layernorm.norms.{head}.weight": ("head_dim",) for head in range(heads)}
    return DerivedTensor(("heads" if kind == "q" else "kv_heads", "head_dim"), stored, build)


def orion(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Orion: layer norms, though config.json names RMS norms."""
    h = declared(config)
    if h.metadata["rope.freq_base"] != BASE:
        raise config.refusal(f"rope_theta {h.metadata['rope.freq_base']} is not supported: GGUF's readers take {BASE}")
    return h.updated(
        attention__layer_norm_epsilon=h.metadata["attention.layer_norm_rms_epsilon"],
        attention__layer_norm_rms_epsilon=None,
    )
