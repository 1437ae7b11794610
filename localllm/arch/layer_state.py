"""The state that a layer keeps of past tokens, as its family declares it.

The cache allocates it, memory estimates add it up, and attention reads it.
"""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

from localllm.arch.kv_cache_types import KVType, rotation, stored_bytes
from localllm.frozen import frozen

# Tokens before an attention window that stay cached, so that a conversation can rewind that far without recomputing
# its window. The cache frees tokens in steps of the same size.
SLACK = 512


def window_tokens(tokens: int, window: int | None) -> int:
    """Return the most of `tokens` tokens that are cached; with a window, its tokens plus twice SLACK."""
    return min(tokens, window + 2 * SLACK) if window else tokens


@frozen
class Paged:
    """A key and a value for each token and key-value head.

    With a window, a token attends only to the last `window` tokens; if it is chunked, only to its own chunk of them.
    """

    layer: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunked: bool = False
    period: ClassVar[int] = 1

    def bytes(self, tokens: int, kv_type: KVType) -> int:
        """Return the bytes of `tokens` tokens."""
        per_head = stored_bytes(self.key_dim, kv_type.keys) + stored_bytes(self.value_dim, kv_type.values)
        return window_tokens(tokens, self.window) * self.kv_heads * per_head

    def rotations(self, kv_type: KVType) -> tuple[int, int]:
        """Return the sizes of the Hadamard matrices for keys and values, see localllm.arch.kv_cache_types."""
        return rotation(kv_type.keys, self.key_dim), rotation(kv_type.values, self.value_dim)


@frozen
class Latent:
    """A latent row for each token in place of keys and values (multi-head latent attention: DeepSeek-V2, 2024).

    The row is the key of all heads, and its first value_dim numbers are the value of all. It has the type of keys.

    is_index: the rows are keys of a sparse-attention indexer.  period: if above 1, a row stands for a block of that
    many tokens; only the last token of each block has one.
    """

    layer: int
    key_dim: int
    value_dim: int
    window: int | None = None
    is_index: bool = False
    period: int = 1
    kv_heads: ClassVar[int] = 1
    chunked: ClassVar[bool] = False

    def bytes(self, tokens: int, kv_type: KVType) -> int:
        """Return the bytes of `tokens` tokens."""
        return window_tokens(tokens, self.window) * stored_bytes(self.key_dim, kv_type.keys)

    def rotations(self, kv_type: KVType) -> tuple[int, int]:
        """Return the sizes as Paged does; values are part of keys, so one size must fit both."""
        both = rotation(kv_type.keys, self.key_dim, self.value_dim)
        return both, both


@frozen
class Recurrent:
    """Float32 arrays of fixed shapes for each sequence (state-space and linear attention)."""

    layer: int
    shapes: tuple[tuple[int, ...], ...]

    def bytes(self, tokens: int, kv_type: KVType) -> int:
        """Return the bytes of a sequence."""
        return 4 * sum(prod(shape) for shape in self.shapes)


State = Paged | Latent | Recurrent


def cache_bytes(states: Sequence[State], tokens: int, kv_type: KVType) -> int:
    """Return the bytes of a sequence of `tokens` tokens in all layers."""
    return sum(state.bytes(tokens, kv_type) for state in states)
