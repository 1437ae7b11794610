"""Compare CUDA kernels of mixtures of experts with NumPy, in Numba's simulator."""

import numpy as np
import pytest
from kernel_calls import GUARD, at_end_of_page, count, normal, output, padded, written
from simulated import launch

from localllm.arch.verbs import Routing
from localllm.kernels.table import EXPERT
from tests.unit.kernels.cpu.matmul.test_experts import CHOICES, exact_choice, known_experts

ROUTINGS = [
    Routing(8, 2), Routing(5, 5, normalized=False, scale=2.5), Routing(10, 1, sigmoid=True, normalized=False),
    Routing(12, 3, sigmoid=True, scale=2.5, groups=4, groups_used=2), Routing(8, 3, groups=2, groups_used=1),
    Routing(9, 2, rooted=True, scale=1.5),
]  # fmt: skip
TOKENS = 4


def route(
    scores: np.ndarray, routing: Routing, bias: np.ndarray | None = None, ids=0, table=0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts and weights of every token."""
    tokens, source = len(scores), padded(scores)
    chosen, weights = np.full((tokens + 1, routing.used), -7), np.full((tokens + 1, routing.used), GUARD)
    given = {name: getattr(routing, name) for name in ("experts", "used", "sigmoid", "rooted", "normalized", "scale")}
    given |= {
        "groups": routing.groups,
        "groups_used": routing.groups_used,
        "together": routing.together,
        "ids": ids,
        "table": table,
        "scratch": 0,
        "scratch_bytes": 0,
    }
    given |= {"bias": 0 if bias is None else at_end_of_page(bias), "logits": source, "stride": source.strides[0]}
    launch("route", tokens + 1, count=count(tokens), **given, chosen=chosen, weights=weights)
    assert (chosen[-1] == -7).all() and (weights[-1] == GUARD).all()
    return chosen[:-1], weights[:-1]


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.used}of{r.experts}in{r.groups}")
@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_routing_on_a_gpu_agrees_with_the_reference(routing, is_biased):
    """Check also ties, and an infinite logit, whose token may go anywhere with weights of NaN."""
    scores = 2 * normal(TOKENS, routing.experts)
    scores[1] = 0
    scores[2, -1] = [np.nan, np.inf][is_biased]
    bias = 0.3 * normal(routing.experts, seed=1) if is_biased else None
    with np.errstate(invalid="ignore"):
        expected = exact_choice(scores, routing, bias)
    chosen, weights = route(scores, routing, bias)
    usable = [0, 1, 3]
    np.testing.assert_array_equal(chosen[usable], expected.experts[usable])
    np.testing.assert_allclose(weights, expected.weights, rtol=1e-6)
    assert np.isnan(weights[2]).all() and (chosen >= 0).all() and (chosen < routing.experts).all()


def test_routing_by_token_ids_on_a_gpu_agrees_with_the_reference():
    routing = Routing(9, 2, rooted=True, scale=1.5)
    ids, table, (experts, weights) = known_experts(5, routing)
    got = route(2 * normal(5, routing.experts), routing, None, ids, table)
    np.testing.assert_array_equal(got[0], experts)
    np.testing.assert_allclose(got[1], weights, rtol=1e-6)


def test_experts_with_sigmoids_of_1_are_ordered_by_their_logits():
    scores = 100 + normal(2, 9)
    chosen, weights = route(scores, Routing(9, 3, sigmoid=True, normalized=False))
    np.testing.assert_array_equal(chosen, np.argsort(-scores, axis=1)[:, :3])
    assert (weights == 1).all()


class Plan:
    """A plan of plan_experts."""

    def __init__(self, chosen: np.ndarray, experts: int):
        self.tokens, self.used = chosen.shape
        self.chosen, pairs = np.ascontiguousarray(chosen, np.int64), chosen.size
        self.active = np.full((min(experts, pairs) + 1, len(EXPERT)), -7)
        self.rows, self.pairs, self.active_count, self.row_count = (
            np.full(n, -7) for n in (pairs + 1, pairs + 1, 1, 1)
        )
        given = {"count": count(self.tokens), "chosen": self.chosen, "used": self.used, "experts": experts}
        lists = {"rows": self.rows, "pairs": self.pairs, "next_rows": 0, "active": self.active}
        launch("plan_experts", 1, **given, **lists, active_count=self.active_count, row_count=self.row_count)
        assert self.rows[-1] == self.pairs[-1] == -7 and (self.active[-1] == -7).all()


@pytest.mark.parametrize(("kind", "tokens", "experts"), [
    ("anywhere", 7, 8), ("anywhere", 1, 20), ("all to one", 9, 8), ("two of eight", 3, 9), ("one of many", 0, 8),
])  # fmt: skip
def test_a_gpu_plan_groups_rows_by_expert(kind, tokens, experts):
    """Experts lie in the order of their numbers, and an expert's rows keep the order of tokens."""
    plan = Plan(CHOICES[kind](tokens), experts)
    flat = plan.chosen.reshape(-1)
    in_order = np.argsort(flat, kind="stable")
    assert plan.row_count[0] == len(flat)
    np.testing.assert_array_equal(plan.pairs[:-1], in_order)
    np.testing.assert_array_equal(plan.rows[in_order], np.arange(len(flat)))
    numbers, first, rows = np.unique(flat[in_order], return_index=True, return_counts=True)
    active = plan.active[: plan.active_count[0]]
    np.testing.assert_array_equal(active, np.stack((numbers, first, rows), axis=1))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_gathered_rows_scatter_back_to_their_tokens_on_a_gpu(is_weighted):
    columns, plan = 20, Plan(CHOICES["anywhere"](5), 8)
    x, bias, total = normal(5, columns), normal(8, columns, seed=3), len(plan.rows) - 1
    weights = np.random.default_rng(0).uniform(0.1, 1, plan.chosen.shape).astype(np.float32)
    gather_weights, factors = (weights, weights) if is_weighted else (0, np.ones_like(weights))

    def called(name: str, rows: int, source: np.ndarray, /, **more) -> np.ndarray:
        y, source = output(rows, columns), padded(source)
        shape = {"x": source, "y": y, "stride": y.strides[0], "columns": columns}
        launch(name, rows + 1, count=count(rows), **shape, **more)
        return written(y, rows, columns)

    stride, pairs = padded(x).strides[0], plan.pairs[:-1]
    lists = {"used": plan.used, "x_stride": stride}
    rows = called("gather", total, x, pairs=plan.pairs, weights=gather_weights, part_bytes=0, **lists)
    np.testing.assert_array_equal(rows, x[pairs // plan.used] * factors.reshape(-1)[pairs][:, None])
    vectors = np.pad(bias, [(0, 0), (0, 12)])
    lists_of_rows = {"pairs": plan.pairs, "chosen": plan.chosen, "z": vectors, "z_stride": vectors.strides[0]}
    added = called("add_by_expert", total, rows, **lists_of_rows)
    np.testing.assert_array_equal(added, rows + bias[plan.chosen.reshape(-1)[pairs]])
    results = normal(total, columns, seed=4)
    back = called("scatter", 5, results, rows=plan.rows, weights=gather_weights, **lists)
    exact = results[plan.rows[:-1]].reshape(5, plan.used, columns) * factors[:, :, None]
    np.testing.assert_allclose(back, exact.sum(axis=1), rtol=1e-5, atol=1e-6)


def test_joining_gathered_heads_restores_their_order():
    """Let each expert read and write its own columns."""
    tokens, heads, columns = 3, 4, 5
    plan, x = Plan(np.tile(np.arange(heads), (tokens, 1)), heads), normal(tokens, heads * columns)
    source, dealt, back = padded(x), output(tokens * heads, columns), output(tokens, heads * columns)
    given = {"pairs": plan.pairs, "used": heads, "x": source, "x_stride": source.strides[0], "weights": 0}
    given |= {"part_bytes": 4 * columns, "y": dealt, "stride": dealt.strides[0], "columns": columns}
    launch("gather", tokens * heads + 1, count=plan.row_count, **given)
    expected = x.reshape(tokens, heads, columns).swapaxes(0, 1).reshape(-1, columns)
    np.testing.assert_array_equal(written(dealt, tokens * heads, columns), expected)
    given = {"rows": plan.rows, "used": heads, "x": dealt, "x_stride": dealt.strides[0], "y": back}
    launch("from_heads", tokens + 1, count=count(tokens), **given, stride=back.strides[0], columns=columns)
    np.testing.assert_array_equal(written(back, tokens, heads * columns), x)
