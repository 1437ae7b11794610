"""EuroBERT."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.families.bert import CLASSIFIERS
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read EuroBERT: like Llama with bidirectional attention. llama.cpp's reader ignores RoPE scaling."""
    return declared(config).updated(classifier__pooling_type=CLASSIFIERS.get(config.get("classifier_pooling")))
