"""Compare a GPU's steps for one, a few and many tokens with tests/goldens/steps_cuda.txt. No GPU is needed."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from project import GOLDENS

from localllm.arch.layer_state import KVType, LatentState, PagedState
from localllm.arch.rope import RopeParameters
from localllm.arch.verbs import AttentionScores, Routing
from localllm.engine.cuda.lowering import (
    BufferSlice,
    CudaTarget,
    FewTokenAttention,
    encode_argument,
    list_kernels,
    lower_to_gpu,
)
from localllm.engine.lower.activation import WANTED
from localllm.engine.lower.header import RunHeader
from localllm.engine.lower.steps import StepMemory
from localllm.engine.lower.tape import Buffer
from localllm.engine.memory.cache import KVCache
from localllm.engine.trace.recorder import Recorder
from localllm.errors import UnsupportedError
from localllm.kernels.cuda import MAX_EXPERTS
from localllm.kernels.table import PAGE
from tests.unit.engine.cpu.test_lowering import of_experts, product, weight
from tests.unit.engine.lower.test_lowering import INDEX, LATENT, PAGED, WIDE, WINDOW, Told, attending, chosen, read
from tests.unit.engine.trace.test_recorder import w

SIZES = {"one": (1, 1), "eight": (8, 2), "sixteen": (16, 9), "many": (32, 9)}
LONG, SPARSE = PagedState(0, 2, 288, 32), LatentState(0, 16, 16, period=2)


def network(b: Any, rows: Any) -> None:
    """Record a layer as models have it: norms that are quantized, queries that are normalized and rotated."""
    x = b.rms_norm(rows(256), w(256), 0.5)
    q = b.rope(b.rms_norm(b.linear(x, weight("Q8_0", 64, 256)), w(16), 0.25, 16), HEADS_TURN, b.positions)
    k, v = (b.linear(x, weight("Q8_0", rows, 256)) for rows in (32, 64))
    y = b.add(b.attend(q, k, v, PAGED, AttentionScores(4, 0.5)), rows(128))
    z = b.rms_norm(y, w(128), 0.5)
    gate, up = (b.linear(z, weight("Q8_0", 256, 128)) for _ in "ab")
    b.add(y, b.linear(b.swiglu(gate, up), weight("Q8_0", 128, 256)))


def sizes_of(case: str) -> list[str]:
    """Return the sizes around which the steps of a case change."""
    return ["eight", "sixteen", "many"] if case.startswith("attend") else ["one", "eight", "sixteen"]


class GpuContext(Told):
    """Print offsets within buffers, too."""

    def value(self, value: Any) -> str:
        return (
            f"{super().value(value.buffer)}+{value.offset}" if isinstance(value, BufferSlice) else super().value(value)
        )


HEADS_TURN = RopeParameters(16, 16, False)

CASES: dict[str, Any] = {
    **{f"linear {format}": (product(format, bias=format == "Q4_K"),) for format in ("Q4_K", "F32", "F16", "BF16")},
    "linear of wanted rows": (lambda b, rows: b.linear(b.select(rows(256), WANTED), weight("Q6_K", 20, 256)),),
    "linear in pieces": (lambda b, rows: b.linear(rows(8192), weight("Q4_K", 9000, 8192)),),
    "two that meet the same": (lambda b, rows: (lambda x: (
        b.linear(x, weight("Q4_0", 2, 256)), b.linear(x, weight("Q8_0", 2, 256))))(rows(256)),),
    "a network with a gate": (lambda b, rows: b.swiglu(
        b.linear(rows(256), weight("Q4_0", 64, 256)), b.linear(rows(256), weight("Q4_0", 64, 256))),),
    "what is added behind a product": (lambda b, rows: b.rms_norm(
        b.add(rows(64), b.linear(rows(256), weight("Q8_0", 64, 256))), w(64), 0.5),),
    "a network between norms": (network, [PAGED]),
    "a norm of fewer numbers": (lambda b, rows: b.linear(
        b.rms_norm(rows(256), w(64), 0.5, 64), weight("Q8_0", 2, 256)),),
    "experts of blocks": (of_experts("Q4_K", bias=True),),
    "experts of floats": (of_experts("F16"),),
    "attend": (attending(), [PAGED], "f16"),
    "attend in float32": (attending(), [PAGED]),
    "attend in a window": (attending(WINDOW, lookahead=2), [WINDOW], "f16"),
    "attend to rows": (attending(LATENT), [LATENT], "f16"),
    "attend turned": (attending(WIDE), [WIDE], "q4_0"),
    "attend with long heads": (attending(LONG, 24), [LONG], "f16"),
    "attend with logarithms": (attending(logs=True), [PAGED], "f16"),
    "attend to every second": (attending(SPARSE), [SPARSE], "f16"),
    "select_keys": (lambda b, rows: b.select_keys(rows(48), rows(16), rows(3), INDEX, 5), [INDEX], "f16"),
    "choose blocks": (chosen, [PAGED, INDEX], "f16"),
}  # fmt: skip
FILE = GOLDENS / "steps_cuda.txt"


def steps_of(size: tuple[int, int], say: Any, states: Any = (), kv_type: str = "f32", capability: Any = (8, 0)) -> Any:
    builder = Recorder(SimpleNamespace(vocab_size=9, width=8), 64)
    say(builder, lambda columns: builder.external_input(np.zeros((9, columns), np.float32), columns))
    places = StepMemory(KVCache(list(states), PAGE, KVType.parse(kv_type), (1,)), None, RunHeader(size[0]))
    weights: Any = SimpleNamespace(get_address=lambda weight: f"matrix {weight.name}", capability=capability)
    steps, context = lower_to_gpu(builder.operations, places, weights, size, {}), GpuContext(places)
    assert list_kernels(steps) == {step.kernel for step in steps} - {"product"}
    lines = [context.step(step) for step in steps]
    return [line for line in lines if "x=float32[9x" not in line and not line.startswith("logits ")]


NAMED = {f"{case}, {size}": (SIZES[size], *given) for case, given in CASES.items() for size in sizes_of(case)}


def said() -> dict[str, list[str]]:
    return {name: steps_of(*given) for name, given in NAMED.items()}


@pytest.fixture(scope="module")
def known() -> dict[str, list[str]]:
    return read(FILE)


def test_every_cuda_case_is_recorded(known: dict[str, list[str]]):
    assert [*known] == [*NAMED]


@pytest.mark.parametrize("name", NAMED)
def test_operations_are_lowered_to_the_recorded_cuda_steps(known: dict[str, list[str]], name: str):
    assert steps_of(*NAMED[name]) == known[name]


@pytest.mark.parametrize(("group", "dims", "bundle", "bundles"), [
    (1, (64, 64), 1, 1), (8, (64, 64), 8, 1), (9, (64, 64), 5, 2), (16, (256, 256), 8, 2), (16, (257, 256), 4, 4),
    (3, (576, 512), 3, 1), (4, (576, 512), 2, 2), (7, (1024, 1024), 2, 4), (3, (4096, 4096), 1, 3),
])  # fmt: skip
def test_heads_of_a_group_are_bundled_equally_within_the_registers(
    group: int, dims: tuple[int, int], bundle: int, bundles: int
):
    few = FewTokenAttention(*dims, group)
    assert (few.bundle, few.bundles) == (bundle, bundles)
    assert few.parts(8, 2) == few.parts(1, 2) == -(-264 // (2 * bundles)) and few.parts(9, 2) == -(
        -264 // (18 * bundles)
    )


def test_partial_results_are_padded_to_whole_vectors():
    assert [FewTokenAttention(8, dim, 1).partial_bytes for dim in (64, 65, 72)] == [4 * 68, 4 * 76, 4 * 76]


def test_unsupported_operations_are_refused_on_a_gpu():
    def crossing(b: Any, rows: Any) -> None:
        b.write_kv(rows(32), rows(64), PAGED)
        b.attend(rows(64), None, None, PAGED, AttentionScores(4, 0.5, cross_attention=True))

    for say, message in (
        (crossing, "encoder models run on the CPU only: use --device cpu"),
        (attending(biases=np.ones((4, 3))), "encoder models run on the CPU only"),
        (lambda b, rows: b.route(rows(MAX_EXPERTS + 1), Routing(MAX_EXPERTS + 1, 2), None, None),
         f"a GPU supports at most {MAX_EXPERTS} experts (found {MAX_EXPERTS + 1}): use --device cpu"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            steps_of((1, 1), say, [PAGED], "f16")


@pytest.mark.parametrize(("capability", "depth"), [((7, 5), 8), ((8, 0), 16), ((8, 9), 16), ((9, 0), 16)])
def test_tensor_cores_are_chosen_by_capability(capability: tuple[int, int], depth: int):
    weights: Any = SimpleNamespace(capability=capability)
    target = CudaTarget(7, 3, weights, {})
    assert (target.depth, target.buffer_rows, target.divide_rows(5, np.ones(1)), target.parts(2, 5)) == (
        depth,
        7,
        (5, None),
        5,
    )
    assert target.build_scratch_arguments(99) == {"scratch": 0, "scratch_bytes": 0}


def test_arguments_are_encoded_in_64_bits():
    buffer, empty, array = Buffer(3, 64), Buffer(0, 64), np.zeros(2)
    buffer.address = empty.address = 640
    place = {id(array): 77}
    encoded = [encode_argument(value, lambda array: place[id(array)], 1000) for value in
             (buffer, empty, BufferSlice(buffer, 8), array, "kind", 5, True, 1.0, -2.0)]  # fmt: skip
    assert encoded == [1640, 0, 1648, 77, 0, 5, 1, 0x3F800000, -0x40000000]
