"""Open the GPU, and decide how many of a model's layers it gets."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from localllm.arch.layer_state import ON_GPU, KVType, State
from localllm.engine.cuda.card import Card
from localllm.engine.cuda.device import NoCardError
from localllm.engine.cuda.device import open_card as open_card  # callers import it from here
from localllm.engine.cuda.placement import Sizes, layers_that_fit, require_room, sizes, spare
from localllm.engine.options import EngineOptions
from localllm.errors import MemoryLimitError, UnsupportedError
from localllm.files.gguf.file import GGUFFile


class GpuPlacement(NamedTuple):
    """A GPU for the model's last layers, or none."""

    card: Card | None
    layers: int  # number of layers
    spare: int = 0  # free bytes besides the layers and one context
    warning: str | None = None  # why there is no GPU, where that is unexpected


def place_layers(
    options: EngineOptions, file: GGUFFile, states: Sequence[State], layers: int, context: int,
    buffers: Callable[[Sequence[State], KVType], int],
) -> GpuPlacement:  # fmt: skip
    """Open the GPU that the options name, and decide how many layers it gets: those that are requested and fit.

    buffers(states, kv_type): bytes that a GPU needs in addition to weights and cache. With the device auto there may be
    no GPU; `warning` then says why. Raises NoCardError, MemoryLimitError, UnsupportedError.
    """
    device, requested, kv_type = options.backend, options.gpu_layers, options.kv_cache_type
    automatic = device == "auto"
    if requested == 0:
        return GpuPlacement(None, 0)
    try:
        card = open_card(int(device.partition(":")[2] or 0))
    except NoCardError as error:
        if automatic:
            return GpuPlacement(None, 0, warning=f"the CPU computes: {error}")
        raise
    try:
        if missing := set(kv_type).difference(ON_GPU):
            raise UnsupportedError(
                f"no KV cache of type {min(missing)} on GPUs: use {', '.join(ON_GPU)}, or --device cpu"
            )
        needed_sizes = sizes(file.tensors, states, layers, context, kv_type, buffers(states, kv_type))
        free = card.free_bytes()
        count = layers_on(card.name, needed_sizes, requested, free)
        return GpuPlacement(card, count, spare(needed_sizes, count, free))
    except (MemoryLimitError, UnsupportedError) as error:
        card.close()
        if automatic and requested == "auto":
            return GpuPlacement(None, 0, warning=f"the CPU computes: {error}")
        raise


def layers_on(card: str, needed_sizes: Sizes, requested: int | str, free: int) -> int:
    """Return how many layers a GPU gets; requested: a number, "all" or "auto"; free: bytes.

    Raises MemoryLimitError if the GPU's memory does not suffice for the requested number, or for a single layer.
    """
    count = len(needed_sizes.layers) if requested == "all" else requested
    if isinstance(count, int):
        require_room(needed_sizes, min(count, len(needed_sizes.layers)), free)
        return min(count, len(needed_sizes.layers))
    if not (count := layers_that_fit(needed_sizes, free)):
        raise MemoryLimitError(f"{card} has {free / 1e9:.1f} GB free, too little for one layer of this model")
    return count
