"""The verbs of recurrent layers as steps: a part of localllm.engine.lowering."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from localllm.arch.states import Recurrent
from localllm.engine.recorder import Activation, Operation
from localllm.engine.steps import Steps
from localllm.engine.tape import Step, padded


class RecurrentLowering(Steps):
    """What Lowering does for recurrent layers.

    The sequences of a run are treated by every part of a step, one after the other; parts share columns or heads.
    """

    def _convolve(
        self, operation: Operation, x: Activation, state: Recurrent, number: int, taps: np.ndarray, bias: np.ndarray,
        silu: bool,
    ) -> None:  # fmt: skip
        weights = padded(taps.T)
        arguments = {"taps": len(weights), "weights": weights, "bias": padded(bias), "silu": silu}
        self._scan("convolve", operation, ("x",), state, number, -(-x.columns // 16), arguments)

    def _selective_scan(
        self, operation: Operation, x: Activation, *inputs: Activation, state: Recurrent, rates: np.ndarray,
        skip: np.ndarray,
    ) -> None:  # fmt: skip
        blocks = -(-x.columns // 16)
        of_block = padded(rates.T).reshape(-1, blocks, 16).swapaxes(0, 1)
        arguments = {"rates": np.ascontiguousarray(of_block), "skip": padded(skip), "state_size": rates.shape[1]}
        arguments["state_stride"] = self._buffers[inputs[1]].stride
        self._scan("selective_scan", operation, ("x", "dt", "b", "c"), state, 1, blocks, arguments)

    def _state_space(self, operation: Operation, *inputs: Activation, skip: np.ndarray, **given: Any) -> None:
        names = ("v", "dt", "k", "q")
        arguments = {"strength": self._buffers[inputs[1]], "skip": skip}
        self._scan_heads("plain", operation, names, arguments, **given)

    def _delta_rule(self, operation: Operation, *inputs: Activation, **given: Any) -> None:
        names = ("q", "k", "v", "dt", "strength")
        self._scan_heads("delta", operation, names, {"skip": 0}, **given)

    def _scan_heads(
        self, rule: str, operation: Operation, names: Sequence[str], arguments: dict[str, Any], state: Recurrent,
        number: int, rates: np.ndarray, key_heads: int, repeat: int,
    ) -> None:  # fmt: skip
        heads, key_dim, value_dim = state.shapes[number]
        inputs = dict(zip(names, operation.inputs, strict=True))
        arguments |= {
            "key_stride": self._buffers[inputs["k"]].stride,
            "head_stride": self._buffers[inputs["dt"]].stride,
        }
        arguments |= {"rates": rates, "heads": heads, "key_heads": key_heads, "repeat": repeat}
        arguments |= {"key_dim": key_dim, "value_dim": value_dim}
        self._scan(f"head_scan-{rule}", operation, names, state, number, heads * -(-value_dim // 16), arguments)

    def _scan(
        self, kernel: str, operation: Operation, names: Sequence[str], state: Recurrent, number: int, parts: int,
        arguments: dict[str, Any],
    ) -> None:  # fmt: skip
        """A step that reads and changes one of a layer's states."""
        assert self._layout is not None
        inputs, y = [self._buffers[x] for x in operation.inputs], self._new(operation.output)
        arguments |= dict(zip(names, inputs, strict=True)) | {"y": y, "stride": y.stride}
        arguments |= {"sequences": self.header.sequences, "sequence_count": self.header.sequence_count}
        arguments["offset"] = self._layout.offset(state.layer, number)
        if "head_scan" not in kernel:
            arguments["columns"] = operation.output.columns
        self.tape.append(Step(kernel, arguments, min(parts, 8 * self._threads), None, inputs, [y]))
