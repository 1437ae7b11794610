"""Mamba and Falcon Mamba."""

from collections.abc import Callable

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts, refuse_other_activations

CONTEXT = 1 << 20  # unlimited; GGUF's readers need a number


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Mamba (Gu and Dao 2023, arXiv 2312.00752)."""
    refuse_other_activations(config, ("silu", "swish"))
    config.only("use_conv_bias", True)
    width = config.count("hidden_size")
    inner, state = config.count("intermediate_size", 2 * width), config.count("state_size", 16)
    rank = config.get("time_step_rank")
    rank = -(-width // 16) if rank in (None, "auto") else config.count("time_step_rank")
    kernel, layers = config.count("conv_kernel", 4), config.count("num_hidden_layers", maximum=MOST_LAYERS)
    if inner != 2 * width:
        raise config.refusal(f"intermediate_size should be twice hidden_size {width}, is {inner}")
    sizes = {
        "vocab": config.count("vocab_size"),
        "layers": layers,
        "width": width,
        "inner": inner,
        "both_inner": 2 * inner,
        "state": state,
        "kernel": kernel,
        "rank": rank,
        "rank_and_states": rank + 2 * state,
        "one": 1,
    }
    metadata = {
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": width,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
        "ssm.dt_b_c_rms": False,
    }
    return CheckpointFacts(sizes, metadata, {}, config.flag("tie_word_embeddings"))


def falcon_mamba(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Falcon Mamba: norms of the scan's inputs."""
    h = read(config, declared)
    config.only("mixer_rms_eps", config.number("layer_norm_epsilon", 1e-5))
    return h.updated(ssm__dt_b_c_rms=True)
