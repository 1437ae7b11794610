"""The verbs of recurrent layers, checked and written down: a part of localllm.engine.trace.recorder."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from localllm.arch.layer_state import Recurrent
from localllm.arch.recurrent_verbs import HeadState
from localllm.arch.verbs import RowwiseVerbs
from localllm.arch.weights import Weight
from localllm.engine.trace.operations import Activation, Rows
from localllm.errors import ModelError


class RecurrentVerbs(RowwiseVerbs):
    """What a Recorder says of recurrent layers."""

    _used: set[str]

    def _record(self, verb: str, inputs: tuple[Activation, ...], rows: Rows, columns: int, **given: Any) -> Activation:
        raise NotImplementedError

    def _vector(self, weight: Weight, columns: int) -> Any:
        raise NotImplementedError

    def softplus(self, x: Activation, bias: Weight | None = None) -> Activation:
        numbers = self._vector(bias, x.columns) if bias else np.zeros(x.columns, np.float32)
        return self._record("softplus", (x,), x.rows, x.columns, bias=numbers)

    def convolve(
        self, x: Activation, weight: Weight, state: Recurrent, number: int = 0, silu: bool = True, dilation: int = 1
    ) -> Activation:
        before, columns = state.shapes[number]
        require_columns(weight.name, x, columns)
        taps = np.zeros((columns, before + 1), np.float32)
        taps[:, ::dilation] = self._numbers(weight, (columns, before // dilation + 1))
        bias = self._vector(weight.bias, columns) if weight.bias else np.zeros(columns, np.float32)
        given = {"state": state, "number": number, "taps": taps, "bias": bias, "silu": silu}
        return self._record("convolve", (x,), x.rows, columns, **given)

    def previous(self, x: Activation, state: Recurrent, number: int) -> Activation:
        """A convolution with two taps, of which the last counts nothing."""
        require_columns("x", x, state.shapes[number][1])
        taps, bias = np.tile(np.array([1, 0], np.float32), (x.columns, 1)), np.zeros(x.columns, np.float32)
        given = {"state": state, "number": number, "taps": taps, "bias": bias, "silu": False}
        return self._record("convolve", (x,), x.rows, x.columns, **given)

    def mean(self, x: Activation, state: Recurrent, number: int) -> Activation:
        """A convolution with equal taps."""
        before, columns = state.shapes[number]
        require_columns("x", x, columns)
        taps, bias = np.full((columns, before + 1), 1 / (before + 1), np.float32), np.zeros(columns, np.float32)
        given = {"state": state, "number": number, "taps": taps, "bias": bias, "silu": False}
        return self._record("convolve", (x,), x.rows, columns, **given)

    def gated_mean(
        self, x: Activation, places: Weight, state: Recurrent, number: int = 0, stretches: int = 1
    ) -> Activation:
        before, columns = state.shapes[number]
        require_columns(places.name, x, columns)
        numbers = self._dequantized(places, ((before + 1) // stretches, columns // 2))
        made = columns // (2 * stretches)
        of_taps = numbers.reshape(-1, stretches, made).swapaxes(0, 1).reshape(before + 1, made)
        given = {"state": state, "number": number, "places": of_taps, "stretches": stretches}
        return self._record("gated_mean", (x,), x.rows, made, **given)

    def selective_scan(
        self,
        x: Activation,
        dt: Activation,
        b: Activation,
        c: Activation,
        rates: Weight,
        skip: Weight,
        state: Recurrent,
    ) -> Activation:
        state_size, columns = state.shapes[1]
        for name, given, expected in (
            ("x", x, columns),
            ("dt", dt, columns),
            ("b", b, state_size),
            ("c", c, state_size),
        ):
            require_columns(name, given, expected)
        numbers = {"rates": self._numbers(rates, (columns, state_size)), "skip": self._numbers(skip, (columns,))}
        return self._record("selective_scan", (x, dt, b, c), x.rows, columns, state=state, **numbers)

    def state_space(
        self, x: Activation, dt: Activation, b: Activation, c: Activation, skip: Weight, heads: HeadState
    ) -> Activation:
        given = self._scanned(heads, {"b": b, "c": c}, {"x": x}, {"dt": dt})
        given["skip"] = self._numbers(skip, given["rates"].shape)
        return self._record("state_space", (x, dt, b, c), x.rows, x.columns, **given)

    def delta_rule(
        self, q: Activation, k: Activation, v: Activation, dt: Activation, strength: Activation, heads: HeadState
    ) -> Activation:
        given = self._scanned(heads, {"q": q, "k": k}, {"v": v}, {"dt": dt, "strength": strength})
        return self._record("delta_rule", (q, k, v, dt, strength), v.rows, v.columns, **given)

    def _scanned(self, scan: HeadState, *inputs: dict[str, Activation]) -> dict[str, Any]:
        """What a scan by heads is given. inputs: those that have keys, values, and a number for each head."""
        heads, key_dim, value_dim = scan.state.shapes[scan.number]
        for named, columns in zip(inputs, (scan.key_heads * key_dim, heads * value_dim, heads), strict=True):
            for name, x in named.items():
                require_columns(name, x, columns)
        shared = {"key_heads": scan.key_heads, "repeat": scan.repeat}
        return {"state": scan.state, "number": scan.number, "rates": self._numbers(scan.rates, (heads,)), **shared}

    def lightning_attention(
        self, q: Activation, k: Activation, v: Activation, slopes: Sequence[float], state: Recurrent, number: int
    ) -> Activation:
        require_heads(state.shapes[number], v, q=q, k=k)
        heads, given = state.shapes[number][0], {"state": state, "number": number, "repeat": 1}
        rates = -np.array(slopes, np.float32)
        return self._record("lightning_attention", (q, k, v), v.rows, v.columns, rates=rates, key_heads=heads, **given)

    def gated_linear_attention(
        self, q: Activation, k: Activation, v: Activation, w: Activation, state: Recurrent, number: int
    ) -> Activation:
        require_heads(state.shapes[number], v, q=q, k=k, w=w)
        given = {"state": state, "number": number}
        return self._record("gated_linear_attention", (q, k, v, w), v.rows, v.columns, **given)

    def wkv6(
        self, r: Activation, k: Activation, v: Activation, w: Activation, first: Weight, state: Recurrent, number: int
    ) -> Activation:
        require_heads(state.shapes[number], v, r=r, k=k, w=w)
        given = {"state": state, "number": number, "first": self._numbers(first, state.shapes[number][:2]).reshape(-1)}
        return self._record("wkv6", (r, k, v, w), v.rows, v.columns, **given)

    def wkv7(
        self,
        r: Activation,
        w: Activation,
        k: Activation,
        v: Activation,
        a: Activation,
        b: Activation,
        state: Recurrent,
        number: int,
    ) -> Activation:
        require_heads(state.shapes[number], v, r=r, w=w, k=k, a=a, b=b)
        return self._record("wkv7", (r, w, k, v, a, b), v.rows, v.columns, state=state, number=number)

    def _numbers(self, weight: Weight, shape: tuple[int, ...]) -> Any:
        """A small tensor's numbers, float32, which is used now. Dimensions of 1 do not count."""
        self._used.add(weight.name)
        if prod(weight.shape) != prod(shape) or [n for n in weight.shape if n > 1] != [n for n in shape if n > 1]:
            raise ModelError(f"tensor {weight.name} should have the shape {list(shape)}, has {list(weight.shape)}")
        return weight.flat().vector().reshape(shape)

    def _dequantized(self, weight: Weight, shape: tuple[int, ...]) -> Any:
        """The same of a matrix, which files may have in any format."""
        if weight.tensor.format.block == 1:
            return self._numbers(weight, shape)
        from localllm.kernels.reference import dequantize  # seldom needed

        self._used.add(weight.name)
        numbers = dequantize(weight.tensor)
        if weight.shape != shape or not np.isfinite(numbers).all():
            raise ModelError(f"tensor {weight.name} should be numbers of the shape {list(shape)}")
        return numbers


def require_heads(shape: tuple[int, ...], v: Activation, **keys: Activation) -> None:
    """Values and keys for a state [heads, key_dim, value_dim]. Raises ModelError."""
    heads, key_dim, value_dim = shape
    require_columns("v", v, heads * value_dim)
    for name, x in keys.items():
        require_columns(name, x, heads * key_dim)


def require_columns(name: str, x: Activation, columns: int) -> None:
    """Raises ModelError."""
    if x.columns != columns:
        raise ModelError(f"the model's tensors do not fit together: {name} for {x.columns} of {columns} columns")
