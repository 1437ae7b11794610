"""The state that a layer keeps of past tokens, and the types of the KV cache.

A family declares the state; the cache allocates it, memory estimates add it up, and attention reads it.

Below 8 bits, one outlier would spoil the scale of its block. So keys and values are first multiplied by an orthonormal
Hadamard matrix, which spreads every value over its block (QuaRot, Ashkboos et al. 2024). Queries are multiplied by the
keys' matrix, which keeps the scores, and results by the values' matrix, which undoes it.
"""

from collections.abc import Sequence
from math import gcd, prod
from typing import ClassVar, NamedTuple, Self

from localllm.errors import UsageError
from localllm.frozen import frozen

# By type: the number of values in a block, and its size in bytes.
STORAGE = {
    "f16": (16, 32), "f32": (16, 64), "bf16": (16, 32), "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22),
    "q4_1": (32, 20), "q4_0": (32, 18), "iq4_nl": (32, 18),
}  # fmt: skip
ROTATED = ("q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
ON_GPU = ("f16", "f32", "q8_0", "q4_1", "q4_0")  # types that localllm.kernels.cuda.attention supports
DEFAULT_TYPE = "f16"
# Tokens before an attention window that stay cached, so that a conversation can rewind that far without recomputing
# its window. The cache frees tokens in steps of the same size.
SLACK = 512


class KVType(NamedTuple):
    """The types of keys and of values in the cache, both keys of STORAGE."""

    keys: str = DEFAULT_TYPE
    values: str = DEFAULT_TYPE

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a type as users write it: q8_0 for both, or k=q8_0,v=q4_0; a missing side is F16.

        Raises UsageError.
        """
        parts = [part.partition("=") for part in (text if "=" in text else f"k={text},v={text}").split(",")]
        sides = {side: kind for side, _, kind in parts}
        if len(sides) < len(parts) or not sides.keys() <= {"k", "v"} or not set(sides.values()) <= STORAGE.keys():
            names = ", ".join(STORAGE)
            raise UsageError(f"unknown KV cache type {text!r}: use one of {names}, or two as in k=q8_0,v=q4_0")
        return cls(sides.get("k", DEFAULT_TYPE), sides.get("v", DEFAULT_TYPE))


def count_stored_bytes(numbers: int, kind: str) -> int:
    """Compute the size in bytes of `numbers` values of a cache type, padded to whole blocks."""
    block, size = STORAGE[kind]
    return -(-numbers // block) * size


def find_rotation_size(kind: str, *dims: int) -> int:
    """Return the size of the Hadamard matrices for heads of these dimensions; 1 for none.

    It is the largest power of two that divides all of them: 128 takes one matrix, 96 three of 32, 80 five of 16.
    """
    divisor = gcd(*dims)
    return divisor & -divisor if kind in ROTATED else 1


def count_window_tokens(tokens: int, window: int | None) -> int:
    """Return the maximum number of cached tokens in a sequence of `tokens` tokens.

    A layer with a window caches at most the window plus twice SLACK.
    """
    return min(tokens, window + 2 * SLACK) if window else tokens


@frozen
class PagedState:
    """A key and a value for each token and key-value head.

    With a window, a token attends only to the last `window` tokens. If the window is chunked, a token attends only to
    those in its own chunk of `window` tokens.
    """

    layer: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunked: bool = False
    period: ClassVar[int] = 1

    def count_bytes(self, tokens: int, kv_type: KVType) -> int:
        """Return the size in bytes of `tokens` tokens."""
        per_head = count_stored_bytes(self.key_dim, kv_type.keys) + count_stored_bytes(self.value_dim, kv_type.values)
        return count_window_tokens(tokens, self.window) * self.kv_heads * per_head

    def find_rotation_sizes(self, kv_type: KVType) -> tuple[int, int]:
        """Return the sizes of the Hadamard matrices for keys and values, see `rotation`."""
        return find_rotation_size(kv_type.keys, self.key_dim), find_rotation_size(kv_type.values, self.value_dim)


@frozen
class LatentState:
    """A latent row per token instead of keys and values (multi-head latent attention: DeepSeek-V2, 2024).

    The row is the key of all heads, and its first value_dim columns are the value of all. It has the type of keys.

    Attributes:
        is_index: whether the rows are keys of a sparse-attention indexer.
        period: if above 1, a row represents a block of that many tokens; only the last token of each block has one.
    """

    layer: int
    key_dim: int
    value_dim: int
    window: int | None = None
    is_index: bool = False
    period: int = 1
    kv_heads: ClassVar[int] = 1
    chunked: ClassVar[bool] = False

    def count_bytes(self, tokens: int, kv_type: KVType) -> int:
        """Return the size in bytes of `tokens` tokens."""
        return count_window_tokens(tokens, self.window) * count_stored_bytes(self.key_dim, kv_type.keys)

    def find_rotation_sizes(self, kv_type: KVType) -> tuple[int, int]:
        """Return the sizes of the Hadamard matrices; one size must fit keys and the values within them."""
        both = find_rotation_size(kv_type.keys, self.key_dim, self.value_dim)
        return both, both


@frozen
class RecurrentLayerState:
    """Float32 arrays of fixed shapes for each sequence (state-space and linear attention)."""

    layer: int
    shapes: tuple[tuple[int, ...], ...]

    def count_bytes(self, tokens: int, kv_type: KVType) -> int:
        """Return the size in bytes of a sequence."""
        return 4 * sum(prod(shape) for shape in self.shapes)


State = PagedState | LatentState | RecurrentLayerState


def count_cache_bytes(states: Sequence[State], tokens: int, kv_type: KVType) -> int:
    """Return the size in bytes of a sequence of `tokens` tokens in all layers."""
    return sum(state.count_bytes(tokens, kv_type) for state in states)
