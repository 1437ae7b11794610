"""Trace a model that reads image rows instead of tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import Latent, Paged
from localllm.arch.rope import Rope
from localllm.arch.verbs import FULL_ATTENTION, Scores
from localllm.arch.weights import Weights
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.tape import row_bytes
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.operation import Operation
from localllm.engine.runs import BATCH
from localllm.engine.trace.recorder import Recorder

if TYPE_CHECKING:
    from localllm.arch.vision.hyperparameters import Vision


class Angles(NamedTuple):
    """A table of cosines and sines, float32 [tokens, 2, pairs], of a RoPE whose frequencies are divided by divisors."""

    rope: Rope
    divisors: np.ndarray | None
    table: np.ndarray

    def fill(self, turns: np.ndarray) -> None:
        """Write the cosines and sines for positions, int64 [tokens, 3]: time, height and width."""
        divisors = None if self.divisors is None else self.divisors.astype(np.float64)
        angles = (turns[:, list(self.rope.pair_axes) or [0]] - self.rope.position_offset) * self.rope.frequencies(
            divisors
        )
        self.table[: len(turns), 0] = np.cos(angles) * self.rope.magnitude
        self.table[: len(turns), 1] = np.sin(angles) * self.rope.magnitude


class TabulatedRecorder(Recorder):
    """A recorder for runs of at most `tokens` tokens whose RoPE angles the caller writes before a run."""

    def __init__(self, hyperparameters: "Hyperparameters | Vision", context: int, tokens: int):
        super().__init__(hyperparameters, context)
        self.angles, self._tokens = list[Angles](), tokens

    def _angles(self, rope: Rope, divisors: np.ndarray | None) -> np.ndarray:
        for angles in self.angles:
            if angles.rope == rope and numbers_of(angles.divisors) == numbers_of(divisors):
                return angles.table
        table = np.zeros((self._tokens, 2, rope.dims // 2), np.float32)
        self.angles.append(Angles(rope, divisors, table))
        return table


class RowRecorder(TabulatedRecorder):
    """A recorder for runs of image rows: the caller writes them and the RoPE angles before a run.

    The rows are float32 [BATCH, width or more].  is_whole: whether the rows of a run have bidirectional attention.
    """

    def __init__(self, hyperparameters: Hyperparameters, context: int, is_whole: bool):
        super().__init__(hyperparameters, context, BATCH)
        self.rows = np.zeros((BATCH, row_bytes(hyperparameters.row_width) // 4), np.float32)
        self._is_whole = is_whole

    def embed_inputs(self, embedded: Callable[[], Activation], parts: int = 1) -> Activation:
        self.begins = True
        return self.external_input(self.rows, self._width)

    def add_deepstack(self, x: Activation, part: int) -> Activation:
        return self.add(x, self.external_input(self.rows[:, part * self._width :], self._width))

    def attend(
        self, q: Activation, k: Activation | None, v: Activation | None, state: Paged | Latent, scores: Scores
    ) -> Activation:
        return Attend.record(
            self, q, k, v, state, replace(scores, lookahead=FULL_ATTENTION) if self._is_whole else scores
        )


def numbers_of(divisors: np.ndarray | None) -> list[float]:
    return [] if divisors is None else divisors.tolist()


class RowOperations(NamedTuple):
    """The traced operations, and the memory of their inputs."""

    operations: list[Operation]
    rows: np.ndarray
    angles: list[Angles]


def row_operations(
    forward: Callable[..., Activation], w: Weights, h: Hyperparameters, context: int, is_whole: bool
) -> RowOperations | None:
    """Trace a model for image rows; None if its family does not support images."""
    recorder = RowRecorder(h, context, is_whole)
    forward(recorder, w, h)
    return RowOperations(recorder.operations, recorder.rows, recorder.angles) if recorder.begins else None
