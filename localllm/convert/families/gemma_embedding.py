"""EmbeddingGemma."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.families.gemma2 import with_usual_scale
from localllm.convert.families.gemma3 import with_local_base
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read EmbeddingGemma: windows reach as far ahead as back."""
    if not config.flag("use_bidirectional_attention"):
        raise config.refusal("a causal Gemma3TextModel is not supported: it makes neither text nor vectors")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name) is not None:
            raise config.refusal(f"{name} is not supported")
    return with_local_base(config, with_usual_scale(config, declared(config), 0))
