"""Test states of recurrent layers: after any truncation they belong to exactly the remaining tokens."""

import random
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest

from localllm.arch.layer_state import RecurrentLayerState
from localllm.engine.memory import recurrent
from localllm.engine.memory.recurrent import RecurrentState, StateLayout
from localllm.kernels.table import PAGE

LAYOUT_OF = [RecurrentLayerState(0, ((3, 2), (5,))), RecurrentLayerState(2, ((4,),))]


def state_bytes(tokens: list[int]) -> np.ndarray:
    """Return the state after these tokens: other bytes for each prompt, zeros at the beginning."""
    nbytes = len(StateLayout(LAYOUT_OF).zeros.view(np.uint8))
    number = crc32(bytes(tokens)) | 1 if tokens else 0
    return np.resize(np.array([number], np.uint32).view(np.uint8), nbytes)


class World:
    """Sequences that share memory, and the tokens that each has read."""

    def __init__(self, seed: int):
        self.layout, self.draw = StateLayout(LAYOUT_OF), random.Random(seed)
        self.all = [SimpleNamespace(state=RecurrentState(self.layout), tokens=[])]

    def append(self, some: SimpleNamespace, count: int) -> None:
        """Run: read the source, write the target, and touch no other memory."""
        new = [self.draw.randint(1, 255) for _ in range(count)]
        some.state.prepare(len(some.tokens), count)
        np.testing.assert_array_equal(self.layout.view_bytes(some.state.source), state_bytes(some.tokens))
        some.tokens = some.tokens + new
        some.state.target.view(np.uint8)[:] = state_bytes(some.tokens)

    def truncate(self, some: SimpleNamespace, length: int) -> None:
        """Truncate as the engine does: tokens behind the nearest snapshot are read again."""
        kept = some.state.truncate(length)
        assert kept <= length
        left, some.tokens = some.tokens[kept:length], some.tokens[:kept]
        self.check()
        if left:
            some.state.prepare(kept, len(left))
            some.tokens += left
            some.state.target.view(np.uint8)[:] = state_bytes(some.tokens)

    def fork(self, some: SimpleNamespace) -> None:
        self.all.append(SimpleNamespace(state=some.state.fork(), tokens=list(some.tokens)))

    def check(self) -> None:
        assert not self.layout.zeros.any(), "where all begin"
        for some in self.all:
            known = [length for length in range(len(some.tokens) + 1) if some.state.has_states(length)]
            assert known and known[-1] == len(some.tokens)
            for length in known:
                if length:
                    np.testing.assert_array_equal(some.state.find_states(length), state_bytes(some.tokens[:length]))
            assert all(some.state.find_states(length) is None for length in {*range(1, len(some.tokens))} - {*known})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_states_belong_to_their_tokens_after_random_operations(monkeypatch, seed: int):
    monkeypatch.setattr(recurrent, "MAX_SNAPSHOTS", 4)
    world = World(seed)
    for _ in range(60):
        some, act = world.draw.choice(world.all), world.draw.random()
        if act < 0.55:
            world.append(some, world.draw.choice([1, 1, 1, 2, 7, PAGE, 100]))
        elif act < 0.8:
            world.truncate(some, world.draw.randint(max(0, len(some.tokens) - 90), len(some.tokens)))
        elif act < 0.9 and len(world.all) < 4:
            world.fork(some)
        elif len(world.all) > 1:
            world.all.remove(some)
        world.check()


def test_snapshots_are_taken_at_ends_of_runs_and_pages():
    """Single tokens are forgotten with the next one."""
    world = World(0)
    [some] = world.all
    for count in (5, 1, 1, 2, 1):
        world.append(some, count)
    assert [length for length in range(12) if some.state.has_states(length)] == [5, 7, 9, 10]
    world.append(some, 1)
    assert not some.state.has_states(10)
    while len(some.tokens) < PAGE + 3:
        world.append(some, 1)
    assert some.state.has_states(PAGE) and not some.state.has_states(PAGE - 1)


def test_stored_states_can_be_continued_in_another_process():
    world, other = World(0), World(1)
    world.append(world.all[0], 9)
    content = world.all[0].state.find_states(9)
    twin = SimpleNamespace(state=RecurrentState(other.layout), tokens=world.all[0].tokens)
    twin.state.put(9, content)
    other.all = [twin]
    other.append(twin, 2)
    other.check()
    with pytest.raises(ValueError, match="bytes for"):
        twin.state.put(9, content[:-1])


def test_the_snapshot_that_saves_least_is_dropped_first(monkeypatch):
    """It saves the distance to the one before, relative to the distance from the end; examples worked out by hand."""
    for most, counts, kept in [
        (3, (10, 10, 10, 10, 10), [20, 30, 40]),  # 10/31 10/21 10/11
        (3, (100, 10, 10, 10, 10), [100, 120, 130]),  # 100/31 10/21 10/11
        (2, (5, 2, 1, 9), [5, 8]),  # 5/4 2/2
        (2, (2, 5, 2, 9), [7, 9]),  # 2/8 5/3
    ]:
        monkeypatch.setattr(recurrent, "MAX_SNAPSHOTS", most)
        state, length = RecurrentState(StateLayout(LAYOUT_OF)), 0
        for count in counts:
            state.prepare(length, count)
            length += count
        assert [place for place in range(1, length) if state.has_states(place)] == kept
