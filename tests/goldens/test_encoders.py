"""Rows of texts against llama.cpp's: every architecture that makes some; see tests/support/models/encoders.py."""

from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import FAITHFUL, open_engine
from models import ENCODERS, model, write
from models.encoders import GELU, ROWS_IN_BLOCKS, RowsGolden, texts
from models.golden import check_digest

from localllm.arch import rowwise_verbs
from localllm.arch.decoder import KINDS
from localllm.engine import embedding_runner as engine_texts
from localllm.engine.embedding_runner import EmbeddingRunner, build_reference_runner, group_texts
from localllm.engine.lower.header import TextSpan
from localllm.engine.operations.linear import Linear
from localllm.engine.options import EngineOptions
from localllm.errors import ContextError, LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from tests.goldens.test_logits import looked_up, nmse
from tests.unit.generation.test_prefix_cache import TakenLock


def opened(path: Path, name: str, backend: str, **options) -> EmbeddingRunner:
    made = model(name)
    pooling = KINDS[made.metadata[f"{made.arch}.pooling_type"]]
    return EmbeddingRunner(
        GGUFFile.open(path), pooling, EngineOptions(threads=2, kv_type="f32", backend=backend, **options)
    )


def rows(path: Path, name: str, backend: str, read=None) -> np.ndarray:
    reader = opened(path, name, backend)
    result = reader.read(read or texts(name, model(name)))
    reader.close()
    return softmaxed(result) if name.startswith("qwen3_rank") else result


def softmaxed(x: np.ndarray) -> np.ndarray:
    """Return what llama.cpp makes of the two scores of a Qwen3."""
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_reference_agrees_with_llama_cpp(model_path, name, monkeypatch):
    """Look GELU, the rounded one, up in a table of float16 as llama.cpp does."""
    golden = RowsGolden.load(name)
    check_digest(name, model(name), golden)
    if name in GELU:
        for verb in ("gelu", "gelu_erf"):
            monkeypatch.setattr(rowwise_verbs, verb, looked_up(rowwise_verbs.gelu))
    assert nmse(rows(model_path(name), name, "reference"), golden.rows) < (2e-7 if name in GELU else 1e-11)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_cpu_agrees_with_the_reference(model_path, name):
    """Compare with the reference, whose GELU is exact."""
    path = model_path(name)
    assert nmse(rows(path, name, "cpu"), rows(path, name, "reference")) < 3e-9  # of a single score


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROWS_IN_BLOCKS)
def test_quantized_encoders_agree_with_llama_cpp(model_path, name):
    """Compare with llama.cpp's rows of the same weights in float32."""
    golden = RowsGolden.load(name)
    check_digest(name, model(name), golden)
    assert nmse(rows(model_path(name), name, "reference"), golden.rows) < 1e-11
    assert nmse(rows(model_path(name), name, "cpu"), golden.rows) < 3e-8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["eurobert", "neo_bert", "llama_embed", "llama_embed_experts", "t5encoder"])
def test_odd_dimensions_agree_with_the_reference(tmp_path, name, seed):
    made = model(name, seed, vocab=271 + 2 * seed, hidden=41 + 10 * seed)
    path, some = write(made, tmp_path / "model.gguf"), texts(name, made)
    assert nmse(rows(path, name, "cpu", some), rows(path, name, "reference", some)) < FAITHFUL


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert", "modern_bert", "jina_bert", "nomic_bert_moe", "gemma_embedding", "qwen3_embedding"]
)
def test_long_and_many_texts_agree_with_each_alone(tmp_path, name):
    """Read texts longer than a run, alone and among short ones; expect each as it is alone."""
    path = write(model(name, context=1400), tmp_path / "model.gguf")
    vocab = model(name).metadata[f"{model(name).arch}.vocab_size"]
    random = np.random.default_rng(0)
    some = [random.integers(0, vocab, length) for length in (1300, 600, 5, 512, 513, 70, *[8] * 20)]
    together = rows(path, name, "cpu", some)
    assert nmse(together, rows(path, name, "reference", some)) < FAITHFUL
    for text, row in list(zip(some, together, strict=True))[:7]:
        assert nmse(rows(path, name, "cpu", [text])[0], row) < FAITHFUL


def test_the_second_text_of_a_pair_is_of_another_kind(model_path):
    path, text = model_path("bert"), np.arange(30)
    rows_of_backend = {}
    for backend in ("cpu", "reference"):
        reader = opened(path, "bert", backend)
        rows_of_backend[backend] = reader.read([text, text, text[:9]], seconds=[30, 12, 4])
        reader.close()
    assert nmse(rows_of_backend["cpu"], rows_of_backend["reference"]) < FAITHFUL
    assert nmse(rows_of_backend["cpu"][0], rows_of_backend["cpu"][1]) > 1e-3


def test_a_token_type_table_with_one_row_is_not_read_beyond_its_end(tmp_path):
    made = model("bert")
    made.tensors["token_types.weight"] = made.tensors["token_types.weight"][:1]
    path, text = write(made, tmp_path / "model.gguf"), np.arange(30)
    reader = EmbeddingRunner(GGUFFile.open(path), "mean", EngineOptions(threads=1))
    rows_read = reader.read([text, text], seconds=[12, 30])
    reader.close()
    np.testing.assert_array_equal(rows_read[0], rows_read[1])


def test_runs_join_texts_of_similar_lengths():
    lengths = [3, 500, 7, 9, 600, 1]
    runs_found = [numbers.tolist() for numbers in group_texts(lengths)]
    assert runs_found == [[5, 0, 2, 3], [1], [4]]
    assert [len(numbers) for numbers in group_texts([1] * 600)] == [256, 256, 88]
    assert list(group_texts([])) == []


def test_long_texts_and_foreign_ids_are_refused(model_path):
    reader = opened(model_path("bert"), "bert", "reference")
    with pytest.raises(ContextError, match="an input of 129 tokens exceeds the model's context of 128"):
        reader.read([np.zeros(129, int)])
    for wrong in ([], [-1], [272]):
        with pytest.raises(UsageError, match="from 0 to 271"):
            reader.read([wrong])
    with pytest.raises(UnsupportedError, match="bert models make embeddings and cannot generate text"):
        open_engine(model_path("bert"))


def test_all_poolings_differ_from_each_other(model_path):
    file = GGUFFile.open(model_path("bert"))
    vectors = [
        EmbeddingRunner(file, kind, EngineOptions(backend="reference")).read([[5, 6, 7]])[0] for kind in KINDS[1:4]
    ]
    assert nmse(vectors[0], vectors[1]) > 1e-3 < nmse(vectors[1], vectors[2])


@pytest.mark.parametrize(
    ("lengths", "together"),
    [
        ([], []), ([11], [[0]]), ([4, 11], [[0], [1]]),
        ([5, 5], [[0, 1]]), ([6, 5], [[1], [0]]), ([4, 4, 2], [[2], [0, 1]]),
        ([3, 4], [[0], [1]]), ([3, 3], [[0, 1]]), ([1] * 4, [[0, 1, 2], [3]]), ([1] * 3, [[0, 1, 2]]),
        ([5, 1, 5, 1], [[1, 3], [0, 2]]),
    ],
)  # fmt: skip
def test_short_texts_are_read_together_up_to_a_limit(monkeypatch, lengths, together):
    """Read up to 10 tokens here, and three texts; those of up to three tokens by themselves."""
    for name, number in (("BATCH", 10), ("MIN_TEXT_KERNEL_TOKENS", 1), ("MAX_TEXTS", 3)):
        monkeypatch.setattr(engine_texts, name, number)
    assert [numbers.tolist() for numbers in group_texts(lengths, kernel_limits=(3,))] == together


class Bare(EmbeddingRunner):
    """Stand for an opened runner; return each text's first id, token count and beginning of the second one."""

    def __init__(self, has_kinds: bool = True):
        self.context, self.vocab_size, self.width, self.lock = 9, 20, 3, Lock()
        self._path, self._has_kinds, self.warning, self.closed = "m.gguf", has_kinds, None, 0
        self._kernel_limits = (engine_texts.MAX_PRECISE_TEXT,)
        self._read = lambda texts: np.array([[text.ids[0], len(text.ids), text.second] for text in texts])
        self._close = lambda: setattr(self, "closed", self.closed + 1)


def test_rows_come_in_the_order_of_the_texts(monkeypatch):
    monkeypatch.setattr(engine_texts, "BATCH", 4)
    reported = list[int]()
    texts = [[19, 1, 1], [2], [3, 3], np.array([0])]
    rows_read = Bare().read(texts, [2, 1, 1, 0], reported.append)
    assert rows_read.tolist() == [[19, 3, 2], [2, 1, 1], [3, 2, 1], [0, 1, 0]] and rows_read.dtype == np.float32
    assert reported == [3, 4]
    for seconds, has_kinds in ((None, True), ([2, 1, 1, 0], False), ([], True)):
        assert Bare(has_kinds).read(texts, seconds)[:, 2].tolist() == [3, 1, 2, 1]
    assert Bare().read([]).shape == (0, 3)


def test_texts_that_cannot_be_read_are_refused():
    reader = Bare()
    assert len(reader.read([[1] * 9])) == 1
    for text, error, message in (
        ([1] * 10, ContextError, "an input of 10 tokens exceeds the model's context of 9: shorten it"),
        ([], UsageError, "token ids must be a list of integers from 0 to 19"),
        ([1, 20], UsageError, "token ids must be a list of integers from 0 to 19"),
        ([-1, 1], UsageError, "token ids must be a list of integers from 0 to 19"),
    ):
        with pytest.raises(error) as caught:
            reader.read([[1], text])
        assert str(caught.value) == message

    def broken(texts):
        raise ModelError("not numbers")

    reader._read = broken
    with pytest.raises(ModelError, match=r"^m\.gguf: not numbers$"):
        reader.read([[1]])
    reader.close()
    assert reader.closed == 1
    reader.lock = TakenLock()
    for call in (lambda: reader.read([[1]]), reader.close):
        with pytest.raises(BlockingIOError):
            call()


def test_models_that_write_answers_make_no_vectors_at_all(monkeypatch):
    written = SimpleNamespace(arch="t5", start_token=0)
    monkeypatch.setattr(engine_texts, "load_architecture", lambda file: (None, written))
    with pytest.raises(UnsupportedError) as error:
        EmbeddingRunner(SimpleNamespace(path="m.gguf"), "mean")
    assert str(error.value) == "m.gguf: t5 models generate text and do not make embeddings: use localllm run"


def test_a_card_reads_texts_and_the_cpu_stands_in_for_it(monkeypatch):
    """Use a card, if one is asked for; if one may be used, and cannot, use the CPU, and say why."""
    closed = list[int]()
    card = SimpleNamespace(close=lambda: closed.append(1), warning="slow", name="a card", read="read")
    monkeypatch.setattr("localllm.engine.cuda.backend.CudaEmbeddingRunner", lambda *given: made.append(given) or card)
    reader, made = Bare(), list[tuple]()
    options = EngineOptions(backend="cuda")
    assert reader._build_gpu_runner(["operations"], ["states"], options) == "read"
    assert made == [(["operations"], ["states"], 9, options)]
    assert (reader.warning, reader.device) == ("slow", "a card")
    reader.close()
    assert closed == [1]

    def broken(*given):
        raise LocalllmError("it is on fire")

    monkeypatch.setattr("localllm.engine.cuda.backend.CudaEmbeddingRunner", broken)
    with pytest.raises(LocalllmError, match=r"^it is on fire$"):
        Bare()._build_gpu_runner([], [], options)
    reader = Bare()
    assert reader._build_gpu_runner([], [], EngineOptions(backend="auto")) is None
    assert reader.warning == "the CPU computes: it is on fire"


@pytest.mark.parametrize(
    ("format", "long_is_precise"), [("F16", True), ("BF16", True), ("F32", False), ("Q8_0", False)]
)
@pytest.mark.parametrize(("context", "pages"), [(9, 8), (600, 10)])
def test_activations_of_short_texts_keep_16_bits(monkeypatch, format, long_is_precise, context, pages):
    """Keep them for others, too, where weights have as many: all texts of one run are of one kind."""
    asked, given = list[tuple](), dict[str, object]()
    program = SimpleNamespace(
        read=lambda *call: asked.append(call), close="close", prepare_all="all", warning="slow", kernel_limits=(7,)
    )
    monkeypatch.setattr(engine_texts, "MAX_TEXTS", 5)
    monkeypatch.setattr(engine_texts, "RunCache", lambda *known: known)

    def compiled(operations, places, threads, progress, keeps):
        given.update(places=places, threads=threads, keeps=keeps)
        return program

    monkeypatch.setattr(engine_texts, "compile_program", compiled)
    reader, options = Bare(), EngineOptions(threads=3)
    reader.context = context
    weight = SimpleNamespace(tensor=SimpleNamespace(format=SimpleNamespace(name=format)))
    operations: Any = [Linear((), None, weight, None), SimpleNamespace()]
    read = reader._compile(operations, ["states"], options)
    assert given["places"].cache == (["states"], pages + 5, options.kv_cache_type, operations)
    assert len(given["places"].header.ids) == max(512, context)
    assert (given["threads"], given["keeps"]) == (3, False)
    assert (reader._close, reader.prepare_all, reader.warning) == ("close", "all", "slow")
    assert reader._kernel_limits == (7,)
    for lengths, is_precise in (((128, 1), True), ((1, 129), long_is_precise)):
        read(texts := [TextSpan(np.zeros(length, np.int64), length) for length in lengths])
        spans, table, precise = asked.pop()
        assert (spans, table.tolist(), precise) == (texts, [*range(pages + 5)], is_precise)


def test_the_reference_gets_the_token_types(monkeypatch):
    ran = list[tuple]()
    backend = SimpleNamespace(create_state=lambda: "store", run=lambda *given: ran.append(given))
    monkeypatch.setattr("localllm.engine.reference.ReferenceBackend", lambda *given: ran.append(given) or backend)
    options = EngineOptions()
    build_reference_runner("forward", options, 64)([TextSpan(np.array([5, 6, 7]), 2), TextSpan(np.array([8]), 1)])
    made, (spans, precise) = ran
    assert (made, precise) == (("forward", options.kv_cache_type, 64, None), True)
    seen = [(one.store, one.position, one.ids.tolist(), one.wanted, one.kinds.tolist()) for one in spans]
    assert seen == [("store", 0, [5, 6, 7], 1, [0, 0, 1]), ("store", 0, [8], 1, [0])]
