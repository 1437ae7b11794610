"""Encoders: BERT and XLM-RoBERTa, also with a head that scores pairs of texts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from localllm.convert.config import Config
from localllm.convert.family import Sizes
from localllm.convert.hyperparameters import CheckpointFacts, attention_sizes
from localllm.convert.tensors import Shape, TensorSource, pick_rows

RANK = 4  # llama.cpp's pooling type for scores


CLASSIFIERS = {"mean": 1, "cls": 2}  # poolings that the scores are computed from


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read BERT: a position table, layer norms, exact GELU."""
    config.only("hidden_act", "gelu")
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    return encoder(config, config.count("max_position_embeddings", 512), config.number("layer_norm_eps", 1e-12))


def roberta(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read RoBERTa: the table's first positions stand for padding and are cut off."""
    positions, padding = config.count("max_position_embeddings", 514), config.get("pad_token_id", 1)
    if not isinstance(padding, int) or not 0 <= padding < positions - 1:
        raise config.refusal(f"pad_token_id {padding} is not supported")
    h = read(config, declared)
    return replace(h.updated(context_length=positions - padding - 1), sizes={
        **h.sizes, "context": positions - padding - 1, "positions": positions,
    })  # fmt: skip


def distilbert(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read DistilBERT: its own names; a single token type without a table."""
    names = {"hidden_size": "dim", "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim",
             "num_hidden_layers": "n_layers", "hidden_act": "activation"}  # fmt: skip
    config.only("sinusoidal_pos_embds", False)  # stored like the others, but untested
    return read(
        config.updated(layer_norm_eps=1e-12, **{name: config.get(key) for name, key in names.items()}), declared
    )


def encoder(config: Config, context: int, epsilon: float) -> CheckpointFacts:
    """Read the values that all encoders share."""
    sizes = attention_sizes(config) | {"context": context, "types": config.count("type_vocab_size", 2)}
    sizes["labels"] = len(labels(config))
    metadata: dict[str, object] = {
        "block_count": sizes["layers"],
        "context_length": context,
        "embedding_length": sizes["width"],
        "feed_forward_length": sizes["hidden"],
        "attention.head_count": sizes["heads"],
        "attention.layer_norm_epsilon": epsilon,
        "attention.causal": False,
    }
    return CheckpointFacts(sizes, metadata, {}, tied=True)


def labels(config: Config) -> list[str]:
    """Return the labels of a head's scores, in order."""
    named = config.get("id2label")
    if isinstance(named, dict) and all(key.isdecimal() for key in named):
        return [str(named[key]) for key in sorted(named, key=int)]
    return [f"LABEL_{number}" for number in range(config.count("num_labels", 2))]


def behind_padding(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take the last rows of a table of positions, which are those of tokens."""
    first = sizes["positions"] - sizes["context"]
    return pick_rows(sources[0], shape, lambda rows: np.asarray(rows) + first)


def rank(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read BERT with a head for scores."""
    return with_labels(config, read(config, declared))


def roberta_rank(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read RoBERTa with a head for scores."""
    return with_labels(config, roberta(config, declared))


def with_labels(config: Config, h: CheckpointFacts) -> CheckpointFacts:
    return h.updated(pooling_type=RANK, classifier__output_labels=labels(config))
