"""BLOOM."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read BLOOM under its older names, too."""
    width, heads = config.count("hidden_size", config.get("n_embed")), config.count("n_head", config.get("num_heads"))
    renamed: dict[str, object] = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads}
    renamed |= {"num_hidden_layers": config.get("n_layer", config.get("num_hidden_layers"))}
    return declared(config.updated(**renamed, intermediate_size=4 * width, head_dim=None))
