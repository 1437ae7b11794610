"""Test n-gram embeddings: continued, forked and truncated sequences use the tokens before."""

import re

import numpy as np
import pytest
from engines import FAITHFUL, open_engine
from models import model, write

from localllm.engine.engine import Engine
from localllm.errors import ModelError
from tests.goldens.test_logits import nmse


@pytest.fixture(scope="module", params=["cpu", "reference"])
def engine(request, model_path):
    """Return an engine for a model of 4-grams that attends to three blocks of four."""
    engine = open_engine(model_path("qwen4exp_blocks"), context=256, kv_type="f32", backend=request.param)
    yield engine
    engine.close()


def fresh(engine: Engine, ids: list[int]) -> np.ndarray:
    """Return the logits behind each token, computed at once."""
    sequence = engine.sequence()
    rows = sequence.append(ids, "all")
    sequence.close()
    return rows


def tokens(count: int, seed: int = 0) -> list[int]:
    """Return random tokens with some 7s, the token that separates sequences."""
    random = np.random.default_rng(seed)
    return np.where(random.random(count) < 0.1, 7, random.integers(0, 272, count)).tolist()


@pytest.mark.parametrize("pieces", [[1] * 9, [1, 2, 3, 4, 30], [20, 1, 1, 2, 1, 25]])
def test_ngram_embeddings_in_chunks_equal_one_run(engine, pieces):
    ids, sequence, at = tokens(sum(pieces)), engine.sequence(), 0
    rows = []
    for count in pieces:
        rows.append(sequence.append(ids[at : at + count], "all"))
        at += count
    sequence.close()
    assert nmse(np.concatenate(rows), fresh(engine, ids)) < FAITHFUL


def test_ngram_embeddings_of_sequences_together_equal_each_alone(engine):
    """Run different lengths at different positions, one sequence without a token in between."""
    texts = [tokens(40, seed) for seed in range(4)]
    sequences, places = [engine.sequence() for _ in texts], [0] * 4
    for counts in ((3, 1, 17, 0), (1, 1, 1, 2), (0, 5, 1, 30), (9, 1, 1, 1)):
        steps = [(number, count) for number, count in enumerate(counts) if count]
        rows = engine.step([(sequences[n], texts[n][places[n] : places[n] + count]) for n, count in steps])
        for row, (number, count) in zip(rows, steps, strict=True):
            places[number] += count
            assert nmse(row, fresh(engine, texts[number][: places[number]])[-1:]) < FAITHFUL
    for sequence in sequences:
        sequence.close()


@pytest.mark.parametrize("length", [1, 2, 3, 37, 64])
def test_ngram_embeddings_of_forks_use_the_shared_tokens(engine, length):
    begin, (first, second) = tokens(length), (tokens(20, 1), tokens(20, 2))
    sequence = engine.sequence()
    sequence.append(begin, "none")
    fork = sequence.fork()
    pairs = [sequence.append([token], "last") for token in first[:3]], fork.append(second, "all")
    assert nmse(np.concatenate(pairs[0]), fresh(engine, begin + first[:3])[length:]) < FAITHFUL
    assert nmse(pairs[1], fresh(engine, begin + second)[length:]) < FAITHFUL
    sequence.close()
    fork.close()


@pytest.mark.parametrize("back", [1, 2, 3, 5, 41, 69])
def test_ngram_embeddings_of_a_truncated_sequence_use_what_remains(engine, back):
    ids, other, sequence = tokens(70), tokens(9, 3), engine.sequence()
    sequence.append(ids[:50], "none")
    for token in ids[50:]:
        sequence.append([token], "none")
    kept = sequence.truncate(70 - back)
    rows = sequence.append([*ids[kept : 70 - back], *other], "all")
    assert nmse(rows[-9:], fresh(engine, [*ids[: 70 - back], *other])[-9:]) < FAITHFUL
    sequence.close()


WRONG = [
    ({"ple.layers": np.array([1])}, "ple.layers"),  # which attends
    ({"ple.layers": np.array([0, 0])}, "ple.layers"),
    ({"ple.layers": np.array([2])}, "ple.layers"),
    ({"ple.ngram_size": 1}, "rows for each n-gram length"),
    ({"ple.ngram_size": 9}, "rows for each n-gram length"),
    ({"ple.heads_per_ngram": 22}, "rows for each n-gram length"),
    ({"ple.eos_token_id": 272}, "ple.eos_token_id"),
    ({"ple.layer_multipliers": np.array([1, 1, 1, 1 << 60], np.uint64)}, "ple.layer_multipliers"),
    ({"ple.head_vocab_sizes": np.array([0, 67, 71], np.uint64)}, "ple.head_vocab_sizes"),
    (
        {"ple.head_offsets": np.array([0, 61, 400], np.uint64)},
        "per_layer_token_embd.weight must have 471 rows (found 434)",
    ),
    ({"embedding_length_per_layer_input": 21}, "per_layer_token_embd.weight must have rows of length 21"),
    ({"hyper_connection.count": 1}, "hyper_connection.count must be a number from 2"),
    ({"attention.compress_ratios": np.array([0, 5])}, "that divide 12"),
    ({"attention.indexer.key_length": 8}, "too small for rope.dimension_count 16"),
    ({"rope.dimension_sections": np.array([3, 3, 1, 1])}, "must cover all rotated pairs"),
    ({"expert_weights_scale": 2.0}, "expert_weights_scale"),
    ({"expert_gating_func": 2}, "expert_gating_func"),
]


@pytest.mark.parametrize(("fields", "problem"), WRONG)
def test_invalid_ngram_metadata_is_refused(tmp_path, fields, problem):
    built = model("qwen4exp_blocks")
    built.metadata.update({f"qwen4exp.{name}": value for name, value in fields.items()})
    with pytest.raises(ModelError, match=re.escape(problem)):
        open_engine(write(built, tmp_path / "model.gguf"), context=48)
