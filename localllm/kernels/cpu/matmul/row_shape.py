"""The common parts of gemv_int8_1.py and gemv_int8_pairs.py.

It describes the columns that they process at a time, and their scales.
"""

from typing import NamedTuple

from llvmlite import ir

from localllm.kernels.formats.group_format import GroupFormat
from localllm.kernels.simd import F32, Vector, f32x8, f32x16, load_value, multiply_add, shuffled
from localllm.kernels.simd.half import constant_like

CHUNK_LANES = ir.VectorType(F32, 4)  # what a token has for a chunk: of each of two runs, twice


class RowShape(NamedTuple):
    """A group of 256 columns, or a chunk of 64, of a format."""

    vectors: int  # of codes: 4, or 1
    halves: int  # of a run of 32 columns that make a sub-block each
    offset: int | None  # None: the format has minimums
    largest: int  # code, see GroupFormat

    @property
    def of_row(self) -> Vector:
        """A row's scales, or its minimums; those of a chunk are repeated four times."""
        return f32x8 if self.halves == 1 else f32x16

    @property
    def factors(self) -> int:
        """The number of such vectors of a row: 1 for scales, 2 with minimums."""
        return 1 if self.offset is not None else 2

    def load(self, builder, address):
        """Return a token's scales or sums, of which there is one for every 16 columns.

        They are in 16 lanes; those of a chunk are repeated four times.
        """
        if self.vectors == 4:
            return load_value(builder, address, f32x16.llvm)
        value = load_value(builder, address, CHUNK_LANES)
        return shuffled(builder, value, value, [*range(4)] * 4)

    def from_offset(self, builder, sums):
        """Compute the contribution of the codes' offset, in units of the row's scales.

        For a format with minimums instead of an offset, return the sums, which `scaled` multiplies by the minimums.
        """
        if self.offset is None:
            return sums
        return builder.fmul(sums, constant_like(sums, -self.offset * self.vectors / 4))

    def scaled(self, builder, total, dot, factors, c, n):
        """Add scaled dot products to total; c: the token's scales, n: what `from_offset` gives."""
        if self.offset is None:
            scale, minimum = factors
            return multiply_add(builder, dot, builder.fmul(scale, c), multiply_add(builder, minimum, n, total))
        return multiply_add(builder, multiply_add(builder, dot, c, n), factors[0], total)


def group_shape(format: GroupFormat) -> RowShape:
    return RowShape(4, 32 // format.sub_block, None if format.minimums else format.offset, format.largest)


def chunk_shape(format: GroupFormat) -> RowShape:
    return group_shape(format)._replace(vectors=1)
