"""Compare recurrences with a decay for each row, on CPU and simulated GPU, with the reference."""

import numpy as np
import pytest
from kernel_calls import caller, normal, padded, vector
from simulated import launch

from localllm.engine.operations.registry import ReferenceBuilder
from tests.unit.kernels.cpu.test_recurrent import Run, check, in_blocks, weight
from tests.unit.kernels.cuda.test_recurrent import check as check_on_a_card

RULES = ["gated", "first", "delta"]


@pytest.fixture(scope="module")
def call():
    return caller(["head_scan-plain", *(f"wkv-{rule}" for rule in RULES)])


def inputs(tokens: int, heads: int, key_dim: int, value_dim: int) -> dict[str, np.ndarray]:
    """Return realistic activations: decays between 0 and 1, keys of length about 1."""
    keys = tokens, heads * key_dim
    activations = {name: normal(*keys, seed=seed) for seed, name in enumerate("rkab")}
    activations |= {name: key_dim**-0.5 * activations[name] for name in "kab"}
    return activations | {"w": np.exp(-np.exp(normal(*keys, seed=7))), "v": normal(tokens, heads * value_dim, seed=8)}


def said(b: ReferenceBuilder, rule: str, run: Run, given: dict, own: np.ndarray) -> np.ndarray:
    """Record the rule's verb."""
    r, w, k, v = (given[name] for name in "rwkv")
    if rule == "gated":
        return b.gated_linear_attention(r, k, v, w, run.state, 0)
    if rule == "first":
        return b.wkv6(r, k, v, w, weight(own), run.state, 0)
    return b.wkv7(r, w, k, v, given["a"], given["b"], run.state, 0)


def arguments(given: dict, own: np.ndarray, heads: int, key_dim: int, value_dim: int) -> dict:
    rows = {name: padded(x) for name, x in given.items()}
    sizes = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "output_columns": heads * value_dim}
    return rows | {"first": vector(own), "key_stride": rows["r"].strides[0]} | sizes


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("counts", [[1], [7], [5, 1, 3, 40]])
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(1, 1, 1), (4, 16, 16), (3, 13, 24), (2, 32, 7)])
def test_wkv_rules_agree_with_the_reference(call, rule, counts, heads, key_dim, value_dim):
    given, own = inputs(sum(counts), heads, key_dim, value_dim), normal(heads * key_dim)
    for is_in_place in (True, False):
        run = Run(counts, (heads, key_dim, value_dim), is_in_place)
        check(
            run, call, f"wkv-{rule}", lambda b, run=run: said(b, rule, run, given, own), in_blocks,
            **arguments(given, own, heads, key_dim, value_dim),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("heads", "key_dim", "value_dim", "is_in_place"), [(2, 5, 7, True), (1, 3, 18, False)])
def test_wkv_rules_on_a_gpu_agree_with_the_reference(rule, heads, key_dim, value_dim, is_in_place):
    given, own = inputs(4, heads, key_dim, value_dim), normal(heads * key_dim)
    run = Run([3, 1], (heads, key_dim, value_dim), is_in_place)
    check_on_a_card(
        run, f"wkv-{rule}", lambda b: said(b, rule, run, given, own), in_blocks,
        **arguments(given, own, heads, key_dim, value_dim),
    )  # fmt: skip


@pytest.mark.parametrize("function", ["cpu", "card"])
def test_lightning_attention_is_a_scan_with_equal_steps(call, function):
    heads, key_dim, value_dim, slopes, run = 3, 5, 7, [0.1, 0.5, 2.0], Run([4, 2], (3, 5, 7), True)
    given = inputs(6, heads, key_dim, value_dim)
    q, k, v = padded(given["r"]), padded(given["k"]), padded(given["v"])
    ones = np.ones(heads, np.float32)
    expected, states = run.reference(
        lambda b: b.lightning_attention(given["r"], given["k"], given["v"], slopes, run.state, 0)
    )
    y, new_states = run.kernel(
        call if function == "cpu" else launch, "head_scan-plain", 2, in_blocks, q=q, k=k, key_stride=q.strides[0], v=v,
        dt=ones, strength=ones, head_stride=0, rates=-np.array(slopes, np.float32), skip=0 * ones, heads=heads,
        key_heads=heads, repeat=1, key_dim=key_dim, value_dim=value_dim, output_columns=heads * value_dim,
    )  # fmt: skip
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)
    known = np.isfinite(in_blocks(states[0]))
    wanted = np.stack([in_blocks(state) for state in states])
    np.testing.assert_allclose(new_states[:, known], wanted[:, known], rtol=2e-5, atol=2e-5)


def test_a_delta_rule_that_removes_nothing_equals_gated_attention(call):
    run, given = Run([6], (2, 4, 3), True), inputs(6, 2, 4, 3)
    given["a"] = np.zeros_like(given["a"])
    results = [run.reference(lambda b, rule=rule: said(b, rule, run, given, normal(8)))[0] for rule in RULES]
    np.testing.assert_array_equal(results[0], results[2])
    assert np.abs(results[0] - results[1]).max() > 0.01
