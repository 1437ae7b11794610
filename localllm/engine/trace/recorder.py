"""Trace an architecture: record its verbs as operations on activations, with all shapes checked.

The list of operations is the same for all targets; localllm.engine.lower makes steps of it. Verbs are defined in
localllm.arch.verbs; localllm.engine.operations has the code that records them.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import LatentState, PagedState
from localllm.arch.rope import RopeParameters
from localllm.arch.verbs import FULL_ATTENTION, AttentionScores
from localllm.arch.weights import Weights, remove_other_modules
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.tape import compute_row_bytes
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.elementwise import ElementwiseVerbs
from localllm.engine.operations.experts import ExpertVerbs
from localllm.engine.operations.operation import Operation
from localllm.engine.operations.positions import PositionVerbs
from localllm.engine.operations.recurrent import ConvolutionVerbs
from localllm.engine.operations.registry import add_verbs
from localllm.engine.operations.tokens import HiddenStateTap, HiddenStateVerbs
from localllm.engine.runs import BATCH
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import printable
from localllm.files.gguf.metadata import Irregularities

if TYPE_CHECKING:
    from localllm.arch.vision.hyperparameters import VisionHyperparameters


# Tensors that a file may contain although no verb uses them.
UNUSED_TENSORS = (".attn_rot_embd.weight", ".attn.rope_freqs")  # RoPE frequencies, which follow from the metadata


@add_verbs("record")
class Recorder(ElementwiseVerbs, ExpertVerbs, ConvolutionVerbs, PositionVerbs, HiddenStateVerbs):
    """A builder (localllm.arch.verbs) whose verbs record operations.

    Attributes:
        encoding: operations of the encoder, empty without one.
    """

    def __init__(
        self,
        hyperparameters: "Hyperparameters | VisionHyperparameters",
        context: int,
        hidden_state_tap: HiddenStateTap | None = None,
    ):
        """Start a trace.

        context: maximum number of tokens. hidden_state_tap: the hidden states to export.
        """
        super().__init__(hyperparameters.vocab_size, hyperparameters.width, context)
        self.encoding = list[Operation]()
        self.tap(hidden_state_tap)

    def use(self, recorder: "Recorder") -> None:
        self._used |= recorder._used

    def require_all_used(self, names: Collection[str], oddities: Irregularities | None = None) -> None:
        """Raise ModelError for a tensor that no verb has used.

        oddities: receives notes on unused tensors of other components, such as encoders, which are no error.
        """
        unused = [name for name in names if name not in self._used and not name.endswith(UNUSED_TENSORS)]
        if unused := unused if oddities is None else remove_other_modules(unused, oddities):
            more_tensors = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ModelError(
                f"tensor {printable(unused[0])}{more_tensors}: not part of this architecture as localllm supports it"
            )


def trace_model(
    file: GGUFFile, forward: Callable[..., Activation], weights: Weights, hyperparameters: Hyperparameters,
    context: int, hidden_state_tap: HiddenStateTap | None = None,
) -> Recorder:  # fmt: skip
    """Trace an architecture for a file.

    hidden_state_tap: see Recorder. Raises ModelError, which names the file, for tensors that do not fit or are not
    used.
    """
    recorder = Recorder(hyperparameters, context, hidden_state_tap)
    try:
        if hyperparameters.encode:
            encoder = Recorder(hyperparameters, context)
            hyperparameters.encode(encoder, weights, hyperparameters)
            recorder.encoding = encoder.operations
            recorder.use(encoder)
        logits = forward(recorder, weights, hyperparameters)
        recorder.require_all_used(file.tensors, file.oddities)
    except ModelError as error:
        raise type(error)(f"{file.path}: {error}") from None
    if not hyperparameters.pooling and logits.columns != hyperparameters.vocab_size:
        raise ModelError(
            f"{file.path}: the model must have {hyperparameters.vocab_size} logits (found {logits.columns})"
        )
    return recorder


class AngleTable(NamedTuple):
    """Cosines and sines of a RoPE whose frequencies are divided by divisors, float32 [tokens, 2, pairs]."""

    rope: RopeParameters
    divisors: np.ndarray | None
    table: np.ndarray

    def fill(self, turns: np.ndarray) -> None:
        """Write the cosines and sines for positions, int64 [tokens, 3]: time, height and width."""
        divisors = None if self.divisors is None else self.divisors.astype(np.float64)
        angles = (
            turns[:, list(self.rope.pair_axes) or [0]] - self.rope.position_offset
        ) * self.rope.compute_frequencies(divisors)
        self.table[: len(turns), 0] = np.cos(angles) * self.rope.magnitude
        self.table[: len(turns), 1] = np.sin(angles) * self.rope.magnitude


class TabulatedRecorder(Recorder):
    """A recorder whose RoPE angles the caller writes before each run of at most `tokens` tokens."""

    def __init__(self, hyperparameters: "Hyperparameters | VisionHyperparameters", context: int, tokens: int):
        super().__init__(hyperparameters, context)
        self.angles, self._tokens = list[AngleTable](), tokens

    def _tabulate_angles(self, rope: RopeParameters, divisors: np.ndarray | None) -> np.ndarray:
        for angles in self.angles:
            if angles.rope == rope and list_divisors(angles.divisors) == list_divisors(divisors):
                return angles.table
        table = np.zeros((self._tokens, 2, rope.dims // 2), np.float32)
        self.angles.append(AngleTable(rope, divisors, table))
        return table


class ImageRowRecorder(TabulatedRecorder):
    """A recorder for runs of image rows; the caller writes the rows and the RoPE angles before a run.

    The rows are float32 [BATCH, width or more]. is_whole: the rows of a run have bidirectional attention.
    """

    def __init__(self, hyperparameters: Hyperparameters, context: int, is_whole: bool):
        super().__init__(hyperparameters, context, BATCH)
        self.rows = np.zeros((BATCH, compute_row_bytes(hyperparameters.row_width) // 4), np.float32)
        self._is_whole = is_whole

    def embed_inputs(self, embedded: Callable[[], Activation], parts: int = 1) -> Activation:
        self.begins = True
        return self.external_input(self.rows, self._width)

    def add_deepstack(self, x: Activation, part: int) -> Activation:
        return self.add(x, self.external_input(self.rows[:, part * self._width :], self._width))

    def attend(
        self,
        q: Activation,
        k: Activation | None,
        v: Activation | None,
        state: PagedState | LatentState,
        scores: AttentionScores,
    ) -> Activation:
        return Attend.record(
            self, q, k, v, state, replace(scores, lookahead=FULL_ATTENTION) if self._is_whole else scores
        )


def list_divisors(divisors: np.ndarray | None) -> list[float]:
    return [] if divisors is None else divisors.tolist()


class ImageRowOperations(NamedTuple):
    """The operations for image rows, and the memory of their inputs."""

    operations: list[Operation]
    rows: np.ndarray
    angles: list[AngleTable]


def trace_image_rows(
    forward: Callable[..., Activation], w: Weights, h: Hyperparameters, context: int, is_whole: bool
) -> ImageRowOperations | None:
    """Trace a model for image rows; return None if its family does not support images."""
    recorder = ImageRowRecorder(h, context, is_whole)
    forward(recorder, w, h)
    return ImageRowOperations(recorder.operations, recorder.rows, recorder.angles) if recorder.begins else None
