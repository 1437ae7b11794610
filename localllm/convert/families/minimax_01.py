"""MiniMax-Text-01 and M1."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read MiniMax-Text-01: every eighth layer has softmax attention; residuals are scaled norms."""
    for kind in ("full_attention", "linear_attention", "mlp"):
        config.only(f"layernorm_{kind}_alpha", config.get("layernorm_full_attention_alpha"))
    h = declared(config)
    attends = [number % 8 == 7 for number in range(h.sizes["layers"])]
    config.only("attn_type_list", [*map(int, attends)])
    return h.updated({f"attends_{number}": int(does) for number, does in enumerate(attends)})
