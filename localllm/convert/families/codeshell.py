"""CodeShell and Refact."""

from collections.abc import Callable

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read CodeShell: RoPE, and biases."""
    width = config.count("n_embd")
    config.only("n_inner", 4 * width)
    return declared(early(config, 4 * width, config.count("num_query_groups")))


def refact(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Refact: ALiBi, a single key head."""
    hidden = -(-int(8 * config.count("n_embd") / 3) // 256) * 256  # as in its code, whatever n_inner is
    return declared(early(config.updated(rms_norm_eps=config.number("layer_norm_epsilon", 1e-5)), hidden, 1))


def early(config: Config, hidden: int, groups: int) -> Config:
    """Rename GPT-2's keys."""
    renamed = {"hidden_size": config.count("n_embd"), "num_attention_heads": config.count("n_head"), "head_dim": None}
    renamed |= {"num_hidden_layers": config.count("n_layer", maximum=MOST_LAYERS), "num_key_value_heads": groups}
    renamed |= {"max_position_embeddings": config.count("n_positions"), "intermediate_size": hidden}
    return config.updated(**renamed)
