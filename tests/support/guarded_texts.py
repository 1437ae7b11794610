"""Reads texts with models that make rows of them, with an unreadable page behind every buffer, vector and weight.

    python guarded_texts.py TOKENS

As guarded.py, which see. tests/unit/kernels/test_memory_bounds.py starts it.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from localllm.engine import runs
from localllm.files.gguf.metadata import Irregularities

if __name__ == "__main__":
    runs.BATCH = int(sys.argv[1])  # before others take it over

from guarded import guarded_copy, keep, place_buffers
from models import ENCODERS, model, write

from localllm.arch.decoder import KINDS
from localllm.engine.embedding_runner import EmbeddingRunner
from localllm.engine.lower import steps, tape
from localllm.engine.options import EngineOptions
from localllm.files.gguf.file import GGUFFile, Tensor

# Besides the models as they are: dimensions that are no multiples of a vector's.
ODD = {"bert": {"width": 80, "heads": 5, "hidden": 56}, "jina_bert": {"width": 48, "heads": 3, "hidden": 40},
       "nomic_bert": {"width": 80, "heads": 5, "hidden": 56}}  # fmt: skip


def run(name: str, folder: str, **sizes: int) -> None:
    """Run a text as long as a run, several short ones, and pairs."""
    tiny, most = model(name, **sizes), runs.BATCH
    with GGUFFile.open(write(tiny, Path(folder) / "model.gguf")) as file:
        tensors = {key: Tensor(key, it.format, it.shape, guarded_copy(it.data)) for key, it in file.tensors.items()}
        copy = SimpleNamespace(
            path="guarded", metadata=file.metadata, tensors=tensors, oddities=Irregularities(), nbytes=0
        )
        pooling = KINDS[tiny.metadata[f"{tiny.arch}.pooling_type"]]
        reader = EmbeddingRunner(copy, pooling, EngineOptions(2, most, "f16", "cpu"))
        random = np.random.default_rng(0)
        texts = [random.integers(0, reader.vocab_size, length) for length in (most, *[max(most // 3, 1)] * 3)]
        assert np.isfinite(reader.read(texts)).all()
        assert np.isfinite(reader.read(texts, seconds=[len(text) // 2 for text in texts])).all()
        reader.close()
    keep.clear()


if __name__ == "__main__":
    tape.allocate_buffers = place_buffers
    without_guard = tape.pad_columns
    steps.pad_columns = lambda vector: guarded_copy(without_guard(vector))
    with tempfile.TemporaryDirectory() as place:
        for number, (family, more) in enumerate([*((one, {}) for one in ENCODERS), *ODD.items()]):
            print(number, family, more, flush=True)
            run(family, place, **more)
