"""Test the measured cost of types and the harm of coarse matrices: the sampled prompts, rows and matrices."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.quant.activation_rounding import round_activations
from localllm.quant.formats import BY_NAME
from localllm.quant.hessian import compute_moments
from localllm.quantizing.calibrate import EMBEDDING
from localllm.quantizing.layerwise_runner import BatchedActivations, MatrixInputs, StopCalibrationError
from localllm.quantizing.mixed_precision import measure as survey
from localllm.quantizing.mixed_precision.measure import (
    ActivationCollector,
    EncodedMatrix,
    SensitivityCollector,
    compute_divergence,
    is_adjustable,
    list_scale_sizes,
)
from localllm.quantizing.mixed_precision.sensitivity import Sensitivity, list_candidates
from localllm.quantizing.plan import TensorJob

COLUMNS = 256
FORMATS = list_candidates(COLUMNS)


class Rounding:
    """Round rows to few digits, differently for each type, in place of error feedback."""

    def __init__(self, moments: np.ndarray, damping: float, threads: int):
        self.moments, self.records_input = moments, (damping, threads)

    def encode(self, format: str, rows: np.ndarray) -> np.ndarray:
        step = np.float32(1 / (3 + FORMATS.index(format)))
        return np.rint(rows / step) * step


def rows_of(meeting: ActivationCollector, tensor: Any, first: int, end: int) -> np.ndarray:
    """Return rows of a tensor that is an array."""
    assert 0 <= first < end <= len(tensor.data)
    return tensor.data[first:end].copy()


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace encoding by rounding; tensors are arrays."""
    monkeypatch.setattr(survey, "GptqEncoder", Rounding)
    monkeypatch.setattr(survey, "dequantize", lambda format, blocks: blocks)
    monkeypatch.setattr(ActivationCollector, "dequantize_finite", rows_of)


def job_of(name: str, *shape: int, format: str = "Q4_K", before: str = "F32") -> Any:
    """Return a job for a tensor of random values."""
    data = np.random.default_rng(5).normal(size=shape).astype(np.float32).reshape(-1, shape[-1])
    tensor: Any = SimpleNamespace(
        name=name, shape=shape, data=data, format=BY_NAME[before], release_rows=lambda first, end: None
    )
    return TensorJob(tensor, BY_NAME[format], format)


def texts(n: int, count: int = 4) -> list[np.ndarray]:
    """Return the inputs of matrix n: rows of equal length, so that none is clipped."""
    generator = np.random.default_rng(n)
    sizes = generator.uniform(0.5, 2, COLUMNS)
    return [(generator.choice([-1, 1], (9 + k, COLUMNS)) * sizes).astype(np.float32) for k in range(count)]


def inputs(shared: Any = None) -> MatrixInputs:
    return MatrixInputs(lambda n: iter(texts(n)), shared)


def looking(kind: type[ActivationCollector], *jobs: Any, told: Any = lambda name: None) -> Any:
    return kind({job.tensor.name: job for job in jobs}, None, 2, told)


def test_every_second_prompt_encodes_and_the_others_judge():
    meeting, pieces = looking(SensitivityCollector), texts(3)
    known = meeting.build_feedback(inputs(), 3, "x")
    np.testing.assert_array_equal(known.moments, compute_moments(pieces[::2], COLUMNS))
    assert known.records_input == (0.3, 2)
    moments, met = meeting._measure_held_out(inputs(), 3, "x")
    np.testing.assert_array_equal(moments, compute_moments(pieces[1::2], COLUMNS))
    np.testing.assert_array_equal(met, np.concatenate(pieces[1::2]))


@pytest.mark.parametrize(("most", "step"), [(3, 7), (11, 2), (12, 1), (22, 1), (100, 1)])
def test_inputs_that_judge_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch, most: int, step: int):
    monkeypatch.setattr(survey, "SAMPLE_INPUTS", most)
    met = looking(SensitivityCollector)._measure_held_out(inputs(), 0, "x")[1]
    np.testing.assert_array_equal(met, np.concatenate(texts(0)[1::2])[::step])


def test_an_embeddings_errors_count_by_themselves():
    plain, moments = (
        compute_moments(texts(0)[::2], COLUMNS),
        looking(ActivationCollector).build_feedback(inputs(), 0, EMBEDDING).moments,
    )
    np.testing.assert_allclose(moments - plain, np.eye(COLUMNS) * np.diagonal(plain).mean(), atol=1e-5)


@pytest.mark.parametrize("of", ["build_feedback", "_measure_held_out"])
def test_moments_of_a_shared_activation_are_summed_once(of: str):
    """Sum an activation of a single matrix for that matrix."""
    meeting, shared, other = looking(SensitivityCollector), BatchedActivations([1]), BatchedActivations([1])

    def summed(shared: Any, n: int) -> Any:
        return getattr(meeting, of)(inputs(shared), n, "x")

    first = summed(shared, 0)
    assert summed(shared, 1) is first
    second = summed(other, 1)
    assert second is not first and summed(other, 0) is second and summed(shared, 0) is not first
    alone = summed(None, 0)
    assert summed(None, 0) is not alone


def expected(job: Any, n: int, rows: list[int]) -> list[float]:
    """Return the expected costs of matrix n: output power, errors of each type, and errors of rounded inputs."""
    matrix = job.tensor.data.reshape(-1, job.tensor.shape[-2], COLUMNS)[n][rows]
    x = np.concatenate(texts(n)[1::2])

    def of(met: np.ndarray, weights: np.ndarray) -> float:
        return float(((met @ weights.T) ** 2).sum(axis=1).mean())

    feedback: Any = Rounding(None, 0, 0)
    errors = [of(x, matrix - feedback.encode(format, matrix)) for format in FORMATS]
    return [of(x, matrix), *errors, *(of(round_activations(x, block) - x, matrix) for block in (32, 256))]


@pytest.mark.parametrize(
    ("shape", "looked_at"),
    [((6, COLUMNS), [0]), ((2, 6, COLUMNS), [0, 1]), ((3, 6, COLUMNS), [0, 1, 2]), ((5, 6, COLUMNS), [0, 2, 4])],
)
def test_costs_of_types_are_relative_to_the_output(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], looked_at: list[int]
):
    """Sample a few matrices of a stack and a few of their rows; encode the whole sample."""
    monkeypatch.setattr(survey, "SAMPLE_ROWS", 4)
    job = job_of("x", *shape)
    surveyed = looking(SensitivityCollector, job)
    surveyed.process(job, inputs())
    whole, *costs = np.sum([expected(job, n, [0, 1, 3, 5]) for n in looked_at], axis=0)
    need = surveyed.needs["x"]
    assert (need.name, need.weights, need.harm) == ("x", np.prod(shape), 0.0)
    assert list(need.errors) == FORMATS and list(need.rounding) == [32, 256]
    costs_found = [*need.errors.values(), *need.rounding.values()]
    np.testing.assert_allclose(costs_found, np.array(costs) / whole, rtol=1e-4)
    format, rows = surveyed.coarse["x"]
    assert format == "Q3_K"
    np.testing.assert_array_equal(rows, Rounding(rows, 0, 0).encode("Q3_K", job.tensor.data))


def test_a_matrix_of_zeros_costs_nothing():
    job = job_of("x", 4, COLUMNS)
    job.tensor.data[:] = 0
    surveyed = looking(SensitivityCollector, job)
    surveyed.process(job, inputs())
    assert not any(surveyed.needs["x"].errors.values()) and not any(surveyed.needs["x"].rounding.values())


def test_rows_too_short_for_super_blocks_become_coarse_in_blocks():
    job = job_of("x", 4, 32)
    surveyed = looking(SensitivityCollector, job)
    surveyed.process(job, MatrixInputs(lambda n: (piece[:, :32] for piece in texts(n))))
    assert surveyed.coarse["x"].format == "Q4_0" and list(surveyed.needs["x"].rounding) == [32]
    assert list(surveyed.needs["x"].errors) == ["Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    assert list_scale_sizes(["Q8_0", "Q4_K", "Q4_0", "Q2_K"]) == [32, 256]


def test_each_adjustable_matrix_is_measured_once():
    """Others stay as they are; the logits' matrix ends the run."""
    jobs = [job_of("a", 4, COLUMNS), job_of("copied", 4, COLUMNS, before="Q4_K"), job_of("plain", 4, 8, format="F16")]
    jobs.append(job_of("output.weight", 4, COLUMNS))
    assert [is_adjustable(job) for job in jobs] == [True, False, False, True]
    measured, reported = list[Any](), list[str]()

    class Looking(ActivationCollector):
        def process(self, job: TensorJob, inputs: MatrixInputs) -> None:
            measured.append((job.tensor.name, inputs))

        def read(self, tensor: Any, first: int, end: int) -> np.ndarray:
            return tensor.data[first:end]

    meeting, met = looking(Looking, *jobs, told=reported.append), inputs()
    for job in (*jobs[:3], jobs[0]):
        weight: Any = SimpleNamespace(name=job.tensor.name, shape=job.tensor.shape, first_row=0)
        np.testing.assert_array_equal(meeting.resolve(weight, met).read_range(0, 1, 3), job.tensor.data[1:3])
    with pytest.raises(StopCalibrationError):
        meeting.resolve(SimpleNamespace(name="output.weight", shape=(4, COLUMNS), first_row=0), met)
    assert measured == [("a", met), ("output.weight", met)] and reported == ["a", "output.weight"]
    assert meeting.processed == {"a", "output.weight"}


def test_harm_is_measured_by_groups_of_matrices(monkeypatch: pytest.MonkeyPatch):
    """Measure the divergence of a few prompts with one coarse group, relative to that group's error."""
    names = ["blk.0.attn_q.weight", "blk.1.attn_k.weight", "output.weight"]
    jobs = {name: job_of(name, 4, COLUMNS) for name in [*names, "other"]}
    jobs["other"] = job_of("other", 4, COLUMNS, before="Q4_K")
    errors = {names[0]: 0.5, names[1]: 0.25, names[2]: 0.0}
    calls, progress = list[Any](), list[Any]()
    chunks = [np.arange(200) + 1000 * number for number in range(9)]

    class Calibrating(SimpleNamespace):
        def select_chunks(self, most: int) -> list[np.ndarray]:
            calls.append(("select_chunks", most))
            return chunks

        def forward(self, surveyed: Any, given: Any, threads: int) -> None:
            calls.append(("forward", given is chunks, threads))
            for name, error in errors.items():
                surveyed.needs[name] = Sensitivity(name, 1, {"Q3_K": error, "Q4_0": 9.0})
                surveyed.coarse[name] = EncodedMatrix("Q3_K", name)
                surveyed._on_matrix(name)

        def plan_reuse(self, probes: Any, groups: Any) -> Any:
            calls.append(("plan_reuse", [(int(probe[0]), len(probe)) for probe in probes], groups))
            return "filled", ["past 0", "past 1"]

        def compute_logits(self, matrices: Any, probes: Any, threads: int, past: Any) -> Any:
            return type(matrices).__name__, getattr(matrices, "_coarse", None), len(probes), threads, past

    def divergence(base: Any, surveyed_needs: Any, threads: int) -> float:
        calls.append((base, surveyed_needs, threads))
        return 3.0

    monkeypatch.setattr(survey, "compute_divergence", divergence)
    surveyed_needs: Iterator[Sensitivity] = survey.measure_sensitivities(
        Calibrating(jobs=jobs), "widener", 3, lambda *given: progress.append(given)
    )  # fmt: skip
    needs = list(surveyed_needs)
    assert [(need.name, need.harm) for need in needs] == [(names[0], 4.0), (names[1], 4.0), (names[2], 3e30)]
    base = ("OriginalWeights", None, 5, 3, "filled")
    together, alone = ({name: EncodedMatrix("Q3_K", name) for name in some} for some in (names[:2], names[2:]))
    assert calls == [
        ("select_chunks", 12), ("forward", True, 3),
        ("plan_reuse", [(number * 1000, 128) for number in (0, 2, 4, 6, 8)], [names[:2], names[2:]]),
        (base, ("CoarseWeights", together, 5, 3, "past 0"), 3), (base, ("CoarseWeights", alone, 5, 3, "past 1"), 3),
    ]  # fmt: skip
    assert progress == [
        (1, 6, names[0]), (2, 6, names[1]), (3, 6, names[2]), (4, 6, "blk.0.query"), (6, 6, "output.weight")
    ]  # fmt: skip


def test_a_divergence_averages_all_tokens_and_is_never_negative():
    half, most = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    base = [np.float32(half + 3), np.float32(np.concatenate([most, half]))]
    other = [np.float32(half), np.float32(np.concatenate([half, half - 2]))]
    total = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    assert [compute_divergence(base, other, threads) for threads in (1, 2)] == [pytest.approx(total / 3, rel=1e-5)] * 2
    assert all(0 <= compute_divergence(base, same) < 1e-6 for same in (base, [logits + 8 for logits in base]))


def test_collectors_keep_their_jobs_and_report_matrices():
    jobs, reported = {"a": job_of("a", 4, COLUMNS)}, list[str]()
    for kind in (ActivationCollector, SensitivityCollector):
        collector: Any = kind(jobs, "widener", 3, reported.append)
        collector._on_matrix(kind.__name__)
        assert (collector.jobs, collector._widener, collector._threads, collector.processed) == (
            jobs,
            "widener",
            3,
            set(),
        )
    assert reported == ["ActivationCollector", "SensitivityCollector"]
