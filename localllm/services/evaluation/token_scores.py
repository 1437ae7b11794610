"""A table of a text's tokens with their log probabilities, as CSV: `localllm perplexity --per-token`."""

import csv
import io
import os
from collections.abc import Iterator

import numpy as np

from localllm.files.safe_file import SafeFile
from localllm.services.evaluation.scores import Comparison, Prediction
from localllm.text.tokenizer import Tokenizer

COLUMNS = ("chunk", "position", "token", "text", "logprob")
BASE_COLUMNS = ("base_logprob", "kl_divergence", "same_top")


def list_token_scores(chunks: np.ndarray, prediction: Prediction, tokenizer: Tokenizer) -> Iterator[tuple[object, ...]]:
    """Yield a row of COLUMNS for each scored token; of a comparison also BASE_COLUMNS. Values are in nats.

    chunks: int32 [chunks, size]; prediction: of the first of them.
    """
    size = chunks.shape[1]
    columns = [-prediction.nll]
    if isinstance(prediction, Comparison):
        columns += [-prediction.base_nll, prediction.kld, prediction.same_top]
    row = 0
    for number, chunk in enumerate(chunks[: prediction.chunks].tolist(), 1):
        for position in range(size // 2 + 1, size):
            token = chunk[position]
            yield number, position, token, tokenizer.decode([token], True), *(float(each[row]) for each in columns)
            row += 1


def write_token_scores(
    path: str | os.PathLike[str], chunks: np.ndarray, prediction: Prediction, tokenizer: Tokenizer
) -> int:
    """Atomically write the table as CSV; return the number of tokens. Raises LocalllmError."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(COLUMNS + (BASE_COLUMNS if isinstance(prediction, Comparison) else ()))
    count = 0
    for row in list_token_scores(chunks, prediction, tokenizer):
        table.writerow(row)
        count += 1
    with SafeFile(path) as file:
        file.write(text.getvalue().encode(errors="replace"))
    return count


def is_token_table(path: str) -> bool:
    """Return whether a file is such a table."""
    with open(path, "rb") as file:
        return file.read(64).startswith(",".join(COLUMNS).encode())
