"""LFM2."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.families.mamba2 import attending
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read LFM2: convolutions over the last few tokens; some layers have attention."""
    epsilon = {"rms_norm_eps": config.number("norm_eps", 1e-5), "intermediate_size": hidden_of_lfm2(config)}
    h = declared(config.updated(**epsilon))
    kinds, layers, taps = config.get("layer_types"), h.sizes["layers"], config.count("conv_L_cache", 3)
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {"conv", "full_attention"}:
        raise config.refusal(f"layer_types should be conv or full_attention for each of {layers} layers")
    h = attending(
        config, h.updated({"taps": taps, "one": 1, "into_gates": 3 * h.sizes["width"]}), [k != "conv" for k in kinds]
    )
    return h.updated(shortconv__l_cache=taps)


def hidden_of_lfm2(config: Config) -> int:
    """Return the feed-forward hidden size, adjusted as transformers does unless config.json's is final."""
    hidden = config.count("block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return hidden
    multiple = config.count("block_multiple_of", 256)
    hidden = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * hidden / 3))
    return -(-hidden // multiple) * multiple


def moe(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read LFM2 with experts after the first layers."""
    h = read(config.updated(block_auto_adjust_ff_dim=False), declared)
    leading = config.count("num_dense_layers", 2)
    return h.updated({"leading_dense": leading}, leading_dense_block_count=leading)
