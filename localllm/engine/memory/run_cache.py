"""The keys and values of one run, which nobody reads later: all layers take the same place, one after the other."""

from collections.abc import Sequence

from localllm.arch.kv_cache_types import KVType
from localllm.arch.layer_state import State
from localllm.engine.memory.cache import KVCache, Streams
from localllm.engine.memory.reserved import Reserved
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.operation import Operation
from localllm.kernels.arguments import PAGE


class RunCache(KVCache):
    """Room for `pages` pages."""

    def __init__(self, states: Sequence[State], pages: int, kv_type: KVType, operations: Sequence[Operation]):
        """operations: of the model; where a layer reads keys of an earlier one, each has a place of its own."""
        attends = [operation for operation in operations if isinstance(operation, Attend)]
        self._is_shared = all(len(operation.inputs) > 1 for operation in attends)
        super().__init__(states, pages * PAGE, kv_type, (1,))

    def _reserved(self, size: int) -> Reserved:
        """Any of it may be touched at any time: nobody tells which pages a run takes."""
        return Reserved(size)

    def _arranged(self, states: Sequence[State]) -> tuple[dict[State, tuple[Streams, Streams]], int]:
        if not self._is_shared:
            return super()._arranged(states)
        found = [super(RunCache, self)._arranged([state]) for state in states]
        layers = {layer: sides for of_one, _ in found for layer, sides in of_one.items()}
        return layers, max(size for _, size in found)
