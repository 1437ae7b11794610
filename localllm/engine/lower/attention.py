"""What attention has in common on all targets: new keys and values go to the cache, queries are turned as they are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from localllm.arch.layer_state import Latent, Paged
from localllm.engine.lower.steps import Steps, shape
from localllm.engine.lower.tape import Buffer
from localllm.engine.memory.cache import KVCache, Streams
from localllm.engine.run import Header
from localllm.engine.trace.operations import ALL, Activation, Operation


class AttentionSteps(NamedTuple):
    """What a target's own steps are made of: from queries, and what is in the cache, to results y."""

    state: Paged | Latent
    sides: tuple[Streams, Streams]
    arguments: dict[str, Any]
    reads: list[Buffer]
    y: Buffer


def before_attention(steps: Steps, operation: Operation) -> AttentionSteps:
    """New keys and values go to the cache, turned as it wants them; queries are turned alike."""
    inputs, given = list(operation.inputs), dict(operation.given)
    state, sinks, slopes = given.pop("state"), given.pop("sinks"), given.pop("slopes")
    biases, crosses = given.pop("biases"), given["crosses"]
    choices, _ = given.pop("choices"), given.pop("windowed")
    chosen = steps.buffers[inputs.pop()] if choices else None
    q, *new = inputs
    sides, of_keys = steps.cache.sides(state), state.rotations(steps.cache.kv_type)[0]
    if new:
        keep_all(steps, new, state)
    source, y = turned(steps, q, of_keys), steps.new(operation.output)
    arguments = of_cache(steps.cache, sides) | given | {"kv_heads": state.kv_heads}
    arguments |= {"q": source, "q_stride": source.stride, "y": y, "y_stride": y.stride}
    arguments |= {"window": state.window or 0, "chunked": state.chunked, "period": state.period}
    arguments["slopes"] = np.array(slopes, np.float32) if slopes else 0
    arguments |= {"biases": 0 if biases is None else padded_biases(biases), "reach": reach_of(biases)}
    arguments["sinks"] = 0 if sinks is None else sinks
    arguments |= {"chosen": chosen or 0, "chosen_stride": chosen.stride if chosen else 0}
    arguments["choice_stride"] = 4 * operation.inputs[-1].columns // choices if choices > 1 else 0
    in_cache = steps.in_cache.get(state, []) if crosses else steps.in_cache[state]  # the encoder's, of another run
    reads = [source, *in_cache, *([chosen] if chosen else [])]
    return AttentionSteps(state, sides, arguments, reads, y)


def keep(steps: Steps, operation: Operation, target: Any) -> None:
    """Keys and values go to the cache, for another run."""
    keep_all(steps, operation.inputs, operation.given["state"])


def keep_all(steps: Steps, new: Sequence[Activation], state: Paged | Latent) -> None:
    """Keys, and values if they are others."""
    ready = [turned(steps, x, block) for x, block in zip(new, state.rotations(steps.cache.kv_type), strict=False)]
    kept = zip(new, ready, steps.cache.sides(state), strict=False)
    steps.in_cache[state] = [store(steps, x, buffer, side) for x, buffer, side in kept]


def reach_of(biases: np.ndarray | None) -> int:
    """Places behind and before a query that have biases of their own."""
    return 0 if biases is None else biases.shape[1] // 2


def padded_biases(biases: np.ndarray) -> np.ndarray:
    """With the first and the last one 16 times more, so that any 16 numbers in a row can be read."""
    return np.ascontiguousarray(np.pad(biases.astype(np.float32), ((0, 0), (16, 16)), mode="edge"))


def before_choice(steps: Steps, operation: Operation) -> tuple[dict[str, Any], list[Buffer], Buffer, str]:
    """New keys go to the index: arguments of the kernel that chooses, what it reads and writes, and the kernel."""
    (q, k, *weights), given = operation.inputs, dict(operation.given)
    index = given.pop("state")
    side, block = steps.cache.sides(index)[0], index.rotations(steps.cache.kv_type)[0]
    steps.in_cache[index] = [store(steps, k, turned(steps, k, block), side)]
    source, y = turned(steps, q, block), steps.new(operation.output)
    arguments: dict[str, Any] = {"positions": steps.header.positions, "owners": steps.header.owners}
    arguments |= {"sequences": steps.header.sequences, "q": source, "q_stride": source.stride}
    arguments |= {"keys": steps.cache.address(side), "key_bytes": side.token_bytes, "key_dim": index.key_dim}
    arguments |= {"y": y, "y_stride": y.stride} | given
    of_heads = [steps.buffers[x] for x in weights]
    if operation.verb == "choose_blocks":
        arguments["choice_stride"] = 4 * operation.output.columns // given["heads"]
    elif of_heads:
        arguments |= {"weights": of_heads[0], "weights_stride": of_heads[0].stride}
    else:
        arguments |= {"weights": np.ones(given["heads"], np.float32), "weights_stride": 0}
    return arguments, [source, *of_heads, *steps.in_cache[index]], y, f"{operation.verb}-{side.kind.upper()}"


def behind_attention(steps: Steps, operation: Operation, attention: AttentionSteps) -> None:
    """Results are turned back."""
    state, rows = attention.state, operation.output.rows
    results = Activation(rows, operation.given["heads"] * state.value_dim)
    turn(steps, results, attention.y, attention.y, state.rotations(steps.cache.kv_type)[1])


def of_cache(cache: KVCache, sides: tuple[Streams, Streams]) -> dict[str, Any]:
    """Where keys and values are."""
    keys, values = sides
    where: dict[str, Any] = {"key_bytes": keys.token_bytes, "value_bytes": values.token_bytes}
    where |= {"keys": cache.address(keys), "key_head_stride": cache.head_stride(keys)}
    return where | {"values": cache.address(values), "value_head_stride": cache.head_stride(values)}


def store(steps: Steps, x: Activation, buffer: Buffer, side: Streams) -> Buffer:
    """Keys or values go to the cache; what stands for them there."""
    in_cache = Buffer(0, 0)
    arguments = {"x": buffer, "stride": buffer.stride, "head_dim": x.columns // side.heads}
    arguments |= places(steps.cache, side, steps.header)
    steps.by_row(f"store-{side.kind.upper()}", ALL, arguments, [buffer], [in_cache])
    return in_cache


def turned(steps: Steps, x: Activation, block: int) -> Buffer:
    """Queries, keys or values times Hadamard matrices of that size; 1: as they are."""
    source = steps.buffers[x]
    return turn(steps, x, source, Buffer(steps.target.buffer_rows, source.stride), block)


def turn(steps: Steps, x: Activation, source: Buffer, y: Buffer, block: int) -> Buffer:
    """As `turned`, of the rows `source`, which may be y."""
    if block == 1:
        return source
    steps.by_row("hadamard", x.rows, {"x": source, "block": block} | shape(x, y), [source], [y])
    return y


def places(cache: KVCache, side: Streams, header: Header) -> dict[str, Any]:
    """What kernels are told of where a run's tokens lie in a stream."""
    where = {"positions": header.positions, "owners": header.owners, "sequences": header.sequences}
    stream = {"base": cache.address(side), "head_stride": cache.head_stride(side)}
    return where | stream | {"token_bytes": side.token_bytes, "heads": side.heads}
