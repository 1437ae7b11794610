"""Compare products in BF16 tiles with NumPy; on CPUs without AMX, its instructions are emulated.


Unpacking, panels, blocking, sums, edges and the engine are the same code. Compiling all of it takes a minute or two, so
most of it is sampled rarely. After a change run scripts/test --all tests/unit/kernels/cpu/amx/test_amx.py.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
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
from project import ROOT, SUPPORT
from selection import everything

from localllm.engine.cpu import lowering as engine_cpu
from localllm.engine.cpu import lowering as engine_tiles
from localllm.engine.cpu.lowering import count_attention_scratch
from localllm.engine.lower import header
from localllm.engine.lower.header import RunHeader, SequenceSpan
from localllm.engine.lower.tape import Buffer
from localllm.files.gguf.file import GGUFFile
from localllm.kernels import cpu, machine
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.cpu.amx.linear import WIDE
from localllm.kernels.formats import load_group_format
from localllm.kernels.machine import Lane, get_lane
from localllm.kernels.table import LINEAR_TILES_FLOAT, LINEAR_TILES_QUANTIZED
from localllm.quant.formats import BY_NAME
from tests.goldens import test_logits as test_goldens
from tests.platform.test_variants import needs_x86, run_as
from tests.unit.kernels.cpu.attention import test_attend as test_attention
from tests.unit.kernels.cpu.matmul import test_experts
from tests.unit.kernels.cpu.matmul.test_experts import CHOICES, Plan
from tests.unit.kernels.cpu.test_kernels import FORMATS as LINEAR_FORMATS
from tests.unit.kernels.cpu.test_kernels import product_error, random_matrix

at_length = pytest.mark.sampled(every=24)
ALL = 1 << 20  # tokens, in both planes
SLAB = cpu.TILE_SLAB


@pytest.fixture(scope="module", autouse=True)
def tiles_are_allowed():
    """Ask Linux for the right to use tiles, where the CPU has them."""
    machine.request_tiles()


@pytest.fixture(scope="module")
def call(request):
    groups, rows = (f"unpack_{kind}-" for kind in ("groups", "rows"))
    names = [groups + name for name in cpu.SUB_BLOCK] + [rows + name for name in LINEAR_FORMATS["linear_float"]]
    return caller(["pack", "linear_tiles_quantized", *wanted(request, names)])


def bf16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest BF16 value, ties to even, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (bits >> 16 & 1) + 0x7FFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def panels(call, x: np.ndarray, most_exact: int, parts: int = 1, plan: Plan | None = None, run: int = 0) -> np.ndarray:
    """Pack x into right operands, [slabs, bytes]; with a plan, x has all experts' rows, in a run of `run` tokens."""
    source, scratch = padded(x), Scratch(2048)
    slabs, slab_bytes = -(-x.shape[1] // SLAB), (len(x) // 16 + 1 + (len(plan.units) if plan else 0)) * 16 * 4 * SLAB
    memory = np.full((slabs, slab_bytes // 4), np.nan, np.float32)
    arguments = {"active": plan.active, "active_count": plan.arguments["active_count"]} if plan else {}
    call(
        "pack", parts, count=count(run or len(x)), x=source, stride=source.strides[0], columns=x.shape[1],
        panels=memory, slab_bytes=slab_bytes, most_exact=count(most_exact), least=0, kernel_tokens=count(run or len(x)),
        **({"active": 0, "active_count": 0} | arguments), **scratch.arguments,
    )  # fmt: skip
    scratch.check()
    return memory


def product(
    call, library: KernelLibrary, name: str, kind: str, data: np.ndarray, rows: int, x: np.ndarray, exact: bool
):
    """Compute the product of a matrix and the rows of x in tiles; it must not depend on the number of parts."""
    tokens, columns = x.shape
    memory, unused = panels(call, x, ALL if exact else 0), of_few(kind)

    def compute(parts: int) -> np.ndarray:
        y, scratch = output(tokens, rows), Scratch(cpu.TILES_SCRATCH)
        call(
            f"linear_tiles_{kind}", parts, count=count(tokens), weights=data, row_bytes=data.nbytes // rows, rows=rows,
            columns=columns, y=y, y_stride=y.strides[0], **unused, **scratch.arguments, panels=memory, least=0, few=0,
            slab_bytes=memory.strides[0], unpack=library.addresses[unpacking(name, kind)],
            most_exact=count(ALL if exact else 0), kernel_tokens=count(tokens),
        )  # fmt: skip
        scratch.check()
        return written(y, tokens, rows)

    return for_any_parts(compute)


def of_few(kind: str) -> dict[str, int]:
    """Return arguments that only the kernel for few tokens reads."""
    if kind == "float":
        return dict.fromkeys(("x", "x_stride", "halves", "halves_stride", "most_precise"), 0)
    names = "high low words scales sums high_sums excess most_precise variants few_tokens few_fast"
    return dict.fromkeys(names.split(), 0)


def unpacking(name: str, kind: str) -> str:
    return f"unpack_{'rows' if kind == 'float' else 'groups'}-{name}"


CASES = [("quantized", name) for name in cpu.SUB_BLOCK] + [("float", name) for name in LINEAR_FORMATS["linear_float"]]
TOKENS = [1, 16, 17, 33, 600]  # one, a panel, two, an odd number, more than a run ever has


def shapes(kind: str, name: str) -> list[tuple[int, int]]:
    """Return (rows, columns) that end within a slab, within half of one, or within 32 columns."""
    block = BY_NAME[name].block if kind == "float" else 64 if load_group_format(name).chunk else 256
    return {
        1: [(1, 5), (16, 100), (50, 300)], 16: [(17, 96), (33, 320)], 32: [(17, 96), (33, 288)],
        64: [(5, 64), (17, 576), (33, 320)], 256: [(5, 256), (17, 512), (50, 768)],
    }[block]  # fmt: skip


def mean_error(got: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    """Return the error of product_error, over all tokens."""
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    return float(((got - x @ weights.T) ** 2).sum() / (x**2 @ (weights**2).T).sum())


@at_length
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_products_in_tiles_agree_with_numpy(call, kind, name):
    """One plane loses what rounding to BF16 loses; two are exact but for 2e-11."""
    library = KernelLibrary([unpacking(name, kind)])
    for rows, columns in shapes(kind, name):
        data, weights = random_matrix(name, rows, columns)
        for tokens in TOKENS if rows == 17 else TOKENS[1:4]:
            x = normal(tokens, columns)
            rounded = product(call, library, name, kind, data, rows, x, False)
            assert mean_error(rounded, x, weights) < (1e-5 if rounded.size > 500 else 2e-5)
            assert product_error(rounded, bf16(x), bf16(weights)) < 1e-8
            exact = product(call, library, name, kind, data, rows, x, True)
            assert product_error(exact, x, weights) < (1e-10 if exact.size > 500 else 3e-10)


@at_length
def test_long_rows_are_computed_in_fewer_parts(call):
    """Use matrices of two slabs, and of more than two parts compute at once; `product` compares numbers of parts."""
    library, columns = KernelLibrary([unpacking("Q4_0", "quantized")]), WIDE + 64
    x = normal(17, columns)
    for rows in (33, 16 * 2 * cpu.TILE_SLABS + 5):
        data, weights = random_matrix("Q4_0", rows, columns)
        assert product_error(product(call, library, "Q4_0", "quantized", data, rows, x, True), x, weights) < 1e-10


@at_length
@pytest.mark.parametrize(("kind", "name"), [("quantized", "Q4_0"), ("float", "F16")])
@pytest.mark.parametrize("choice", CHOICES)
def test_expert_products_equal_those_of_each_expert_alone(call, kind, name, choice):
    """Bit for bit, in any number of parts and slices, in one plane and in two; few rows go to the kernel for few."""
    rows, columns, library = 37, 320, KernelLibrary([unpacking(name, kind), f"linear_tiles_{kind}"])
    for tokens in (5, 150):
        plan = Plan(call, CHOICES[choice](tokens))
        data, _ = random_matrix(name, 8 * rows, columns)
        x = normal(plan.count, columns)
        for exact in (False, True):
            expected = np.full((plan.count, rows), GUARD)
            for number, first, used in plan.units:
                matrix = at_end_of_page(data.reshape(8, -1)[number])
                expected[first : first + used] = product(
                    call, library, name, kind, matrix, rows, x[first:][:used], exact
                )
            for slices, parts in ((1, 1), (5, 3)):
                got = of_experts(call, library, name, kind, data, rows, plan, x, exact, slices, parts)
                np.testing.assert_array_equal(got, expected)


def of_experts(
    call, library: KernelLibrary, name: str, kind: str, data: np.ndarray, rows: int, plan: Plan, x: np.ndarray,
    exact: bool,
    slices: int, parts: int,
) -> np.ndarray:  # fmt: skip
    """Compute all experts' products. Rows between theirs must stay as they are."""
    most = 200 if exact else 199
    memory, columns = panels(call, x, most, parts, plan, 200), x.shape[1]
    scratch, y = Scratch(cpu.CALL_BYTES + cpu.TILES_SCRATCH), output(plan.count, rows)
    declared = LINEAR_TILES_FLOAT if kind == "float" else LINEAR_TILES_QUANTIZED
    arguments = of_few(kind) | {"most_precise": most if kind == "float" else count(most)}
    call(
        f"experts_tiles_{kind}", parts, count=plan.row_count, weights=data, row_bytes=data.nbytes // 8 // rows,
        rows=rows, columns=columns, y=y, y_stride=y.strides[0], **arguments, **scratch.arguments, panels=memory,
        slab_bytes=memory.strides[0], unpack=library.addresses[unpacking(name, kind)], most_exact=count(most), few=0,
        least=0, linear=library.addresses[f"linear_tiles_{kind}"], by_row_count=1, **plan.arguments,
        by_row=np.array([[declared.y, y.strides[0]]], np.int64), kernel_tokens=count(200), slices=slices,
        expert_bytes=data.nbytes // 8,
    )  # fmt: skip
    scratch.check()
    return written(y, plan.count, rows)


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.fixture
def attend(call, monkeypatch):
    """Redirect `call` of the attention tests to the kernels with tiles."""
    monkeypatch.setattr(
        test_attention, "count_attention_scratch", lambda *dims: count_attention_scratch(*dims) + cpu.ATTEND_TILES
    )
    return lambda name, *given, **arguments: call(name.replace("attend-", "attend_tiles-"), *given, **arguments)


@at_length
@pytest.mark.parametrize("name", ["F16", "Q8_0-Q4_0"])
@pytest.mark.parametrize(("tokens", "length"), [(20, 20), (33, 300), (65, 65), (130, 1000)])
def test_attention_in_tiles_agrees_with_numpy(attend, name, tokens, length):
    for shape in test_attention.SHAPES:
        only = test_attention.text(name, shape, tokens, length)
        got = for_any_parts(
            lambda parts, shape=shape, only=only: test_attention.attend(attend, name, shape, [only], parts)[0]
        )
        assert test_attention.nmse(got, test_attention.exact_attention(shape, only)) < 1e-8


@at_length
def test_attention_of_many_sequences_in_tiles_agrees_with_numpy(attend):
    """Check windows, sinks and scattered pages."""
    shape = test_attention.Shape(64, 80, 2, 6)
    texts = [test_attention.text("F16", shape, *position, seed) for seed, position in enumerate(test_attention.MIXED)]
    sinks = np.linspace(-2, 2, 12, dtype=np.float32)
    got = test_attention.attend(attend, "F16", shape, texts, 3, window=200, sinks=sinks, softcap=20.0, scattered=True)
    for rows, one in zip(got, texts, strict=True):
        exact = test_attention.exact_attention(shape, one, 200, 20.0, sinks=sinks)
        assert test_attention.nmse(rows, exact) < 1e-8


@at_length
@pytest.mark.parametrize("side", ["keys", "values", "q"])
def test_nan_stays_visible_through_attention_in_tiles(attend, side):
    shape = test_attention.Shape(64, 64, 1, 2)
    one = test_attention.text("F16", shape, 30, 300)
    getattr(one, side)[0, ..., 3] = np.nan
    got = test_attention.attend(attend, "F16", shape, [one])[0]
    lost = got[:, [3, 67]] if side == "values" else got[0, :64] if side == "q" else got
    assert np.isnan(lost).all()
    assert np.isnan(got).all() == (side == "keys")


# ---- the engine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def in_tiles(monkeypatch):
    """Lower models to tiles, emulated if need be, and multiply in them from 9 tokens on."""
    monkeypatch.setattr(engine_cpu, "has_tiles", lambda: True)
    for format in cpu.MIN_TILE_TOKENS:
        monkeypatch.setitem(cpu.MIN_TILE_TOKENS, format, 9)
    monkeypatch.setattr(engine_tiles, "MIN_SOME_TILES", 9)
    monkeypatch.setattr(header, "MIN_ALL_TILES", 9)


@at_length
@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize("name", [
    "llama-F16", "llama-Q4_0", "llama-Q4_K_M", "llama-Q6_K", "llama-Q8_0", "llama-NVFP4", "llama_moe-Q4_0",
    "gpt_oss-MXFP4_MOE", "qwen2-BF16", "deepseek2_v3-Q8_0",
])  # fmt: skip
def test_models_in_tiles_agree_with_the_goldens(model_path, name):
    """48 tokens run precisely, closer to exact weights than elsewhere: 2e-10 measured."""
    test_goldens.check_golden(name, model_path(name), "cpu", 1e-8)


@at_length
@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2", "llama_moe", "gpt_oss", "deepseek2_lite", "phi3_longrope"])
def test_architectures_in_tiles_agree_with_the_goldens(model_path, name):
    """Accept the largest measured error, 1.03e-9 of deepseek2_lite."""
    test_goldens.check_architecture(name, model_path(name), 3e-9)


@at_length
@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize(("name", "bound"), [("Q4_0", 1e-4), ("Q8_0", 1e-4), ("Q4_K_M", 1e-4), ("F16", 1e-4)])
def test_batches_in_tiles_agree_with_decode(model_path, name, bound):
    """Precise batches do, and large ones, in which int8 loses 3.1e-4 to 6.9e-4."""
    path = model_path(f"llama-{name}")
    assert test_goldens.prefill_against_steps(path, [8, 9, 15, 16, 17, 33, 127, 128], 640, 320) < 1e-6
    assert test_goldens.prefill_against_steps(path, [129, 600], 640, 320) < bound


@at_length
@pytest.mark.usefixtures("in_tiles")
def test_runs_of_any_size_in_tiles_agree_for_experts(model_path):
    """Never round weights in float32 to one plane."""
    test_experts.test_runs_of_any_size_agree_for_models_with_experts(
        lambda name: GGUFFile.open(model_path(name)), "llama_moe"
    )


def test_integer_activations_are_made_for_few_tokens_only():
    store = SimpleNamespace(addresses=(0, 0, 0))
    most = cpu.MIN_ALL_TILES - 1
    for tokens, few in ((1, 1), (most, most), (most + 1, 0), (512, 0)):
        header = RunHeader()
        header.fill([SequenceSpan(store, 0, np.zeros(tokens, np.int64), 1)], True, np.zeros((1, 1), np.float32))
        assert header.few_counts.tolist() == [few, 1]


@pytest.mark.parametrize(
    ("format", "is_stored", "most"), [("Q8_0", False, 1), ("Q8_0", True, 2), ("F32", False, 2), ("F32", True, 2)]
)
def test_products_of_keys_and_float32_weights_use_both_planes(format, is_stored, most):
    """All later tokens see the error of keys and values; other products use both planes in exact runs only."""
    steps = SimpleNamespace(header=SimpleNamespace(most_precise=1, max_precise_stored=2))
    kernel = "linear_float-F32" if format == "F32" else f"linear_quantized-{format}"
    _, arguments, _ = engine_tiles.select_tile_kernel(
        steps, kernel, format, engine_tiles.ActivationPanels(Buffer(1, 64), 64), is_stored
    )
    assert arguments["most_exact"] == most


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("features", [set(), {"amx-tile"}, {"amx-tile", "amx-bf16", "avx2"}])
def test_tiles_are_used_if_the_cpu_has_them_and_linux_allows(monkeypatch, features, allowed):
    """Check that Linux is not asked for what the CPU does not have."""
    requests = []
    monkeypatch.setattr(machine, "get_lane", lambda: Lane("", ",".join(f"+{feature}" for feature in features)))
    monkeypatch.setattr(machine, "request_tiles", lambda: requests.append(1) or allowed)
    is_there = "amx-bf16" in features
    assert machine.has_tiles() == (is_there and allowed)
    assert machine.get_lane_name() == ("portable" if not is_there else "amx-bf16" if allowed else "avx2")
    assert bool(requests) == is_there


@pytest.mark.skipif("amx-tile" in get_lane().features, reason="this CPU has tiles")
def test_without_tiles_the_request_is_refused_silently():
    assert machine.request_tiles() is False


# ---- the instructions -----------------------------------------------------------------------------------------------

ASSEMBLY = """
import sys
from localllm.kernels.build.compile import compile_module
for name in sys.argv[1:]:
    module, machine = compile_module(name)
    print(machine.emit_assembly(module))
"""


@pytest.mark.sampled
@pytest.mark.slow
@needs_x86
def test_compiled_tiles_use_amx_instructions_and_never_spill(tmp_path):
    """Compile for a CPU with AMX; expect kernels that configure and release tiles."""
    names = ["linear_tiles_quantized", *["attend_tiles-F16"] * everything()]
    assembly = run_as("sapphirerapids", tmp_path, "-c", ASSEMBLY, *names)
    for instruction in ("ldtilecfg", "tilerelease"):
        assert len(re.findall(rf"\t{instruction}\b", assembly)) == len(names)
    assert len(re.findall(r"\ttdpbf16ps\t%tmm[67], %tmm[45], %tmm[0-3]\n", assembly)) >= 2 * (1 + 3) + 4 * (1 + 3)
    loads = re.findall(r"\ttileloadd\t(\S+), %tmm\d\n", assembly)
    stores = re.findall(r"\ttilestored\t%tmm(\d), (\S+)\n", assembly)
    assert loads and stores and {number for number, _ in stores} <= set("0123")
    assert not any("rsp" in place for place in (*loads, *(place for _, place in stores)))


def host_with_tiles() -> str:
    """Return this CPU's features in LLVM's form, with AMX."""
    others = [item for item in get_lane().feature_string.split(",") if not item.startswith(("+amx", "-amx"))]
    return ",".join([*others, "+amx-tile", "+amx-bf16", "+amx-int8"])


@pytest.fixture(scope="session")
def instructions(tmp_path_factory) -> Path:
    """Build a library that, loaded before others, emulates the instructions of AMX."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or sys.platform != "linux" or not {"avx512vnni", "avx512bw"} <= get_lane().features:
        pytest.skip("needs Linux, a C compiler, and a CPU with AVX-512")
    if "amx-tile" in get_lane().features:
        pytest.skip("this CPU has the instructions: the other tests here run them")
    library = tmp_path_factory.mktemp("amx") / "instructions.so"
    source = SUPPORT / "amx_instructions.c"
    subprocess.run([compiler, "-O2", "-march=native", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
    return library


@pytest.mark.sampled(every=24)  # up to 20 seconds each
@pytest.mark.parametrize(
    "case",
    [
        *(f"test_products_in_tiles_agree_with_numpy[{name}]" for name in (
            "quantized-Q4_0", "quantized-Q4_K", "quantized-Q6_K", "quantized-NVFP4", "float-F16")),
        "test_attention_in_tiles_agrees_with_numpy[33-300-F16]",
        "test_expert_products_equal_those_of_each_expert_alone[two of eight-quantized-Q4_0]",
        "test_models_in_tiles_agree_with_the_goldens[llama-Q4_0]",
        "test_architectures_in_tiles_agree_with_the_goldens[llama]",
    ],
)  # fmt: skip
def test_compiled_tiles_compute_what_emulated_ones_do(instructions, tmp_path, case):
    """Run tests of this module on the compiled instructions, emulated one by one."""
    chosen = {
        "LD_PRELOAD": str(instructions), "NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": host_with_tiles(),
        "LOCALLLM_CACHE": str(tmp_path / "cache"), "AMX_PRODUCTS": str(tmp_path / "products"),
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:faulthandler",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run(
        [*command, f"{Path(__file__)}::{case}"], cwd=ROOT, env=os.environ | chosen, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "1 passed" in done.stdout
    assert sum(map(int, (tmp_path / "products").read_text().split())) > 100
