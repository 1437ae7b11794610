"""Falcon."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Falcon: one KV head per group of heads, or one for all; newer models have a norm per branch."""
    newer, heads = config.flag("new_decoder_architecture"), config.count("num_attention_heads", config.get("n_head"))
    groups = 1 if config.flag("multi_query", True) and not newer else config.count("num_kv_heads", heads)
    renamed = {"num_attention_heads": heads, "num_key_value_heads": groups}
    renamed |= {"num_hidden_layers": config.get("num_hidden_layers", config.get("n_layer"))}
    renamed |= {"intermediate_size": config.count("ffn_hidden_size", 4 * config.count("hidden_size"))}
    h = declared(config.updated(**renamed))
    return h.updated({"two_norms": newer and config.get("num_ln_in_parallel_attn", 2) == 2})
