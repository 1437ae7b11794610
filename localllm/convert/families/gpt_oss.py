"""gpt-oss, its experts as numbers or in MXFP4 blocks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.family import BYTES, DerivedTensor, Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import ATTENTION
from localllm.convert.tensors import Shape, TensorSource, every_second, mxfp4, take_strided, transpose


def gpt_oss(config: Config) -> CheckpointFacts:
    """Read gpt-oss: every other layer has a window; experts in MXFP4 blocks of 32, if they are quantized."""
    h = decoder(config, scalings=("yarn", "untruncated"))
    config.windows([number % 2 == 0 for number in range(h.sizes["layers"])])
    config.only("swiglu_limit", 7.0)
    key = "num_experts_per_tok" if config.get("num_experts_per_tok") is not None else "experts_per_token"
    h = with_experts(config, h, "intermediate_size", "num_local_experts", key)
    width, hidden = h.sizes["width"], h.sizes["expert_hidden"]
    if width % 32 or hidden % 32:
        raise config.refusal(f"experts of {hidden} times {width} weights cannot be divided into blocks of 32")
    blocks = {"both_hidden": 2 * hidden, "block_bytes": 16, "width_blocks": width // 32, "hidden_blocks": hidden // 32}
    return h.updated(
        blocks, attention__sliding_window=config.count("sliding_window"), expert_feed_forward_length=hidden
    )


def half_of_blocks(start: int, sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take every other row of MXFP4 matrices: gate and up projections are interleaved."""
    return take_strided(mxfp4(*sources), shape, 2 * shape[-2], start, 2)


def half_of_columns(start: int, sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take every other column of transposed matrices."""
    return take_strided(transpose(sources[0]), shape, 2 * shape[-2], start, 2)


def half_of_biases(start: int, sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return every_second(sources[0], start)


EXPERT = "mlp.experts."
ONE_HALF = ("experts", "expert_hidden", "width")
DOWN = ("experts", "width", "expert_hidden")
BOTH_BIASES = {f"{EXPERT}gate_up_proj_bias": ("experts", "both_hidden")}
DOWN_BIAS = {f"{EXPERT}down_proj_bias": ("experts", "width")}
BOTH_TURNED = {f"{EXPERT}gate_up_proj": ("experts", "width", "both_hidden")}
BOTH_BLOCKS = {
    f"{EXPERT}gate_up_proj_blocks": ("experts", "both_hidden", "width_blocks", "block_bytes"),
    f"{EXPERT}gate_up_proj_scales": ("experts", "both_hidden", "width_blocks"),
}
DOWN_BLOCKS = {
    f"{EXPERT}down_proj_blocks": ("experts", "width", "hidden_blocks", "block_bytes"),
    f"{EXPERT}down_proj_scales": ("experts", "width", "hidden_blocks"),
}
GPT_OSS_LAYER: Layer = {
    "attn_norm": ("width",),
    **ATTENTION,
    "attn_sinks": ("heads",),
    "post_attention_norm": ("width",),
    "ffn_gate_inp": ("experts", "width"),
    "ffn_gate_exps.bias": DerivedTensor(("experts", "expert_hidden"), BOTH_BIASES, partial(half_of_biases, 0)),
    "ffn_up_exps.bias": DerivedTensor(("experts", "expert_hidden"), BOTH_BIASES, partial(half_of_biases, 1)),
    "ffn_down_exps.bias": DerivedTensor(("experts", "width"), DOWN_BIAS, lambda sources, shape, sizes: sources[0]),
}
GPT_OSS = Family(
    "gpt-oss",
    {
        **GPT_OSS_LAYER,
        "ffn_gate_exps": DerivedTensor(ONE_HALF, BOTH_TURNED, partial(half_of_columns, 0)),
        "ffn_up_exps": DerivedTensor(ONE_HALF, BOTH_TURNED, partial(half_of_columns, 1)),
        "ffn_down_exps": DerivedTensor(
            DOWN,
            {f"{EXPERT}down_proj": ("experts", "expert_hidden", "width")},
            lambda sources, shape, sizes: transpose(sources[0]),
        ),
    },
    gpt_oss,
    biased=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp"),
    defaults={"head_dim": 64, "rope_theta": 150000.0, "rms_norm_eps": 1e-5, "sliding_window": 128},
)
GPT_OSS_MXFP4 = replace(
    GPT_OSS,
    layer={
        **GPT_OSS_LAYER,
        "ffn_gate_exps": DerivedTensor(ONE_HALF, BOTH_BLOCKS, partial(half_of_blocks, 0), BYTES),
        "ffn_up_exps": DerivedTensor(ONE_HALF, BOTH_BLOCKS, partial(half_of_blocks, 1), BYTES),
        "ffn_down_exps": DerivedTensor(DOWN, DOWN_BLOCKS, lambda sources, shape, sizes: mxfp4(*sources), BYTES),
    },
)
