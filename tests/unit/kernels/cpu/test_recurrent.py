"""Compare kernels of recurrent layers with NumPy, for several sequences at once."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from kernel_calls import at_end_of_page, caller, count, for_any_parts, normal, output, padded, vector, written

from localllm.arch.layer_state import RecurrentLayerState
from localllm.arch.recurrent_verbs import HeadState
from localllm.arch.weights import Weight
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.files.gguf.file import Tensor
from localllm.kernels.reference import ReferenceCache
from localllm.kernels.table import SEQUENCE
from localllm.quant.formats import BY_NAME

COUNTS = [[1], [7], [5, 1, 3, 40]]  # tokens of each sequence
KERNELS = [
    "multiply",
    "sigmoid",
    "softplus",
    "convolve",
    "gated_mean",
    "selective_scan",
    "head_scan-plain",
    "head_scan-delta",
]


@pytest.fixture(scope="module")
def call():
    return caller(KERNELS)


def weight(values: np.ndarray, bias: np.ndarray | None = None) -> Weight:
    data = np.ascontiguousarray(values, np.float32)
    tensor = Tensor("weight", BY_NAME["F32"], data.shape, data.reshape(-1).view(np.uint8))
    return Weight(tensor, None if bias is None else weight(bias))


class Run(NamedTuple):
    """Sequences with a state in the middle of their memory, which `in_place` overwrites."""

    counts: list[int]
    shape: tuple[int, ...]  # of the state
    in_place: bool

    @property
    def state(self) -> RecurrentLayerState:
        return RecurrentLayerState(0, (self.shape,))

    @property
    def old(self) -> np.ndarray:
        return normal(len(self.counts), *self.shape)

    def reference(self, say) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs and new states of the reference, which say(builder) asks for."""
        stores = [ReferenceCache("f32") for _ in self.counts]
        for store, old in zip(stores, self.old, strict=True):
            store.put_state(0, 0, old)
        spans = [SequenceSpan(store, 3, np.zeros(n, int), n) for store, n in zip(stores, self.counts, strict=True)]
        return say(ReferenceBuilder(spans, {}, 100)), np.stack([store.get_state(0, 0, self.shape) for store in stores])

    def kernel(self, call, name: str, parts: int, in_memory, **arguments) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs and new states of the kernel; in_memory(state) arranges a state as kernels do."""
        tokens, ends = sum(self.counts), np.cumsum(self.counts)
        columns = arguments.pop("output_columns")
        y = output(tokens, columns)
        memories = [at_end_of_page(np.concatenate((np.zeros(5, "f4"), in_memory(old).ravel()))) for old in self.old]
        targets = memories if self.in_place else [memory.copy() for memory in memories]
        sequences = np.zeros((len(self.counts), len(SEQUENCE)), np.int64)
        for row, n, end, source, target in zip(sequences, self.counts, ends, memories, targets, strict=True):
            row[:] = end - n, n, 3 + n, 0, source.ctypes.data, target.ctypes.data, 0, n
        header = {"sequences": sequences, "sequence_count": count(len(sequences)), "offset": 20}
        call(name, parts, **header, y=y, stride=y.strides[0], **arguments)
        expected = in_memory(self.old[0]).shape
        return written(y, tokens, columns), np.stack([t.view("f4")[5:].reshape(expected) for t in targets])


def check(run: Run, call, name: str, say, in_memory, **arguments) -> None:
    y, states = run.reference(say)
    expected = np.stack([in_memory(state) for state in states])
    known = np.isfinite(expected)

    def both(parts: int) -> np.ndarray:
        outputs, found = run.kernel(call, name, parts, in_memory, **arguments)
        return np.concatenate((outputs.ravel(), found[known]))

    found = for_any_parts(both)
    np.testing.assert_allclose(found, np.concatenate((y.ravel(), expected[known])), rtol=2e-5, atol=2e-5)


def in_columns(state: np.ndarray) -> np.ndarray:
    """Pad rows to 16 columns with NaN."""
    return np.pad(state, [(0, 0)] * (state.ndim - 1) + [(0, -state.shape[-1] % 16)], constant_values=np.nan)


def in_blocks(state: np.ndarray) -> np.ndarray:
    """Reshape [..., rows, columns] to [..., columns / 16, rows, 16]."""
    rows = in_columns(state)
    return np.ascontiguousarray(rows.reshape(*rows.shape[:-1], -1, 16).swapaxes(-3, -2))


@pytest.mark.parametrize("columns", [1, 16, 100])
def test_gates_agree_with_the_reference_and_keep_nan(call, columns):
    x, z, bias = 20 * normal(9, columns), normal(9, columns, seed=1), normal(columns)
    x[:5, 0] = 100, -100, np.nan, np.inf, -np.inf

    def run(name: str, **more) -> np.ndarray:
        def compute(parts: int) -> np.ndarray:
            y, source = output(9, columns), padded(x)
            call(name, parts, count=count(9), x=source, y=y, stride=y.strides[0], columns=columns, **more)
            return written(y, 9, columns)

        return for_any_parts(compute)

    builder = ReferenceBuilder([SequenceSpan(None, 0, np.zeros(9, int), 9)], {}, 100)
    close: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-37}
    np.testing.assert_array_equal(run("multiply", z=padded(z)), x * z)
    np.testing.assert_allclose(run("sigmoid"), builder.sigmoid(x), **close)
    np.testing.assert_allclose(run("softplus", bias=vector(bias)), builder.softplus(x, weight(bias)), **close)
    for expected in (builder.sigmoid(x), builder.softplus(x, weight(bias))):
        assert np.isnan(expected[2:5, 0]).all()  # what is not finite stays visible


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("columns", "taps", "silu"), [(1, 4, True), (48, 3, False), (100, 2, True), (33, 1, True)])
def test_convolving_agrees_with_the_reference(call, counts, columns, taps, silu):
    x, filter, bias = normal(sum(counts), columns), normal(columns, taps), normal(columns, seed=1)
    weights = at_end_of_page(np.pad(filter.T, ((0, 0), (0, -columns % 16))))
    for in_place in (True, False):
        run = Run(counts, (taps - 1, columns), in_place)
        check(
            run, call, "convolve",
            lambda b, run=run: b.convolve(x, weight(filter, bias), run.state, silu=silu),
            in_columns, x=padded(x), taps=taps, weights=weights, bias=vector(bias), silu=int(silu),
            columns=columns, output_columns=columns,
        )  # fmt: skip


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("columns", "taps", "dilation"), [(20, 4, 3), (33, 2, 5)])
def test_dilated_convolutions_and_means_agree_with_the_reference(call, counts, columns, taps, dilation):
    """Taps some tokens apart have zeros between them; a mean has equal taps."""
    x, filter, before = normal(sum(counts), columns), normal(columns, taps), (taps - 1) * dilation
    spread = np.zeros((before + 1, columns), np.float32)
    spread[::dilation] = filter.T
    for weights, silu, say in (
        (spread, 1, lambda b, state: b.convolve(x, weight(filter), state, dilation=dilation)),
        (np.full_like(spread, 1 / (before + 1)), 0, lambda b, state: b.mean(x, state, 0)),
    ):
        run, memory = Run(counts, (before, columns), True), np.pad(weights, ((0, 0), (0, -columns % 16)))
        check(
            run, call, "convolve", lambda b, run=run, say=say: say(b, run.state), in_columns, x=padded(x),
            taps=before + 1, weights=at_end_of_page(memory), bias=vector(np.zeros(columns, "f4")), silu=silu,
            columns=columns, output_columns=columns,
        )  # fmt: skip


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("columns", "taps", "stretches"), [(1, 4, 1), (48, 3, 1), (24, 2, 1), (33, 1, 1), (20, 8, 2), (7, 2, 2), (16, 9, 1)]
)
def test_gated_means_agree_with_the_reference(call, counts, columns, taps, stretches):
    """Average up to 9 tokens, 3 of which are before the run."""
    x, places = normal(sum(counts), 2 * stretches * columns), normal(taps, columns)
    of_places = at_end_of_page(np.pad(places, ((0, 0), (0, -columns % 16))))
    in_file = weight(np.hstack(np.split(places, stretches)))
    for in_place in (True, False):
        run = Run(counts, (taps - 1, 2 * stretches * columns), in_place)
        check(
            run, call, "gated_mean", lambda b, run=run: b.gated_mean(x, in_file, run.state, 0, stretches), in_columns,
            x=padded(x), x_stride=padded(x).strides[0], taps=taps, stretches=stretches, places=of_places,
            columns=columns, output_columns=columns,
        )  # fmt: skip


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("columns", "state_size"), [(1, 1), (48, 16), (100, 7)])
def test_selective_scans_agree_with_the_reference(call, counts, columns, state_size):
    tokens = sum(counts)
    x, dt = normal(tokens, columns), np.abs(normal(tokens, columns, seed=1))
    b, c = normal(tokens, state_size, seed=2), normal(tokens, state_size, seed=3)
    rates, skip = -np.abs(normal(columns, state_size)), normal(columns)
    for in_place in (True, False):
        run = Run(counts, (state_size, columns), in_place)
        state = RecurrentLayerState(0, ((), run.shape))  # the scan's is the second one
        check(
            run, call, "selective_scan",
            lambda builder, state=state: moved(builder).selective_scan(
                x, dt, b, c, weight(rates), weight(skip), state
            ),
            in_blocks, x=padded(x), dt=padded(dt), b=padded(b), c=padded(c), state_stride=padded(b).strides[0],
            rates=at_end_of_page(np.nan_to_num(in_blocks(rates.T))), skip=vector(skip), columns=columns,
            state_size=state_size, output_columns=columns,
        )  # fmt: skip


def moved(builder: ReferenceBuilder) -> ReferenceBuilder:
    """Make the sequences' states number 1, stored as number 0."""
    for span in builder._spans:
        store = span.store
        store.get_state = lambda layer, number, shape, store=store: ReferenceCache.get_state(store, layer, 0, shape)
        store.put_state = lambda layer, number, state, store=store: ReferenceCache.put_state(store, layer, 0, state)
    return builder


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("rule", ["plain", "delta"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "key_dim", "value_dim"),
    [(1, 1, 1, 1), (4, 2, 16, 16), (6, 2, 13, 24), (3, 3, 32, 40), (5, 1, 20, 7)],
)
def test_head_scans_agree_with_the_reference(call, counts, rule, heads, key_heads, key_dim, value_dim):
    tokens, repeats = sum(counts), {heads // key_heads} if rule == "plain" else {1, heads // key_heads}
    q, k = normal(tokens, key_heads * key_dim), key_dim**-0.5 * normal(tokens, key_heads * key_dim, seed=1)
    v, dt = normal(tokens, heads * value_dim, seed=2), np.abs(normal(tokens, heads, seed=3))
    strength = dt if rule == "plain" else 1 / (1 + np.exp(-normal(tokens, heads, seed=4)))
    rates, skip = -np.abs(normal(heads)), normal(heads, seed=1)
    for in_place, repeat in ((in_place, repeat) for in_place in (True, False) for repeat in repeats):
        run = Run(counts, (heads, key_dim, value_dim), in_place)

        def say(b: ReferenceBuilder, run: Run = run, repeat: int = repeat) -> np.ndarray:
            if rule == "plain":
                return b.state_space(
                    v, dt, k, q, weight(skip), HeadState(run.state, 0, weight(rates), key_heads, repeat)
                )
            return b.delta_rule(q, k, v, dt, strength, HeadState(run.state, 0, weight(rates), key_heads, repeat))

        check(
            run, call, f"head_scan-{rule}", say, in_blocks, q=padded(q), k=padded(k), key_stride=padded(q).strides[0],
            v=padded(v), dt=padded(dt), strength=padded(strength), head_stride=padded(dt).strides[0],
            rates=at_end_of_page(rates), skip=at_end_of_page(skip), heads=heads, key_heads=key_heads,
            repeat=repeat, key_dim=key_dim, value_dim=value_dim, output_columns=heads * value_dim,
        )  # fmt: skip
