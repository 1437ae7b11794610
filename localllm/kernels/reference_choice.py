"""The verbs that choose which keys tokens see, in plain NumPy: a part of localllm.kernels.reference."""

from collections.abc import Callable, Sequence

import numpy as np


class ChoiceReference:
    """What a Reference does to choose keys. Activations are float32 [tokens, columns]."""

    positions: np.ndarray
    _spans: Sequence
    _ends: np.ndarray
    _context: int

    def choose(self, q, k, weights, index, count, block=1):
        def scores(q, keys, rows):
            products = np.maximum(np.einsum("thd,kd->thk", q, keys, optimize=True), 0)
            return (products.sum(1) if weights is None else np.einsum("thk,th->tk", products, weights[rows]))[:, None]

        def of_blocks(scores):
            return scores[:, block - 1 :: block]

        return self._chosen(q, k, index, scores, of_blocks, 1, count, block, 0)

    def choose_blocks(self, q, k, index, count, block, local):
        def scores(q, keys, rows):
            return np.einsum("thd,kd->thk", q, keys, optimize=True)

        def of_blocks(scores):
            numbers = np.where(np.isfinite(scores), scores, np.nan)
            padded = np.pad(numbers, ((0, 0), (0, -scores.shape[1] % block)), constant_values=-np.inf)
            return padded.reshape(len(scores), -1, block).max(axis=2)

        return self._chosen(q, k, index, scores, of_blocks, q.shape[1] // index.key_dim, count, block, local)

    def _chosen(self, q, k, index, scores: Callable, of_blocks: Callable, groups, count, block, local):
        """Bits of each group; scores(queries, keys, rows of the run) [tokens, groups, keys] become those of blocks."""
        chosen = np.zeros((len(q), groups, -(-self._context // 32) * 32), bool)
        for span, end in zip(self._spans, self._ends, strict=True):
            rows = slice(end - len(span.ids), end)
            (keys,) = span.store.keep(index, span.position, k[rows, None])
            made = scores(q[rows].reshape(len(span.ids), -1, index.key_dim), keys[:, 0], rows)
            for token, position in enumerate(self.positions[rows]):
                seen = made[token, :, : position + 1]
                for group, best in enumerate(of_blocks(seen).copy()):
                    if len(best) <= count:
                        chosen[rows][token, group, : position + 1] = True
                    elif np.isfinite(best).all():
                        best[len(best) - local :] = np.inf
                        blocks = np.isin(np.arange(position + 1) // block, largest(best[None], count)[0])
                        blocks |= np.arange(position + 1) // block >= len(best)
                        chosen[rows][token, group, : position + 1] = blocks
        return np.packbits(chosen.reshape(len(q), -1), axis=1, bitorder="little").view(np.uint32)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """The places of the largest values of each row, int64 [rows, count]; of equal ones the first."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def unpacked(words: np.ndarray, count: int) -> np.ndarray:
    """The first bits of rows of numbers, bool [rows, count]."""
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :count].astype(bool)
