"""Steps that write keys and values to the cache, with Hadamard rotations where the cache needs them."""

from collections.abc import Sequence
from typing import Any

from localllm.arch.layer_state import Latent, Paged
from localllm.engine.lower.steps import Steps, shape
from localllm.engine.lower.tape import Buffer
from localllm.engine.memory.cache import KVCache, Streams
from localllm.engine.operations.activation import ALL, Activation
from localllm.engine.run import Header


def store_all(steps: Steps, new: Sequence[Activation], state: Paged | Latent) -> None:
    """Store keys, and values if they are separate."""
    ready = [rotate(steps, x, block) for x, block in zip(new, state.rotations(steps.cache.kv_type), strict=False)]
    kept = zip(new, ready, steps.cache.sides(state), strict=False)
    steps.in_cache[state] = [store(steps, x, buffer, side) for x, buffer, side in kept]


def cache_arguments(cache: KVCache, sides: tuple[Streams, Streams]) -> dict[str, Any]:
    """Return the kernel arguments that locate keys and values."""
    keys, values = sides
    where: dict[str, Any] = {"key_bytes": keys.token_bytes, "value_bytes": values.token_bytes}
    where |= {"keys": cache.address(keys), "key_head_stride": cache.head_stride(keys)}
    return where | {"values": cache.address(values), "value_head_stride": cache.head_stride(values)}


def store(steps: Steps, x: Activation, buffer: Buffer, side: Streams) -> Buffer:
    """Store keys or values; returns the buffer that represents them in the cache."""
    in_cache = Buffer(0, 0)
    arguments = {"x": buffer, "stride": buffer.stride, "head_dim": x.columns // side.heads}
    arguments |= stream_arguments(steps.cache, side, steps.header)
    steps.row_step(f"store-{side.kind.upper()}", ALL, arguments, [buffer], [in_cache])
    return in_cache


def rotate(
    steps: Steps, x: Activation, block: int, source: Buffer | None = None, target: Buffer | None = None
) -> Buffer:
    """Multiply queries, keys or values by Hadamard matrices of size `block`; 1 leaves them unchanged.

    source: where x is, if it has no buffer of its own; target: the output, which may be the source.
    """
    source = source or steps.buffers[x]
    if block == 1:
        return source
    y = target or Buffer(steps.target.buffer_rows, source.stride)
    steps.row_step("hadamard", x.rows, {"x": source, "block": block} | shape(x, y), [source], [y])
    return y


def stream_arguments(cache: KVCache, side: Streams, header: Header) -> dict[str, Any]:
    """Return the kernel arguments that locate a run's tokens in a stream."""
    where = {"positions": header.positions, "owners": header.owners, "sequences": header.sequences}
    stream = {"base": cache.address(side), "head_stride": cache.head_stride(side)}
    return where | stream | {"token_bytes": side.token_bytes, "heads": side.heads}
