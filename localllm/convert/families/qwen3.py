"""Rerankers made of Qwen3."""

from collections.abc import Callable, Sequence

import numpy as np

from localllm.convert.config import Config
from localllm.convert.families.bert import RANK, labels
from localllm.convert.family import Sizes
from localllm.convert.files import read_json, read_text, report_as_model_error
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.tensors import Shape, TensorSource, pick_rows

ANSWERS = "yes", "no"


def is_ranker(config: Config) -> bool:
    """Return whether a Qwen3 checkpoint is a reranker that answers yes or no, by its model card or name."""
    names = (config.path.parent.name, str(config.get("_name_or_path")))
    card = read_text(config.path.parent / "README.md") or ""
    return "# qwen3-reranker" in card.lower() or any("qwen3-reranker" in name.lower() for name in names)


def ranker(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read a reranker: the head is two rows of the output matrix."""
    path = config.path.parent / "tokenizer.json"
    with report_as_model_error(path):
        vocabulary = (read_json(path) or {})["model"]["vocab"]
        answers = {name: int(vocabulary[name]) for name in ANSWERS}
    h = declared(config)
    if max(answers.values()) >= h.sizes["vocab"]:
        raise config.refusal("the tokens of yes and no are beyond the vocabulary")
    return h.updated({**answers, "labels": 2}, pooling_type=RANK, classifier__output_labels=[*ANSWERS])


def classifier(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read a reranker with a head of its own."""
    named = labels(config)
    h = declared(config).updated({"labels": len(named)}, pooling_type=RANK)
    return h.updated(classifier__output_labels=named) if len(named) > 1 else h


def rows_of_answers(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take the output matrix's rows of yes and no."""
    return pick_rows(sources[0], shape, lambda rows: np.array([sizes[name] for name in ANSWERS])[np.asarray(rows)])


def select(config: Config) -> str:
    """Name the record of a chat model, or of a reranker."""
    if not is_ranker(config):
        return "Qwen3ForCausalLM"
    return "Qwen3ForCausalLM+tied_ranker" if config.flag("tie_word_embeddings") else "Qwen3ForCausalLM+ranker"
