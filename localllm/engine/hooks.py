"""Hooks: functions that see, and may change, the hidden states between layers, and see what attention reads.

A sequence may have a hook. Runs with such a sequence use a second program over the same cache, traced with HookPoints:
before each layer all rows are copied to memory of their own, the tape stops, the hooks are called with the rows of
their sequences, and the layer goes on with the rows from there. Programs without hooks are unchanged.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from localllm.arch.layer_state import LatentState, PagedState
from localllm.arch.verbs import AttentionScores
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.lower.steps import StepBuilder, Target, build_output_arguments
from localllm.engine.lower.tape import Buffer, KernelStep, StepRunner
from localllm.engine.operations.attention import Attend, compute_attention_weights
from localllm.engine.operations.operation import Operation, operation
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.engine.operations.tokens import ExportHidden
from localllm.engine.runs import BATCH
from localllm.engine.trace.imatrix_collector import pad_count
from localllm.engine.trace.recorder import Recorder
from localllm.errors import UnsupportedError, UsageError
from localllm.frozen import frozen

# Called with hidden states, float32 [tokens, width], the index of the layer that reads them, and the position of the
# first row; may change the rows in place, or return others of the same shape.
HookFunction = Callable[[np.ndarray, int, int], "np.ndarray | None"]


class AttentionInputs(NamedTuple):
    """The queries and keys of a layer in a run: float32 [tokens, heads * key_dim] and [tokens, kv_heads * key_dim]."""

    queries: np.ndarray
    keys: np.ndarray
    state: PagedState | LatentState
    scores: AttentionScores


@frozen
class LayerHook:
    """A function for the hidden states of some layers, and one for the inputs of attention.

    Attributes:
        layers: the layers whose inputs the function gets; the number of layers stands for the last one's output.
        function: called for each of them in each run.
        attention_layer: the layer whose queries and keys `on_attention` gets in each run; None: no layer.
    """

    layers: frozenset[int] = frozenset()
    function: HookFunction | None = None
    attention_layer: int | None = None
    on_attention: Callable[[AttentionInputs], object] | None = None

    def change(self, states: np.ndarray, layer: int, position: int) -> np.ndarray:
        """Call the function with a copy of the rows, float32 [tokens, width]; return the rows to go on with.

        Raises UsageError for a result of another shape.
        """
        assert self.function is not None
        rows = states.copy()
        changed = self.function(rows, layer, position)
        if changed is None:
            return rows
        changed = np.asarray(changed)
        if changed.shape != states.shape or changed.dtype.kind not in "fiu":
            shape = f"{changed.dtype} {list(changed.shape)}"
            raise UsageError(f"the hook of layer {layer} must return floats of the shape {list(states.shape)}: {shape}")
        return changed


def chain_hooks(first: LayerHook, second: LayerHook) -> LayerHook:
    """Return a hook that calls two: the second gets what the first has changed, and its attention."""

    def call(states: np.ndarray, layer: int, position: int) -> np.ndarray:
        for hook in (first, second):
            states = hook.change(states, layer, position) if layer in hook.layers else states
        return states

    return LayerHook(first.layers | second.layers, call, second.attention_layer, second.on_attention)


class RecordedAttention(NamedTuple):
    """A layer's attention as it was traced, and the memory that its queries and keys are exported to."""

    queries: np.ndarray
    keys: np.ndarray
    heads: tuple[int, int]  # columns of the queries and of the keys
    state: PagedState | LatentState
    scores: AttentionScores


class HookPoints:
    """The points of a traced model at which hooks are called, and the memory that rows go through.

    Attributes:
        layers: the layers whose inputs are shown, in order; the last is the number of layers.
        attention: by layer, if it was asked for.  spans: those of the run in progress.
    """

    def __init__(self, width: int, with_attention: bool):
        self.memory, self.layers = np.zeros((BATCH, pad_count(width)), np.float32), list[int]()
        self.width, self.with_attention = width, with_attention
        self.attention = dict[int, RecordedAttention]()
        self.spans: Sequence[SequenceSpan] = ()
        self._exports = dict[tuple[str, int], np.ndarray]()

    def allocate(self, name: str, columns: int) -> np.ndarray:
        """Return the memory that all layers share for queries or keys of a width."""
        return self._exports.setdefault((name, columns), np.zeros((BATCH, pad_count(columns)), np.float32))

    def make_runner(self, threads: StepRunner, steps: Sequence[KernelStep]) -> "HookedRunner":
        """Return what runs a tape with these points."""
        return HookedRunner(threads, steps, self)

    def is_wanted(self, layer: int) -> bool:
        """Return whether a hook of the run wants a layer's input, or the attention of the layer before."""
        hooks = [span.hook for span in self.spans if span.hook]
        return any(layer in hook.layers or hook.attention_layer == layer - 1 for hook in hooks)

    def call(self, layer: int) -> None:
        """Call the hooks of the run with the rows in memory, before a layer."""
        first = 0
        for span in self.spans:
            rows, hook = slice(first, first + len(span.ids)), span.hook
            first += len(span.ids)
            if hook and hook.on_attention and hook.attention_layer == layer - 1:
                queries, keys, widths, state, scores = self.attention[layer - 1]
                copies = [x[rows, :columns].copy() for x, columns in zip((queries, keys), widths, strict=True)]
                hook.on_attention(AttentionInputs(copies[0], copies[1], state, scores))
            if hook and layer in hook.layers:
                states = self.memory[rows, : self.width]
                states[:] = hook.change(states, layer, span.position)


@operation
class PassThroughHooks(Operation):
    """Rows that go through the memory of HookPoints, where hooks may change them."""

    memory: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        (x,), memory, exported = self.inputs, self.memory, Buffer(0, 0)
        steps.export_activation(x, memory, exported)
        y = steps.allocate_or_reuse(self)
        arguments = {"x": memory, "x_stride": memory.strides[0], "first": 0, "groups": 1, "period": x.columns}
        steps.append_row_step("slice_columns", x.rows, arguments | build_output_arguments(x, y), [exported], [y])


class HookRecorder(Recorder):
    """A recorder that inserts hook points before layers, and exports the queries and keys of attention."""

    def __init__(self, hyperparameters: Any, context: int, points: HookPoints):
        super().__init__(hyperparameters, context)
        self._points = points

    def tap_layer_input(self, x: Activation, layer: int) -> Activation:
        if x.columns != self._points.width:  # such as several residual streams
            return x
        self._points.layers.append(layer)
        return self._add(PassThroughHooks((x,), Activation(x.rows, x.columns), self._points.memory))

    def attend(
        self,
        q: Activation,
        k: Activation | None,
        v: Activation | None,
        state: PagedState | LatentState,
        scores: AttentionScores,
    ) -> Activation:
        if self._points.with_attention and k is not None and scores.chosen is None and not scores.cross_attention:
            exports = []
            for name, x in (("q", q), ("k", k)):
                exports.append(self._points.allocate(name, x.columns))
                self._add(ExportHidden((x,), Activation(x.rows, x.columns), exports[-1]))
            widths = q.columns, k.columns
            self._points.attention[state.layer] = RecordedAttention(exports[0], exports[1], widths, state, scores)
        return Attend.record(self, q, k, v, state, scores)


class HookedOperations(NamedTuple):
    """A model's operations with hook points."""

    operations: list[Operation]
    points: HookPoints


def trace_hooks(
    forward: Callable[..., Activation], weights: Any, hyperparameters: Any, context: int, with_attention: bool
) -> HookedOperations:
    """Trace a model with hook points; with_attention: also export queries and keys."""
    points = HookPoints(hyperparameters.width, with_attention)
    recorder = HookRecorder(hyperparameters, context, points)
    forward(recorder, weights, hyperparameters)
    return HookedOperations(recorder.operations, points)


class HookedRunner:
    """Runs a tape up to each hook point that a hook of the run wants, and calls the hooks there."""

    def __init__(self, threads: StepRunner, steps: Sequence[KernelStep], points: HookPoints):
        self._threads, self._points, self._count = threads, points, len(steps)
        ends = [number for number, step in enumerate(steps) if step.arguments.get("x") is points.memory]
        self._ends = [*zip(ends, points.layers, strict=True)]

    def run(self) -> None:
        """Run the tape once. Raises what a hook raises; the next run then begins at the first step again."""
        first = 0
        for end, layer in self._ends:
            if self._points.is_wanted(layer):
                self._threads.run_steps(first, end)
                self._points.call(layer)
                first = end
        self._threads.run_steps(first, self._count)

    def get_statistics(self) -> dict[str, float]:
        """Return nothing: the system reads the weights."""
        return {}

    def close(self) -> None:
        """Do nothing; a WeightStream ends its threads here."""


def require_layers(points: HookPoints, hook: LayerHook, arch: str) -> None:
    """Raise UnsupportedError for a layer of the hook that the architecture does not show."""
    if hook.layers - set(points.layers):
        raise UnsupportedError(f"hidden states of {arch} models cannot be read")
    if hook.attention_layer is not None and hook.attention_layer not in points.attention:
        raise UnsupportedError(f"layer {hook.attention_layer} of this {arch} model has no attention weights to read")


def compute_weights(inputs: Sequence[AttentionInputs], context: int) -> np.ndarray:
    """Return the attention weights of a text from the inputs of its runs: float32 [heads, tokens, tokens].

    Rows are queries; each adds up to 1, or less where the model has attention sinks.
    """
    state, scores = inputs[0].state, inputs[0].scores
    queries, keys = np.concatenate([each.queries for each in inputs]), np.concatenate([each.keys for each in inputs])
    span = SequenceSpan(None, 0, np.zeros(len(queries), np.int64), 0)
    run = ReferenceBuilder([span], {}, context)
    of_heads = keys.reshape(len(keys), state.kv_heads, -1)
    weights, _ = compute_attention_weights(run, span, slice(0, len(queries)), queries, of_heads, state, scores)
    return np.ascontiguousarray(weights.reshape(len(queries), scores.heads, -1).transpose(1, 0, 2), np.float32)
