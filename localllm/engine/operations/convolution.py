"""Operations over the last tokens of a sequence: convolutions and means. Their state is the rows of those tokens."""

import numpy as np

from localllm.arch.layer_state import Recurrent
from localllm.arch.rowwise_verbs import RowwiseVerbs
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.steps import Steps, Target, vector_of
from localllm.engine.operations.computing import Array, Computing
from localllm.engine.operations.operation import operation
from localllm.engine.operations.recording import Recording, require_columns
from localllm.engine.operations.recurrent import ScanOperation


@operation
class Convolve(ScanOperation):
    """A convolution over time, column by column.

    Attributes:
        taps: float32 [columns, taps], the latest token's last.  bias: float32 [columns].
        silu: whether the result is multiplied by its sigmoid.
    """

    VERB = "convolve"

    taps: np.ndarray
    bias: np.ndarray
    silu: bool

    def lower(self, steps: Steps, target: Target) -> None:
        weights = vector_of(self.taps.T)
        arguments = {"taps": len(weights), "weights": weights, "bias": vector_of(self.bias), "silu": self.silu}
        arguments["columns"] = self.output.columns
        self.scan(steps, "convolve", ("x",), -(-self.inputs[0].columns // 16), arguments)

    @staticmethod
    def record(
        recorder: Recording, x: Activation, weight: Weight, state: Recurrent, number: int = 0, silu: bool = True,
        dilation: int = 1,
    ) -> Activation:  # fmt: skip
        taps_before, columns = state.shapes[number]
        require_columns(weight.name, x, columns)
        taps = np.zeros((columns, taps_before + 1), np.float32)
        taps[:, ::dilation] = recorder._numbers(weight, (columns, taps_before // dilation + 1))
        bias = recorder._vector(weight.bias, columns) if weight.bias else None
        return recorder._convolve(x, state, number, taps, bias, silu)

    @staticmethod
    def reference(
        run: Computing, x: Array, weight: Weight, state: Recurrent, number: int = 0, silu: bool = True,
        dilation: int = 1,
    ) -> Array:  # fmt: skip
        taps = weight.flat().vector().reshape(x.shape[1], -1)

        def run_sequence(window: Array, x: Array) -> tuple[Array, Array]:
            rows = np.concatenate((window, x))
            y = sum(taps[:, tap] * rows[tap * dilation :][: len(x)] for tap in range(taps.shape[1]))
            return rows[len(x) :], y + (weight.bias.vector() if weight.bias else 0)

        y = run._by_sequence(state, number, run_sequence, x)
        return y * run.sigmoid(y) if silu else y


@operation
class GatedMean(ScanOperation):
    """A mean over the last tokens, weighted by the softmax of their gates.

    Attributes:
        places: float32 [taps, columns], added to the gates.
        stretches: equal parts of the taps, each of which reads columns of its own.
    """

    VERB = "gated_mean"

    places: np.ndarray
    stretches: int

    def lower(self, steps: Steps, target: Target) -> None:
        x, places = self.inputs[0], vector_of(self.places)
        arguments = {"taps": len(places), "places": places, "columns": self.output.columns}
        arguments |= {"x_stride": steps.buffers[x].stride, "stretches": self.stretches}
        self.scan(steps, "gated_mean", ("x",), -(-self.output.columns // 16), arguments)

    @staticmethod
    def record(
        recorder: Recording, x: Activation, places: Weight, state: Recurrent, number: int = 0, stretches: int = 1
    ) -> Activation:
        taps_before, columns = state.shapes[number]
        require_columns(places.name, x, columns)
        numbers = recorder._dequantize(places, ((taps_before + 1) // stretches, columns // 2))
        width = columns // (2 * stretches)
        of_taps = numbers.reshape(-1, stretches, width).swapaxes(0, 1).reshape(taps_before + 1, width)
        return recorder._add(GatedMean((x,), Activation(x.rows, width), state, number, of_taps, stretches))

    @staticmethod
    def reference(
        run: Computing, x: Array, places: Weight, state: Recurrent, number: int = 0, stretches: int = 1
    ) -> Array:
        columns = x.shape[1] // (2 * stretches)
        of_places = run.matrix(places).reshape(-1, stretches, columns).swapaxes(0, 1)  # [stretches, taps, columns]
        taps, begins = of_places.shape[0] * of_places.shape[1], iter([span.position for span in run._spans])

        def run_sequence(window: Array, x: Array) -> tuple[Array, Array]:
            stream = np.concatenate((window, x)).reshape(-1, 2, stretches, columns)
            rows = np.stack([stream[tap : tap + len(x), :, tap * stretches // taps] for tap in range(taps)])
            gates = rows[:, :, 1] + of_places.reshape(taps, 1, columns)
            is_there = np.arange(taps)[:, None] + next(begins) + np.arange(len(x)) >= taps - 1
            with np.errstate(invalid="ignore"):
                flaws = gates - gates
                gates = np.where(is_there[:, :, None], gates, -np.inf)
                powers = np.exp(gates - gates.max(axis=0)) + np.where(is_there[:, :, None], flaws, 0)
                means = (powers * rows[:, :, 0]).sum(axis=0) / powers.sum(axis=0)
            return stream[len(x) :].reshape(taps - 1, 2 * stretches * columns), means

        return run._by_sequence(state, number, run_sequence, x)


class ConvolutionVerbs(Recording):
    """The recorder's implementation of the verbs of convolutions."""

    def previous(self, x: Activation, state: Recurrent, number: int) -> Activation:
        """Record a convolution with the taps 1 and 0: the row of the previous token."""
        require_columns("x", x, state.shapes[number][1])
        return self._convolve(x, state, number, np.tile(np.array([1, 0], np.float32), (x.columns, 1)))

    def mean(self, x: Activation, state: Recurrent, number: int) -> Activation:
        """Record a convolution with equal taps."""
        taps_before, columns = state.shapes[number]
        require_columns("x", x, columns)
        return self._convolve(x, state, number, np.full((columns, taps_before + 1), 1 / (taps_before + 1), np.float32))

    def _convolve(
        self, x: Activation, state: Recurrent, number: int, taps: np.ndarray, bias: np.ndarray | None = None,
        silu: bool = False,
    ) -> Activation:  # fmt: skip
        bias = np.zeros(x.columns, np.float32) if bias is None else bias
        return self._add(Convolve((x,), Activation(x.rows, x.columns), state, number, taps, bias, silu))


class ConvolutionReference(Computing, RowwiseVerbs):
    """The NumPy reference of the verbs of convolutions."""

    def previous(self, x: Array, state: Recurrent, number: int) -> Array:
        def run_sequence(last: Array, x: Array) -> tuple[Array, Array]:
            return x[-1:], np.concatenate((last, x[:-1]))

        return self._by_sequence(state, number, run_sequence, x)

    def mean(self, x: Array, state: Recurrent, number: int) -> Array:
        def run_sequence(window: Array, x: Array) -> tuple[Array, Array]:
            rows, taps = np.concatenate((window, x)), len(window) + 1
            total: Array = np.add.reduce([rows[tap : tap + len(x)] for tap in range(taps)])
            return rows[len(x) :], total / np.float32(taps)

        return self._by_sequence(state, number, run_sequence, x)
