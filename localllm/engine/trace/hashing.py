"""The verbs of hashed sequences of tokens, checked and written down: a part of localllm.engine.trace.recorder."""

from typing import Any

from localllm.arch.verbs import Hashing
from localllm.arch.weights import Weight
from localllm.engine.trace.operations import Activation, Rows
from localllm.errors import ModelError, UnsupportedError

MOST_EXACT = 1 << 24  # up to here float32 has every whole number


class HashingVerbs:
    """What a Recorder says of them."""

    _vocab_size: int

    def _record(self, verb: str, inputs: tuple[Activation, ...], rows: Rows, columns: int, **given: Any) -> Activation:
        raise NotImplementedError

    def _matrix(self, weight: Weight) -> tuple[int, int]:
        raise NotImplementedError

    def as_column(self, ids: Rows) -> Activation:
        if self._vocab_size >= MOST_EXACT:
            raise UnsupportedError(f"hashes of {self._vocab_size} tokens are not supported")
        return self._record("as_column", (), ids, 1)

    def embed_hashed(self, weight: Weight, tokens: Activation, hashing: Hashing) -> Activation:
        rows, columns = self._matrix(weight)
        if rows < hashing.first + hashing.size:
            raise ModelError(f"tensor {weight.name} has {rows} rows, of which {hashing.first + hashing.size} are used")
        if tokens.columns < len(hashing.factors):
            raise ModelError(f"hashes of {len(hashing.factors)} tokens, of {tokens.columns} that are known")
        return self._record("embed_hashed", (tokens,), tokens.rows, columns, weight=weight, hashing=hashing)
