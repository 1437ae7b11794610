"""Operations that exchange rows with the caller of a run: image embeddings, and hidden states for draft heads."""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import numpy as np

from localllm.engine.lower.activation import ALL, Activation
from localllm.engine.lower.steps import Steps, Target, shape
from localllm.engine.operations.computing import Array, Computing
from localllm.engine.operations.operation import Operation, operation
from localllm.engine.operations.recording import Recording


class HiddenStateTap(NamedTuple):
    """The hidden states that are exported to a draft head.

    Attributes:
        memory: the buffer that they are written to, float32 [BATCH, columns or more].
        layers: the layers whose inputs are exported, side by side; empty: the model's last hidden state.
    """

    memory: np.ndarray
    layers: tuple[int, ...] = ()


@operation
class ExternalInput(Operation):
    """Rows that the caller wrote before the run, float32 [BATCH, columns or more]."""

    VERB = "external_input"

    memory: np.ndarray

    def lower(self, steps: Steps, target: Target) -> None:
        rows, x, y = self.memory, self.output, steps.new(self.output)
        arguments = {"x": rows, "x_stride": rows.strides[0], "first": 0, "groups": 1, "period": x.columns}
        steps.row_step("slice_columns", x.rows, arguments | shape(x, y), [], [y])

    @staticmethod
    def record(recorder: Recording, rows: np.ndarray, columns: int) -> Activation:
        """Record rows that the caller writes before the run: float32 [BATCH, columns or more]."""
        return recorder._add(ExternalInput((), Activation(ALL, columns), rows))


@operation
class ExportHidden(Operation):
    """Rows that are written to the caller's buffer."""

    VERB = "export_hidden"

    memory: np.ndarray

    def lower(self, steps: Steps, target: Target) -> None:
        steps.export_activation(self.inputs[0], self.memory)

    @staticmethod
    def record(recorder: Recording, x: Activation) -> Activation:
        assert recorder._tap
        recorder._add(ExportHidden((x,), Activation(ALL, x.columns), recorder._tap.memory))
        return x

    @staticmethod
    def reference(run: "HiddenStateReference", x: Array) -> Array:
        run.revealed = x
        return x


class HiddenStateVerbs(Recording):
    """The recorder's implementation of the verbs of hidden states.

    Attributes:
        begins: whether image embeddings can replace tokens.
        reveals: whether the model's last hidden state is exported.
    """

    _tap: HiddenStateTap | None = None
    begins = reveals = False

    def embed_inputs(self, embedded: Callable[[], Activation], parts: int = 1) -> Activation:
        self.begins = True
        return embedded()

    def add_deepstack(self, x: Activation, part: int) -> Activation:
        return x

    def tap_layer_input(self, x: Activation, layer: int) -> Activation:
        if self._tap and layer in self._tap.layers:
            self._entered[layer] = x
            if len(self._entered) == len(set(self._tap.layers)):
                first, *rest = (self._entered[layer] for layer in self._tap.layers)
                self.export_hidden(reduce(lambda some, second: self.concat_heads(some, second, 1), rest, first))
        return x

    def tap(self, hidden_state_tap: HiddenStateTap | None) -> None:
        self._tap, self._entered = hidden_state_tap, dict[int, Activation]()
        self.reveals = hidden_state_tap is not None and not hidden_state_tap.layers


class HiddenStateReference(Computing):
    """The NumPy reference of the verbs of hidden states.

    Attributes:
        entered: inputs of layers, by layer; the caller sets the keys that it wants.  revealed: the last hidden state.
    """

    reveals = False
    revealed: Array
    entered: dict[int, Array]
    _parts: list[Array] | None

    def embed_inputs(self, embedded: Callable[[], Array], parts: int = 1) -> Array:
        """Return an image's rows if the run is one image, else the tokens' embeddings."""
        (image,) = {span.seen for span in self._spans}
        self._parts = None if image is None else np.split(image.rows_of(self.ids), parts, axis=1)
        return embedded() if self._parts is None else self._parts[0]

    def add_deepstack(self, x: Array, part: int) -> Array:
        return x if self._parts is None else x + self._parts[part]

    def tap_layer_input(self, x: Array, layer: int) -> Array:
        if layer in self.entered:
            self.entered[layer] = x
        return x
