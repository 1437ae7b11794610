"""Move or combine columns of rows."""

import numpy as np

from localllm.engine.lower.activation import Activation
from localllm.engine.operations.builders import MISFIT, Array, RecorderBase, ReferenceBase, require_same_columns
from localllm.engine.operations.operation import Operation, operation
from localllm.errors import ModelError


@operation
class SliceColumns(Operation):
    """The columns from `first` on, in each of `groups` equal groups of a row."""

    VERB = "slice_columns"

    first: int
    groups: int

    @property
    def period(self) -> int:
        return self.inputs[0].columns // self.groups

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, first: int, end: int, period: int | None = None) -> Activation:
        period = period or x.columns
        if not 0 <= first < end <= period or x.columns % period:
            raise ModelError(f"{MISFIT}: columns {first} to {end} of {x.columns}")
        groups = x.columns // period
        return recorder._add(SliceColumns((x,), Activation(x.rows, groups * (end - first)), first, groups))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, first: int, end: int, period: int | None = None) -> Array:
        period = period or x.shape[1]
        groups = x.shape[1] // period
        return x.reshape(len(x), groups, period)[:, :, first:end].reshape(len(x), groups * (end - first))


@operation
class ConcatHeads(Operation):
    """The columns of two activations, interleaved by head.

    shared: every head gets the same columns of the second.
    """

    VERB = "concat_heads"

    heads: int
    shared: bool

    @property
    def x_columns(self) -> int:
        return self.inputs[0].columns // self.heads

    @property
    def z_columns(self) -> int:
        return self.inputs[1].columns // (1 if self.shared else self.heads)

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, y: Activation, heads: int, shared: bool = False) -> Activation:
        if x.columns % heads or (y.columns % heads and not shared):
            raise ModelError(f"{MISFIT}: {x.columns}, {y.columns} columns, {heads} heads")
        columns = x.columns + y.columns * (heads if shared else 1)
        return recorder._add(ConcatHeads((x, y), Activation(x.rows, columns), heads, shared))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, y: Array, heads: int, shared: bool = False) -> Array:
        rows, in_x, in_y = len(x), x.shape[1] // heads, y.shape[1] // (1 if shared else heads)
        of_y = np.repeat(y[:, None], heads, axis=1) if shared else y.reshape(rows, heads, in_y)
        return np.concatenate((x.reshape(rows, heads, in_x), of_y), axis=2).reshape(rows, heads * (in_x + in_y))


@operation
class HeadDots(Operation):
    """The sum of x * z over the columns of each head."""

    VERB = "head_dots"

    heads: int

    @property
    def head_dim(self) -> int:
        return self.inputs[0].columns // self.heads

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, z: Activation, heads: int) -> Activation:
        if require_same_columns(x, z) % heads:
            raise ModelError(f"{MISFIT}: {x.columns} columns, {heads} heads")
        return recorder._add(HeadDots((x, z), Activation(x.rows, heads), heads))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, z: Array, heads: int) -> Array:
        products = (x * z).reshape(len(x), heads, x.shape[1] // heads)
        return products.sum(axis=2, dtype=np.float64).astype(np.float32)


@operation
class MixStreams(Operation):
    """Weighted sums of `streams` residual streams, which are concatenated in a row."""

    VERB = "mix_streams"

    streams: int

    @property
    def width(self) -> int:
        return self.inputs[0].columns // self.streams

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, weights: Activation, streams: int) -> Activation:
        if x.columns % streams or weights.columns % streams:
            raise ModelError(f"{MISFIT}: {x.columns} columns, {weights.columns} weights, {streams} streams")
        columns = x.columns // streams * (weights.columns // streams)
        return recorder._add(MixStreams((x, weights), Activation(x.rows, columns), streams))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, weights: Array, streams: int) -> Array:
        rows, outputs, width = len(x), weights.shape[1] // streams, x.shape[1] // streams
        of_made = weights.reshape(rows, outputs, streams)
        return np.einsum("tms,tsw->tmw", of_made, x.reshape(rows, streams, width)).reshape(rows, outputs * width)
