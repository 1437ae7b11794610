"""Test types by need: sizes and costs, groups of matrices, and how the budget is spent."""

from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from localllm.errors import UsageError
from localllm.quant.formats import BY_NAME, RECIPES
from localllm.quantizing.calibrate import Calibration
from localllm.quantizing.mixed_precision import plan as by_need
from localllm.quantizing.mixed_precision import plan as corrected
from localllm.quantizing.mixed_precision.measure import MEASURED_CHUNKS, EncodedMatrix
from localllm.quantizing.mixed_precision.plan import select_held_out
from localllm.quantizing.mixed_precision.sensitivity import (
    Sensitivity,
    get_group,
    list_candidates,
    parse_layer,
    predict_divergence,
    spend_remaining_budget,
    sum_bytes,
)
from localllm.quantizing.plan import QuantizeRequest, TensorJob


def size_of(name: str) -> tuple[int, int]:
    """Return the weights and bytes of a block, as the gguf package has them."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.parametrize("columns", [32, 64, 256, 512, 544, 31, 48])
def test_candidate_types_fit_the_rows(columns: int):
    """Offer the types with superblocks for rows of 256, too."""
    offered = list_candidates(columns)
    of_blocks = ["Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    of_super_blocks = ["Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K"]
    assert offered == (of_super_blocks if columns % 256 == 0 else []) + (of_blocks if columns % 32 == 0 else [])
    for name in offered:
        block, nbytes = size_of(name)
        assert (
            columns % block == 0
            and Sensitivity("x", 7 * columns, {}).count_bytes(name) == 7 * columns // block * nbytes
        )


def test_a_types_cost_is_its_error_and_the_rounding_of_inputs():
    """Add the rounding error of inputs for the number of inputs that share a scale in the type."""
    need = Sensitivity("x", 256, {"Q4_K": 0.25, "Q4_0": 0.5}, {256: 0.125, 32: 0.0625}, harm=8.0)
    assert (need.predict_divergence("Q4_K"), need.predict_divergence("Q4_0")) == (8 * 0.375, 8 * 0.5625)
    assert Sensitivity("x", 256, {"Q4_K": 0.25}, harm=8.0).predict_divergence("Q4_K") == 2
    assert Sensitivity("x", 256, {"Q4_K": 0.25}).predict_divergence("Q4_K") == 0, "one that does no harm"


def test_matrices_of_two_layers_are_measured_together():
    """Keys go with queries, up with gate; matrices of no layer or role are alone."""
    kinds = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    groups: dict[str, list[str]] = {}
    for layer in (0, 1, 2, 3, 12):
        for kind in kinds:
            name = f"blk.{layer}.{kind}.weight"
            groups.setdefault(get_group(name), []).append(name)
    alike = [["attn_q", "attn_k"], ["attn_v"], ["attn_output"], ["ffn_gate", "ffn_up"], ["ffn_down"]]
    assert sorted(map(sorted, groups.values())) == sorted(
        sorted(f"blk.{layer}.{kind}.weight" for layer in layers for kind in together)
        for layers in ((0, 1), (2, 3), (12,))
        for together in alike
    )
    for name in ("output.weight", "token_embd.weight", "blk.3.odd.weight", "v.blk.0.attn_q.weight"):
        assert get_group(name) == name
    names = ["blk.0.x", "blk.17.attn_q.weight", "x.blk.3.y", "output.weight", "blk.x.y"]
    assert [parse_layer(name) for name in names] == [0, 17, None, None, None]


def test_the_rest_of_the_budget_is_spent_where_it_helps_most():
    sizes = {name: Sensitivity("x", 256, {}).count_bytes(name) for name in ("Q2_K", "Q4_K", "Q6_K")}
    errors = {"Q2_K": 1.0, "Q4_K": 0.1, "Q6_K": 0.01}
    needs = [
        Sensitivity("a", 256, errors, harm=1.0),
        Sensitivity("b", 256, errors, harm=2.0),
        Sensitivity("c", 256, errors, harm=0.0),
    ]
    least = dict.fromkeys("abc", "Q2_K")
    start, step = sum_bytes(needs, least), sizes["Q4_K"] - sizes["Q2_K"]
    assert start == 3 * sizes["Q2_K"]
    for room, bits_of_all in (
        (0, "222"), (step - 1, "222"), (step, "242"), (2 * step - 1, "242"), (2 * step, "442"), (10**6, "662"),
    ):  # fmt: skip
        formats = spend_remaining_budget(needs, dict(least), start + room)
        assert formats == {name: f"Q{bits}_K" for name, bits in zip("abc", bits_of_all, strict=True)}, room
    assert predict_divergence(needs, {"a": "Q4_K", "b": "Q6_K", "c": "Q2_K"}) == pytest.approx(0.1 + 0.02)


# ---- what is checked


def calibration_of(count: int) -> Any:
    """Return a calibration of numbered chunks that records its calls in `heard`."""
    calibration: Any = Calibration.__new__(Calibration)
    calibration.chunks, calibration.heard = [np.full(200, number) for number in range(count)], []
    calibration.jobs = {name: SimpleNamespace(tensor=SimpleNamespace(name=name)) for name in "abc"}
    return calibration


@pytest.mark.parametrize(
    ("count", "held"),
    [(20, [1, 4, 6, 8, 11, 13, 15, 18]), (13, [6]), (12, [0, 2, 4, 6, 8, 10]), (3, [0, 1, 2]), (30, None)],
)
def test_held_out_chunks_are_spread_evenly_and_not_read(count: int, held: list[int] | None):
    """Hold out at most eight; if all chunks are read, some of those."""
    calibration = calibration_of(count)
    read, held_out = calibration.select_chunks(MEASURED_CHUNKS), select_held_out(calibration)
    numbers = [int(chunk[0]) for chunk in held_out]
    assert numbers == (held or numbers) and all(len(chunk) == 128 for chunk in held_out) and len(numbers) <= 8
    assert count <= MEASURED_CHUNKS or not {*numbers} & {int(chunk[0]) for chunk in read}


def test_only_matrices_whose_type_changes_are_encoded_again(monkeypatch):
    """Check also divergences of all matrices and of all but some, on held-out chunks."""
    calibration, progress = calibration_of(20), []

    def forward(encoded: Any, chunks: list[np.ndarray], threads: int) -> None:
        calibration.heard.append(([int(chunk[0]) for chunk in chunks], threads))
        for name, job in calibration.jobs.items():
            if name not in encoded.processed:
                encoded.processed.add(name)
                encoded.process(job, name * 2)
                encoded._on_matrix(name)

    calibration.forward, calibration.compute_logits = forward, lambda *given: given
    monkeypatch.setattr(
        corrected.MatrixEncoder, "encode_matrix", lambda encoded, job, inputs, format: EncodedMatrix(format, inputs)
    )
    for name in ("OriginalWeights", "CoarseWeights"):
        monkeypatch.setattr(corrected, name, lambda *given, name=name: (name, *given))
    monkeypatch.setattr(
        corrected, "compute_divergence", lambda base, found, threads: (base, found, threads) and len(found[0][3])
    )
    checked = corrected.PlanEvaluator(calibration, "widener", 3, lambda *told: progress.append(told))
    assert checked._base[0] == ("OriginalWeights", calibration.jobs, "widener") and checked._base[2] == 3
    assert [int(chunk[0]) for chunk in checked._base[1]] == [1, 4, 6, 8, 11, 13, 15, 18]
    assert checked.measure_divergence(dict.fromkeys("abc", "Q4_K")) == 3
    assert progress == [(1, 3, "a"), (2, 3, "b"), (3, 3, "c")]
    assert calibration.heard == [([0, 2, 3, 5, 7, 9, 10, 12, 14, 16, 17, 19], 3)]
    assert checked.measure_divergence({"a": "Q4_K", "b": "Q6_K", "c": "Q4_K"}) == 3 and progress[3:] == [(3, 3, "b")]
    assert checked._encoded.blocks == {
        "a": EncodedMatrix("Q4_K", "aa"), "b": EncodedMatrix("Q6_K", "bb"), "c": EncodedMatrix("Q4_K", "cc")
    }  # fmt: skip
    assert checked.measure_contribution(["a", "c"]) == 2 and checked.measure_contribution([]) == 0


# ---- a whole plan


def test_choosing_types_measures_adjustable_matrices_and_refines_the_plan(monkeypatch):
    f32, q4, copied = BY_NAME["F32"], BY_NAME["Q4_K"], BY_NAME["Q8_0"]
    jobs = [
        TensorJob(SimpleNamespace(name=name, format=before, shape=(2, columns)), format, format.name)
        for name, before, format, columns in (("a", f32, q4, 256), ("b", copied, copied, 512), ("c", f32, f32, 7))
    ]
    plan = SimpleNamespace(jobs=jobs, nbytes=1000)
    assert by_need.list_candidate_formats(plan) == {*list_candidates(256)}
    need, calls = Sensitivity("a", 512, {"Q4_K": 0.5, "Q2_K": 1.0}, harm=2.0), []
    calibration = SimpleNamespace(add_metadata=lambda plan: SimpleNamespace(nbytes=plan.nbytes + 10))

    def planned(source: Any, request: Any) -> Any:
        calls.append(request)
        return plan

    monkeypatch.setattr(by_need, "make_plan", planned)
    monkeypatch.setattr(by_need, "Calibration", lambda *given: calls.append(given) or calibration)
    monkeypatch.setattr(by_need, "create_widener", lambda *given: given)
    monkeypatch.setattr(by_need, "measure_sensitivities", lambda *given: calls.append(given) or iter([need]))

    def corrected(given: Any, needs: Any, choose: Any, *more: Any) -> tuple[dict[str, str], float]:
        calls.append(
            (given, needs, choose.keywords | {"size_with": choose.keywords["size_with"]({"a": "Q2_K"})}, *more)
        )
        return {"a": "Q2_K"}, 0.25

    monkeypatch.setattr(by_need, "refine_formats", corrected)
    request = QuantizeRequest(RECIPES["Q4_K_M"], texts=["t"])
    on_progress, checked, widener = print, repr, (plan, "compiling", {*list_candidates(256)})
    chosen = by_need.choose_formats(
        "source", request, lambda given: given.nbytes - 100, 3, on_progress, checked, "compiling"
    )
    assert chosen == by_need.MixedPrecision({"a": "Q2_K"}, 0.25, 2.0, 1.0)
    fitting = {"file_size": 900, "other_bytes": 1010 - need.count_bytes("Q4_K"), "size_with": 1010}
    assert calls[:3] == [request, (plan, ["t"]), (calibration, widener, 3, on_progress)]
    assert calls[3].options.formats == {"a": "Q2_K"}
    assert calls[4] == (calibration, [need], fitting, widener, 3, checked)
    assert (
        np.isnan(by_need.predict_or_nan([need], {"a": "Q8_0"})) and by_need.predict_or_nan([need], {"a": "Q4_K"}) == 1.0
    )
    monkeypatch.setattr(by_need, "measure_sensitivities", lambda *given: iter(()))
    with pytest.raises(UsageError, match="need a matrix whose format can be chosen"):
        by_need.choose_formats("source", request, lambda plan: 0, 1, on_progress, checked)


@pytest.mark.parametrize(("size", "fits"), [(499, False), (500, True), (501, True)])
def test_a_size_below_the_smallest_types_is_refused_before_measuring(monkeypatch, size: int, fits: bool):
    f32, q4 = BY_NAME["F32"], BY_NAME["Q4_K"]
    jobs = [
        TensorJob(SimpleNamespace(name=name, format=before, shape=(2, columns)), format, format.name)
        for name, before, format, columns in (
            ("a", f32, q4, 256), ("b", f32, BY_NAME["Q4_0"], 32), ("c", q4, q4, 256), ("d", f32, f32, 256)
        )
    ]  # fmt: skip
    requested = []

    def planned(source: Any, request: Any) -> Any:
        requested.append(request.options.formats)
        return SimpleNamespace(jobs=jobs, nbytes=500 if request.options.formats else 900)

    monkeypatch.setattr(by_need, "make_plan", planned)
    request = QuantizeRequest(RECIPES["Q4_K_M"])

    def require() -> None:
        by_need.require_possible("source", request, lambda plan: size if plan.nbytes == 900 else 0)

    if fits:
        require()
    else:
        with pytest.raises(UsageError) as failure:
            require()
        assert str(failure.value) == "the size must be at least 500 bytes (found 499)"
    assert requested[1:] == [{"a": "Q2_K", "b": "Q4_0"}] and not requested[0]


def test_types_are_fitted_to_a_size_including_padding(monkeypatch):
    budgets = []
    monkeypatch.setattr(
        by_need, "choose_within_budget", lambda needs, budget: budgets.append(budget) or {"budget": budget}
    )
    assert by_need.choose_within_size([], 1000, 100, lambda formats: formats["budget"] + 107) == {"budget": 893}
    assert budgets == [900, 893]
    budgets.clear()
    assert by_need.choose_within_size([], 1000, 100, lambda formats: 1000) == {"budget": 900} and budgets == [900]
