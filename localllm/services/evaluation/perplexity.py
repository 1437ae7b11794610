"""Measure a model's perplexity on a text, and its divergence from another model. Implements `localllm perplexity`.

Chunks and scores are llama-perplexity's: the text is split into chunks of the context's size, and the second half of
each chunk is scored, so that every scored token has context.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Self

import numpy as np

from localllm.api import open_model
from localllm.engine.runs import PRECISE_TOKENS
from localllm.errors import ModelError, UsageError
from localllm.files.logits_file import LogitsFile, LogitsWriter, compute_row_width, dequantize_logits, quantize_logits
from localllm.files.safe_file import resolve_target
from localllm.kernels.build.objects import Progress
from localllm.services.evaluation.scores import Comparison, Prediction, add_bos, compute_kl_divergence, log_sum_exp
from localllm.services.inspection.inspect import describe_quantization
from localllm.system.cpu import count_usable_cores

if TYPE_CHECKING:
    from localllm.arch.rope_scaling import RopeScaling

# Tokens per run: few enough for 16-bit activations, so that the result measures the file and not the coarser rounding
# of larger batches. With a vocabulary of 128k, the logits of a run are 66 MB.
RUN_TOKENS = PRECISE_TOKENS

# (row, logits float32 [vocab], scratch float32 [2, vocab]) -> the scores of a token.
Score = Callable[[int, np.ndarray, np.ndarray], tuple[float, ...]]


class PerplexityRunner:
    """A model that predicts chunks of `size` tokens; a context manager.

    Attributes:
        tokenizer: the model's Tokenizer.  made_with: how the file was quantized, or None.
        warnings: lines to show to the user.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int,
        threads: int | None,
        progress: Progress | None = None,
        kv_type: str = "f16",
        rope: "RopeScaling | None" = None,
    ):
        """Open the model.

        progress(done, total): called while kernels compile.  rope: see open_model. Raises the errors of api.open_model.
        """
        self._model = open_model(path, threads, size, kv_type, progress=progress, rope=rope)
        self.path, self.tokenizer = self._model.path, self._model.tokenizer
        self.made_with = describe_quantization(self._model.file.metadata)
        self._sequence, self.warnings = self._model.sequence(), self._model.warnings
        self._threads = count_usable_cores() if threads is None else threads
        self._pool = ThreadPoolExecutor(self._threads)

    def predict(self, chunks: np.ndarray, save: str | os.PathLike[str] | None = None) -> Iterator[Prediction]:
        """Yield the cumulative scores after each of the chunks, int32 [chunks, size].

        save: a file for the logits, complete after the last chunk. Raises the errors of LogitsWriter, and UsageError if
        it is one of the model's files.
        """
        total, vocab_size = Prediction(), self._sequence.vocab_size
        if save:
            resolve_target(save, tuple(self._model.files))
        with LogitsWriter(save, chunks, vocab_size) if save else nullcontext() as writer:
            for chunk in chunks:
                scores = []
                for first, logits in self._compute_logits(chunk):
                    rows = np.zeros((len(logits), compute_row_width(vocab_size)), "<u2") if writer else None
                    scores.append(self._score_rows(logits, make_scorer(chunk[first + 1 :], rows)))
                    if writer and rows is not None:
                        writer.write(rows)
                total = total.add_chunk(nll=np.concatenate(scores)[:, 0])
                yield total

    def compare(self, base: LogitsFile, limit: int | None = None) -> Iterator[Comparison]:
        """Yield the cumulative comparison after each chunk of a base, at most `limit` chunks.

        Raises UsageError if the vocabularies differ.
        """
        if base.vocab_size != self._sequence.vocab_size:
            sizes = f"found {base.vocab_size} and {self._sequence.vocab_size} tokens"
            hint = "use logits of a model with the same tokenizer"
            raise UsageError(f"the base and the model must have the same vocabulary ({sizes}): {hint}")
        total = Comparison()
        for chunk, rows in zip(base.chunks[:limit], base.rows, strict=False):
            scores = []
            for first, logits in self._compute_logits(chunk):
                scores.append(
                    self._score_rows(logits, make_comparer(chunk[first + 1 :], rows[first - len(chunk) // 2 :]))
                )
            nll, base_nll, kld, same_top = np.concatenate(scores).T
            change = np.exp(-nll) - np.exp(-base_nll)
            total = total.add_chunk(nll=nll, base_nll=base_nll, kld=kld, change=change, same_top=same_top)
            yield total

    def _compute_logits(self, chunk: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield a chunk's second half in blocks: first position, and logits float32 [tokens, vocab]."""
        ids, first, last = add_bos(chunk, self.tokenizer), len(chunk) // 2, len(chunk) - 1
        self._sequence.truncate(0)
        for start in range(0, first, RUN_TOKENS):
            self._sequence.append(ids[start : min(start + RUN_TOKENS, first)], "none")
        for start in range(first, last, RUN_TOKENS):
            yield start, self._sequence.append(ids[start : min(start + RUN_TOKENS, last)], "all")

    def _score_rows(self, logits: np.ndarray, score: Score) -> np.ndarray:
        """Score all rows of logits, float32 [rows, vocab], with all threads; return float64 [rows, scores]."""
        bounds = [len(logits) * i // self._threads for i in range(self._threads + 1)]

        def score_range(first: int, last: int) -> list[tuple[float, ...]]:
            work = np.empty((2, logits.shape[1]), np.float32)
            return [score(row, logits[row], work) for row in range(first, last)]

        parts = list(self._pool.map(score_range, bounds[:-1], bounds[1:]))
        scores = np.array([numbers for part in parts for numbers in part])
        if not np.isfinite(scores).all():
            raise ModelError(f"{self.path}: the logits are not finite; check the weights with `localllm verify`")
        return scores

    def close(self) -> None:
        self._pool.shutdown()
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_scorer(targets: np.ndarray, rows: np.ndarray | None) -> Score:
    """Return a function that scores the next tokens, `targets`; it packs the logits into `rows` unless None."""

    def score(row: int, logits: np.ndarray, work: np.ndarray) -> tuple[float, ...]:
        log_sum = log_sum_exp(logits, work[0])
        if rows is not None:
            quantize_logits(logits, log_sum, rows[row], work[0])
        return (log_sum - float(logits[targets[row]]),)

    return score


def make_comparer(targets: np.ndarray, rows: np.ndarray) -> Score:
    """Return a function that scores the next tokens, `targets`, against a base's logits, packed in `rows`."""

    def score(row: int, logits: np.ndarray, work: np.ndarray) -> tuple[float, ...]:
        log_sum = log_sum_exp(logits, work[0])
        base = dequantize_logits(rows[row], work[1])
        base_nll, same_top = -float(base[targets[row]]), logits.argmax() == base.argmax()
        kld = compute_kl_divergence(base, logits, log_sum, work[0])
        return log_sum - float(logits[targets[row]]), base_nll, kld, float(same_top)

    return score
