"""Move tokens to other positions, so that a sequence can drop its middle (StreamingLLM).

Source: Xiao et al. 2023. Keys are cached after RoPE, so moving a token means rotating its keys by the distance. This is
exact except that a key is rounded once more each time it moves. Values have no position. Keys of layers without RoPE
have none either, or biases that depend on distances only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from localllm.arch.layer_state import LatentState, PagedState, RecurrentLayerState, State
from localllm.arch.rope import RopeParameters
from localllm.engine.lower.activation import Activation
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.columns import ConcatHeads
from localllm.engine.operations.elementwise import RMSNorm, Scale
from localllm.engine.operations.key_selection import SelectKeys
from localllm.engine.operations.operation import MatrixProduct, Operation
from localllm.engine.operations.positions import Rotate
from localllm.engine.operations.tokens import EmbedPositions
from localllm.errors import UsageError


@dataclass(frozen=True, eq=False)
class RopeShift:
    """The rotation of a layer's keys by their position.

    Attributes:
        frequencies: radians per position, float64 [pairs].
        step, apart: pair k has the elements k * step and k * step + apart of a head.
    """

    frequencies: np.ndarray
    step: int
    apart: int

    @classmethod
    def from_rope(cls, rope: RopeParameters, divisors: np.ndarray | None, first: int) -> "RopeShift":
        """Return the rotation of a RoPE that begins at element `first` of a head; pairs before that do not rotate."""
        frequencies = rope.compute_frequencies(None if divisors is None else divisors.astype(np.float64))
        step, apart = (2, 1) if rope.interleaved else (1, rope.dims // 2)
        return cls(np.pad(frequencies, (first // step, 0)), step, apart)


def find_key_rotations(operations: Sequence[Operation], states: Sequence[State]) -> dict[State, RopeShift]:
    """Return the rotation of each state's keys, without states whose keys have no position.

    Raises UsageError for a model whose tokens cannot be moved.
    """
    if any(isinstance(state, RecurrentLayerState) for state in states):
        raise UsageError("context shift is not supported for models with recurrent layers")
    if any(isinstance(operation, EmbedPositions) for operation in operations):
        raise UsageError("context shift is not supported for models with absolute position embeddings")
    producers, shifts = {operation.output: operation for operation in operations}, dict[State, RopeShift]()
    for operation in operations:
        if not (isinstance(operation, SelectKeys) or (isinstance(operation, Attend) and operation.has_keys)):
            continue
        state: PagedState | LatentState = operation.state
        if turn := find_rotation(producers, operation.inputs[1], state.key_dim, 0):
            shifts[state] = turn
    return shifts


def find_rotation(
    producers: Mapping[Activation, Operation], x: Activation, head_dim: int, first: int
) -> RopeShift | None:
    """Return the rotation of keys that begin at element `first` of a head; None if they are not rotated.

    Raises UsageError if an operation after RoPE changes them.
    """
    operation = producers[x]
    if isinstance(operation, Rotate):
        return RopeShift.from_rope(operation.rope, operation.divisors, first)
    if isinstance(operation, ConcatHeads):
        begin, behind = operation.inputs
        places = ((begin, first), (behind, first + begin.columns // operation.heads))
        parts = [turn for part, place in places if (turn := find_rotation(producers, part, head_dim, place))]
        if len(parts) < 2:
            return parts[0] if parts else None
    elif isinstance(operation, Scale) or (
        isinstance(operation, RMSNorm) and commutes_with_rotation(operation, head_dim)
    ):
        return find_rotation(producers, operation.inputs[0], head_dim, first)
    elif not is_rotated(producers, x):
        return None
    raise UsageError(f"context shift is not supported: {operation.verb!r} changes keys after RoPE")


def commutes_with_rotation(norm: RMSNorm, head_dim: int) -> bool:
    """Return whether a norm has one weight for all elements of a head, so that it commutes with rotation."""
    return norm.group == head_dim and bool((norm.vector == norm.vector[0]).all())


def is_rotated(producers: Mapping[Activation, Operation], x: Activation) -> bool:
    """Return whether a rotation lies between the last matrix product and x."""
    operation = producers[x]
    if isinstance(operation, MatrixProduct):
        return False
    return isinstance(operation, Rotate) or any(is_rotated(producers, source) for source in operation.inputs)
