"""Compare the CPU's steps, in rows and in tiles, with tests/goldens/steps_cpu.txt (as lower/test_lowering.py does).


Sizes that depend on the lane are fixed, and so is which float weights are multiplied in 16 bits.
"""

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from project import GOLDENS

from localllm.arch.layer_state import KVType
from localllm.arch.verbs import AttentionScores, Routing
from localllm.arch.weights import Weight
from localllm.engine.cpu import lowering
from localllm.engine.cpu.lowering import (
    VERBS,
    CpuTarget,
    count_attention_scratch,
    count_float_scratch,
    count_max_units,
    count_parts,
    count_selection_scratch,
    create_target,
    optimize_graph,
    select_few_count,
)
from localllm.engine.lower.activation import ALL, WANTED
from localllm.engine.lower.header import RunHeader
from localllm.engine.lower.steps import StepMemory
from localllm.engine.lower.tape import SCRATCH_BYTES, ScratchAddress
from localllm.engine.memory.cache import KVCache
from localllm.engine.operations.operation import lower_operations
from localllm.engine.runs import BATCH
from localllm.engine.trace.recorder import Recorder
from localllm.errors import UnsupportedError
from localllm.files.gguf.file import Tensor
from localllm.kernels.cpu import ATTEND_KEYS, ATTEND_ROWS, MAX_SPLITS, SPLIT_TOKENS, TOKENS_AT_ONCE, WordConversion
from localllm.kernels.machine import Lane, has_tiles
from localllm.kernels.table import PAGE
from localllm.quant.formats import BY_NAME
from tests.unit.engine.lower.test_lowering import INDEX, LATENT, PAGED, WIDE, WINDOW, Told, attending, chosen, read
from tests.unit.engine.trace.test_recorder import w

WORDS = {"BF16": WordConversion("round_bf16", 2, 2, 0), "F16": WordConversion("quantize_words", 16, 32, 4)}


class Target(CpuTarget):
    """A target whose sizes are the same on all CPUs."""

    buffer_rows: Any = 8
    wanted_rows: Any = 8
    expert_rows: ClassVar[int] = 2

    def matrix(self, weight: Weight) -> Any:
        assert super().matrix(weight) is weight.tensor.data
        return f"matrix {weight.name}"

    def build_scratch_arguments(self, size: int) -> dict[str, Any]:
        arguments = super().build_scratch_arguments(size)
        assert arguments == {"scratch": ScratchAddress(size), "scratch_bytes": SCRATCH_BYTES}
        return {"scratch": size}


def target_of(in_tiles: bool, keeps: bool = True) -> Target:
    variants: Any = SimpleNamespace(register=lambda *given: {"variants": given})
    verbs = VERBS | {words.kernel: lowering.lower_halves for words in WORDS.values()}  # which this CPU may lack
    return Target(3, in_tiles, verbs, variants, 7, keeps)


def weight(format: str, *shape: int, bias: bool = False) -> Weight:
    """Return a weight of zeros."""
    columns = BY_NAME[format].row_bytes(shape[-1])
    tensor = Tensor("w", BY_NAME[format], shape, np.zeros((*shape[:-1], columns), np.uint8))
    return Weight(tensor, w(shape[-2], name="b") if bias else None)


def product(format: str, rows: int = 20, columns: int = 256, bias: bool = False) -> Any:
    return lambda b, rows_of: b.linear(rows_of(columns), weight(format, rows, columns, bias=bias))


def stored(format: str) -> Any:
    """Return an architecture that attends with keys and values in the cache."""

    def say(b: Any, rows: Any) -> None:
        x = rows(256)
        k, v = (b.linear(x, weight(format, 32 + 32 * which, 256)) for which in (0, 1))
        b.attend(b.linear(x, weight(format, 64, 256)), k, v, PAGED, AttentionScores(4, 0.5))

    return say


def of_experts(format: str, rows_of_one: int = 20, bias: bool = False, used: int = 2) -> Any:
    def say(b: Any, rows: Any) -> None:
        choice = b.route(rows(18), Routing(18, used), w(18), None)
        experts = weight(format, 18, rows_of_one, 256)
        experts = Weight(experts.tensor, w(18, rows_of_one, name="b")) if bias else experts
        b.scatter(b.expert_linear(b.gather(rows(256), choice), experts, choice), choice)

    return say


def adapted(b: Any, rows: Any) -> None:
    """Multiply an activation by two matrices with adapters; the first one's adapters are two."""
    x, y = rows(256), []
    for matrix, adapters in (("Q4_K", 2), ("F16", 1)):
        narrow = [b.linear(x, weight("F32", 4, 256)) for _ in range(adapters)]
        y.append(b.linear(x, weight(matrix, 20, 256, bias=True)))
        for number, h in enumerate(narrow):
            y[-1] = b.add_low_rank(y[-1], h, weight("F32", 4, 32), number, 0.5)


CASES: dict[str, Any] = {
    "linears with adapters": (adapted,),
    **{f"linear {format}": (product(format),) for format in ("Q4_K", "Q6_K", "F32", "F16", "BF16")},
    "linear of more rows, with a bias": (product("Q4_0", 1200, 512, True),),
    "linear of rows of 24": (product("F16", columns=24),),
    "two that meet the same": (lambda b, rows: (lambda x: (
        b.linear(x, weight("Q4_0", 2, 256)), b.linear(x, weight("F16", 2, 256))))(rows(256)),),
    "keys and values": (stored("Q8_0"), [PAGED]),
    "keys and values of floats": (stored("F16"), [PAGED]),
    "linear of so many rows that parts are more": (product("Q4_K", 30000),),
    "linear of wanted rows": (lambda b, rows: b.linear(b.select(rows(256), WANTED), weight("Q4_K", 20, 256)),),
    "linear of very wide rows": (product("F16", 2, 16384),),
    "experts of blocks": (of_experts("Q4_K"),),
    "experts with biases": (of_experts("Q4_K", bias=True),),
    "experts in slices": (of_experts("Q4_K", 1400),),
    "experts in as many slices as there are": (of_experts("Q4_K", 12000),),
    "experts of floats": (of_experts("F16"),),
    "attend": (attending(), [PAGED]),
    "attend in a window": (attending(WINDOW, lookahead=2), [WINDOW]),
    "attend where windows are": (attending(windowed=True), [PAGED]),
    "attend to rows": (attending(LATENT), [LATENT]),
    "attend turned": (attending(WIDE), [WIDE], "q4_0"),
    "attend twice alike": (lambda b, rows: [attending()(b, rows) for _ in "ab"], [PAGED]),
    "select_keys": (lambda b, rows: b.select_keys(rows(48), rows(16), rows(3), INDEX, 5), [INDEX]),
    "choose blocks": (chosen, [PAGED, INDEX]),
}  # fmt: skip
FILE = GOLDENS / "steps_cpu.txt"


def steps_of(in_tiles: bool, say: Any, states: Any = (), kv_type: str = "f32", keeps: bool = True) -> list[str]:
    builder = Recorder(SimpleNamespace(vocab_size=9, width=8), 64)
    say(builder, lambda columns: builder.external_input(np.zeros((9, columns), np.float32), columns))
    target = target_of(in_tiles, keeps)
    places = StepMemory(KVCache(list(states), PAGE, KVType.parse(kv_type), (1,)), None, RunHeader(7))
    steps, names = lower_operations(optimize_graph(builder.operations, target), target, places), Told(places)
    lines = [names.step(step) for step in steps.all]
    return [line for line in lines if "x=float32[9x" not in line and not line.startswith("logits ")]


def make_the_same_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Fix the 16-bit formats and the lane, and clear memory that np.empty returns."""
    patch.setattr(lowering, "HALVES", WORDS)
    patch.setattr(lowering, "get_lane", lambda: Lane("haswell", "+avx2,+fma,+f16c"))
    patch.setattr(lowering, "np", SimpleNamespace(**vars(np) | {"empty": np.zeros}))


def said() -> dict[str, list[str]]:
    make_the_same_everywhere(pytest.MonkeyPatch())
    kinds = {"rows": False, "tiles": True}
    return {f"{name} in {kind}": steps_of(kinds[kind], *given) for name, given in CASES.items() for kind in kinds}


@pytest.fixture(scope="module")
def known() -> dict[str, list[str]]:
    return read(FILE)


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    make_the_same_everywhere(monkeypatch)


def test_every_case_is_recorded(known: dict[str, list[str]]):
    assert [*known] == [f"{case} in {kind}" for case in CASES for kind in ("rows", "tiles")]


@pytest.mark.parametrize("kind", ["rows", "tiles"])
@pytest.mark.parametrize("case", CASES)
def test_operations_are_lowered_to_the_recorded_steps(known: dict[str, list[str]], case: str, kind: str):
    assert steps_of(kind == "tiles", *CASES[case]) == known[f"{case} in {kind}"]


def test_keys_that_no_later_run_reads_are_computed_in_16_bits():
    """Check that integer types, which round the keys, do not change."""
    kept, lost = (steps_of(False, stored("F16"), [PAGED], keeps=keeps) for keeps in (True, False))
    assert [" most_precise=7" in line for line in kept if line.startswith("linear")] == [True, True, False]
    assert [" most_precise=7" in line for line in lost if line.startswith("linear")] == [False] * 3
    assert steps_of(False, stored("Q8_0"), [PAGED]) == steps_of(False, stored("Q8_0"), [PAGED], keeps=False)


def test_targets_for_this_cpu_have_its_tiles_and_batch_size():
    usual, other = create_target(3), create_target(2, 9, False)
    assert (usual.threads, usual.uses_tiles, usual.verbs, usual.tokens, usual.keeps_cache) == (
        3,
        has_tiles(),
        VERBS,
        BATCH,
        True,
    )
    assert (other.threads, other.uses_tiles, other.tokens, other.keeps_cache) == (2, has_tiles(), 9, False)
    assert CpuTarget(1, False, VERBS).keeps_cache and CpuTarget(1, False, VERBS).tokens == BATCH
    rounded = [next(n for n in range(9, 99) if n % at_once == 0) for at_once in TOKENS_AT_ONCE]
    assert other.buffer_rows == other.wanted_rows == max(rounded)
    assert other.get_layout(weight("Q4_K", 2, 3, 512)) == ("Q4_K", 288)


def test_matrices_are_divided_by_their_bytes_into_at_most_eight_parts_a_thread():
    counts = [count_parts(nbytes, 3) for nbytes in (0, 65535, 65536, 98303, 98304, 393216, 393217, 3 << 20, 1 << 40)]
    assert counts == [1, 1, 2, 2, 3, 3, 6, 24, 24]


def test_scratch_sizes_follow_from_rows_heads_and_threads():
    assert count_selection_scratch(3, 17, 64) == 4 * 4 * 32 + 2048 + 256
    heads = ATTEND_ROWS * (16 + 48 + ATTEND_KEYS + 32)
    assert count_attention_scratch(16, 48) == count_attention_scratch(48, 16) == 4 * (heads + 2 * ATTEND_KEYS * 48)
    assert count_max_units(100, 8, 2) == 2 * (100 * 4 // ATTEND_ROWS + 100 + SPLIT_TOKENS * MAX_SPLITS)
    assert count_max_units(100, 64, 1) == 100 * 64 // ATTEND_ROWS + 100 + 11 * SPLIT_TOKENS * MAX_SPLITS
    assert (count_float_scratch(13312), count_float_scratch(13313)) == (53248, 53252)


def test_few_counts_are_read_from_the_header_for_all_or_wanted_rows():
    header = RunHeader(7)
    header.few_counts[:] = 5, 3
    steps: Any = SimpleNamespace(header=header)
    assert [select_few_count(steps, rows).tolist() for rows in (ALL, WANTED)] == [[5], [3]]


def test_formats_without_a_kernel_are_refused():
    with pytest.raises(UnsupportedError, match="tensor w: format I8 is not supported"):
        target_of(False).matrix(weight("I8", 2, 4))
