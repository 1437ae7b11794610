"""Compare the CUDA kernels with NumPy, in Numba's simulator."""

from types import SimpleNamespace

import numpy as np
import pytest
from kernel_calls import GUARD, count, normal, output, padded, vector, written
from simulated import launch

from localllm.arch.layer_state import ON_GPU
from localllm.engine.lower.header import SAME_TOKEN_TYPE, SequenceSpan
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.kernels.cuda import find_kernel, list_parameters
from localllm.kernels.reference import hadamard
from tests.unit.kernels.cpu.attention.test_attend import BLOCKS, Header, decoded, encoded

COUNT = 3  # rows; there may be one more
twin = ReferenceBuilder([SequenceSpan(None, 0, np.zeros(COUNT, np.int64), COUNT, kinds=SAME_TOKEN_TYPE)], {}, 100)


def test_kernels_take_the_declared_parameters():
    """Check also kernels that share their code, whose names for them may differ."""
    for name in ("rms_norm", "add", "swiglu_limited", "store-F16", "recall-Q4_0"):
        code = find_kernel(name).__code__
        assert code.co_varnames[: code.co_argcount] == list_parameters(name)
    for name in ("gelu", "clamp", "swiglu"):
        assert find_kernel(name).__code__.co_argcount == len(list_parameters(name))


def test_angles_on_a_gpu_agree_with_numpy():
    positions, pairs = np.array([0, 511, 1_048_575]), 3
    frequencies, table = 10000.0 ** (-np.arange(pairs) / pairs), np.full((COUNT + 1, 2, pairs), GUARD)
    given = {"positions": positions, "before": 3, "frequencies": frequencies, "pairs": pairs}
    launch("angles", COUNT + 1, count=count(COUNT), **given, table=table, factor=1.25)
    angles = np.outer(positions - 3, frequencies)
    exact = 1.25 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(table[:COUNT], exact, rtol=1e-6, atol=1e-9)
    assert (table[COUNT] == GUARD).all()


def computed(name: str, x: np.ndarray, columns: int, is_in_place: bool = False, /, **given) -> np.ndarray:
    """Return a kernel's output for rows `x`, its first input."""
    y = output(COUNT, columns)
    if is_in_place:
        y[:COUNT, : x.shape[1]] = x
    first = next(key for key in ("x", "gate") if key in list_parameters(name))
    given = {first: y if is_in_place else padded(x), "y": y, "stride": y.strides[0], "columns": columns} | given
    launch(name, COUNT + 1, count=count(COUNT), **{key: given[key] for key in list_parameters(name) if key != "count"})
    return written(y, COUNT, columns)


@pytest.mark.parametrize(("columns", "group"), [(5, 5), (40, 40), (18, 6)])
@pytest.mark.filterwarnings("ignore:overflow")
def test_norms_on_a_gpu_agree_with_numpy_and_keep_nan(columns, group):
    x, weight, bias = 3 + normal(COUNT, columns), normal(columns, seed=1), normal(columns, seed=2)
    given = {"weight": vector(weight), "bias": vector(bias), "group": group, "epsilon": 1e-3}
    groups = x.reshape(COUNT, -1, group).astype(np.float64)
    for is_in_place in (False, True):
        exact = groups / np.sqrt((groups**2).mean(axis=2, keepdims=True) + 1e-3)
        y = computed("rms_norm", x, columns, is_in_place, **given)
        np.testing.assert_allclose(y, exact.reshape(x.shape) * weight, rtol=1e-5, atol=1e-6)
        exact = (groups - groups.mean(axis=2, keepdims=True)) / np.sqrt(groups.var(axis=2, keepdims=True) + 1e-3)
        y = computed("layer_norm", x, columns, is_in_place, **given)
        np.testing.assert_allclose(y, exact.reshape(x.shape) * weight + bias, rtol=1e-5, atol=1e-5)
    x[[0, 1], [0, 3]] = np.nan, 1e30
    for name in ("rms_norm", "layer_norm"):
        is_lost = ~np.isfinite(computed(name, x, columns, **given))
        assert is_lost[:2, :group].all() and not is_lost[:2, group:].any() and not is_lost[2].any()


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_fused_sum_and_norm_agree_with_numpy(is_in_place):
    x, z, weight, total = normal(COUNT, 40), normal(COUNT, 40, seed=1), normal(40), output(COUNT, 40)
    total[:COUNT, :40] = x
    given = {"x": total if is_in_place else padded(x), "z": padded(z), "total": total, "weight": vector(weight)}
    y = computed("add_rms_norm", x, 40, **given, epsilon=1e-5)
    np.testing.assert_array_equal(written(total, COUNT, 40), x + z)
    exact = (x + z) / np.sqrt(((x + z) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_a_fused_norm_and_rope_equal_both_kernels(is_interleaved):
    heads, head_dim, pairs = 2, 10, 3
    x, weight, table = normal(COUNT, 20), vector(normal(20)), normal(COUNT, 2, pairs)
    step, apart = (2, 1) if is_interleaved else (1, pairs)
    given = {"weight": weight, "epsilon": 1e-5, "heads": heads, "head_dim": head_dim, "group": head_dim}
    given |= {"table": table, "pairs": pairs, "step": step, "apart": apart}
    expected = computed("rope", computed("rms_norm", x, 20, **given), 20, **given)
    for is_in_place in (False, True):
        got = computed("rms_norm_rope", x, 20, is_in_place, **given)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


BIAS = SimpleNamespace(read_vector=lambda: normal(20, seed=3))
ELEMENTWISE = {  # the verb as a function of x and z, and the kernel's further arguments
    "add": (lambda x, z: twin.add(x, z), {}),
    "multiply": (lambda x, z: twin.multiply(x, z), {}),
    "swiglu": (lambda x, z: twin.swiglu(x, z), {}),
    "geglu": (lambda x, z: twin.geglu(x, z), {}),
    "swiglu_limited": (lambda x, z: twin.swiglu_limited(x, z, 1.702, 7.0), {"sharpness": 1.702, "limit": 7.0}),
    "gelu": (lambda x, z: twin.gelu(x), {}),
    "relu_squared": (lambda x, z: twin.relu_squared(x), {}),
    "sigmoid": (lambda x, z: twin.sigmoid(x), {}),
    "softplus": (lambda x, z: twin.softplus(x, BIAS), {"bias": vector(BIAS.read_vector())}),
    "scale": (lambda x, z: twin.scale(x, 0.3), {"factor": 0.3}),
    "clamp": (lambda x, z: twin.clamp(x, 1.5), {"limit": 1.5}),
    "softcap": (lambda x, z: twin.softcap(x, 2.5), {"cap": 2.5}),
    "sigmoid_gate": (lambda x, z: twin.sigmoid_gate(x, z[:, :1]), {}),
    "scale_by_position": (
        lambda x, z: twin.scale_by_position(x, np.array([0, 16, 131071]), 0.1, 16, 1),
        {"positions": np.array([0, 16, 131071]), "slope": 0.1, "length": 16, "offset": 1},
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_on_a_gpu_agree_with_the_reference(name):
    """Check also that exactly the same outputs are infinite."""
    verb, given = ELEMENTWISE[name]
    x, z = 3 * normal(COUNT, 20), 3 * normal(COUNT, 20, seed=1)
    x[:, :2], z[:, 2:4], x[1, 4] = (50, -50), (50, -50), np.nan
    x[2, 4:6], z[2, 6:8] = (np.inf, -np.inf), (np.inf, -np.inf)
    of_z = padded(z)
    given = {"z": of_z, "up": of_z, "gate": of_z, "z_stride": of_z.strides[0], "gate_stride": of_z.strides[0]} | given
    if "x" not in list_parameters(name):
        del given["gate"]
    with np.errstate(all="ignore"):
        expected = verb(x, z)
        for is_in_place in (False, True):
            y = computed(name, x, 20, is_in_place, **given)
            finite = np.isfinite(expected)
            np.testing.assert_array_equal(np.isfinite(y), finite)
            np.testing.assert_allclose(y[finite], expected[finite], rtol=1e-5, atol=1e-6)


def test_adding_one_row_to_all_agrees_with_numpy():
    x, z = normal(COUNT, 40), normal(40, seed=1)
    np.testing.assert_array_equal(computed("add", x, 40, z=vector(z), z_stride=0), x + z)


def test_selecting_copies_rows_on_a_gpu():
    x, rows = normal(7, 20), np.array([6, 0, 6])
    np.testing.assert_array_equal(computed("select", x, 20, rows=rows), x[rows])


@pytest.mark.parametrize(("first", "end", "period"), [(17, 60, 100), (3, 4, 5)])
def test_slicing_columns_on_a_gpu_agrees_with_the_reference(first, end, period):
    x, groups = normal(COUNT, 100), 100 // period
    columns, stride = (end - first) * groups, padded(x).strides[0]
    y = computed("slice_columns", x, columns, x_stride=stride, first=first, groups=groups, period=period)
    np.testing.assert_array_equal(y, twin.slice_columns(x, first, end, period))


@pytest.mark.parametrize("shared", [False, True])
def test_concatenated_heads_on_a_gpu_agree_with_the_reference(shared):
    heads, left, right = 3, 5, 7
    x, z = normal(COUNT, heads * left), normal(COUNT, right if shared else heads * right, seed=1)
    given = {"x_stride": padded(x).strides[0], "z": padded(z), "z_stride": padded(z).strides[0]}
    given |= {"x_columns": left, "z_columns": right, "shared": shared, "heads": heads}
    y = computed("concat_heads", x, heads * (left + right), **given)
    np.testing.assert_array_equal(y, twin.concat_heads(x, z, heads, shared))


def test_logits_on_a_gpu_are_copied_and_infinite_ones_flagged():
    x = normal(COUNT, 21)
    for place, flaw in (None, 0), ((2, 20), np.nan), ((0, 0), -np.inf), ((1, 5), 1e38):
        if place:
            x[place] = flaw
        y, flaws, source = np.full((COUNT + 1, 21), GUARD), count(0), padded(x)
        given = {"x": source, "stride": source.strides[0], "columns": 21, "y": np.array([y.ctypes.data])}
        launch("logits", COUNT + 1, count=count(COUNT), **given, flaws=flaws)
        np.testing.assert_array_equal(y[:COUNT], x)
        assert (y[COUNT] == GUARD).all()
        assert (flaws[0] > 0) == (not np.isfinite(x).all())
        x[:] = 1


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "dims"), [(20, 20), (10, 4)])
def test_rope_on_a_gpu_rotates_the_first_dimensions_of_each_head(head_dim, dims, is_interleaved):
    """Compare with complex numbers."""
    heads, pairs = 2, dims // 2
    x = normal(COUNT, heads * head_dim)
    angles = np.random.default_rng(0).uniform(-3, 3, (COUNT, pairs))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    step, apart = (2, 1) if is_interleaved else (1, pairs)
    exact = x.reshape(COUNT, heads, head_dim).astype(np.float64)
    real, imaginary = (np.s_[:dims:2], np.s_[1:dims:2]) if is_interleaved else (np.s_[:pairs], np.s_[pairs:dims])
    turned = (exact[:, :, real] + 1j * exact[:, :, imaginary]) * np.exp(1j * angles)[:, None]
    exact[:, :, real], exact[:, :, imaginary] = turned.real, turned.imag
    given = {"heads": heads, "head_dim": head_dim, "table": table, "pairs": pairs, "step": step, "apart": apart}
    for is_in_place in (False, True):
        y = computed("rope", x, heads * head_dim, is_in_place, **given)
        np.testing.assert_allclose(y, exact.reshape(x.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("columns", "block"), [(5, 1), (12, 4), (64, 32)])
def test_the_hadamard_kernel_on_a_gpu_agrees_with_numpy(columns, block):
    x = normal(COUNT, columns)
    for is_in_place in (False, True):
        y = computed("hadamard", x, columns, is_in_place, block=block)
        np.testing.assert_allclose(y, hadamard(x, block), rtol=1e-5, atol=1e-6)


def test_squares_are_added_to_sums_of_columns():
    x, sums = normal(COUNT, 40), vector(normal(40, seed=1))
    before, source = sums.view(np.float32)[:40].copy(), padded(x)
    launch("add_squares", 1, count=count(COUNT), x=source, stride=source.strides[0], columns=40, sums=sums)
    np.testing.assert_allclose(sums.view(np.float32)[:40], before + (x**2).sum(axis=0), rtol=1e-6)


def test_squares_of_experts_are_added_to_their_sums_and_counts():
    """Experts 2 and 0 have rows, two and one; expert 1 has none."""
    x, sums, counts = normal(5, 40), padded(normal(3, 40, seed=1)), np.array([7, 8, 9], np.int64)
    before, source = sums.view(np.float32)[:3, :40].copy(), padded(x)
    active = np.array([[0, 0, 2], [2, 3, 1]], np.int64)
    given = {"active": active, "active_count": count(2), "x": source, "stride": source.strides[0], "columns": 40}
    launch("add_expert_squares", 1, **given, sums=sums, sums_stride=sums.strides[0], counts=counts)
    added = np.stack([(x[:2] ** 2).sum(axis=0), np.zeros(40), x[3] ** 2])
    np.testing.assert_allclose(sums.view(np.float32)[:3, :40], before + added, rtol=1e-6)
    assert counts.tolist() == [9, 8, 10]


# ---- the KV cache ----------------------------------------------------------------------------------------------------

HEADS = 2


def pass_over_cache(name: str, header: Header, x: np.ndarray, memory: np.ndarray, head_dim: int) -> None:
    """Store rows in the cache, or recall them."""
    given = {"positions": header.positions, "owners": header.owners, "sequences": header.sequences}
    given |= {"x": x, "stride": x.strides[0], "base": memory, "head_stride": memory.strides[0]}
    given |= {"token_bytes": memory.shape[2], "heads": len(memory), "head_dim": head_dim}
    launch(name, int(header.count[0]) + 1, count=header.count, **given)


@pytest.mark.parametrize("name", [name.upper() for name in ON_GPU])
@pytest.mark.parametrize("head_dim", [32, 20, 36])
def test_stored_tokens_have_the_bytes_of_the_cpu_cache_and_are_recalled(name, head_dim):
    """Check also that nothing else changes."""
    header = Header([2, 1, 2], [4, 64, 66], scattered=True)
    x = normal(5, HEADS * head_dim)
    x[0], x[1], x[2] = 0, 1e-7 * x[1], 1e4 * x[2]
    kept = encoded(name, x.reshape(5, HEADS, head_dim))
    memory, expected = (header.memory(HEADS, kept.shape[2]) for _ in range(2))
    places = np.concatenate([header.places(number)[-tokens:] for number, tokens in enumerate((2, 1, 2))])
    expected[:, places] = kept.swapaxes(0, 1)
    pass_over_cache(f"store-{name}", header, padded(x), memory, head_dim)
    np.testing.assert_array_equal(memory, expected)
    back = output(5, HEADS * head_dim)
    pass_over_cache(f"recall-{name}", header, back, memory, head_dim)
    back = written(back, 5, HEADS * head_dim)
    np.testing.assert_array_equal(back, decoded(name, kept, head_dim).reshape(5, -1))


@pytest.mark.parametrize("name", [name.upper() for name in ON_GPU])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_values_out_of_range_are_stored_as_nan_on_a_gpu(name):
    """Not an infinity; a block becomes NaN as a whole."""
    x = normal(8, 36)
    for token, value in enumerate([np.nan, np.inf, -np.inf, 65519, 65520, -1e6, 8.4e6, -3e38]):
        x[token, [0, 17, 31, 35][token % 4]] = value
    limit = {"F32": np.inf, "F16": 65520, "Q8_0": 65520 * 127, "Q4_0": 65520 * 8, "Q4_1": 65520}[name]
    lost = np.pad(~(np.abs(x) < limit), [(0, 0), (0, 28)]).reshape(8, -1, 32 if name in BLOCKS else 1).any(axis=-1)
    lost = np.repeat(lost, 64 // lost.shape[1], axis=1)[:, :36]
    header = Header([8], [8])
    memory = header.memory(1, encoded(name, x[:1]).shape[1])
    pass_over_cache(f"store-{name}", header, padded(x), memory, 36)
    got = decoded(name, memory[0, :8], 36)
    assert np.isnan(got[lost]).all()
    assert np.isfinite(got[~lost]).all()


# ---- what products on tensor cores need of activations

RANDOM = np.random.default_rng(0)


def test_float16_rows_with_a_scale_keep_eleven_bits_of_any_size():
    x = RANDOM.normal(0, 1, (4, 48)).astype(np.float32) * np.float32([[1e-20], [1], [1e20], [0]])
    y, scales = np.zeros((4, 48), np.float16), np.zeros(4, np.float32)
    launch("halve", 5, count=np.array([4]), x=x, stride=192, columns=48, y=y, y_stride=96, scales=scales)
    back = y.astype(np.float32)
    for row in range(3):
        np.testing.assert_allclose(back[row] * scales[row], x[row], rtol=2.0**-11, atol=np.abs(x[row]).max() * 1e-7)
    launch("scale_rows", 4, count=np.array([4]), y=back, stride=192, columns=48, scales=scales)
    np.testing.assert_array_equal(back, y.astype(np.float32) * scales[:, None])


def test_nan_spoils_only_its_row_in_float16():
    x = np.ones((3, 16), np.float32)
    x[1, 5] = np.nan
    y, scales = np.zeros((3, 16), np.float16), np.zeros(3, np.float32)
    launch("halve", 3, count=np.array([3]), x=x, stride=64, columns=16, y=y, y_stride=32, scales=scales)
    assert np.isnan(y[1].astype(np.float32) * scales[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_two_bf16_parts_keep_16_bits():
    x = RANDOM.normal(0, 1, (2, 40)).astype(np.float32)
    parts = np.zeros((2, 2, 40), np.uint16)
    launch(
        "split_bf16", 2, count=np.array([2]), x=x, stride=160, columns=40, high=parts[0], low=parts[1], y_stride=80
    )  # fmt: skip
    high, low = (parts.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(high + low, x, rtol=2.0**-14)
