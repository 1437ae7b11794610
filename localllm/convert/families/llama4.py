"""Llama 4."""

from collections.abc import Callable

from localllm.arch.families.llama4 import EXPERTS_OF_MAVERICK
from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Llama 4: three layers of four attend within chunks and have RoPE; experts in every few layers."""
    config.only("use_qk_norm", config.get("num_local_experts") != EXPERTS_OF_MAVERICK)
    h = declared(config)
    layers, step = h.sizes["layers"], h.sizes["step"]
    config.only("moe_layers", [*range(step - 1, layers, step)])
    chunks = [number % 4 != 3 for number in range(layers)]
    config.only("layer_types", ["chunked_attention" if chunk else "full_attention" for chunk in chunks])
    config.only("no_rope_layers", [*map(int, chunks)], [])
    h = with_experts(config, h, "intermediate_size", "num_local_experts")
    hidden = h.sizes["expert_hidden"]
    return h.updated(
        {
            **{f"dense_{number}": (number + 1) % step for number in range(layers)},
            "shared_hidden": hidden,
            "both_hidden": 2 * hidden,
        },
        expert_feed_forward_length=hidden,
    )
