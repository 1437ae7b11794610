"""Write a large and a small model that agree on a known share of tokens, to measure draft models.

    python scripts/measure make-draft-pair target.gguf draft.gguf --agreement 0.8

The next token depends only on the last one: tokens follow each other in one circle through the whole vocabulary, so
that no text repeats itself. The small model has wrong successors for some tokens, at random. All layers take their
usual time, but their results are multiplied by zero; a token's embedding is random signs, and its successor's row of
the output matrix has the same signs.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from make_synthetic import MIXES, SHAPES, Plan, Shape, Weights, random_weights, write_model

from localllm.quant.encode import encode

VOCABULARY = 32000
DRAFT = Shape(4, 512, 8, 2, 1536, VOCABULARY, 131072, 500000.0, tied=False)
ROWS = 4096  # of a matrix that are made at once


def successors(random: np.random.Generator, vocabulary: int) -> np.ndarray:
    """Return the successor of each token, in one circle through all."""
    circle = random.permutation(vocabulary)
    following = np.empty(vocabulary, np.int64)
    following[circle] = np.roll(circle, -1)
    return following


def disagreeing(following: np.ndarray, agreement: float, random: np.random.Generator) -> np.ndarray:
    """Exchange the successors of a share of 1 - agreement of the tokens."""
    wrong = random.permutation(len(following))[: round((1 - agreement) * len(following))]
    changed = following.copy()
    changed[wrong] = np.roll(following[wrong], 1)
    return changed


def weights_of(following: np.ndarray, width: int, seed: int) -> Weights:
    """Return the weights of a model in which tokens have these successors."""
    signs = np.random.default_rng(seed).integers(0, 2, (len(following), width), np.int8) * 2 - 1
    rows = np.empty_like(signs)
    rows[following] = signs

    def weights(plan: Plan, random: np.random.Generator) -> Iterator[np.ndarray]:
        if plan.name.endswith(("attn_output.weight", "ffn_down.weight")):
            yield np.zeros(plan.size, np.uint8)
        elif plan.name in ("token_embd.weight", "output.weight"):
            matrix = signs if plan.name == "token_embd.weight" else rows
            for first in range(0, len(matrix), ROWS):
                yield encode(plan.format.name, matrix[first : first + ROWS].astype(np.float32))
        else:
            yield from random_weights(plan, random)

    return weights


def write_pair(
    target: Path,
    draft: Path,
    agreement: float,
    target_shape: Shape,
    draft_shape: Shape = DRAFT,
    wanted: str = "Q4_K_M",
    seed: int = 0,
) -> None:
    """Write both files; the shapes must have equal vocabularies, and output matrices of their own."""
    random = np.random.default_rng(seed)
    following = successors(random, target_shape.vocabulary)
    other = disagreeing(following, agreement, random)
    write_model(target, target_shape, wanted, seed, "target", weights_of(following, target_shape.width, seed))
    write_model(draft, draft_shape, wanted, seed, "draft", weights_of(other, draft_shape.width, seed))


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--agreement", type=float, default=0.8)
    parser.add_argument("--shape", choices=SHAPES, default="1.2b", help="of the target")
    parser.add_argument("--format", choices=sorted(MIXES), default="Q4_K_M")
    options = parser.parse_args()
    shape = SHAPES[options.shape]._replace(vocabulary=VOCABULARY, tied=False)
    write_pair(options.target, options.draft, options.agreement, shape, DRAFT, options.format)
