"""AFMoE."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read AFMoE, which scales embeddings."""
    if not config.flag("mup_enabled"):
        raise config.refusal("mup_enabled false is not supported: GGUF's readers always scale embeddings")
    return declared(config)
