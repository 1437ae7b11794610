"""Jina Embeddings 2."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.families.bert import encoder
from localllm.convert.hyperparameters import CheckpointFacts

OF_CODE = "qk-post-norm"  # in the name of the code that jina-embeddings-v2-base-code uses


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Jina Embeddings 2: ALiBi, gated GELU, gate and up projections in one matrix."""
    config.only("hidden_act", "gelu")
    config.only("position_embedding_type", "alibi")
    config.only("feed_forward_type", "geglu")
    h = encoder(config, config.count("max_position_embeddings", 8192), config.number("layer_norm_eps", 1e-12))
    return h.updated({"both_hidden": 2 * h.sizes["hidden"], "norms_heads": int(OF_CODE in str(config.get("auto_map")))})
