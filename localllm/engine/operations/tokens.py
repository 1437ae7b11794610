"""Operations on a run's tokens: ids, hashes of ids, positions and token types."""

from typing import ClassVar

import numpy as np

from localllm.arch.verbs import Hashing
from localllm.arch.weights import Weight
from localllm.engine.lower.steps import Steps, Target
from localllm.engine.lower.tape import Buffer
from localllm.engine.operations.activation import WANTED, Activation, Rows
from localllm.engine.operations.computing import Array, Computing
from localllm.engine.operations.operation import MatrixOperation, Operation, operation
from localllm.engine.operations.recording import Recording
from localllm.errors import ModelError, UnsupportedError

MOST_EXACT = 1 << 24  # up to here float32 has every whole number
POOLINGS = "mean", "cls", "last"  # in the order of the kernel's numbers


class GatherRows(MatrixOperation):
    """An operation that dequantizes rows of a matrix by their numbers."""

    def gather_rows(self, steps: Steps, target: Target, ids: Buffer | np.ndarray, reads: list[Buffer]) -> None:
        """Append the step; ids: numbers of rows, int64; reads: the buffer that holds them, if they are in one."""
        weight, output = self.weight, self.output
        x, (kind, row_bytes) = steps.new(output), target.layout_of(weight)
        arguments = {"weights": target.matrix(weight), "row_bytes": row_bytes, "columns": output.columns}
        steps.row_step(f"embed-{kind}", output.rows, arguments | {"ids": ids, "x": x, "stride": x.stride}, reads, [x])


class Embed(GatherRows):
    """The embedding rows of tokens."""

    VERB = "embed"
    NUMBERS: ClassVar[str] = "ids"  # the array of a run's header that has the numbers of rows

    def lower(self, steps: Steps, target: Target) -> None:
        sources = [steps.buffers[x] for x in self.inputs]
        self.gather_rows(steps, target, sources[0] if sources else getattr(steps.header, self.NUMBERS), sources)


class EmbedPositions(Embed):
    """The rows of a table of position embeddings."""

    VERB = "embed_positions"
    NUMBERS = "positions"


class EmbedKinds(Embed):
    """The embeddings of token types."""

    VERB = "embed_kinds"
    NUMBERS = "kinds"


@operation
class ReplaceIds(Operation):
    """Numbers that replace token ids, by a table, int64 [vocab]."""

    VERB = "replace_ids"

    table: np.ndarray

    def lower(self, steps: Steps, target: Target) -> None:
        y = steps.buffers[self.output] = Buffer(steps.target.tokens, 8)
        arguments = {"ids": steps.header.ids, "table": self.table, "y": y}
        steps.row_step("replace_ids", self.output.rows, arguments, [], [y])


class AsColumn(Operation):
    """A column with each token's id plus 1, as float32."""

    VERB = "as_column"


@operation
class EmbedHashed(GatherRows):
    """The row of a table for each token's n-gram, by a hash of the ids of the token and those before it."""

    VERB = "embed_hashed"

    hashing: Hashing

    def lower(self, steps: Steps, target: Target) -> None:
        (x,), hashing = self.inputs, self.hashing
        source, ids = steps.buffers[x], Buffer(steps.target.tokens, 8)
        factors = np.array(hashing.factors, np.int64)
        arguments = {"x": source, "stride": source.stride, "factors": factors, "length": len(factors), "y": ids}
        arguments |= {"size": hashing.size, "first": hashing.first, "end": hashing.end}
        steps.row_step("hash", x.rows, arguments, [source], [ids])
        self.gather_rows(steps, target, ids, [ids])


class Select(Operation):
    """The rows of tokens whose logits are requested."""

    VERB = "select"


@operation
class Pool(Operation):
    """One row for each text: the mean of its rows, the first ("cls") or the last."""

    VERB = "pool"

    kind: str

    def argument(self, name: str) -> int:
        return POOLINGS.index(self.kind)


class TokenVerbs(Recording):
    """The recorder's implementation of the verbs of tokens."""

    def embed(self, weight: Weight, ids: Rows | Activation) -> Activation:
        rows, columns = self._matrix(weight)
        if rows != self._vocab_size:
            raise ModelError(f"tensor {weight.name} has {rows} rows for {self._vocab_size} tokens")
        inputs, of_tokens = ((ids,), ids.rows) if isinstance(ids, Activation) else ((), ids)
        return self._add(Embed(inputs, Activation(of_tokens, columns), weight))

    def replace_ids(self, ids: Rows, table: np.ndarray) -> Activation:
        if table.shape != (self._vocab_size,):
            raise ModelError(f"the table has {table.size} ids, the vocabulary {self._vocab_size} tokens")
        return self._add(ReplaceIds((), Activation(ids, 2), np.ascontiguousarray(table, np.int64)))

    def embed_positions(self, weight: Weight, positions: Rows) -> Activation:
        rows, columns = self._matrix(weight)
        if rows < self._context:
            raise ModelError(f"the model has only {rows} positions, too few for a context of {self._context}")
        if columns != self._width:
            raise ModelError(f"tensor {weight.name} should have {self._width} columns, has {columns}")
        return self._add(EmbedPositions((), Activation(positions, columns), weight))

    def embed_kinds(self, weight: Weight, kinds: Rows | Activation) -> Activation:
        _, columns = self._matrix(weight)
        inputs, of_tokens = ((kinds,), kinds.rows) if isinstance(kinds, Activation) else ((), kinds)
        return self._add(EmbedKinds(inputs, Activation(of_tokens, columns), weight))

    def as_column(self, ids: Rows) -> Activation:
        if self._vocab_size >= MOST_EXACT:
            raise UnsupportedError(f"n-gram hashes are not supported for a vocabulary of {self._vocab_size} tokens")
        return self._add(AsColumn((), Activation(ids, 1)))

    def embed_hashed(self, weight: Weight, tokens: Activation, hashing: Hashing) -> Activation:
        rows, columns = self._matrix(weight)
        if rows < hashing.first + hashing.size:
            raise ModelError(f"tensor {weight.name} has {rows} rows; the hashes need {hashing.first + hashing.size}")
        if tokens.columns < len(hashing.factors):
            raise ModelError(f"hashes of {len(hashing.factors)} tokens, but only {tokens.columns} is known")
        return self._add(EmbedHashed((tokens,), Activation(tokens.rows, columns), weight, hashing))

    def select(self, x: Activation, rows: Rows) -> Activation:
        return self._add(Select((x,), Activation(rows, x.columns)))

    def pool(self, x: Activation, kind: str) -> Activation:
        return self._add(Pool((x,), Activation(WANTED, x.columns), kind))


class TokenReference(Computing):
    """The NumPy reference of the verbs of tokens."""

    def embed(self, weight: Weight, ids: Array) -> Array:
        return self.matrix(weight)[ids]

    def replace_ids(self, ids: Array, table: np.ndarray) -> Array:
        return table[ids]

    def embed_positions(self, weight: Weight, positions: Array) -> Array:
        return self.matrix(weight)[positions]

    def embed_kinds(self, weight: Weight, kinds: Array) -> Array:
        return self.matrix(weight)[kinds]

    def as_column(self, ids: Array) -> Array:
        return (ids[:, None] + 1).astype(np.float32)

    def embed_hashed(self, weight: Weight, tokens: Array, hashing: Hashing) -> Array:
        ids = tokens[:, : len(hashing.factors)].astype(np.int64) - 1
        for place in range(1, ids.shape[1]):
            is_cut = (ids[:, place] < 0) | ((ids[:, place - 1] == hashing.end) & (place > 1))
            ids[is_cut, place] = hashing.end
        mixed = np.bitwise_xor.reduce(ids * np.array(hashing.factors), axis=1)
        return self.matrix(weight)[mixed % hashing.size + hashing.first]

    def select(self, x: Array, rows: Array) -> Array:
        return x[rows]

    def pool(self, x: Array, kind: str) -> Array:
        texts = [x[rows] for _, rows in self._rows()]
        pooled = {"mean": lambda text: text.mean(axis=0, dtype=np.float64), "cls": lambda text: text[0]}
        return np.stack([pooled.get(kind, lambda text: text[-1])(text) for text in texts]).astype(np.float32)
