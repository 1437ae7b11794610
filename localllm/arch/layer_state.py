"""The state that a layer keeps of past tokens, as its family declares it.

The cache makes room for it, memory estimates add it up, and attention reads it: this is where all of them look.
"""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

from localllm.arch.kv_cache_types import KVType, rotation, stored_bytes
from localllm.frozen import frozen

# Tokens before a window that are kept with it, so that a conversation can go back so far without being read again. As
# many are given back at a time.
SLACK = 512


def window_tokens(tokens: int, window: int | None) -> int:
    """Return how many of `tokens` tokens are kept, with the slack of a window."""
    return min(tokens, window + 2 * SLACK) if window else tokens


@frozen
class Paged:
    """A key and a value for each token and key-value head.

    With a window, only the last `window` tokens are read; if it is chunked, only those of the last chunk.
    """

    layer: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunked: bool = False
    period: ClassVar[int] = 1

    def bytes(self, tokens: int, kv_type: KVType) -> int:
        """Return memory that `tokens` tokens take."""
        per_head = stored_bytes(self.key_dim, kv_type.keys) + stored_bytes(self.value_dim, kv_type.values)
        return window_tokens(tokens, self.window) * self.kv_heads * per_head

    def rotations(self, kv_type: KVType) -> tuple[int, int]:
        """Return the sizes of the Hadamard matrices for keys and values, see localllm.arch.kv_cache_types."""
        return rotation(kv_type.keys, self.key_dim), rotation(kv_type.values, self.value_dim)


@frozen
class Latent:
    """A latent row for each token, from which the keys and values of the heads are made (DeepSeek-V2, 2024).

    It is a key for all heads, and its first numbers are a value for all. It is stored as keys are.

    is_index: it holds the keys of the indexer, which selects keys. period: if above 1, a row stands for a block of that
    many tokens; only the last token of each block has one, and only these rows are seen.
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
        """Return memory that `tokens` tokens take."""
        return window_tokens(tokens, self.window) * stored_bytes(self.key_dim, kv_type.keys)

    def rotations(self, kv_type: KVType) -> tuple[int, int]:
        """Return sizes as Paged does; values are part of keys, so no matrix may reach beyond them."""
        both = rotation(kv_type.keys, self.key_dim, self.value_dim)
        return both, both


@frozen
class Recurrent:
    """Float32 arrays of fixed shapes for each sequence (state-space and linear attention)."""

    layer: int
    shapes: tuple[tuple[int, ...], ...]

    def bytes(self, tokens: int, kv_type: KVType) -> int:
        """Return memory that a sequence takes."""
        return 4 * sum(prod(shape) for shape in self.shapes)


State = Paged | Latent | Recurrent


def cache_bytes(states: Sequence[State], tokens: int, kv_type: KVType) -> int:
    """Compute the bytes that a conversation of `tokens` tokens takes in all layers."""
    return sum(state.bytes(tokens, kv_type) for state in states)
