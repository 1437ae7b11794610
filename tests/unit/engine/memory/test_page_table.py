"""Test page tables: each sequence finds its own tokens, and unused pages hold no memory."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.arch.layer_state import KVType, LatentState, PagedState, RecurrentLayerState
from localllm.engine.cpu.program import RunCache
from localllm.engine.memory import page_table
from localllm.engine.memory.cache import JointCache, KVCache, merge_ranges
from localllm.engine.memory.page_table import CachePool, HybridState, PageAllocator, PageTable
from localllm.engine.memory.recurrent import RecurrentState, StateLayout
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.operation import Operation
from localllm.errors import MemoryLimitError
from localllm.kernels.table import PAGE

WINDOW, SLACK, NUMBERS = (
    20,
    2 * PAGE,
    16,
)  # a page of one head is 4096 bytes, as one of most systems: they go back one by one
STATES = [PagedState(0, 1, NUMBERS, NUMBERS), PagedState(1, 1, NUMBERS, NUMBERS, window=WINDOW)]


@pytest.fixture
def cache(monkeypatch) -> KVCache:
    """Return a cache of 9 pages and two layers; the second has a window."""
    monkeypatch.setattr(page_table, "SLACK", SLACK)
    cache = KVCache(STATES, 8 * PAGE, KVType.parse("f32"), sequences=(1,))
    assert cache.pages == 9
    return cache


class World:
    """Tables in one cache, and the tokens that each should hold in place of keys and values."""

    def __init__(self, cache: KVCache, seed: int = 0):
        self.cache, self.pages = cache, PageAllocator(cache.pages)
        self.tables: list[SimpleNamespace] = []
        self.draw = random.Random(seed)

    def allocate(self) -> SimpleNamespace:
        self.tables.append(SimpleNamespace(table=PageTable(self.cache, self.pages), tokens=[]))
        return self.tables[-1]

    def append(self, some: SimpleNamespace, count: int) -> None:
        """Append as the engine does: if the cache is full, the table is truncated to its former length."""
        length = len(some.tokens)
        try:
            some.table.prepare(length, count)
        except MemoryLimitError:
            assert some.table.truncate(length) == length
            raise
        some.tokens += [self.draw.randint(1, 255) for _ in range(count)]
        self.write(some, length)

    def write(self, some: SimpleNamespace, first: int) -> None:
        """Write the tokens from `first` on."""
        for number in range(first // PAGE, -(-len(some.tokens) // PAGE)):
            begin, end = max(first, number * PAGE), min(len(some.tokens), (number + 1) * PAGE)
            page = some.table.table[number : number + 1]
            for local in (False, True):
                content = self.cache.copy_pages(page, local).reshape(2, PAGE, 4 * NUMBERS)
                values = np.array(some.tokens[begin:end], np.uint8)
                content[:, begin - number * PAGE : end - number * PAGE] = values[None, :, None]
                self.cache.fill(page, local, content.reshape(-1))

    def held(self, some: SimpleNamespace, local: bool, first: int = 0) -> np.ndarray:
        """Return the stored tokens from `first` on, or 0 where keys and values disagree."""
        begin, count = first // PAGE, len(some.tokens)
        pages = some.table.table[begin : -(-count // PAGE)]
        content = self.cache.copy_pages(pages, local).reshape(2, len(pages) * PAGE, 4 * NUMBERS)
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
        """Copy to another table through files: two chunks, with windows where the last token needs them.


        Without these windows nothing can continue there, and nothing is copied.
        """
        last, twin = len(some.tokens), self.allocate()
        middle = self.draw.randint(0, (last - 1) // PAGE) * PAGE
        pieces = [(0, middle), (middle, last)]
        names = [["pages", "windows"] if end > last - WINDOW else ["pages"] for _, end in pieces]
        if all({*needed} <= {*some.table.list_sections(*piece)} for piece, needed in zip(pieces, names, strict=True)):
            for piece, needed in zip(pieces, names, strict=True):
                twin.table.put(*piece, {name: some.table.copy_section(name, *piece) for name in needed})
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
        assert not self.cache.copy_pages(unused, False).any(), "memory that nobody needs"
        assert not self.cache.copy_pages(unused, True).any(), "memory that nobody needs"
        self.cache.give_back(unused)


def act(world: World) -> None:
    """Do one random operation."""
    draw = world.draw
    some = draw.choice(world.tables) if world.tables else world.allocate()
    length = len(some.tokens)
    kind = draw.choice(["append"] * 4 + ["new", "fork", "truncate", "shift", "copy", "close"])
    if kind == "append":
        world.append(some, draw.choice([1, 5, PAGE, draw.randint(1, 3 * PAGE)]))
    elif kind in ("new", "fork", "copy") and len(world.tables) == 3:
        world.close(some)
    elif kind == "new":
        world.allocate()
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
def test_random_operations_leave_each_sequence_its_own_tokens(cache, seed: int):
    """Fill the cache often, and expect that a failed operation changes nothing."""
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


def test_a_table_that_does_not_fit_returns_its_pages(cache):
    world = World(cache)
    first, second = world.allocate(), world.allocate()
    world.append(first, 6 * PAGE)
    with pytest.raises(MemoryLimitError):
        world.append(second, 4 * PAGE)
    assert world.pages.used == 6
    assert len(second.table.table) == 0
    world.append(second, 3 * PAGE)
    world.check()


def test_pages_within_a_forks_window_are_kept(cache):
    """Fork a few tokens after a page's end, so that the window reaches into that page."""
    world = World(cache)
    original = world.allocate()
    world.append(original, PAGE + 6)
    fork = world.fork(original, PAGE + 6)
    for _ in range(5):
        world.append(original, PAGE)
    assert original.table.list_sections(0, PAGE) == ["pages"], "it has lost its first windows"
    world.check()
    world.append(fork, 3)
    world.check()


def test_pages_are_returned_by_their_last_owner(cache):
    world = World(cache)
    original = world.allocate()
    world.append(original, 2 * PAGE)
    forks = [world.fork(original, 2 * PAGE) for _ in range(2)]
    world.close(original)
    world.close(forks[0])
    assert world.pages.used == 2
    world.check()
    world.close(forks[1])
    assert world.pages.used == 0
    world.check()


def test_a_shorter_fork_shares_only_its_prefix(cache):
    world = World(cache)
    original = world.allocate()
    world.append(original, 3 * PAGE)
    assert len(world.fork(original, PAGE).table.table) == 1
    assert len(world.fork(original, PAGE + 1).table.table) == 2
    world.check()


def test_truncating_within_the_slack_keeps_the_windows(cache):
    world = World(cache)
    some = world.allocate()
    for length in range(PAGE // 2, 8 * PAGE, PAGE // 2):
        world.append(some, PAGE // 2)
        fork = world.fork(some, length - PAGE // 2 - SLACK) if length - PAGE // 2 > SLACK else world.allocate()
        assert len(fork.tokens) == max(0, length - PAGE // 2 - SLACK)
        world.check()
        world.close(fork)


def test_dropped_windows_stay_dropped_after_a_shift(cache):
    """Five tokens and what followed 192 others share a page after it."""
    world = World(cache)
    some = world.allocate()
    world.append(some, SLACK + 2 * PAGE + WINDOW)
    world.append(some, 1)
    assert some.table.list_sections(2 * PAGE, 3 * PAGE) == ["pages", "windows"] and some.table.list_sections(
        0, PAGE
    ) == ["pages"]
    world.shift(some, 5, 3 * PAGE)
    assert len(some.tokens) == PAGE + WINDOW + 1, "the window ends right behind them"
    world.check()
    world.truncate(some, PAGE + WINDOW - 1)
    world.check()
    world.append(some, 10)
    world.check()


def test_a_hybrid_state_returns_all_pages_after_its_last_fork_closes(cache: KVCache):
    """Check also that a closed one can be used again."""
    pages = PageAllocator(cache.pages)
    store = HybridState(PageTable(cache, pages), RecurrentState(StateLayout([RecurrentLayerState(2, ((4,),))])))
    for _ in range(2):
        store.prepare(0, 3 * PAGE)
        fork = store.fork(3 * PAGE)
        fork.prepare(3 * PAGE, 1)
        assert pages.used == 4
        store.close()
        assert pages.used == 4, "the fork reads them"
        fork.close()
        assert pages.used == 0


class Heard(list):
    """A stand-in that records each call, and returns its name with the arguments."""

    def __init__(self, **known):
        self.__dict__.update(known)

    def __getattr__(self, name):
        return lambda *given, **named: self.append((name, *given, *named.values())) or f"{name} {given}"


def test_a_hybrid_state_forwards_to_pages_and_recurrent_states():
    pages, states = (
        Heard(addresses=(7, 0, 0), table="table"),
        Heard(addresses=(8, 9), has_states=lambda last: last == 5),
    )
    store = HybridState(pages, states)
    assert (store.addresses, store.table) == ((7, 8, 9), "table")
    store.prepare(5, 2)
    assert pages == states == [("prepare", 5, 2)]
    pages.list_sections = lambda first, last: ["pages", f"{first} {last}"]
    assert store.list_sections(0, 5) == ["pages", "0 5", "states"] and store.list_sections(0, 4) == ["pages", "0 4"]
    assert (
        store.copy_section("pages", 0, 5) == "copy_section ('pages', 0, 5)"
        and store.copy_section("states", 0, 5) == "find_states (5,)"
    )
    for some in (pages, states):
        some.clear()
    store.put(0, 5, {"pages": 1})
    store.put(0, 5, {"pages": 1, "states": 2})
    assert pages == [("put", 0, 5, {"pages": 1}), ("put", 0, 5, {"pages": 1, "states": 2})]
    assert states == [("put", 5, 2)]
    states.truncate = lambda length: length - length % 4  # each goes back to places of its own
    pages.truncate = lambda length: length - length % 3
    assert [store.truncate(length) for length in (3, 4, 11, 13)] == [0, 0, 4, 12]


def test_a_joint_cache_stores_both_caches_one_behind_the_other():
    first, second = (KVCache([state], 2 * PAGE, KVType.parse("f32"), (1,)) for state in
                     (PagedState(0, 1, 16, 16), PagedState(1, 2, 16, 32, window=20)))  # fmt: skip
    both = JointCache(first, second)
    assert (both.pages, both.window, JointCache(second, first).window) == (3, 20, 20)
    assert both.bytes_per_token == first.bytes_per_token + second.bytes_per_token == 4 * (2 * 16 + 2 * (16 + 32))
    sizes = {local: (first.get_page_bytes(local), second.get_page_bytes(local)) for local in (False, True)}
    assert sizes == {False: (PAGE * 4 * 32, 0), True: (0, PAGE * 4 * 96)}
    pages, random = np.array([2, 0]), np.random.default_rng(0)
    for local, (one, other) in sizes.items():
        content = random.integers(1, 256, 2 * (one + other), np.uint8)
        both.fill(pages, local, content)
        np.testing.assert_array_equal(both.copy_pages(pages, local), content)
        np.testing.assert_array_equal((second if local else first).copy_pages(pages, local), content)
        for wrong in (content[:-1], np.append(content, 0)):
            with pytest.raises(ValueError, match=f"^{len(wrong)} bytes for {len(content)}$"):
                both.fill(pages, local, wrong)
            with pytest.raises(ValueError, match=f"^{len(wrong)} bytes for {len(content)}$"):
                (second if local else first).fill(pages, local, wrong)
    both.copy(2, 1, 7)
    for local, heads, columns in ((False, 2, 64), (True, 2, 64)):
        source, target = (both.copy_pages(np.array([page]), local) for page in (2, 1))
        if not local:
            source, target = (some.reshape(heads, PAGE, columns) for some in (source, target))
            np.testing.assert_array_equal(target[:, :7], source[:, :7])
            assert not target[:, 7:].any()
        else:
            keys, values = np.split(target, [2 * PAGE * 64])
            for some, of_token in ((keys, 64), (values, 128)):
                per_head = some.reshape(2, PAGE, of_token)
                assert per_head[:, :7].all() and not per_head[:, 7:].any()
    parts = Heard(pages=3, window=0), Heard(pages=3, window=0)
    both = JointCache(*parts)
    both.use(iter([1, 2]))
    both.give_back(iter([1, 2]))
    both.give_back(iter([2]), local=True)
    assert parts[0] == parts[1] == [("use", [1, 2]), ("give_back", [1, 2], False), ("give_back", [2], True)]


def test_a_page_is_one_chunk_of_each_stream():
    """Every head of keys and of values is a stream; latent rows have one for both; windows may go alone."""
    states = [PagedState(0, 2, 16, 32, window=20), LatentState(1, 64, 32)]
    cache = KVCache(states, 4 * PAGE, KVType.parse("f32"), (1,))
    assert (cache.pages, cache.window, cache.bytes_per_token) == (5, 20, 4 * (2 * 16 + 2 * 32 + 64))
    keys, values = cache.get_sides(states[0])
    assert [tuple(side) for side in (keys, values)] == [(0, 2, 64, "f32"), (2 * 5 * PAGE * 64, 2, 128, "f32")]
    rows = 2 * 5 * PAGE * (64 + 128)
    assert [tuple(side) for side in cache.get_sides(states[1])] == [(rows, 1, 256, "f32")] * 2
    assert (
        cache.get_head_stride(values) == 5 * PAGE * 128
        and cache.get_address(values) - cache.get_address(keys) == values.start
    )
    local = [
        (head * 5 * PAGE * size + start + first * PAGE * size, head * 5 * PAGE * size + start + last * PAGE * size)
        for first, last in ((0, 2), (3, 4)) for start, size in ((0, 64), (values.start, 128)) for head in (0, 1)
    ]  # fmt: skip
    assert [*cache._list_byte_ranges([3, 0, 1], local=True)] == local
    both = [piece for piece in cache._list_byte_ranges([3, 0, 1]) if piece not in local]
    assert both == [(rows, rows + 2 * PAGE * 256), (rows + 3 * PAGE * 256, rows + 4 * PAGE * 256)]
    assert merge_ranges([]) == [] and merge_ranges([4, 5, 7, 8, 9, 11]) == [(4, 6), (7, 10), (11, 12)]


@pytest.mark.parametrize(("inputs", "pages_of_layers"), [((1, 3, 3), 3), ((3, 2), 1), ((), 1)])
def test_layers_of_a_run_share_memory_unless_one_reads_anothers_keys(inputs, pages_of_layers):
    states = [PagedState(layer, 1, 16, 16 * (layer + 1)) for layer in range(2)]
    attends = [Attend((0,) * count, None, *[None] * 12) for count in inputs]
    operations = [Operation((0,), None), *attends]
    cache = RunCache(states, 3, KVType.parse("f32"), operations)
    starts = [side.start for state in states for side in cache.get_sides(state)]
    one = 3 * PAGE * 64
    assert starts == ([0, one, 2 * one, 3 * one] if pages_of_layers == 3 else [0, one, 0, one])
    assert cache.pages == 3 and len(cache._memory.bytes) == one * (5 if pages_of_layers == 3 else 3)
    assert cache._memory.is_whole


def test_a_cache_pool_makes_stores_and_counts_whole_pages(cache: KVCache):
    room, layout = CachePool(cache, None), StateLayout([RecurrentLayerState(2, ((4,),))])
    assert isinstance(room.create_state(), PageTable) and isinstance(
        CachePool(cache, layout).create_state(), HybridState
    )
    assert (room.bytes_per_token, room.get_cache_usage()) == (cache.bytes_per_token, (0, 9 * PAGE))
    one, other = room.create_state(), room.create_state()
    one.prepare(0, PAGE + 1)
    other.prepare(0, 1)
    assert room.get_cache_usage() == (3 * PAGE, 9 * PAGE)


def test_states_lie_one_behind_the_other_from_a_cache_line_on():
    layout = StateLayout([RecurrentLayerState(0, ((3, 2), (17,))), RecurrentLayerState(2, ((2, 2, 16),))])
    assert [layout.get_offset(0, 0), layout.get_offset(0, 1), layout.get_offset(2, 0)] == [0, 4 * 48, 4 * 80]
    for memory in (layout.zeros, layout.allocate()):
        assert (len(memory), memory.dtype, layout.get_address(memory) % 64) == (144, np.float32, 0)
    assert not layout.zeros.any()
    content = np.arange(576, dtype=np.uint16).astype(np.uint8)
    assert layout.view_bytes(filled := layout.from_bytes(content)).tolist() == content.tolist()
    assert filled.dtype == np.float32
    with pytest.raises(ValueError, match=r"^575 bytes for 576$"):
        layout.from_bytes(content[:-1])


def test_pages_are_taken_next_to_the_last_or_in_the_largest_gap():
    pages = PageAllocator(9)
    assert [pages.take(None), pages.take(None), pages.take(0), pages.take(1), pages.take(8)] == [0, 5, 1, 2, 7]
    assert (pages.used, len(pages)) == (5, 9)
    pages.share([5, 7])
    assert pages.release([0, 5, 1]) == [0, 1]
    assert pages.references.tolist() == [0, 0, 1, 0, 0, 1, 0, 2, 0]
    assert pages.take(None) == 0 and pages.take(1) == 4  # the one behind is in use
    full = PageAllocator(2)
    full.take(None), full.take(0)
    with pytest.raises(
        MemoryLimitError, match=f"^the KV cache is full: all of its {2 * PAGE} positions are in use: close"
    ):
        full.take(1)
