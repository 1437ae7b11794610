"""Test folding of scales: where it is possible, that the model stays the same, and that it gains."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.arch import load_architecture
from localllm.arch.layer_state import LatentState, PagedState
from localllm.arch.verbs import AttentionScores, Routing
from localllm.arch.weights import Weight, Weights
from localllm.engine.lower.activation import ALL, Activation
from localllm.engine.trace.recorder import Recorder, trace_model
from localllm.engine.trace.scale_folding import ScaleFold, find_folds
from localllm.errors import ModelError
from localllm.files.cache.array_log import ArrayLog
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.quant.activation_rounding import round_activations
from localllm.quant.formats import BY_NAME, RECIPES
from localllm.quantizing import scale_folding as folding
from localllm.quantizing.calibrate import Calibration
from localllm.quantizing.layerwise_runner import MatrixInputs, StopCalibrationError
from localllm.quantizing.original_weights import OriginalWeights
from localllm.quantizing.plan import QuantizeRequest, TensorJob, make_plan
from localllm.quantizing.quantize import open_source
from localllm.quantizing.scale_folding import (
    FoldMeasurer,
    FoldSample,
    compute_input_squares,
    compute_scales,
    search_scales,
)
from localllm.quantizing.sources import FoldedSource
from localllm.services.inspection.inspect import SCALED

TEXT = "hello world, " * 60
# Of a tied embedding, experts, a latent of attention, recurrent layers, norms of heads and behind blocks, biases, fused
# matrices, a norm for two branches: what is folded in the first layer, and behind the last one.
FOLDED = {
    "gemma3": ["attn_norm", "attn_v", "ffn_norm", "ffn_up"],
    "llama_moe": ["attn_norm", "attn_v", "ffn_norm", "ffn_up_exps", "output_norm"],
    "deepseek2_v3": ["attn_norm", "attn_q_a_norm", "ffn_norm", "ffn_up", "output_norm"],
    "mamba2": ["attn_norm", "output_norm"],
    "qwen35": ["attn_norm", "post_attention_norm", "ffn_up", "output_norm"],
    "gpt_oss": ["attn_norm", "attn_v", "post_attention_norm", "output_norm"],
    "phi3": ["attn_norm", "attn_qkv", "ffn_norm", "ffn_up", "output_norm"],
    "falcon": ["attn_norm", "attn_qkv", "output_norm"],
}


def found_in(path: Path) -> list[ScaleFold]:
    file = GGUFFile.open(path)
    module, h = load_architecture(file)
    return find_folds(trace_model(file, module.forward, Weights(file.tensors), h, 32).operations, file.tensors)


@pytest.mark.parametrize("kind", FOLDED)
def test_folds_are_found_in_every_architecture(shared: Path, kind: str):
    names = [fold.divided[0][0] for fold in found_in(shared / f"goldens/arch/{kind}.gguf")]
    own = [name for name in names if not name.startswith("blk.") or name.startswith("blk.0.")]
    assert [name.removeprefix("blk.0.").removesuffix(".weight") for name in own] == FOLDED[kind]


def test_folds_cover_rows_of_fused_matrices_and_grouped_heads(shared: Path):
    by_made = {fold.divided[0][0]: fold for fold in found_in(shared / "goldens/arch/falcon.gguf")}
    values = by_made["blk.0.attn_qkv.weight"]
    assert (values.width, values.divided[0][1], values.heads, values.times) == (32, 160, 1, 4)
    np.testing.assert_array_equal(ScaleFold(4, (), (), 2, 3).expand(np.arange(4)), [0, 1] * 3 + [2, 3] * 3)
    np.testing.assert_array_equal(ScaleFold(4, (), (), 2, 3).average(np.array([0, 1] * 3 + [2, 3] * 3)), np.arange(4))


@pytest.mark.parametrize("kind", FOLDED)
def test_a_scaled_model_computes_the_same_logits(shared: Path, tmp_path: Path, kind: str):
    """Scale by powers of two, which lose nothing while floats stay in range."""
    (tmp_path / "text.txt").write_text(TEXT)
    source = open_source(str(shared / f"goldens/arch/{kind}.gguf"))
    request = QuantizeRequest(RECIPES["Q4_0"], allow_requantize=True, texts=[str(tmp_path / "text.txt")])
    plan = make_plan(source, request)
    calibration = Calibration(plan, request.texts)
    widener = RowDequantizer({job.tensor.format for job in plan.jobs})
    generator = np.random.default_rng(5)
    scales = [
        (fold, np.exp2(generator.integers(-3, 4, fold.width)).astype(np.float32)) for fold in calibration.find_folds()
    ]
    scaled = calibration.copy_for_plan(make_plan(FoldedSource(source, scales, widener), request))
    chunks = [chunk[:12] for chunk in calibration.chunks[:2]]
    before, after = (
        each.compute_logits(OriginalWeights(each.jobs, widener), chunks, 1) for each in (calibration, scaled)
    )
    changed = [fold.multiplied[0] for fold, _ in scales]
    assert changed and all(
        not np.array_equal(
            *(
                OriginalWeights(each.jobs, widener).sample_rows(each.jobs[name].tensor, 0, 4)
                for each in (calibration, scaled)
            )
        )
        for name in changed
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * np.abs(one).max())


def reader(format: str, sizes: np.ndarray) -> FoldSample:
    """Return a reader whose inputs have columns of these sizes."""
    generator, columns = np.random.default_rng(1), len(sizes)
    x = generator.normal(size=(300, columns)).astype(np.float32) * sizes
    return FoldSample(
        format, generator.normal(0, 0.1, (32, columns)).astype(np.float32), (x[::2] ** 2).mean(0), x[1::2]
    )


@pytest.mark.parametrize("format", ["Q4_K", "Q8_0"])
def test_columns_that_stand_out_are_scaled(format: str):
    sizes = np.ones(512, np.float32)
    sizes[[7, 300]] = 100
    fold, one = ScaleFold(512, (), ()), reader(format, sizes)
    scales = search_scales(fold, [one])
    assert scales is not None and scales[7] > 2 * np.median(scales)
    assert one.compute_error(scales) < 0.8 * one.compute_error(np.ones(512, np.float32))


def test_equal_columns_are_not_scaled():
    generator = np.random.default_rng(1)
    x = generator.choice(np.array([-1, 1], np.float32), (200, 512))
    alike = generator.permuted(np.tile(generator.normal(size=(32, 1)).astype(np.float32), 512), axis=0)
    assert (
        search_scales(ScaleFold(512, (), ()), [FoldSample("Q4_K", alike, (x[::2] ** 2).mean(axis=0), x[1::2])]) is None
    )


def test_columns_without_inputs_or_weights_keep_a_scale_of_1():
    met, weighed = np.array([0, 1, 4, 1e-30, 1e30]), np.array([1, 0, 1, 1, 1])
    scales = compute_scales(met, weighed, 0.5, 0.5)
    assert scales[0] == scales[1] == 1 and scales.min() >= 1 / 64 and scales.max() <= 64 and scales[2] > 1


def test_activations_round_exactly_at_the_largest_value_and_zero():
    x = np.array([[1, -3, 0.5, 0, 0, 0, 0, 0]], np.float32)
    rounded = round_activations(x, 4)
    assert rounded[0, 1] == -3 and not rounded[0, 3:].any()
    assert 0 < np.abs(rounded - x).max() <= 3 / 127 / 2


def test_a_folded_source_scales_rows_and_columns():
    """Multiply columns, and divide rows and vectors, also in each matrix of a stack."""
    shapes = {"norm": (4,), "up": (6, 4), "stack": (2, 6, 4), "free": (2, 4)}
    tensors: dict[str, Any] = {name: job_of(name, *shape).tensor for name, shape in shapes.items()}
    for each in tensors.values():
        each.read_rows = lambda first, last, data=each.data: data[first:last]
    inner: Any = SimpleNamespace(
        tensors=[*tensors.values()], path="in.gguf", files=["in.gguf"], parts=[], ignored=(), warnings=["w"],
        metadata={"a": 1}, packed={},
    )  # fmt: skip
    widener: Any = SimpleNamespace(dequantize=lambda format, rows, columns: rows.reshape(*rows.shape[:-1], columns))
    first, second = np.array([2, 4, 8, 16], np.float32), np.array([2, 4, 8], np.float32)
    scales = [(ScaleFold(4, (("norm", 0),), ("up",)), first), (ScaleFold(3, (("up", 1), ("stack", 3)), ()), second)]
    source = FoldedSource(inner, scales, widener)
    folded = {tensor.name: tensor for tensor in source.tensors}
    rows = {
        name: folded[name].read_rows(0, len(tensors[name].data)).view(np.float32) for name in ("norm", "up", "stack")
    }
    np.testing.assert_array_equal(rows["norm"], tensors["norm"].data / first)
    divided = np.array([1, 2, 4, 8, 1, 1], np.float32)[:, None]
    np.testing.assert_array_equal(rows["up"], tensors["up"].data * first / divided)
    behind = np.tile(np.array([1, 1, 1, 2, 4, 8], np.float32), 2)[:, None]
    np.testing.assert_array_equal(rows["stack"], tensors["stack"].data / behind)
    np.testing.assert_array_equal(folded["stack"].read_rows(7, 11).view(np.float32), rows["stack"][7:11])
    assert folded["free"] is tensors["free"] and {name for name in folded if folded[name].format.name == "F32"} == {
        *folded
    }
    assert (source.path, source.files, source.warnings, source.inner) == ("in.gguf", ["in.gguf"], ["w"], inner)
    assert source.metadata == {"a": 1, SCALED: 2} and [*source.packed] == [SCALED]
    assert FoldedSource(inner, [], widener).metadata == {"a": 1}


# ---- which scales are taken, from what


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Replace encoding by rounding to integers; return the importance of each call."""
    importance = list[np.ndarray]()
    monkeypatch.setattr(
        folding, "encode", lambda format, weights, squares: importance.append(squares) or np.rint(weights)
    )
    monkeypatch.setattr(folding, "dequantize", lambda format, blocks: blocks)
    return importance


@pytest.mark.parametrize("format", ["Q4_K", "Q4_0"])
def test_errors_of_scaled_columns_include_rounded_inputs(format: str, rounding: list[np.ndarray]):
    """Inputs are divided and rounded in blocks of the type."""
    generator = np.random.default_rng(2)
    x, matrix = (generator.normal(0, 3, (rows, 256)).astype(np.float32) for rows in (7, 5))
    scales, squares = np.exp2(generator.integers(-2, 3, 256)).astype(np.float32), np.arange(256, dtype=np.float32)
    error = FoldSample(format, matrix, squares, x).compute_error(scales)
    output = x.astype(float) @ matrix.T
    wrong = round_activations(x / scales, BY_NAME[format].block).astype(float) @ np.rint(matrix * scales).T
    assert error == pytest.approx(((wrong - output) ** 2).sum() / (output**2).sum(), rel=1e-4) and error > 0
    np.testing.assert_allclose(rounding[0], squares / scales**2)


class Judge:
    """A reader that prefers one of the scales that are tried."""

    def __init__(self, squares: list[float], weights: list[list[float]], best: int, error: float):
        self.squares, self.weights, self.heard = np.array(squares), np.array(weights), list[np.ndarray]()
        self.best, self.least = best, error

    def compute_error(self, scales: np.ndarray) -> float:
        self.heard.append(scales)
        return self.least if len(self.heard) == self.best + 2 else 1.0


@pytest.mark.parametrize("best", [0, 4, 8])
@pytest.mark.parametrize(("error", "gains"), [(0.96, True), (0.97, True), (0.99, False), (1.0, False)])
def test_the_best_scales_are_taken_if_they_gain(best: int, error: float, gains: bool):
    """Require that they save a hundredth of the error, in two matrices of which one loses nothing."""
    one = Judge([1, 2, 3, 6], [[1, 2, 1, 0], [1, 0, 1, 2]], best, error)
    other = Judge([40, 20, 10, 10], [[5, 1, 1, 1]], best, 1.0)
    scales = search_scales(ScaleFold(2, (), (), 1, 2), [one, other])
    means = [(1 / 3 + 2, 2 / 3 + 1), (1.0 + 0.5, 2.0 + 0.5)]  # of one and other, relative to each one's mean
    met = np.array([means[0][0] + means[1][0], means[0][1] + means[1][1]]) / 4
    weighed = np.array([1 / 1.5 + 25 / 7 + 1 / 1.5 + 1 / 7, 2 / 1.5 + 1 / 7 + 2 / 1.5 + 1 / 7]) / 4
    tried = [compute_scales(met, weighed, up, down) for up in (0.25, 0.5, 0.75) for down in (0.0, 0.25, 0.5)]
    assert len(one.heard) == 10 and one.heard[0].tolist() == [1] * 4
    for heard, each in zip(one.heard[1:], tried, strict=True):
        np.testing.assert_allclose(heard, np.tile(each, 2), rtol=1e-6)
    if gains:
        assert scales is not None
        np.testing.assert_allclose(scales, tried[best], rtol=1e-6)
    else:
        assert scales is None


def test_scales_are_powers_of_inputs_and_weights():
    """Expect a geometric mean of one."""
    met, weighed = np.array([16.0, 1.0]), np.array([1.0, 16.0])
    np.testing.assert_allclose(compute_scales(met, weighed, 0.5, 0.0), [2**0.5, 2**-0.5], rtol=1e-6)
    np.testing.assert_allclose(compute_scales(met, weighed, 0.5, 0.25), [2**0.75, 2**-0.75], rtol=1e-6)
    np.testing.assert_allclose(compute_scales(np.array([1e30, 1, 0]), np.ones(3), 0.5, 0.5), [64, 1 / 64, 1], rtol=1e-6)
    assert compute_scales(met, weighed, 0.5, 0.5).dtype == np.float32


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [np.inf, np.nan, 1e30])
def test_infinite_inputs_are_refused(number: float):
    x = np.array([[1, 2], [3, 4]], np.float32)
    np.testing.assert_array_equal(compute_input_squares(x, "a"), [5, 10])
    x[1, 0] = number
    with pytest.raises(ModelError, match="the input of tensor a is not finite"):
        compute_input_squares(x, "a")


# ---- what is watched of which matrices


def job_of(name: str, *shape: int, format: str = "Q4_0", before: str = "F32") -> TensorJob:
    """Return a job for a tensor of random values."""
    data = np.random.default_rng(5).normal(size=shape).astype(np.float32).reshape(-1, shape[-1])
    tensor: Any = SimpleNamespace(name=name, shape=shape, data=data, format=BY_NAME[before], release_rows=print)
    return TensorJob(tensor, BY_NAME[format], format)


class OfArrays(FoldMeasurer):
    """A measurer for tensors that are arrays."""

    def dequantize_finite(self, tensor: Any, first: int, end: int) -> np.ndarray:
        assert 0 <= first < end <= len(tensor.data)
        return tensor.data[first:end].copy()


def watched(folds: list[ScaleFold], *jobs: TensorJob, told: Any = lambda *given: None) -> Any:
    return OfArrays({job.tensor.name: job for job in jobs}, None, folds, 2, told)


def texts(n: int, count: int = 4) -> list[np.ndarray]:
    """Return the inputs of matrix n: rows of equal length, so that none is clipped."""
    generator = np.random.default_rng(n)
    return [generator.choice(np.array([-1, 1], np.float32), (9 + k, 32)) * (n + 1) for k in range(count)]


@pytest.mark.parametrize(
    ("shape", "taken"), [((8, 32), [0]), ((2, 8, 32), [0, 1]), ((3, 8, 32), [0, 1, 2]), ((6, 8, 32), [0, 2, 5])]
)
@pytest.mark.parametrize(("most", "step"), [(22, 1), (21, 2), (11, 2), (10, 3)])
def test_a_fold_is_measured_on_samples_of_matrices_rows_and_inputs(
    monkeypatch, shape: tuple[int, ...], taken: list[int], most: int, step: int
):
    """Every second text gives the importance, the others the inputs; a stack gives three matrices."""
    monkeypatch.setattr(folding, "SAMPLE_INPUTS", most)
    monkeypatch.setattr(folding, "SAMPLE_ROWS", 4)
    job = job_of("a", *shape)
    readers = watched([], job)._read(job, MatrixInputs(lambda n: iter(texts(n))))
    for reader, n in zip(readers, taken, strict=True):
        assert reader.format == "Q4_0"
        np.testing.assert_array_equal(reader.weights, job.tensor.data.reshape(-1, 8, 32)[n][[0, 2, 4, 7]])
        np.testing.assert_allclose(reader.squares, np.full(32, (n + 1) ** 2))
        np.testing.assert_array_equal(reader.inputs, np.concatenate(texts(n)[1::2])[::step])


def test_matrices_without_encoding_output_or_inputs_are_not_measured():
    job, copied, plain = job_of("a", 8, 32), job_of("b", 8, 32, before="Q4_0"), job_of("c", 8, 32, format="F16")
    met = MatrixInputs(lambda n: iter(texts(n)))
    assert [len(watched([], one)._read(one, met)) for one in (job, copied, plain)] == [1, 0, 0]
    assert watched([], job)._read(job, MatrixInputs(lambda n: iter([texts(0)[0], texts(0)[0][:0]]))) == []
    assert watched([], job)._read(job, MatrixInputs(lambda n: iter([texts(0)[0][:0], texts(0)[0]]))) == []
    job.tensor.data[:] = 0
    assert watched([], job)._read(job, met) == []


def test_a_fold_is_measured_after_all_its_matrices(monkeypatch):
    """Count each matrix once; expect no scales for a fold that gains nothing."""
    searches, progress = list[Any](), list[Any]()
    scales = {"a": np.full(32, 2, np.float32), "c": None}

    def search_scales(fold: ScaleFold, readers: Any, threads: int) -> Any:
        searches.append((fold.multiplied, len(readers), threads))
        return scales[fold.multiplied[0]]

    monkeypatch.setattr(folding, "search_scales", search_scales)
    folds = [ScaleFold(32, (), names) for names in (("a", "b"), ("c",), ("copied",), ("output.weight",))]
    jobs = [job_of(name, 8, 32) for name in ("a", "b", "c", "free", "output.weight")]
    jobs.append(job_of("copied", 8, 32, before="Q4_0"))
    watching, met = (
        watched(folds, *jobs, told=lambda *given: progress.append(given)),
        MatrixInputs(lambda n: iter(texts(n))),
    )
    scales["output.weight"] = np.full(32, 3, np.float32)
    for name in ("a", "c", "free", "a", "b", "copied", "a"):
        weight: Any = SimpleNamespace(name=name, shape=(8, 32), first_row=0)
        assert watching.resolve(weight, met).shape == (8, 32)
    with pytest.raises(StopCalibrationError):
        watching.resolve(SimpleNamespace(name="output.weight", shape=(8, 32), first_row=0), met)
    assert searches == [(("c",), 1, 2), (("a", "b"), 2, 2), (("output.weight",), 1, 2)]
    assert progress == [(2, "c"), (3, "b"), (4, "copied"), (5, "output.weight")]
    assert {fold.multiplied[0]: scale[0] for fold, scale in watching.scales.items()} == {"a": 2, "output.weight": 3}


def test_measured_scales_are_concatenated_for_all_folds(monkeypatch):
    """Folds that gain nothing have ones; without folds nothing runs."""
    progress, heard = list[Any](), list[Any]()

    class Calibrating(SimpleNamespace):
        jobs: Any = {}  # noqa: RUF012

        def select_chunks(self, *given: int) -> Any:
            return given

        def forward(self, watching: Any, chunks: Any, threads: int) -> None:
            heard.append((chunks, threads))
            assert watching.jobs is self.jobs
            watching.scales[folds[1]] = np.array([2, 3], np.float32)
            watching._on_fold(3, "x")

    folds = [ScaleFold(1, (), ("a", "b")), ScaleFold(2, (), ("c",)), ScaleFold(3, (), ("d",))]
    calibration: Any = Calibrating()
    measured = folding.measure_scales(calibration, folds, None, 5, lambda *given: progress.append(given))
    assert measured.tolist() == [1, 2, 3, 1, 1, 1] and measured.dtype == np.float32
    assert (heard, progress) == ([((12, 256), 5)], [(3, 4, "x")])
    assert folding.measure_scales(calibration, [], None, 5, print).tolist() == [] and len(heard) == 1


def test_measured_scales_are_stored_for_the_next_run(monkeypatch, tmp_path: Path):
    """Store them by the recipe's types alone, not by those that a plan chooses."""
    calls, measured = list[Any](), list[Any]()
    jobs = [job_of("a", 8, 32), job_of("b", 8, 32, format="F16"), job_of("odd", 8, 32, before="I32")]
    folds = [ScaleFold(2, (), ("a",)), ScaleFold(1, (), ("a",)), ScaleFold(3, (), ("a",))]
    monkeypatch.setattr(folding, "make_plan", lambda *given: calls.append(given) or SimpleNamespace(jobs=jobs))
    monkeypatch.setattr(folding, "Calibration", lambda plan, texts: calls.append(texts) or "calibration")
    monkeypatch.setattr(folding, "RowDequantizer", lambda formats, compiling: (formats, compiling))
    monkeypatch.setattr(folding, "find_foldable", lambda calibration: folds)
    scales_found = np.array([2, 1, 1, 1, 1, 3], np.float32)
    monkeypatch.setattr(folding, "measure_scales", lambda *given: measured.append(given) or scales_found)
    monkeypatch.setattr(folding, "FoldedSource", Folding)
    request = QuantizeRequest(RECIPES["Q4_0"], texts=["t"])
    request = replace(request, options=request.options._replace(formats={"a": "Q8_0"}))
    for _ in range(2):
        with ArrayLog(tmp_path / "done", "key") as done:
            folded_source: Any = folding.fold_scales("source", request, 3, print, "compiling", done)
        source, scales, widener = folded_source.records_input
        assert source == "source" and widener == ({BY_NAME["F32"]}, "compiling")
        assert [(fold, part.tolist()) for fold, part in scales] == [(folds[0], [2, 1]), (folds[2], [1, 1, 3])]
    assert measured == [("calibration", folds, widener, 3, print)]
    assert calls[0] == ("source", replace(request, options=request.options._replace(formats={}))) and calls[1] == ["t"]
    assert folding.fold_scales(folded_source, request, 3, print) is folded_source and len(calls) == 4
    folding.fold_scales("source", replace(request, texts=None), 3, print)
    assert len(measured) == 2 and calls[-1] == ()


class Folding:
    """A stand-in for a folded source."""

    def __init__(self, *given: Any):
        self.records_input = given


@pytest.mark.parametrize(
    ("fold", "is_possible"),
    [
        (ScaleFold(1, (("made", 0),), ("a",)), True), (ScaleFold(1, (("made", 0),), ("plain",)), False),
        (ScaleFold(1, (("made", 0),), ("plain", "a")), True), (ScaleFold(1, (("odd", 0),), ("a",)), False),
        (ScaleFold(1, (("made", 0), ("odd", 5)), ("a",)), False), (ScaleFold(1, (("made", 0),), ("a", "odd")), False),
    ],
)  # fmt: skip
def test_folds_need_dequantizable_tensors_and_an_encoded_matrix(fold: ScaleFold, is_possible: bool):
    jobs = [job_of("a", 8, 32), job_of("plain", 8, 32, format="F16"), job_of("made", 8, 32, before="Q4_0")]
    jobs.append(job_of("odd", 8, 32, before="I32"))
    calibration: Any = SimpleNamespace(jobs={job.tensor.name: job for job in jobs}, find_folds=lambda: [fold])
    assert folding.find_foldable(calibration) == [fold] * is_possible


# ---- where scales can be folded, verb by verb


class Model:
    """Recorded verbs and the tensors that they use."""

    def __init__(self):
        self.builder, self.tensors = Recorder(SimpleNamespace(vocab_size=9, width=4), 32), dict[str, Tensor]()
        self.x = Activation(ALL, 4)

    def weight(self, name: str, *shape: int, bias: int = 0, scale: bool = False) -> Weight:
        tensor, parts = self._made(name, shape), []
        for kind, size in (("bias", bias), ("scale", int(scale))):
            parts.append(Weight(self._made(f"{name}.{kind}", (size,))) if size else None)
        return Weight(tensor, *parts)

    def _made(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.tensors[name] = Tensor(name, BY_NAME["F32"], shape, np.ones(shape, np.float32).view(np.uint8))
        return self.tensors[name]

    def found(self, *kept: str) -> list[tuple]:
        return [tuple(fold) for fold in find_folds(self.builder.operations, self.tensors, kept)]


def normed(m: Model, bias: int = 0) -> Activation:
    return m.builder.layer_norm(m.x, m.weight("norm", 4, bias=bias), 1e-5)


def read_by_two(m):
    y = normed(m, bias=4)
    m.builder.linear(y, m.weight("a", 3, 4))
    m.builder.linear(y, m.weight("b", 5, 4))


def read_by_a_bias_too(m):
    y = normed(m)
    m.builder.linear(y, m.weight("a", 4, 4))
    m.builder.add(y, y)


def read_by_nobody(m):
    normed(m)


def gated(verb, up_first=False):
    def say(m):
        b, gate, up = m.builder, m.weight("gate", 6, 4), m.weight("up", 6, 4, bias=6)
        gate, up = b.linear(m.x, gate), b.linear(m.x, up)
        b.linear(getattr(b, verb)(*((up, gate) if up_first else (gate, up))), m.weight("down", 4, 6))

    return say


def squared(m):
    y = m.builder.linear(m.x, m.weight("up", 6, 4))
    m.builder.linear(m.builder.multiply(y, y), m.weight("down", 4, 6))


def scaled(m):
    m.builder.linear(m.builder.linear(m.x, m.weight("up", 6, 4, scale=True)), m.weight("down", 4, 6))


def also_used_elsewhere(m):
    y, down = m.builder.linear(m.x, m.weight("up", 4, 4)), m.weight("down", 4, 4)
    m.builder.linear(y, down)
    m.builder.linear(m.x, down)


def used_twice(m):
    y, down = normed(m), m.weight("down", 4, 4)
    for _ in range(2):
        m.builder.linear(y, down)


def parts_of_one(first_of_second):
    """Two matrices of 4 rows are parts of one of 9."""

    def say(m):
        whole = m.weight("whole", 9, 4)
        first, second = whole._slice_rows(0, 4), whole._slice_rows(first_of_second, first_of_second + 4)
        m.builder.linear(m.builder.linear(m.x, first), m.weight("a", 3, 4))
        m.builder.linear(m.builder.linear(m.x, second), m.weight("b", 3, 4))

    return say


def part_of_columns(m):
    y, whole = normed(m), m.weight("whole", 3, 4)
    m.tensors["whole"] = Tensor("whole", BY_NAME["F32"], (3, 8), np.zeros((3, 32), np.uint8))
    m.builder.linear(y, whole)


def without_a_tensor(m):
    m.builder.linear(normed(m), m.weight("a", 3, 4))
    del m.tensors["norm"]


def experts(bias=0):
    def say(m):
        b, x = m.builder, m.x
        choice = b.route(b.linear(x, m.weight("gate_inp", 3, 4)), Routing(3, 1))
        up = m.weight("up", 3, 6, 4)
        if bias:
            up = Weight(up.tensor, Weight(m.weight("up.bias", 3, 6).tensor))
        y = b.expert_linear(b.gather(x, choice), up, choice)
        b.scatter(b.expert_linear(y, m.weight("down", 3, 4, 6), choice), choice)

    return say


def attended(state, twice=False):
    def say(m):
        b, made, heads = m.builder, {}, 4
        for name, columns in (("q", heads * 4), ("k", state.kv_heads * 4), ("v", state.kv_heads * state.value_dim)):
            made[name] = b.linear(m.x, m.weight(name, columns, 4))
        new = (made["k"], made["v"]) if isinstance(state, PagedState) else (made["k"], None)
        y = b.attend(made["q"], *new, state, AttentionScores(heads, 1.0))
        if twice:
            b.attend(made["q"], None, None, state, AttentionScores(heads, 1.0))
        b.linear(y, m.weight("out", 4, heads * state.value_dim))

    return say


UP = (6, (("up", 0), ("up.bias", 0)), ("down",), 1, 1)
FOUND = {
    "a norm of two matrices": (read_by_two, [(4, (("norm", 0), ("norm.bias", 0)), ("a", "b"), 1, 1)]),
    "something else reads it": (read_by_a_bias_too, []),
    "nobody": (read_by_nobody, []),
    "swiglu": (gated("swiglu"), [UP]),
    "geglu": (gated("geglu"), [UP]),
    "the gate of swiglu": (gated("swiglu", True), [(6, (("gate", 0),), ("down",), 1, 1)]),
    "a product": (gated("multiply"), [(6, (("gate", 0),), ("down",), 1, 1), UP]),
    "a sum": (gated("add"), []),
    "a square": (squared, []),
    "a scale": (scaled, []),
    "a matrix that others read": (also_used_elsewhere, []),
    "a matrix twice": (used_twice, [(4, (("norm", 0),), ("down",), 1, 1)]),
    "rows apart": (parts_of_one(4), [(4, (("whole", 0),), ("a",), 1, 1), (4, (("whole", 4),), ("b",), 1, 1)]),
    "rows further apart": (parts_of_one(5), [(4, (("whole", 0),), ("a",), 1, 1), (4, (("whole", 5),), ("b",), 1, 1)]),
    "rows of both": (parts_of_one(3), []),
    "the same rows": (parts_of_one(0), []),
    "some columns": (part_of_columns, []),
    "no tensor of the file": (without_a_tensor, []),
    "experts": (experts(), [(6, (("up", 0),), ("down",), 1, 1)]),
    "experts with biases": (experts(6), []),
    "values": (attended(PagedState(0, 2, 4, 3)), [(6, (("v", 0),), ("out",), 2, 2)]),
    "values of a head each": (attended(PagedState(0, 4, 4, 3)), [(12, (("v", 0),), ("out",), 4, 1)]),
    "values that another layer reads": (attended(PagedState(0, 2, 4, 3), True), []),
    "one row for keys and values": (attended(LatentState(0, 4, 3)), []),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_folds_are_found_verb_by_verb(case):
    say, expected = FOUND[case]
    say(model := Model())
    assert model.found() == expected


@pytest.mark.parametrize(("kept", "left"), [("a", 0), ("norm", 0), ("norm.bias", 0), ("c", 1)])
def test_tensors_that_must_not_change_are_not_folded(kept, left):
    read_by_two(model := Model())
    assert len(model.found(kept)) == left
