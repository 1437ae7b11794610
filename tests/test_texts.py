"""Rows of texts against llama.cpp's: every architecture that makes some; see tests/models/encoders.py."""

from pathlib import Path

import numpy as np
import pytest
from engines import FAITHFUL, open_engine
from models import ENCODERS, model, write
from models.encoders import GELU, ROWS_IN_BLOCKS, RowsGolden, texts
from models.golden import check_digest
from test_goldens import looked_up, nmse

from localllm.arch import verbs
from localllm.arch.pooling import KINDS
from localllm.engine.options import EngineOptions
from localllm.engine.texts import TextReader, runs
from localllm.errors import ContextError, UnsupportedError, UsageError
from localllm.files.gguf_file import GGUFFile


def opened(path: Path, name: str, backend: str, **options) -> TextReader:
    made = model(name)
    pooling = KINDS[made.metadata[f"{made.arch}.pooling_type"]]
    return TextReader(GGUFFile.open(path), pooling, EngineOptions(threads=2, kv_type="f32", backend=backend, **options))


def rows(path: Path, name: str, backend: str, read=None) -> np.ndarray:
    reader = opened(path, name, backend)
    found = reader.read(read or texts(name, model(name)))
    reader.close()
    return softmaxed(found) if name.startswith("qwen3_rank") else found


def softmaxed(x: np.ndarray) -> np.ndarray:
    """What llama.cpp makes of the two scores of a Qwen3."""
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_reference(model_path, name, monkeypatch):
    """As llama.cpp's, which looks GELU, the rounded one, up in a table of float16."""
    golden = RowsGolden.load(name)
    check_digest(name, model(name), golden)
    if name in GELU:
        for verb in ("gelu", "gelu_erf"):
            monkeypatch.setattr(verbs, verb, looked_up(verbs.gelu))
    assert nmse(rows(model_path(name), name, "reference"), golden.rows) < (2e-7 if name in GELU else 1e-11)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_cpu(model_path, name):
    """As the reference, whose GELU is exact."""
    path = model_path(name)
    assert nmse(rows(path, name, "cpu"), rows(path, name, "reference")) < 3e-9  # of a single score


@pytest.mark.parametrize("name", ROWS_IN_BLOCKS)
def test_quantized(model_path, name):
    """As llama.cpp's of the same weights in float32."""
    golden = RowsGolden.load(name)
    check_digest(name, model(name), golden)
    assert nmse(rows(model_path(name), name, "reference"), golden.rows) < 1e-11
    assert nmse(rows(model_path(name), name, "cpu"), golden.rows) < 3e-8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["eurobert", "neo_bert", "llama_embed", "llama_embed_experts", "t5encoder"])
def test_other_numbers_and_dimensions(tmp_path, name, seed):
    """Odd ones, on the CPU as by the reference."""
    made = model(name, seed, vocab=271 + 2 * seed, hidden=41 + 10 * seed)
    path, some = write(made, tmp_path / "model.gguf"), texts(name, made)
    assert nmse(rows(path, name, "cpu", some), rows(path, name, "reference", some)) < FAITHFUL


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert", "modern_bert", "jina_bert", "nomic_bert_moe", "gemma_embedding", "qwen3_embedding"]
)
def test_long_texts_and_many(tmp_path, name):
    """Texts that are longer than a run, alone and among short ones; each is what it is alone."""
    path = write(model(name, context=1400), tmp_path / "model.gguf")
    vocab = model(name).metadata[f"{model(name).arch}.vocab_size"]
    random = np.random.default_rng(0)
    some = [random.integers(0, vocab, length) for length in (1300, 600, 5, 512, 513, 70, *[8] * 20)]
    together = rows(path, name, "cpu", some)
    assert nmse(together, rows(path, name, "reference", some)) < FAITHFUL
    for text, row in list(zip(some, together, strict=True))[:7]:
        assert nmse(rows(path, name, "cpu", [text])[0], row) < FAITHFUL


def test_kinds_of_pairs(model_path):
    """The second text of a pair is of another kind."""
    path, text = model_path("bert"), np.arange(30)
    found = {}
    for backend in ("cpu", "reference"):
        reader = opened(path, "bert", backend)
        found[backend] = reader.read([text, text, text[:9]], seconds=[30, 12, 4])
        reader.close()
    assert nmse(found["cpu"], found["reference"]) < FAITHFUL
    assert nmse(found["cpu"][0], found["cpu"][1]) > 1e-3


def test_kinds_that_the_model_does_not_have(tmp_path):
    """A table of one kind is not read beyond its end."""
    made = model("bert")
    made.tensors["token_types.weight"] = made.tensors["token_types.weight"][:1]
    path, text = write(made, tmp_path / "model.gguf"), np.arange(30)
    reader = TextReader(GGUFFile.open(path), "mean", EngineOptions(threads=1))
    found = reader.read([text, text], seconds=[12, 30])
    reader.close()
    np.testing.assert_array_equal(found[0], found[1])


def test_runs_are_of_texts_that_are_alike():
    lengths = [3, 500, 7, 9, 600, 1]
    found = [numbers.tolist() for numbers in runs(lengths)]
    assert found == [[5, 0, 2, 3], [1], [4]]
    assert [len(numbers) for numbers in runs([1] * 600)] == [256, 256, 88]
    assert list(runs([])) == []


def test_what_is_refused(model_path):
    reader = opened(model_path("bert"), "bert", "reference")
    with pytest.raises(ContextError, match="a text of 129 tokens; the model reads 128"):
        reader.read([np.zeros(129, int)])
    for wrong in ([], [-1], [272]):
        with pytest.raises(UsageError, match="from 0 to 271"):
            reader.read([wrong])
    with pytest.raises(UnsupportedError, match="bert models make no text"):
        open_engine(model_path("bert"))


def test_all_poolings_differ(model_path):
    file = GGUFFile.open(model_path("bert"))
    found = [TextReader(file, kind, EngineOptions(backend="reference")).read([[5, 6, 7]])[0] for kind in KINDS[1:4]]
    assert nmse(found[0], found[1]) > 1e-3 < nmse(found[1], found[2])
