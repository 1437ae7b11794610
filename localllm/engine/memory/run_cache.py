"""The keys and values of a single run: layers run one after the other and use the same memory."""

from collections.abc import Sequence

from localllm.arch.layer_state import KVType, State
from localllm.engine.memory.cache import KVCache, Reserved, Streams
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.operation import Operation
from localllm.kernels.table import PAGE


class RunCache(KVCache):
    """A KV cache that is valid during one run only."""

    def __init__(self, states: Sequence[State], pages: int, kv_type: KVType, operations: Sequence[Operation]):
        """Allocate `pages` pages; no memory is shared if one of the operations reads the keys of an earlier layer."""
        attends = [operation for operation in operations if isinstance(operation, Attend)]
        self._is_shared = all(len(operation.inputs) > 1 for operation in attends)
        super().__init__(states, pages * PAGE, kv_type, (1,))

    def _reserve(self, size: int) -> Reserved:
        """Reserve memory that is usable as a whole: runs do not announce their pages."""
        return Reserved(size, is_context=True)

    def _arrange(self, states: Sequence[State]) -> tuple[dict[State, tuple[Streams, Streams]], int]:
        if not self._is_shared:
            return super()._arrange(states)
        arranged = [super(RunCache, self)._arrange([state]) for state in states]
        layers = {layer: sides for of_one, _ in arranged for layer, sides in of_one.items()}
        return layers, max(size for _, size in arranged)
