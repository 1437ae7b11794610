"""Compute recurrent layers, which update a state of each sequence token by token, and convolutions.

A step is divided into parts by columns or heads; each part processes the run's sequences one after the other.
"""

from collections.abc import Callable, Sequence

import numpy as np

from localllm.arch.layer_state import RecurrentLayerState
from localllm.arch.recurrent_verbs import HeadState
from localllm.arch.rowwise_verbs import RowwiseVerbs
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.steps import StepBuilder, Target, pad_vector
from localllm.engine.operations.builders import Array, RecorderBase, ReferenceBase, require_columns
from localllm.engine.operations.operation import StateOperation, operation


@operation
class ScanOperation(StateOperation):
    """An operation on a state of a recurrent layer.

    number: index among the layer's states.
    """

    state: RecurrentLayerState
    number: int

    def append_scan(
        self, steps: StepBuilder, kernel: str, names: Sequence[str], parts: int, arguments: dict[str, object]
    ) -> None:
        """Append a step that reads and updates the state.

        names: the kernel's names of the inputs.
        """
        assert steps.layout is not None
        inputs, y = [steps.buffers[x] for x in self.inputs], steps.allocate(self.output)
        arguments |= dict(zip(names, inputs, strict=True)) | {"y": y, "stride": y.stride}
        arguments |= {"sequences": steps.header.sequences, "sequence_count": steps.header.sequence_count}
        arguments["offset"] = steps.layout.get_offset(self.state.layer, self.number)
        steps.append(kernel, arguments, min(parts, 8 * steps.target.threads), inputs, [y])


@operation
class SelectiveScan(ScanOperation):
    """The scan of Mamba.

    rates: float32 [columns, state size]. skip: float32 [columns].
    """

    VERB = "selective_scan"

    rates: np.ndarray
    skip: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        blocks, rates = -(-self.inputs[0].columns // 16), self.rates
        of_block = np.ascontiguousarray(pad_vector(rates.T).reshape(-1, blocks, 16).swapaxes(0, 1))
        arguments = {"rates": of_block, "skip": pad_vector(self.skip), "state_size": rates.shape[1]}
        arguments |= {"state_stride": steps.buffers[self.inputs[2]].stride, "columns": self.output.columns}
        self.append_scan(steps, "selective_scan", ("x", "dt", "b", "c"), blocks, arguments)

    @staticmethod
    def record(
        recorder: RecorderBase, x: Activation, dt: Activation, b: Activation, c: Activation, rates: Weight,
        skip: Weight,
        state: RecurrentLayerState,
    ) -> Activation:  # fmt: skip
        state_size, columns = state.shapes[1]
        require_inputs(columns, x=x, dt=dt)
        require_inputs(state_size, b=b, c=c)
        numbers = recorder._load_array(rates, (columns, state_size)), recorder._load_array(skip, (columns,))
        return recorder._add(SelectiveScan((x, dt, b, c), Activation(x.rows, columns), state, 1, *numbers))

    @staticmethod
    def reference(
        run: ReferenceBase,
        x: Array,
        dt: Array,
        b: Array,
        c: Array,
        rates: Weight,
        skip: Weight,
        state: RecurrentLayerState,
    ) -> Array:
        of_columns, skips = rates.flatten().read_vector().reshape(x.shape[1], -1).T, skip.flatten().read_vector()

        def token(h: Array, x: Array, dt: Array, b: Array, c: Array) -> tuple[Array, Array]:
            h = np.exp(dt * of_columns) * h + b[:, None] * (dt * x)
            return h, c @ h + skips * x

        return scan_tokens(run, state, 1, token, x, dt, b, c)


@operation
class HeadScan(ScanOperation):
    """A scan by heads whose states decay, each at its own rate.

    Attributes:
        rates: float32 [heads].
        key_heads, repeat: head i has the keys of head i / repeat % key_heads.
    """

    rates: np.ndarray
    key_heads: int
    repeat: int

    def scan_heads(self, steps: StepBuilder, rule: str, names: Sequence[str], arguments: dict[str, object]) -> None:
        heads, key_dim, value_dim = self.state.shapes[self.number]
        inputs = dict(zip(names, self.inputs, strict=True))
        if "dt" in inputs:
            arguments["head_stride"] = steps.buffers[inputs["dt"]].stride
        arguments["key_stride"] = steps.buffers[inputs["k"]].stride
        arguments |= {"rates": self.rates, "key_heads": self.key_heads, "repeat": self.repeat}
        arguments |= {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        self.append_scan(steps, f"head_scan-{rule}", names, heads * -(-value_dim // 16), arguments)


@operation
class StateSpace(HeadScan):
    """The scan of Mamba 2.

    skip: float32 [heads].
    """

    VERB = "state_space"

    skip: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        arguments = {"strength": steps.buffers[self.inputs[1]], "skip": self.skip}
        self.scan_heads(steps, "plain", ("v", "dt", "k", "q"), arguments)

    @staticmethod
    def record(
        recorder: RecorderBase,
        x: Activation,
        dt: Activation,
        b: Activation,
        c: Activation,
        skip: Weight,
        heads: HeadState,
    ) -> Activation:
        rates = load_decay_rates(recorder, heads, {"b": b, "c": c}, {"x": x}, {"dt": dt})
        skips = recorder._load_array(skip, rates.shape)
        output = Activation(x.rows, x.columns)
        shared = heads.state, heads.number, rates, heads.key_heads, heads.repeat
        return recorder._add(StateSpace((x, dt, b, c), output, *shared, skips))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, dt: Array, b: Array, c: Array, skip: Weight, heads: HeadState) -> Array:
        skips = skip.flatten().read_vector()[:, None]

        def token(h: Array, c: Array, b: Array, x: Array, dt: Array) -> tuple[Array, Array]:
            return h + b[:, :, None] * (dt[:, None] * x)[:, None], skips * x

        return scan_heads(run, heads, token, c, b, x, dt)


class DeltaRule(HeadScan):
    """The gated delta rule."""

    VERB = "delta_rule"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        self.scan_heads(steps, "delta", ("q", "k", "v", "dt", "strength"), {"skip": 0})

    @staticmethod
    def record(
        recorder: RecorderBase, q: Activation, k: Activation, v: Activation, dt: Activation, strength: Activation,
        heads: HeadState,
    ) -> Activation:  # fmt: skip
        rates = load_decay_rates(recorder, heads, {"q": q, "k": k}, {"v": v}, {"dt": dt, "strength": strength})
        shared = heads.state, heads.number, rates, heads.key_heads, heads.repeat
        return recorder._add(DeltaRule((q, k, v, dt, strength), Activation(v.rows, v.columns), *shared))

    @staticmethod
    def reference(
        run: ReferenceBase, q: Array, k: Array, v: Array, dt: Array, strength: Array, heads: HeadState
    ) -> Array:
        def token(h: Array, q: Array, k: Array, v: Array, dt: Array, strength: Array) -> tuple[Array, Array | int]:
            change = strength[:, None] * (v - np.einsum("hk,hkv->hv", k, h))
            return h + k[:, :, None] * change[:, None], 0

        return scan_heads(run, heads, token, q, k, v, dt, strength)


class LightningAttention(HeadScan):
    """Lightning attention: the scan of Mamba 2 with dt and strength 1 for all tokens."""

    VERB = "lightning_attention"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        heads = self.state.shapes[self.number][0]
        ones = np.ones(heads, np.float32)
        constants = {"dt": ones, "strength": ones, "skip": np.zeros(heads, np.float32), "head_stride": 0}
        self.scan_heads(steps, "plain", ("q", "k", "v"), constants)

    @staticmethod
    def record(
        recorder: RecorderBase, q: Activation, k: Activation, v: Activation, slopes: Sequence[float],
        state: RecurrentLayerState, number: int,
    ) -> Activation:  # fmt: skip
        require_heads(state.shapes[number], v, q=q, k=k)
        heads, output = state.shapes[number][0], Activation(v.rows, v.columns)
        return recorder._add(
            LightningAttention((q, k, v), output, state, number, -np.array(slopes, np.float32), heads, 1)
        )

    @staticmethod
    def reference(
        run: ReferenceBase,
        q: Array,
        k: Array,
        v: Array,
        slopes: Sequence[float],
        state: RecurrentLayerState,
        number: int,
    ) -> Array:
        decays = np.exp(-np.array(slopes, np.float32))[:, None, None]

        def token(h: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            h = decays * h + k[:, :, None] * v[:, None]
            return h, np.einsum("hk,hkv->hv", q, h)

        return scan_split_heads(run, state, number, token, q, k, v)


class RowScan(ScanOperation):
    """A scan by heads with a decay for each row of the state."""

    def append_row_scan(
        self, steps: StepBuilder, rule: str, names: Sequence[str], arguments: dict[str, object]
    ) -> None:
        heads, key_dim, value_dim = self.state.shapes[self.number]
        arguments |= {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        arguments["key_stride"] = steps.buffers[self.inputs[0]].stride
        self.append_scan(steps, f"wkv-{rule}", names, heads * -(-value_dim // 16), arguments)


class GatedLinearAttention(RowScan):
    """Linear attention whose state decays by gates."""

    VERB = "gated_linear_attention"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        self.append_row_scan(steps, "gated", ("r", "k", "v", "w"), {"a": 0, "b": 0, "first": 0})

    @staticmethod
    def record(
        recorder: RecorderBase,
        q: Activation,
        k: Activation,
        v: Activation,
        w: Activation,
        state: RecurrentLayerState,
        number: int,
    ) -> Activation:
        require_heads(state.shapes[number], v, q=q, k=k, w=w)
        return recorder._add(GatedLinearAttention((q, k, v, w), Activation(v.rows, v.columns), state, number))

    @staticmethod
    def reference(
        run: ReferenceBase, q: Array, k: Array, v: Array, w: Array, state: RecurrentLayerState, number: int
    ) -> Array:
        def token(h: Array, q: Array, k: Array, v: Array, w: Array) -> tuple[Array, Array]:
            h = w[:, :, None] * h + k[:, :, None] * v[:, None]
            return h, np.einsum("hk,hkv->hv", q, h)

        return scan_split_heads(run, state, number, token, q, k, v, w)


@operation
class WKV6(RowScan):
    """The recurrence of RWKV-6.

    first: float32 [heads * key_dim], weights of a token before it enters the state.
    """

    VERB = "wkv6"

    first: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        self.append_row_scan(steps, "first", ("r", "k", "v", "w"), {"a": 0, "b": 0, "first": pad_vector(self.first)})

    @staticmethod
    def record(
        recorder: RecorderBase, r: Activation, k: Activation, v: Activation, w: Activation, first: Weight,
        state: RecurrentLayerState, number: int,
    ) -> Activation:  # fmt: skip
        require_heads(state.shapes[number], v, r=r, k=k, w=w)
        numbers = recorder._load_array(first, state.shapes[number][:2]).reshape(-1)
        return recorder._add(WKV6((r, k, v, w), Activation(v.rows, v.columns), state, number, numbers))

    @staticmethod
    def reference(
        run: ReferenceBase,
        r: Array,
        k: Array,
        v: Array,
        w: Array,
        first: Weight,
        state: RecurrentLayerState,
        number: int,
    ) -> Array:
        weights = first.flatten().read_vector().reshape(*state.shapes[number][:2], 1)

        def token(h: Array, r: Array, k: Array, v: Array, w: Array) -> tuple[Array, Array]:
            new = k[:, :, None] * v[:, None]
            return w[:, :, None] * h + new, np.einsum("hk,hkv->hv", r, h + weights * new)

        return scan_split_heads(run, state, number, token, r, k, v, w)


class WKV7(RowScan):
    """The recurrence of RWKV-7."""

    VERB = "wkv7"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        self.append_row_scan(steps, "delta", ("r", "w", "k", "v", "a", "b"), {"first": 0})

    @staticmethod
    def record(
        recorder: RecorderBase, r: Activation, w: Activation, k: Activation, v: Activation, a: Activation,
        b: Activation,
        state: RecurrentLayerState, number: int,
    ) -> Activation:  # fmt: skip
        require_heads(state.shapes[number], v, r=r, w=w, k=k, a=a, b=b)
        return recorder._add(WKV7((r, w, k, v, a, b), Activation(v.rows, v.columns), state, number))

    @staticmethod
    def reference(
        run: ReferenceBase,
        r: Array,
        w: Array,
        k: Array,
        v: Array,
        a: Array,
        b: Array,
        state: RecurrentLayerState,
        number: int,
    ) -> Array:
        def token(h: Array, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array) -> tuple[Array, Array]:
            read = np.einsum("hk,hkv->hv", a, h)
            h = w[:, :, None] * h + b[:, :, None] * read[:, None] + k[:, :, None] * v[:, None]
            return h, np.einsum("hk,hkv->hv", r, h)

        return scan_split_heads(run, state, number, token, r, w, k, v, a, b)


def require_heads(shape: tuple[int, ...], v: Activation, **keys: Activation) -> None:
    """Raise ModelError for values or keys whose columns do not fit a state [heads, key_dim, value_dim]."""
    heads, key_dim, value_dim = shape
    require_columns("v", v, heads * value_dim)
    require_inputs(heads * key_dim, **keys)


def require_inputs(columns: int, **inputs: Activation) -> None:
    """Raise ModelError for an input without `columns` columns."""
    for name, x in inputs.items():
        require_columns(name, x, columns)


def load_decay_rates(
    recorder: RecorderBase, scan: HeadState, keys: dict[str, Activation], values: dict[str, Activation],
    single: dict[str, Activation],
) -> np.ndarray:  # fmt: skip
    """Return the heads' decay rates, float32 [heads]. Raises ModelError for inputs that do not fit.

    single: inputs that have one value per head.
    """
    heads, key_dim, value_dim = scan.state.shapes[scan.number]
    require_inputs(scan.key_heads * key_dim, **keys)
    require_inputs(heads * value_dim, **values)
    require_inputs(heads, **single)
    return recorder._load_array(scan.rates, (heads,))


def scan_heads(
    run: ReferenceBase, scan: HeadState, token: Callable[..., tuple[Array, Array | int]], *inputs: Array
) -> Array:
    """Scan all heads token by token; return q h + skipped for each token.

    token(h, q, k, v, dt, ...) -> (new h, skipped): updates the heads' states, which have already decayed by dt.
    """
    heads, _, value_dim = scan.state.shapes[scan.number]
    keys_of, rates = np.arange(heads) // scan.repeat % scan.key_heads, scan.rates.flatten().read_vector()

    def run_heads(h: Array, q: Array, k: Array, v: Array, dt: Array, *strength: Array) -> tuple[Array, Array]:
        q, k = (x.reshape(scan.key_heads, -1)[keys_of] for x in (q, k))
        faded = np.exp(dt * rates)[:, None, None] * h
        h, skipped = token(faded, q, k, v.reshape(heads, value_dim), dt, *strength)
        return h, (np.einsum("hk,hkv->hv", q, h) + skipped).reshape(-1)

    return scan_tokens(run, scan.state, scan.number, run_heads, *inputs)


def scan_split_heads(
    run: ReferenceBase,
    state: RecurrentLayerState,
    number: int,
    token: Callable[..., tuple[Array, Array]],
    *inputs: Array,
) -> Array:
    """Scan token by token as `scan_tokens` does, with inputs and outputs divided into heads."""
    heads = state.shapes[number][0]

    def run_heads(h: Array, *rows: Array) -> tuple[Array, Array]:
        h, y = token(h, *(row.reshape(heads, -1) for row in rows))
        return h, y.reshape(-1)

    return scan_tokens(run, state, number, run_heads, *inputs)


def scan_tokens(
    run: ReferenceBase,
    state: RecurrentLayerState,
    number: int,
    token: Callable[..., tuple[Array, Array]],
    *inputs: Array,
) -> Array:
    """Call token(h, *rows) -> (new h, output) for each token in turn; return all outputs."""

    def run_sequence(h: Array, *inputs: Array) -> tuple[Array, Array]:
        outputs = []
        for rows in zip(*inputs, strict=True):
            h, y = token(h, *rows)
            outputs.append(y)
        return h, np.stack(outputs)

    return run._scan_sequences(state, number, run_sequence, *inputs)


@operation
class Convolve(ScanOperation):
    """A convolution over time, column by column.

    Attributes:
        taps: float32 [columns, taps], the latest token's last.  bias: float32 [columns].
        silu: SiLU is applied to the result.
    """

    VERB = "convolve"

    taps: np.ndarray
    bias: np.ndarray
    silu: bool

    def lower(self, steps: StepBuilder, target: Target) -> None:
        weights = pad_vector(self.taps.T)
        arguments = {"taps": len(weights), "weights": weights, "bias": pad_vector(self.bias), "silu": self.silu}
        arguments["columns"] = self.output.columns
        self.append_scan(steps, "convolve", ("x",), -(-self.inputs[0].columns // 16), arguments)

    @staticmethod
    def record(
        recorder: RecorderBase, x: Activation, weight: Weight, state: RecurrentLayerState, number: int = 0,
        silu: bool = True, dilation: int = 1,
    ) -> Activation:  # fmt: skip
        taps_before, columns = state.shapes[number]
        require_columns(weight.name, x, columns)
        taps = np.zeros((columns, taps_before + 1), np.float32)
        taps[:, ::dilation] = recorder._load_array(weight, (columns, taps_before // dilation + 1))
        bias = recorder._load_vector(weight.bias, columns) if weight.bias else None
        return recorder._convolve(x, state, number, taps, bias, silu)

    @staticmethod
    def reference(
        run: ReferenceBase, x: Array, weight: Weight, state: RecurrentLayerState, number: int = 0, silu: bool = True,
        dilation: int = 1,
    ) -> Array:  # fmt: skip
        taps = weight.flatten().read_vector().reshape(x.shape[1], -1)

        def run_sequence(window: Array, x: Array) -> tuple[Array, Array]:
            rows = np.concatenate((window, x))
            y = sum(taps[:, tap] * rows[tap * dilation :][: len(x)] for tap in range(taps.shape[1]))
            return rows[len(x) :], y + (weight.bias.read_vector() if weight.bias else 0)

        y = run._scan_sequences(state, number, run_sequence, x)
        return y * run.sigmoid(y) if silu else y


@operation
class GatedMean(ScanOperation):
    """A mean over the last tokens, weighted by the softmax of their gates.

    Attributes:
        places: float32 [taps, columns], position biases, added to the gates.
        stretches: number of equal segments of the taps, each of which reads columns of its own.
    """

    VERB = "gated_mean"

    places: np.ndarray
    stretches: int

    def lower(self, steps: StepBuilder, target: Target) -> None:
        x, places = self.inputs[0], pad_vector(self.places)
        arguments = {"taps": len(places), "places": places, "columns": self.output.columns}
        arguments |= {"x_stride": steps.buffers[x].stride, "stretches": self.stretches}
        self.append_scan(steps, "gated_mean", ("x",), -(-self.output.columns // 16), arguments)

    @staticmethod
    def record(
        recorder: RecorderBase,
        x: Activation,
        places: Weight,
        state: RecurrentLayerState,
        number: int = 0,
        stretches: int = 1,
    ) -> Activation:
        taps_before, columns = state.shapes[number]
        require_columns(places.name, x, columns)
        numbers = recorder._dequantize(places, ((taps_before + 1) // stretches, columns // 2))
        width = columns // (2 * stretches)
        of_taps = numbers.reshape(-1, stretches, width).swapaxes(0, 1).reshape(taps_before + 1, width)
        return recorder._add(GatedMean((x,), Activation(x.rows, width), state, number, of_taps, stretches))

    @staticmethod
    def reference(
        run: ReferenceBase, x: Array, places: Weight, state: RecurrentLayerState, number: int = 0, stretches: int = 1
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

        return run._scan_sequences(state, number, run_sequence, x)


class ConvolutionVerbs(RecorderBase):
    """The recorder's verbs of convolutions."""

    def previous(self, x: Activation, state: RecurrentLayerState, number: int) -> Activation:
        """Record a convolution with the taps 1 and 0, which selects the row of the previous token."""
        require_columns("x", x, state.shapes[number][1])
        return self._convolve(x, state, number, np.tile(np.array([1, 0], np.float32), (x.columns, 1)))

    def mean(self, x: Activation, state: RecurrentLayerState, number: int) -> Activation:
        """Record a convolution with equal taps."""
        taps_before, columns = state.shapes[number]
        require_columns("x", x, columns)
        return self._convolve(x, state, number, np.full((columns, taps_before + 1), 1 / (taps_before + 1), np.float32))

    def _convolve(
        self, x: Activation, state: RecurrentLayerState, number: int, taps: np.ndarray, bias: np.ndarray | None = None,
        silu: bool = False,
    ) -> Activation:  # fmt: skip
        bias = np.zeros(x.columns, np.float32) if bias is None else bias
        return self._add(Convolve((x,), Activation(x.rows, x.columns), state, number, taps, bias, silu))


class ConvolutionReference(ReferenceBase, RowwiseVerbs):
    """The verbs of convolutions in NumPy."""

    def previous(self, x: Array, state: RecurrentLayerState, number: int) -> Array:
        def run_sequence(last: Array, x: Array) -> tuple[Array, Array]:
            return x[-1:], np.concatenate((last, x[:-1]))

        return self._scan_sequences(state, number, run_sequence, x)

    def mean(self, x: Array, state: RecurrentLayerState, number: int) -> Array:
        def run_sequence(window: Array, x: Array) -> tuple[Array, Array]:
            rows, taps = np.concatenate((window, x)), len(window) + 1
            total: Array = np.add.reduce([rows[tap : tap + len(x)] for tap in range(taps)])
            return rows[len(x) :], total / np.float32(taps)

        return self._scan_sequences(state, number, run_sequence, x)
