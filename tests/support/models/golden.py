"""What llama.cpp computes for the models, as recorded in tests/goldens by scripts/record/record_goldens.py.

Of each row of logits, every fifth is kept: whatever is wrong inside a model shows in all of them, and the greedy tokens
are the largest of all.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .declaration import Model
from .numbers import Numbers

FOLDER = Path(__file__).parents[2] / "goldens"
OF_IMAGES = 8196  # Chameleon's tokens up to here, nearly all: llama.cpp leaves them out of the first row only
PROMPT, STEPS = 48, 16  # tokens in one batch; greedy tokens behind them, one by one
LONG = {"deepseek4": 150}  # prompts of models that see blocks of 128 tokens


@dataclass(frozen=True)
class Golden:
    """The recorded logits.

    Attributes:
        tokens: the prompt.  prefill: float32 [PROMPT, logits kept].
        greedy: tokens that follow, each the most likely behind the one before.  decode: float32 [STEPS, logits kept],
        behind each of them.
        digest: of the model.
        native: for quantized files, whose logits here are those of their weights in float32: how far from them those of
        llama.cpp's kernels for the format are; normalized mean square errors of prefill and decode.
    """

    tokens: np.ndarray
    prefill: np.ndarray
    greedy: np.ndarray
    decode: np.ndarray
    digest: str
    native: np.ndarray | None = None

    @classmethod
    def load(cls, name: str) -> "Golden":
        with np.load(FOLDER / f"{name}.npz") as file:
            return cls(**{**file, "digest": str(file["digest"])})

    def save(self, name: str) -> None:
        np.savez(FOLDER / f"{name}.npz", **{key: value for key, value in vars(self).items() if value is not None})


def kept(rows: np.ndarray) -> np.ndarray:
    """Every fifth logit of rows [tokens, vocab], behind those of images."""
    return rows[:, OF_IMAGES if rows.shape[1] > OF_IMAGES else 0 :: 5]


def prompt(name: str, vocab: int) -> np.ndarray:
    """int32 [PROMPT], or more."""
    return Numbers(0, name, "prompt").integers(LONG.get(name, PROMPT), vocab).astype(np.int32)


def context_for(tokens: int) -> int:
    """Of a model that reads so many, and the greedy ones."""
    return 128 if tokens + STEPS <= 128 else 256


def check_digest(name: str, model: Model, golden: Golden) -> None:
    """Say so where a declaration has changed, rather than that the logits are wrong."""
    assert model.digest() == golden.digest, f"{name} is not the model of its golden: record it anew"
