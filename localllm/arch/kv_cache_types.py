"""The types of the KV cache, by the names on the command line, and the rotation of keys and values.

Below 8 bits, one outlier would spoil the scale of its block. So keys and values are first multiplied with an
orthonormal Hadamard matrix, which spreads every number over its block (QuaRot, Ashkboos et al. 2024). Queries are
multiplied with the keys' matrix, which keeps the scores, and results with the values' matrix, which undoes it.
"""

from math import gcd
from typing import NamedTuple, Self

from localllm.errors import UsageError

# By type: how many numbers a block has, and its bytes.
STORAGE = {
    "f16": (16, 32), "f32": (16, 64), "bf16": (16, 32), "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22),
    "q4_1": (32, 20), "q4_0": (32, 18), "iq4_nl": (32, 18),
}  # fmt: skip
ROTATED = ("q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
ON_GPU = ("f16", "f32", "q8_0", "q4_1", "q4_0")  # types that localllm.kernels.cuda.attention supports
USUAL = "f16"


class KVType(NamedTuple):
    """The types of keys and of values in the cache, each a key of STORAGE."""

    keys: str = USUAL
    values: str = USUAL

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse a type as users write it: q8_0 for both, or k=q8_0,v=q4_0; a side that is left out is F16.

        Raises UsageError.
        """
        parts = [part.partition("=") for part in (text if "=" in text else f"k={text},v={text}").split(",")]
        sides = {side: kind for side, _, kind in parts}
        if len(sides) < len(parts) or not sides.keys() <= {"k", "v"} or not set(sides.values()) <= STORAGE.keys():
            names = ", ".join(STORAGE)
            raise UsageError(f"unknown type of KV cache {text!r}: use one of {names}, or two as in k=q8_0,v=q4_0")
        return cls(sides.get("k", USUAL), sides.get("v", USUAL))


def stored_bytes(numbers: int, kind: str) -> int:
    """Compute the bytes of `numbers` numbers in a cache of that type; they are padded to whole blocks."""
    block, size = STORAGE[kind]
    return -(-numbers // block) * size


def rotation(kind: str, *dims: int) -> int:
    """Return the size of the Hadamard matrices for heads of these lengths; 1 for none.

    It is the largest power of two that divides all of them: 128 takes one matrix, 96 three of 32, 80 five of 16.
    """
    whole = gcd(*dims)
    return whole & -whole if kind in ROTATED else 1
