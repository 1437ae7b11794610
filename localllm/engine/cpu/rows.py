"""Run image rows on the CPU: a separate program over the same cache."""

import numpy as np

from localllm.engine.cpu.program import compile_program
from localllm.engine.lower.steps import StepPlaces
from localllm.engine.options import EngineOptions
from localllm.engine.run import Header, Span
from localllm.engine.trace.image_rows import RowOperations


class RowProgram:
    """A model's program that reads image rows in place of tokens."""

    def __init__(self, operations: RowOperations, places: StepPlaces, options: EngineOptions):
        """Compile the program; places: the model's, whose header is replaced. Raises ModelError, LocalllmError."""
        self._operations = operations
        places = places._replace(header=Header())
        self._program = compile_program(operations.operations, places, options.thread_count, options.progress)

    def run(self, span: Span, precise: bool) -> np.ndarray:
        """Run one span of an image, see Backend.run."""
        assert span.seen is not None
        count, rows = len(span.ids), span.seen.rows_of(span.ids)
        self._operations.rows[:count, : rows.shape[1]] = rows
        turns = span.seen.mrope_positions(span.ids, span.position - span.ahead)
        for angles in self._operations.angles:
            angles.fill(turns)
        return self._program.run([span], precise)

    def close(self) -> None:
        self._program.close()
