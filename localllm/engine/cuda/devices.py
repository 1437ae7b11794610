"""Open the GPU, decide how many layers fit, and split the operations between GPU and CPU."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from localllm.arch.layer_state import ON_GPU, KVType, RecurrentLayerState, State
from localllm.engine.adapters import Adapter, require_opened
from localllm.engine.cuda.card import Gpu, NoGpuError
from localllm.engine.cuda.card import open_card as open_card  # callers import it from here
from localllm.engine.lower.activation import ALL, Activation, RoutedActivation
from localllm.engine.memory.recurrent import MAX_SNAPSHOTS
from localllm.engine.operations.operation import MatrixOperation, Operation, StateOperation
from localllm.engine.options import EngineOptions
from localllm.errors import MemoryLimitError, UnsupportedError
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.kernels.cuda.matmul.planes import compute_row_bytes, get_storage_format
from localllm.kernels.table import PAGE

# Bytes of GPU memory for kernels, graphs and the driver, with a reserve for other programs.
MARGIN = 400 << 20


class GpuSizes(NamedTuple):
    """The memory that a model needs on the GPU, in bytes."""

    layers: list[int]  # weights and cache of each layer
    rest: int  # embedding and output matrices, buffers


def compute_sizes(
    tensors: Mapping[str, Tensor], states: Sequence[State], layers: int, context: int, kv_type: KVType, buffers: int
) -> GpuSizes:
    """Return the bytes of each layer, with a cache for `context` tokens, and of everything else."""
    by_layer, other_bytes = [0] * layers, buffers
    for name, tensor in tensors.items():
        layer, size = LAYER.match(name), compute_gpu_bytes(tensor)
        if layer and int(layer[1]) < layers:
            by_layer[int(layer[1])] += size
        else:
            other_bytes += size
    for state in states:
        by_layer[state.layer] += compute_state_bytes(state, context, kv_type)
    return GpuSizes(by_layer, other_bytes)


def add_adapters(sizes: GpuSizes, adapters: Iterable[Adapter]) -> GpuSizes:
    """Return the sizes with the matrices of adapters added to their layers."""
    by_layer, other_bytes = [*sizes.layers], sizes.rest
    for name, low_rank in (pair for adapter in adapters for pair in adapter.low_ranks.items()):
        layer = LAYER.match(name)
        size = sum(compute_matrix_bytes(format, shape) for format, shape in low_rank.list_stored())
        if layer and int(layer[1]) < len(by_layer):
            by_layer[int(layer[1])] += size
        else:
            other_bytes += size
    return GpuSizes(by_layer, other_bytes)


def compute_gpu_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on the GPU, more than in the file if its format has no GPU kernels."""
    return compute_matrix_bytes(tensor.format.name, tensor.shape)


def compute_matrix_bytes(format_name: str, shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) * compute_row_bytes(get_storage_format(format_name), shape[-1])


def compute_state_bytes(state: State, context: int, kv_type: KVType) -> int:
    """Return the bytes of a layer's state: of all tokens, even with a window, or of all snapshots."""
    if isinstance(state, RecurrentLayerState):
        return (MAX_SNAPSHOTS + 3) * state.count_bytes(
            context, kv_type
        )  # before a run and after it, and the initial states
    state = replace(state, window=None)
    return state.count_bytes(context + 2 * PAGE, kv_type)  # the cache rounds up to an odd number of whole pages


def compute_spare(needed_sizes: GpuSizes, count: int, free: int) -> int:
    """Return the bytes that stay free with the last `count` layers on the GPU."""
    return free - MARGIN - needed_sizes.rest - sum(needed_sizes.layers[len(needed_sizes.layers) - count :])


def count_fitting_layers(needed_sizes: GpuSizes, free: int) -> int:
    """Return how many of the last layers fit next to everything that belongs to no layer."""
    room, count = free - MARGIN - needed_sizes.rest, 0
    for size in reversed(needed_sizes.layers):
        room -= size
        if room < 0:
            break
        count += 1
    return count


def require_memory(needed_sizes: GpuSizes, count: int, free: int) -> None:
    """Raise MemoryLimitError unless the last `count` layers fit."""
    if count and count_fitting_layers(needed_sizes, free) < min(count, len(needed_sizes.layers)):
        size = needed_sizes.rest + sum(needed_sizes.layers[len(needed_sizes.layers) - count :])
        raise MemoryLimitError(
            f"{count} layers need {size / 1e9:.1f} GB of GPU memory; {free / 1e9:.1f} GB are free: use -ngl auto, a"
            " shorter context, or a smaller --kv-type"
        )


LAYER = re.compile(r"blk\.(\d+)\.")


class SplitOperations(NamedTuple):
    """The operations before and after a cut, and the activations that cross it."""

    before: list[Operation]
    behind: list[Operation]
    crossing: list[Activation]


def split_at_layer(operations: list[Operation], layer: int) -> SplitOperations:
    """Cut the operations before a layer, where the fewest columns cross.

    Raises UnsupportedError if the layers cannot be separated.
    """
    layers = [find_layer(operation) for operation in operations]
    first = next((i for i, number in enumerate(layers) if number is not None and number >= layer), len(operations))
    last = max((i for i, number in enumerate(layers) if number is not None and number < layer), default=-1)
    cuts = [
        (crossing, at)
        for at in range(last + 1, first + 1)
        if can_cross(crossing := find_live_activations(operations, at))
    ]
    if not cuts:
        raise UnsupportedError(
            f"the model cannot be split between GPU and CPU before layer {layer}: use -ngl all or -ngl 0"
        )
    crossing, at = min(cuts, key=lambda candidate: (sum(x.columns for x in candidate[0]), candidate[1]))
    return SplitOperations(operations[:at], operations[at:], crossing)


def find_layer(operation: Operation) -> int | None:
    """Return the layer of an operation's weight or state, None if it has neither."""
    if isinstance(operation, StateOperation):
        return operation.state.layer
    match = LAYER.match(operation.weight.name) if isinstance(operation, MatrixOperation) else None
    return int(match[1]) if match else None


def find_live_activations(operations: list[Operation], at: int) -> list[Activation]:
    """Return the activations that operations before index `at` compute and later ones read."""
    outputs = dict.fromkeys(operation.output for operation in operations[:at])
    inputs = {x for operation in operations[at:] for x in operation.inputs}
    return [x for x in outputs if x in inputs]


def can_cross(activations: list[Activation]) -> bool:
    return all(x.rows is ALL and not isinstance(x, RoutedActivation) for x in activations)


class GpuPlacement(NamedTuple):
    """A GPU for the model's last layers, or none."""

    card: Gpu | None
    layers: int  # number of layers
    spare: int = 0  # bytes that stay free besides the layers and one context
    warning: str | None = None  # why no GPU is used, where that is unexpected


def place_layers(
    options: EngineOptions, file: GGUFFile, states: Sequence[State], layers: int, context: int,
    buffers: Callable[[Sequence[State], KVType], int],
) -> GpuPlacement:  # fmt: skip
    """Open the GPU that the options name, and decide how many layers it computes.

    buffers(states, kv_type): returns the bytes that a GPU needs besides weights and cache. With the device auto there
    may be no GPU; `warning` then says why. Raises NoGpuError, MemoryLimitError, UnsupportedError.
    """
    device, requested, kv_type = options.backend, options.gpu_layers, options.kv_cache_type
    automatic = device == "auto"
    if requested == 0:
        return GpuPlacement(None, 0)
    try:
        card = open_card(int(device.partition(":")[2] or 0))
    except NoGpuError as error:
        if automatic:
            return GpuPlacement(None, 0, warning=f"the CPU computes: {error}")
        raise
    try:
        if missing := set(kv_type).difference(ON_GPU):
            raise UnsupportedError(
                f"the KV cache on a GPU must have the type {', '.join(ON_GPU)} (found {min(missing)}): use --device cpu"
            )
        sizes = compute_sizes(file.tensors, states, layers, context, kv_type, buffers(states, kv_type))
        needed_sizes = add_adapters(sizes, require_opened(options.lora))
        free = card.get_free_bytes()
        count = select_layer_count(card.name, needed_sizes, requested, free)
        return GpuPlacement(card, count, compute_spare(needed_sizes, count, free))
    except (MemoryLimitError, UnsupportedError) as error:
        card.close()
        if automatic and requested == "auto":
            return GpuPlacement(None, 0, warning=f"the CPU computes: {error}")
        raise


def select_layer_count(card: str, needed_sizes: GpuSizes, requested: int | str, free: int) -> int:
    """Return how many layers a GPU computes.

    requested: a count, "all" or "auto". free: bytes. Raises MemoryLimitError if the memory does not suffice for the
    requested count, or for a single layer.
    """
    count = len(needed_sizes.layers) if requested == "all" else requested
    if isinstance(count, int):
        require_memory(needed_sizes, min(count, len(needed_sizes.layers)), free)
        return min(count, len(needed_sizes.layers))
    if not (count := count_fitting_layers(needed_sizes, free)):
        raise MemoryLimitError(
            f"{card} has {free / 1e9:.1f} GB free, too little for one layer of this model: use --device cpu"
        )
    return count
