"""K-EXAONE."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.families import exaone4
from localllm.convert.families.dots1 import with_sigmoid_experts
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read K-EXAONE: windows as in EXAONE 4."""
    h = with_sigmoid_experts(config, exaone4.read(config, declared))
    return h.updated(
        leading_dense_block_count=h.sizes["leading_dense"],
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
    )
