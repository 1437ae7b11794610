"""The KV cache: keys and values of the tokens so far, one reserved range of addresses.

Nothing is allocated ahead: the operating system commits a page when a token is first written there, so a context of
131072 costs what the conversation uses. Layout: [layer][keys, values][key-value head][token][head dimension], padded to
blocks, so that a head's tokens are one stream. Attention reads *runs* (address of keys, of values, number of tokens); a
contiguous cache is a list of one.
"""

import mmap
import sys

import numpy as np

from localllm.errors import MemoryLimitError

KV_TYPES = {"f16": (16, 32), "f32": (16, 64), "q8_0": (32, 34)}  # dimensions of a block, its bytes
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: do not count it against the commit limit


def reserve(size: int) -> np.ndarray:
    """`size` zero bytes that cost memory only where they are touched. Raises MemoryLimitError."""
    try:
        if sys.platform == "win32":
            memory = mmap.mmap(-1, size)
        else:
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except (OSError, OverflowError, ValueError):
        raise MemoryLimitError(f"cannot reserve {size / 1e9:.1f} GB of memory; use a smaller context") from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page is 2 MB for the first token of every head
    return np.frombuffer(memory, np.uint8)


class KVCache:
    """One sequence's cache."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, context: int, kv_type: str):
        """Reserve room for `context` tokens (rounded up to 16); kv_type is a key of KV_TYPES."""
        self.tokens = -(-context // 16) * 16
        self.token_bytes = head_bytes(head_dim, kv_type)
        self.head_bytes = self.tokens * self.token_bytes
        side = kv_heads * self.head_bytes
        self._memory = reserve(layers * 2 * side)
        base = self._memory.ctypes.data
        self._runs = np.array(
            [[base + 2 * layer * side, base + (2 * layer + 1) * side, self.tokens] for layer in range(layers)], np.int64
        )

    def runs(self, layer: int) -> np.ndarray:
        """int64 [runs, 3]: where the layer's keys and values lie."""
        return self._runs[layer : layer + 1]


def head_bytes(head_dim: int, kv_type: str) -> int:
    """What a head's key or value of one token takes."""
    block, size = KV_TYPES[kv_type]
    return -(-head_dim // block) * size


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, kv_type: str) -> int:
    """What each token of a conversation costs."""
    return layers * 2 * kv_heads * head_bytes(head_dim, kv_type)
