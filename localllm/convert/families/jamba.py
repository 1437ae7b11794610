"""Jamba."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.families.mamba2 import attending
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Jamba: no RoPE; experts in every few layers; norms of the scan's inputs."""
    h = declared(config)
    layers, width = h.sizes["layers"], h.sizes["width"]
    kernel, state = config.count("mamba_d_conv", 4), config.count("mamba_d_state", 16)
    inner, rank = config.count("mamba_expand", 2) * width, config.get("mamba_dt_rank")
    rank = -(-width // 16) if rank in (None, "auto") else config.count("mamba_dt_rank")
    sizes = {"kernel": kernel, "state": state, "inner": inner, "both_inner": 2 * inner, "rank": rank, "one": 1}
    sizes |= {"rank_and_states": rank + 2 * state, "expert_hidden": h.sizes["hidden"]}
    experts, every = config.count("num_experts", 16), every_so_many(config, "expert", layers, 2, 1)
    sizes |= {"experts": experts} | {f"mixes_{n}": int(does and experts > 1) for n, does in enumerate(every)}
    h = attending(config, h.updated(sizes), every_so_many(config, "attn", layers, 8, 4))
    return h.updated(
        ssm__conv_kernel=kernel,
        ssm__state_size=state,
        ssm__inner_size=inner,
        ssm__time_step_rank=rank,
        expert_count=experts,
        expert_used_count=config.count("num_experts_per_tok", 2),
    )


def every_so_many(config: Config, name: str, layers: int, period: int, offset: int) -> list[bool]:
    """Mark every `period`-th layer from `offset` on."""
    period, offset = config.count(f"{name}_layer_period", period), config.get(f"{name}_layer_offset", offset)
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise config.refusal(f"{name}_layer_offset should be below {name}_layer_period, {period}")
    return [number % period == offset for number in range(layers)]
