"""Measures how fast a model embeds or scores texts of given lengths: texts and tokens per second."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from time import perf_counter

import numpy as np

from localllm.arch import architecture
from localllm.engine.embedding_runner import EmbeddingRunner
from localllm.engine.options import EngineOptions
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.build.objects import Progress

TOKENS = 8192  # of the texts of a repetition, which are at least one


def makes_no_text(path: str) -> bool:
    """Return whether a model only makes embeddings or scores. Raises ModelError."""
    with GGUFFile.open(path) as file:
        hyperparameters = architecture(file)[1]
        return hyperparameters.bidirectional and not hyperparameters.fills


def measure(
    path: str, lengths: Sequence[int], threads: int | None, repetitions: int, on_step: Callable[[str], object],
    progress: Progress | None = None, device: str = "auto",
) -> list[dict[str, float]]:  # fmt: skip
    """Measure the speed for each length (at most the model's context): mean, and deviation of tokens per second.

    lengths: in tokens.  on_step: called before each test. Raises ModelError, MemoryLimitError, UsageError.
    """
    file = GGUFFile.open(path)
    _, hyperparameters = architecture(file)
    reader = EmbeddingRunner(
        file, str(hyperparameters.pooling), EngineOptions(threads, backend=device, progress=progress)
    )
    reader.prepare_all()
    results = []
    for length in dict.fromkeys(min(length, reader.context) for length in lengths if length):
        on_step(f"texts of {length} tokens")
        count = max(TOKENS // length, 1)
        texts = np.random.default_rng(0).integers(0, reader.vocab_size, (count, length))
        reader.read(list(texts[:8]))
        speeds = [count * length / time_once(reader, texts) for _ in range(max(repetitions, 1))]
        spread = stdev(speeds) if len(speeds) > 1 else 0.0
        speed = {"tokens_per_second": fmean(speeds), "deviation": spread, "texts_per_second": fmean(speeds) / length}
        results.append({"length": length, "texts": count, **speed})
    reader.close()
    return results


def time_once(reader: EmbeddingRunner, texts: np.ndarray) -> float:
    """Process the texts, int [texts, tokens], once; return the time in seconds."""
    start = perf_counter()
    reader.read(list(texts))
    return perf_counter() - start
