"""Test rerankers whose file has no head: the probability of "yes" against "no" as the model's next token."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from models import write_model

import localllm
from localllm.errors import ModelError
from localllm.generation.embedding.reranker import ANSWER, INSTRUCTION, QUESTION

QUERY, TEXTS = "What is a whale?", ["Whales are mammals.", "Bread is baked."]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(localllm.builtin_model(), tmp_path / "tiny-Reranker-Q8_0.gguf"))


def test_the_score_is_the_probability_of_yes(path: Path):
    with localllm.open(path, threads=2, context=1024, cache=False) as model:
        scores, encode = model.rerank(QUERY, TEXTS), model.tokenizer.encode
        yes, no = encode("yes")[0], encode("no")[0]
        for text, score in zip(TEXTS, scores, strict=True):
            asked = (f"<Instruct>: {INSTRUCTION}\n<Query>: ", QUERY, "\n<Document>: ", text)
            plain = [token for part in asked for token in encode(part)]
            logits = model.logits([*encode(QUESTION, special=True), *plain, *encode(ANSWER, special=True)])[-1]
            assert score == pytest.approx(1 / (1 + np.exp(logits[no] - logits[yes])), abs=0.02)


def test_opening_a_reranker_leaves_the_model_as_it_is(path: Path):
    with localllm.open(path, threads=2, context=1024, cache=False) as model:
        before = model.logits([3, 4, 5])
        model.rerank(QUERY, TEXTS)
        assert "cls.output.weight" not in model.file.tensors and (model.logits([3, 4, 5]) == before).all()


def test_a_model_of_another_name_is_refused():
    refused = pytest.raises(ModelError, match="not a reranker: it must have the tensor")
    with localllm.open(localllm.builtin_model(), cache=False) as model, refused:
        model.rerank(QUERY, TEXTS)


def test_a_vocabulary_without_the_answers_is_refused(tmp_path: Path):
    refused = pytest.raises(ModelError, match='"yes" and "no" are not single tokens')
    with localllm.open(write_model("llama", tmp_path / "a-rerank.gguf"), cache=False) as model, refused:
        model.rerank(QUERY, TEXTS)
