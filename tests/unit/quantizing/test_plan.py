"""Test plans of `quantize` without encoding: ranges of weights, importance, warnings, and metadata."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from localllm.errors import ModelError, UsageError
from localllm.files.gguf.writer import PackedValue, pack_value
from localllm.files.imatrix_file import ImportanceMatrix, SquaredActivations
from localllm.quant.formats import BY_NAME, RECIPES
from localllm.quant.recipes import RecipeOptions
from localllm.quantizing import calibrate, quantize
from localllm.quantizing import plan as quantize_plan
from localllm.quantizing import scale_folding as folding
from localllm.quantizing.plan import (
    COPY,
    QuantizeRequest,
    TensorJob,
    describe_fallbacks,
    find_importance,
    make_plan,
    match_type,
)
from localllm.quantizing.quantize import derive_output, find_type, open_source
from tests.unit.quantizing.quantize_parts import arrays, write_imatrix, write_model


def tensor(name: str = "blk.0.attn_q.weight", shape: tuple[int, ...] = (4, 256), format: str = "F32") -> Any:
    return SimpleNamespace(name=name, shape=shape, format=BY_NAME[format])


def job(name: str, wanted: str, format: str, **more: Any) -> TensorJob:
    return TensorJob(tensor(name, **more), BY_NAME[format], wanted)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf")


def plan(path: Path, recipe: str, **request: Any) -> quantize_plan.QuantizePlan:
    return make_plan(open_source(str(path)), QuantizeRequest(COPY if recipe == "COPY" else RECIPES[recipe], **request))


@pytest.mark.parametrize(("shape", "chunk", "ranges"), [
    ((10, 4), 12, [(0, 3), (3, 6), (6, 9), (9, 10)]), ((10, 4), 40, [(0, 10)]),
    ((10, 4), 3, [(n, n + 1) for n in range(10)]),
    ((3, 2, 4), 100, [(0, 2), (2, 4), (4, 6)]), ((2, 3, 4), 8, [(0, 2), (2, 3), (3, 5), (5, 6)]), ((8,), 2, [(0, 1)]),
    ((2, 1, 2, 4), 100, [(0, 2), (2, 4)]),
])  # fmt: skip
def test_weights_are_encoded_in_ranges_of_rows(shape, chunk, ranges, monkeypatch):
    """Expect at least one row per range, and no range across matrices of a stack."""
    monkeypatch.setattr(quantize_plan, "CHUNK_WEIGHTS", chunk)
    assert job("x", "Q8_0", "Q8_0", shape=shape).divide_rows() == ranges


def test_plans_count_sizes_and_bits_before_and_after(model: Path):
    f16_plan = plan(model, "F16")
    before = sum(array.nbytes for array in arrays().values())
    vectors = sum(array.nbytes for array in arrays().values() if array.ndim == 1)
    assert (
        f16_plan.nbytes_before == before and f16_plan.bits_per_weight_before == 32 and f16_plan.weights == before // 4
    )
    assert f16_plan.bits_per_weight == pytest.approx(8 * ((before - vectors) / 2 + vectors) / f16_plan.weights)
    assert {each.tensor.name for each in f16_plan.jobs if each.is_copied} == {
        name for name, array in arrays().items() if array.ndim == 1
    }


def test_split_outputs_are_numbered(model: Path):
    one = plan(model, "F16")
    three = replace(one, files=[({}, [])] * 3)
    assert one.list_paths("a.gguf") == ["a.gguf"] and one.list_paths("b") == ["b"]
    names = ["a-00001-of-00003.gguf", "a-00002-of-00003.gguf", "a-00003-of-00003.gguf"]
    assert three.list_paths("a.gguf") == three.list_paths("a") == three.list_paths("a-00001-of-00002.gguf") == names


def test_equal_fallbacks_are_reported_once():
    jobs = [job("a", "Q4_K", "Q5_0"), job("b", "Q4_K", "Q5_0"), job("c", "Q4_K", "Q5_0"), job("d", "Q6_K", "Q8_0"),
            job("e", "Q4_K", "Q4_K")]  # fmt: skip
    why = "because the row length is not a multiple of 256"
    assert describe_fallbacks(jobs) == [f"a and 2 more: Q5_0 instead of Q4_K, {why}", f"d: Q8_0 instead of Q6_K, {why}"]


# ---- importance


def matrix(name: str, shape: tuple[int, ...]) -> ImportanceMatrix:
    sums = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    return ImportanceMatrix({name: SquaredActivations(sums, np.ones(shape[0]))})


def test_importance_with_the_wrong_shape_is_refused():
    experts = tensor("blk.0.ffn_up_exps.weight", (3, 2, 4))
    importance = find_importance(experts, matrix(experts.name, (3, 4)))
    assert (
        importance is not None
        and importance.shape == (3, 4)
        and importance.dtype == np.float32
        and importance[1, 0] == 5
    )
    assert find_importance(experts, None) is None and find_importance(experts, matrix("other", (3, 4))) is None
    with pytest.raises(ModelError, match=r"has the shape \[1, 4\], expected \[3, 4\]"):
        find_importance(experts, matrix(experts.name, (1, 4)))
    embedding = tensor("token_embd.weight", (9, 4))
    assert find_importance(embedding, matrix(embedding.name, (1, 5))) is None  # an accident
    assert find_importance(embedding, matrix(embedding.name, (1, 4))) is not None


@pytest.fixture
def imatrix(tmp_path: Path) -> str:
    return write_imatrix(tmp_path / "i.gguf", {name: np.ones((1 if array.ndim < 3 else 3, array.shape[-1]), np.float32)
                                               for name, array in arrays().items() if array.ndim > 1})  # fmt: skip


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"),
        ("blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"),
        ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"),
        ("blk.0.ffn_gate_shexp.weight", "blk.0.ffn_up_shexp.weight"),
        ("blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_up_exps.weight"),
    ],
)
def test_gate_and_up_share_their_importance(name: str, entry: str):
    one, measured = tensor(name, (3, 2, 4)), matrix(entry, (3, 4))
    importance = find_importance(one, measured)
    assert importance is not None and np.array_equal(importance, measured.squares[entry].average())
    assert find_importance(one, measured, QuantizeRequest(COPY, exclude=("ffn",)).selects) is None
    assert find_importance(one, matrix(entry.replace("blk.0", "blk.1"), (3, 4))) is None


def test_types_without_blocks_use_no_importance(model: Path, imatrix: str):
    for recipe, searched in (("F16", False), ("BF16", False), ("Q8_0", True)):
        jobs = {each.tensor.name: each for each in plan(model, recipe, imatrix=imatrix).jobs}
        assert (jobs["output.weight"].importance is not None) == searched
        assert jobs["output.weight"].makes_logits == searched and not jobs["token_embd.weight"].makes_logits


def test_the_smallest_types_need_importance(model: Path, imatrix: str, tmp_path: Path):
    even = write_model(tmp_path / "even.gguf", {name: a for name, a in arrays().items() if a.shape[-1] % 256 == 0})
    with pytest.raises(UsageError, match=r"would become IQ2_XXS, which needs an importance matrix"):
        plan(even, "IQ2_XXS")
    assert plan(even, "IQ2_XXS", texts=()).jobs and plan(even, "IQ2_XXS", imatrix=imatrix).jobs
    assert plan(even, "IQ4_XS").jobs and not plan(even, "IQ4_XS").warnings


def test_missing_importance_is_warned_of(model: Path, imatrix: str, tmp_path: Path):
    poor = "Q2_K_S is poor without an importance matrix: give --imatrix"
    assert poor in plan(model, "Q2_K_S").warnings and poor not in plan(model, "Q2_K_S", imatrix=imatrix).warnings
    assert poor not in plan(model, "Q2_K_S", texts=()).warnings and poor not in plan(model, "Q4_K_M").warnings
    few = write_imatrix(tmp_path / "few.gguf", {"blk.0.attn_v.weight": np.ones((1, 256), np.float32)})
    warning = "the importance matrix does not have "
    lines = plan(model, "Q8_0", imatrix=few).warnings
    assert any(line.startswith(warning) and line.endswith("and 3 more") for line in lines)
    assert not any(
        line.startswith(warning) for line in plan(model, "F16", imatrix=few).warnings
    )  # it is of no use there
    for chosen in ({"include": ["attn"]}, {"exclude": ["ffn"]}, {"imatrix": imatrix}):
        assert not any(line.startswith(warning) for line in plan(model, "Q8_0", **{"imatrix": few, **chosen}).warnings)


@pytest.mark.parametrize(("request_", "message"), [
    ({"imatrix": "x", "texts": ()}, "give either --calibrate or --imatrix"),
    ({"include": ["a"]}, "need --imatrix"), ({"exclude": ["a"]}, "need --imatrix"),
    ({"imatrix": "x", "include": ["a"], "exclude": ["b"]}, "not both"),
])  # fmt: skip
def test_contradictory_requests_are_refused(model: Path, request_: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        plan(model, "Q8_0", **request_)


def test_included_and_excluded_weights_limit_the_importance(model: Path, imatrix: str):
    def used(**chosen: Any) -> set[str]:
        return {
            each.tensor.name
            for each in plan(model, "Q8_0", imatrix=imatrix, **chosen).jobs
            if each.importance is not None
        }

    everything = used()
    assert used(include=["attn_v", "ffn_up"]) == {name for name in everything if "attn_v" in name or "ffn_up" in name}
    assert used(exclude=["attn_v", "ffn_up"]) == {
        name for name in everything if not ("attn_v" in name or "ffn_up" in name)
    }
    with pytest.raises(UsageError, match="no entry of the importance matrix is selected"):
        used(include=["nothing"])


# ---- what is refused


def test_tensors_that_cannot_be_quantized_are_refused(model: Path, tmp_path: Path):
    whole = write_model(tmp_path / "whole.gguf", {"blk.0.attn_q.weight": np.ones((4, 256), np.int32)})
    with pytest.raises(ModelError, match=r"tensor blk\.0\.attn_q\.weight: I32 cannot be converted to Q8_0"):
        plan(whole, "Q8_0")
    assert plan(whole, "COPY").jobs[0].is_copied
    with pytest.raises(ModelError, match="must have at least one tensor"):
        plan(write_model(tmp_path / "none.gguf", {}), "Q8_0")
    assert plan(model, "Q4_K_S").warnings and plan(model, "COPY", strict=True).warnings == []


# ---- metadata


def metadata_of(path: Path, recipe: str, **request: Any) -> dict[str, Any]:
    return dict(plan(path, recipe, **request).files[0][0])


def test_metadata_tell_the_file_type_and_the_importance_matrix(model: Path, tmp_path: Path, imatrix: str):
    assert metadata_of(model, "Q8_0")["general.file_type"] == pack_value(7)
    assert metadata_of(model, "COPY")["general.file_type"] == pack_value(0)
    metadata = metadata_of(model, "Q8_0", imatrix=imatrix)
    assert list(metadata)[-6:] == ["general.quantization_version", "general.file_type", "quantize.imatrix.file",
                                   "quantize.imatrix.dataset", "quantize.imatrix.entries_count",
                                   "quantize.imatrix.chunks_count"]  # fmt: skip
    assert not [key for key in metadata_of(model, "Q8_0") if key.startswith("quantize.")]
    assert metadata["quantize.imatrix.entries_count"] == pack_value(7)


@pytest.mark.parametrize(("before", "value", "after"), [
    (np.uint8(1), 255, np.uint8(255)), (np.uint8(1), 256, 256), (np.int64(1), -5, np.int64(-5)),
    (np.float64(1), 0.5, np.float64(0.5)),
    (np.float32(1), 5, 5), (np.uint32(1), 0.5, 0.5), (True, 1, 1), (np.uint8(1), True, True), ("x", 1, 1), (None, 1, 1),
    (np.uint8(1), "x", "x"),
])  # fmt: skip
def test_replaced_metadata_keep_their_types_where_values_fit(before: Any, value: Any, after: Any):
    assert pack_value(match_type(None if before is None else PackedValue(pack_value(before)), value)) == pack_value(
        after
    )


def test_tensors_are_aligned_as_the_file_says(tmp_path: Path):
    sizes = {}
    for alignment in (None, 32, 4096):
        key = {} if alignment is None else {"general.alignment": alignment}
        aligned_plan = plan(write_model(tmp_path / f"{alignment}.gguf", **key), "Q8_0")
        sizes[alignment] = aligned_plan.nbytes
        assert quantize_plan.get_alignment(aligned_plan.files[0][0]) == (alignment or 32)
    assert sizes[None] < sizes[32] < sizes[4096] and sizes[4096] % 4096 == 0


def test_every_split_has_its_index_and_the_tensor_count(model: Path):
    source: Any = open_source(str(model))
    names = [each.name for each in source.tensors]
    source.parts = [names[:3], names[3:5], names[5:]]
    parts = make_plan(source, QuantizeRequest(COPY, keep_split=True)).files
    for number, (metadata, jobs) in enumerate(parts):
        assert metadata["split.no"] == pack_value(np.uint16(number)) and metadata["split.count"] == pack_value(
            np.uint16(3)
        )
        assert metadata["split.tensors.count"] == pack_value(np.int32(len(names)))
        assert [each.tensor.name for each in jobs] == source.parts[number]
        assert ("general.name" in metadata) == (number == 0)
    (whole, jobs), *rest = make_plan(source, QuantizeRequest(COPY)).files
    assert not rest and "split.no" not in whole and {each.tensor.name for each in jobs} == {*names}


def test_tensor_type_options_reach_the_planner(model: Path):
    jobs = {
        each.tensor.name: each.format.name for each in plan(model, "Q8_0", options=RecipeOptions(output="F16")).jobs
    }
    assert jobs["output.weight"] == "F16" and jobs["token_embd.weight"] == "Q8_0"


def test_recipes_and_copy_are_found_by_name_or_number():
    for text in ("COPY", "copy", "Copy"):
        assert find_type(text) is COPY
    for text in ("Q4_K_M", "q4_k_m", "15"):
        assert find_type(text) is RECIPES["Q4_K_M"]
    for text in ("", "-1", "nothing", "Q4_K_M ", "COPY1"):
        assert find_type(text) is None
    assert derive_output("a/b-F16.gguf", COPY) == "a/b-copy.gguf"
    assert derive_output("a/b-F16.gguf", RECIPES["Q8_0"]) == "a/b-Q8_0.gguf"
    assert derive_output("b.gguf", RECIPES["Q8_0"], projector=True) == "mmproj-b-Q8_0.gguf"


# ---- what is done of a plan


class Lock:
    """A context manager that records entering and leaving."""

    def __init__(self, done: list[Any], name: str):
        self.done, self.name = done, name

    def __enter__(self) -> "Lock":
        self.done.append(f"+{self.name}")
        return self

    def __exit__(self, *error: object) -> None:
        self.done.append(f"-{self.name}")

    def remove(self) -> None:
        self.done.append(f"removed {self.name}")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    done = list[Any]()
    monkeypatch.setattr(quantize, "check_output", lambda *given: done.append(given) or ["a", "b"])
    monkeypatch.setattr(quantize, "WriteLock", lambda target: Lock(done, target))
    monkeypatch.setattr(quantize, "write_model", lambda *given: done.append(("write", *given)) or "the disk is odd")
    return done


PLAN: Any = SimpleNamespace(source=SimpleNamespace(path="in.gguf"), guard="guard")


@pytest.mark.parametrize("wanted", [True, False])
def test_outputs_are_locked_while_they_are_written(steps: list[Any], monkeypatch: pytest.MonkeyPatch, wanted: bool):
    """Check also that warnings are returned if asked for."""
    request, lines = QuantizeRequest(COPY), list[str]() if wanted else None
    assert quantize.quantize_model(PLAN, "out", request, 3, print, repr, lines) == ["a", "b"]
    wrote = ("write", PLAN, ["a", "b"], 3, print, repr, ANY)
    assert steps == [(PLAN, "out", request), "+a", "+b", wrote, "-b", "-a"]
    assert lines == (["the disk is odd"] if wanted else None)
    steps.clear()
    monkeypatch.setattr(quantize, "write_model", lambda *given: None)
    assert quantize.quantize_model(PLAN, "out", request, 3, print, None, lines) == ["a", "b"]
    assert lines == (["the disk is odd"] if wanted else None)


def test_errors_in_weights_name_the_file(steps: list[Any], monkeypatch: pytest.MonkeyPatch):
    def fails(*given: object) -> None:
        raise ModelError("tensor x has no numbers")

    monkeypatch.setattr(quantize, "write_model", fails)
    with pytest.raises(ModelError, match=r"^in\.gguf: tensor x has no numbers$"):
        quantize.quantize_model(PLAN, "out", QuantizeRequest(COPY), 1, print)
    assert steps[1:] == ["+a", "+b", "-b", "-a"]


class NamedPlan(str):
    """A plan without tensors."""

    jobs, weights = (), 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_calibrated_plan_is_folded_then_encoded_and_written(steps: list[Any], monkeypatch, fails: bool):
    """Keep encoded matrices until the file exists."""

    class Calibration:
        key = "key"

        def __init__(self, plan: Any, texts: Any):
            steps.append(("calibration", plan, texts))

        def add_metadata(self, plan: Any) -> Any:
            return NamedPlan(f"{plan} that says so")

        def copy_for_plan(self, plan: Any) -> Any:
            return SimpleNamespace(
                run=lambda done, *given: steps.append(("run", plan, done.name, *given)), list_encoded_jobs=list
            )

    def folded(source: Any, request: Any, threads: int, on_matrix: Any, compiling: Any, done: Lock) -> str:
        on_matrix(5, 9, "x")
        steps.append(("folded", source, request, threads, compiling, done.name))
        return "source"

    def write(*given: Any) -> str:
        steps.append(("write", *given[:-1], given[-1].name))
        if fails:
            raise ModelError("odd")
        return "the disk is odd"

    progress = list[Any]()
    on_progress = lambda *told: progress.append(told)  # noqa: E731
    monkeypatch.setattr(calibrate, "Calibration", Calibration)
    monkeypatch.setattr(folding, "fold_scales", folded)
    monkeypatch.setattr(quantize, "ArrayLog", lambda path, key: Lock(steps, f"{path} {key}"))
    monkeypatch.setattr(
        quantize, "make_plan", lambda source, request, guard: NamedPlan(f"plan of {source} under {guard}")
    )
    monkeypatch.setattr(quantize, "create_widener", lambda plan, compiling: f"widener of {plan}")
    monkeypatch.setattr(quantize, "write_model", write)
    request, lines, plan, done = (
        QuantizeRequest(COPY, texts=["t"]),
        list[str](),
        "plan of source under guard that says so",
        "a.calibration key",
    )
    if fails:
        with pytest.raises(ModelError):
            quantize.quantize_model(PLAN, "out", request, 3, on_progress, repr, lines)
    else:
        quantize.quantize_model(PLAN, "out", request, 3, on_progress, repr, lines)
    assert progress == [(0, "x")] and lines == ["the disk is odd"] * (not fails)
    assert steps[3:-2] == [
        ("calibration", PLAN, ["t"]), f"+{done}", ("folded", PLAN.source, request, 3, repr, done),
        ("run", plan, done, f"widener of {plan}", 3, ANY), ("write", plan, ["a", "b"], 3, ANY, repr, ANY, done),
        f"-{done}", *[f"removed {done}"] * (not fails),
    ]  # fmt: skip
