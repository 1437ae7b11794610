"""gpt-oss, its experts as numbers or in MXFP4 blocks."""

from collections.abc import Callable, Sequence
from functools import partial

from localllm.convert.config import Config
from localllm.convert.family import Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.tensors import Shape, TensorSource, every_second, mxfp4, take_strided, transpose


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read gpt-oss: every other layer has a window; experts in MXFP4 blocks of 32, if they are quantized."""
    h = declared(config)
    width, hidden = h.sizes["width"], h.sizes["expert_hidden"]
    if width % 32 or hidden % 32:
        raise config.refusal(f"experts of {hidden} times {width} weights cannot be divided into blocks of 32")
    blocks = {"both_hidden": 2 * hidden, "block_bytes": 16, "width_blocks": width // 32, "hidden_blocks": hidden // 32}
    return h.updated(blocks)


def half_of_blocks(start: int, sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take every other row of MXFP4 matrices: gate and up projections are interleaved."""
    return take_strided(mxfp4(*sources), shape, 2 * shape[-2], start, 2)


def half_of_columns(start: int, sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take every other column of transposed matrices."""
    return take_strided(transpose(sources[0]), shape, 2 * shape[-2], start, 2)


def half_of_biases(start: int, sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return every_second(sources[0], start)


def mxfp4_blocks(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return mxfp4(*sources)


even_mxfp4, odd_mxfp4 = (partial(half_of_blocks, start) for start in (0, 1))
even_columns, odd_columns = (partial(half_of_columns, start) for start in (0, 1))
even_biases, odd_biases = (partial(half_of_biases, start) for start in (0, 1))
