"""Run an embedding model on a GPU."""

from collections.abc import Sequence

import numpy as np

from localllm.arch.layer_state import State
from localllm.engine.cuda import devices
from localllm.engine.cuda.cache import CudaCache
from localllm.engine.cuda.program import MOST_SEQUENCES, CudaProgram
from localllm.engine.operations.operation import Operation
from localllm.engine.options import EngineOptions
from localllm.engine.run import BATCH, TextSpan
from localllm.kernels.table import PAGE


class CudaEmbeddingRunner:
    """A model on a GPU that computes a row per text.

    Attributes:
        name, warning: the GPU's, see Card.
    """

    def __init__(self, operations: list[Operation], states: Sequence[State], context: int, options: EngineOptions):
        """Upload the model; context: the most tokens of a text.

        Raises NoCardError, MemoryLimitError, UnsupportedError.
        """
        self._card = card = devices.open_card(int(options.backend.partition(":")[2] or 0))
        try:
            self._pages = np.arange(-(-max(BATCH, context) // PAGE) + MOST_SEQUENCES)
            cache = CudaCache(card, states, len(self._pages) * PAGE, options.kv_cache_type, 0)
            self._program = CudaProgram(card, operations, cache, None, context, options, {})
        except BaseException:
            card.close()
            raise
        self.name, self.warning = card.name, card.warning

    def read(self, texts: Sequence[TextSpan]) -> np.ndarray:
        """Read texts, see localllm.engine.embedding_runner.Read."""
        groups = [texts[i : i + MOST_SEQUENCES] for i in range(0, len(texts), MOST_SEQUENCES)]
        return np.concatenate([self._program.read(group, self._pages) for group in groups])

    def close(self) -> None:
        self._card.close()
