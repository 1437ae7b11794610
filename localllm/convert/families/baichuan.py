"""Baichuan."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Baichuan: the larger ones have ALiBi, which GGUF's readers infer from the number of layers."""
    unsaid = {"rope_theta": "rope__freq_base", "num_key_value_heads": "attention__head_count_kv"}
    defaults: dict[str, object] = {key: None for name, key in unsaid.items() if config.get(name) is None}
    return declared(config).updated(**defaults)
