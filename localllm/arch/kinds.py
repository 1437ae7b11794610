"""What the hyperparameters are that GGUF names: whole numbers, numbers, texts or flags, also those a family ignores.

Families check what they read, and more strictly. Source: the GGUF specification,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#llm
"""

import numpy as np

from localllm.arch.fields import Fields
from localllm.files.checked import is_whole, show

MOST = (1 << 31) - 1  # some files have it for "no limit"
EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.group_norm_epsilon")
NOT_ZERO = ("rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale_linear", "rope.freq_base")
FLAGS = ("use_parallel_residual", "rope.scaling.finetuned", "attention.causal", "ssm.dt_b_c_rms", "expert_weights_norm")
TEXTS = ("tensor_data_layout", "rope.scaling.type")
# Single ones, or one for each layer.
COUNTS = ("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "expert_count",
          "expert_used_count", "expert_shared_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
          "expert_group_count", "expert_group_used_count", "leading_dense_block_count", "attention.head_count",
          "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window",
          "rope.dimension_count", "rope.scaling.original_context_length", "ssm.conv_kernel", "ssm.inner_size",
          "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")  # fmt: skip


def require_kinds(fields: Fields) -> None:
    """Raise ModelError for a hyperparameter of the wrong kind, and for any number that is not finite."""
    layers = fields.layers()
    for key in fields.metadata:
        if key.startswith(fields.prefix):
            require_finite(fields, key.removeprefix(fields.prefix))
    for name in filter(fields.has, COUNTS):
        require_count(fields, name, layers)
    for name in filter(fields.has, FLAGS):
        fields.flag(name)
    for name in filter(fields.has, TEXTS):
        fields.text(name)
    for name in filter(fields.has, EPSILONS):
        fields.epsilon(name)
    for name in filter(fields.has, NOT_ZERO):
        fields.factor(name)


def require_finite(fields: Fields, name: str) -> None:
    """Of numbers and arrays of numbers."""
    value = fields.raw(name)
    if isinstance(value, float | np.ndarray) and not np.isfinite(value).all():
        raise fields.error(f"{fields.key(name)} should be finite, is {show(value)}")


def require_count(fields: Fields, name: str, layers: int) -> None:
    """One whole number, or one for each layer."""
    value = fields.raw(name)
    values = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else [value]
    if not all(is_whole(item) and 0 <= item <= MOST for item in values):
        raise fields.wrong(name, f"a number from 0 to {MOST}")
    if isinstance(value, np.ndarray) and len(values) != layers:
        raise fields.error(f"{fields.key(name)} has {len(values)} values for {layers} layers")
