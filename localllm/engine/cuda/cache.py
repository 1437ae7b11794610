"""Keep the KV cache and recurrent states in GPU memory, laid out as on the CPU but allocated at once."""

from collections.abc import Iterable, Sequence

import numpy as np

from localllm.arch.layer_state import KVType, RecurrentLayerState, State
from localllm.engine.cuda.card import Gpu
from localllm.engine.cuda.devices import compute_state_bytes
from localllm.engine.memory.cache import HeadStreams, KVCache
from localllm.engine.memory.recurrent import StateLayout
from localllm.kernels.table import PAGE

CONTEXT_COUNTS = (2, 1)  # contexts to allocate: if memory suffices two, for two conversations


class GpuBlock:
    """A block of GPU memory.

    Attributes:
        address: of its first byte.
    """

    def __init__(self, card: Gpu, size: int):
        self.address = card.allocate(size)


class CudaCache(KVCache):
    def __init__(self, card: Gpu, states: Sequence[State], context: int, kv_type: KVType, spare: int):
        """Allocate the cache. Raises MemoryLimitError, ModelError.

        spare: bytes that a second context may use.
        """
        self._card = card
        has_room = sum(compute_state_bytes(state, context, kv_type) for state in states) <= spare
        super().__init__(states, context, kv_type, CONTEXT_COUNTS if has_room else CONTEXT_COUNTS[-1:])

    def _reserve(self, size: int) -> GpuBlock:  # type: ignore[override]  # has an address, and no bytes
        return GpuBlock(self._card, size)

    def copy(self, source: int, target: int, tokens: int) -> None:
        for side in self._list_streams():
            for head in range(side.heads):
                first = self._memory.address + side.start + head * self.get_head_stride(side)
                page = PAGE * side.token_bytes
                self._card.copy(first + target * page, first + source * page, tokens * side.token_bytes)

    def copy_pages(self, pages: np.ndarray, local: bool) -> np.ndarray:
        parts = [self._card.download(address, size) for address, size in self._list_chunks(pages, local)]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    def fill(self, pages: np.ndarray, local: bool, content: np.ndarray) -> None:
        if len(pages) * self.get_page_bytes(local) != len(content):
            raise ValueError(f"{len(content)} bytes for {len(pages) * self.get_page_bytes(local)}")
        start = 0
        for address, size in self._list_chunks(pages, local):
            self._card.upload(address, content[start : start + size])
            start += size

    def _list_chunks(self, pages: np.ndarray, local: bool) -> Iterable[tuple[int, int]]:
        """Yield address and size of pages, stream by stream.

        local: those of layers with a window, otherwise of all others.
        """
        windowed = set(self._list_streams(local=True))
        for side in self._list_streams():
            if (side in windowed) == local:
                for head in range(side.heads):
                    for page in pages:
                        yield self._get_address(side, head, int(page)), PAGE * side.token_bytes

    def _get_address(self, side: HeadStreams, head: int, page: int) -> int:
        return self._memory.address + side.start + head * self.get_head_stride(side) + page * PAGE * side.token_bytes

    def use(self, pages: Iterable[int]) -> None: ...

    # localllm.engine.memory.cache returns memory to the system; GPU memory stays allocated.
    def give_back(self, pages: Iterable[int], local: bool = False) -> None: ...


class GpuStates:
    """The recurrent states of all layers in GPU memory, freed with the last reference."""

    def __init__(self, card: Gpu, size: int):
        self._card, self.address = card, card.allocate(size)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._card.release(self.address)


class GpuStateLayout(StateLayout):
    """The layout of recurrent states in GPU memory."""

    def __init__(self, card: Gpu, states: Sequence[RecurrentLayerState]):
        super().__init__(states)
        self._card = card
        self.zeros = self.from_bytes(np.zeros(self.nbytes, np.uint8))

    def allocate(self) -> GpuStates:
        return GpuStates(self._card, self.nbytes)

    def get_address(self, memory: object) -> int:
        assert isinstance(memory, GpuStates)
        return memory.address

    def view_bytes(self, memory: object) -> np.ndarray:
        return self._card.download(self.get_address(memory), self.nbytes)

    def from_bytes(self, content: np.ndarray) -> GpuStates:
        if content.nbytes != self.nbytes:
            raise ValueError(f"{content.nbytes} bytes for {self.nbytes}")
        memory = self.allocate()
        self._card.upload(memory.address, content)
        return memory
