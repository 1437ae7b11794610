"""What a model does with an image's rows instead of tokens: said by its family once more, and nothing else is new."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import Latent, Paged
from localllm.arch.rope import Rope
from localllm.arch.verbs import EVERY_TOKEN, Scores
from localllm.arch.weights import Weights
from localllm.engine.lower.tape import row_bytes
from localllm.engine.operations.activation import Activation
from localllm.engine.operations.operation import Operation
from localllm.engine.run import BATCH
from localllm.engine.trace.recorder import Recorder


class Angles(NamedTuple):
    """Where cosines and sines of a rotation lie, float32 [tokens, 2, pairs]; divisors: of its speeds."""

    rope: Rope
    divisors: np.ndarray | None
    table: np.ndarray

    def fill(self, turns: np.ndarray) -> None:
        """turns: int64 [tokens, 3], positions by time, height and width."""
        divisors = None if self.divisors is None else self.divisors.astype(np.float64)
        angles = (turns[:, list(self.rope.axes) or [0]] - self.rope.before) * self.rope.frequencies(divisors)
        self.table[: len(turns), 0] = np.cos(angles) * self.rope.magnitude
        self.table[: len(turns), 1] = np.sin(angles) * self.rope.magnitude


class TurningRecorder(Recorder):
    """A builder for runs of up to so many tokens whose angles lie ready, once somebody has filled them."""

    def __init__(self, hyperparameters: Any, context: int, tokens: int):
        super().__init__(hyperparameters, context)
        self.angles, self._tokens = list[Angles](), tokens

    def _angles(self, rope: Rope, divisors: np.ndarray | None) -> np.ndarray:
        for known in self.angles:
            if known.rope == rope and numbers_of(known.divisors) == numbers_of(divisors):
                return known.table
        table = np.zeros((self._tokens, 2, rope.dims // 2), np.float32)
        self.angles.append(Angles(rope, divisors, table))
        return table


class RowRecorder(TurningRecorder):
    """A builder for runs of rows: `rows` lie ready, float32 [BATCH, width or more], and so do angles.

    is_whole: whether all rows of a run see each other.
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
        return super().attend(q, k, v, state, replace(scores, ahead=EVERY_TOKEN) if self._is_whole else scores)


def numbers_of(divisors: np.ndarray | None) -> list[float]:
    return [] if divisors is None else divisors.tolist()


class RowOperations(NamedTuple):
    """What is done, and where it is laid down what with."""

    operations: list[Operation]
    rows: np.ndarray
    angles: list[Angles]


def row_operations(forward: Callable[..., Any], w: Weights, h: Hyperparameters, context: int, is_whole: bool) -> Any:
    """Of a model whose family lets an image's rows stand for tokens; None for another."""
    recorder = RowRecorder(h, context, is_whole)
    forward(recorder, w, h)
    return RowOperations(recorder.operations, recorder.rows, recorder.angles) if recorder.begins else None
