"""The lane of products in BF16 tiles against NumPy twins: on CPUs without AMX, its instructions are emulated.

The rest of the lane is the same code: unpacking, panels, blocking, sums, edges, and how the engine makes use of it.
"""

import numpy as np
import pytest
import test_attention
from kernel_calls import (
    GUARD,
    Scratch,
    at_end_of_page,
    caller,
    count,
    for_any_parts,
    normal,
    output,
    padded,
    wanted,
    written,
)
from test_experts import CHOICES, Plan
from test_kernels import FORMATS as LINEAR_FORMATS
from test_kernels import product_error, random_matrix

from localllm.engine.cpu import attention_scratch
from localllm.kernels import cpu
from localllm.kernels.arguments import LINEAR_TILES_FLOAT, LINEAR_TILES_QUANTIZED
from localllm.kernels.cpu.quantized_formats import QUANTIZED
from localllm.kernels.library import Library
from localllm.quant.formats import BY_NAME

ALL = 1 << 20  # tokens, in both planes
SLAB = cpu.TILE_SLAB


@pytest.fixture(scope="module")
def call(request):
    groups, rows = (f"unpack_{kind}-" for kind in ("groups", "rows"))
    names = [groups + name for name in cpu.SUB_BLOCK] + [rows + name for name in LINEAR_FORMATS["linear_float"]]
    return caller(["pack", "linear_tiles_quantized", "linear_tiles_float", *wanted(request, names)])


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest number in BF16, ties to even, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (bits >> 16 & 1) + 0x7FFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def panels(call, x: np.ndarray, most_exact: int, parts: int = 1, plan: Plan | None = None, run: int = 0) -> np.ndarray:
    """x as right operands, [slabs, bytes]. With a plan, it is of all experts' rows, in a run of so many tokens."""
    source, scratch = padded(x), Scratch(2048)
    slabs, slab_bytes = -(-x.shape[1] // SLAB), (len(x) // 16 + 1 + (len(plan.units) if plan else 0)) * 16 * 4 * SLAB
    memory = np.full((slabs, slab_bytes // 4), np.nan, np.float32)
    given = {"active": plan.active, "active_count": plan.arguments["active_count"]} if plan else {}
    call(
        "pack", parts, count=count(run or len(x)), x=source, stride=source.strides[0], columns=x.shape[1],
        panels=memory, slab_bytes=slab_bytes, most_exact=count(most_exact), least=0,
        **({"active": 0, "active_count": 0} | given), **scratch.arguments,
    )  # fmt: skip
    scratch.check()
    return memory


def product(call, library: Library, name: str, kind: str, data: np.ndarray, rows: int, x: np.ndarray, exact: bool):
    """The product of a matrix with the rows of x, in tiles, the same in any number of parts."""
    tokens, columns = x.shape
    memory, unused = panels(call, x, ALL if exact else 0), of_few(kind)

    def compute(parts: int) -> np.ndarray:
        y, scratch = output(tokens, rows), Scratch(cpu.TILES_SCRATCH)
        call(
            f"linear_tiles_{kind}", parts, count=count(tokens), weights=data, row_bytes=data.nbytes // rows, rows=rows,
            columns=columns, y=y, y_stride=y.strides[0], **unused, **scratch.arguments, panels=memory, least=0, few=0,
            slab_bytes=memory.strides[0], unpack=library.addresses[unpacking(name, kind)],
            most_exact=count(ALL if exact else 0),
        )  # fmt: skip
        scratch.check()
        return written(y, tokens, rows)

    return for_any_parts(compute)


def of_few(kind: str) -> dict[str, int]:
    """What only the kernel for few tokens would read."""
    if kind == "float":
        return dict.fromkeys(("x", "x_stride", "bf16", "bf16_stride", "most_precise"), 0)
    return dict.fromkeys(("high", "low", "scales", "sums", "high_sums", "excess", "most_precise"), 0)


def unpacking(name: str, kind: str) -> str:
    return f"unpack_{'rows' if kind == 'float' else 'groups'}-{name}"


CASES = [("quantized", name) for name in cpu.SUB_BLOCK] + [("float", name) for name in LINEAR_FORMATS["linear_float"]]
TOKENS = [1, 16, 17, 33, 600]  # one, a panel, two, an odd number, more than a run ever has


def shapes(kind: str, name: str) -> list[tuple[int, int]]:
    """(rows, columns): halves of slabs that are not there, rows that end within a slab, or within 32 columns."""
    block = BY_NAME[name].block if kind == "float" else 64 if QUANTIZED[name].chunk else 256
    return {
        1: [(1, 5), (16, 100), (50, 300)], 16: [(17, 96), (33, 320)], 32: [(17, 96), (33, 288)],
        64: [(5, 64), (17, 576), (33, 320)], 256: [(5, 256), (17, 512), (50, 768)],
    }[block]  # fmt: skip


def mean_error(got: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    """As product_error, but of all tokens."""
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    return float(((got - x @ weights.T) ** 2).sum() / (x**2 @ (weights**2).T).sum())


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_products(call, kind, name):
    """One plane is what rounding to BF16 leaves of a product, two are exact: 3e-10 is the sums' own error in float32."""
    library = Library([unpacking(name, kind)])
    for rows, columns in shapes(kind, name):
        data, weights = random_matrix(name, rows, columns)
        for tokens in TOKENS if rows == 17 else TOKENS[1:4]:
            x = normal(tokens, columns)
            rounded = product(call, library, name, kind, data, rows, x, False)
            assert mean_error(rounded, x, weights) < (1e-5 if rounded.size > 500 else 2e-5)
            assert product_error(rounded, bf16(x), bf16(weights)) < 1e-8
            exact = product(call, library, name, kind, data, rows, x, True)
            assert product_error(exact, x, weights) < 1e-9


@pytest.mark.parametrize(("kind", "name"), [("quantized", "Q4_0"), ("float", "F16")])
@pytest.mark.parametrize("choice", CHOICES)
def test_products_are_those_of_each_expert_alone_in_tiles(call, kind, name, choice):
    """Bit for bit, in any number of parts and slices, in one plane and in two; few rows go to the kernel for few."""
    rows, columns, library = 37, 320, Library([unpacking(name, kind), f"linear_tiles_{kind}"])
    for tokens in (1, 5, 33, 600):
        plan = Plan(call, CHOICES[choice](tokens))
        data, _ = random_matrix(name, 8 * rows, columns)
        x = normal(plan.count, columns)
        for exact in (False, True):
            expected = np.full((plan.count, rows), GUARD)
            for number, first, used in plan.units:
                matrix = at_end_of_page(data.reshape(8, -1)[number])
                expected[first : first + used] = product(call, library, name, kind, matrix, rows, x[first:][:used], exact)
            for slices, parts in ((1, 1), (5, 3)):
                got = of_experts(call, library, name, kind, data, rows, plan, x, exact, slices, parts)
                np.testing.assert_array_equal(got, expected)


def of_experts(
    call, library: Library, name: str, kind: str, data: np.ndarray, rows: int, plan: Plan, x: np.ndarray, exact: bool,
    slices: int, parts: int,
) -> np.ndarray:  # fmt: skip
    """All experts' products. Nothing is written to rows between theirs."""
    memory, columns, most = panels(call, x, 100 if exact else 99, parts, plan, 100), x.shape[1], 100 if exact else 99
    scratch, y = Scratch(cpu.CALL_BYTES + cpu.TILES_SCRATCH), output(plan.count, rows)
    declared = LINEAR_TILES_FLOAT if kind == "float" else LINEAR_TILES_QUANTIZED
    arguments = of_few(kind) | {"most_precise": most if kind == "float" else count(most)}
    call(
        f"experts_tiles_{kind}", parts, count=plan.row_count, weights=data, row_bytes=data.nbytes // 8 // rows,
        rows=rows, columns=columns, y=y, y_stride=y.strides[0], **arguments, **scratch.arguments, panels=memory,
        slab_bytes=memory.strides[0], unpack=library.addresses[unpacking(name, kind)], most_exact=count(most), few=0,
        least=0, linear=library.addresses[f"linear_tiles_{kind}"], by_row_count=1, **plan.arguments,
        by_row=np.array([[declared.y, y.strides[0]]], np.int64), run_count=count(100), expert_bytes=data.nbytes // 8,
        slices=slices,
    )  # fmt: skip
    scratch.check()
    return written(y, plan.count, rows)


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.fixture
def attend(call, monkeypatch):
    """`call` for the tests of attention, to meet the kernels with tiles instead."""
    monkeypatch.setattr(test_attention, "attention_scratch", lambda *dims: attention_scratch(*dims) + cpu.ATTEND_TILES)
    return lambda name, *given, **arguments: call(name.replace("attend-", "attend_tiles-"), *given, **arguments)


@pytest.mark.parametrize("name", ["F16", "Q8_0-Q4_0"])
@pytest.mark.parametrize(("tokens", "length"), [(20, 20), (33, 300), (65, 65), (130, 1000)])
def test_attention_in_tiles(attend, name, tokens, length):
    for shape in test_attention.SHAPES:
        only = test_attention.text(name, shape, tokens, length)
        got = for_any_parts(lambda parts, a=(name, shape, [only]): test_attention.attend(attend, *a, parts)[0])
        assert test_attention.nmse(got, test_attention.exact_attention(shape, only)) < 1e-8


def test_attention_of_many_sequences(attend):
    """Windows, sinks and scattered pages are not the products' business, but they meet them."""
    shape = test_attention.Shape(64, 80, 2, 6)
    texts = [test_attention.text("F16", shape, *position, seed) for seed, position in enumerate(test_attention.MIXED)]
    sinks = np.linspace(-2, 2, 12, dtype=np.float32)
    got = test_attention.attend(attend, "F16", shape, texts, 3, window=200, sinks=sinks, softcap=20.0, scattered=True)
    for rows, one in zip(got, texts, strict=True):
        exact = test_attention.exact_attention(shape, one, 200, 20.0, sinks=sinks)
        assert test_attention.nmse(rows, exact) < 1e-8


@pytest.mark.parametrize("side", ["keys", "values", "q"])
def test_what_is_not_a_number_stays_visible_in_tiles(attend, side):
    """In F16, whose kernel is there."""
    shape = test_attention.Shape(64, 64, 1, 2)
    one = test_attention.text("F16", shape, 30, 300)
    getattr(one, side)[0, ..., 3] = np.nan
    got = test_attention.attend(attend, "F16", shape, [one])[0]
    lost = got[:, [3, 67]] if side == "values" else got[0, :64] if side == "q" else got
    assert np.isnan(lost).all()
    assert np.isnan(got).all() == (side == "keys")
