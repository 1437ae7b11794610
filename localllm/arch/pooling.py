"""Reduce the rows of a text's tokens to its embedding (one row) or its scores.

Sentence-BERT (Reimers and Gurevych 2019, arXiv 1908.10084) takes the mean of the rows; other models take the first or
the last. Rerankers and classifiers have a head after that, which computes scores.
"""

from collections.abc import Container

from localllm.arch.hyperparameters import RANK, Hyperparameters
from localllm.arch.metadata import Fields
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights

NONE = "none"  # no pooling: a row for each token
KINDS = NONE, "mean", "cls", "last", RANK  # in the order of their ids in GGUF
HEAD = "cls", "cls.norm", "cls.output"  # tensors of a classification head
DENSE = "dense_2", "dense_3"  # matrices after pooling, as sentence-transformers numbers its modules


def read_pooling(fields: Fields, name: str = "pooling_type") -> str | None:
    """Read a file's pooling type, one of KINDS; None if it has none. Raises ModelError."""
    if not fields.has(name):
        return None
    number = fields.count(name, 0)
    if number >= len(KINDS):
        raise fields.wrong(name, f"a number from 0 to {len(KINDS) - 1}")
    return KINDS[number]


def note_missing_dense(fields: Fields, names: Container[str]) -> None:
    """Note matrices after pooling that a file lacks.

    They belong to EmbeddingGemma, and to models whose metadata have their sizes. names: names of the file's tensors.
    """
    needs = [name for name in DENSE if fields.arch == "gemma-embedding" or fields.has(f"{name}_feat_in")]
    if missing := [f"{name}.weight" for name in needs if f"{name}.weight" not in names]:
        are = "are" if len(missing) > 1 else "is"
        fields.oddities.note_missing(
            f"{' and '.join(missing)} {are} missing: this file's embeddings differ from the model's, which multiplies"
            " the pooled row by these matrices; convert it again with its dense modules"
        )


def pool_texts(b: Builder, w: Weights, h: Hyperparameters, x: Activation) -> Activation:
    """Pool the tokens' normalized rows x by h.pooling to one row per text. Raises ModelError.

    Tensors of other pooling types are ignored.
    """
    rows = b.pool(x, h.before_head if h.pooling == RANK else str(h.pooling))
    if h.pooling == RANK:
        b.ignore(*(w.get(name) for name in DENSE))
        return head(b, w, h, rows)
    b.ignore(*(part for name in HEAD for part in (w.get(name), w.bias(name))))
    for name in DENSE:
        rows = b.linear(rows, matrix) if (matrix := w.get(name)) else rows
    return rows


def head(b: Builder, w: Weights, h: Hyperparameters, x: Activation) -> Activation:
    """Apply the classification head, which computes scores. Raises ModelError if the file has none."""
    if not (w.get("cls") or w.get("cls.output")):
        w.require("cls.output")
    if inner := w.get("cls"):
        x = b.linear(x, inner)
        if w.get("cls.output"):
            x = b.gelu_erf(x) if h.head_gelu else b.softcap(x, 1.0)  # tanh
        x = b.layer_norm(x, norm, h.norm_of_head) if (norm := w.get("cls.norm")) else x
    return b.linear(x, outer) if (outer := w.get("cls.output")) else x
