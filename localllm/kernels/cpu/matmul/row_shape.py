"""The shape and scaling of the columns that decode multiplies at a time, and what its accumulators have in common."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from llvmlite import ir
from numba import types

from localllm.kernels.formats.group_format import GroupFormat
from localllm.kernels.simd import F32, Vector, as_tuple, f32x8, f32x16, load_value, multiply_add, operation, shuffled
from localllm.kernels.simd.half import constant_like

CHUNK_LANES = ir.VectorType(F32, 4)  # a token's scales or sums of a chunk: those of two runs, each twice


class RowShape(NamedTuple):
    """A group of 256 columns, or a chunk of 64, of a format."""

    vectors: int  # of codes: 4 for a group, 1 for a chunk
    halves: int  # sub-blocks of a run of 32 columns: 1 or 2
    offset: int | None  # the code that stands for zero; None: the format has minimums
    largest: int  # the largest code, see GroupFormat

    @property
    def of_row(self) -> Vector:
        """The vector type of a row's scales, or of its minimums; those of a chunk are repeated four times."""
        return f32x8 if self.halves == 1 else f32x16

    @property
    def factors(self) -> int:
        """The number of such vectors per row: 1 for scales, 2 with minimums."""
        return 1 if self.offset is not None else 2

    def load(self, builder, address):
        """Load a token's scales or sums, one for every 16 columns, as 16 lanes.

        Those of a chunk are repeated four times.
        """
        if self.vectors == 4:
            return load_value(builder, address, f32x16.llvm)
        value = load_value(builder, address, CHUNK_LANES)
        return shuffled(builder, value, value, [*range(4)] * 4)

    def from_offset(self, builder, sums):
        """Return the factor of a row's scales that accounts for the codes' offset: -offset * sums.

        For a format with minimums return the sums, which `scaled` multiplies by the minimums.
        """
        if self.offset is None:
            return sums
        return builder.fmul(sums, constant_like(sums, -self.offset * self.vectors / 4))

    def scaled(self, builder, total, dot, factors, c, n):
        """Add scaled dot products to a total.

        factors: the row's scales, and its minimums if the format has some; c: the token's scales; n: the result of
        `from_offset`.
        """
        if self.offset is None:
            scale, minimum = factors
            return multiply_add(builder, dot, builder.fmul(scale, c), multiply_add(builder, minimum, n, total))
        return multiply_add(builder, multiply_add(builder, dot, c, n), factors[0], total)


class Accumulator(ABC):
    """The totals of some rows and tokens, in registers: decode adds up products in them, group by group.

    Attributes:
        totals: their type.
    """

    totals: types.UniTuple

    def make_zero(self):
        """Return an intrinsic () -> totals of zero."""

        @operation(self.totals)
        def zero(builder):
            return as_tuple(builder, [ir.Constant(self.totals.dtype.llvm, None)] * self.totals.count)

        return zero

    @abstractmethod
    def make_add(self):
        """Return an intrinsic (totals, what is multiplied) -> totals that adds the products of a group or a chunk."""

    @abstractmethod
    def make_finish(self):
        """Return an intrinsic (totals, address) that stores the sum of each row's totals."""


def group_shape(format: GroupFormat) -> RowShape:
    """Return the shape of a group of 256 columns."""
    return RowShape(4, 32 // format.sub_block, None if format.minimums else format.offset, format.largest)


def chunk_shape(format: GroupFormat) -> RowShape:
    """Return the shape of a chunk of 64 columns."""
    return group_shape(format)._replace(vectors=1)
