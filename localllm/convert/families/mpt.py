"""MPT."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import APPROXIMATED, CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read MPT, whose exact GELU is approximated; queries, keys and values may be clamped."""
    config.warnings.append(APPROXIMATED)
    attention = config.section("attn_config")
    limit = attention.number("clip_qkv") if attention.get("clip_qkv") else None
    return declared(config).updated(attention__clamp_kqv=limit)
