"""Test the original weights during calibration: which rows are read, and which pages released."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.engine.operations.attention import Attend
from localllm.engine.operations.operation import StateOperation
from localllm.errors import UnsupportedError
from localllm.files.gguf.file import Tensor
from localllm.files.gguf.tensor_source import GGUFModelSource
from localllm.quant.formats import BY_NAME
from localllm.quantizing import calibrate
from localllm.quantizing import original_weights as originals
from localllm.quantizing.calibrate import CalibratedMatrices, Calibration, view_as_gguf
from localllm.quantizing.layerwise_runner import MatrixInputs, StopCalibrationError
from localllm.quantizing.original_weights import OriginalWeights
from localllm.quantizing.plan import QuantizePlan, TensorJob
from localllm.quantizing.sources import FoldedSource


class Numbered:
    """A tensor whose rows contain their indices; records the released rows."""

    format = BY_NAME["F32"]

    def __init__(self, name: str, *shape: int, before: str = "F32"):
        self.name, self.shape, self.format = name, shape, BY_NAME[before]
        self.data = np.arange(np.prod(shape[:-1])).repeat(shape[-1]).reshape(-1, shape[-1]).astype(np.float32)
        self.forgotten = list[tuple[int, int]]()

    def release_rows(self, first: int, end: int) -> None:
        self.forgotten.append((first, end))

    def read_rows(self, first: int, end: int) -> np.ndarray:
        return self.data[first:end]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace dequantizing; nothing has to be widened."""

    def widened(widener: Any, tensor: Numbered, first: int, end: int) -> np.ndarray:
        assert 0 <= first < end <= len(tensor.data)
        return tensor.data[first:end]

    monkeypatch.setattr(originals, "dequantize_finite", widened)


def job_of(tensor: Any, format: str = "Q4_0", makes_logits: bool = False) -> TensorJob:
    return TensorJob(tensor, BY_NAME[format], format, None, makes_logits)


def as_they_are(*tensors: Any) -> OriginalWeights:
    return OriginalWeights({tensor.name: job_of(tensor) for tensor in tensors}, None)


def weight(name: str, *shape: int, first_row: int = 0) -> Any:
    return SimpleNamespace(name=name, shape=shape, first_row=first_row)


def numbers(rows: np.ndarray) -> list[int]:
    return rows[:, 0].astype(int).tolist()


def test_rows_of_an_embedding_are_read_by_id():
    matrices = as_they_are(Numbered("e", 9, 4))
    assert numbers(matrices.read_rows(weight("e", 9, 4), np.array([5, 0, 5, 8]))) == [5, 0, 5, 8]
    assert numbers(matrices.read_rows(weight("e", 4, 4, first_row=3), np.array([2, 1]))) == [5, 4]


def test_rows_of_a_matrix_or_of_one_in_a_stack_are_read_and_released():
    matrix, stack = Numbered("m", 9, 4), Numbered("s", 3, 5, 4)
    matrices = as_they_are(matrix, stack)
    met = matrices.resolve(weight("m", 4, 4, first_row=3), None)
    assert met.shape == (4, 4) and numbers(met.read_range(0, 1, 3)) == [4, 5] and matrix.forgotten == [(4, 6)]
    met = matrices.resolve(weight("s", 3, 2, 4, first_row=3), None)
    assert met.shape == (3, 2, 4) and numbers(met.read_range(2, 0, 2)) == [13, 14] and stack.forgotten == [(13, 15)]
    with pytest.raises(UnsupportedError, match=r"^tensor m: experts in separate tensors cannot be calibrated$"):
        matrices.resolve(weight("m", 2, 9, 4), None)


@pytest.mark.parametrize(
    ("most", "places"), [(1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (5, [*range(5)]), (99, [*range(5)])]
)
def test_rows_are_sampled_evenly(most: int, places: list[int]):
    stack = Numbered("s", 3, 5, 4)
    for n in range(3):
        assert numbers(as_they_are(stack).sample_rows(stack, n, most)) == [5 * n + place for place in places]
    assert stack.forgotten == [(0, 5), (5, 10), (10, 15)]


@pytest.mark.parametrize(
    ("at_once", "pieces"), [(1, [1] * 5), (8, [2, 2, 1]), (11, [2, 2, 1]), (12, [3, 2]), (20, [5])]
)
def test_rows_are_iterated_in_chunks(monkeypatch: pytest.MonkeyPatch, at_once: int, pieces: list[int]):
    monkeypatch.setattr(originals, "ENCODED_WEIGHTS", at_once)
    stack = Numbered("s", 3, 5, 4)
    chunks = [*as_they_are(stack).iterate_rows(stack, 1)]
    assert [len(piece) for piece in chunks] == pieces and numbers(np.concatenate(chunks)) == [*range(5, 10)]
    assert [end - first for first, end in stack.forgotten] == pieces and stack.forgotten[0][0] == 5


# ---- encoded ones


class Encoding:
    """Add 100 to rows in place of encoding, and record the calls."""

    def __init__(self, pieces: list[np.ndarray], columns: int, threads: int, is_read: bool):
        self.records_input = [numbers(piece) for piece in pieces], columns, threads, is_read
        self.halves = [np.eye(2), np.eye(2) * (np.nan if pieces[0][0, 0] == 99 else 1)]

    def build_encoder(self, format: str, some: np.ndarray) -> Any:
        heard.append((*self.records_input, format, len(some)))
        return SimpleNamespace(encode=lambda format, rows: rows + 100)


heard = list[Any]()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the encoded matrices, by name."""
    heard.clear()
    encoded = dict[str, np.ndarray]()
    monkeypatch.setattr(calibrate, "Hessian", Encoding)
    monkeypatch.setattr(calibrate, "encode", lambda format, rows: rows + 50)
    monkeypatch.setattr(calibrate, "dequantize", lambda format, blocks: blocks)

    class Done(dict[str, Any]):
        def add(self, name: str, rows: np.ndarray) -> None:
            encoded[name] = self[name] = rows

        def read(self, name: str, first: int, end: int) -> np.ndarray:
            width = BY_NAME["Q4_0"].row_bytes(32)
            assert first % width == end % width == 0
            rows = np.zeros(((end - first) // width, width), np.uint8)
            rows[:, 0] = self[name][first // width : end // width, 0]
            return rows

    return Done()


def meeting(done: Any, *jobs: TensorJob) -> Any:
    reported = list[Any]()
    widener = SimpleNamespace(dequantize=lambda format, rows, columns: rows[:, :1].repeat(columns, axis=1))
    matrices = CalibratedMatrices(
        {job.tensor.name: job for job in jobs}, done, widener, 3, lambda *of: reported.append(of)
    )
    matrices.told = reported
    return matrices


def met_by(*values: int, shared: Any = None) -> MatrixInputs:
    return MatrixInputs(lambda n: iter([np.full((2, 32), value + n, np.float32) for value in values]), shared)


def test_a_matrix_is_encoded_once_with_its_inputs(done: Any):
    matrices = meeting(
        done, job_of(Numbered("a", 3, 32)), job_of(Numbered("s", 2, 3, 32)), job_of(Numbered("f", 3, 32), "F16")
    )
    met = matrices.resolve(weight("a", 3, 32), met_by(7, 8))
    assert numbers(met.read_range(0, 1, 3)) == [101, 102] and heard == [([[7] * 2, [8] * 2], 32, 3, False, "Q4_0", 3)]
    matrices.resolve(weight("a", 3, 32), met_by(7, 8))
    met = matrices.resolve(weight("s", 2, 3, 32), met_by(4))
    assert numbers(met.read_range(1, 0, 2)) == [103, 104] and [given[0] for given in heard[1:]] == [
        [[4] * 2],
        [[5] * 2],
    ]
    assert numbers(matrices.resolve(weight("f", 3, 32), met_by(1)).read_range(0, 0, 2)) == [0, 1], "as it is"
    assert matrices.told == [(96, "a"), (96 + 192, "s")]


def test_a_matrix_that_was_encoded_before_is_read(done: Any):
    done["a"] = np.full((3, 32), 9)
    matrices = meeting(done, job_of(Numbered("a", 3, 32)))
    assert numbers(matrices.resolve(weight("a", 3, 32), met_by(7)).read_range(0, 0, 2)) == [9, 9]
    assert heard == [] and matrices.told == [(96, "a")]


def test_moments_of_shared_inputs_are_computed_once(done: Any):
    shared = object()
    matrices = meeting(done, *(job_of(Numbered(name, 3, 32)) for name in "abc"))
    for name, met in (("a", met_by(1, shared=shared)), ("b", met_by(2, shared=shared)), ("c", met_by(3))):
        matrices.resolve(weight(name, 3, 32), met)
    assert [given[0] for given in heard] == [[[1, 1]], [[1, 1]], [[3, 3]]]


def test_the_logits_matrix_is_encoded_last_with_its_embedding_errors(done: Any):
    matrices = meeting(done, job_of(Numbered("token_embd.weight", 3, 32), makes_logits=True))
    with pytest.raises(StopCalibrationError):
        matrices.resolve(weight("token_embd.weight", 3, 32), met_by(1))
    assert heard[0][3] is True and matrices.told == [(96, "token_embd.weight")]
    with pytest.raises(calibrate.ModelError, match="the input of tensor a is not finite"):
        meeting(done, job_of(Numbered("a", 3, 32))).resolve(weight("a", 3, 32), met_by(99))


def test_embedding_rows_are_rounded_unless_they_make_the_logits(done: Any):
    """The inputs of the latter are not known yet."""
    tensors = [Numbered(name, 3, 32) for name in "abc"]
    jobs = [job_of(tensors[0]), job_of(tensors[1], makes_logits=True), job_of(tensors[2], "F16")]
    matrices = meeting(done, *jobs)
    rows = [numbers(matrices.read_rows(weight(name, 3, 32), np.array([2, 0]))) for name in "abc"]
    assert rows == [[52, 50], [2, 0], [2, 0]]


# ---- sources and chunks


def test_a_checkpoint_is_opened_as_a_file_with_values_of_vectors_only():
    """Read matrices only when they are needed."""
    vector, matrix = Numbered("v", 4), Numbered("m", 3, 32, before="Q4_0")
    vector.data = np.arange(4, dtype=np.float32).reshape(1, 4)
    source: Any = SimpleNamespace(path="folder", metadata={"a": 1}, tensors=[vector, matrix])
    file = view_as_gguf(source)
    assert (file.path, file.metadata, [*file.tensors]) == ("folder", {"a": 1}, ["v", "m"])
    assert file.tensors["v"].data.tolist() == [0, 1, 2, 3] and isinstance(file.tensors["m"], Tensor)
    hollow = file.tensors["m"]
    assert (hollow.format.name, hollow.shape, hollow.data.shape) == ("Q4_0", (3, 32), (3, 18))
    assert not hollow.data.any() and hollow.data.strides == (0, 0)


def test_a_folded_source_is_opened_as_its_file_with_other_vectors():
    inner: Any = GGUFModelSource.__new__(GGUFModelSource)
    inner.file = SimpleNamespace(tensors={"v": "old", "m": "matrix"})
    assert view_as_gguf(inner) is inner.file
    vector, matrix = Numbered("v", 4), Numbered("m", 3, 32)
    source = FoldedSource.__new__(FoldedSource)
    source.inner, source.path, source.metadata = inner, "in.gguf", {"scaled": 1}
    source.folded = {"v": vector, "m": matrix}
    file = view_as_gguf(source)
    assert (file.path, file.metadata, file.tensors["m"]) == ("in.gguf", {"scaled": 1}, "matrix")
    assert (file.tensors["v"].name, file.tensors["v"].format, file.tensors["v"].shape) == ("v", BY_NAME["F32"], (4,))
    assert file.tensors["v"].data.tolist() == [0] * 4 and (file.packed, file.parts) == ({}, {})


@pytest.fixture
def key_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function of a plan's properties to the calibration's key."""
    monkeypatch.setattr(calibrate, "lower_mmap_threshold", lambda size: None)
    monkeypatch.setattr(calibrate, "view_as_gguf", lambda source: source)
    monkeypatch.setattr(calibrate, "load_architecture", lambda file: ("module", SimpleNamespace(context=77)))
    monkeypatch.setattr(calibrate, "Tokenizer", SimpleNamespace(from_metadata=lambda metadata: metadata))

    def key(
        size: int = 5, time: int = 100, shape: tuple[int, int] = (3, 32), format: str = "Q4_0", kind: int = 2,
        chunks: tuple[int, ...] = (1, 2), files: tuple[str, ...] = ("a", "gone"),
    ) -> str:  # fmt: skip
        (tmp_path / "a").write_bytes(b"x" * size)
        os.utime(tmp_path / "a", (time, time))
        monkeypatch.setattr(calibrate, "load_chunks", lambda tokenizer, texts, context: [np.array(chunks)])
        source = SimpleNamespace(metadata={}, files=[str(tmp_path / name) for name in files])
        jobs = [job_of(Numbered("a", *shape), format)]
        plan: Any = SimpleNamespace(source=source, jobs=jobs, files=[({"general.file_type": kind}, jobs)])
        return Calibration(plan, ["t"]).key

    return key


def test_the_calibration_key_depends_on_model_types_and_texts(key_of: Any):
    changes: list[dict[str, Any]] = [
        {"size": 6}, {"time": 101}, {"shape": (4, 32)}, {"format": "Q8_0"}, {"kind": 3}, {"chunks": (2, 1)},
        {"files": ()},
    ]  # fmt: skip
    keys = [key_of(), *(key_of(**change) for change in changes)]
    assert len(set(keys)) == len(keys) and key_of() == keys[0]


def test_chunks_are_selected_evenly():
    calibration = Calibration.__new__(Calibration)
    calibration.chunks = [np.arange(10) + 100 * number for number in range(7)]
    for count, expected in ((1, [0]), (2, [0, 6]), (3, [0, 3, 6]), (7, [*range(7)]), (99, [*range(7)])):
        assert [int(chunk[0]) // 100 for chunk in calibration.select_chunks(count)] == expected
    assert [len(chunk) for chunk in calibration.select_chunks(2, 4)] == [4, 4] and len(
        calibration.select_chunks(1)[0]
    ) == 10
    calibration._hyperparameters = SimpleNamespace(encode=True)
    assert calibration.find_folds() == [], "models of two parts are not scaled"


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a calibration without a model, which records calls in `heard`."""
    calibration: Any = Calibration.__new__(Calibration)
    calibration.heard, calibration.chunks = [], [np.arange(5), np.arange(9)]
    calibration._file = SimpleNamespace(tensors="tensors")
    calibration._hyperparameters = SimpleNamespace(encode=None, mtp_layers=0)
    calibration._model = SimpleNamespace(forward=lambda *given: calibration.heard.append(given) or "logits")
    states = SimpleNamespace(operations=[
        kind((), None, state, *[None] * more)
        for kind, state, more in ((Attend, "a", 11), (Attend, "b", 11), (Attend, "a", 11), (StateOperation, "b", 0))
    ])  # fmt: skip

    class Builder:
        def __init__(self, *given: Any):
            calibration.heard.append(given)

        def close(self) -> None:
            calibration.heard.append("closed")

    monkeypatch.setattr(calibrate, "Weights", lambda tensors: f"weights of {tensors}")
    monkeypatch.setattr(calibrate, "trace_model", lambda *given: calibration.heard.append(given) or states)
    monkeypatch.setattr(calibrate, "find_folds", lambda *given: given)
    monkeypatch.setattr(
        calibrate, "LastUseRecorder", lambda: SimpleNamespace(record=lambda forward: ("watched", forward))
    )
    monkeypatch.setattr(calibrate, "LayerwiseRunner", Builder)
    monkeypatch.setattr(calibrate, "plan_reuse", lambda *given: given[1:])
    return calibration


@pytest.mark.parametrize(
    ("guessing", "kept"), [(0, ("token_embd.weight",)), (1, ("output.weight", "token_embd.weight"))]
)
def test_folds_are_traced_at_the_longest_chunk(reading: Any, guessing: int, kept: tuple[str, ...]):
    """Include an MTP layer, which also reads the output matrix."""
    reading._hyperparameters.mtp_layers = guessing
    operations, tensors, held = reading.find_folds()
    assert (len(operations), tensors, held) == (4, "tensors", kept)
    expected = (reading._file, reading._model.forward, "weights of tensors", reading._hyperparameters, 9)
    assert reading.heard == [expected]


def test_logits_close_their_runner_and_forwarding_may_stop_early(reading: Any):
    """States that several layers read are kept; after the last matrix no logits are needed."""
    forward = reading._model.forward
    assert reading.compute_logits("matrices", reading.chunks, 3, "past") == "logits"
    traced, built, (builder, weights, h), closed = reading.heard
    assert traced[1:] == (("watched", forward), "weights of tensors", reading._hyperparameters, 9)
    assert built[0] is reading.chunks and built[1:4] == ({"a"}, "matrices", 3) and built[5] == "past"
    assert (type(builder).__name__, weights, h, closed) == (
        "Builder",
        "weights of tensors",
        reading._hyperparameters,
        "closed",
    )
    assert reading.plan_reuse(reading.chunks, [["a"]]) == ({"a"}, [["a"]])

    def finished(*given: Any) -> Any:
        raise StopCalibrationError

    reading._model.forward = finished
    assert reading.forward("matrices", reading.chunks, 3) is None and reading.heard[-1] == "closed"
    with pytest.raises(AssertionError):
        reading.compute_logits("matrices", reading.chunks, 3)


def test_calibration_metadata_goes_to_the_first_file_of_a_plan():
    calibration: Any = Calibration.__new__(Calibration)
    calibration._metadata = {"calibration.texts": "t"}
    plan: Any = QuantizePlan("source", [({"a": 1}, ["x"]), ({"b": 2}, ["y"])], [])
    assert calibration.add_metadata(plan).files == [({"a": 1, "calibration.texts": "t"}, ["x"]), ({"b": 2}, ["y"])]
