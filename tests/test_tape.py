"""The plan of a tape: what may run side by side, and whose memory may be the same."""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.arch.weights import Weight
from localllm.engine.cpu.products import float_scratch
from localllm.engine.lower.tape import Buffer, Step, Tape, assign_stages, offsets
from localllm.engine.record.operations import Activation, Operation, Rows
from localllm.engine.record.split import layer_of
from localllm.files.gguf_file import Tensor
from localllm.kernels.arguments import ADD
from localllm.kernels.cpu import FLOAT_SCRATCH
from localllm.quant.formats import BY_NAME

LINE = 64


def step(reads: list[Buffer], writes: list[Buffer]) -> Step:
    return Step("add", {}, 1, None, reads, writes)


def stages(*steps: Step) -> list[int]:
    assign_stages(list(steps))
    return [some.stage for some in steps]


def conflict(first: Step, second: Step) -> bool:
    """Whether the order of two steps shows."""
    of_first, of_second = set(first.writes), set(second.writes)
    return bool(of_first & ({*second.reads} | of_second) or of_second & {*first.reads})


def drawn(seed: int, rows: int = 1) -> list[Step]:
    """Steps that read and write some of ten buffers, now and then the same."""
    draw = random.Random(seed)
    buffers = [Buffer(rows, draw.randint(1, 300)) for _ in range(10)]
    return [step(draw.sample(buffers, draw.randint(0, 3)), draw.sample(buffers, draw.randint(1, 2))) for _ in range(40)]


# ---- stages ---------------------------------------------------------------------------------------------------------


def test_steps_that_only_read_the_same_run_side_by_side():
    x, y, z = (Buffer(1, 4) for _ in range(3))
    assert stages(step([x], [y]), step([x], [z])) == [0, 0]


def test_what_was_written_is_read_a_stage_later():
    x, y, z = (Buffer(1, 4) for _ in range(3))
    assert stages(step([x], [y]), step([y], [z]), step([z], [x])) == [0, 1, 2]


def test_what_another_step_still_reads_is_written_a_stage_later():
    """A step in place, for one: add(x, y) → y while a matrix product reads y."""
    x, y, z = (Buffer(1, 4) for _ in range(3))
    assert stages(step([y], [z]), step([x, y], [y])) == [0, 1]


def test_what_was_written_is_written_again_a_stage_later():
    x, y, z = (Buffer(1, 4) for _ in range(3))
    assert stages(step([x], [z]), step([y], [z])) == [0, 1]


def test_a_step_in_place_is_no_conflict_with_itself():
    x, y = Buffer(1, 4), Buffer(1, 4)
    assert stages(step([x], [x]), step([y], [y])) == [0, 0]


def test_a_new_stage_forgets_what_the_one_before_touched():
    a, b, c, d = (Buffer(1, 4) for _ in range(4))
    assert stages(step([a], [b]), step([b], [c]), step([a], [d])) == [0, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_steps_whose_order_shows_never_share_a_stage(seed: int):
    steps = drawn(seed)
    assign_stages(steps)
    for number, later in enumerate(steps):
        for earlier in steps[:number]:
            assert earlier.stage <= later.stage
            assert earlier.stage < later.stage or not conflict(earlier, later)


@pytest.mark.parametrize("seed", range(20))
def test_there_is_a_barrier_only_where_one_is_needed(seed: int):
    steps = drawn(seed)
    assign_stages(steps)
    for number, some in enumerate(steps[1:], 1):
        before = [earlier for earlier in steps[:number] if earlier.stage == steps[number - 1].stage]
        assert some.stage - steps[number - 1].stage == any(conflict(earlier, some) for earlier in before)


@pytest.mark.parametrize("seed", range(5))
def test_threads_wait_before_the_first_step_of_each_stage(seed: int):
    """And nowhere else: the tape's last column; the first one needs to be waited for as well, by who comes late."""
    steps = drawn(seed)
    rows = Tape([replace(some, arguments=arguments_of_add(some)) for some in steps]).finish({"add": 7})
    assign_stages(steps)
    before = [-1, *(some.stage for some in steps)]
    assert rows[:, 4].tolist() == [some.stage > last for some, last in zip(steps, before, strict=False)]
    assert (rows[:, 0] == 7).all() and (np.diff(rows[:, 1]) == 8 * len(ADD._fields)).all()


def arguments_of_add(some: Step) -> dict[str, int | Buffer]:
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
    size = offsets(steps)
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
    """A chain of a hundred needs room for two."""
    buffers = [Buffer(1, LINE) for _ in range(101)]
    steps = [step([one], [other]) for one, other in pairwise(buffers)]
    assign_stages(steps)
    assert offsets(steps) == 2 * LINE


def test_a_buffer_fits_the_gap_that_another_has_left():
    """The gap has its size to the byte; one that is larger goes behind."""
    first, middle, last, fits, larger = (Buffer(1, size) for size in (2 * LINE, LINE, LINE, 2 * LINE, 2 * LINE + 1))
    steps = [step([], [first, middle, last]), step([first], [middle]), step([middle, last], [fits])]
    for some in (steps, [*steps[:2], step([middle, last], [larger])]):
        for buffer in (first, middle, last, fits, larger):
            buffer.first = -1
        assign_stages(some)
        size = offsets(some)
        if some is steps:
            assert (fits.address, size) == (first.address, 4 * LINE)
    assert (larger.address, size) == (4 * LINE, 7 * LINE)


def test_what_stands_for_other_memory_orders_steps_and_takes_none():
    """A layer's keys in the cache."""
    in_cache, x, y = Buffer(0, 0), Buffer(1, LINE), Buffer(1, LINE)
    steps = [step([x], [in_cache]), step([in_cache], [y])]
    assign_stages(steps)
    assert [some.stage for some in steps] == [0, 1]
    assert (offsets(steps), in_cache.address) == (LINE, 0), "x and y never live together"


def test_the_layer_of_an_operation():
    """By its states, or else the name of its weights: between layers it has none."""
    rows, floats = Rows("all"), Tensor("x", BY_NAME["F32"], (2, 2), np.zeros((2, 8), np.uint8))

    def of(**given) -> int | None:
        return layer_of(Operation("linear", (), Activation(rows, 2), given))

    weights = {name: Weight(replace(floats, name=name)) for name in ("blk.13.ffn_up.weight", "output.weight")}
    assert of(weight=weights["blk.13.ffn_up.weight"]) == 13
    assert of(weight=weights["output.weight"]) is None and of(weight=np.ones(2)) is None and of() is None
    assert of(state=SimpleNamespace(layer=3), weight=weights["blk.13.ffn_up.weight"]) == 3


def test_room_for_a_row_in_float32():
    """Of a product's activations, however wide they are."""
    assert [float_scratch(columns) >= 4 * columns for columns in (0, 64, 20_000, 1 << 20)] == [True] * 4
    assert float_scratch(0) == float_scratch(64) == FLOAT_SCRATCH
