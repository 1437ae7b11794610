"""Test quantizing with calibration: error feedback, and whole models."""

import os
import platform
import re
import subprocess
import sys
import tomllib
import weakref
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_calls import dequantized
from tiny_model import write_tiny_model

from localllm.arch import load_architecture
from localllm.arch.layer_state import KVType
from localllm.arch.weights import Weights
from localllm.cli.main import main
from localllm.engine.engine import Engine
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.engine.options import EngineOptions
from localllm.engine.trace.imatrix_collector import ImatrixCollector
from localllm.engine.trace.recorder import trace_model
from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.cache.array_log import ArrayLog
from localllm.files.gguf.file import GGUFFile, get_map
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.kernels.reference import ReferenceCache, dequantize
from localllm.quant.activation_rounding import round_activations
from localllm.quant.block_codes import FEEDBACK_FORMATS, get_codes, read_scales, replace_codes
from localllm.quant.block_codes import dequantize as dequantize_blocks
from localllm.quant.encode import encode
from localllm.quant.formats import BY_NAME, RECIPES, list_float_offsets
from localllm.quant.gptq import GptqEncoder, compute_cost, factorize, shrink_correlations
from localllm.quant.hessian import DAMPINGS, OUTLIER_FACTOR, Hessian, compute_moments, compute_outlier_factors
from localllm.quantizing import calibrate
from localllm.quantizing import layerwise_runner as sequential
from localllm.quantizing import scale_folding as folding
from localllm.quantizing.calibrate import (
    DATA,
    FREED_BYTES,
    MAX_CHUNKS,
    SAMPLE_TEXTS,
    CalibratedMatrices,
    Calibration,
    find_shared_states,
    load_chunks,
    tokenize_sample,
)
from localllm.quantizing.layerwise_runner import BatchedActivations, LastUseRecorder, LayerwiseRunner, MatrixRows
from localllm.quantizing.mixed_precision import plan as corrected
from localllm.quantizing.mixed_precision.measure import (
    CoarseWeights,
    EncodedMatrix,
    compute_divergence,
    compute_rounding_cost,
    is_adjustable,
)
from localllm.quantizing.mixed_precision.plan import choose_within_size, correct_harm, parse_bits, parse_size
from localllm.quantizing.mixed_precision.sensitivity import (
    Sensitivity,
    choose_within_budget,
    list_candidates,
    predict_divergence,
    sum_bytes,
)
from localllm.quantizing.plan import QuantizeRequest, make_plan
from localllm.quantizing.quantize import (
    MATRICES_STAGE,
    SCALES_STAGE,
    WRITING_STAGE,
    create_widener,
    open_source,
    quantize_model,
)
from localllm.services.inspection.inspect import describe_quantization, make_calibration_metadata
from localllm.text.tokenizer import Tokenizer


def inputs(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return correlated inputs whose columns differ in size."""
    generator = np.random.default_rng(seed)
    mixed = np.random.default_rng(100).normal(size=(columns // 4, columns)) * np.exp(np.linspace(-1, 1, columns))
    return (generator.normal(size=(rows, columns // 4)) @ mixed + generator.normal(size=(rows, columns))).astype("f4")


def weights(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(7).normal(0, 0.05, (rows, columns)).astype(np.float32)


# ---- blocks taken apart


@pytest.mark.parametrize("name", FEEDBACK_FORMATS)
def test_scales_and_codes_of_a_block_agree_with_gguf(name: str):
    generator, format, table = np.random.default_rng(3), BY_NAME[name], get_codes(name)
    blocks = generator.integers(0, 256, (64, format.bytes), dtype=np.uint8)
    for at in list_float_offsets(name):
        blocks[:, at : at + 2] = generator.normal(size=(64, 1)).astype("<f2").view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] %= 128
    chosen = generator.integers(0, len(table.levels), (64, format.block))
    scales, offsets = read_scales(name, blocks)
    replace_codes(name, blocks, table.stored[chosen])
    group = np.arange(format.block) // table.group
    for read_again, before in zip(read_scales(name, blocks), (scales, offsets), strict=True):
        np.testing.assert_array_equal(read_again, before)
    expected = dequantized(name, blocks)
    np.testing.assert_allclose(table.levels[chosen] * scales[:, group] + offsets[:, group], expected, rtol=1e-5)


# ---- error feedback


@pytest.mark.sampled("name", always=("Q4_K",))
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_0", "IQ4_XS"])
def test_feedback_costs_less_on_unseen_inputs(name: str):
    columns = 512
    seen, unseen = (np.cov(inputs(4000, columns, seed), rowvar=False, bias=True) for seed in (1, 2))
    matrix = weights(48, columns)
    plain, fed = (
        matrix - dequantize_blocks(name, GptqEncoder(seen, damping).encode(name, matrix)) for damping in (1, 0.05)
    )
    assert compute_cost(fed, unseen) < compute_cost(plain, unseen) * 0.9


def test_a_cost_is_the_mean_squared_error_of_outputs():
    x, lost = inputs(300, 64), weights(5, 64)
    assert compute_cost(lost, x.T.astype(float) @ x / 300) == pytest.approx(
        ((x @ lost.T) ** 2).mean(axis=0).sum(), rel=1e-4
    )


def test_codes_do_not_depend_on_the_number_of_threads():
    moments, matrix = np.cov(inputs(900, 288), rowvar=False), weights(130, 288)
    one, three = (GptqEncoder(moments, 0.1, threads).encode("Q4_0", matrix) for threads in (1, 3))
    np.testing.assert_array_equal(one, three)
    assert one.shape == (130, BY_NAME["Q4_0"].row_bytes(288))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["Q4_K", "IQ4_XS", "Q6_K"])
def test_odd_matrices_and_inputs_are_encoded_finitely(name: str):
    """Check zeros, a column without inputs, equal inputs, and weights too small for float16."""
    matrix = weights(4, 256)
    matrix[0], matrix[1], matrix[2, :64] = 0, 1e-30, 1e4
    x = inputs(300, 256)
    x[:, 5] = 0
    for met in (x, np.zeros_like(x), np.ones_like(x)):
        decoded = dequantize_blocks(name, GptqEncoder(met.T.astype(float) @ met, 0.1).encode(name, matrix))
        assert np.isfinite(decoded).all() and not decoded[0].any()


def test_shrunk_moments_lie_between_the_measured_and_their_diagonal():
    moments = np.cov(inputs(500, 32), rowvar=False)
    mean = np.diagonal(moments).mean()
    np.testing.assert_allclose(shrink_correlations(moments, 1) * mean, np.diag(np.diagonal(moments)), rtol=1e-4)
    np.testing.assert_allclose(shrink_correlations(moments, 0) * mean, moments, rtol=1e-4)


def test_feedback_is_off_where_it_does_not_help():
    """Use inputs whose two halves have nothing in common."""
    generator = np.random.default_rng(0)
    halves = [(generator.normal(size=(40, 2)) @ generator.normal(size=(2, 256))).astype("f4") for _ in range(2)]
    assert Hessian(halves, 256).choose_damping("Q4_K", weights(32, 256)) == DAMPINGS[-1]
    alike = [inputs(2000, 256, seed) for seed in (1, 2)]
    assert Hessian(alike, 256).choose_damping("Q4_K", weights(32, 256)) < DAMPINGS[-1]


@pytest.mark.parametrize("columns", [1, 32, 255, 256, 257, 600])
def test_a_matrix_is_factored_in_place(columns):
    """Check also that threads do not change the result."""
    x = inputs(3 * columns, columns)
    moments = (x.T.astype(float) @ x).astype("f4")
    one, three = moments.copy(), moments.copy()
    factorize(one, 1)
    factorize(three, 3)
    np.testing.assert_array_equal(one, three)
    whole = np.linalg.cholesky(moments[::-1, ::-1].astype(float))[::-1, ::-1]
    np.testing.assert_allclose(one, whole, atol=1e-4 * np.abs(whole).max())
    assert not np.tril(one, -1).any()


@pytest.mark.parametrize("columns", [32, 127, 128, 129, 300])
def test_a_few_outliers_do_not_dominate_the_moments(columns):
    """Squares count as FAR times the median at most; prompts without inputs are skipped."""
    x = inputs(101, columns)
    x[7] *= 1e4
    pieces = [x[:50], x[:0], x[50:]]
    squares = (x.astype(float) ** 2).sum(axis=1)
    fair = x * np.sqrt(np.minimum(1, OUTLIER_FACTOR * np.median(squares) / squares))[:, None]
    moments = compute_moments(pieces, columns)
    np.testing.assert_allclose(moments, fair.T @ fair / 101, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(moments, compute_moments(pieces, columns, 3))
    assert compute_outlier_factors([np.ones((3, columns), np.float32), x[:0]]) == [None, None]


def test_moments_without_inputs_are_zero():
    x = inputs(101, 32)
    assert not compute_moments([x[:0]], 32).any() and not compute_moments([np.zeros_like(x)], 32).any()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory")
def test_freed_activations_are_returned_to_the_system():
    program = """
import os
import platform
import re
from pathlib import Path
from localllm.quantizing.calibrate import FREED_BYTES
from localllm.system.memory import lower_mmap_threshold

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

lower_mmap_threshold(FREED_BYTES)
b"x" * 2 * FREED_BYTES  # what is freed once is large for glibc no more
before, all = held(), []
for n in range(8):
    all += [b"x" * FREED_BYTES, b"x" * 100_000]  # in turn with what stays
del all[::2]
print(held() - before)
"""
    grown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 4 * (FREED_BYTES >> 10)


def test_without_inputs_all_columns_count_equally():
    matrix = weights(8, 256)
    moments = Hessian([np.zeros((0, 256), np.float32)] * 2, 256)
    encoded = moments.build_encoder("Q4_K", matrix).encode("Q4_K", matrix)
    np.testing.assert_array_equal(encoded, encode("Q4_K", matrix))


# ---- whole models


TEXT = "hello world, " * 60 + "".join(chr(97 + n * n % 26) for n in range(700))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-F32.gguf", context=128)


@pytest.fixture
def text(tmp_path: Path, monkeypatch) -> Path:
    """Write a calibration text, of which only 6 chunks are read."""
    monkeypatch.setattr(calibrate, "MAX_CHUNKS", 6)
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def quantize(arguments: list[str]) -> int:
    """Run `localllm quantize`; return its exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", ["localllm", "quantize", *arguments])
        main()
    return int(end.value.code or 0)


def test_a_calibrated_file_keeps_the_types_and_tells_its_texts(model: Path, text: Path, tmp_path):
    assert quantize([str(model), str(tmp_path / "plain.gguf"), "Q4_0"]) == 0
    assert quantize([str(model), str(tmp_path / "out.gguf"), "Q4_0", "--calibrate", str(text)]) == 0
    assert not (tmp_path / "out.gguf.calibration").exists()
    plain, calibrated = GGUFFile.open(tmp_path / "plain.gguf"), GGUFFile.open(tmp_path / "out.gguf")
    formats = [{name: t.format.name for name, t in file.tensors.items()} for file in (plain, calibrated)]
    assert formats[0] | {"blk.0.ffn_down.weight": formats[1]["blk.0.ffn_down.weight"]} == formats[1]
    changed = {
        name for name in plain.tensors if not np.array_equal(plain.tensors[name].data, calibrated.tensors[name].data)
    }
    matrices = {name for name in plain.tensors if name.startswith("blk.") and "norm" not in name}
    norms = {name for name in changed if "norm" in name}
    assert changed == matrices | {"output.weight"} | norms
    description = describe_quantization(calibrated.metadata)
    assert description.startswith("calibrated on text.txt, ") and (" scalings folded away" in description) == bool(
        norms
    )
    assert describe_quantization(plain.metadata) is None


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ({}, None), ({"localllm.quantize.texts": "a"}, None), ({"localllm.quantize.texts": [1]}, None),
        ({"localllm.quantize.texts": ["a", "b"]}, "calibrated on a, b"),
        (make_calibration_metadata(["a"], 5, "1.2"), "calibrated on a, 5 tokens (localllm 1.2)"),
        ({**make_calibration_metadata([], 5, "1.2"), "localllm.quantize.scaled": 7},
         "calibrated on localllm's mixture, 5 tokens, 7 scalings folded away (localllm 1.2)"),
        ({"localllm.quantize.texts": ["a"], "localllm.quantize.tokens": "5", "localllm.quantize.version": 1,
          "localllm.quantize.scaled": "7"}, "calibrated on a"),
        ({"quantize.imatrix.file": "i.gguf"}, "importance matrix i.gguf"),
        ({"quantize.imatrix.file": "i.gguf", "quantize.imatrix.dataset": "t"}, "importance matrix i.gguf of t"),
        ({"quantize.imatrix.file": 5, "quantize.imatrix.dataset": "t"}, None),
        ({"quantize.imatrix.file": "i.gguf", **make_calibration_metadata(["a"], 5, "1")},
        "calibrated on a, 5 tokens (localllm 1)"),
    ],
)  # fmt: skip
def test_metadata_tell_how_a_file_was_quantized(metadata: dict, line: str | None):
    assert describe_quantization(metadata) == line


def test_default_calibration_texts_have_a_name():
    common = {f"localllm.quantize.{name}": value for name, value in (("tokens", 5), ("version", "1"))}
    for texts, names in ((), ["localllm's mixture"]), (("a", "b"), ["a", "b"]):
        assert make_calibration_metadata(texts, 5, "1") == {"localllm.quantize.texts": names, **common}


def test_a_matrix_is_calibrated_on_the_outputs_of_encoded_layers(model: Path, text: Path, tmp_path: Path, monkeypatch):
    """Compare the second layer's inputs with those of a model whose first layer is encoded."""
    met = {}
    encode_with = CalibratedMatrices._encode

    def noted(self, job, inputs):
        met[job.tensor.name] = np.concatenate(list(inputs.iterate(0)))
        encode_with(self, job, inputs)

    monkeypatch.setattr(CalibratedMatrices, "_encode", noted)
    out = tmp_path / "out.gguf"
    assert quantize([str(model), str(out), "Q8_0", "--calibrate", str(text)]) == 0
    observed = ImatrixCollector()
    engine = Engine(GGUFFile.open(out), EngineOptions(backend="reference", context=128, observer=observed))
    squares = dict[str, np.ndarray]()
    plan = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q8_0"], texts=[str(text)]))
    for chunk in Calibration(plan, [str(text)]).chunks:
        engine.sequence().append(chunk, "all")
        for name, sums in observed.pop_sums().items():
            squares[name] = squares.get(name, 0) + sums
    assert set(met) == set(squares)
    for name, x in met.items():
        np.testing.assert_allclose((x**2).sum(axis=0), squares[name], rtol=2e-3)


@pytest.mark.sampled
@pytest.mark.slow(6)
def test_an_interrupted_calibration_continues_to_the_same_bytes(model: Path, text: Path, tmp_path: Path, monkeypatch):
    out, encoded = tmp_path / "out.gguf", []
    command = [str(model), str(out), "Q4_0", "--calibrate", str(text), "--threads"]
    assert quantize([*command, "1"]) == 0
    first = out.read_bytes()
    encode_with = CalibratedMatrices._encode

    def interrupted(self, job, inputs):
        if len(encoded) == 5:
            raise LocalllmError("stop")
        encoded.append(job.tensor.name)
        encode_with(self, job, inputs)

    measured = []
    measure = folding.measure_scales
    monkeypatch.setattr(folding, "measure_scales", lambda *given: measured.append(1) or measure(*given))
    out.write_bytes(b"GGUF before")
    monkeypatch.setattr(CalibratedMatrices, "_encode", interrupted)
    assert quantize([*command, "2", "--force"]) == 1
    assert out.read_bytes() == b"GGUF before"
    left = tmp_path / "out.gguf.calibration"
    left.write_bytes(left.read_bytes()[:-20])  # killed while it wrote the last one
    again = []
    monkeypatch.setattr(
        CalibratedMatrices,
        "_encode",
        lambda self, *given: (again.append(given[0].tensor.name), encode_with(self, *given)),
    )
    assert quantize([*command, "2", "--force"]) == 0
    assert out.read_bytes() == first
    assert len(measured) == 1  # what was folded away is known
    assert again[0] == encoded[-1] and len(again) + len(encoded) == 16 and not left.exists()


@pytest.mark.sampled
def test_a_source_that_changes_during_calibration_is_refused(model: Path, text: Path, tmp_path: Path):
    source, out, request = tmp_path / "m.gguf", tmp_path / "out.gguf", QuantizeRequest(RECIPES["Q4_0"])
    source.write_bytes(model.read_bytes())
    request = replace(request, texts=(str(text),))
    plan = make_plan(open_source(str(source)), request)

    def change(stage: str, done: int, total: int, name: str) -> None:
        if stage == SCALES_STAGE:
            os.utime(source, ns=(1, 1))

    with pytest.raises(ModelError, match=r"m\.gguf: this file changed while it was read"):
        quantize_model(plan, str(out), request, 1, lambda done, name: None, on_stage=change)
    assert not out.exists()


def test_an_interrupted_calibration_of_other_texts_starts_anew(tmp_path: Path):
    path = tmp_path / "x"
    with ArrayLog(path, "one") as records:
        records.add("a", np.arange(5, dtype=np.uint8))
    with ArrayLog(path, "one") as records:
        assert "a" in records and list(records.read("a", 1, 3)) == [1, 2]
    with ArrayLog(path, "two") as records:
        assert "a" not in records


def test_a_foreign_file_in_place_of_the_log_is_kept(model: Path, text: Path, tmp_path: Path, capsys):
    (tmp_path / "out.gguf.calibration").write_text("dear diary")
    assert quantize([str(model), str(tmp_path / "out.gguf"), "Q4_0", "--calibrate", str(text)]) == 2
    assert "expected a file written by localllm" in capsys.readouterr().err
    assert (tmp_path / "out.gguf.calibration").read_text() == "dear diary"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Q4_0", "--calibrate", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["Q4_0", "--calibrate", "short.txt"], "short.txt: the text has"),
        (["Q4_0", "--calibrate", "text.txt", "--imatrix", "x"], "give either --calibrate or --imatrix"),
    ],
)
def test_invalid_calibration_options_are_refused_in_one_line(
    arguments, message: str, model, text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("hello")
    assert quantize([str(model), "out.gguf", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and error.count("localllm: error: ") == 1
    assert not list(tmp_path.glob("out*"))


def test_infinite_inputs_of_a_matrix_are_refused(text: Path, tmp_path: Path, capsys):
    path = write_tiny_model(tmp_path / "broken.gguf", context=128)
    found = get_map(GGUFFile.open(path).tensors["blk.1.attn_norm.weight"].data)
    assert found is not None
    _, start = found
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(np.full(64, 3e38, np.float32).tobytes())
    assert quantize([str(path), str(tmp_path / "out.gguf"), "Q4_0", "--calibrate", str(text)]) == 3
    assert "the input of tensor blk.1.attn_q.weight is not finite" in capsys.readouterr().err


# ---- any architecture


class AsTheyAre:
    """Matrices that are not quantized."""

    def read_rows(self, weight, ids):
        return dequantize(weight.tensor)[ids]

    def resolve(self, weight, inputs):
        matrices = dequantize(weight.tensor).reshape(-1, *weight.shape[-2:])
        return MatrixRows(weight.shape, lambda n, first, end: matrices[n, first:end])


FAMILIES = ["gemma3", "gemma4", "llama_moe", "mamba2", "deepseek2_v3", "gpt_oss", "lfm2", "qwen35", "granitemoe"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_prompts_side_by_side_equal_prompts_alone(shared: Path, kind: str, monkeypatch):
    monkeypatch.setattr(sequential, "KV_TYPE", KVType.parse("f32"))  # float16 would make more of another order of sums
    file = GGUFFile.open(shared / f"goldens/arch/{kind}.gguf")
    module, h = load_architecture(file)
    w, vocabulary = Weights(file.tensors), file.tensors["token_embd.weight"].shape[0]
    texts = [np.random.default_rng(n).integers(0, vocabulary, 20) for n in range(3)]
    last = LastUseRecorder()
    again = find_shared_states(trace_model(file, last.record(module.forward), w, h, 20).operations)
    together = LayerwiseRunner(texts, again, AsTheyAre(), 2, last)
    batched = module.forward(together, w, h)
    together.close()
    for text, logits in zip(texts, batched, strict=True):
        span = SequenceSpan(ReferenceCache(KVType.parse("f32")), 0, text, len(text))
        np.testing.assert_allclose(logits, module.forward(ReferenceBuilder([span], {}, 20), w, h), rtol=1e-4, atol=1e-4)


class Stack:
    """Matrices of an array; records the inputs of each."""

    def __init__(self, array: np.ndarray):
        self.array, self.inputs = array, list[np.ndarray]()
        self.weight: Any = SimpleNamespace(name="w", shape=array.shape, first_row=0, bias=None)

    def resolve(self, weight: Any, inputs: Any) -> MatrixRows:
        self.inputs = [np.concatenate(list(inputs.iterate(n))) for n in range(len(self.array))]
        return MatrixRows(weight.shape, lambda n, first, end: self.array[n, first:end])


@pytest.fixture
def two_texts() -> Any:
    """Return a runner of prompts with 2 and 3 tokens, and a stack of three matrices."""
    matrices: Any = Stack(np.random.default_rng(0).normal(size=(3, 7, 5)).astype(np.float32))
    builder = LayerwiseRunner([np.arange(2), np.arange(3)], (), matrices, 2)
    yield builder, matrices
    builder.close()


def test_each_expert_gets_the_tokens_that_chose_it(two_texts: Any):
    builder, matrices = two_texts
    x = BatchedActivations(inputs(2 * tokens, 5, tokens) for tokens in (2, 3))
    numbers = [np.array([[0, 2], [2, 0]]), np.array([[0, 1], [2, 0], [1, 0]])]
    choice, before = BatchedActivations(SimpleNamespace(experts=some) for some in numbers), np.concatenate(x)
    outputs = builder._expert_linear([x], x, matrices.weight, choice)
    flat = np.concatenate([some.reshape(-1) for some in numbers])
    for expert, met in enumerate(matrices.inputs):
        np.testing.assert_array_equal(met, before[flat == expert])
    expected = [matrices.array[expert] @ row for expert, row in zip(flat, before, strict=True)]
    np.testing.assert_allclose(np.concatenate(outputs), expected, rtol=1e-4, atol=1e-5)
    assert [len(part) for part in outputs] == [4, 6]
    assert x == [None, None] and builder._loaded == {}  # neither the activation nor the matrix is kept


def test_each_head_gets_its_columns(two_texts: Any):
    builder, matrices = two_texts
    x = BatchedActivations(inputs(tokens, 15, tokens) for tokens in (2, 3))
    outputs = builder._head_linear([], x, matrices.weight)
    for head, met in enumerate(matrices.inputs):
        np.testing.assert_array_equal(met, np.concatenate(x)[:, 5 * head : 5 * head + 5])
    expected = [np.concatenate([m @ row[5 * n : 5 * n + 5] for n, m in enumerate(matrices.array)]) for row in x[1]]
    np.testing.assert_allclose(outputs[1], expected, rtol=1e-4, atol=1e-5)


def test_prompts_have_no_images_and_the_longest_selects_rope_factors(two_texts: Any):
    builder, x = two_texts[0], BatchedActivations([1, 2])
    assert builder.embed_inputs(lambda: x, 3) is builder.add_deepstack(x, 1) is builder.tap_layer_input(x, 0) is x
    assert builder.ignore(None) is None and [builder.select_by_context("short", "long", n) for n in (2, 3)] == [
        "long",
        "short",
    ]


@pytest.mark.parametrize(
    ("shape", "ends"),
    [
        ((9, 4), [(0, 0, 3), (0, 3, 6), (0, 6, 9)]), ((8, 4), [(0, n, n + 2) for n in (0, 2, 4, 6)]),
        ((2, 1, 4), [(0, 0, 1), (1, 0, 1)]), ((3, 12), [(0, 0, 1), (0, 1, 2), (0, 2, 3)]),
        ((2, 10, 4), [(n, first, min(first + 3, 10)) for n in (0, 1) for first in (0, 3, 6, 9)]),
        ((40, 4), [(0, first, min(first + 3, 40)) for first in range(0, 40, 3)]),
        ((2, 13), [(0, 0, 1), (0, 1, 2)]),
    ],
)  # fmt: skip
def test_rows_of_a_matrix_are_dequantized_in_ranges(monkeypatch, shape: tuple, ends: list):
    """Ranges are a share of a small matrix, a number of weights of a large one, and at least a row."""
    monkeypatch.setattr(sequential, "RANGE_WEIGHTS", 12)
    assert list(MatrixRows(shape, None).list_row_ranges()) == ends


class AsTheyAreWatched(AsTheyAre):
    """Record which earlier inputs are alive when a matrix gets its own."""

    def __init__(self):
        self.cached_logits, self.alive = dict[str, weakref.ref](), dict[str, list[str]]()

    def resolve(self, weight, inputs):
        self.alive[weight.name] = [name for name, met in self.cached_logits.items() if met() is not None]
        self.cached_logits[weight.name] = weakref.ref(next(iter(inputs.iterate(0))))
        return super().resolve(weight, inputs)


def test_activations_are_freed_after_their_last_use(model: Path):
    file, matrices, last = GGUFFile.open(model), AsTheyAreWatched(), LastUseRecorder()
    module, h = load_architecture(file)
    w = Weights(file.tensors)
    again = find_shared_states(trace_model(file, last.record(module.forward), w, h, 20).operations)
    builder = LayerwiseRunner([np.arange(20)], again, matrices, 1, last)
    module.forward(builder, w, h)
    builder.close()
    assert matrices.alive["blk.0.attn_v.weight"] == ["blk.0.attn_q.weight", "blk.0.attn_k.weight"]  # the same one
    assert matrices.alive["blk.0.ffn_down.weight"] == matrices.alive["blk.1.attn_q.weight"] == []


def test_the_default_mixture_is_tokenized_with_the_models_chat_template(model: Path):
    tokenizer = Tokenizer.from_file(model)
    chunks = load_chunks(tokenizer, (), 128)
    assert len(chunks) == MAX_CHUNKS and {len(chunk) for chunk in chunks} == {128}
    chat = tokenizer.decode(tokenize_sample("chat.toml", tokenizer), special=True)
    assert chat.startswith("<|im_start|>user\nWhat is the capital of Australia?<|im_end|>\n<|im_start|>assistant\nThe ")
    listed = (DATA / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in SAMPLE_TEXTS) and set(SAMPLE_TEXTS) <= {
        path.name for path in DATA.iterdir()
    }


@pytest.fixture
def numbering(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a tokenizer for which a text is its number of tokens, 0, 1, 2 and so on."""
    monkeypatch.setattr(calibrate, "read_text", lambda name: name)
    monkeypatch.setattr(calibrate, "tokenize_sample", lambda name, tokenizer: [*range(tokenizer.usual)])
    made = SimpleNamespace(adds_bos=False, bos_id=None, usual=5, heard=[])
    made.encode = lambda text, bos: made.heard.append(bos) or [*range(int(text))]
    return made


@pytest.mark.parametrize(
    ("tokens", "context", "places"),
    [
        (512, 4096, [0]), (1023, 4096, [0]), (1024, 4096, [0, 1]), (64 * 512, 4096, [*range(64)]),
        (65 * 512, 4096, [*range(32), *range(33, 65)]), (100, 40, [0, 1]),
    ],
)  # fmt: skip
def test_a_text_is_read_in_evenly_spread_chunks(numbering: Any, tokens: int, context: int, places: list[int]):
    """Chunks have 512 tokens, or the model's context; at most 64 are read."""
    chunks, size = load_chunks(numbering, [str(tokens)], context), min(512, context)
    assert [int(chunk[0]) for chunk in chunks] == [place * size for place in places] and numbering.heard == [True]
    assert all(np.array_equal(chunk, np.arange(size) + chunk[0]) for chunk in chunks)


def test_texts_too_short_for_a_chunk_are_refused(numbering: Any):
    """Accept some of them in the built-in mixture of texts."""
    with pytest.raises(UsageError, match=r"^511: "):
        load_chunks(numbering, ["600", "511"], 4096)
    with pytest.raises(UsageError, match=r"^at least one document must have 6 tokens or more$"):
        load_chunks(numbering, (), 6)
    assert len(load_chunks(numbering, (), 5)) == len(SAMPLE_TEXTS)


# ---- formats by need


def test_the_cheapest_types_within_a_size_are_close_to_optimal():
    """Compare with all combinations."""
    generator = np.random.default_rng(2)
    needs = []
    for n in range(5):
        errors = np.sort(generator.uniform(0, 1, 3))[::-1] * np.array([1, 0.2, 0.05])
        sizes = ("Q2_K", "Q4_K", "Q6_K")
        needs.append(
            Sensitivity(
                f"m{n}", 256 * (1 + n % 3), dict(zip(sizes, errors, strict=True)), harm=generator.uniform(0.1, 3)
            )
        )
    ways = [dict(zip((need.name for need in needs), way, strict=True)) for way in product(sizes, repeat=5)]
    smallest, largest = (end(sum_bytes(needs, way) for way in ways) for end in (min, max))
    for budget in np.linspace(smallest, largest, 20).astype(int):
        chosen = choose_within_budget(needs, int(budget))
        best = min(predict_divergence(needs, way) for way in ways if sum_bytes(needs, way) <= budget)
        assert sum_bytes(needs, chosen) <= budget and predict_divergence(needs, chosen) <= best * 1.35 + 1e-9
    assert predict_divergence(needs, choose_within_budget(needs, largest)) == min(
        predict_divergence(needs, way) for way in ways
    )
    with pytest.raises(UsageError, match=r"smallest (possible file has|formats take)"):
        choose_within_budget(needs, smallest - 1)


def test_a_file_is_never_larger_than_asked_for_and_hardly_smaller():
    """Matrices are padded to 100 bytes, which the first guess ignores."""
    needs = [Sensitivity(f"m{n}", 4096, {"Q2_K": 1.0, "Q4_K": 0.1, "Q6_K": 0.01}, harm=1 + n / 7) for n in range(20)]

    def size_with(formats):
        return 1000 + sum(-(-need.count_bytes(formats[need.name]) // 100) * 100 for need in needs)

    least, most = (size_with({need.name: format for need in needs}) for format in ("Q2_K", "Q6_K"))
    for size in range(least, most + 5000, 777):
        size_found = size_with(choose_within_size(needs, size, 1000, size_with))
        assert size_found <= size and size_found >= min(size - 4096, most)
    with pytest.raises(UsageError, match=r"smallest (possible file has|formats take)"):
        choose_within_size(needs, least - 2000, 1000, size_with)


def test_sizes_and_bits_are_parsed_or_refused():
    plan = SimpleNamespace(nbytes=1000, weights=800, jobs=[SimpleNamespace(output=SimpleNamespace(nbytes=900))])
    assert [parse_size(text)(plan) for text in ("3.5GB", "800 mb", "77", "own")] == [
        3_500_000_000,
        800_000_000,
        77,
        1000,
    ]
    assert [parse_size(text)(plan) for text in ("2k", "0.5T", "1.5KB", "9b")] == [2000, 500_000_000_000, 1500, 9]
    assert [parse_bits(bits)(plan) for bits in (4, 1, 32, 4.009)] == [500, 200, 3300, 500]
    for wrong in (0.99, 32.01):
        with pytest.raises(UsageError, match=f"^--bpw must be from 1 to 32 \\(found {wrong}\\)$"):
            parse_bits(wrong)
    for wrong in ("big", "-3GB", "3.5GiB", ""):
        with pytest.raises(UsageError, match="the value must be a size"):
            parse_size(wrong)


@pytest.mark.sampled
@pytest.mark.slow(6)
def test_quantizing_to_a_size_writes_a_plan_that_can_be_used_again(model: Path, text: Path, tmp_path: Path, capsys):
    out, plan = tmp_path / "out.gguf", tmp_path / "plan.toml"
    arguments = [str(model), str(out), "Q4_0", "--calibrate", str(text), "--size", "85kB", "--plan", str(plan)]
    assert quantize(arguments) == 0
    said = re.search(
        r"predicted KL divergence (\S+) \((\S+) with the formats of Q4_0\); .* only: (\S+)", capsys.readouterr().err
    )
    assert said and all(0 < float(number) < 1 for number in said.groups())
    assert 80_000 < out.stat().st_size <= 85_000
    formats = {name: t.format.name for name, t in GGUFFile.open(out).tensors.items()}
    said = tomllib.loads(plan.read_text())
    assert said.items() <= formats.items() and len(set(said.values())) > 1
    again = tmp_path / "again.gguf"
    assert quantize([str(model), str(again), "Q4_0", "--calibrate", str(text), "--plan", str(plan)]) == 0
    assert again.read_bytes() == out.read_bytes()
    assert quantize([*arguments, "--dry-run"]) == 2  # the plan is there
    assert "leave out --size to use its formats" in capsys.readouterr().err


def needs_of_layers() -> list[Sensitivity]:
    """Return the sensitivities of eight equal layers."""
    names = [f"blk.{n}.{kind}.weight" for n in range(8) for kind in ("attn_v", "ffn_down")]
    return [Sensitivity(name, 4096, {"Q2_K": 0.4, "Q4_K": 0.1, "Q6_K": 0.01}, harm=1.0) for name in names]


def test_measured_contributions_correct_the_harm():
    """Values contribute four times as much as down, the last quarter of layers three times as much as others."""
    needs = needs_of_layers()

    def contribution(names):
        return sum((0.2 if "attn_v" in name else 0.05) * (3 if name[4] in "67" else 1) for name in names)

    harm = {
        need.name: need.harm
        for need in correct_harm(needs, dict.fromkeys((n.name for n in needs), "Q4_K"), contribution)
    }
    assert harm["blk.0.attn_v.weight"] / harm["blk.0.ffn_down.weight"] == pytest.approx(1.6 / 0.5)  # at least a half
    assert harm["blk.7.attn_v.weight"] / harm["blk.0.attn_v.weight"] == pytest.approx(3)
    assert harm["blk.7.attn_v.weight"] == pytest.approx(1.6 * 2)


def test_contributions_below_zero_count_as_zero():
    needs = [replace(need, harm=3.0 if "attn_v" in need.name else 1.0) for need in needs_of_layers()]
    formats = dict.fromkeys((need.name for need in needs), "Q4_K")

    def harm_if(down: float) -> list[float]:
        """Return the harm of the first two matrices, values and down."""
        done = correct_harm(needs, formats, lambda names: sum(0.3 if "attn_v" in name else down for name in names))
        return [need.harm for need in done[:2]]

    assert harm_if(0.0) == [pytest.approx(4), pytest.approx(0.5)]
    assert harm_if(-0.05)[0] == pytest.approx(4)


class Scripted:
    """A model whose divergences are given in order."""

    def __init__(self, found: list[float]):
        self.found, self.asked = found, list[dict[str, str]]()

    def measure_divergence(self, formats: dict[str, str]) -> float:
        self.asked.append(formats)
        return self.found[len(self.asked) - 1]

    def measure_contribution(self, names) -> float:
        return 0.01 * len(names)


@pytest.mark.parametrize(
    ("divergences", "best", "rounds"), [([0.3, 0.2, 0.1], 2, 3), ([0.2, 0.3], 0, 2), ([0.3, 0.2, 0.25], 1, 3)]
)
def test_the_best_of_the_checked_plans_is_taken(divergences: list[float], best: int, rounds: int, monkeypatch):
    checked, needs = Scripted(divergences), needs_of_layers()
    monkeypatch.setattr(corrected, "PlanEvaluator", lambda *given: checked)
    ways = iter([{need.name: format for need in needs} for format in ("Q6_K", "Q4_K", "Q2_K")])
    formats, least = corrected.refine_formats(None, needs, lambda needs: next(ways), None, 1, None)
    assert (formats, least, len(checked.asked)) == (checked.asked[best], divergences[best], rounds)


def test_a_plan_that_is_chosen_again_is_not_checked_again(monkeypatch):
    checked, needs = Scripted([0.3, 0.2]), needs_of_layers()
    monkeypatch.setattr(corrected, "PlanEvaluator", lambda *given: checked)
    same = {need.name: "Q4_K" for need in needs}
    assert corrected.refine_formats(None, needs, lambda needs: same, None, 1, None) == (same, 0.3)
    assert len(checked.asked) == 1


@pytest.mark.slow(2)
def test_checked_divergences_are_those_of_an_encoded_model(model: Path, text: Path):
    """Unquantized matrices have no divergence; only matrices that change are encoded again."""
    plan = make_plan(open_source(str(model)), QuantizeRequest(RECIPES["Q4_0"], texts=[str(text)]))
    calibration, met = Calibration(plan, [str(text)]), list[str]()
    widener = create_widener(plan, None, ["Q8_0"])
    checked = corrected.PlanEvaluator(calibration, widener, 1, lambda done, total, name: met.append(name))
    formats = {
        job.tensor.name: "Q4_0" for job in plan.jobs if is_adjustable(job) and job.tensor.name != "token_embd.weight"
    }
    coarse = checked.measure_divergence(formats)
    assert coarse > 0 and checked.measure_contribution(formats.keys()) == pytest.approx(coarse, abs=1e-6)
    assert set(met) == set(formats) and 0 < checked.measure_contribution(["blk.0.ffn_down.weight"]) < coarse
    met.clear()
    assert checked.measure_divergence(formats | {"blk.0.ffn_down.weight": "Q8_0"}) < coarse and met == [
        "blk.0.ffn_down.weight"
    ]


def test_a_coarse_embedding_is_coarse_in_its_rows():
    matrix = weights(6, 256)
    weight = SimpleNamespace(name="token_embd.weight", first_row=0, shape=matrix.shape)
    ids, widener = np.array([4, 0, 4]), RowDequantizer([BY_NAME["Q3_K"]])
    rows = CoarseWeights({}, widener, {weight.name: EncodedMatrix("Q3_K", encode("Q3_K", matrix))}).read_rows(
        weight, ids
    )
    np.testing.assert_array_equal(rows, dequantize_blocks("Q3_K", encode("Q3_K", matrix))[ids])


def test_coarse_matrices_replace_only_their_rows():
    stack, name = weights(8, 256), "blk.0.ffn_up_exps.weight"
    weight: Any = SimpleNamespace(name=name, first_row=1, shape=(2, 3, 256))
    jobs: Any = {name: SimpleNamespace(tensor=SimpleNamespace(name=name, shape=(2, 4, 256)))}
    found, blocks = (
        dequantize_blocks("Q3_K", encode("Q3_K", stack)),
        {name: EncodedMatrix("Q3_K", encode("Q3_K", stack))},
    )
    coarse = CoarseWeights(jobs, RowDequantizer([BY_NAME["Q3_K"]]), blocks)
    met = coarse.resolve(weight, None)
    assert met.shape == (2, 3, 256)
    np.testing.assert_array_equal(met.read_range(0, 0, 1), found[1:2])
    np.testing.assert_array_equal(met.read_range(1, 1, 3), found[6:8])
    np.testing.assert_array_equal(coarse.read_rows(weight, np.array([2, 0])), found[[3, 1]])


def test_rounding_costs_the_change_of_the_output():
    x, matrix = inputs(40, 256), weights(6, 256)
    lost = ((round_activations(x, 32) - x) @ matrix.T) ** 2
    assert compute_rounding_cost(matrix, x, 32) == pytest.approx(float(lost.sum(axis=1).mean()), rel=1e-4)
    assert compute_rounding_cost(matrix, x, 256) > compute_rounding_cost(matrix, x, 32) > 0
    assert {"IQ4_XS", "IQ4_NL", "Q5_K", "Q5_0"} <= {*list_candidates(256)} and "Q4_K" not in list_candidates(32)


def test_divergence_is_the_mean_kl_divergence_of_predictions():
    generator = np.random.default_rng(0)
    p, q = (generator.normal(0, 3, (7, 50)).astype(np.float32) for _ in range(2))
    soft = [np.exp(x.astype(float)) / np.exp(x.astype(float)).sum(axis=1, keepdims=True) for x in (p, q)]
    expected = (soft[0] * np.log(soft[0] / soft[1])).sum(axis=1).mean()
    assert compute_divergence(BatchedActivations([p[:3], p[3:]]), BatchedActivations([q[:3], q[3:]])) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a = [", "Invalid value"),
        ('"blk.9.attn_q.weight" = "Q4_0"', "the model has no tensor blk.9.attn_q.weight"),
        ('"blk.0.attn_q.weight" = "Q9_Z"', "is not a tensor format"),
        ('"blk.0.attn_q.weight" = 3', "is not a tensor format"),
    ],
)
def test_invalid_plans_are_refused(content: str, message: str, model: Path, tmp_path: Path, capsys):
    (tmp_path / "plan.toml").write_text(content)
    assert quantize([str(model), str(tmp_path / "x.gguf"), "Q4_0", "--plan", str(tmp_path / "plan.toml")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "1GB"], "which needs --calibrate"),
        (["--calibrate", "--size", "1GB", "--bpw", "4"], "give either --size or --bpw"),
        (["--calibrate", "--bpw", "99"], "from 1 to 32"),
        (["--calibrate", "--size", "huge"], "the value must be a size"),
        (["--calibrate", "--size", "100"], "the size must be at least "),
        (["--calibrate", "--size", "1GB"], "would be larger than the old one: 1.0 GB, from "),
        (["--calibrate", "--size", "1GB", "--dry-run", "--plan", "."], "must be a regular file"),
    ],
)
def test_invalid_sizes_are_refused(options: list[str], message: str, model: Path, tmp_path: Path, capsys):
    assert quantize([str(model), str(tmp_path / "x.gguf"), "Q4_0", *options]) == 2
    assert message in capsys.readouterr().err


def test_each_stage_counts_to_its_end(model: Path, text: Path, tmp_path: Path):
    """Write an embedding that is only looked up; do not calibrate it."""
    asked = QuantizeRequest(RECIPES["Q4_0"], texts=[str(text)])
    plan, reported = make_plan(open_source(str(model)), asked), dict[str, list[tuple[int, int]]]()
    stage = lambda stage, done, total, name: reported.setdefault(stage, []).append((done, total))  # noqa: E731
    quantize_model(plan, str(tmp_path / "out.gguf"), asked, 2, lambda done, name: None, on_stage=stage)
    assert [*reported] == [SCALES_STAGE, MATRICES_STAGE, WRITING_STAGE]
    for counts in reported.values():
        done, total = zip(*counts, strict=True)
        assert min(done) >= 0 and done == tuple(sorted(done)) and set(total) == {done[-1]}, counts


@pytest.mark.sampled
@pytest.mark.slow(4)
@pytest.mark.parametrize("kind", ["llama_moe", "gpt_oss", "mamba2", "qwen35", "deepseek2_v3", "gemma3"])
def test_calibration_reduces_the_divergence_of_every_architecture(
    shared: Path, kind: str, text: Path, tmp_path: Path, monkeypatch
):
    """Check experts, recurrent layers, kinds of attention, and tied embeddings."""
    monkeypatch.setattr(calibrate, "CHUNK_TOKENS", 64)
    path = shared / f"goldens/arch/{kind}.gguf"
    request = QuantizeRequest(RECIPES["Q4_0"], allow_requantize=True)
    known = dict[str, GGUFFile]()
    for name, texts in (("plain", None), ("calibrated", [str(text)])):
        request_with_texts = replace(request, texts=texts)
        plan = make_plan(open_source(str(path)), request_with_texts)
        quantize_model(plan, str(tmp_path / name), request_with_texts, 2, lambda done, name: None)
        known[name] = GGUFFile.open(tmp_path / name)
        assert {t.format.name for t in known[name].tensors.values()} >= {"Q4_0"}
    chunks = Calibration(make_plan(open_source(str(path)), replace(request, texts=[])), [str(text)]).chunks[:8]
    logits = {name: logits_of(file, chunks) for name, file in known.items()}
    base = logits_of(GGUFFile.open(path), chunks)
    assert compute_divergence(base, logits["calibrated"]) < compute_divergence(base, logits["plain"])


def logits_of(file: GGUFFile, chunks: list[np.ndarray]) -> BatchedActivations:
    module, h = load_architecture(file)
    builder = LayerwiseRunner(chunks, (), AsTheyAre(), 2)
    try:
        return module.forward(builder, Weights(file.tensors), h)
    finally:
        builder.close()
