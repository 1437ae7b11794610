"""Select the keys that a token attends to, by the scores of an indexer."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from localllm.arch.layer_state import LatentState
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.steps import StepBuilder, append_cache_write, append_hadamard
from localllm.engine.lower.tape import Buffer
from localllm.engine.operations.builders import Array, RecorderBase, ReferenceBase, find_largest
from localllm.engine.operations.operation import StateOperation, operation
from localllm.errors import ModelError

Score = Callable[[Array, Array, slice], Array]


@operation
class SelectKeys(StateOperation):
    """The selection of keys that a token attends to, the same for all heads, as bits.

    The inputs are the indexer's queries, its keys, and weights of its heads if it has some.

    Attributes:
        most: number of keys to select, or of blocks of keys.  block: positions of a block.
        heads: heads of the indexer, or groups of heads.
    """

    VERB = "select_keys"
    KERNEL = "select_keys"

    state: LatentState
    most: int
    block: int
    heads: int

    def prepare(self, steps: StepBuilder) -> tuple[dict[str, object], list[Buffer], Buffer, str]:
        """Append the steps that store the indexer's new keys.

        Returns the arguments of the kernel that selects, the buffers that it reads, its output, and its name.
        """
        (q, k, *_), index = self.inputs, self.state
        side, block = steps.cache.get_sides(index)[0], index.find_rotation_sizes(steps.cache.kv_type)[0]
        steps.in_cache[index] = [append_cache_write(steps, k, append_hadamard(steps, k, block), side)]
        source, y = append_hadamard(steps, q, block), steps.allocate(self.output)
        arguments: dict[str, object] = {"positions": steps.header.positions, "owners": steps.header.owners}
        arguments |= {"sequences": steps.header.sequences, "q": source, "q_stride": source.stride}
        arguments |= {"keys": steps.cache.get_address(side), "key_bytes": side.token_bytes, "key_dim": index.key_dim}
        own_fields, reads = self.collect_arguments(steps)
        arguments |= {"y": y, "y_stride": y.stride, "most": self.most, "block": self.block} | own_fields
        return arguments, [source, *reads, *steps.in_cache[index]], y, f"{self.KERNEL}-{side.kind.upper()}"

    def collect_arguments(self, steps: StepBuilder) -> tuple[dict[str, object], list[Buffer]]:
        arguments: dict[str, object] = {"heads": self.heads}
        if weights := [steps.buffers[x] for x in self.inputs[2:]]:
            return arguments | {"weights": weights[0], "weights_stride": weights[0].stride}, weights
        return arguments | {"weights": np.ones(self.heads, np.float32), "weights_stride": 0}, []

    @staticmethod
    def record(
        recorder: RecorderBase, q: Activation, k: Activation, weights: Activation | None, index: LatentState,
        count: int,
        block: int = 1,
    ) -> Activation:  # fmt: skip
        heads = count_indexer_heads(q, k, index)
        if weights and weights.columns != heads:
            raise ModelError(
                f"layer {index.layer}: indexer queries and keys do not fit (found {q.columns} and {k.columns} columns)"
            )
        inputs, output = (q, k, *([weights] if weights else [])), Activation(q.rows, recorder._words)
        return recorder._add(SelectKeys(inputs, output, index, count, block, heads))

    @staticmethod
    def reference(
        run: ReferenceBase, q: Array, k: Array, weights: Array | None, index: LatentState, count: int, block: int = 1
    ) -> Array:
        def scores(q: Array, keys: Array, rows: slice) -> Array:
            products = np.maximum(np.einsum("thd,kd->thk", q, keys, optimize=True), 0)
            return (products.sum(1) if weights is None else np.einsum("thk,th->tk", products, weights[rows]))[:, None]

        def score_blocks(scores: Array) -> Array:
            return scores[:, block - 1 :: block]

        return select_bits(run, q, k, index, scores, score_blocks, SelectionLimits(count, block))


@operation
class SelectKeyBlocks(SelectKeys):
    """The selection of key blocks for each group of heads.

    local: number of the latest blocks that are always selected.
    """

    VERB = "select_key_blocks"
    KERNEL = "select_key_blocks"

    local: int

    def collect_arguments(self, steps: StepBuilder) -> tuple[dict[str, object], list[Buffer]]:
        arguments: dict[str, object] = {"local": self.local, "heads": self.heads}
        return arguments | {"choice_stride": 4 * self.output.columns // self.heads}, []

    @staticmethod
    def record(  # type: ignore[override]  # another verb
        recorder: RecorderBase, q: Activation, k: Activation, index: LatentState, count: int, block: int, local: int
    ) -> Activation:
        groups = count_indexer_heads(q, k, index)
        output = Activation(q.rows, groups * recorder._words)
        return recorder._add(SelectKeyBlocks((q, k), output, index, count, block, groups, local))

    @staticmethod
    def reference(  # type: ignore[override]  # another verb
        run: ReferenceBase, q: Array, k: Array, index: LatentState, count: int, block: int, local: int
    ) -> Array:
        def scores(q: Array, keys: Array, rows: slice) -> Array:
            return np.einsum("thd,kd->thk", q, keys, optimize=True)

        def score_blocks(scores: Array) -> Array:
            numbers = np.where(np.isfinite(scores), scores, np.nan)
            padded = np.pad(numbers, ((0, 0), (0, -scores.shape[1] % block)), constant_values=-np.inf)
            return padded.reshape(len(scores), -1, block).max(axis=2)

        selection = SelectionLimits(count, block, q.shape[1] // index.key_dim, local)
        return select_bits(run, q, k, index, scores, score_blocks, selection)


def count_indexer_heads(q: Activation, k: Activation, index: LatentState) -> int:
    """Return the number of heads in the queries. Raises ModelError for columns that do not fit."""
    heads, remainder = divmod(q.columns, index.key_dim)
    if k.columns != index.key_dim or remainder:
        raise ModelError(
            f"layer {index.layer}: indexer queries and keys do not fit (found {q.columns} and {k.columns} columns)"
        )
    return heads


class SelectionLimits(NamedTuple):
    """The numbers of key blocks to select, see SelectKeyBlocks."""

    most: int
    block: int
    groups: int = 1  # of heads
    local: int = 0


def unpack_bits(words: np.ndarray, count: int) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :count].astype(bool)


def select_bits(
    run: ReferenceBase, q: Array, k: Array, index: LatentState, scores: Score, score_blocks: Callable[[Array], Array],
    selection: SelectionLimits,
) -> Array:  # fmt: skip
    """Return a bit per key for each group, uint32 [tokens, words].

    scores(queries, keys, rows of the run): [tokens, groups, keys]. score_blocks: reduces the scores of keys to scores
    of blocks.
    """
    count, block, groups, local = selection
    selected = np.zeros((len(q), groups, -(-run._context // 32) * 32), bool)
    for span, rows in run._iterate_rows():
        (keys,) = span.store.keep(index, span.position, k[rows, None])
        key_scores = scores(q[rows].reshape(len(span.ids), -1, index.key_dim), keys[:, 0], rows)
        for token, position in enumerate(run.positions[rows]):
            visible = key_scores[token, :, : position + 1]
            for group, best in enumerate(score_blocks(visible).copy()):
                if len(best) <= count:
                    selected[rows][token, group, : position + 1] = True
                elif np.isfinite(best).all():
                    best[len(best) - local :] = np.inf
                    blocks = np.isin(np.arange(position + 1) // block, find_largest(best[None], count)[0])
                    blocks |= np.arange(position + 1) // block >= len(best)
                    selected[rows][token, group, : position + 1] = blocks
    return np.packbits(selected.reshape(len(q), -1), axis=1, bitorder="little").view(np.uint32)
