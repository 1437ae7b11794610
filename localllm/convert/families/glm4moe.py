"""GLM 4.5 to 4.7, and Solar Open."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.experts import SIGMOID, with_deepseek_experts
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read GLM 4.5: partial RoPE, head norms in the largest ones.

    A multi-token prediction layer is counted even where the checkpoint lacks it.
    """
    h = with_deepseek_experts(config, declared(config))
    mtp_layers = h.sizes["mtp_layers"]
    return h.updated(
        {"head_norms": int(config.flag("use_qk_norm", False)), "attention_bias": int(config.flag("attention_bias"))},
        block_count=h.sizes["layers"] + mtp_layers,
        nextn_predict_layers=mtp_layers or None,
        expert_gating_func=SIGMOID,
    )


def solar_open(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Solar Open: experts in all layers, without a key for leading dense ones."""
    return read(config, declared).updated(leading_dense_block_count=None)
