"""Compute how many of a model's layers fit a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from localllm.arch.layer_state import KVType, Recurrent, State
from localllm.engine.memory.recurrent import SNAPSHOTS
from localllm.engine.trace.split import LAYER
from localllm.errors import MemoryLimitError
from localllm.files.gguf.file import Tensor
from localllm.kernels.cuda.matmul.planes import row_bytes, stored_as
from localllm.kernels.table import PAGE

# Bytes of GPU memory for kernels, graphs, the driver, and a little for other programs.
MARGIN = 400 << 20


class Sizes(NamedTuple):
    """Bytes on the GPU."""

    layers: list[int]  # weights and cache of each layer
    rest: int  # embedding and output matrices, buffers


def sizes(
    tensors: Mapping[str, Tensor], states: Sequence[State], layers: int, context: int, kv_type: KVType, buffers: int
) -> Sizes:
    """Compute the bytes of each layer, with a cache for `context` tokens."""
    by_layer, other_bytes = [0] * layers, buffers
    for name, tensor in tensors.items():
        layer, size = LAYER.match(name), card_bytes(tensor)
        if layer and int(layer[1]) < layers:
            by_layer[int(layer[1])] += size
        else:
            other_bytes += size
    for state in states:
        by_layer[state.layer] += state_bytes(state, context, kv_type)
    return Sizes(by_layer, other_bytes)


def card_bytes(tensor: Tensor) -> int:
    """Compute a tensor's bytes on the GPU: more than in the file if its format has no GPU kernels."""
    return prod(tensor.shape[:-1]) * row_bytes(stored_as(tensor.format.name), tensor.shape[-1])


def state_bytes(state: State, context: int, kv_type: KVType) -> int:
    """Compute the bytes of a layer's state: of all tokens, even with a window; or of all recurrent snapshots."""
    if isinstance(state, Recurrent):
        return (SNAPSHOTS + 3) * state.bytes(context, kv_type)  # before a run and after it, and the initial states
    state = replace(state, window=None)
    return state.bytes(context + 2 * PAGE, kv_type)  # the cache rounds up to an odd number of whole pages


def spare(needed_sizes: Sizes, count: int, free: int) -> int:
    """Return the bytes that stay free with the last `count` layers on the GPU."""
    return free - MARGIN - needed_sizes.rest - sum(needed_sizes.layers[len(needed_sizes.layers) - count :])


def layers_that_fit(needed_sizes: Sizes, free: int) -> int:
    """Return how many of the last layers fit together with the rest; 0 for none."""
    room, count = free - MARGIN - needed_sizes.rest, 0
    for size in reversed(needed_sizes.layers):
        room -= size
        if room < 0:
            break
        count += 1
    return count


def require_room(needed_sizes: Sizes, count: int, free: int) -> None:
    """Raise MemoryLimitError unless the last `count` layers fit."""
    if count and layers_that_fit(needed_sizes, free) < min(count, len(needed_sizes.layers)):
        size = needed_sizes.rest + sum(needed_sizes.layers[len(needed_sizes.layers) - count :])
        raise MemoryLimitError(
            f"{count} layers need {size / 1e9:.1f} GB of GPU memory; {free / 1e9:.1f} GB are free: use -ngl auto, a"
            " shorter context, or a smaller --kv-type"
        )
