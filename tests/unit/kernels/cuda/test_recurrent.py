"""Compare the CUDA kernels of recurrent layers with the reference, for several sequences, in Numba's simulator."""

import numpy as np
import pytest
from kernel_calls import at_end_of_page, normal, padded, vector
from simulated import launch

from localllm.arch.layer_state import RecurrentLayerState
from localllm.arch.recurrent_verbs import HeadState
from localllm.engine.operations.registry import ReferenceBuilder
from tests.unit.kernels.cpu.test_recurrent import Run, in_blocks, in_columns, moved, weight

COUNTS = [3, 1]  # tokens of each sequence
TOKENS = sum(COUNTS)


def check(run: Run, name: str, say, in_memory, **arguments) -> None:
    """Check outputs and new states, whose padding may hold anything."""
    y, states = run.reference(say)
    expected = np.stack([in_memory(state) for state in states])
    known = np.isfinite(expected)
    outputs, new_states = run.kernel(launch, name, 1, in_memory, **arguments)
    np.testing.assert_allclose(outputs, y, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(new_states[known], expected[known], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize(("columns", "taps", "silu", "counts"), [
    (5, 4, True, COUNTS), (20, 2, False, COUNTS), (3, 1, True, COUNTS), (2, 3, True, [150, 2, 33]),
])  # fmt: skip
def test_convolving_on_a_gpu_agrees_with_the_reference(columns, taps, silu, counts, is_in_place):
    x, filter, bias = normal(sum(counts), columns), normal(columns, taps), normal(columns, seed=1)
    weights, run = (
        at_end_of_page(np.pad(filter.T, ((0, 0), (0, -columns % 16)))),
        Run(counts, (taps - 1, columns), is_in_place),
    )
    check(
        run, "convolve", lambda b: b.convolve(x, weight(filter, bias), run.state, silu=silu), in_columns, x=padded(x),
        taps=taps, weights=weights, bias=vector(bias), silu=int(silu), columns=columns, output_columns=columns,
    )  # fmt: skip


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize(
    ("columns", "taps", "stretches", "counts"),
    [(5, 4, 1, COUNTS), (20, 2, 1, COUNTS), (2, 3, 1, [150, 2, 33]), (3, 8, 2, COUNTS), (2, 4, 2, [70, 2, 1])],
)
def test_gated_means_on_a_gpu_agree_with_the_reference(columns, taps, stretches, counts, is_in_place):
    x, places = normal(sum(counts), 2 * stretches * columns), normal(taps, columns)
    of_places = at_end_of_page(np.pad(places, ((0, 0), (0, -columns % 16))))
    in_file = weight(np.hstack(np.split(places, stretches)))
    run = Run(counts, (taps - 1, 2 * stretches * columns), is_in_place)
    check(
        run, "gated_mean", lambda b: b.gated_mean(x, in_file, run.state, 0, stretches), in_columns, x=padded(x),
        x_stride=padded(x).strides[0], taps=taps, stretches=stretches, places=of_places, columns=columns,
        output_columns=columns,
    )  # fmt: skip


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize(("columns", "state_size"), [(1, 1), (20, 5)])
def test_selective_scans_on_a_gpu_agree_with_the_reference(columns, state_size, is_in_place):
    x, dt = normal(TOKENS, columns), np.abs(normal(TOKENS, columns, seed=1))
    b, c = normal(TOKENS, state_size, seed=2), normal(TOKENS, state_size, seed=3)
    rates, skip = -np.abs(normal(columns, state_size)), normal(columns)
    run = Run(COUNTS, (state_size, columns), is_in_place)
    state = RecurrentLayerState(0, ((), run.shape))  # the scan's is the second one
    check(
        run, "selective_scan",
        lambda builder: moved(builder).selective_scan(x, dt, b, c, weight(rates), weight(skip), state),
        in_blocks, x=padded(x), dt=padded(dt), b=padded(b), c=padded(c), state_stride=padded(b).strides[0],
        rates=at_end_of_page(np.nan_to_num(in_blocks(rates.T))), skip=vector(skip), columns=columns,
        state_size=state_size, output_columns=columns,
    )  # fmt: skip


@pytest.mark.parametrize(("rule", "heads", "key_heads", "key_dim", "value_dim", "repeat"), [
    ("plain", 4, 2, 5, 7, 2), ("plain", 1, 1, 3, 18, 1), ("delta", 4, 2, 5, 7, 2), ("delta", 2, 2, 1, 1, 1),
])  # fmt: skip
def test_head_scans_on_a_gpu_agree_with_the_reference(rule, heads, key_heads, key_dim, value_dim, repeat):
    is_delta, is_in_place = rule == "delta", value_dim == 7
    q, k = normal(TOKENS, key_heads * key_dim), key_dim**-0.5 * normal(TOKENS, key_heads * key_dim, seed=1)
    v, dt = normal(TOKENS, heads * value_dim, seed=2), np.abs(normal(TOKENS, heads, seed=3))
    strength = 1 / (1 + np.exp(-normal(TOKENS, heads, seed=4))) if is_delta else dt
    rates, skip = -np.abs(normal(heads)), normal(heads, seed=1)
    run = Run(COUNTS, (heads, key_dim, value_dim), is_in_place)

    def say(b: ReferenceBuilder) -> np.ndarray:
        if is_delta:
            return b.delta_rule(q, k, v, dt, strength, HeadState(run.state, 0, weight(rates), key_heads, repeat))
        return b.state_space(v, dt, k, q, weight(skip), HeadState(run.state, 0, weight(rates), key_heads, repeat))

    check(
        run, f"head_scan-{rule}", say, in_blocks, q=padded(q), k=padded(k), key_stride=padded(q).strides[0],
        v=padded(v), dt=padded(dt), strength=padded(strength), head_stride=padded(dt).strides[0],
        rates=at_end_of_page(rates), skip=0 if is_delta else at_end_of_page(skip), heads=heads, key_heads=key_heads,
        repeat=repeat, key_dim=key_dim, value_dim=value_dim, output_columns=heads * value_dim,
    )  # fmt: skip
