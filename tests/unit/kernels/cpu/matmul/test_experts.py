"""Compare kernels of mixtures of experts with NumPy, and run models with experts in many ways."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_calls import (
    GUARD,
    Scratch,
    at_end_of_page,
    caller,
    compiled_for,
    count,
    for_any_parts,
    kernel_variants,
    normal,
    output,
    padded,
    written,
)

from localllm.arch.rowwise_verbs import swiglu_limited
from localllm.arch.verbs import Routing
from localllm.engine.engine import Engine
from localllm.engine.operations.experts import SelectedExperts
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.engine.options import EngineOptions
from localllm.errors import ModelError
from localllm.files.gguf.file import Tensor
from localllm.kernels import cpu
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.cpu import EXPERT_ROWS
from localllm.kernels.table import EXPERT, LINEAR_FLOAT, LINEAR_QUANTIZED
from tests.unit.arch.families.test_families import assert_same_everywhere, change, golden, logits, nmse, put, values  # noqa: F401 (a fixture)
from tests.unit.kernels.cpu.test_kernels import (
    as_written,
    linear_float,
    linear_quantized,
    quantize_words,
    random_matrix,
)

ROUTINGS = [
    Routing(8, 2), Routing(8, 8), Routing(1, 1), Routing(60, 4, normalized=False, scale=2.5),
    Routing(16, 1, sigmoid=True, normalized=False), Routing(128, 8),
    Routing(16, 3, sigmoid=True, scale=2.5, groups=4, groups_used=2), Routing(256, 8, True, True, 2.5, 8, 4),
    Routing(24, 3, rooted=True, scale=1.5), Routing(12, 2, rooted=True, normalized=False),
]  # fmt: skip
TOKENS = [0, 1, 2, 7, 33, 600]
KERNELS = ["route", "plan_experts", "gather", "scatter", "add_by_expert", "experts_quantized", "experts_float"]


@pytest.fixture(scope="module")
def call():
    return caller([*KERNELS, "sigmoid_gate", "swiglu_limited"])


def exact_choice(scores: np.ndarray, routing: Routing, bias: np.ndarray | None) -> SelectedExperts:
    """Route by the reference's verb."""
    weight: Any = None if bias is None else type("Bias", (), {"read_vector": lambda self: bias})()
    return ReferenceBuilder.route(None, scores, routing, weight)


def route(
    call, scores: np.ndarray, routing: Routing, bias: np.ndarray | None, parts: int, ids=0, table=0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts and weights of every token."""
    tokens, source = len(scores), padded(scores)
    chosen = np.full((tokens + 1, routing.used), -7, np.int64)
    weights, scratch = np.full((tokens + 1, routing.used), GUARD), Scratch(4 * (2 * routing.experts + routing.groups))
    arguments = {
        name: getattr(routing, name) for name in ("experts", "used", "sigmoid", "rooted", "normalized", "scale")
    }
    arguments |= {
        "groups": routing.groups,
        "groups_used": routing.groups_used,
        "together": routing.together,
        "ids": ids,
        "table": table,
        **scratch.arguments,
    }
    arguments |= {"bias": 0 if bias is None else at_end_of_page(bias)}
    arguments |= {"logits": source, "stride": source.strides[0], "chosen": chosen, "weights": weights}
    call("route", parts, count=count(tokens), **arguments)
    scratch.check()
    assert (chosen[-1] == -7).all() and (weights[-1] == GUARD).all()
    return chosen[:-1], weights[:-1]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.used}of{r.experts}in{r.groups}")
@pytest.mark.parametrize("biased", [False, True])
def test_routing_agrees_with_the_reference(call, routing, tokens, biased):
    scores = 2 * normal(tokens, routing.experts)
    bias = 0.3 * normal(routing.experts, seed=1) if biased else None
    expected = exact_choice(scores, routing, bias)
    for parts in (1, 5):
        chosen, weights = route(call, scores, routing, bias, parts)
        np.testing.assert_array_equal(chosen, expected.experts)
        np.testing.assert_allclose(weights, expected.weights, rtol=1e-6)


def known_experts(tokens: int, routing: Routing) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return token ids, a table of their experts, and the expected choice."""
    random = np.random.default_rng(0)
    table = np.stack([random.permutation(routing.experts)[: routing.used] for _ in range(40)])
    ids = random.integers(0, len(table), tokens)
    builder: Any = type("Ids", (), {"ids": ids})()
    weight: Any = type("Table", (), {"read_integers": lambda self: table})()
    expected = ReferenceBuilder.route(builder, 2 * normal(tokens, routing.experts), routing, None, weight)
    return ids, table, (expected.experts, expected.weights)


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("routing", [Routing(24, 3, rooted=True, scale=1.5), Routing(8, 2)])
def test_routing_by_token_ids_agrees_with_the_reference(call, routing, tokens):
    ids, table, (experts, weights) = known_experts(tokens, routing)
    got = route(call, 2 * normal(tokens, routing.experts), routing, None, 3, ids, table)
    np.testing.assert_array_equal(got[0], experts)
    np.testing.assert_allclose(got[1], weights, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.used}of{r.experts}in{r.groups}")
def test_a_router_with_nan_gives_weights_of_nan(call, routing, value):
    scores = normal(3, routing.experts)
    scores[1, -1] = value
    with np.errstate(invalid="ignore"):
        theirs = exact_choice(scores, routing, None)
    for experts, weights in (route(call, scores, routing, None, 1), theirs[:2]):
        assert (np.isnan(weights) == [[False], [True], [False]]).all()
        assert (experts >= 0).all() and (experts < routing.experts).all()


def test_the_first_expert_of_equal_scores_is_selected(call):
    scores = np.zeros((2, 8), np.float32)
    scores[1, [2, 5, 7]] = 1
    for routing in (Routing(8, 3), Routing(8, 3, groups=4, groups_used=2)):
        chosen, _ = route(call, scores, routing, None, 1)
        np.testing.assert_array_equal(chosen, exact_choice(scores, routing, None).experts)
    np.testing.assert_array_equal(route(call, scores, Routing(8, 3), None, 1)[0], [[0, 1, 2], [2, 5, 7]])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("logit", [-5.0, -13.0, -20.0, -60.0])
def test_weights_of_tiny_sigmoids_stay_tiny(call, logit, groups):
    """Divide weights by their sum, but at least by 2^-14, as llama.cpp does."""
    routing = Routing(16, 4, sigmoid=True, normalized=True, scale=2.5, groups=groups, groups_used=groups)
    scores = (logit + 0.5 * normal(5, 16)).astype(np.float32)
    expected = exact_choice(scores, routing, None)
    chosen, weights = route(call, scores, routing, None, 1)
    np.testing.assert_array_equal(chosen, expected.experts)
    sigmoids = 1 / (1 + np.exp(-np.take_along_axis(scores, chosen, axis=1).astype(np.float64)))
    by_hand = 2.5 * sigmoids / np.maximum(sigmoids.sum(axis=1, keepdims=True), 2.0**-14)
    np.testing.assert_allclose(weights, by_hand, rtol=1e-5, atol=1e-38)
    np.testing.assert_allclose(expected.weights, by_hand, rtol=1e-5, atol=1e-38)
    assert (weights.sum(axis=1) > 2.4).all() if logit > -6 else (weights.sum(axis=1) < 2).all()


def test_experts_with_sigmoids_of_1_are_ordered_by_their_logits(call):
    scores = 100 + normal(5, 16)
    chosen, weights = route(call, scores, Routing(16, 3, sigmoid=True, normalized=False), None, 1)
    np.testing.assert_array_equal(chosen, np.argsort(-scores, axis=1)[:, :3])
    assert (weights == 1).all()


# ---- rows -----------------------------------------------------------------------------------------------------------

CHOICES = {  # by name: the number of tokens to each token's experts, of 8
    "anywhere": lambda tokens: np.argsort(normal(tokens, 8), axis=1)[:, :2],
    "all to one": lambda tokens: np.full((tokens, 1), 5),
    "two of eight": lambda tokens: np.tile([7, 0], (tokens, 1)),
    "one of many": lambda tokens: np.arange(tokens)[:, None] % 8,
}


class Plan:
    """A plan of plan_experts, in no more memory than the engine gives it."""

    def __init__(self, call, chosen: np.ndarray, experts: int = 8):
        self.tokens, self.used = chosen.shape
        self.chosen = np.ascontiguousarray(chosen, np.int64)
        pairs = self.tokens * self.used
        self.most = pairs + min(experts, pairs) * (EXPERT_ROWS - 1)
        self.active = np.full((min(experts, pairs) + 1, len(EXPERT)), -7, np.int64)
        self.rows, self.pairs, self.next_rows = (np.full(n + 1, -7, np.int64) for n in (pairs, self.most, experts))
        self.active_count, self.row_count = count(0), count(0)
        self.arguments = {"active": self.active, "active_count": self.active_count}
        lists = {"rows": self.rows, "pairs": self.pairs, "row_count": self.row_count, "next_rows": self.next_rows}
        given = {"count": count(self.tokens), "chosen": self.chosen, "used": self.used, "experts": experts}
        call("plan_experts", 1, **given, **lists, **self.arguments)
        assert self.rows[-1] == self.pairs[-1] == self.next_rows[-1] == -7 and (self.active[-1] == -7).all()
        self.count = int(self.row_count[0])
        self.expert_of_row = self.chosen.reshape(-1)[self.pairs[: self.count]]

    @property
    def units(self) -> np.ndarray:
        return self.active[: self.active_count[0]]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", CHOICES)
def test_an_expert_plan_groups_rows_by_expert_and_reserves_space_for_products(call, kind, tokens):
    """Expect a row for every pair, and an expert's rows in the order of tokens."""
    plan = Plan(call, CHOICES[kind](tokens))
    flat = plan.chosen.reshape(-1)
    assert plan.count <= plan.most
    np.testing.assert_array_equal(plan.pairs[plan.rows[:-1]], np.arange(len(flat)))
    np.testing.assert_array_equal(plan.units[:, EXPERT.number], np.unique(flat))
    end = 0
    for number, first, rows in plan.units:
        assert first == end
        np.testing.assert_array_equal(plan.pairs[first : first + rows], np.flatnonzero(flat == number))
        end = first + (1 if rows == 1 else -(-rows // EXPERT_ROWS) * EXPERT_ROWS)
        assert (plan.expert_of_row[first:end] == number).all()
    assert plan.count == end


@pytest.mark.parametrize("columns", [5, 16, 100])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", CHOICES)
def test_gathered_rows_scatter_back_to_their_tokens(call, kind, tokens, columns):
    plan, x = Plan(call, CHOICES[kind](tokens)), normal(tokens, columns)
    weights = np.random.default_rng(0).uniform(0.1, 1, plan.chosen.shape).astype(np.float32)
    bias = normal(8, columns, seed=3)
    source, vectors = padded(x), at_end_of_page(padded_vectors(bias))

    def emit_gather(parts, weights=0):
        y = output(plan.count, columns)
        lists = {"pairs": plan.pairs, "used": plan.used, "x": source, "x_stride": source.strides[0]}
        lists["part_bytes"] = 0
        shape = {"y": y, "stride": y.strides[0], "columns": columns}
        call("gather", parts, count=plan.row_count, **lists, **shape, weights=weights)
        return written(y, plan.count, columns)

    def scattered(rows, parts, weights):
        y, rows = output(tokens, columns), padded(rows)
        lists = {"rows": plan.rows, "used": plan.used, "x": rows, "x_stride": rows.strides[0]}
        shape = {"y": y, "stride": y.strides[0], "columns": columns}
        call("scatter", parts, count=count(tokens), **lists, **shape, weights=weights)
        return written(y, tokens, columns)

    def added(parts, rows):
        y = output(plan.count, columns)
        lists = {"pairs": plan.pairs, "chosen": plan.chosen, "x": padded(rows), "z": vectors}
        lists |= {"z_stride": -(-columns // 16) * 64, "y": y, "stride": y.strides[0], "columns": columns}
        call("add_by_expert", parts, count=plan.row_count, **lists)
        return written(y, plan.count, columns)

    pairs = plan.pairs[: plan.count]
    rows = for_any_parts(emit_gather)
    np.testing.assert_array_equal(rows, x[pairs // plan.used])
    weighed = for_any_parts(lambda parts: emit_gather(parts, weights))
    np.testing.assert_array_equal(weighed, rows * weights.reshape(-1)[pairs][:, None])
    np.testing.assert_array_equal(for_any_parts(lambda parts: added(parts, rows)), rows + bias[plan.expert_of_row])
    results = normal(plan.count, columns, seed=4)
    for factors in (0, weights):
        exact = results[plan.rows[:-1]].reshape(tokens, plan.used, columns)
        exact = exact if isinstance(factors, int) else exact * weights[:, :, None]
        got = for_any_parts(lambda parts, factors=factors: scattered(results, parts, factors))
        np.testing.assert_allclose(got, exact.sum(axis=1), rtol=1e-5, atol=1e-6)


def padded_vectors(values: np.ndarray) -> np.ndarray:
    return np.pad(values, [(0, 0), (0, -values.shape[1] % 16)], constant_values=np.nan)


# ---- products -------------------------------------------------------------------------------------------------------

FORMATS = ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"]


@pytest.fixture(scope="module")
def kernels():
    names = [f"linear_{'quantized' if name in cpu.SUB_BLOCK else 'float'}-{name}" for name in FORMATS]
    return KernelLibrary(compiled_for(names))


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 600])
@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("name", FORMATS)
def test_expert_products_equal_those_of_each_expert_alone(call, kernels, name, kind, tokens):
    """Bit for bit, in any number of parts and slices, at both precisions."""
    rows, columns, plan = 37, 256, Plan(call, CHOICES[kind](tokens))
    data, _ = random_matrix(name, 8 * rows, columns)
    x = normal(plan.count, columns)
    for most_precise, kernel_tokens in ((0, 300), (1 << 20, 300), (1 << 20, 100)):
        own = 1 if kernel_tokens <= 128 else 0  # in a short run an expert's number of tokens does not matter
        expected = [
            alone(call, name, data, rows, number, x[first : first + used], most_precise, own)
            for number, first, used in plan.units
        ]
        for slices, parts in ((1, 1), (5, 3), (2, 40)):
            got = together(call, kernels, name, data, rows, plan, x, most_precise, kernel_tokens, slices, parts)
            for (_, first, used), exact in zip(plan.units, expected, strict=True):
                np.testing.assert_array_equal(got[first : first + used], exact)


def alone(
    call, name: str, data: np.ndarray, rows: int, expert: int, x: np.ndarray, most_precise: int, kernel_tokens: int
) -> np.ndarray:
    """Multiply by an expert's matrix with the kernel for one matrix."""
    matrix = at_end_of_page(data.reshape(8, -1)[expert])
    if name in cpu.SUB_BLOCK:
        return linear_quantized(call, name, matrix, rows, x, most_precise, 1, kernel_tokens)
    return linear_float(call, name, matrix, rows, x, halves(call, name, x), most_precise, 1, kernel_tokens)


def halves(call, name: str, x: np.ndarray) -> np.ndarray | None:
    """Return activations in 16 bits for F16 weights, if the CPU multiplies them."""
    return quantize_words(call, x)[0] if name == "F16" and name in cpu.HALVES else None


def together(
    call, kernels: KernelLibrary, name: str, data: np.ndarray, rows: int, plan: Plan, x: np.ndarray, most_precise: int,
    kernel_tokens: int, slices: int, parts: int,
) -> np.ndarray:  # fmt: skip
    """Compute all experts' products."""
    columns, is_quantized = x.shape[1], name in cpu.SUB_BLOCK
    kind = "quantized" if is_quantized else "float"
    own = cpu.compute_linear_scratch(columns) if is_quantized else max(cpu.FLOAT_SCRATCH, 4 * columns)
    scratch = Scratch(cpu.CALL_BYTES + own)
    y, row_bytes = output(plan.count, rows), data.nbytes // 8 // rows
    arguments = {"count": plan.row_count, "weights": data, "row_bytes": row_bytes, "rows": rows, "columns": columns}
    arguments |= {
        "y": y,
        "y_stride": y.strides[0],
        **scratch.arguments,
        **plan.arguments,
        "kernel_tokens": count(kernel_tokens),
    }
    if is_quantized:
        q, size = as_written(x, most_precise == 0), cpu.SUB_BLOCK[name]
        by_row = {field: q[field] for field in ("high", "low", "words", "scales", "excess")}
        by_row |= {"sums": q[f"sums_{size}"], "high_sums": q[f"high_sums_{size}"]}
        arguments |= by_row | {"most_precise": count(most_precise)} | kernel_variants(kernels, name, columns)
        places = LINEAR_QUANTIZED
    else:
        source, words = padded(x), halves(call, name, x)
        by_row = {"x": source} if words is None else {"x": source, "halves": words}
        arguments |= {"x": source, "x_stride": source.strides[0], "halves": 0, "halves_stride": 0}
        if words is not None:
            arguments |= {"halves": words, "halves_stride": words.strides[0]}
        arguments |= {"most_precise": most_precise}
        places = LINEAR_FLOAT
    moved = [(getattr(places, at), array.strides[0]) for at, array in {**by_row, "y": y}.items()]
    arguments |= {"by_row": np.array(moved, np.int64), "by_row_count": len(moved)}
    linear = kernels.addresses["linear_quantized" if is_quantized else f"linear_float-{name}"]
    call(f"experts_{kind}", parts, **arguments, linear=linear, expert_bytes=data.nbytes // 8, slices=slices)
    scratch.check()
    return written(y, plan.count, rows)


# ---- functions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("columns", [5, 16, 100])
def test_swiglu_limited_agrees_with_numpy(call, tokens, columns):
    gate, up = 5 * normal(tokens, columns, seed=1), 5 * normal(tokens, columns, seed=2)
    gate[:, :2], up[:, :2] = (1e4, -1e4), (-1e4, 1e4)
    gate[-1:, 2:4], up[-1:, 3:5] = (np.nan, np.inf), (np.nan, -np.inf)

    def compute(parts):
        y = output(tokens, columns)
        vectors = {"gate": padded(gate), "up": padded(up), "y": y, "stride": y.strides[0], "columns": columns}
        call("swiglu_limited", parts, count=count(tokens), **vectors, sharpness=1.702, limit=7.0)
        return written(y, tokens, columns)

    exact = swiglu_limited(gate.astype(np.float64), up, 1.702, 7.0)
    np.testing.assert_allclose(for_any_parts(compute), exact, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_sigmoid_gate_agrees_with_numpy_and_keeps_nan(call, tokens):
    x, gate = normal(tokens, 100), 20 * normal(tokens, 1)
    gate[-2:-1], gate[-1:] = np.inf, np.nan

    def compute(parts):
        y, by = output(tokens, 100), padded(gate)
        vectors = {"x": padded(x), "gate": by, "gate_stride": by.strides[0], "y": y, "stride": y.strides[0]}
        call("sigmoid_gate", parts, count=count(tokens), columns=100, **vectors)
        return written(y, tokens, 100)

    gate[-2:] = np.nan  # what is not finite stays visible
    np.testing.assert_allclose(for_any_parts(compute), x / (1 + np.exp(-gate.astype(np.float64))), rtol=1e-6)


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "llama_moe", "qwen2moe", "gpt_oss", "llama4", "deepseek2_v3", "deepseek2_legacy",
])  # fmt: skip
def test_runs_of_any_size_agree_for_models_with_experts(golden, name):  # noqa: F811
    """Run tokens one by one, in long runs, in a fork, and among others."""
    engine = Engine(golden(name), EngineOptions(2, 640, "f32"))
    tokens = np.random.default_rng(0).integers(0, 250, 600)
    one, whole = engine.sequence(), engine.sequence()
    steps = np.concatenate([one.append([token]) for token in tokens])
    together = whole.append(tokens, "all")
    assert ((together - steps) ** 2).sum() < 1e-8 * (steps**2).sum()
    one.truncate(50)
    others = [engine.sequence() for _ in range(5)]
    for other in others:
        other.append(tokens[:50])
    rows = engine.step([(sequence, [tokens[50]]) for sequence in (one, *others, whole)])
    for row in rows[:-1]:
        assert ((row - steps[50]) ** 2).sum() < 1e-8 * (steps[50] ** 2).sum()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [
    {"expert_group_count": 2, "expert_group_used_count": 1}, {"expert_gating_func": 1, "expert_weights_scale": 0.0},
    {"expert_used_count": 4}, {"expert_used_count": 1, "expert_weights_norm": False},
    {"attention__temperature_scale": 0.5, "attention__temperature_length": 8}, {"rope__scaling__type": "linear"},
    {"rope__scaling__yarn_log_multiplier": 0.0}, {"rope__scaling__attn_factor": 0.8},
])  # fmt: skip
def test_every_routing_setting_of_deepseek_changes_the_logits(golden, fields):  # noqa: F811
    changed = change(golden("deepseek2_v3"), **fields)
    assert nmse(logits(changed), logits(golden("deepseek2_v3"))) > 1e-4
    assert_same_everywhere(changed)


def test_mtp_layers_with_experts_are_left_out(golden):  # noqa: F811
    file = golden("deepseek2_v3")
    for name, tensor in list(file.tensors.items()):
        if name.startswith("blk.1."):
            file.tensors[name.replace("blk.1", "blk.2")] = replace(tensor, name=name.replace("blk.1", "blk.2"))
    put(file, "blk.2.nextn.eh_proj.weight", np.ones((96, 192)))
    change(file, block_count=3, nextn_predict_layers=1)
    np.testing.assert_array_equal(logits(file), logits(golden("deepseek2_v3")))
    with pytest.raises(ModelError, match="nextn_predict_layers must be below"):
        logits(change(file, nextn_predict_layers=3))


def test_fused_gate_and_up_experts_equal_separate_ones(golden):  # noqa: F811
    fused, apart = golden("qwen3moe"), golden("qwen3moe")
    for layer in range(2):
        both = [values(fused, f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        put(fused, f"blk.{layer}.ffn_gate_up_exps.weight", np.concatenate(both, axis=1))
        for part in ("gate", "up"):
            del fused.tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
    np.testing.assert_array_equal(logits(fused), logits(apart))
    assert_same_everywhere(fused)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_router_with_nan_is_refused(golden, backend):  # noqa: F811
    file = golden("llama_moe")
    put(file, "blk.1.ffn_gate_inp.weight", np.full((4, 96), np.nan))
    with np.errstate(all="ignore"), pytest.raises(ModelError, match="not finite"):
        logits(file, backend)


@pytest.mark.parametrize("fields, problem", [
    ({"expert_used_count": 5}, "expert_used_count 5 must be at most expert_count 4"),
    ({"expert_group_count": 3}, "expert_group_count 3"),
    ({"expert_group_count": 2, "expert_group_used_count": 0}, "expert_group_used_count must be"),
    ({"expert_group_count": 2, "expert_group_used_count": 1, "expert_used_count": 3}, "too small for 3 used experts"),
    ({"expert_gating_func": 4}, "llama.expert_gating_func 4 is not supported"),
    ({"expert_gating_func": 2}, "llama.expert_gating_func 2 is not supported"),
    ({"expert_weights_norm": False}, "llama.expert_weights_norm False is not supported"),
    ({"expert_weights_scale": 2.5}, "llama.expert_weights_scale 2.5 is not supported"),
    ({"expert_count": 8}, "llama.expert_count 8 does not match"),
])  # fmt: skip
def test_invalid_routing_metadata_is_refused(golden, fields, problem):  # noqa: F811
    with pytest.raises(ModelError, match=problem):
        logits(change(golden("llama_moe"), **fields))


@pytest.mark.parametrize("fields, problem", [
    ({"expert_gating_func": 4}, r"deepseek2.expert_gating_func must be 1 or 2 \(found 4\)"),
    ({"rope__scaling__type": "longrope"}, "rope scaling longrope is not supported"),
    ({"rope__dimension_count": 64}, "64 must exceed rope.dimension_count 64"),
    ({"attention__head_count_kv": 4}, "attention.head_count_kv be 1"),
    ({"attention__temperature_scale": 0.5}, "attention.temperature_length must be a number"),
    ({"attention__kv_lora_rank": 65}, r"key_length must be 97"),
])  # fmt: skip
def test_invalid_deepseek_metadata_is_refused(golden, fields, problem):  # noqa: F811
    with pytest.raises(ModelError, match=problem):
        logits(change(golden("deepseek2_v3"), **fields))


def test_separate_expert_tensors_equal_stacked_ones_if_equally_spaced(golden):  # noqa: F811
    """Read them as files until 2024 stored them."""
    apart, stacked = golden("llama_moe"), golden("llama_moe")
    for name in [name for name in apart.tensors if "_exps" in name]:
        stack = apart.tensors.pop(name)
        for expert, data in enumerate(stack.data):
            alone = name.replace("_exps", f".{expert}")
            apart.tensors[alone] = Tensor(alone, stack.format, stack.shape[1:], data)
    np.testing.assert_array_equal(logits(apart), logits(stacked))
    assert_same_everywhere(apart)
    name = "blk.1.ffn_down.2.weight"
    put(apart, name, values(apart, name))  # elsewhere
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.0\.weight: .* alike and equally spaced"):
        logits(apart)
    del apart.tensors[name]
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.ffn_down\.2\.weight"):
        logits(apart)


@pytest.mark.parametrize("name, tensor", [
    ("gpt_oss", "blk.0.ffn_gate_inp.bias"), ("gpt_oss", "blk.1.ffn_up_exps.bias"),
    ("gpt_oss", "blk.0.attn_sinks.weight"), ("qwen2moe", "blk.0.ffn_gate_inp_shexp.weight"),
    ("qwen2moe", "blk.1.ffn_up_shexp.weight"),
    ("llama4", "blk.2.ffn_down_shexp.weight"), ("deepseek2_v3", "blk.1.ffn_gate_shexp.weight"),
    ("llama_moe", "blk.0.ffn_gate_exps.weight"), ("deepseek2_lite", "blk.0.attn_k_b.weight"),
])  # fmt: skip
def test_a_missing_expert_tensor_is_named(golden, name, tensor):  # noqa: F811
    file = golden(name)
    del file.tensors[tensor]
    with pytest.raises(ModelError, match=f"the model has no tensor {re.escape(tensor)}"):
        logits(file)


@pytest.mark.parametrize("shape", [(3, 64, 96), (4, 64, 64), (4, 64), (4, 32, 96)])
def test_experts_of_other_shapes_are_refused(golden, shape):  # noqa: F811
    file = golden("llama_moe")
    put(file, "blk.0.ffn_up_exps.weight", np.ones(shape))
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up_exps\.weight must|two inputs must have the same columns"):
        logits(file)
