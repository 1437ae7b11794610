"""MiniCPM."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read MiniCPM: factors of embeddings, residuals and logits; frequency factors for short and long contexts."""
    h = declared(config)
    magnitude = h.metadata.get("rope.scaling.attn_factor")
    return h.updated(
        embedding_scale=config.number("scale_emb"),
        residual_scale=config.number("scale_depth") / h.sizes["layers"] ** 0.5,
        logit_scale=h.sizes["width"] / config.number("dim_model_base"),
        rope__scaling__type="longrope" if h.tensors else h.metadata.get("rope.scaling.type"),
        rope__scaling__attn_factor=None if magnitude == 1 else magnitude,
    )
