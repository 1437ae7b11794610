"""Test `localllm imatrix`: sums compared with the reference, files, merging, and continuing after interruptions."""

import json
import re
import struct
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from checkpoint import spelled_out, write_family
from engines import open_engine
from invoked import invoke
from kernel_calls import caller, count, for_any_parts, normal, output, padded, written
from project import GOLDENS, SUPPORT
from tiny_model import LAYERS, WIDTH, damage, exact, finish, write_tiny_model

from localllm.arch import load_architecture
from localllm.cli import main
from localllm.cli.commands import imatrix as command
from localllm.engine.embedding_runner import EmbeddingRunner
from localllm.engine.options import EngineOptions
from localllm.engine.sequence import Sequence
from localllm.engine.trace import imatrix_collector as observe
from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.imatrix_file import (
    ImportanceMatrix,
    SquaredActivations,
    get_positive_integer,
    load_imatrix,
    read_imatrix,
    write_imatrix,
)
from localllm.files.text_file import read_text
from localllm.quant.recipes import get_role, is_quantized
from localllm.quantizing import imatrix
from localllm.quantizing.imatrix import ImportanceCollector, merge_files
from localllm.services.evaluation.scores import add_bos, split_chunks
from localllm.text.tokenizer import Tokenizer

TEXT = " ".join(f"hello world {number}, wor rld" for number in range(60))
SIZE = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def squares(matrices: int, columns: int, tokens: float = 8.0) -> SquaredActivations:
    sums = np.abs(normal(matrices, columns))
    return SquaredActivations(sums, np.full(matrices, tokens))


def same(one: ImportanceMatrix, two: ImportanceMatrix) -> None:
    """Check that two matrices are equal, bit for bit."""
    assert one.squares.keys() == two.squares.keys()
    for name, ours in one.squares.items():
        np.testing.assert_array_equal(ours.sums, two.squares[name].sums)
        np.testing.assert_array_equal(ours.counts, two.squares[name].counts)
    assert (one.chunks, one.chunk_size) == (two.chunks, two.chunk_size)


# ---- the sums -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def call():
    return caller(["add_squares", "add_expert_squares"])


@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("columns", [1, 16, 64, 70, 576])
def test_squares_of_activations_are_added_by_column(call, tokens, columns):
    x, before = normal(tokens, columns), np.abs(normal(columns))

    def compute(parts):
        sums, memory = output(1, columns), padded(x)
        sums[0, :columns] = before
        arguments = {"x": memory, "stride": memory.strides[0], "columns": columns, "sums": sums}
        call("add_squares", parts, count=count(tokens), **arguments)
        return written(sums, 1, columns)[0]

    np.testing.assert_allclose(for_any_parts(compute), before + (x.astype(np.float64) ** 2).sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("columns", [1, 64, 70])
def test_squares_of_experts_are_added_to_their_own_sums(call, columns):
    """Experts 2 and 0 have rows, two and one; expert 1 has none."""
    x, before = normal(5, columns), np.abs(normal(3, columns))
    active = np.array([[0, 0, 2], [2, 3, 1]], np.int64)

    def compute(parts):
        sums, memory, counts = output(3, columns), padded(x), np.zeros(3, np.int64)
        sums[:3, :columns] = before
        arguments = {"x": memory, "stride": memory.strides[0], "columns": columns, "sums": sums}
        arguments |= {"sums_stride": sums.strides[0], "counts": counts, "active": active}
        call("add_expert_squares", parts, active_count=count(2), **arguments)
        assert counts.tolist() == [2, 0, 1]
        return written(sums, 3, columns)

    added = np.stack([(x[:2] ** 2).sum(axis=0), np.zeros(columns), x[3] ** 2])
    np.testing.assert_allclose(for_any_parts(compute), before + added, rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["qwen3moe", "llama4", "deepseek3"])
def test_experts_get_the_sums_of_their_own_rows(variant: str, tmp_path: Path):
    """Expect one row of sums and a token count for each expert from the reference, too."""
    model = converted(variant, tmp_path)
    tokens, collected = np.random.default_rng(0).integers(3, 250, 90), {}
    for backend in ("cpu", "reference"):
        observer = observe.ImatrixCollector()
        open_engine(model, context=90, kv_type="f32", backend=backend, observer=observer).forward(tokens, 0)
        collected[backend] = observer.pop_sums(), observer.pop_counts()
    (ours, counts), (theirs, expected) = collected["cpu"], collected["reference"]
    assert ours.keys() == theirs.keys() and counts.keys() == expected.keys()
    stacks = [name for name in ours if "_exps" in name]
    assert stacks and set(stacks) <= counts.keys()
    for name, sums in ours.items():
        np.testing.assert_allclose(sums, theirs[name], rtol=2e-4, atol=1e-6)
    for name in counts:
        np.testing.assert_array_equal(counts[name], expected[name])
        assert ours[name].shape == (len(counts[name]), GGUFFile.open(model).tensors[name].shape[-1])
        assert not ours[name][counts[name] == 0].any()


def converted(variant: str, folder: Path) -> Path:
    """Convert a tiny checkpoint of checkpoints.json to F32."""
    facts = json.loads((GOLDENS / "checkpoints.json").read_text())[variant]
    checkpoint = write_family(folder / "checkpoint", facts["config"], spelled_out(facts["shapes"]))
    invoke("quantize", checkpoint, folder / "model.gguf", "F32")
    return folder / "model.gguf"


# What llama-imatrix (November 2026) makes of the model and the text below: `-c 128 -b 128 -ub 128 --chunks 3`.
OF_EXPERTS = {
    "blk.1.ffn_down_exps.weight": ([130, 283, 77, 278], [
        [2.7741, 1.3886, 24.0841], [32.8011, 1.6446, 6.4581], [131.8838, 3.268, 0.6387],
        [26.8728, 549.9562, 43.7424]]),
    "blk.0.ffn_up_exps.weight": ([171, 129, 259, 209], [
        [67.6102, 78.6133, 27.6206], [43.0929, 63.5257, 28.3279], [96.4455, 155.0717, 39.3216],
        [79.7056, 108.394, 26.4781]]),
}  # fmt: skip


def test_importance_of_experts_agrees_with_llama_imatrix(tmp_path: Path):
    """Expect a row and a count for each expert, which `quantize` uses."""
    model, out, text = converted("qwen3moe", tmp_path), tmp_path / "m.imatrix", tmp_path / "text.txt"
    text.write_text((SUPPORT / "prose.txt").read_text(encoding="utf-8")[:3000], encoding="utf-8")
    invoke("imatrix", model, text, "-o", out, "--chunks", "3", "--ctx-size", "128")
    squares = read_imatrix(out).squares
    assert squares["blk.0.attn_q.weight"].counts.tolist() == [384]
    for name, (counts, sums) in OF_EXPERTS.items():
        assert squares[name].counts.tolist() == counts
        np.testing.assert_allclose(squares[name].sums[:, :3], sums, rtol=1e-3)
    small = [tmp_path / f"{name}.gguf" for name in ("plain", "weighted")]
    for path, words in zip(small, ([], ["--imatrix", out]), strict=True):
        invoke("quantize", model, path, "Q4_0", *words)
    plain, weighted = (GGUFFile.open(path).tensors["blk.0.ffn_down_exps.weight"].data for path in small)
    assert (plain != weighted).any()


def test_the_engine_collects_the_sums_of_the_reference(tiny):
    tokens = np.random.default_rng(0).integers(0, 260, 600)
    observers = {"cpu": observe.ImatrixCollector(), "reference": observe.ImatrixCollector()}
    for backend, observer in observers.items():
        engine = open_engine(tiny, context=600, kv_type="f32", backend=backend, observer=observer)
        for logits in ("none", "all", "last"):  # two batches each
            engine.forward(tokens, 0, logits)
    ours, theirs = observers["cpu"].pop_sums(), observers["reference"].pop_sums()
    assert len(ours) == 7 * LAYERS + 1
    assert ours.keys() == theirs.keys()
    for name, sums in ours.items():
        assert sums.shape == GGUFFile.open(tiny).tensors[name].shape[1:]
        np.testing.assert_allclose(sums, theirs[name], rtol=1e-4)
    np.testing.assert_array_equal(ours["blk.0.attn_q.weight"], ours["blk.0.attn_v.weight"])
    for observer in observers.values():
        assert all((sums == 0).all() for sums in observer.pop_sums().values()), "counts twice"
    np.testing.assert_allclose(ours["output.weight"].sum(), 601 * WIDTH, rtol=1e-3)  # normed; 600 tokens and one


def test_observing_does_not_change_the_logits(tiny):
    watched, plain = open_engine(tiny, observer=observe.ImatrixCollector()), open_engine(tiny)
    np.testing.assert_array_equal(watched.forward(range(200), 0), plain.forward(range(200), 0))
    assert observe.ImatrixCollector().pop_sums() == {}


def test_all_sequences_are_observed(tiny):
    observer = observe.ImatrixCollector()
    engine = open_engine(tiny, observer=observer)
    engine.forward(range(20), 0, "all")
    engine.sequence().append(range(20, 50), "all")
    apart = observer.pop_sums()
    engine.run([(engine.sequence(), range(20)), (engine.sequence(), range(20, 50))], "all", precise=True)
    for name, sums in observer.pop_sums().items():
        np.testing.assert_allclose(sums, apart[name], rtol=1e-3)


def test_threads_do_not_change_the_sums(tiny):
    results = []
    for threads in (1, 2, 3):
        observer = observe.ImatrixCollector()
        open_engine(tiny, threads=threads, observer=observer).forward(range(200), 0)
        results.append(observer.pop_sums())
    for result in results[1:]:
        for name, sums in results[0].items():
            np.testing.assert_array_equal(result[name], sums)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_imatrix_files_have_the_layout_of_llama_cpp(tmp_path):
    stack = SquaredActivations(np.abs(normal(3, 5)), np.array([4.0, 0.0, 8.0]))
    one = squares(1, 5, 16.0)
    matrix = ImportanceMatrix({"blk.0.b.weight": stack, "blk.0.a.weight": one}, ["x.txt", "y.txt"], 2, 512)
    write_imatrix(tmp_path / "x", matrix)
    reader = gguf.GGUFReader(tmp_path / "x")
    assert {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")} == {
        "general.type": "imatrix",
        "imatrix.datasets": ["x.txt", "y.txt"],
        "imatrix.chunk_count": 2,
        "imatrix.chunk_size": 512,
    }
    kinds = {key: field.types for key, field in reader.fields.items()}
    number, string = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.STRING
    assert kinds["imatrix.chunk_count"] == kinds["imatrix.chunk_size"] == [number]
    assert kinds["imatrix.datasets"] == [gguf.GGUFValueType.ARRAY, string]
    assert [(tensor.name, tensor.shape.tolist()) for tensor in reader.tensors] == [
        ("blk.0.a.weight.in_sum2", [5]),
        ("blk.0.a.weight.counts", [1]),
        ("blk.0.b.weight.in_sum2", [5, 3]),
        ("blk.0.b.weight.counts", [1, 3]),
    ]
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}
    np.testing.assert_array_equal(reader.tensors[2].data, stack.sums)
    np.testing.assert_array_equal(reader.tensors[3].data, [[4], [0], [8]])
    same(read_imatrix(tmp_path / "x"), matrix)
    means = load_imatrix(tmp_path / "x")
    np.testing.assert_array_equal(means["blk.0.a.weight"], one.sums[0] / np.float32(16))
    np.testing.assert_array_equal(means["blk.0.b.weight"][[0, 2]], stack.sums[[0, 2]] / np.float32([[4], [8]]))
    np.testing.assert_array_equal(means["blk.0.b.weight"][1], np.ones(5))  # an expert about which nothing is known


def test_imatrix_files_of_other_programs_are_read(tmp_path):
    """Newer ones have sums of activations too; some have one count for a stack; chunk counts may be missing."""
    writer = gguf.GGUFWriter(tmp_path / "x", "llama")
    writer.add_tensor("blk.0.a.weight.in_sum", normal(4))
    writer.add_tensor("blk.0.a.weight.in_sum2", np.full((2, 4), 6, np.float32))
    writer.add_tensor("blk.0.a.weight.counts", np.full(1, 3, np.float32))
    finish(writer)
    matrix = read_imatrix(tmp_path / "x")
    assert (list(matrix.squares), list(matrix.datasets), matrix.chunks, matrix.chunk_size) == (
        ["blk.0.a.weight"], [], 0, 512,
    )  # fmt: skip
    np.testing.assert_array_equal(load_imatrix(tmp_path / "x")["blk.0.a.weight"], np.full((2, 4), 2))


def legacy(entries: dict[str, tuple[int, np.ndarray]], rest: bytes) -> bytes:
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<2i", calls, len(values))
        data += values.astype("<f4").tobytes()
    return data + rest


def test_the_legacy_layout_is_read(tmp_path):
    values = np.abs(normal(7))
    end = struct.pack("<2i", 4, 5) + b"x.txt"
    (tmp_path / "x").write_bytes(legacy({"blk.0.a.weight": (4, 4 * values), "b": (1, values)}, end))
    matrix = read_imatrix(tmp_path / "x")
    assert (matrix.chunks, list(matrix.datasets)) == (4, ["x.txt"])
    assert matrix.squares["blk.0.a.weight"].counts.tolist() == [2048]
    means = load_imatrix(tmp_path / "x")
    np.testing.assert_allclose(means["blk.0.a.weight"], values, rtol=1e-6)
    np.testing.assert_allclose(means["b"], values, rtol=1e-6)
    (tmp_path / "x").write_bytes(legacy({"b": (1, values)}, b""))
    assert read_imatrix(tmp_path / "x").datasets == []


@pytest.mark.parametrize(
    ("entry", "rest", "counts"),
    [
        ((1, 1), b"", 512), ((0, 1), b"", 512), ((3, 1), b"", 1536), ((-1, 1), b"", None), ((1, 0), b"", None),
        ((1, 2), b"", None), ((1, -1), b"", None), ((1, 1), struct.pack("<i", 7), 512),
        ((1, 1), struct.pack("<i", -7), 512), ((1, 1), struct.pack("<ii", 7, 0), 512), ((1, 1), b"123", None),
        ((1, 1), struct.pack("<ii", 7, 3) + b"x.t", 512), ((1, 1), struct.pack("<ii", 7, 4) + b"x.t", None),
        ((1, 1), struct.pack("<ii", 7, -1) + b"x.t", None), ((1, 1), struct.pack("<ii", 7, 2) + b"x.t", 512),
        ((1, 1), struct.pack("<ii", 7, 1) + b"\xff", None),
    ],
)  # fmt: skip
def test_legacy_files_with_invalid_counts_or_lengths_are_refused(
    tmp_path, entry: tuple[int, int], rest: bytes, counts: int | None
):
    head = struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", *entry)
    (tmp_path / "x").write_bytes(head + np.float32([2]).tobytes() + rest)
    if counts is None:
        with pytest.raises(ModelError, match=f"^{re.escape(str(tmp_path / 'x'))}: not an importance matrix of llama"):
            read_imatrix(tmp_path / "x")
        return
    matrix = read_imatrix(tmp_path / "x")
    assert matrix.squares["a"].counts.tolist() == [counts] and matrix.squares["a"].sums.tolist() == [[1024]]
    assert (matrix.chunks, matrix.chunk_size) == (7 if rest[:1] == b"\7" else 0, 512)
    assert list(matrix.datasets) == ([rest[8 : 8 + rest[4]].decode()] if len(rest) > 8 else [])


def test_files_that_are_no_importance_matrix_are_refused(tmp_path, tiny):
    good = legacy({"a": (1, np.ones(3))}, b"")
    with_nan = legacy({"a": (1, np.array([1, np.nan, 1]))}, b"")
    negative = legacy({"a": (1, np.array([1, -1, 1]))}, b"")
    bad = [b"", b"x", b"\0" * 64, b"\xff" * 64, *(good[:end] for end in range(len(good))), with_nan, negative]
    for data in [*bad, struct.pack("<i", 10**9) + good[4:], b"GGUF" + bytes(60)]:
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(ModelError):
            read_imatrix(tmp_path / "x")
    with pytest.raises(ModelError, match="not an importance matrix"):
        read_imatrix(tiny)
    with pytest.raises(UsageError, match="No such file"):
        read_imatrix(tmp_path / "missing")


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a.in_sum2": np.ones(4)}, "sums and counts"),
        ({"a.in_sum2": np.ones(4), "a.counts": np.ones(2)}, "one count per row"),
        ({"a.in_sum2": np.ones(4), "a.counts": -np.ones(1)}, "one count per row"),
        ({"a.in_sum2": np.full(4, np.inf), "a.counts": np.ones(1)}, "must not be negative"),
    ],
)
def test_inconsistent_imatrix_tensors_are_refused(tmp_path, tensors, reason):
    writer = gguf.GGUFWriter(tmp_path / "x", "llama")
    for name, values in tensors.items():
        writer.add_tensor(name, values.astype(np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=reason):
        read_imatrix(tmp_path / "x")


def test_merging_adds_sums_counts_and_chunks(tmp_path):
    one = ImportanceMatrix({"a": squares(1, 4), "b": squares(2, 4)}, ["x"], 2, 4)
    two = ImportanceMatrix({"a": squares(1, 4, 32.0), "c": squares(1, 3)}, ["y", "x"], 4, 8)
    write_imatrix(tmp_path / "1", one)
    write_imatrix(tmp_path / "2", two)
    both = merge_files([tmp_path / "1", tmp_path / "2"])
    assert (both.chunks, both.chunk_size, list(both.datasets)) == (10, 4, ["x", "y"])
    np.testing.assert_array_equal(both.squares["a"].sums, one.squares["a"].sums + two.squares["a"].sums)
    assert both.squares["a"].counts.tolist() == [40]
    assert one.merge(ImportanceMatrix({"c": squares(1, 3)})).chunks == 2, "a matrix without a chunk count adds none"
    np.testing.assert_array_equal(both.squares["b"].sums, one.squares["b"].sums)
    with pytest.raises(UsageError, match="are of different models: a is"):
        one.merge(ImportanceMatrix({"a": squares(1, 5)}))


# ---- collecting -----------------------------------------------------------------------------------------------------


def collected(path: str, chunks: np.ndarray) -> dict[str, np.ndarray]:
    """Return mean squares by the reference."""
    observer = observe.ImatrixCollector()
    engine = open_engine(path, backend="reference", observer=observer)
    for chunk in chunks:
        engine.forward(chunk, 0, "all")
    return {name: sums / chunks.size for name, sums in observer.pop_sums().items()}


@pytest.mark.parametrize("output", [False, True])
def test_collected_squares_agree_with_the_reference(tmp_path, tiny, text, output):
    chunks = split_chunks(Tokenizer.from_file(tiny).encode(TEXT), SIZE, 3)
    with ImportanceCollector(tiny, [text], tmp_path / "out", SIZE, 3, output=output, threads=2) as collector:
        assert (collector.total, collector.done) == (3, 0)
        assert list(collector.read()) == [1, 2, 3]
        result = collector.compute_matrix()
    assert (result.chunks, result.chunk_size, list(result.datasets), result.run) == (3, SIZE, [text], "")
    exact = collected(tiny, chunks)
    assert result.squares.keys() == {name for name in exact if output or name != "output.weight"}
    for name, ours in result.squares.items():
        assert ours.counts.tolist() == [3 * SIZE]
        np.testing.assert_allclose(ours.average()[0], exact[name], rtol=2e-3)  # keys and values are f16


def test_a_collector_without_chunks_has_no_result(tmp_path, tiny, text):
    with ImportanceCollector(tiny, [text], tmp_path / "out", size=32) as collector:
        assert collector.done == 0 and collector.total > 0
        with pytest.raises(UsageError, match=r"^no chunk has been processed yet"):
            collector.compute_matrix()
    assert not (tmp_path / "out.part").exists()


def test_several_texts_are_concatenated(tmp_path, tiny):
    for name, content in (("a", TEXT[:100]), ("b", TEXT[100:300])):
        (tmp_path / name).write_text(content)
    tokenizer = Tokenizer.from_file(tiny)
    tokens = tokenizer.encode(TEXT[:100]) + tokenizer.encode(TEXT[100:300])
    with ImportanceCollector(tiny, [tmp_path / "a", tmp_path / "b"], tmp_path / "out", SIZE) as collector:
        np.testing.assert_array_equal(collector._chunks, split_chunks(tokens, SIZE))


def read_all(*arguments, after: int = 10**9) -> ImportanceMatrix:
    """Collect all chunks, or stop after some."""
    with ImportanceCollector(*arguments, threads=1) as collector:  # type: ignore[misc]
        for done in (reading := collector.read()):
            if done >= after:
                reading.close()
                break
        return collector.compute_matrix()


@pytest.mark.parametrize("save_every", [0, 10])
def test_an_interrupted_run_continues_to_the_same_sums(monkeypatch, tmp_path, tiny, text, save_every):
    monkeypatch.setattr(imatrix, "SAVE_EVERY", save_every)
    whole = read_all(tiny, [text], tmp_path / "whole", SIZE, 5)
    out, part = tmp_path / "out", tmp_path / "out.part"
    assert read_all(tiny, [text], out, SIZE, 5, after=2).chunks == 2
    assert len(read_imatrix(part).squares) == 7 * LAYERS  # others can read it too
    with ImportanceCollector(tiny, [text], out, SIZE, 5, threads=1) as collector:
        assert (collector.done, collector.total) == (2, 5)
    same(read_all(tiny, [text], out, SIZE, 5), whole)
    assert not out.exists()


def test_an_interruption_within_a_chunk_repeats_the_chunk(monkeypatch, tmp_path, tiny, text):
    whole = read_all(tiny, [text], tmp_path / "whole", SIZE, 3)
    append, calls = Sequence.append, []

    def failing(self, *arguments):
        result = append(self, *arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Sequence, "append", failing)
    with ImportanceCollector(tiny, [text], tmp_path / "out", SIZE, 3, threads=1) as collector:
        with pytest.raises(KeyboardInterrupt):
            list(collector.read())
        assert collector.done == 1
        list(collector.read())  # the same engine, whose sums hold the interrupted chunk
        same(collector.compute_matrix(), whole)


def test_a_run_with_other_arguments_starts_anew(tmp_path, tiny, text):
    out = tmp_path / "out"
    read_all(tiny, [text], out, SIZE, 5, after=2)
    for different in ((tiny, [text], out, SIZE, 4), (tiny, [text], out, SIZE - 1, 5), (tiny, [text, text], out, SIZE)):
        with ImportanceCollector(*different, threads=1) as collector:  # type: ignore[misc]
            assert collector.done == 0
    (tmp_path / "out.part").write_bytes(b"damaged")
    with ImportanceCollector(tiny, [text], out, SIZE, 5, threads=1) as collector:
        assert collector.done == 0


def test_a_model_with_infinite_weights_is_refused(tmp_path, text):
    """Check this although no logits are computed."""
    path = damage(write_tiny_model(tmp_path / "tiny.gguf"), "blk.1.attn_output.weight")
    reason = r"tiny\.gguf: .* blk\.1\.ffn_gate\.weight is not finite"
    with (
        ImportanceCollector(path, [text], tmp_path / "out", SIZE) as collector,
        pytest.raises(ModelError, match=reason),
    ):
        list(collector.read())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "tiny.gguf"]


@pytest.mark.sampled
@pytest.mark.slow
def test_importance_agrees_with_llama_imatrix(shared: Path, monkeypatch, tmp_path):
    """SmolLM2, dequantized to F32, 2 chunks, with llama.cpp 0.5.0: mean over the columns, largest column, its mean."""
    figures = {
        "blk.0.attn_q.weight": (0.00219448618, 471, 0.2354841530),
        "blk.7.attn_output.weight": (0.0318475994, 387, 0.8728944063),
        "blk.15.ffn_gate.weight": (0.0214390846, 247, 3.6908342838),
        "blk.29.ffn_down.weight": (16.6050033253, 347, 1739.9460449),
    }
    path = shared / "models" / "smollm2-135m-instruct-q4_1.gguf"
    monkeypatch.setattr(GGUFFile, "open", classmethod(lambda cls, path, open=GGUFFile.open: exact(open(path))))
    text = tmp_path / "text"
    text.write_text(read_text(shared / "text" / "tinyshakespeare.txt")[:10000])
    matrix = read_all(path, [text], tmp_path / "out", 512, 2)
    assert len(matrix.squares) == 210
    for name, (average, place, largest) in figures.items():
        mean = matrix.squares[name].average()[0]
        assert mean.mean(dtype=np.float64) == pytest.approx(average, rel=1e-3)
        assert (mean.argmax(), mean.max()) == (place, pytest.approx(largest, rel=1e-3))


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(cli):
    """Run `localllm imatrix` within this process: arguments to (exit code, stdout, stderr)."""
    return partial(cli, "imatrix")


def test_imatrix_writes_the_same_bytes_again_for_any_threads(cli, tmp_path, tiny, text):
    out = tmp_path / "out.gguf"
    assert cli(tiny, text, "-o", out, "-c", SIZE, "--chunks", 3, "-t", 1) == (0, "", "")
    matrix, before = read_imatrix(out), out.read_bytes()
    assert (len(matrix.squares), matrix.chunks, matrix.chunk_size) == (7 * LAYERS, 3, SIZE)
    assert cli(tiny, text, "-o", out, "-c", SIZE, "--chunks", 3, "-t", 2)[0] == 0
    assert out.read_bytes() == before


def test_imatrix_adds_to_files_and_merges_them(cli, tmp_path, tiny, text):
    out, second, both = tmp_path / "out.gguf", tmp_path / "2.gguf", tmp_path / "both.gguf"
    assert cli(tiny, text, "-o", out, "-c", SIZE, "--chunks", 3, "-t", 1) == (0, "", "")
    assert cli(tiny, text, "-o", second, "-c", SIZE, "--chunks", 2, "--in-file", out, "-t", 1) == (0, "", "")
    assert read_imatrix(second).chunks == 5
    assert cli("-o", both, "--in-file", out, "--in-file", second) == (0, "", "")
    same(read_imatrix(both), read_imatrix(out).merge(read_imatrix(second)))
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "out.gguf", "2.gguf", "both.gguf"}


def test_progress_continues_at_the_chunk_of_the_interruption(monkeypatch):
    """Interrupt after four of ten chunks."""
    shown: list[str] = []
    monkeypatch.setattr(command.ProgressLine, "show", lambda line, text: shown.append(text))
    command.collect_with_progress(
        SimpleNamespace(total=10, done=4, read=lambda: iter(range(5, 11))), command.ProgressLine()
    )
    assert shown[0] == "reading: chunk 5 of 10"
    assert [text.partition(",")[0] for text in shown[1:]] == [f"reading: chunk {done} of 10" for done in range(5, 11)]
    assert shown[-1] == "reading: chunk 10 of 10, 0 s left"


def test_an_interruption_is_reported_after_the_progress_line_is_cleared(monkeypatch):
    events: list[str] = []

    def interrupted():
        yield 5
        raise KeyboardInterrupt

    for name in ("show", "clear"):
        monkeypatch.setattr(command.ProgressLine, name, lambda line, *text, name=name: events.append(name))
    monkeypatch.setattr(command, "say_dim", lambda text: events.append(text))
    with pytest.raises(KeyboardInterrupt):
        command.collect_with_progress(SimpleNamespace(total=10, done=4, read=interrupted), command.ProgressLine())
    reported = next(place for place, event in enumerate(events) if event.startswith("4 of 10 chunks are done"))
    assert events[reported - 1] == "clear" and "show" not in events[reported:]


def test_ctrl_c_keeps_the_finished_chunks_for_the_next_run(cli, monkeypatch, tmp_path, tiny, text):
    arguments = (tiny, text, "-o", tmp_path / "out", "-c", SIZE, "--chunks", 4, "-t", 1)
    read = ImportanceCollector.read

    def interrupted(self):
        for done in (chunks := read(self)):
            yield done
            if done == 2:
                chunks.close()
                raise KeyboardInterrupt

    monkeypatch.setattr(main.os, "_exit", sys.exit)
    monkeypatch.setattr(ImportanceCollector, "read", interrupted)
    assert cli(*arguments) == (130, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.part", "text.txt"]
    started = []
    monkeypatch.setattr(ImportanceCollector, "read", lambda self: started.append(self.done) or read(self))
    assert cli(*arguments) == (0, "", "")
    assert started == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]
    same(read_imatrix(tmp_path / "out"), read_all(tiny, [text], tmp_path / "whole", SIZE, 4))


@pytest.mark.parametrize(
    ("code", "arguments", "reason"),
    [
        (2, ["TINY", "TEXT"], "-o"),
        (2, ["-o", "OUT"], "MODEL is missing"),
        (2, ["TINY", "-o", "OUT"], "TEXT is missing"),
        (2, ["TINY", "TEXT", "-o", "OUT", "-c", "9999"], "one chunk needs 9999"),
        (2, ["TINY", "TEXT", "-o", "OUT", "--chunks", "0"], "1 or greater"),
        (2, ["TINY", "TEXT", "-o", "TINY"], "the output is also an input"),
        (2, ["TINY", "TEXT", "-o", "TEXT"], "the output is also an input"),
        (2, ["TINY", "TEXT", "-o", "missing/x"], "missing does not exist"),
        (2, ["TINY", "missing.txt", "-o", "OUT"], "missing.txt"),
        (3, ["missing.gguf", "TEXT", "-o", "OUT"], "missing.gguf"),
        (2, ["-o", "OUT", "--in-file", "missing"], "missing: cannot be read: No such file"),
        (3, ["TINY", "TEXT", "-o", "OUT", "--in-file", "TINY"], "not an importance matrix"),
    ],
)
def test_invalid_imatrix_arguments_are_refused_in_one_line(cli, tmp_path, tiny, text, code, arguments, reason):
    names = {"TINY": tiny, "TEXT": text, "OUT": tmp_path / "out"}
    before = Path(tiny).read_bytes()
    got, out, err = cli(*[names.get(word, word) for word in arguments])
    assert (got, out) == (code, "")
    assert re.fullmatch(rf"(localllm: warning: .*\n)?localllm: error: .*{reason}.*\n", err)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    assert Path(tiny).read_bytes() == before


def test_a_file_that_cannot_be_written_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(LocalllmError):
        write_imatrix(tmp_path / "out", ImportanceMatrix({"a": squares(1, 4)}))


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1), (300, 300), (0, 512), (-3, 512), ("8", 512), (2.0, 512), (None, 512)]
)
def test_chunk_sizes_in_files_are_positive_or_assumed(value: object, expected: int):
    assert get_positive_integer({"imatrix.chunk_size": value}, "imatrix.chunk_size", 512) == expected
    assert get_positive_integer({}, "imatrix.chunk_size", 512) == 512


# ---- models that make vectors


@pytest.fixture(scope="module", params=["gemma-embedding", "bert", "bert-rank", "jina-bert", "t5encoder"])
def encoder(request, tmp_path_factory) -> Path:
    """Convert a tiny embedding model or reranker."""
    folder = tmp_path_factory.mktemp("encoder")
    facts = json.loads((GOLDENS / "checkpoints.json").read_text())[request.param]
    write_family(folder / "model", facts["config"], spelled_out(facts["shapes"]))
    invoke("quantize", folder / "model", folder / "model.gguf", "F32")
    return folder / "model.gguf"


def test_matrices_of_encoders_get_the_sums_of_the_reference(encoder: Path, cli, tmp_path, text):
    """Check also those after pooling, which low-bit types need."""
    out = tmp_path / "out.gguf"
    code, _, err = cli(encoder, text, "-o", out, "-c", 24, "--chunks", 4)
    assert code == 0, err
    matrix, file = read_imatrix(out), GGUFFile.open(encoder)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    expected = dict[str, np.ndarray]()
    for pooling in ("rank", "mean") if "cls.weight" in file.tensors else ("mean",):
        observer = observe.ImatrixCollector()
        runner = EmbeddingRunner(file, pooling, EngineOptions(context=24, backend="reference", observer=observer))
        for chunk in split_chunks(tokenizer.encode(TEXT, bos=True), 24, 4):
            runner.read([add_bos(chunk, tokenizer)])
        expected |= observer.pop_sums()
    assert matrix.squares.keys() == expected.keys() and len(expected) >= 8 and matrix.chunks == 4
    quantized = {name for name, tensor in file.tensors.items() if is_quantized(name, tensor.shape)}
    assert {name for name in quantized - expected.keys() if get_role(name) != "embedding"} == set()
    after = expected.keys() & {"dense_2.weight", "dense_3.weight", "cls.weight", "cls.output.weight"}
    assert all(matrix.squares[name].counts.tolist() == [4 if name in after else 4 * 24] for name in expected)
    for name, sums in expected.items():
        np.testing.assert_allclose(matrix.squares[name].sums[0], sums, rtol=2e-3, atol=1e-3 * sums.max())
    assert {job for job in expected if "attn_q" in job or "attn_qkv" in job}


def test_a_model_with_encoder_and_decoder_is_refused(cli, tmp_path, text):
    facts = json.loads((GOLDENS / "checkpoints.json").read_text())["t5"]
    write_family(tmp_path / "model", facts["config"], spelled_out(facts["shapes"]))
    invoke("quantize", tmp_path / "model", tmp_path / "model.gguf", "F32")
    code, _, err = cli(tmp_path / "model.gguf", text, "-o", tmp_path / "out", "-c", 24)
    assert (
        code == 3 and "importance matrices of t5 models, which have an encoder and a decoder, are not supported" in err
    )


def test_a_chunk_longer_than_an_encoders_context_is_refused(encoder: Path, cli, tmp_path, text):
    code, _, err = cli(encoder, text, "-o", tmp_path / "out", "-c", 10**6)
    assert code == 2 and re.search(r"must be at most \d+ for this model", err)
    assert imatrix.get_default_chunk_size(encoder) == min(512, load_architecture(GGUFFile.open(encoder))[1].context)
