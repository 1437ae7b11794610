"""Run vision encoders, which process each image whole and keep no state.

The transformer and the projector are two programs, built when the first image is encoded. Between them NumPy gathers
the transformer's rows (`family.merge_patches`).
"""

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.arch.layer_state import KVType
from localllm.arch.verbs import Activation
from localllm.arch.vision import load_projector
from localllm.arch.vision.hyperparameters import VisionHyperparameters
from localllm.arch.weights import Weights
from localllm.engine.cpu.program import RunCache, StreamingRunner, compile_program
from localllm.engine.forks import create_lock
from localllm.engine.lower.header import RunHeader
from localllm.engine.lower.steps import StepMemory
from localllm.engine.lower.tape import compute_row_bytes
from localllm.engine.operations.operation import Operation
from localllm.engine.options import EngineOptions
from localllm.engine.trace.recorder import TabulatedRecorder
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.table import PAGE

if TYPE_CHECKING:
    from localllm.arch.vision.resizing import ResizableImage


KV_TYPE = KVType.parse("f32")  # storage type of a run's keys and values


class TracedProgram(NamedTuple):
    """The operations of a transformer or a projector, and the memory of its input rows.

    rows: float32 [maximum rows, columns or more].
    """

    recorder: TabulatedRecorder
    rows: np.ndarray

    @property
    def width(self) -> int:
        """The length of an output row."""
        return self.recorder.operations[-1].output.columns


class VisionEncoder:
    """A vision encoder. Calls from several threads are serialized.

    Attributes:
        hyperparameters: the encoder's.  family: the module that preprocesses images.
    """

    def __init__(self, file: GGUFFile, options: EngineOptions | None = None):
        """Open a projector file. Raises ModelError if it is damaged or not a projector; LocalllmError."""
        options = options or EngineOptions()
        self.family, self.hyperparameters = load_projector(file)
        self.lock, self._weights, self._options = create_lock(self), Weights(file.tensors), options
        self._parts = trace_programs(file, self.family, self.hyperparameters)
        self._programs: list[VisionProgram] = []  # for the transformer and the projector

    @property
    def operations(self) -> list[Operation]:
        return [operation for part in self._parts for operation in part.recorder.operations]

    def read(self, picture: "ResizableImage") -> np.ndarray:
        """Encode an image that the family has preprocessed: float32 [rows, width of the language model].

        Raises ModelError for NaN or infinite values.
        """
        h = self.hyperparameters
        with self.lock:
            grid = h.compute_grid(picture)
            self._programs = self._programs or [VisionProgram(part, h, self._options, True) for part in self._parts]
            tower, project = self._programs
            try:
                encoded = tower.run(
                    h.compute_rows(picture, self._weights), h.compute_rotary_positions(grid), h.find_window_ends(grid)
                )
                encoded = self.family.merge_patches(h, encoded, grid)
                return h.insert_breaks(project.run(encoded), grid, self._weights)
            except ModelError as error:
                raise ModelError(f"{h.path}: {error}") from None

    def encode_crops(self, pictures: "list[ResizableImage]", size: tuple[int, int]) -> list[np.ndarray]:
        """Encode all crops of an image of that size, and combine them as the family does. Raises ModelError."""
        return self.hyperparameters.arrange([self.read(picture) for picture in pictures], size, self._weights)

    def close(self) -> None:
        with self.lock:
            for program in self._programs:
                program.close()


def trace_programs(file: GGUFFile, family: ModuleType, h: VisionHyperparameters) -> tuple[TracedProgram, TracedProgram]:
    """Trace the transformer and the projector of a file. Raises ModelError."""
    try:
        tower = trace_program(family.encode, file, h, h.max_patches, h.input_width)
        count, together = family.merge_patches(h, np.zeros((h.max_patches, 1), np.float32), h.max_grid).shape
        project = trace_program(family.project, file, h, count, together * tower.width)
        project.recorder.use(tower.recorder)
        project.recorder.require_all_used(file.tensors)
    except ModelError as error:
        raise type(error)(f"{file.path}: {error}") from None
    if project.width != h.row_width:
        raise ModelError(f"{file.path}: rows must have projection_dim columns, {h.row_width} (found {project.width})")
    return tower, project


def trace_program(
    say: Callable[..., Activation], file: GGUFFile, h: VisionHyperparameters, most_rows: int, columns: int
) -> TracedProgram:
    """Trace a program for at most `most_rows` external rows. Raises ModelError."""
    rows = np.zeros((most_rows, compute_row_bytes(columns) // 4), np.float32)
    recorder = TabulatedRecorder(h, most_rows, most_rows)
    say(recorder, Weights(file.tensors), h, recorder.external_input(rows, columns))
    return TracedProgram(recorder, rows)


class VisionProgram:
    """The transformer or the projector of an encoder, compiled with bidirectional attention."""

    def __init__(self, traced: TracedProgram, h: VisionHyperparameters, options: EngineOptions, streams: bool = False):
        """Compile the program. Raises ModelError, LocalllmError.

        streams: whether weights are released after each use.
        """
        self._rows, self._angles, operations = traced.rows, traced.recorder.angles, traced.recorder.operations
        self._pages = np.arange(-(-len(traced.rows) // PAGE))
        self._cache = RunCache(h.list_states(), len(self._pages), KV_TYPE, operations)
        places = StepMemory(self._cache, None, RunHeader(len(traced.rows)))
        self._program = compile_program(
            operations,
            places,
            options.thread_count,
            options.progress,
            keeps=False,
            make_runner=StreamingRunner if streams else None,
        )
        self.close = self._program.close

    def run(self, rows: np.ndarray, turns: np.ndarray | None = None, windows: np.ndarray | None = None) -> np.ndarray:
        """Compute a row for each input row, float32 [rows, output length].

        turns: positions for RoPE, int64 [rows, 3]. windows: ends of attention windows, int64. The memory of the run is
        freed afterwards, because images are rare. Raises ModelError for NaN or infinite values.
        """
        count = len(rows)
        self._rows[:count, : rows.shape[1]] = rows
        del rows  # as large as the output
        for angles in self._angles:
            assert turns is not None
            angles.fill(turns)
        try:
            return self._program.compute_rows(count, self._pages, windows)
        finally:
            self._program.give_back()
            self._cache.give_back(self._pages.tolist())
