"""The interface of block formats for int8 kernels.

They see every format alike: a *group* of 256 weights as four vectors of 64 codes (unsigned bytes) and, for each
sub-block of 32 or 16 weights, a scale: weight = scale * (code - offset), or scale * code + minimum.

The codes are *striped*: vector q holds weights 8 q to 8 q + 7 of each run of 32, one run after the other. So the lanes
of its dot products belong to the same sub-blocks in all four vectors, which can be added up before anything is scaled:
with the codes in order, every vector needed a scale, a conversion and a sum of its own, and a row took twice the time.
A sub-block of 16 is half a run: vectors 0 and 1, or 2 and 3. A sub-block's scale may hide in the codes (16 * code and
scale / 16), which saves shifts. What is left of a row whose blocks are of 32 or 64 weights,
and have no smaller sub-blocks, comes in *chunks* of 64 weights, striped alike.
"""

from collections.abc import Callable
from typing import NamedTuple


class GroupFormat(NamedTuple):
    """The device functions that read one group of 256 weights at an address."""

    name: str
    sub_block: int  # weights that share a scale: 32 or 16
    group_bytes: int
    codes: Callable  # address -> four u8x64, striped; signed bytes if `wants_signed_codes` and there is no minimum
    offset: int  # what the codes are too large by; 0 for formats with minimums
    largest: int  # code
    scales: Callable  # address -> f32x8, or f32x16 if sub_block is 16; in order
    minimums: Callable | None = None  # address -> the same type
    chunk: "ChunkFormat | None" = None
    # Tiles get sub-blocks of 16 as they are multiplied in integers: scales are int16 [16][2], each twice; minimums
    # [8 runs][2]: -offset * scales of both sub-blocks, int16, and the scale of all 256 weights, f32.
    has_integer_scales: bool = False


class ChunkFormat(NamedTuple):
    """The device functions that read a chunk of 64 weights, for formats whose blocks hold no more."""

    codes: Callable  # address -> u8x64, striped
    scales: Callable  # address -> f32x2, of two runs of 32
    minimums: Callable | None  # the same
