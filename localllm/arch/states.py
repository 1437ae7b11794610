"""What a layer keeps of the tokens that it has seen, as its family declares it.

The cache makes room for it, memory estimates add it up, and attention reads it: this is where all of them look.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

STORAGE = {"f16": (16, 32), "f32": (16, 64), "q8_0": (32, 34)}  # numbers of a block of a KV cache, its bytes


# Tokens before a window that are kept with it, so that a conversation can go back so far without being read again. As
# many are given back at a time.
SLACK = 512


def stored_bytes(numbers: int, kv_type: str) -> int:
    """What so many numbers take in a cache of that type; they are padded to whole blocks."""
    block, size = STORAGE[kv_type]
    return -(-numbers // block) * size


@dataclass(frozen=True)
class Paged:
    """A key and a value for each token and key-value head.

    With a window, only the last `window` tokens are read; or, if it is chunked, those of the last chunk of so many.
    """

    layer: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunked: bool = False

    def bytes(self, tokens: int, kv_type: str) -> int:
        """Memory that `tokens` tokens take."""
        per_head = stored_bytes(self.key_dim, kv_type) + stored_bytes(self.value_dim, kv_type)
        return min(tokens, self.window + 2 * SLACK if self.window else tokens) * self.kv_heads * per_head


@dataclass(frozen=True)
class Latent:
    """One row of numbers for each token, which is a key for all heads, and the first of which are a value for all:
    those that keys and values of the heads are made from (DeepSeek-V2, 2024)."""

    layer: int
    key_dim: int
    value_dim: int
    kv_heads: ClassVar[int] = 1
    window: ClassVar[None] = None
    chunked: ClassVar[bool] = False

    def bytes(self, tokens: int, kv_type: str) -> int:
        """Memory that `tokens` tokens take."""
        return tokens * stored_bytes(self.key_dim, kv_type)


@dataclass(frozen=True)
class Recurrent:
    """Float32 arrays of fixed shapes for each sequence, however long it is (state-space and linear attention)."""

    layer: int
    shapes: tuple[tuple[int, ...], ...]

    def bytes(self, tokens: int, kv_type: str) -> int:
        """Memory that a sequence takes."""
        return 4 * sum(prod(shape) for shape in self.shapes)


State = Paged | Latent | Recurrent


def cache_bytes(states: Sequence[State], tokens: int, kv_type: str) -> int:
    """What a conversation of `tokens` tokens takes in all layers."""
    return sum(state.bytes(tokens, kv_type) for state in states)
