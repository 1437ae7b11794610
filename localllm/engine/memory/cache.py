"""Reserve and address the memory of the KV cache: one address range for all sequences.

The operating system commits memory when a token is first written there, so that a context of 131072 tokens costs only
the memory of the tokens in use. Layout: [layer][keys, values][key-value head][slot][head dimension], padded to blocks.
A slot is the memory of one token; the slots of a head are one stream, which is divided into pages
(localllm.engine.memory.page_table).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from localllm.arch.layer_state import KVType, LatentState, PagedState, RecurrentLayerState, State, count_stored_bytes
from localllm.errors import MemoryLimitError, ModelError
from localllm.kernels.table import PAGE
from localllm.system.memory import MemoryRegion, describe_limit, get_address_room, get_data_room

CONTEXT_COUNTS = (16, 4, 1)  # contexts to reserve addresses for: the first count that the system allows
KEYLESS_CONTEXT_COUNTS = (1024,)  # the same for models without keys


class ReservedMemory:
    """A range of `size` zero bytes that cost memory only once they are touched.

    Attributes:
        bytes: uint8 [size].  address: of the first byte, aligned to a page of the system.
        is_whole: all bytes may be touched without calling `use`.
    """

    def __init__(self, size: int, whole: bool = True, is_context: bool = False):
        """Reserve addresses. Raises MemoryLimitError.

        whole: all bytes may be touched, otherwise only those announced by `use`. is_context: a smaller context needs
        less memory, which the error suggests.
        """
        try:
            self._region = MemoryRegion(size, whole)
        except (OSError, OverflowError, ValueError):
            limit, ways = describe_limit(size), ["use a smaller context"] if is_context else []
            ways += ["raise this limit"] if limit else [] if ways else ["close other programs"]
            reason = f"cannot reserve {size / 1e9:.2f} GB of memory{f': {limit}' if limit else ''}"
            raise MemoryLimitError(f"{reason}; {' or '.join(ways)}") from None
        self.bytes, self.is_whole = np.frombuffer(memoryview(self._region.buffer), np.uint8), self._region.is_whole
        self.address = self._region.address

    def use(self, start: int, end: int) -> None:
        """Announce that bytes [start, end) will be touched. Raises MemoryLimitError."""
        try:
            self._region.use(start, end)
        except OSError:
            raise MemoryLimitError("not enough memory for the KV cache; use a smaller context") from None

    def give_back(self, start: int, end: int) -> None:
        """Return the whole system pages within bytes [start, end), which then read as zero.

        Raises MemoryLimitError.
        """
        try:
            self._region.give_back(start, end)
        except OSError:
            raise MemoryLimitError(f"cannot return {end - start} bytes of memory to the system") from None


class HeadStreams(NamedTuple):
    """The keys or the values of a layer: the streams of all heads, one after the other."""

    start: int  # offset in the reserved memory
    heads: int
    token_bytes: int  # bytes per token and head
    kind: str  # a key of localllm.arch.layer_state.STORAGE


class KVCache:
    """The keys and values of all sequences, in pages.

    Attributes:
        pages: number of pages.  sequences: number of whole contexts that fit, a tuple of one.
        kv_type: storage type.
        window: the largest sliding window of a layer, in tokens; 0 if no layer has one.
    """

    def __init__(
        self, states: Sequence[State], context: int, kv_type: KVType, sequences: Sequence[int] = CONTEXT_COUNTS
    ):
        """Reserve memory for contexts of `context` tokens. Raises MemoryLimitError, ModelError.

        sequences: numbers of contexts to try, of which the first that fits is taken.
        """
        self.kv_type = kv_type
        windows = {
            state: state.window for state in states if not isinstance(state, RecurrentLayerState) and state.window
        }
        self.window, self._local = max(windows.values(), default=0), frozenset(windows)
        numbers = sequences if states else KEYLESS_CONTEXT_COUNTS
        for number in numbers:
            self.sequences = (number,)
            self.pages = number * -(-context // PAGE) | 1  # odd: streams do not share the same cache sets
            self._layers, size = self._lay_out(states)
            is_least = number == numbers[-1]
            if size > min(get_address_room(), get_data_room()) // 2 and not is_least:  # other memory is needed too
                continue
            try:
                self._memory = self._reserve(max(size, 1))
                break
            except MemoryLimitError:
                if is_least:
                    raise

    def _reserve(self, size: int) -> ReservedMemory:
        return ReservedMemory(size, whole=False, is_context=True)

    def use(self, pages: Iterable[int]) -> None:
        """Announce that these pages will be written. Raises MemoryLimitError."""
        if not self._memory.is_whole:
            for start, end in self._list_byte_ranges(pages):
                self._memory.use(start, end)

    def _lay_out(self, states: Sequence[State]) -> tuple[dict[State, tuple[HeadStreams, HeadStreams]], int]:
        """Lay out the keys and values of each state; return their streams and the total bytes."""
        layers: dict[State, tuple[HeadStreams, HeadStreams]] = {}
        end = 0
        for state in states:
            if isinstance(state, RecurrentLayerState):
                raise ModelError(f"a recurrent state is not supported yet (layer {state.layer})")
            sides, dims = [], (state.key_dim,) if isinstance(state, LatentState) else (state.key_dim, state.value_dim)
            for dim, kind in zip(dims, self.kv_type, strict=False):
                sides.append(HeadStreams(end, state.kv_heads, count_stored_bytes(dim, kind), kind))
                end += state.kv_heads * self.get_head_stride(sides[-1])
            layers[state] = sides[0], sides[-1]
        return layers, end

    def get_head_stride(self, side: HeadStreams) -> int:
        """Return the distance in bytes from one head's stream to the next."""
        return self.pages * PAGE * side.token_bytes

    def get_sides(self, state: PagedState | LatentState) -> tuple[HeadStreams, HeadStreams]:
        """Return the keys and the values of a layer; of a latent state, both are the same."""
        return self._layers[state]

    def get_address(self, side: HeadStreams) -> int:
        """Return the address of the first slot of the first head."""
        return self._memory.address + side.start

    @property
    def bytes_per_token(self) -> int:
        """The memory of a token in all streams, in bytes."""
        return sum(side.heads * side.token_bytes for side in self._list_streams())

    def get_page_bytes(self, local: bool) -> int:
        """Return the size in bytes of a page in layers with a window (local), or in those without."""
        windowed = set(self._list_streams(local=True))
        sides = [side for side in self._list_streams() if (side in windowed) == local]
        return sum(side.heads * PAGE * side.token_bytes for side in sides)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` slots of a page to another page, in every stream."""
        for pages, token_bytes in self._iterate_views():
            pages[:, target, : tokens * token_bytes] = pages[:, source, : tokens * token_bytes]

    def copy_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy tokens between slots, int64 [tokens] each, in every stream."""
        ends = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
        ranges = [
            (int(source[first]), int(target[first]), end - first)
            for first, end in zip([0, *ends.tolist()], [*ends.tolist(), len(source)], strict=True)
        ]
        for pages, token_bytes in self._iterate_views():
            slots = pages.reshape(len(pages), -1, token_bytes)
            for first, place, count in ranges:
                slots[:, place : place + count] = slots[:, first : first + count]

    def copy_pages(self, pages: np.ndarray, local: bool) -> np.ndarray:
        """Return the content of pages in layers with a window (local), or in those without: uint8, stream by stream."""
        views = [view[:, pages].reshape(-1) for view in self._select_views(local)]
        return np.concatenate(views) if views else np.zeros(0, np.uint8)

    def fill(self, pages: np.ndarray, local: bool, content: np.ndarray) -> None:
        """Write pages from bytes that `copy_pages` returned. Raises ValueError if the size differs."""
        views = self._select_views(local)
        sizes = [len(view) * len(pages) * view.shape[2] for view in views]
        if sum(sizes) != len(content):
            raise ValueError(f"{len(content)} bytes for {sum(sizes)}")
        start = 0
        for view, size in zip(views, sizes, strict=True):
            view[:, pages] = content[start : start + size].reshape(len(view), len(pages), view.shape[2])
            start += size

    def _select_views(self, local: bool) -> list[np.ndarray]:
        """Return the streams of layers with a window (local), or of the others."""
        windowed = set(self._list_streams(local=True))
        return [self._view_stream(side) for side in self._list_streams() if (side in windowed) == local]

    def _list_streams(self, local: bool = False) -> list[HeadStreams]:
        layers = [sides for layer, sides in self._layers.items() if layer in self._local or not local]
        return list(dict.fromkeys(side for sides in layers for side in sides))

    def _iterate_views(self, local: bool = False) -> Iterator[tuple[np.ndarray, int]]:
        """Yield each stream, uint8 [heads, pages, bytes of a page], and its bytes per token."""
        for side in self._list_streams(local):
            yield self._view_stream(side), side.token_bytes

    def _view_stream(self, side: HeadStreams) -> np.ndarray:
        """Return a stream as uint8 [heads, pages, bytes of a page]."""
        data = self._memory.bytes[side.start : side.start + side.heads * self.get_head_stride(side)]
        return data.reshape(side.heads, self.pages, -1)

    def give_back(self, pages: Iterable[int], local: bool = False) -> None:
        """Return the memory of these pages to the system; with `local`, only that of layers with a window."""
        for start, end in self._list_byte_ranges(pages, local):
            self._memory.give_back(start, end)

    def _list_byte_ranges(self, pages: Iterable[int], local: bool = False) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of pages in every stream, with adjacent ranges merged."""
        for first, last in merge_ranges(sorted(pages)):
            for side in self._list_streams(local):
                stride, page_bytes = self.get_head_stride(side), PAGE * side.token_bytes
                for start in range(side.start, side.start + side.heads * stride, stride):
                    yield int(start + first * page_bytes), int(start + last * page_bytes)


def merge_ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Merge sorted integers into ranges (first, last + 1)."""
    result: list[tuple[int, int]] = []
    for number in numbers:
        if result and result[-1][1] == number:
            result[-1] = result[-1][0], number + 1
        else:
            result.append((number, number + 1))
    return result


class JointCache:
    """Two caches that page tables use like a single one (localllm.engine.memory.page_table)."""

    def __init__(self, first: KVCache, second: KVCache):
        """Combine two caches with the same number of pages."""
        assert first.pages == second.pages
        self.pages, self.window = first.pages, max(first.window, second.window)
        self._both = first, second

    @property
    def bytes_per_token(self) -> int:
        return sum(cache.bytes_per_token for cache in self._both)

    def copy(self, source: int, target: int, tokens: int) -> None:
        for cache in self._both:
            cache.copy(source, target, tokens)

    def copy_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        for cache in self._both:
            cache.copy_slots(source, target)

    def copy_pages(self, pages: np.ndarray, local: bool) -> np.ndarray:
        return np.concatenate([cache.copy_pages(pages, local) for cache in self._both])

    def fill(self, pages: np.ndarray, local: bool, content: np.ndarray) -> None:
        sizes = [len(pages) * cache.get_page_bytes(local) for cache in self._both]
        if sum(sizes) != len(content):
            raise ValueError(f"{len(content)} bytes for {sum(sizes)}")
        for cache, part in zip(self._both, np.split(content, sizes[:1]), strict=True):
            cache.fill(pages, local, part)

    def use(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        for cache in self._both:
            cache.use(pages)

    def give_back(self, pages: Iterable[int], local: bool = False) -> None:
        pages = list(pages)
        for cache in self._both:
            cache.give_back(pages, local)
