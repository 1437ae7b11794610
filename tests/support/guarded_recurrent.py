"""Runs models with recurrent layers, of odd dimensions, with an unreadable page behind every buffer, vector and state.

    python guarded_recurrent.py TOKENS

As guarded.py, which see. tests/unit/kernels/test_memory_bounds.py starts it.
"""

import sys

import numpy as np

from localllm.engine import runs

if __name__ == "__main__":
    runs.BATCH = int(sys.argv[1])  # before others take it over

from guarded import guarded_copy, keep, place_buffers
from recurrent_models import MODELS, VOCABULARY, file_of

from localllm.engine.engine import Engine
from localllm.engine.lower import steps, tape
from localllm.engine.memory.recurrent import StateLayout
from localllm.engine.options import EngineOptions


def guarded_states(layout: StateLayout) -> np.ndarray:
    """Allocate the states of a sequence, full of NaN."""
    return guarded_copy(np.full(len(layout.zeros), np.nan, np.float32))


def run(name: str) -> None:
    """Run one sequence and two: prompts, further tokens, forks."""
    engine = Engine(file_of(*MODELS[name], place=guarded_copy), EngineOptions(2, 512, "f16"))  # type: ignore[misc]
    layout = engine.backend.room.layout
    if layout:
        layout.zeros = guarded_copy(layout.zeros)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, runs.BATCH).tolist()
    first, second = engine.sequence(), engine.sequence()
    assert np.isfinite(first.append(ids, "all")).all()
    assert np.isfinite(first.append(ids[:1])).all()
    pairs = [(first, ids[: len(ids) // 2 + 1]), (second, ids[: len(ids) // 2]), (first.fork(), ids)]
    for requests in (pairs[:2], pairs[2:]):
        assert all(np.isfinite(rows).all() for rows in engine.step([(s, some) for s, some in requests if some]))
    engine.close()
    keep.clear()


if __name__ == "__main__":
    tape.allocate_buffers, StateLayout.allocate = place_buffers, guarded_states
    without_guard = tape.pad_columns
    steps.pad_columns = lambda vector: guarded_copy(without_guard(vector))
    for name in MODELS:
        print(name, flush=True)
        run(name)
