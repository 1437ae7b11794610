"""Attend to cached keys and values, and write to the cache; kernels differ by target."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from localllm.arch.layer_state import LatentState, PagedState
from localllm.arch.verbs import FULL_ATTENTION, AttentionScores
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.lower.steps import StepBuilder, Target, append_cache_writes, append_hadamard, locate_cache
from localllm.engine.lower.tape import Buffer
from localllm.engine.memory.cache import HeadStreams
from localllm.engine.operations.builders import Array, RecorderBase, ReferenceBase
from localllm.engine.operations.key_selection import unpack_bits
from localllm.engine.operations.operation import StateOperation, operation
from localllm.errors import ModelError


class AttentionArguments(NamedTuple):
    """The arguments of a target's attention steps.

    Attributes:
        state: the layer's.  sides: its keys and values in the cache.  heads: query heads.
        arguments: of the kernels.  reads: buffers that they read.  y: the buffer of the results.
    """

    state: PagedState | LatentState
    sides: tuple[HeadStreams, HeadStreams]
    heads: int
    arguments: dict[str, object]
    reads: list[Buffer]
    y: Buffer


@operation
class Attend(StateOperation):
    """softmax(q k^T * scale) v.

    The inputs are queries, new keys and values if the layer writes some, and the selected keys if keys are selected.

    Attributes:
        sinks: float32 [heads].
        choices: number of key selections: 1 for all heads, or one per group.
        The others are those of localllm.arch.verbs.Scores.
    """

    VERB = "attend"

    state: PagedState | LatentState
    heads: int
    scale: float
    softcap: float
    slopes: Sequence[float]
    sinks: np.ndarray | None
    lookahead: int
    biases: np.ndarray | None
    cross_attention: bool
    windowed: bool
    logs: bool
    choices: int

    @property
    def has_keys(self) -> bool:
        """Return whether the layer writes new keys, and does not read those of an earlier layer."""
        return len(self.inputs) > 1 + bool(self.choices)

    def prepare(self, steps: StepBuilder) -> AttentionArguments:
        """Append the steps that store keys and values, and apply Hadamard rotations to them and the queries."""
        inputs, state = list(self.inputs), self.state
        selected = steps.buffers[inputs.pop()] if self.choices else None
        q, *new = inputs
        sides, of_keys = steps.cache.get_sides(state), state.find_rotation_sizes(steps.cache.kv_type)[0]
        if new:
            append_cache_writes(steps, new, state)
        source, y = append_hadamard(steps, q, of_keys), steps.allocate(self.output)
        arguments = locate_cache(steps.cache, sides) | {"heads": self.heads, "scale": self.scale}
        arguments |= {
            "softcap": self.softcap,
            "lookahead": self.lookahead,
            "cross_attention": self.cross_attention,
            "logs": self.logs,
        }
        arguments |= {"kv_heads": state.kv_heads}
        arguments |= {"q": source, "q_stride": source.stride, "y": y, "y_stride": y.stride}
        arguments |= {"window": state.window or 0, "chunked": state.chunked, "period": state.period}
        arguments["slopes"] = np.array(self.slopes, np.float32) if self.slopes else 0
        arguments |= {"biases": 0, "reach": get_bias_reach(self.biases)}
        if self.biases is not None:  # repeat the first and the last value 16 times: kernels load 16 values at once
            padded = np.pad(self.biases.astype(np.float32), ((0, 0), (16, 16)), mode="edge")
            arguments["biases"] = np.ascontiguousarray(padded)
        arguments["sinks"] = 0 if self.sinks is None else self.sinks
        arguments |= {"chosen": selected or 0, "chosen_stride": selected.stride if selected else 0}
        arguments["choice_stride"] = 4 * self.inputs[-1].columns // self.choices if self.choices > 1 else 0
        # For cross-attention, another run has stored the encoder's keys and values.
        in_cache = steps.in_cache.get(state, []) if self.cross_attention else steps.in_cache[state]
        reads = [source, *in_cache, *([selected] if selected else [])]
        return AttentionArguments(state, sides, self.heads, arguments, reads, y)

    def finish(self, steps: StepBuilder, attention: AttentionArguments) -> None:
        """Append the step that undoes the Hadamard rotation of the results."""
        state, rows = attention.state, self.output.rows
        results = Activation(rows, self.heads * state.value_dim)
        append_hadamard(steps, results, state.find_rotation_sizes(steps.cache.kv_type)[1], attention.y, attention.y)

    @staticmethod
    def record(
        recorder: RecorderBase, q: Activation, k: Activation | None, v: Activation | None,
        state: PagedState | LatentState,
        scores: AttentionScores,
    ) -> Activation:  # fmt: skip
        heads, biases = scores.heads, scores.biases
        expected = {"q": (q, heads * state.key_dim), "k": (k, state.kv_heads * state.key_dim)}
        for name, (x, columns) in {**expected, "v": (v, state.kv_heads * state.value_dim)}.items():
            if x is not None and x.columns != columns:
                raise ModelError(f"layer {state.layer}: {name} must have {columns} columns (found {x.columns})")
        sinks = recorder._load_vector(scores.sinks, heads) if scores.sinks else None
        if biases is not None and (len(biases) != heads or biases.shape[1] % 2 == 0):
            raise ModelError(
                f"layer {state.layer}: biases must have {heads} heads and an odd width (found {biases.shape})"
            )
        inputs, choices = tuple(x for x in (q, k, v, scores.chosen) if x is not None), 0
        if scores.chosen:
            choices = scores.chosen.columns // recorder._words
            if choices not in (1, state.kv_heads):
                raise ModelError(f"layer {state.layer}: {choices} key selections for {state.kv_heads} groups of heads")
        output = Activation(q.rows, heads * (state.value_dim + scores.logs))
        return recorder._add(
            Attend(
                inputs, output, state, heads, scores.scale, scores.softcap, scores.slopes, sinks, scores.lookahead,
                biases, scores.cross_attention, scores.windowed, scores.logs, choices,
            )
        )  # fmt: skip

    @staticmethod
    def reference(
        run: ReferenceBase,
        q: Array,
        k: Array | None,
        v: Array | None,
        state: PagedState | LatentState,
        scores: AttentionScores,
    ) -> Array:
        results = []
        for span, rows in run._iterate_rows():
            if k is not None:
                new = (x[rows].reshape(len(span.ids), state.kv_heads, -1) for x in (k, v) if x is not None)
                span.store.keep(state, span.position, *new)
            keys, *cached_values = span.store.list_kept(state)
            values = cached_values[0] if cached_values else keys[:, :, : state.value_dim]
            weights, logs = compute_attention_weights(run, span, rows, q[rows], keys, state, scores)
            mixed = weights.transpose(1, 2, 0, 3) @ values.transpose(1, 0, 2)[:, None]
            results.append(mixed.transpose(2, 0, 1, 3).reshape(len(span.ids), -1))
            if scores.logs:
                results[-1] = np.hstack((results[-1], logs.reshape(len(span.ids), -1)))
        return np.concatenate(results).astype(np.float32)


class WriteKV(StateOperation):
    """Keys and values that are written to the cache without attention."""

    VERB = "write_kv"

    state: PagedState

    def lower(self, steps: StepBuilder, target: Target) -> None:
        append_cache_writes(steps, self.inputs, self.state)

    @staticmethod
    def record(recorder: RecorderBase, k: Activation, v: Activation, state: PagedState) -> None:
        if (k.columns, v.columns) != (state.kv_heads * state.key_dim, state.kv_heads * state.value_dim):
            raise ModelError(
                f"layer {state.layer}: keys and values do not fit the layer (found {k.columns} and {v.columns} columns)"
            )
        recorder._add(WriteKV((k, v), Activation(k.rows, 0), state))

    @staticmethod
    def reference(run: ReferenceBase, k: Array, v: Array, state: PagedState) -> None:
        for span, rows in run._iterate_rows():
            span.store.keep(state, span.position, *(x[rows].reshape(len(span.ids), state.kv_heads, -1) for x in (k, v)))


def compute_attention_weights(
    run: ReferenceBase, span: SequenceSpan, rows: slice, q: Array, keys: Array, state: PagedState | LatentState,
    scores: AttentionScores,
) -> tuple[Array, Array]:  # fmt: skip
    """Return a span's attention weights [tokens, kv_heads, heads of a group, keys], and the logs of their sums.

    q: float32 [tokens, heads * key_dim]; keys: all that the sequence has, float32 [keys, kv_heads, key_dim].
    """
    queries = q.reshape(len(span.ids), state.kv_heads, scores.heads // state.kv_heads, -1)
    s = (queries.transpose(1, 2, 0, 3) @ keys.transpose(1, 2, 0)[:, None]).transpose(2, 0, 1, 3)
    s, sees = mask_scores(run, apply_biases(run, s, rows, state, scores), span, rows, state, scores)
    return normalize_scores(s, sees, state, scores)


def get_bias_reach(biases: np.ndarray | None) -> int:
    """Return the largest distance that has a bias of its own, 0 without biases."""
    return 0 if biases is None else biases.shape[1] // 2


def normalize_scores(
    s: Array, sees: Array | np.bool, state: PagedState | LatentState, scores: AttentionScores
) -> tuple[Array, Array]:
    """Return the softmax of scores, and the logarithms of its sums (log-sum-exp)."""
    floor = -np.inf if scores.sinks is None else scores.sinks.read_vector().reshape(state.kv_heads, -1, 1)
    top = np.maximum(s.max(axis=-1, keepdims=True), floor)
    s -= top
    weights = np.exp(s, out=s)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(floor - top)
    total = np.where(sees, total, np.float32(np.nan))  # an indexer's score was NaN, so no key was selected
    weights /= total
    return weights, np.log(total) + top if scores.logs else total


def apply_biases(
    run: ReferenceBase, s: Array, rows: slice, state: PagedState | LatentState, scores: AttentionScores
) -> Array:
    """Scale scores, and add the terms that depend on distances."""
    s *= np.float32(scores.scale)
    s = run.softcap(s, scores.softcap) if scores.softcap else s
    distance = run.positions[rows, None] - np.arange(s.shape[3])
    if scores.slopes:
        slopes = np.array(scores.slopes, np.float32).reshape(state.kv_heads, -1, 1)
        s = s - slopes * np.abs(distance)[:, None, None]
    if scores.biases is not None:
        reach = scores.biases.shape[1] // 2
        numbers = np.clip(-distance, -reach, reach) + reach
        s = s + scores.biases[:, numbers].reshape(state.kv_heads, -1, *numbers.shape).transpose(2, 0, 1, 3)
    return s


def mask_scores(
    run: ReferenceBase,
    s: Array,
    span: SequenceSpan,
    rows: slice,
    state: PagedState | LatentState,
    scores: AttentionScores,
) -> tuple[Array, Array | np.bool]:
    """Set the scores of hidden keys to -inf.

    Returns also whether each token sees any key, if keys were selected.
    """
    keys, positions = s.shape[3], run.positions[rows, None]
    distance = positions - np.arange(keys)
    window = positions % state.window + 1 if state.chunked and state.window else state.window
    ahead = FULL_ATTENTION if span.seen is not None and span.seen.is_whole else scores.lookahead
    hidden = (distance < -ahead) | (distance >= (np.inf if window is None else window))
    hidden |= (np.arange(keys) < span.encoded) != scores.cross_attention
    hidden |= np.arange(1, keys + 1) % state.period != 0
    if scores.windowed:
        assert run.windows is not None
        hidden |= run.windows[:, None] != run.windows
    sees: Array | np.bool = np.True_
    hidden = hidden[:, None, None]
    if scores.chosen is not None:  # one selection for all heads, or one for each group
        bits = unpack_bits(scores.chosen[rows].reshape(-1, -(-run._context // 32)), keys)
        bits = bits.reshape(len(span.ids), -1, 1, keys)
        hidden, sees = hidden | ~bits, bits.any(axis=-1, keepdims=True)
    np.copyto(s, -np.inf, where=hidden)
    return s, sees
