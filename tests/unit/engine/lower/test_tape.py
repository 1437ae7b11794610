"""Test the plan of a tape: the steps that may run together, and the buffers that may share memory."""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.arch.weights import Weight
from localllm.engine.cpu.lowering import count_float_scratch
from localllm.engine.cuda.devices import find_layer
from localllm.engine.lower import tape as tape_module
from localllm.engine.lower.activation import Activation, RowSet
from localllm.engine.lower.tape import (
    SCRATCH_BYTES,
    Buffer,
    KernelAddress,
    KernelStep,
    ScratchAddress,
    Tape,
    assign_stages,
    compute_row_bytes,
    pad_columns,
    plan_offsets,
)
from localllm.engine.operations.operation import MatrixOperation, Operation, StateOperation
from localllm.files.gguf.file import Tensor
from localllm.kernels.cpu import FLOAT_SCRATCH
from localllm.kernels.table import KERNELS
from localllm.quant.formats import BY_NAME

ADD = KERNELS["add"].arguments
LINE = 64


def step(reads: list[Buffer], writes: list[Buffer]) -> KernelStep:
    return KernelStep("add", {}, 1, None, reads, writes)


def stages(*steps: KernelStep) -> list[int]:
    assign_stages(list(steps))
    return [some.stage for some in steps]


def conflict(first: KernelStep, second: KernelStep) -> bool:
    """Return whether the order of two steps matters."""
    of_first, of_second = set(first.writes), set(second.writes)
    return bool(of_first & ({*second.reads} | of_second) or of_second & {*first.reads})


def drawn(seed: int, rows: int = 1) -> list[KernelStep]:
    """Return random steps that read and write some of ten buffers, now and then the same."""
    draw = random.Random(seed)
    buffers = [Buffer(rows, draw.randint(1, 300)) for _ in range(10)]
    return [step(draw.sample(buffers, draw.randint(0, 3)), draw.sample(buffers, draw.randint(1, 2))) for _ in range(40)]


# ---- stages ---------------------------------------------------------------------------------------------------------


def test_steps_that_read_the_same_buffer_share_a_stage():
    x, y, z = (Buffer(1, 4) for _ in range(3))
    assert stages(step([x], [y]), step([x], [z])) == [0, 0]


def test_reading_waits_for_a_stage_after_writing():
    x, y, z = (Buffer(1, 4) for _ in range(3))
    assert stages(step([x], [y]), step([y], [z]), step([z], [x])) == [0, 1, 2]


def test_writing_waits_for_a_stage_after_reading():
    """Order add(x, y) → y, in place, behind a matrix product that reads y."""
    x, y, z = (Buffer(1, 4) for _ in range(3))
    assert stages(step([y], [z]), step([x, y], [y])) == [0, 1]


def test_writing_again_waits_for_a_stage_after_writing():
    x, y, z = (Buffer(1, 4) for _ in range(3))
    assert stages(step([x], [z]), step([y], [z])) == [0, 1]


def test_a_step_in_place_does_not_conflict_with_itself():
    x, y = Buffer(1, 4), Buffer(1, 4)
    assert stages(step([x], [x]), step([y], [y])) == [0, 0]


def test_a_new_stage_forgets_the_buffers_of_the_one_before():
    a, b, c, d = (Buffer(1, 4) for _ in range(4))
    assert stages(step([a], [b]), step([b], [c]), step([a], [d])) == [0, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_steps_whose_order_matters_never_share_a_stage(seed: int):
    steps = drawn(seed)
    assign_stages(steps)
    for number, later in enumerate(steps):
        for earlier in steps[:number]:
            assert earlier.stage <= later.stage
            assert earlier.stage < later.stage or not conflict(earlier, later)


@pytest.mark.parametrize("seed", range(20))
def test_a_barrier_stands_only_where_steps_conflict(seed: int):
    steps = drawn(seed)
    assign_stages(steps)
    for number, some in enumerate(steps[1:], 1):
        before = [earlier for earlier in steps[:number] if earlier.stage == steps[number - 1].stage]
        assert some.stage - steps[number - 1].stage == any(conflict(earlier, some) for earlier in before)


@pytest.mark.parametrize("seed", range(5))
def test_threads_wait_before_the_first_step_of_each_stage(seed: int):
    """Check the tape's last column; also the first step waits, for threads of the run before."""
    steps = drawn(seed)
    rows = Tape([replace(some, arguments=arguments_of_add(some)) for some in steps]).finish({"add": 7})
    assign_stages(steps)
    before = [-1, *(some.stage for some in steps)]
    assert rows[:, 4].tolist() == [some.stage > last for some, last in zip(steps, before, strict=False)]
    assert (rows[:, 0] == 7).all() and (np.diff(rows[:, 1]) == 8 * len(ADD._fields)).all()


def arguments_of_add(some: KernelStep) -> dict[str, int | Buffer]:
    return dict.fromkeys(ADD._fields, 0) | {"x": some.writes[0]}


def test_a_buffer_lives_from_its_first_stage_to_its_last():
    x, y, z = (Buffer(1, 4) for _ in range(3))
    stages(step([], [x]), step([x], [y]), step([x, y], [z]))
    assert [(b.first, b.last) for b in (x, y, z)] == [(0, 2), (1, 2), (2, 2)]


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_buffers_that_live_together_lie_apart(seed: int):
    steps = drawn(seed, rows=3)
    assign_stages(steps)
    size = plan_offsets(steps)
    buffers = list({buffer: None for some in steps for buffer in some.reads + some.writes})
    for buffer in buffers:
        assert buffer.address % LINE == 0
        assert 0 <= buffer.address <= size - buffer.rows * buffer.stride
    for number, one in enumerate(buffers):
        for other in buffers[:number]:
            together = one.first <= other.last and other.first <= one.last
            apart = one.address + one.size <= other.address or other.address + other.size <= one.address
            assert apart or not together


def test_buffers_that_never_live_together_share_memory():
    """Expect memory for two buffers in a chain of a hundred."""
    buffers = [Buffer(1, LINE) for _ in range(101)]
    steps = [step([one], [other]) for one, other in pairwise(buffers)]
    assign_stages(steps)
    assert plan_offsets(steps) == 2 * LINE


def test_a_buffer_takes_the_gap_that_another_has_left():
    """Fill a gap of exactly its size; put a larger buffer after the others."""
    first, middle, last, fits, larger = (Buffer(1, size) for size in (2 * LINE, LINE, LINE, 2 * LINE, 2 * LINE + 1))
    steps = [step([], [first, middle, last]), step([first], [middle]), step([middle, last], [fits])]
    for some in (steps, [*steps[:2], step([middle, last], [larger])]):
        for buffer in (first, middle, last, fits, larger):
            buffer.first = -1
        assign_stages(some)
        size = plan_offsets(some)
        if some is steps:
            assert (fits.address, size) == (first.address, 4 * LINE)
    assert (larger.address, size) == (4 * LINE, 7 * LINE)


def test_buffers_of_external_memory_order_steps_and_take_none():
    """Cover, for example, a layer's keys in the cache."""
    in_cache, x, y = Buffer(0, 0), Buffer(1, LINE), Buffer(1, LINE)
    steps = [step([x], [in_cache]), step([in_cache], [y])]
    assign_stages(steps)
    assert [some.stage for some in steps] == [0, 1]
    assert (plan_offsets(steps), in_cache.address) == (LINE, 0), "x and y never live together"


def test_operations_belong_to_the_layer_of_their_state_or_weights():
    rows, floats = RowSet("all"), Tensor("x", BY_NAME["F32"], (2, 2), np.zeros((2, 8), np.uint8))

    def of(kind, *given) -> int | None:
        return find_layer(kind((), Activation(rows, 2), *given))

    weights = {name: Weight(replace(floats, name=name)) for name in ("blk.13.ffn_up.weight", "output.weight")}
    assert of(MatrixOperation, weights["blk.13.ffn_up.weight"]) == 13
    assert of(MatrixOperation, weights["output.weight"]) is None and of(Operation) is None
    assert of(StateOperation, SimpleNamespace(layer=3)) == 3


def test_scratch_memory_fits_a_row_in_float32():
    assert [count_float_scratch(columns) >= 4 * columns for columns in (0, 64, 20_000, 1 << 20)] == [True] * 4
    assert count_float_scratch(0) == count_float_scratch(64) == FLOAT_SCRATCH


# ---- the array that threads walk ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "whole"), [(1, 4096), (4096, 4096), (4097, 8192), (5000, 8192)])
@pytest.mark.parametrize("threads", [None, 1, 3])
def test_a_finished_tape_stores_addresses_values_and_float_bits(
    monkeypatch, size: int, whole: int, threads: int | None
):
    """Check also that referenced arrays live as long as the tape."""
    monkeypatch.setattr(tape_module, "order_arguments", lambda kernel, arguments: arguments.values())
    x, y, numbers, count = Buffer(3, 64), Buffer(2, 128), np.arange(5, dtype=np.int32), np.array([4])
    tape = Tape([
        KernelStep("first", {"x": x, "scratch": ScratchAddress(size), "bytes": SCRATCH_BYTES, "n": 7}, 3, count,
                   [], [x]),
        KernelStep("second", {"y": y, "half": 0.5, "by": KernelAddress("fourth"), "is": True, "n": numbers}, 1, None,
                   [], [y]),
    ])  # fmt: skip
    other = Buffer(0, 0)  # memory of somebody else
    tape.append(KernelStep("third", {"x": x, "n": numbers, "scratch": ScratchAddress(0)}, 2, count, [x, y, other], []))
    assert tape.kernels == {"first", "second", "third", "fourth"}
    addresses = {"first": 11, "second": 12, "third": 13, "fourth": 14}
    rows = tape.finish(addresses, threads) if threads else tape.finish(addresses)
    scratch, buffers, *arrays = tape.memory
    assert len(scratch.bytes) == whole * (threads or 1) and len(buffers.bytes) == x.size + y.size
    there = (x.address - buffers.address, y.address - buffers.address)
    assert other.address == 0 and there in ((0, x.size), (y.size, 0))
    assert [id(numbers), id(count)] == [id(arrays[0]), id(arrays[2])] and len(arrays) == 3
    stored, here = arrays[1], numbers.ctypes.data
    assert stored.tolist() == [
        x.address, scratch.address, whole, 7, y.address, 0x3F000000, 14, 1, here, x.address, here, scratch.address,
    ]  # fmt: skip
    start, limit = stored.ctypes.data, count.ctypes.data
    assert rows.tolist() == [[11, start, 3, limit, 1], [12, start + 32, 1, 0, 0], [13, start + 72, 2, limit, 1]]
    assert rows.dtype == stored.dtype == np.int64 and [step.stage for step in tape.steps] == [0, 0, 1]


def test_an_empty_tape_can_be_finished():
    tape = Tape()
    assert (tape.steps, tape.kernels, tape.finish({}).shape) == ([], set(), (0, 5))
    assert [len(memory.bytes) for memory in tape.memory[:2]] == [1, 1]


@pytest.mark.parametrize(
    ("columns", "size"), [(1, 64), (16, 64), (17, 192), (48, 192), (49, 320), (64, 320), (80, 320)]
)
def test_rows_lie_an_odd_number_of_lines_apart(columns: int, size: int):
    assert compute_row_bytes(columns) == size


@pytest.mark.parametrize(("columns", "whole"), [(1, 16), (15, 16), (16, 16), (17, 32)])
def test_arrays_are_padded_to_whole_vectors_and_made_contiguous(columns: int, whole: int):
    numbers = np.arange(1, 3 * columns + 1, dtype=np.float32).reshape(columns, 3).T
    padded = pad_columns(numbers)
    assert padded.flags.c_contiguous and padded.shape == (3, whole) and padded.dtype == np.float32
    assert padded[:, :columns].tolist() == numbers.tolist() and not padded[:, columns:].any()
    assert pad_columns(numbers[0]).shape == (whole,) and pad_columns(padded[None]).shape == (1, 3, whole)


def test_buffer_sizes_are_rounded_to_whole_cache_lines():
    assert [Buffer(rows, stride).size for rows, stride in ((0, 9), (1, 1), (1, 64), (5, 13), (2, 64))] == [
        0, 64, 64, 128, 128,
    ]  # fmt: skip
    fresh = Buffer(1, 2)
    assert (fresh.address, fresh.first, fresh.last) == (0, -1, -1)
