"""Test localllm perplexity: chunks, scores against formulas and llama-perplexity's figures, files, the command."""

import json
import re
import struct
import sys
from functools import partial
from math import exp, log, sqrt
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engines import bound, open_engine
from tiny_model import damage, exact, write_tiny_model

from localllm import api
from localllm.arch.rope_scaling import RopeScaling
from localllm.cli import main
from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files import logits_file
from localllm.files.gguf.file import GGUFFile
from localllm.files.logits_file import (
    LogitsFile,
    LogitsWriter,
    compute_row_width,
    count_scored_tokens,
    dequantize_logits,
    quantize_logits,
)
from localllm.files.text_file import read_text
from localllm.services import bench
from localllm.services.evaluation import perplexity
from localllm.services.evaluation.perplexity import PerplexityRunner
from localllm.services.evaluation.scores import (
    Comparison,
    Prediction,
    add_bos,
    compute_kl_divergence,
    log_sum_exp,
    split_chunks,
)

TEXT = " ".join(f"hello world {number}, wor rld" for number in range(60))
SIZE = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> str:
    """Write another model with the same vocabulary."""
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "other.gguf", seed=1))


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n")
    return str(path)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the rows' log probabilities, float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def exact_nll(path: str, chunks: np.ndarray, bos: int | None = None) -> np.ndarray:
    """Score chunks as llama-perplexity does, in plain NumPy: float64 [scored tokens]."""
    nll, engine = [], open_engine(path, backend="reference")
    for chunk in chunks:
        ids = [chunk[0] if bos is None else bos, *chunk[1:]]
        logarithms = log_softmax(engine.forward(ids, 0, "all"))
        first = len(chunk) // 2
        nll += [-logarithms[place, chunk[place + 1]] for place in range(first, len(chunk) - 1)]
    return np.array(nll)


# ---- chunks ---------------------------------------------------------------------------------------------------------


def test_tokens_are_split_into_whole_chunks():
    np.testing.assert_array_equal(split_chunks(range(11), 5), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    np.testing.assert_array_equal(split_chunks(range(11), 5, 1), [[0, 1, 2, 3, 4]])
    assert split_chunks(range(10), 5, 9).shape == (2, 5)


@pytest.mark.parametrize(
    ("tokens", "size", "most", "reason"),
    [(4, 5, None, "4 tokens.* 5"), (9, 3, None, "context must be 4 or greater"), (9, 5, 0, "1 or greater")],
)
def test_invalid_chunk_sizes_are_refused(tokens, size, most, reason):
    with pytest.raises(UsageError, match=reason):
        split_chunks(range(tokens), size, most)


@pytest.mark.parametrize(("adds_bos", "bos_id", "first"), [(True, 9, 9), (False, 9, 1), (True, None, 1)])
def test_the_first_token_of_a_chunk_becomes_bos(adds_bos, bos_id, first):
    tokenizer = SimpleNamespace(adds_bos=adds_bos, bos_id=bos_id)
    assert add_bos(np.array([1, 2, 3]), tokenizer) == [first, 2, 3]


@pytest.mark.parametrize(("data", "text"), [(b"\xef\xbb\xbfa\n", "a"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"", "")])
def test_a_text_file_loses_its_bom_and_last_line_break(tmp_path, data, text):
    (tmp_path / "x").write_bytes(data)
    assert read_text(tmp_path / "x") == text


# ---- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("piece", [7, 256])
@pytest.mark.parametrize("bos", [None, 2])
def test_perplexity_equals_its_formula(monkeypatch, tiny, threads, piece, bos):
    monkeypatch.setattr(perplexity, "RUN_TOKENS", piece)
    with PerplexityRunner(tiny, SIZE, threads) as reader:
        chunks = split_chunks(reader.tokenizer.encode(TEXT), SIZE, 3)
        if bos is not None:
            reader.tokenizer.adds_bos, reader.tokenizer.bos_id = True, bos
        results = list(reader.predict(chunks))
    exact = exact_nll(tiny, chunks, bos)
    assert [result.chunks for result in results] == [1, 2, 3]
    np.testing.assert_allclose(results[-1].nll, exact, rtol=1e-4)  # keys and values are f16
    np.testing.assert_array_equal(results[0].nll, results[-1].nll[: count_scored_tokens(SIZE)])
    value, error = results[-1].perplexity
    assert value == pytest.approx(exp(exact.mean()), rel=bound(1e-5, in_tiles=1e-4))
    spread = (exact**2).mean() - exact.mean() ** 2
    assert error == pytest.approx(value * sqrt(spread / (len(exact) - 1)), rel=1e-4)


def test_the_number_of_threads_does_not_change_a_bit(tiny):
    results = []
    for threads in (1, 2):
        with PerplexityRunner(tiny, SIZE, threads) as reader:
            results.append(list(reader.predict(split_chunks(reader.tokenizer.encode(TEXT), SIZE, 2)))[-1].nll)
    np.testing.assert_array_equal(*results)


def test_logits_of_a_damaged_model_raise(tmp_path):
    path = damage(write_tiny_model(tmp_path / "tiny.gguf"))
    with PerplexityRunner(path, SIZE, 1) as reader, pytest.raises(ModelError, match=r"tiny\.gguf: .*not finite"):
        list(reader.predict(np.zeros((1, SIZE), np.int32)))


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("vocab", [1, 2, 501])
def test_divergence_equals_its_formula(vocab, scale):
    generator = np.random.default_rng(vocab)
    base, logits = (scale * generator.standard_normal((2, vocab)) + 100).astype(np.float32)
    work = np.empty(vocab, np.float32)
    log_sum = log_sum_exp(logits, work)
    assert log_sum == pytest.approx(log(np.exp(logits.astype(np.float64) - 100).sum()) + 100, rel=1e-7)
    p, q = log_softmax(base), log_softmax(logits)
    exact = float((np.exp(p) * (p - q))[p > -16].sum())
    assert compute_kl_divergence(p.astype(np.float32), logits, log_sum, work) == pytest.approx(
        exact, rel=1e-5, abs=2e-5
    )


def test_very_unlikely_tokens_do_not_count():
    """Cut off as llama-perplexity does, whose files keep no more."""
    base, logits = np.array([0, -16.5, -15.5], np.float32), np.array([0, -1e7, -1e7], np.float32)
    assert compute_kl_divergence(base, logits, 0.0, np.empty(3, np.float32)) == pytest.approx(
        exp(-15.5) * 1e7, rel=1e-3
    )


def test_tokens_missing_from_a_base_do_not_count():
    logits, work = np.zeros(500, np.float32), np.empty(500, np.float32)
    assert compute_kl_divergence(np.full(500, -16, np.float32), logits, 2.0, work) == 0
    assert compute_kl_divergence(np.full(500, -15.99, np.float32), logits, 2.0, work) < -5e-4


def test_a_comparison_reports_all_its_figures():
    generator = np.random.default_rng(0)
    nll, base = generator.uniform(0, 5, (2, 1000))
    kld = generator.uniform(0, 1, 1000)
    change, same = np.exp(-nll) - np.exp(-base), np.arange(1000) % 4 > 0
    known = Comparison().add_chunk(nll=nll, base_nll=base, kld=kld, change=change, same_top=same)
    facts = json.loads(json.dumps(known.to_dict()))
    assert (facts["chunks"], facts["tokens"]) == (1, 1000)
    assert facts["base"]["perplexity"] == pytest.approx(exp(base.mean()))
    assert facts["ratio"]["mean"] == pytest.approx(facts["perplexity"] / facts["base"]["perplexity"])
    variances = np.cov(nll, base, ddof=0)
    spread = sqrt((variances[0, 0] + variances[1, 1] - 2 * variances[0, 1]) / 999)  # as llama-perplexity has it
    assert facts["ratio"]["error"] == pytest.approx(facts["ratio"]["mean"] * spread)
    assert facts["kld"]["50"] == pytest.approx(np.median(kld))
    ordered = np.sort(kld)
    assert facts["kld"]["99.9"] == pytest.approx(ordered[998] + 0.001 * (ordered[999] - ordered[998]))
    assert (facts["kld"]["maximum"], facts["kld"]["minimum"]) == (kld.max(), kld.min())
    assert facts["change"]["mean"] == pytest.approx(change.mean())
    assert facts["change"]["rms"] == pytest.approx(sqrt((change**2).mean()))
    assert facts["same_top"] == {"mean": 0.75, "error": pytest.approx(sqrt(0.75 * 0.25 / 999))}


def test_perplexity_is_never_infinite():
    assert Prediction().add_chunk(nll=np.full(3, 1e6)).perplexity[0] < float("inf")


# ---- the file of logits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [2, 7, 300])
@pytest.mark.parametrize("spread", [0.0, 0.5, 20.0])
def test_a_row_is_packed_as_llama_perplexity_does(vocab, spread):
    logits = (spread * np.random.default_rng(0).standard_normal(vocab)).astype(np.float32)
    row, work = np.zeros(compute_row_width(vocab), "<u2"), np.empty(vocab, np.float32)
    quantize_logits(logits, log_sum_exp(logits, work), row, work)
    scale, minimum = struct.unpack("<2f", row[:4].tobytes())
    most, least = logits.max(), max(logits.min(), logits.max() - 16)
    assert scale == pytest.approx((most - least) / 65535)
    assert minimum == pytest.approx(least - log(np.exp(logits.astype(np.float64)).sum()), rel=1e-5, abs=1e-6)
    exact = (np.maximum(logits, least) - least) / scale if scale else np.zeros(vocab)
    assert np.abs(row[4 : 4 + vocab] - exact).max() < 0.52  # the nearest, but for what float32 leaves out
    assert len(row) % 2 == 0
    floor = max(log_softmax(logits).min(), log_softmax(logits).max() - 16)
    np.testing.assert_allclose(dequantize_logits(row, work), np.maximum(log_softmax(logits), floor), atol=scale + 1e-5)


class Sequence:
    """A sequence whose logits depend on token and position."""

    vocab_size = 5
    table = np.random.default_rng(3).normal(0, 3, (SIZE, vocab_size, vocab_size)).astype(np.float32)

    def __init__(self) -> None:
        self.tokens, self.pieces = list[int](), list[tuple[int, str]]()

    def truncate(self, length: int) -> None:
        del self.tokens[length:]

    def append(self, ids: list[int], logits: str) -> np.ndarray:
        first = len(self.tokens)
        self.tokens += ids
        self.pieces.append((len(ids), logits))
        return np.array([self.table[first + number, token] for number, token in enumerate(ids)])


@pytest.fixture
def opened(monkeypatch) -> SimpleNamespace:
    """Replace the model; `given` records how it was opened."""
    tokenizer = SimpleNamespace(adds_bos=False, bos_id=None)
    model = SimpleNamespace(
        path="m.gguf", tokenizer=tokenizer, file=SimpleNamespace(metadata={}), warnings=["w"],
        files=["m.gguf"], sequence=lambda: model.made, made=Sequence(), closed=0,
    )  # fmt: skip
    model.close = lambda: setattr(model, "closed", model.closed + 1)

    def open_model(*arguments: object, **more: object) -> SimpleNamespace:
        model.given = arguments, more
        return model

    monkeypatch.setattr(perplexity, "open_model", open_model)
    return model


def test_the_model_is_opened_with_the_chunk_size(opened, monkeypatch):
    monkeypatch.setattr(perplexity, "count_usable_cores", lambda: 3)
    with PerplexityRunner("m", SIZE, None, print, "q8_0") as reader:
        assert (reader._threads, reader.path) == (3, "m.gguf")
        assert (reader.warnings, reader.made_with) == (["w"], None)
    assert opened.given == (("m", None, SIZE, "q8_0"), {"progress": print, "rope": None}) and opened.closed == 1
    with pytest.raises(RuntimeError, match="after shutdown"):
        reader._pool.submit(print)
    with PerplexityRunner("m", SIZE, 2) as reader:
        assert reader._threads == 2 and not opened.closed - 1
    assert opened.given == (("m", 2, SIZE, "f16"), {"progress": None, "rope": None})


@pytest.mark.parametrize("size", [SIZE, SIZE - 1])
def test_runs_of_any_size_give_the_same_scores(opened, monkeypatch, tmp_path, size: int):
    """Score a text, write a base and read it; compute no logits for the first half."""
    chunks = np.random.default_rng(1).integers(0, 5, (3, size)).astype(np.int32)
    first = size // 2
    places = range(first, size - 1)
    expected = [
        -log_softmax(Sequence.table[place, chunk[place]])[chunk[place + 1]] for chunk in chunks for place in places
    ]
    for piece, asked in ((1000, [(first, "none"), (size - 1 - first, "all")]), (8, None), (1, None)):
        monkeypatch.setattr(perplexity, "RUN_TOKENS", piece)
        opened.made.pieces.clear()
        with PerplexityRunner("m", SIZE, 3) as reader:
            for results in (reader.predict(chunks), reader.predict(chunks, tmp_path / str(piece))):
                np.testing.assert_allclose(list(results)[-1].nll, expected, rtol=1e-5)
            base = LogitsFile.open(tmp_path / str(piece))
            compared = list(reader.compare(base))[-1]
        assert asked is None or opened.made.pieces == asked * 9
        assert max(count for count, _ in opened.made.pieces) <= piece
        np.testing.assert_array_equal(base.rows, LogitsFile.open(tmp_path / "1000").rows)
        np.testing.assert_allclose(compared.base_nll, expected, atol=1e-3)
        np.testing.assert_allclose(compared.kld, 0, atol=1e-3)
        np.testing.assert_allclose(compared.change, 0, atol=1e-3)
        assert compared.same_top.all() and compared.chunks == 3
        assert {len(each) for each in (compared.kld, compared.change, compared.same_top)} == {len(expected)}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_logits_that_are_not_finite_raise(opened, monkeypatch, tmp_path, number: float):
    monkeypatch.setattr(opened.made, "table", Sequence.table.copy())
    opened.made.table[SIZE - 2] = number
    with (
        PerplexityRunner("m", SIZE, 2) as reader,
        pytest.raises(
            ModelError,
            match=r"^m\.gguf: the logits are not finite; check the weights",
        ),
    ):
        list(reader.predict(np.ones((1, SIZE), np.int32), tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


def test_a_base_does_not_overwrite_the_model(opened, tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    opened.files = [str(model)]
    with PerplexityRunner("m", SIZE, 1) as reader, pytest.raises(UsageError):
        next(reader.predict(np.ones((1, SIZE), np.int32), model))
    assert model.read_bytes() == b"weights" and opened.made.pieces == []


def test_the_logits_file_has_the_layout_of_llama_perplexity(tmp_path):
    chunks = np.arange(14, dtype=np.int32).reshape(2, 7)
    rows = np.arange(2 * 3 * 8, dtype="<u2").reshape(2, 3, 8)  # of 3 tokens each, for a vocabulary of 3
    with LogitsWriter(tmp_path / "x", chunks, 3) as writer:
        for chunk in rows:
            writer.write(chunk)
    data = (tmp_path / "x").read_bytes()
    assert data == b"_logits_" + struct.pack("<3i", 7, 3, 2) + chunks.tobytes() + rows.tobytes()
    logits = LogitsFile.open(tmp_path / "x")
    assert logits.vocab_size == 3
    np.testing.assert_array_equal(logits.chunks, chunks)
    np.testing.assert_array_equal(logits.rows, rows)
    for bad, reason in [
        (b"", "not a logits file"),
        (b"X" + data[1:], "not a logits file"),
        (data[:-1], "incomplete"),
        (data[:30], "incomplete"),
        (data[:8] + struct.pack("<3i", 7, -3, 2) + data[20:], "damaged"),
        (data[:8] + struct.pack("<3i", 2**31 - 1, 2**31 - 1, 2**31 - 1) + data[20:], "incomplete"),
    ]:
        (tmp_path / "x").write_bytes(bad)
        with pytest.raises(ModelError, match=reason):
            LogitsFile.open(tmp_path / "x")


def test_an_unfinished_logits_file_does_not_appear(tmp_path, tiny):
    (tmp_path / "x").write_text("old")
    with PerplexityRunner(tiny, SIZE, 1) as reader:
        results = reader.predict(split_chunks(reader.tokenizer.encode(TEXT), SIZE, 3), tmp_path / "x")
        next(results)
        results.close()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x": "old"}


def test_a_full_disk_is_reported_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(logits_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**6))
    with pytest.raises(LocalllmError, match=r"0\.1 GB, but only 0\.0 GB are free; lower --chunks"):
        LogitsWriter(tmp_path / "x", np.zeros((2, 512), np.int32), 100_000)
    assert list(tmp_path.iterdir()) == []


def test_a_model_diverges_from_others_but_not_from_itself(tmp_path, tiny, other):
    with PerplexityRunner(tiny, SIZE, 2) as reader:
        first = list(reader.predict(split_chunks(reader.tokenizer.encode(TEXT), SIZE, 3), tmp_path / "x"))[-1]
        base = LogitsFile.open(tmp_path / "x")
        same = list(reader.compare(base))[-1]
    np.testing.assert_array_equal(same.nll, first.nll)
    np.testing.assert_allclose(same.base_nll, first.nll, atol=1e-3)
    np.testing.assert_allclose(same.kld, 0, atol=1e-4)
    assert same.same_top.all()
    with PerplexityRunner(other, SIZE, 2) as reader:
        assert [result.chunks for result in reader.compare(base, 2)] == [1, 2]
        unlike = list(reader.compare(base))[-1]
    np.testing.assert_allclose(unlike.nll, exact_nll(other, base.chunks), rtol=1e-4)
    p, q = (log_softmax(engine_logits(path, base.chunks)) for path in (tiny, other))
    np.testing.assert_allclose(unlike.kld, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-3)
    np.testing.assert_array_equal(unlike.same_top, p.argmax(axis=1) == q.argmax(axis=1))
    np.testing.assert_allclose(unlike.change, np.exp(-unlike.nll) - np.exp(-first.nll), atol=1e-5)


def engine_logits(path: str, chunks: np.ndarray) -> np.ndarray:
    """Return the logits of the scored tokens by the reference: float32 [tokens, vocab]."""
    engine = open_engine(path, backend="reference")
    return np.concatenate([engine.forward(chunk, 0, "all")[SIZE // 2 : -1] for chunk in chunks])


def test_a_base_of_another_vocabulary_is_refused(tmp_path, tiny):
    with LogitsWriter(tmp_path / "x", np.zeros((1, 7), np.int32), 3) as writer:
        writer.write(np.zeros((3, 8), "<u2"))
    with (
        PerplexityRunner(tiny, 7, 1) as reader,
        pytest.raises(UsageError, match=r"same vocabulary \(found 3 and 268"),
    ):
        next(reader.compare(LogitsFile.open(tmp_path / "x")))


# ---- the figures of llama-perplexity --------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.slow
def test_perplexity_equals_that_of_llama_perplexity(shared: Path, monkeypatch):
    """Score SmolLM2, dequantized to F32; llama.cpp 0.5.0 prints [1]28.7254,[2]43.0314,[3]39.6456,[4]40.4651."""
    path = shared / "models" / "smollm2-135m-instruct-q4_1.gguf"
    monkeypatch.setattr(GGUFFile, "open", classmethod(lambda cls, path, open=GGUFFile.open: exact(open(path))))
    with PerplexityRunner(path, 512, None) as reader:
        tokens = reader.tokenizer.encode(read_text(shared / "text" / "tinyshakespeare.txt"), bos=True)
        values = [result.perplexity[0] for result in reader.predict(split_chunks(tokens, 512, 4))]
    np.testing.assert_allclose(values, [28.7254, 43.0314, 39.6456, 40.4651], rtol=2e-4)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(cli):
    """Run `localllm perplexity` in this process: arguments to (exit code, stdout, stderr)."""
    return partial(cli, "perplexity")


def test_perplexity_prints_its_result_or_json(cli, tiny, text):
    code, out, err = cli(tiny, text, "-c", SIZE, "--chunks", 2, "-t", 1)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"PPL = \d+\.\d{4} ± \d+\.\d{4} \(2 chunks of 40 tokens\)\n", out)
    code, as_json, err = cli(tiny, text, "-c", SIZE, "--chunks", 2, "-t", 1, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(as_json)
    assert facts.keys() == {"model", "context", "chunks", "tokens", "perplexity", "error"}
    assert out.startswith(f"PPL = {facts['perplexity']:.4f} ± {facts['error']:.4f}")


def test_perplexity_prints_the_comparison_with_a_base(cli, tiny, other, text, tmp_path):
    saved = tmp_path / "logits"
    assert cli(tiny, text, "-c", SIZE, "--save-logits", saved)[0] == 0
    code, out, err = cli(other, "--kl-divergence", "--base", saved, "--chunks", 3)
    assert (code, err) == (0, "")
    assert re.search(r"^PPL = .* \(3 chunks of 40 tokens\)$", out, re.MULTILINE)
    for line in (
        "PPL of the base = ",
        "PPL / PPL of the base = ",
        "mean KL divergence = ",
        "same top token = ",
        "50%  ",
    ):
        assert f"\n{line}" in out
    facts = json.loads(cli(other, "--kl-divergence", "--base", saved, "--json")[1])
    assert facts["kld"]["mean"] > 0.1
    assert facts["kld"].keys() >= {"mean", "error", "maximum", "99.9", "99", "95", "90", "50", "10", "5", "1"}


@pytest.mark.parametrize(
    ("code", "arguments", "reason"),
    [
        (2, ["TINY"], "TEXT is missing"),
        (2, ["TINY", "TEXT", "-c", "3"], "-c must be 4 or greater"),
        (2, ["TINY", "TEXT", "-c", "0"], "-c must be 4 or greater"),
        (2, ["TINY", "TEXT", "--chunks", "0"], "1 or greater"),
        (2, ["TINY", "TEXT", "-c", "100000"], "one chunk needs 100000"),
        (2, ["TINY", "--kl-divergence"], "be given together"),
        (2, ["TINY", "--base", "x"], "be given together"),
        (2, ["TINY", "TEXT", "--kl-divergence", "--base", "x"], "leave out TEXT"),
        (2, ["TINY", "TEXT", "--save-logits", "missing/x"], "missing does not exist"),
        (2, ["TINY", "missing.txt"], "missing.txt: cannot be read: No such file"),
        (2, ["TINY", "--kl-divergence", "--base", "missing"], "missing: cannot be read: No such file"),
        (3, ["TINY", "--kl-divergence", "--base", "TINY"], "not a logits file"),
        (3, ["missing.gguf", "TEXT"], "missing.gguf"),
    ],
)
def test_invalid_command_lines_of_perplexity_are_refused(cli, tiny, text, code, arguments, reason):
    exit_code, out, err = cli(*[{"TINY": tiny, "TEXT": text}.get(word, word) for word in arguments])
    assert (exit_code, out) == (code, "")
    assert re.fullmatch(rf"(localllm: warning: .*\n)?localllm: error: .*{reason}.*\n", err)


def test_ctrl_c_prints_the_result_so_far(cli, monkeypatch, tiny, text, tmp_path):
    def interrupted(self, chunks, save):
        yield from list(PerplexityRunner.real_predict(self, chunks[:1]))
        raise KeyboardInterrupt

    monkeypatch.setattr(PerplexityRunner, "real_predict", PerplexityRunner.predict, raising=False)
    monkeypatch.setattr(PerplexityRunner, "predict", interrupted)
    monkeypatch.setattr(main.os, "_exit", sys.exit)
    code, out, err = cli(tiny, text, "-c", SIZE)
    assert (code, err) == (130, "")
    assert re.fullmatch(r"PPL = .* \(1 chunk of 40 tokens\)\n", out)


@pytest.mark.parametrize("name", ["perplexity", "bench"])
def test_rope_options_reach_perplexity_and_bench(name: str, cli, tiny: str, tmp_path: Path, monkeypatch):
    opened = list[object]()

    def open_model(*arguments: object, rope: object = None, **more: object):
        opened.append(rope)
        return api.open_model(*arguments, rope=rope, **more)  # type: ignore[misc]

    monkeypatch.setattr(perplexity if name == "perplexity" else bench, "open_model", open_model)
    (tmp_path / "t").write_text("hello world, this is a text to predict. " * 9)
    words = [tmp_path / "t", "-c", "32"] if name == "perplexity" else ["-p", "0", "-n", "2", "-r", "1"]
    outputs = []
    for more in ([], ["--rope-scaling", "linear", "--rope-freq-scale", "0.25"]):
        code, out, _ = cli.func(name, tiny, *words, "-t", "1", *more)
        outputs.append(out)
        assert code == 0
    assert opened == [None, RopeScaling("linear", 4.0)]
    if name == "perplexity":
        assert outputs[0] != outputs[1]
