"""Phi 3, 3.5 and 4, and Phi 3.5 with experts."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.rope_scaling import rope_parameters

UNLIKE = "GGUF's readers take norms without mean and add up both experts' weights to 1, which the model does not"


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Phi 3: fused matrices, and factors for long contexts."""
    h = declared(config)
    rope, context = rope_parameters(config), h.metadata["context_length"]
    return h.updated(rope__scaling__original_context_length=rope.count("original_max_position_embeddings", context))


def moe(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Phi 3.5 MoE: biases, and two experts per token."""
    config.warnings.append(UNLIKE)
    return read(config, declared)
