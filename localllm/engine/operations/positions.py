"""Compute what depends on positions: rotary embeddings, and scales that grow with the position."""

import numpy as np

from localllm.arch.rope import RopeParameters
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import ALL, Activation, RowSet
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.lower.steps import StepBuilder, Target
from localllm.engine.lower.tape import Buffer
from localllm.engine.operations.builders import Array, RecorderBase, ReferenceBase
from localllm.engine.operations.operation import Operation, operation
from localllm.errors import ModelError

MIN_DIVISOR = 1e-3  # minimum divisor of RoPE frequencies; those of known models are at least 0.9


@operation
class Rotate(Operation):
    """RoPE, which rotates each head's pairs of elements by position * frequency.

    Attributes:
        factors: the tensor that frequencies are divided by, if there is one.  divisors: its values.
        table: cosines and sines that the caller writes, float32 [tokens, 2, pairs]; None: a step computes them from
            the run's positions.
    """

    VERB = "rope"

    rope: RopeParameters
    factors: Weight | None
    divisors: np.ndarray | None
    table: np.ndarray | None

    def lower(self, steps: StepBuilder, target: Target) -> None:
        (x,), rope = self.inputs, self.rope
        source, y, pairs = steps.buffers[x], steps.allocate_or_reuse(self), rope.dims // 2
        table = self._compute_angles(steps) if self.table is None else self.table
        arguments = {"x": source, "y": y, "stride": y.stride, "heads": x.columns // rope.head_dim}
        arguments |= {"head_dim": rope.head_dim, "table": table, "pairs": pairs}
        step, apart = (2, 1) if rope.interleaved else (1, pairs)
        reads = [source, table] if isinstance(table, Buffer) else [source]
        steps.append_row_step("rope", x.rows, arguments | {"step": step, "apart": apart}, reads, [y])

    def _compute_angles(self, steps: StepBuilder) -> Buffer:
        """Return the buffer of a run's angles, which one step computes for all layers with the same RoPE."""
        rope, divisors = self.rope, self.divisors

        def make() -> Buffer:
            pairs = rope.dims // 2
            frequencies = rope.compute_frequencies(None if divisors is None else divisors.astype(np.float64))
            table = Buffer(steps.target.tokens, pairs * 8)
            arguments: dict[str, object] = {"positions": steps.header.rotary_positions, "before": rope.position_offset}
            arguments |= {"frequencies": frequencies, "pairs": pairs}
            steps.append_row_step("angles", ALL, arguments | {"table": table, "factor": rope.magnitude}, [], [table])
            return table

        return steps.memoize(("angles", rope, self.factors.name if self.factors else ""), make)

    @staticmethod
    def record(
        recorder: RecorderBase, x: Activation, rope: RopeParameters, positions: RowSet, factors: Weight | None = None
    ) -> Activation:
        if x.columns % rope.head_dim:
            raise ModelError(f"{x.columns} columns cannot be divided into heads of {rope.head_dim}")
        divisors = None if factors is None else recorder._load_vector(factors, rope.dims // 2)
        if factors and divisors is not None:
            require_divisors(factors.name, divisors)
        table = recorder._tabulate_angles(rope, divisors)
        return recorder._add(Rotate((x,), Activation(positions, x.columns), rope, factors, divisors, table))

    @staticmethod
    def reference(
        run: ReferenceBase, x: Array, rope: RopeParameters, positions: Array, factors: Weight | None = None
    ) -> Array:
        frequencies = rope.compute_frequencies(factors.read_vector() if factors else None)
        angles = (run._turns(rope, positions) - rope.position_offset)[:, None] * frequencies
        cos, sin = np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude
        y = x.reshape(len(x), -1, rope.head_dim).copy()
        rotated, half = y[:, :, : rope.dims], rope.dims // 2
        first, second = (
            (np.s_[..., 0::2], np.s_[..., 1::2]) if rope.interleaved else (np.s_[..., :half], np.s_[..., half:])
        )
        u, v = rotated[first].copy(), rotated[second].copy()
        rotated[first], rotated[second] = u * cos - v * sin, u * sin + v * cos
        return y.reshape(x.shape)


@operation
class ScaleByPosition(Operation):
    """x * (1 + slope * log(floor((position + offset) / length) + 1))."""

    VERB = "scale_by_position"

    slope: float
    length: int
    offset: int

    @staticmethod
    def record(
        recorder: RecorderBase, x: Activation, positions: RowSet, slope: float, length: int, offset: int = 0
    ) -> Activation:
        return recorder._add(ScaleByPosition((x,), Activation(positions, x.columns), slope, length, offset))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, positions: Array, slope: float, length: int, offset: int = 0) -> Array:
        return x * (1 + slope * np.log((positions + offset) // length + 1))[:, None].astype(np.float32)


class PositionVerbs(RecorderBase):
    """The recorder's verbs of positions."""

    def _tabulate_angles(self, rope: RopeParameters, divisors: np.ndarray | None) -> np.ndarray | None:
        """Return a table of angles that the caller writes (in recorders of image rows), or None."""
        return None

    def select_by_context(self, short: Weight, long: Weight, original: int) -> Weight:
        self.ignore(short, long)
        for weight in (short, long):
            require_divisors(weight.name, weight.read_vector())
        return long if self._context > original else short


def require_divisors(name: str, divisors: np.ndarray) -> None:
    """Raise ModelError for divisors of RoPE frequencies that are too small or negative."""
    if divisors.min() < MIN_DIVISOR:
        raise ModelError(f"tensor {name} must have values of at least {MIN_DIVISOR} (found {divisors.min()})")


class PositionReference(ReferenceBase):
    """The verbs of positions in NumPy."""

    def _turns(self, rope: RopeParameters, positions: Array) -> Array:
        """Return the position by which each pair rotates, [tokens, pairs or 1]."""
        if positions is not self.positions:
            return positions[:, None]
        turns = [compute_mrope_positions(span) for span in self._spans]
        return np.concatenate(turns)[:, list(rope.pair_axes) or [0]]

    def select_by_context(self, short: Weight, long: Weight, original: int) -> Weight:
        return long if self._context > original else short


def compute_mrope_positions(span: SequenceSpan) -> np.ndarray:
    """Return the RoPE positions of a span's tokens by time, height and width, int64 [tokens, 3]."""
    place = span.position - span.ahead
    if span.seen is not None:
        turns: np.ndarray = span.seen.compute_mrope_positions(span.ids, place)
        return turns
    return np.repeat(np.arange(place, place + len(span.ids))[:, None], 3, axis=1)
