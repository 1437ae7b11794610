"""Look up embeddings by token ids, positions and types; exchange rows with the caller."""

from collections.abc import Callable
from functools import reduce
from typing import ClassVar, NamedTuple

import numpy as np

from localllm.arch.verbs import NgramHash
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import ALL, WANTED, Activation, RowSet
from localllm.engine.lower.steps import StepBuilder, Target, build_output_arguments
from localllm.engine.lower.tape import Buffer
from localllm.engine.operations.builders import Array, RecorderBase, ReferenceBase
from localllm.engine.operations.operation import MatrixOperation, Operation, operation
from localllm.errors import ModelError, UnsupportedError

MAX_EXACT_FLOAT = 1 << 24  # up to this value float32 represents every integer
POOLINGS = "mean", "cls", "last"  # in the order of the kernel's constants


class GatherRows(MatrixOperation):
    """Rows of a matrix, dequantized by their indices."""

    def append_gather(self, steps: StepBuilder, target: Target, ids: Buffer | np.ndarray, reads: list[Buffer]) -> None:
        """Append the step.

        ids: indices of rows, int64. reads: the buffer that holds them, if they are in one.
        """
        weight, output = self.weight, self.output
        x, (kind, row_bytes) = steps.allocate(output), target.get_layout(weight)
        arguments = {"weights": target.matrix(weight), "row_bytes": row_bytes, "columns": output.columns}
        steps.append_row_step(
            f"embed-{kind}", output.rows, arguments | {"ids": ids, "x": x, "stride": x.stride}, reads, [x]
        )


class EmbedRows(GatherRows):
    """Rows by indices from a run's header, or from an earlier operation."""

    INDEX_FIELD: ClassVar[str] = "ids"  # the header's array of row indices

    def lower(self, steps: StepBuilder, target: Target) -> None:
        sources = [steps.buffers[x] for x in self.inputs]
        self.append_gather(steps, target, sources[0] if sources else getattr(steps.header, self.INDEX_FIELD), sources)


class Embed(EmbedRows):
    """The embedding rows of tokens."""

    VERB = "embed"

    @staticmethod
    def record(recorder: RecorderBase, weight: Weight, ids: RowSet | Activation) -> Activation:
        rows, columns = recorder._matrix(weight)
        if rows != recorder._vocab_size:
            raise ModelError(
                f"tensor {weight.name} must have {recorder._vocab_size} rows, one per token (found {rows})"
            )
        inputs, of_tokens = ((ids,), ids.rows) if isinstance(ids, Activation) else ((), ids)
        return recorder._add(Embed(inputs, Activation(of_tokens, columns), weight))

    @staticmethod
    def reference(run: ReferenceBase, weight: Weight, ids: Array) -> Array:
        return run.matrix(weight)[ids]


class EmbedPositions(EmbedRows):
    """The rows of a table of position embeddings."""

    VERB = "embed_positions"
    INDEX_FIELD = "positions"

    @staticmethod
    def record(recorder: RecorderBase, weight: Weight, positions: RowSet) -> Activation:
        rows, columns = recorder._matrix(weight)
        if rows < recorder._context:
            raise ModelError(
                f"the context must be at most {rows}, the positions of the model (found {recorder._context})"
            )
        if columns != recorder._width:
            raise ModelError(f"tensor {weight.name} must have {recorder._width} columns (found {columns})")
        return recorder._add(EmbedPositions((), Activation(positions, columns), weight))

    @staticmethod
    def reference(run: ReferenceBase, weight: Weight, positions: Array) -> Array:
        return run.matrix(weight)[positions]


class EmbedTokenTypes(EmbedRows):
    """The embeddings of token types."""

    VERB = "embed_kinds"
    INDEX_FIELD = "kinds"

    @staticmethod
    def record(recorder: RecorderBase, weight: Weight, kinds: RowSet | Activation) -> Activation:
        _, columns = recorder._matrix(weight)
        inputs, of_tokens = ((kinds,), kinds.rows) if isinstance(kinds, Activation) else ((), kinds)
        return recorder._add(EmbedTokenTypes(inputs, Activation(of_tokens, columns), weight))

    @staticmethod
    def reference(run: ReferenceBase, weight: Weight, kinds: Array) -> Array:
        return run.matrix(weight)[kinds]


@operation
class ReplaceIds(Operation):
    """Ids that replace token ids, by a table, int64 [vocab]."""

    VERB = "replace_ids"

    table: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        y = steps.buffers[self.output] = Buffer(steps.target.tokens, 8)
        arguments = {"ids": steps.header.ids, "table": self.table, "y": y}
        steps.append_row_step("replace_ids", self.output.rows, arguments, [], [y])

    @staticmethod
    def record(recorder: RecorderBase, ids: RowSet, table: np.ndarray) -> Activation:
        if table.shape != (recorder._vocab_size,):
            raise ModelError(f"the table must have {recorder._vocab_size} ids, one per token (found {table.size})")
        return recorder._add(ReplaceIds((), Activation(ids, 2), np.ascontiguousarray(table, np.int64)))

    @staticmethod
    def reference(run: ReferenceBase, ids: Array, table: np.ndarray) -> Array:
        return table[ids]


class IdsToColumn(Operation):
    """A column with each token's id plus 1, as float32."""

    VERB = "as_column"

    @staticmethod
    def record(recorder: RecorderBase, ids: RowSet) -> Activation:
        if recorder._vocab_size >= MAX_EXACT_FLOAT:
            raise UnsupportedError(f"n-gram hashes are not supported for a vocabulary of {recorder._vocab_size} tokens")
        return recorder._add(IdsToColumn((), Activation(ids, 1)))

    @staticmethod
    def reference(run: ReferenceBase, ids: Array) -> Array:
        return (ids[:, None] + 1).astype(np.float32)


@operation
class EmbedHashed(GatherRows):
    """The row of a table for each token's n-gram, by a hash of the ids of the token and its predecessors."""

    VERB = "embed_hashed"

    hashing: NgramHash

    def lower(self, steps: StepBuilder, target: Target) -> None:
        (x,), hashing = self.inputs, self.hashing
        source, ids = steps.buffers[x], Buffer(steps.target.tokens, 8)
        factors = np.array(hashing.factors, np.int64)
        arguments = {"x": source, "stride": source.stride, "factors": factors, "length": len(factors), "y": ids}
        arguments |= {"size": hashing.size, "first": hashing.first, "end": hashing.end}
        steps.append_row_step("hash", x.rows, arguments, [source], [ids])
        self.append_gather(steps, target, ids, [ids])

    @staticmethod
    def record(recorder: RecorderBase, weight: Weight, tokens: Activation, hashing: NgramHash) -> Activation:
        rows, columns = recorder._matrix(weight)
        if rows < hashing.first + hashing.size:
            raise ModelError(f"tensor {weight.name} must have {hashing.first + hashing.size} rows (found {rows})")
        if tokens.columns < len(hashing.factors):
            raise ModelError(f"hashes of {len(hashing.factors)} tokens, but only {tokens.columns} is known")
        return recorder._add(EmbedHashed((tokens,), Activation(tokens.rows, columns), weight, hashing))

    @staticmethod
    def reference(run: ReferenceBase, weight: Weight, tokens: Array, hashing: NgramHash) -> Array:
        ids = tokens[:, : len(hashing.factors)].astype(np.int64) - 1
        for place in range(1, ids.shape[1]):
            is_cut = (ids[:, place] < 0) | ((ids[:, place - 1] == hashing.end) & (place > 1))
            ids[is_cut, place] = hashing.end
        mixed = np.bitwise_xor.reduce(ids * np.array(hashing.factors), axis=1)
        return run.matrix(weight)[mixed % hashing.size + hashing.first]


class Select(Operation):
    """The rows of tokens whose logits are requested."""

    VERB = "select"

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, rows: RowSet) -> Activation:
        return recorder._add(Select((x,), Activation(rows, x.columns)))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, rows: Array) -> Array:
        return x[rows]


@operation
class Pool(Operation):
    """One row for each input: the mean of its rows, the first ("cls") or the last."""

    VERB = "pool"

    kind: str

    def get_argument(self, name: str) -> int:
        return POOLINGS.index(self.kind)

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, kind: str) -> Activation:
        return recorder._add(Pool((x,), Activation(WANTED, x.columns), kind))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, kind: str) -> Array:
        texts = [x[rows] for _, rows in run._iterate_rows()]
        pooled = {"mean": lambda text: text.mean(axis=0, dtype=np.float64), "cls": lambda text: text[0]}
        return np.stack([pooled.get(kind, lambda text: text[-1])(text) for text in texts]).astype(np.float32)


class HiddenStateTap(NamedTuple):
    """The hidden states that are exported to a draft head.

    Attributes:
        memory: the buffer that they are written to, float32 [BATCH, columns or more].
        layers: the layers whose inputs are exported, concatenated; empty: the model's last hidden state.
    """

    memory: np.ndarray
    layers: tuple[int, ...] = ()


@operation
class ExternalInput(Operation):
    """Rows that the caller has written before the run, float32 [BATCH, columns or more]."""

    VERB = "external_input"

    memory: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        rows, x, y = self.memory, self.output, steps.allocate(self.output)
        arguments = {"x": rows, "x_stride": rows.strides[0], "first": 0, "groups": 1, "period": x.columns}
        steps.append_row_step("slice_columns", x.rows, arguments | build_output_arguments(x, y), [], [y])

    @staticmethod
    def record(recorder: RecorderBase, rows: np.ndarray, columns: int) -> Activation:
        """Record rows that the caller writes before each run, float32 [BATCH, columns or more]."""
        return recorder._add(ExternalInput((), Activation(ALL, columns), rows))


@operation
class ExportHidden(Operation):
    """Rows that are written to the caller's buffer."""

    VERB = "export_hidden"

    memory: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        steps.export_activation(self.inputs[0], self.memory)

    @staticmethod
    def record(recorder: RecorderBase, x: Activation) -> Activation:
        assert recorder._tap is not None
        recorder._add(ExportHidden((x,), Activation(ALL, x.columns), recorder._tap.memory))
        return x

    @staticmethod
    def reference(run: "HiddenStateReference", x: Array) -> Array:
        run.last_hidden = x
        return x


class HiddenStateVerbs(RecorderBase):
    """The recorder's verbs of hidden states.

    Attributes:
        begins: image embeddings can replace tokens.
        reveals: the model's last hidden state is exported.
    """

    _tap: HiddenStateTap | None = None
    begins = reveals = False

    def embed_inputs(self, embedded: Callable[[], Activation], parts: int = 1) -> Activation:
        self.begins = True
        return embedded()

    def add_deepstack(self, x: Activation, part: int) -> Activation:
        return x

    def tap_layer_input(self, x: Activation, layer: int) -> Activation:
        if self._tap and layer in self._tap.layers:
            self._entered[layer] = x
            if len(self._entered) == len(set(self._tap.layers)):
                first, *rest = (self._entered[layer] for layer in self._tap.layers)
                self.export_hidden(reduce(lambda some, second: self.concat_heads(some, second, 1), rest, first))
        return x

    def tap(self, hidden_state_tap: HiddenStateTap | None) -> None:
        self._tap, self._entered = hidden_state_tap, dict[int, Activation]()
        self.reveals = hidden_state_tap is not None and not hidden_state_tap.layers


class HiddenStateReference(ReferenceBase):
    """The verbs of hidden states in NumPy.

    Attributes:
        layer_inputs: inputs of layers, by layer; the caller sets the keys that it wants.
        last_hidden: the last hidden state.
    """

    reveals = False
    last_hidden: Array
    layer_inputs: dict[int, Array]
    _parts: list[Array] | None

    def embed_inputs(self, embedded: Callable[[], Array], parts: int = 1) -> Array:
        """Return an image's rows if the run is over an image, otherwise the tokens' embeddings."""
        (image,) = {span.seen for span in self._spans}
        self._parts = None if image is None else np.split(image.select_rows(self.ids), parts, axis=1)
        return embedded() if self._parts is None else self._parts[0]

    def add_deepstack(self, x: Array, part: int) -> Array:
        return x if self._parts is None else x + self._parts[part]

    def tap_layer_input(self, x: Array, layer: int) -> Array:
        if layer in self.layer_inputs:
            self.layer_inputs[layer] = x
        hooked = [(span, rows) for span, rows in self._iterate_rows() if span.hook and layer in span.hook.layers]
        x = x.copy() if hooked else x
        for span, rows in hooked:
            x[rows] = span.hook.change(x[rows], layer, span.position)
        return x
