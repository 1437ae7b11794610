"""Test quantized files: types by plan, importance, metadata."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import gguf
import numpy as np
import pytest

from localllm.errors import ModelError, UsageError
from localllm.files.cache.array_log import ArrayLog
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.tensor_source import count_rows
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.quant.encode import ENCODERS, encode
from localllm.quant.formats import BY_NAME, RECIPES
from localllm.quant.recipes import RecipeOptions
from localllm.quantizing import plan as quantize_plan
from localllm.quantizing import quantize as service
from localllm.quantizing.plan import CHUNK_WEIGHTS, COPY, QuantizeRequest, make_plan
from localllm.quantizing.quantize import ClampedWeights, derive_output, open_source, parse_override
from tests.unit.quantizing.quantize_parts import (
    QUICK,
    REST,
    SHAPES,
    arrays,
    quantized,
    values,
    write_imatrix,
    write_model,
)


@pytest.mark.parametrize("recipe", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K"])
def test_a_file_has_the_planned_formats_and_the_weights(recipe: str, model: Path, tmp_path: Path):
    file = quantized(model, tmp_path / "x.gguf", recipe)
    plan = make_plan(open_source(str(model)), QuantizeRequest(RECIPES[recipe]))
    assert {name: t.format.name for name, t in file.tensors.items()} == {
        j.tensor.name: j.format.name for j in plan.jobs
    }
    assert os.path.getsize(file.path) == plan.nbytes
    assert plan.bits_per_weight == pytest.approx(8 * file.nbytes / file.parameters)
    bound = {"F32": 0, "F16": 1e-7, "BF16": 1e-5, "Q8_0": 1e-4, "Q6_K": 1e-3, "Q4_K_M": 1e-2, "Q4_0": 1e-2}[recipe]
    for name, array in arrays().items():
        error = np.mean((values(file)[name] - array) ** 2) / np.mean(array**2)
        assert error <= (0 if array.ndim == 1 else bound), name


def test_experts_are_encoded_one_by_one(model: Path, tmp_path: Path):
    """Let no range cross from one matrix of a stack to the next."""
    got = quantized(model, tmp_path / "x.gguf", "Q8_0").tensors["blk.1.ffn_gate_exps.weight"].data
    for expert, weights in enumerate(arrays()["blk.1.ffn_gate_exps.weight"]):
        np.testing.assert_array_equal(got[expert], encode("Q8_0", weights))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_are_encoded_as_float32(dtype: str, model: Path, tmp_path: Path):
    quantized(model, tmp_path / "half.gguf", {"float16": "F16", "bfloat16": "BF16"}[dtype])
    file, half = quantized(tmp_path / "half.gguf", tmp_path / "x.gguf", "Q8_0"), GGUFFile.open(tmp_path / "half.gguf")
    for name, tensor in file.tensors.items():
        if tensor.format.name == "Q8_0":
            weights = values(half)[name].reshape(count_rows(tensor.shape), -1)
            importance = own_importance(weights) if name == "output.weight" else None
            np.testing.assert_array_equal(tensor.data.reshape(len(weights), -1), encode("Q8_0", weights, importance))


def own_importance(weights: np.ndarray) -> np.ndarray:
    """Return the mean squares of a matrix's columns."""
    return (weights.astype(np.float32) ** 2).mean(axis=0)


def test_the_logits_matrix_is_weighted_by_its_own_columns(model: Path, tmp_path: Path):
    """Weight a tied embedding too, but not one whose rows are only looked up."""
    output, embedding = "output.weight", "token_embd.weight"
    tied = write_model(tmp_path / "tied.gguf", {name: array for name, array in arrays().items() if name != output})
    for path, name, counts in ((model, output, True), (model, embedding, False), (tied, embedding, True)):
        data = quantized(path, tmp_path / "x.gguf", "Q4_1", options=RecipeOptions(pure=True)).tensors[name].data
        weights = arrays()[name]
        expected = encode("Q4_1", weights, own_importance(weights) if counts else None)
        assert (data == expected).mean() > 0.99  # means are rounded in another order


def test_metadata_is_kept_and_completed(model: Path, tmp_path: Path):
    overrides = [parse_override(text) for text in ("made.block_count=int:3", "x.y=str:a:b=c", "x.z=bool:true")]
    overrides += [parse_override("made.rope.freq_base=float:0.5"), parse_override("x.negative=int:-4")]
    file, before = quantized(model, tmp_path / "x.gguf", "Q4_K_M", overrides=overrides), GGUFFile.open(model)
    changed = {"general.file_type": 15, "general.quantization_version": 2, "made.block_count": 3, "x.y": "a:b=c"}
    changed |= {"x.z": True, "made.rope.freq_base": 0.5, "x.negative": -4}
    assert {key: file.metadata[key] for key in changed} == changed
    assert file.metadata.keys() == before.metadata.keys() | changed
    for key in before.metadata.keys() - changed:
        assert bytes(file.packed[key]) == bytes(before.packed[key])
    for key in ("made.block_count", "made.rope.freq_base"):
        assert bytes(file.packed[key][:4]) == bytes(before.packed[key][:4])


def test_overrides_keep_the_integer_types_of_the_file(tmp_path: Path):
    write_model(tmp_path / "m.gguf", **{"a.byte": np.uint8(1), "a.long": np.uint64(1), "a.double": np.float64(1)})
    texts = ["a.byte=int:300", "a.long=int:5", "a.double=float:0.1"]
    request = QuantizeRequest(COPY, overrides=[parse_override(text) for text in texts])
    (metadata, _), *_ = make_plan(open_source(str(tmp_path / "m.gguf")), request).files
    assert [metadata[key][0] for key in ("a.byte", "a.long", "a.double")] == [4, 10, 12]


@pytest.mark.parametrize("text", ["", "a", "a=1", "a=int:x", "a=bool:1", "=int:1", "a=long:1"])
def test_invalid_overrides_are_refused(text: str):
    with pytest.raises(UsageError, match="expected KEY=TYPE:VALUE"):
        parse_override(text)


def test_copying_keeps_tensors_and_bytes(tmp_path: Path):
    write_model(tmp_path / "a.gguf", arrays(np.float16))
    quantized(tmp_path / "a.gguf", tmp_path / "b.gguf", "COPY")
    quantized(tmp_path / "b.gguf", tmp_path / "c.gguf", "COPY")
    a, b = GGUFFile.open(tmp_path / "a.gguf"), GGUFFile.open(tmp_path / "b.gguf")
    assert b.metadata["general.file_type"] == 0 and a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        np.testing.assert_array_equal(tensor.data, b.tensors[name].data)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()


@pytest.mark.parametrize("recipe", ["COPY", "Q8_0"])
def test_integer_tensors_are_copied_by_every_recipe(recipe: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(quantize_plan, "CHUNK_WEIGHTS", 1 << 12)
    numbers = np.arange(100 * 64, dtype=np.int32).reshape(100, 64)
    write_model(tmp_path / "a.gguf", arrays() | {"blk.0.ids": numbers})
    b = quantized(tmp_path / "a.gguf", tmp_path / "b.gguf", recipe)
    np.testing.assert_array_equal(b.tensors["blk.0.ids"].data.view(np.int32), numbers)


def test_threads_and_ranges_do_not_change_the_bytes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(quantize_plan, "CHUNK_WEIGHTS", 1 << 12)
    write_model(tmp_path / "m.gguf")
    files = []
    for number, (threads, chunk) in enumerate([(1, 1 << 12), (3, 1 << 12), (3, 1 << 12), (2, CHUNK_WEIGHTS), (2, 1)]):
        monkeypatch.setattr(quantize_plan, "CHUNK_WEIGHTS", chunk)
        quantized(tmp_path / "m.gguf", tmp_path / f"{number}.gguf", "Q4_K_M", threads)
        files.append((tmp_path / f"{number}.gguf").read_bytes())
    assert len(set(files)) == 1


def test_quantized_files_are_quantized_again_only_if_allowed(model: Path, tmp_path: Path):
    quantized(model, tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(UsageError, match=r"tensor output\.weight is Q8_0 already; --allow-requantize"):
        quantized(tmp_path / "q8.gguf", tmp_path / "x.gguf", "Q4_0")
    again = quantized(tmp_path / "q8.gguf", tmp_path / "x.gguf", "Q4_0", allow_requantize=True)
    original = values(GGUFFile.open(tmp_path / "q8.gguf"))["blk.0.attn_v.weight"]
    np.testing.assert_array_equal(again.tensors["blk.0.attn_v.weight"].data, encode("Q4_0", original))
    quantized(tmp_path / "q8.gguf", tmp_path / "y.gguf", "Q8_0")  # nothing to do but to copy


def test_encoded_rows_of_an_earlier_run_are_written_unchanged(model: Path, tmp_path: Path, monkeypatch):
    """Check ranges, and that progress counts them from the beginning."""
    monkeypatch.setattr(quantize_plan, "CHUNK_WEIGHTS", 1 << 12)
    plan, progress = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q8_0"])), []
    known = {
        job.tensor.name: job for job in plan.jobs if job.tensor.name in ("blk.1.ffn_gate_exps.weight", "output.weight")
    }
    kept = {
        name: np.random.default_rng(3).integers(
            0, 256, count_rows(job.tensor.shape) * job.format.row_bytes(256), np.uint8
        )
        for name, job in known.items()
    }
    assert all(len(list(job.divide_rows())) > 1 for job in known.values())
    with ArrayLog(tmp_path / "records", "key") as done:
        for name, data in kept.items():
            done.add(name, data)
        service.write_model(
            plan,
            [str(tmp_path / "x.gguf")],
            2,
            lambda count, name: progress.append((count, name)),
            None,
            ClampedWeights(),
            done,
        )
    usual, file = quantized(model, tmp_path / "usual.gguf", "Q8_0"), GGUFFile.open(tmp_path / "x.gguf")
    for name, tensor in file.tensors.items():
        expected = kept.get(name, usual.tensors[name].data.reshape(-1))
        np.testing.assert_array_equal(tensor.data.reshape(-1), expected)
    count, expected = sum(count_rows(SHAPES[name]) * 256 for name in known), []
    for job in plan.jobs:
        for first, last in job.divide_rows():
            count += 0 if job.tensor.name in known else (last - first) * job.tensor.shape[-1]
            expected.append((count, job.tensor.name))
    assert progress == expected and count == sum(count_rows(shape) * shape[-1] for shape in SHAPES.values())


class AtOnce:
    """An executor that runs tasks at once and counts them."""

    def __init__(self, threads: int, name: str):
        self.told, self.count, self.ended = (threads, name), 0, None

    def submit(self, task: Callable[[], object]) -> "Future[object]":
        self.count += 1
        future = Future()
        future.set_result(task())
        return future

    def shutdown(self, **options: bool) -> None:
        self.ended = options


def test_encoding_runs_two_ranges_ahead_of_the_writer(model: Path, monkeypatch):
    """Pages are released when their rows are written; tasks that have not begun are cancelled at the end."""
    monkeypatch.setattr(service, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(quantize_plan, "CHUNK_WEIGHTS", 1 << 12)
    jobs, forgotten = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["F32"])).jobs, []
    monkeypatch.setattr(
        type(jobs[0].tensor), "release_rows", lambda tensor, *rows: forgotten.append((tensor.name, *rows))
    )
    monkeypatch.setattr(
        service,
        "encode_new_rows",
        lambda widener, job, importance, clamped, first, last: (job.tensor.name, first, last),
    )
    expected = [(job.tensor.name, *rows) for job in jobs for rows in job.divide_rows()]
    with service.EncodingPipeline(jobs, None, 3, ClampedWeights()) as pipeline:
        pool, got = pipeline._executor, []
        assert (pool.told, pool.count) == ((3, "quantize"), 0)
        for job in jobs:
            for piece in pipeline.encode_chunks(job, lambda count, name: None):
                got.append(piece)
                assert pool.count == min(len(got) + 4, len(expected)) and forgotten == expected[: len(got) - 1]
        assert got == forgotten == expected
    assert pool.ended == {"wait": True, "cancel_futures": True}


@pytest.mark.sampled("name")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_every_type_is_dequantized_as_by_gguf(name: str):
    format = BY_NAME[name]
    columns = 7 if format.block == 1 else 2 * format.block
    blocks = np.random.default_rng(1).integers(0, 256, (5, format.row_bytes(columns)), np.uint8)
    blocks &= 0xBF  # no exponent is that of infinity
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(format.id)).astype(np.float32)
    np.testing.assert_array_equal(RowDequantizer([format]).dequantize(format, blocks, columns), expected)


def test_rows_that_do_not_fit_fall_back_or_fail_with_strict(model: Path, tmp_path: Path):
    plan = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q4_K_S"]))
    assert [job.tensor.name for job in plan.jobs if job.is_fallback] == ["blk.0.ffn_up.weight"]
    assert plan.warnings == [
        "fallback format: blk.0.ffn_up.weight: Q5_0 instead of Q4_K, because the row length is not a multiple of 256"
    ]
    with pytest.raises(ModelError, match=r"--strict: blk\.0\.ffn_up\.weight: Q5_0 instead of Q4_K"):
        make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q4_K_S"], strict=True))
    make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q4_0"], strict=True))


def test_types_without_an_encoder_are_refused(model: Path, monkeypatch):
    monkeypatch.delitem(ENCODERS, "Q6_K")
    with pytest.raises(UsageError, match="would become Q6_K, which localllm cannot encode yet"):
        make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q6_K"]))


@pytest.mark.parametrize(
    ("path", "recipe", "expected"),
    [
        ("a/model.gguf", "Q4_K_M", "a/model-Q4_K_M.gguf"),
        ("model-F16.gguf", "Q8_0", "model-Q8_0.gguf"),
        ("model.f16.gguf", "Q8_0", "model-Q8_0.gguf"),
        ("a/model-BF16-00001-of-00003.gguf", "Q6_K", "a/model-Q6_K.gguf"),
        ("strange", "F16", "strange-F16.gguf"),
    ],
)
def test_the_default_output_replaces_the_type_in_the_name(path: str, recipe: str, expected: str):
    assert derive_output(path, RECIPES[recipe]) == expected


def test_the_default_output_of_a_folder_is_beside_it(tmp_path: Path, monkeypatch):
    (tmp_path / "Model-1B").mkdir()
    monkeypatch.chdir(tmp_path / "Model-1B")
    for path in (".", str(tmp_path / "Model-1B"), f"{tmp_path}/Model-1B/"):
        assert derive_output(path, RECIPES["Q8_0"]) == str(tmp_path / "Model-1B-Q8_0.gguf")


def test_importance_reaches_the_encoder_and_the_metadata(model: Path, importance, tmp_path: Path):
    imatrix = write_imatrix(tmp_path / "i.gguf", importance)
    file = quantized(model, tmp_path / "x.gguf", "Q4_1", imatrix=imatrix)
    for name, mean in importance.items():
        weights = arrays()[name].reshape(len(mean), -1, mean.shape[1])
        expected = [encode("Q4_1", matrix, row) for matrix, row in zip(weights, mean, strict=True)]
        np.testing.assert_array_equal(file.tensors[name].data.reshape(np.shape(expected)), expected)
    keys = {"file": imatrix, "dataset": "text", "entries_count": 3, "chunks_count": 3}
    assert {key: file.metadata[f"quantize.imatrix.{key}"] for key in keys} == keys


def test_included_and_excluded_weights_select_the_importance(model: Path, importance, tmp_path: Path):
    imatrix = write_imatrix(tmp_path / "i.gguf", importance)
    used = {
        key: {job.tensor.name for job in make_plan(open_source(str(model)), request).jobs if job.importance is not None}
        for key, request in {
            "include": QuantizeRequest(RECIPES["Q4_1"], imatrix=imatrix, include=["ffn_down", "attn_q"]),
            "exclude": QuantizeRequest(RECIPES["Q4_1"], imatrix=imatrix, exclude=["ffn_down", "attn_q"]),
        }.items()
    }
    assert used["include"] == {"blk.0.ffn_down.weight"} and used["exclude"] == importance.keys() - used["include"]
    for named in ({"include": ["a"]}, {"include": ["a"], "exclude": ["b"], "imatrix": imatrix}):
        with pytest.raises(UsageError, match="exclude"):
            make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q4_1"], **named))


def test_importance_of_another_model_is_refused(model: Path, importance, tmp_path: Path):
    importance["blk.0.ffn_down.weight"] = np.ones((1, 256), np.float32)
    imatrix = write_imatrix(tmp_path / "i.gguf", importance)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_down\.weight: the importance matrix has the shape \[1, 256\]"):
        make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q4_1"], imatrix=imatrix))


def test_missing_importance_is_warned_of(model: Path, importance, tmp_path: Path):
    imatrix = write_imatrix(tmp_path / "i.gguf", importance)
    lines = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q2_K_S"], imatrix=imatrix)).warnings
    assert any("does not have blk.0.ffn_up.weight and 1 more" in line for line in lines)
    lines = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q2_K_S"])).warnings
    assert any("Q2_K_S is poor without an importance matrix" in line for line in lines)
