"""The interface by which int8 kernels read weights of any block format.

A *group* is 256 consecutive weights of a row. It is read as four vectors of 64 codes (unsigned bytes) and a scale for
each sub-block of 32 or 16 weights, with

    weight = scale * (code - offset)    or    weight = scale * code + minimum

A *run* is 32 consecutive weights; a group has 8. Codes are *striped*: vector q holds weights 8 q to 8 q + 7 of each
run, one run after the other:

    vector 0:  weights 0 to 7 of run 0 | 0 to 7 of run 1 | ... | 0 to 7 of run 7
    vector 1:  weights 8 to 15 of run 0 | ...
    vector 3:  weights 24 to 31 of run 0 | ...

So an element of a dot product belongs to the same run in all four vectors, which are added before anything is scaled.
With codes in order, every vector needed a scale, a conversion and a sum of its own, and a row took twice the time. A
sub-block of 16 is half a run: vectors 0 and 1, or 2 and 3.

A scale may be divided by a power of two that its codes are multiplied by (16 * code and scale / 16), which saves
shifts. If blocks have 32 or 64 weights and no smaller sub-blocks, a row may end with *chunks* of 64 weights, which are
striped alike: vector element 16 q + 8 r + i is weight 8 q + i of run r.
"""

from collections.abc import Callable
from typing import NamedTuple


class GroupFormat(NamedTuple):
    """The device functions that read a group, 256 weights at an address, and the constants of a format."""

    name: str
    sub_block: int  # weights that share a scale: 32 or 16
    group_bytes: int
    codes: Callable  # address -> four u8x64, striped; signed bytes if `wants_signed_codes` and there is no minimum
    offset: int  # what the codes are too large by; 0 for formats with minimums
    largest: int  # the largest code
    scales: Callable  # address -> f32x8, or f32x16 if sub_block is 16; in order
    minimums: Callable | None = None  # address -> the same type
    chunk: "ChunkFormat | None" = None
    # Products are scaled in integers (avx2_dots.py). scales: int16 [16][2], each twice. minimums, for each of 8 runs:
    # int16 [2], -offset * scale of both sub-blocks; f32, the scale of all 256 weights.
    has_integer_scales: bool = False


class ChunkFormat(NamedTuple):
    """The device functions that read a chunk, 64 weights at an address."""

    codes: Callable  # address -> u8x64, striped
    scales: Callable  # address -> f32x2, of two runs of 32
    minimums: Callable | None  # the same
