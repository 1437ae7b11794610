"""Making small files from big ones: what is in them, and that nothing is lost on the way."""

import errno
import itertools
import mmap
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from project import ROOT
from selection import everything
from system_calls import SystemCalls
from terminal import Terminal
from tiny_model import write_tiny_model

from localllm.cli.commands import quantize as quantize_command
from localllm.cli.main import main
from localllm.cli.options.quantizing import CalibrationGroup
from localllm.cli.terminal import quantize_progress
from localllm.cli.terminal.output import ProgressLine
from localllm.cli.terminal.quantize_progress import Stages
from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.cache.array_log import ArrayLog
from localllm.files.gguf import tensor_source as source
from localllm.files.gguf.file import GGUFFile, map_of
from localllm.files.gguf.tensor_source import GGUFTensor, row_count
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.files.safe_file import SafeFile
from localllm.kernels.dequantize_rows import Widener, can_widen
from localllm.quant.encode import ENCODERS, encode
from localllm.quant.formats import BY_NAME, FORMATS, RECIPES
from localllm.quant.recipes import Options
from localllm.quantizing import plan as quantize_plan
from localllm.quantizing import quantize as service
from localllm.quantizing import scale_folding as folding
from localllm.quantizing.mixed_precision import plan as by_need
from localllm.quantizing.plan import CHUNK, COPY, QuantizeRequest, make_plan
from localllm.quantizing.quantize import ClampedWeights, default_output, open_source, parse_override, run
from localllm.services.inspection import validate as finite
from tests.integration.test_cli import posix

MADE = {
    "general.architecture": "made",
    "general.file_type": 0,
    "general.name": "Test",
    "made.block_count": 2,
    "made.attention.head_count": 4,
    "made.attention.head_count_kv": 2,
    "made.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "hybriddna",
    "tokenizer.ggml.tokens": ["a", b"\xff", "c"],
}
SHAPES = {
    "token_embd.weight": (40, 256),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_v.weight": (64, 256),
    "blk.0.ffn_down.weight": (256, 512),
    "blk.0.ffn_up.weight": (96, 320),
    "blk.1.attn_v.weight": (64, 256),
    "blk.1.ffn_gate_exps.weight": (3, 8, 256),
    "blk.1.attn_q.bias": (64,),
    "output.weight": (40, 256),
}


def arrays(dtype=np.float32) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    made = {name: generator.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {name: array.astype(dtype) if array.ndim > 1 else array for name, array in made.items()}


def write_model(path: Path, weights: dict[str, np.ndarray] | None = None, **metadata) -> Path:
    weights = arrays() if weights is None else weights
    write_gguf(path, MADE | metadata, [OutputTensor.of(name, array) for name, array in weights.items()])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model-F32.gguf")


def quantized(path: Path, target: Path, recipe: str, threads: int = 2, **request) -> GGUFFile:
    """The file that becomes of it."""
    asked = QuantizeRequest(COPY if recipe == "COPY" else RECIPES[recipe], **request)
    run(make_plan(open_source(str(path)), asked), str(target), asked, threads, lambda done, name: None)
    return GGUFFile.open(target)


def values(file: GGUFFile) -> dict[str, np.ndarray]:
    """All weights, by the gguf package."""
    return {
        name: gguf.dequantize(np.asarray(t.data), gguf.GGMLQuantizationType(t.format.id)).reshape(t.shape)
        for name, t in file.tensors.items()
    }


# ---- what is in the file


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
    """Chunks do not cross from one matrix of a stack to the next, and each is what the encoder makes of it."""
    got = quantized(model, tmp_path / "x.gguf", "Q8_0").tensors["blk.1.ffn_gate_exps.weight"].data
    for expert, weights in enumerate(arrays()["blk.1.ffn_gate_exps.weight"]):
        np.testing.assert_array_equal(got[expert], encode("Q8_0", weights))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_from_16_bits(dtype: str, model: Path, tmp_path: Path):
    quantized(model, tmp_path / "half.gguf", {"float16": "F16", "bfloat16": "BF16"}[dtype])
    file, half = quantized(tmp_path / "half.gguf", tmp_path / "x.gguf", "Q8_0"), GGUFFile.open(tmp_path / "half.gguf")
    for name, tensor in file.tensors.items():
        if tensor.format.name == "Q8_0":
            weights = values(half)[name].reshape(row_count(tensor.shape), -1)
            importance = own_importance(weights) if name == "output.weight" else None
            np.testing.assert_array_equal(tensor.data.reshape(len(weights), -1), encode("Q8_0", weights, importance))


def own_importance(weights: np.ndarray) -> np.ndarray:
    """The mean squares of a matrix's columns."""
    return (weights.astype(np.float32) ** 2).mean(axis=0)


def test_columns_of_the_matrix_that_makes_logits_count_by_their_weights(model: Path, tmp_path: Path):
    """Also if it is the embedding; but not an embedding whose rows are only picked."""
    output, embedding = "output.weight", "token_embd.weight"
    tied = write_model(tmp_path / "tied.gguf", {name: array for name, array in arrays().items() if name != output})
    for path, name, counts in ((model, output, True), (model, embedding, False), (tied, embedding, True)):
        data = quantized(path, tmp_path / "x.gguf", "Q4_1", options=Options(pure=True)).tensors[name].data
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


def test_overrides_keep_the_type_that_readers_expect(tmp_path: Path):
    write_model(tmp_path / "m.gguf", **{"a.byte": np.uint8(1), "a.long": np.uint64(1), "a.double": np.float64(1)})
    texts = ["a.byte=int:300", "a.long=int:5", "a.double=float:0.1"]
    asked = QuantizeRequest(COPY, overrides=[parse_override(text) for text in texts])
    (metadata, _), *_ = make_plan(open_source(str(tmp_path / "m.gguf")), asked).files
    assert [metadata[key][0] for key in ("a.byte", "a.long", "a.double")] == [4, 10, 12]


@pytest.mark.parametrize("text", ["", "a", "a=1", "a=int:x", "a=bool:1", "=int:1", "a=long:1"])
def test_overrides_that_make_no_sense(text: str):
    with pytest.raises(UsageError, match="expected KEY=TYPE:VALUE"):
        parse_override(text)


def test_a_copy_is_the_same(tmp_path: Path):
    write_model(tmp_path / "a.gguf", arrays(np.float16))
    quantized(tmp_path / "a.gguf", tmp_path / "b.gguf", "COPY")
    quantized(tmp_path / "b.gguf", tmp_path / "c.gguf", "COPY")
    a, b = GGUFFile.open(tmp_path / "a.gguf"), GGUFFile.open(tmp_path / "b.gguf")
    assert b.metadata["general.file_type"] == 0 and a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        np.testing.assert_array_equal(tensor.data, b.tensors[name].data)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()


@pytest.mark.parametrize("recipe", ["COPY", "Q8_0"])
def test_whole_numbers_stay_as_they_are(recipe: str, tmp_path: Path, monkeypatch):
    """Also in several pieces: no weights can be made of them."""
    monkeypatch.setattr(quantize_plan, "CHUNK", 1 << 12)
    numbers = np.arange(100 * 64, dtype=np.int32).reshape(100, 64)
    write_model(tmp_path / "a.gguf", arrays() | {"blk.0.ids": numbers})
    b = quantized(tmp_path / "a.gguf", tmp_path / "b.gguf", recipe)
    np.testing.assert_array_equal(b.tensors["blk.0.ids"].data.view(np.int32), numbers)


def test_again_and_with_other_threads_the_same_bytes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(quantize_plan, "CHUNK", 1 << 12)
    write_model(tmp_path / "m.gguf")
    made = []
    for number, (threads, chunk) in enumerate([(1, 1 << 12), (3, 1 << 12), (3, 1 << 12), (2, CHUNK), (2, 1)]):
        monkeypatch.setattr(quantize_plan, "CHUNK", chunk)
        quantized(tmp_path / "m.gguf", tmp_path / f"{number}.gguf", "Q4_K_M", threads)
        made.append((tmp_path / f"{number}.gguf").read_bytes())
    assert len(set(made)) == 1


def test_quantized_files_only_if_asked(model: Path, tmp_path: Path):
    quantized(model, tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(UsageError, match=r"tensor output\.weight is Q8_0 already; --allow-requantize"):
        quantized(tmp_path / "q8.gguf", tmp_path / "x.gguf", "Q4_0")
    again = quantized(tmp_path / "q8.gguf", tmp_path / "x.gguf", "Q4_0", allow_requantize=True)
    original = values(GGUFFile.open(tmp_path / "q8.gguf"))["blk.0.attn_v.weight"]
    np.testing.assert_array_equal(again.tensors["blk.0.attn_v.weight"].data, encode("Q4_0", original))
    quantized(tmp_path / "q8.gguf", tmp_path / "y.gguf", "Q8_0")  # nothing to do but to copy


# ---- what is searched ahead


def test_what_is_encoded_already_is_not_searched(model: Path, tmp_path: Path, monkeypatch):
    """Its bytes are taken as they were kept, in pieces, too; how far the work is counts them from the beginning."""
    monkeypatch.setattr(quantize_plan, "CHUNK", 1 << 12)
    plan, told = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q8_0"])), []
    known = {
        job.tensor.name: job for job in plan.jobs if job.tensor.name in ("blk.1.ffn_gate_exps.weight", "output.weight")
    }
    kept = {
        name: np.random.default_rng(3).integers(
            0, 256, row_count(job.tensor.shape) * job.format.row_bytes(256), np.uint8
        )
        for name, job in known.items()
    }
    assert all(len(list(job.ranges())) > 1 for job in known.values())
    with ArrayLog(tmp_path / "records", "key") as done:
        for name, data in kept.items():
            done.add(name, data)
        service.write(
            plan,
            [str(tmp_path / "x.gguf")],
            2,
            lambda count, name: told.append((count, name)),
            None,
            ClampedWeights(),
            done,
        )
    usual, file = quantized(model, tmp_path / "usual.gguf", "Q8_0"), GGUFFile.open(tmp_path / "x.gguf")
    for name, tensor in file.tensors.items():
        expected = kept.get(name, usual.tensors[name].data.reshape(-1))
        np.testing.assert_array_equal(tensor.data.reshape(-1), expected)
    count, expected = sum(row_count(SHAPES[name]) * 256 for name in known), []
    for job in plan.jobs:
        for first, last in job.ranges():
            count += 0 if job.tensor.name in known else (last - first) * job.tensor.shape[-1]
            expected.append((count, job.tensor.name))
    assert told == expected and count == sum(row_count(shape) * shape[-1] for shape in SHAPES.values())


class AtOnce:
    """Does what is submitted at once, and counts it."""

    def __init__(self, threads: int, name: str):
        self.told, self.count, self.ended = (threads, name), 0, None

    def submit(self, task: Callable[[], object]) -> "Future[object]":
        self.count += 1
        future = Future()
        future.set_result(task())
        return future

    def shutdown(self, **how: bool) -> None:
        self.ended = how


def test_how_far_ahead_is_searched(model: Path, monkeypatch):
    """Two chunks more than there are threads, over the borders of tensors; a page is forgotten when it is written, and
    what is not begun is not begun any more when the writer has gone."""
    monkeypatch.setattr(service, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(quantize_plan, "CHUNK", 1 << 12)
    jobs, forgotten = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["F32"])).jobs, []
    monkeypatch.setattr(
        type(jobs[0].tensor), "release_rows", lambda tensor, *rows: forgotten.append((tensor.name, *rows))
    )
    monkeypatch.setattr(
        service, "new_rows", lambda widener, job, importance, clamped, first, last: (job.tensor.name, first, last)
    )
    expected = [(job.tensor.name, *rows) for job in jobs for rows in job.ranges()]
    with service.SearchAhead(jobs, None, 3, ClampedWeights()) as pipeline:
        pool, got = pipeline._executor, []
        assert (pool.told, pool.count) == ((3, "quantize"), 0)
        for job in jobs:
            for piece in pipeline.pieces(job, lambda count, name: None):
                got.append(piece)
                assert pool.count == min(len(got) + 4, len(expected)) and forgotten == expected[: len(got) - 1]
        assert got == forgotten == expected
    assert pool.ended == {"wait": True, "cancel_futures": True}


QUICK = ("F32", "F16", "BF16", "Q8_0")  # kernels for all formats take a while to compile
UNKNOWN = ("NVFP4", "Q1_0", "Q2_0")  # to `gguf` 0.19
REST = sorted(name for name, format in BY_NAME.items() if can_widen(format) and name not in (*QUICK, *UNKNOWN))


@pytest.mark.sampled("name")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_every_format_is_read_as_gguf_reads_it(name: str):
    format = BY_NAME[name]
    columns = 7 if format.block == 1 else 2 * format.block
    blocks = np.random.default_rng(1).integers(0, 256, (5, format.row_bytes(columns)), np.uint8)
    blocks &= 0xBF  # no exponent is that of infinity
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(format.id)).astype(np.float32)
    np.testing.assert_array_equal(Widener([format]).widen(format, blocks, columns), expected)


# ---- the plan


def test_rows_that_do_not_fit(model: Path, tmp_path: Path):
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
    with pytest.raises(UsageError, match="would become Q6_K, which localllm cannot make yet"):
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
def test_the_default_name(path: str, recipe: str, expected: str):
    assert default_output(path, RECIPES[recipe]) == expected


def test_the_default_name_of_a_folder(tmp_path: Path, monkeypatch):
    (tmp_path / "Model-1B").mkdir()
    monkeypatch.chdir(tmp_path / "Model-1B")
    for path in (".", str(tmp_path / "Model-1B"), f"{tmp_path}/Model-1B/"):
        assert default_output(path, RECIPES["Q8_0"]) == str(tmp_path / "Model-1B-Q8_0.gguf")


# ---- importance


def write_imatrix(path: Path, sums: dict[str, np.ndarray]) -> str:
    tensors = [OutputTensor.of(f"{name}.in_sum2", np.asarray(array, np.float32)) for name, array in sums.items()]
    tensors += [OutputTensor.of(f"{name}.counts", np.ones((len(array), 1), np.float32)) for name, array in sums.items()]
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": ["text"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 512,
    }
    write_gguf(path, keys, tensors)
    return str(path)


@pytest.fixture
def importance(tmp_path: Path) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(9)
    rows = {"blk.0.ffn_down.weight": (1, 512), "blk.1.ffn_gate_exps.weight": (3, 256), "blk.0.attn_v.weight": (1, 256)}
    return {name: generator.uniform(0, 1, shape).astype(np.float32) ** 4 for name, shape in rows.items()}


def test_importance_reaches_the_encoder(model: Path, importance, tmp_path: Path):
    imatrix = write_imatrix(tmp_path / "i.gguf", importance)
    file = quantized(model, tmp_path / "x.gguf", "Q4_1", imatrix=imatrix)
    for name, mean in importance.items():
        weights = arrays()[name].reshape(len(mean), -1, mean.shape[1])
        expected = [encode("Q4_1", matrix, row) for matrix, row in zip(weights, mean, strict=True)]
        np.testing.assert_array_equal(file.tensors[name].data.reshape(np.shape(expected)), expected)
    keys = {"file": imatrix, "dataset": "text", "entries_count": 3, "chunks_count": 3}
    assert {key: file.metadata[f"quantize.imatrix.{key}"] for key in keys} == keys


def test_the_user_chooses_where_importance_counts(model: Path, importance, tmp_path: Path):
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


def test_importance_of_another_model(model: Path, importance, tmp_path: Path):
    importance["blk.0.ffn_down.weight"] = np.ones((1, 256), np.float32)
    imatrix = write_imatrix(tmp_path / "i.gguf", importance)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_down\.weight: the importance matrix has the shape \[1, 256\]"):
        make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q4_1"], imatrix=imatrix))


def test_what_importance_misses_is_told(model: Path, importance, tmp_path: Path):
    imatrix = write_imatrix(tmp_path / "i.gguf", importance)
    lines = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q2_K_S"], imatrix=imatrix)).warnings
    assert any("does not have blk.0.ffn_up.weight and 1 more" in line for line in lines)
    lines = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q2_K_S"])).warnings
    assert any("Q2_K_S is poor without an importance matrix" in line for line in lines)


# ---- split models


def split(path: Path, folder: Path) -> Path:
    """The model in three files; the first's path."""
    weights = arrays()
    writer = gguf.GGUFWriter(str(folder / "part.gguf"), "llama", split_max_tensors=3)
    writer.add_uint32("llama.block_count", 2)
    for name, array in weights.items():
        writer.add_tensor(name, array)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return folder / "part-00001-of-00003.gguf"


def test_split_files_become_one(tmp_path: Path):
    file = quantized(split(tmp_path, tmp_path), tmp_path / "x.gguf", "Q8_0")
    assert not [key for key in file.metadata if key.startswith("split.")]
    assert file.tensors.keys() == SHAPES.keys()


def test_no_part_has_its_name_before_all_are_on_the_disk(tmp_path: Path, monkeypatch):
    parts, calls = split(tmp_path, tmp_path), SystemCalls(monkeypatch)
    quantized(parts, tmp_path / "x-00001-of-00003.gguf", "COPY", keep_split=True)
    numbers = {(tmp_path / f"x-0000{number}-of-00003.gguf").stat().st_ino for number in (1, 2, 3)}
    first = min(place for place, call in enumerate(calls) if call[0] == "name" and call[1] in numbers)
    assert {number for name, number in calls[:first] if name == "fsync"} >= numbers
    assert calls.of(tmp_path / "x-00003-of-00003.gguf")[-2:] == ["name", "fsync folder"]


def test_split_files_stay_split(tmp_path: Path):
    parts = split(tmp_path, tmp_path)
    file = quantized(parts, tmp_path / "x-00001-of-00003.gguf", "COPY", keep_split=True)
    assert [os.path.basename(name) for name in file.parts] == [f"x-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert list(file.parts.values()) == list(GGUFFile.open(parts).parts.values())
    for name in file.parts:
        fields = gguf.GGUFReader(name).fields
        kinds = [fields[f"split.{key}"].types[0].name for key in ("no", "count", "tensors.count")]
        assert kinds == ["UINT16", "UINT16", "INT32"]
    for name, array in arrays().items():
        np.testing.assert_array_equal(values(file)[name], array)


def test_files_of_a_split_model_are_not_replaced(tmp_path: Path):
    parts = split(tmp_path, tmp_path)
    (tmp_path / "x-00002-of-00003.gguf").write_text("old")
    with pytest.raises(UsageError, match=r"x-00002-of-00003\.gguf: this file exists"):
        quantized(parts, tmp_path / "x.gguf", "Q8_0", keep_split=True)
    with pytest.raises(UsageError, match="the output is an input"):
        quantized(parts, tmp_path / "part.gguf", "Q8_0", keep_split=True)
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == ["pa", "pa", "pa", "x-"]


def test_all_files_of_a_split_model_or_none(tmp_path: Path, monkeypatch):
    parts = split(tmp_path, tmp_path)
    calls = itertools.count()
    real = SafeFile.finish

    def fail(self) -> None:
        if next(calls) == 2:
            raise LocalllmError("refused")
        real(self)

    monkeypatch.setattr(SafeFile, "finish", fail)
    with pytest.raises(LocalllmError, match="refused"):
        quantized(parts, tmp_path / "x.gguf", "COPY", keep_split=True)
    assert {path.name[:4] for path in tmp_path.iterdir()} == {"part"}


# ---- safety


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "blk.0.attn_norm.weight", "blk.1.ffn_gate_exps.weight"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_are_no_numbers_are_refused_by_name(bad: float, name: str, dtype, tmp_path: Path):
    weights = arrays(dtype)
    weights[name][..., -1] = bad
    write_model(tmp_path / "m.gguf", weights)
    (tmp_path / "x.gguf").write_text("old")
    for recipe in ("Q4_0", "COPY"):
        with pytest.raises(ModelError, match=rf"tensor {name}: the weight in row 0, column \d+ is {bad}"):
            quantized(tmp_path / "m.gguf", tmp_path / "x.gguf", recipe)
    assert (tmp_path / "x.gguf").read_text() == "old" and len(list(tmp_path.iterdir())) == 2


def test_huge_weights_are_numbers(tmp_path: Path):
    weights = arrays()
    weights["blk.0.attn_v.weight"][0, :2] = 3e38, -3e38
    write_model(tmp_path / "m.gguf", weights)
    quantized(tmp_path / "m.gguf", tmp_path / "x.gguf", "F32")


def test_the_output_is_not_the_input(model: Path, tmp_path: Path):
    shutil.copy(model, tmp_path / "m.gguf")
    (tmp_path / "soft.gguf").symlink_to("m.gguf")
    os.link(tmp_path / "m.gguf", tmp_path / "hard.gguf")
    for name in ("m.gguf", "soft.gguf", "hard.gguf"):
        with pytest.raises(UsageError, match="the output is an input"):
            quantized(tmp_path / "m.gguf", tmp_path / name, "Q8_0")
        with pytest.raises(UsageError, match="the output is an input"):
            quantized(tmp_path / "soft.gguf", tmp_path / name, "Q8_0")
    assert (tmp_path / "m.gguf").read_bytes() == model.read_bytes()


def test_the_importance_matrix_is_not_replaced(model: Path, importance, tmp_path: Path):
    imatrix = write_imatrix(tmp_path / "i.gguf", importance)
    with pytest.raises(UsageError, match="the output is an input"):
        quantized(model, tmp_path / "i.gguf", "Q8_0", imatrix=imatrix)


def test_a_full_disk_is_seen_before(model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(LocalllmError, match="bytes needed, but only 1000 free"):
        quantized(model, tmp_path / "x.gguf", "Q8_0")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_the_old_file(model: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "x.gguf").write_text("old")
    real, calls = os.write, itertools.count()

    def write(descriptor: int, data) -> int:
        if next(calls) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(LocalllmError, match="No space left on device; nothing was changed"):
        quantized(model, tmp_path / "x.gguf", "Q8_0")
    assert (tmp_path / "x.gguf").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 128 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", folder], capture_output=True).returncode:
        pytest.skip("this user cannot mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(not shutil.which("mount") or os.name != "posix", reason="needs mount")
def test_a_small_file_system(model: Path, small_disk: Path, monkeypatch):
    """A real one: full before the start, and, when the system's answer was too good, in the middle."""
    (small_disk / "x.gguf").write_text("old")
    with pytest.raises(LocalllmError, match="bytes needed"):
        quantized(model, small_disk / "x.gguf", "F16")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, 10**9))
    with pytest.raises(LocalllmError, match="No space left on device"):
        quantized(model, small_disk / "x.gguf", "F16")
    assert (small_disk / "x.gguf").read_text() == "old" and len(list(small_disk.iterdir())) == 1


def test_a_limit_of_the_size(model: Path, tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(LocalllmError, match="File too large"):
            quantized(model, tmp_path / "x.gguf", "Q8_0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


FATE = """
import os, signal, sys
from localllm.cli.main import main
from localllm.quantizing import plan as quantize_plan
quantize_plan.CHUNK = 1 << 12
number, call = int(sys.argv[1]), int(sys.argv[2])
def fatal(function):
    def call_or_die(*arguments, **named):
        global call
        call -= 1
        if call == 0:
            os.kill(os.getpid(), number)
        return function(*arguments, **named)
    return call_or_die
for name in ("write", "fsync", "link"):  # localllm writes one file, and on stderr by other means
    setattr(os, name, fatal(getattr(os, name)))
sys.argv = ["localllm", "quantize", *sys.argv[3:]]
try:
    main()
finally:
    print(-call, file=sys.stderr)
"""


def with_fate(number: int, call: int, model: Path, target: Path) -> subprocess.CompletedProcess:
    """Quantize in a process that sends itself a signal at its `call`-th call that writes, syncs or names the file."""
    command = [sys.executable, "-c", FATE, str(int(number)), str(call), model, target, "Q8_0", "-t", "2", "--force"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def calls(model: Path, tmp_path_factory) -> int:
    """How many such calls there are; the last, which syncs the folder, comes when the new file is there."""
    return int(with_fate(0, 0, model, tmp_path_factory.mktemp("calls") / "x.gguf").stderr)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="elsewhere, a kill leaves a temporary file")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)],
)
def test_ended_at_random_points_the_old_file_is_whole(number: int, code: int, calls: int, model: Path, tmp_path: Path):
    (tmp_path / "x.gguf").write_text("old")
    for call in random.Random().sample(range(1, calls), 3):
        done = with_fate(number, call, model, tmp_path / "x.gguf")
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), (call, done.stderr)
        assert (tmp_path / "x.gguf").read_text() == "old" and len(list(tmp_path.iterdir())) == 1, call


@pytest.mark.parametrize("columns", [10, 20, 80])
def test_the_percentage_is_shown_however_narrow_the_terminal_is(columns: int, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = quantize_progress.Progress({"encoding": 1.0}, ProgressLine())
    progress._display = quantize_progress._Bar(ProgressLine())
    with progress as show:
        show("encoding", 1, 10, "blk.0.attn_q.weight")
        table = progress._display._progress.get_renderable()  # type: ignore[union-attr]
        console = progress._display._progress.console  # type: ignore[union-attr]
        with console.capture() as captured:
            console.print(table)
    assert " 10%" in captured.get()


@pytest.mark.slow
@posix
def test_a_terminal_sees_how_far_it_is(tmp_path: Path):
    """And nothing of that stays; a dumb one sees the last line only."""
    model, out = write_tiny_model(tmp_path / "m.gguf"), tmp_path / "x.gguf"
    for term in ("xterm", "dumb"):
        shown = Terminal("quantize", str(model), str(out), "Q8_0", "--force", TERM=term)
        assert shown.end() == 0, shown.seen
        assert ("%" in shown.seen and "\x1b[2K" in shown.seen) == (term == "xterm"), shown.seen
        assert re.search(r"x\.gguf: .*, \d+\.\d s\r\n", shown.seen)
        assert GGUFFile.open(out).tensors["output.weight"].format.name == "Q8_0"


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path):
    """From outside: old or new, never anything else. The moments go from before the first import to the end."""
    model = write_tiny_model(tmp_path / "m.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "x.gguf").write_text("old")
    command = [sys.executable, "-m", "localllm", "quantize", model, folder / "x.gguf", "Q8_0", "--force"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    new = (folder / "x.gguf").read_bytes()
    for _ in range(20 if everything() else 6):
        (folder / "x.gguf").write_text("old")
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            process.wait(random.uniform(0.1, 1.2))
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        assert (folder / "x.gguf").read_bytes() in (b"old", new)
        assert len(list(folder.iterdir())) == 1


# ---- the command


@pytest.fixture
def command(capfd, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Runs `localllm quantize`; exit code, stdout, stderr."""

    def call(*arguments) -> tuple[int, str, str]:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        monkeypatch.setattr(sys, "argv", ["localllm", "quantize", *map(str, arguments)])
        try:
            with pytest.raises(SystemExit) as end:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return (end.value.code or 0, *capfd.readouterr())

    return call


@pytest.mark.parametrize("arguments", [["q8_0"], ["7"], ["OUT", "Q8_0"], ["OUT", "Q8_0", "1"], ["Q8_0", "2"]])
def test_the_order_of_llama_quantize(arguments: list[str], model: Path, tmp_path: Path, command):
    shutil.copy(model, tmp_path / "m.gguf")
    target = tmp_path / ("out.gguf" if "OUT" in arguments else "m-Q8_0.gguf")
    code, out, err = command(tmp_path / "m.gguf", *[target if word == "OUT" else word for word in arguments])
    assert (code, err) == (0, "") and out.startswith(f"{target}: ") and "bits per weight" in out
    assert GGUFFile.open(target).metadata["general.file_type"] == 7


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["x"], "x is not a type"),
        (["Q8_0", "x", "1", "2"], "expected IN [OUT] TYPE"),
        ([], "expected IN [OUT] TYPE"),
        (["Q8_0", "--tensor-type", "ffn"], "expected REGEX=FORMAT"),
        (["Q8_0", "--tensor-type", "(=Q8_0"], "--tensor-type (=Q8_0:"),
        (["Q8_0", "--output-tensor-type", "Q4_K_M"], "Q4_K_M is a type of whole files, not a tensor format"),
        (["Q8_0", "--output-tensor-type", "Q4_Z"], "Q4_Z is not a tensor format"),
        (["Q8_0", "--override-kv", "a"], "expected KEY=TYPE:VALUE"),
        (["Q8_0", "-t", "0"], "-t must be from 1 to 1024"),
        (["Q8_0", "--include-weights", "a"], "need --imatrix"),
        (["/nowhere/x.gguf", "Q8_0"], "there is no folder /nowhere"),
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], problem: str, model: Path, command):
    code, out, err = command(model, *arguments)
    assert (code, out) == (2, "") and problem in err and err.count("\n") == 1 and err.startswith("localllm: error:")
    assert [path.name for path in model.parent.iterdir()] == [model.name]


def test_a_dry_run_writes_nothing(model: Path, command):
    code, out, err = command(
        model, "q4_k_m", "--dry-run", "--output-tensor-type", "f16", "--tensor-type", "ffn_DOWN=q8_0"
    )
    assert code == 0 and "fallback format: blk.0.ffn_up.weight: Q5_0 instead of Q4_K" in err
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert " F16 " in rows["output.weight"] and "Q8_0" in rows["blk.0.ffn_down.weight"]
    assert "Q5_0 (fallback)" in rows["blk.0.ffn_up.weight"] and "bits per weight" in rows["size"] and "free" in rows
    assert [path.name for path in model.parent.iterdir()] == [model.name]


def test_options_reach_the_service(model: Path, tmp_path: Path, command):
    code, _, err = command(
        model, tmp_path / "x.gguf", "Q4_0", "--leave-output-tensor", "--pure", "--override-kv", "a=int:1"
    )
    file = GGUFFile.open(tmp_path / "x.gguf")
    assert (code, err, file.metadata["a"], file.tensors["output.weight"].format.name) == (0, "", 1, "F32")
    assert {t.format.name for t in file.tensors.values()} == {"F32", "Q4_0"}
    assert command(model, tmp_path / "y.gguf", "Q4_K_M", "--strict")[0] == 3
    assert not (tmp_path / "y.gguf").exists()


def test_formats_of_the_table_are_those_of_gguf():
    """The numbers that go into files."""
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert all(known.get(number, format.name) == format.name for number, format in FORMATS.items())
    assert {number for number in FORMATS if number not in known} <= {42}, "Q2_0, which gguf does not know yet"
    assert service.parse_patterns(["a=q8_0"])[0][1] == "Q8_0" and Options().patterns == ()


def test_which_map_an_array_is_in(tmp_path: Path):
    """Of views of views, too; what is not mapped is in none."""
    (tmp_path / "x").write_bytes(bytes(10_000))
    with open(tmp_path / "x", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    whole = np.frombuffer(mapped, np.uint8)
    for array, start in ((whole, 0), (whole[5000:], 5000), (whole[4096:][10:].view("<u2"), 4106)):
        assert map_of(array) == (mapped, start)
    for array in (np.zeros(5, np.uint8), np.frombuffer(bytes(5), np.uint8), np.zeros(5, np.uint8)[2:]):
        assert map_of(array) is None


def test_rows_that_are_forgotten(tmp_path: Path, monkeypatch):
    """Their place in the file; of what is in no file nothing is."""
    told = []
    monkeypatch.setattr(source.memory, "release_pages", lambda *place: told.append(place))
    file = GGUFFile.open(write_model(tmp_path / "m.gguf"))
    tensor, data = GGUFTensor(file.tensors["blk.1.ffn_gate_exps.weight"]), (tmp_path / "m.gguf").read_bytes()
    tensor.release_rows(3, 5)
    ((mapped, begin, end),) = told
    assert data[begin:end] == tensor.rows(3, 5).tobytes() == mapped[begin:end] and end - begin == 2 * 1024
    assert tensor.rows(3, 5).shape == (2, 1024)
    GGUFTensor(replace(file.tensors["output.weight"], data=np.zeros((40, 1024), np.uint8))).release_rows(0, 40)
    assert len(told) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_weight_that_is_no_number(bad: float):
    """By its row in the tensor and its column."""
    weights = np.zeros((3, 4), np.float32)
    tensor = SimpleNamespace(name="w", format=BY_NAME["F32"], shape=(9, 4), rows=lambda first, last: (first, last))
    widener = SimpleNamespace(widen=lambda format, rows, columns: weights if (rows, columns) == ((5, 8), 4) else None)
    assert finite.dequantize_finite(widener, tensor, 5, 8) is weights
    finite.check_finite(tensor, weights, 5)
    weights[1, 2] = weights[2, 0] = bad
    with pytest.raises(ModelError, match=rf"^tensor w: the weight in row 6, column 2 is {bad}$"):
        finite.dequantize_finite(widener, tensor, 5, 8)


def test_how_far_measuring_is(model: Path, monkeypatch, capsys):
    """Scales first, then formats, which are checked: one progress for all."""
    monkeypatch.setattr(quantize_progress, "EVERY", 0.0)

    def folded(source, request, threads, on_matrix, compiling):
        on_matrix(0, 3, "blk.0.attn_q.weight")
        return source

    def formats(source, request, size, threads, on_matrix, on_check, compiling):
        on_matrix(0, 0, "two\nlines")
        on_check(1, 2, "output.weight")
        return by_need.MixedPrecision({"output.weight": "Q8_0"}, found=0.75, predicted=0.5, usual=0.25)

    monkeypatch.setattr(folding, "fold_scales", folded)
    monkeypatch.setattr(by_need, "choose_formats", formats)
    asked = QuantizeRequest(RECIPES["Q4_K_M"], texts=())
    sized = CalibrationGroup(calibrate=True, file_size="own")
    _, found = quantize_command.plan_by_sensitivity(
        open_source(str(model)), asked, lambda plan: 1 << 30, None, 1, False, quantize_command.Spent(sized)
    )
    assert found.options.formats == {"output.weight": "Q8_0"}
    said = "predicted KL divergence 0.5000 (0.2500 with the formats of Q4_K_M)"
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first == "localllm: 0 %: measuring scales: blk.0.attn_q.weight"
    for line, name in zip(others, ("measuring formats: two lines", "checking formats: output.weight"), strict=True):
        assert re.fullmatch(rf"localllm: \d+ %, about \d+ s left: {name}", line)
    assert last == f"localllm: {said}; measured on held-out texts, weights only: 0.7500"


def test_the_time_that_is_left():
    """By the shares of stages at first, then by each one's own pace; a stage that was skipped tells nothing."""
    now = [100.0]
    stages = Stages({"scales": 1.0, "matrices": 6.0, "writing": 1.0}, lambda: now[0])
    stages.update("scales", 0, 4)
    assert stages.left is None and stages.fraction == 0
    now[0] = 110.0
    stages.update("scales", 2, 4)
    assert stages.left == pytest.approx(10 + 6 * 20 + 20) and stages.fraction == pytest.approx(10 / 160)
    now[0] = 120.0
    stages.update("scales", 4, 4)
    stages.update("matrices", 0, 100)
    assert stages.left == pytest.approx(7 * 20)
    now[0] = 180.0
    stages.update("matrices", 25, 100)  # twice as slow as expected
    assert stages.left == pytest.approx(180 + 80 / 2.5) and stages.fraction == pytest.approx(80 / 292)
    now[0] = 360.0
    stages.update("matrices", 100, 100)
    now[0] = 370.0
    stages.update("writing", 50, 100)
    assert stages.left == pytest.approx(10)
    stages.update("writing", 100, 100)
    assert stages.left == 0 and stages.fraction == 1


def test_no_time_is_estimated_before_the_pace_is_known():
    """What comes before the first part, and what an earlier run has done, says nothing about the pace."""
    now = [0.0]
    resumed = Stages({"scales": 1.0, "matrices": 6.0, "writing": 1.0}, lambda: now[0])
    now[0] = 30.0
    resumed.update("matrices", 50, 100)
    assert resumed.left is None and resumed.fraction == pytest.approx((1 + 3) / 8)
    now[0] = 31.0
    resumed.update("matrices", 52, 100)
    assert resumed.left is None
    now[0] = 60.0
    resumed.update("matrices", 75, 100)
    assert resumed.left == pytest.approx(30 + 20)
    encoding = Stages({"encoding": 1.0}, lambda: now[0])
    now[0] = 90.0  # kernels were compiled
    encoding.update("encoding", 1, 1000)
    now[0] = 91.0
    encoding.update("encoding", 11, 1000)
    assert encoding.left is None and encoding.fraction == pytest.approx(0.011)
    now[0] = 96.0
    encoding.update("encoding", 61, 1000)
    assert encoding.left == pytest.approx(6 / 60 * 939)


def test_the_bar_ends_with_the_work():
    progress = quantize_progress.Progress({"encoding": 1.0}, ProgressLine())
    bar = progress._display = quantize_progress._Bar(ProgressLine())
    with progress as show:
        show("encoding", 5, 10, "blk.0.attn_q.weight")
        assert bar._progress and bar._progress.live.is_started
        drawn = bar._progress
    assert not drawn.live.is_started, "or it would draw over what is said next"
