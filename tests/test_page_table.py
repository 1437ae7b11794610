"""Tables of pages: whatever sequences do, each finds its own tokens, and pages that nobody has hold no memory."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.arch.states import Paged, Recurrent
from localllm.arch.storage import KVType
from localllm.engine.memory import page_table
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.page_table import PageTable
from localllm.engine.memory.pages import Pages
from localllm.engine.memory.recurrent import RecurrentState, StateLayout
from localllm.engine.memory.store import HybridStore
from localllm.errors import MemoryLimitError
from localllm.kernels.arguments import PAGE

WINDOW, SLACK, NUMBERS = (
    20,
    2 * PAGE,
    16,
)  # a page of one head is 4096 bytes, as one of most systems: they go back one by one
STATES = [Paged(0, 1, NUMBERS, NUMBERS), Paged(1, 1, NUMBERS, NUMBERS, window=WINDOW)]


@pytest.fixture
def cache(monkeypatch) -> KVCache:
    """Room for 9 pages, of two layers; the second has a window."""
    monkeypatch.setattr(page_table, "SLACK", SLACK)
    cache = KVCache(STATES, 8 * PAGE, KVType.of("f32"), sequences=(1,))
    assert cache.pages == 9
    return cache


class World:
    """Tables in one cache, and what each should hold: one number for each token, in the place of keys and values."""

    def __init__(self, cache: KVCache, seed: int = 0):
        self.cache, self.pages = cache, Pages(cache.pages)
        self.tables: list[SimpleNamespace] = []
        self.draw = random.Random(seed)

    def new(self) -> SimpleNamespace:
        self.tables.append(SimpleNamespace(table=PageTable(self.cache, self.pages), tokens=[]))
        return self.tables[-1]

    def append(self, some: SimpleNamespace, count: int) -> None:
        """As the engine does: if there is no room, the table goes back to where it was."""
        length = len(some.tokens)
        try:
            some.table.prepare(length, count)
        except MemoryLimitError:
            assert some.table.truncate(length) == length
            raise
        some.tokens += [self.draw.randint(1, 255) for _ in range(count)]
        self.write(some, length)

    def write(self, some: SimpleNamespace, first: int) -> None:
        """The tokens from `first` on."""
        for number in range(first // PAGE, -(-len(some.tokens) // PAGE)):
            begin, end = max(first, number * PAGE), min(len(some.tokens), (number + 1) * PAGE)
            page = some.table.table[number : number + 1]
            for local in (False, True):
                content = self.cache.content(page, local).reshape(2, PAGE, 4 * NUMBERS)
                values = np.array(some.tokens[begin:end], np.uint8)
                content[:, begin - number * PAGE : end - number * PAGE] = values[None, :, None]
                self.cache.fill(page, local, content.reshape(-1))

    def held(self, some: SimpleNamespace, local: bool, first: int = 0) -> np.ndarray:
        """The numbers of its tokens from `first` on, or 0 where keys and values disagree."""
        begin, count = first // PAGE, len(some.tokens)
        pages = some.table.table[begin : -(-count // PAGE)]
        content = self.cache.content(pages, local).reshape(2, len(pages) * PAGE, 4 * NUMBERS)
        content = content[:, first - begin * PAGE : count - begin * PAGE]
        return np.where((content == content[:1, :, :1]).all((0, 2)), content[0, :, 0], 0)

    def fork(self, some: SimpleNamespace, length: int) -> SimpleNamespace:
        self.tables.append(SimpleNamespace(table=some.table.fork(length), tokens=some.tokens[:length]))
        self.truncate(self.tables[-1], length)  # as the engine does before it reads on
        return self.tables[-1]

    def truncate(self, some: SimpleNamespace, length: int) -> None:
        kept = some.table.truncate(length)
        assert kept in (min(length, len(some.tokens)), 0)
        del some.tokens[kept:]

    def shift(self, some: SimpleNamespace, keep: int, count: int) -> None:
        kept = some.table.shift(keep, count)
        del some.tokens[keep : keep + count]
        assert kept in (len(some.tokens), 0)
        del some.tokens[kept:]
        some.tokens[keep:] = [self.draw.randint(1, 255) for _ in some.tokens[keep:]]
        self.write(some, keep)  # as keys are turned, each in its place

    def copy(self, some: SimpleNamespace) -> None:
        """Another table, by way of files: two pieces, each with its windows if they are needed behind the last token.

        Without them nothing can go on there, and nothing is copied.
        """
        last, twin = len(some.tokens), self.new()
        middle = self.draw.randint(0, (last - 1) // PAGE) * PAGE
        pieces = [(0, middle), (middle, last)]
        names = [["pages", "windows"] if end > last - WINDOW else ["pages"] for _, end in pieces]
        if all({*needed} <= {*some.table.parts(*piece)} for piece, needed in zip(pieces, names, strict=True)):
            for piece, needed in zip(pieces, names, strict=True):
                twin.table.put(*piece, {name: some.table.part(name, *piece) for name in needed})
            assert twin.table.truncate(last) == last
            twin.tokens = some.tokens[:]

    def close(self, some: SimpleNamespace) -> None:
        some.table.close()
        self.tables.remove(some)

    def check(self) -> None:
        counts = np.zeros(len(self.pages), np.int64)
        for some in self.tables:
            counts[some.table.table] += 1
            tokens = np.array(some.tokens, np.uint8)
            np.testing.assert_array_equal(self.held(some, False), tokens)
            seen = max(0, len(tokens) + 1 - WINDOW)
            np.testing.assert_array_equal(self.held(some, True, seen), tokens[seen:])
        np.testing.assert_array_equal(self.pages.references, counts)
        unused = np.flatnonzero(counts == 0)
        self.cache.use(unused)  # what was given back can be read again, also on Windows
        assert not self.cache.content(unused, False).any(), "memory that nobody needs"
        assert not self.cache.content(unused, True).any(), "memory that nobody needs"
        self.cache.give_back(unused)


def act(world: World) -> None:
    """Something that sequences do."""
    draw = world.draw
    some = draw.choice(world.tables) if world.tables else world.new()
    length = len(some.tokens)
    kind = draw.choice(["append"] * 4 + ["new", "fork", "truncate", "shift", "copy", "close"])
    if kind == "append":
        world.append(some, draw.choice([1, 5, PAGE, draw.randint(1, 3 * PAGE)]))
    elif kind in ("new", "fork", "copy") and len(world.tables) == 3:
        world.close(some)
    elif kind == "new":
        world.new()
    elif kind == "fork":
        world.fork(some, draw.choice([length, draw.randint(0, length)]))
    elif kind == "truncate":
        world.truncate(some, draw.randint(0, length))
    elif kind == "shift" and length:
        keep = draw.choice([0, 5, PAGE, draw.randint(0, length)])
        count = draw.randint(0, max(0, length - keep) // PAGE) * PAGE
        if keep + count <= length:
            world.shift(some, keep, count)
    elif kind == "copy" and length:
        world.copy(some)
    elif kind == "close":
        world.close(some)


@pytest.mark.parametrize("seed", range(25))
def test_whatever_sequences_do_each_finds_its_tokens(cache, seed: int):
    """The cache is often full: what fails then has changed nothing."""
    world = World(cache, seed)
    for _ in range(60):
        try:
            act(world)
        except MemoryLimitError:
            for some in world.tables[:]:  # what was to be copied is half a copy
                if not some.tokens:
                    world.close(some)
        world.check()
    while world.tables:
        world.close(world.tables[0])
        world.check()


def test_pages_go_back_when_the_cache_fills_halfway(cache):
    world = World(cache)
    first, second = world.new(), world.new()
    world.append(first, 6 * PAGE)
    with pytest.raises(MemoryLimitError):
        world.append(second, 4 * PAGE)
    assert world.pages.used == 6
    assert len(second.table.table) == 0
    world.append(second, 3 * PAGE)
    world.check()


def test_what_a_fork_still_sees_through_its_window_stays(cache):
    """It begins a few tokens behind a page, so that its window reaches into the page before."""
    world = World(cache)
    original = world.new()
    world.append(original, PAGE + 6)
    fork = world.fork(original, PAGE + 6)
    for _ in range(5):
        world.append(original, PAGE)
    assert original.table.parts(0, PAGE) == ["pages"], "it has lost its first windows"
    world.check()
    world.append(fork, 3)
    world.check()


def test_the_last_who_has_a_page_gives_it_back(cache):
    world = World(cache)
    original = world.new()
    world.append(original, 2 * PAGE)
    forks = [world.fork(original, 2 * PAGE) for _ in range(2)]
    world.close(original)
    world.close(forks[0])
    assert world.pages.used == 2
    world.check()
    world.close(forks[1])
    assert world.pages.used == 0
    world.check()


def test_a_shorter_fork_shares_only_what_it_begins_with(cache):
    world = World(cache)
    original = world.new()
    world.append(original, 3 * PAGE)
    assert len(world.fork(original, PAGE).table.table) == 1
    assert len(world.fork(original, PAGE + 1).table.table) == 2
    world.check()


def test_what_lies_within_the_slack_is_there_when_a_sequence_goes_back(cache):
    world = World(cache)
    some = world.new()
    for length in range(PAGE // 2, 8 * PAGE, PAGE // 2):
        world.append(some, PAGE // 2)
        fork = world.fork(some, length - PAGE // 2 - SLACK) if length - PAGE // 2 > SLACK else world.new()
        assert len(fork.tokens) == max(0, length - PAGE // 2 - SLACK)
        world.check()
        world.close(fork)


def test_first_tokens_whose_windows_are_lost_stay_lost_when_others_follow_them(cache):
    """Five of them and what was behind 192 others share a page then."""
    world = World(cache)
    some = world.new()
    world.append(some, SLACK + 2 * PAGE + WINDOW)
    world.append(some, 1)
    assert some.table.parts(2 * PAGE, 3 * PAGE) == ["pages", "windows"] and some.table.parts(0, PAGE) == ["pages"]
    world.shift(some, 5, 3 * PAGE)
    assert len(some.tokens) == PAGE + WINDOW + 1, "the window ends right behind them"
    world.check()
    world.truncate(some, PAGE + WINDOW - 1)
    world.check()
    world.append(some, 10)
    world.check()


def test_a_store_with_states_gives_all_pages_back(cache: KVCache):
    """Forks share pages until the last of them is closed; one that was closed begins anew."""
    pages = Pages(cache.pages)
    store = HybridStore(PageTable(cache, pages), RecurrentState(StateLayout([Recurrent(2, ((4,),))])))
    for _ in range(2):
        store.prepare(0, 3 * PAGE)
        fork = store.fork(3 * PAGE)
        fork.prepare(3 * PAGE, 1)
        assert pages.used == 4
        store.close()
        assert pages.used == 4, "the fork reads them"
        fork.close()
        assert pages.used == 0
