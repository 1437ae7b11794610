"""The keys and values of a single run: all layers share the same place, one after the other."""

from collections.abc import Sequence

from localllm.arch.kv_cache_types import KVType
from localllm.arch.layer_state import State
from localllm.engine.memory.cache import KVCache, Reserved, Streams
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.operation import Operation
from localllm.kernels.arguments import PAGE


class RunCache(KVCache):
    """A cache of `pages` pages."""

    def __init__(self, states: Sequence[State], pages: int, kv_type: KVType, operations: Sequence[Operation]):
        """Allocate; operations: of the model. Where a layer reads an earlier one's keys, each has its own place."""
        attends = [operation for operation in operations if isinstance(operation, Attend)]
        self._is_shared = all(len(operation.inputs) > 1 for operation in attends)
        super().__init__(states, pages * PAGE, kv_type, (1,))

    def _reserve(self, size: int) -> Reserved:
        """Reserve memory any of which may be touched: runs do not announce their pages."""
        return Reserved(size)

    def _arrange(self, states: Sequence[State]) -> tuple[dict[State, tuple[Streams, Streams]], int]:
        if not self._is_shared:
            return super()._arrange(states)
        found = [super(RunCache, self)._arrange([state]) for state in states]
        layers = {layer: sides for of_one, _ in found for layer, sides in of_one.items()}
        return layers, max(size for _, size in found)
