"""Encode with GPTQ, where later weights of a row compensate for the rounding errors of earlier ones.

Sources: GPTQ (Frantar et al. 2022, arXiv 2210.17323), LDLQ (Chee et al. 2023, arXiv 2307.13304).

The Hessian H is the mean of x x^T over inputs x of the matrix (their second moments). Encoding a row w as q costs (w -
q) H (w - q)^T. With H = M M^T, M upper triangular, that is

    the sum over columns j of M[j, j]^2 (t[j] - q[j])^2
    with the target t[j] = w[j] + the sum over k < j of (w[k] - q[k]) M[k, j] / M[j, j]

which is known when column j is reached.

Columns are processed 256 at a time (a span). The format's usual search finds the scales of a span, once, for its
targets at that point. Then codes are chosen one by one, columns with the largest inputs first ("act-order"), so that
many other columns can still compensate for their errors. Afterwards coordinate descent changes single codes where that
lowers the cost. In codebook formats, where a code names several weights, only later spans compensate.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from localllm.quant.block_codes import FEEDBACK_FORMATS, FormatCodes, dequantize, get_codes, read_scales, replace_codes
from localllm.quant.encode import encode
from localllm.quant.formats import BY_NAME
from localllm.quant.numba_cache import compile_cached, compile_inline

SPAN_COLUMNS = 256  # columns that are processed together
SWEEPS = 4  # of coordinate descent
THREAD_ROWS = 128  # rows that a thread encodes at a time
TINY = np.finfo(np.float32).tiny
MIN_DIAGONAL = 1e-6  # times the mean of the diagonal, added to it, because columns without inputs would make M singular


def shrink_correlations(moments: np.ndarray, damping: float) -> np.ndarray:
    """Return moments, [n, n], with their correlations reduced, as a new float32 array.

    damping: 0 leaves the correlations as measured, 1 removes them. The mean of the diagonal becomes 1, unless it is 0.
    """
    diagonal = np.diagonal(moments).astype(np.float64)
    mean = float(diagonal.mean())
    mean = mean if mean > TINY else 1.0
    hessian = np.multiply(moments, (1 - damping) / mean, dtype=np.float32)
    np.einsum("ii->i", hessian)[:] = diagonal / mean + (MIN_DIAGONAL if diagonal.any() else 1)
    return hessian


def compute_cost(errors: np.ndarray, moments: np.ndarray) -> float:
    """Return the mean squared error of a matrix's outputs, from errors of its weights, float32 [rows, columns]."""
    return float(np.einsum("ij,ij->", errors @ moments.astype(np.float32, copy=False), errors, dtype=np.float64))


def list_spans(columns: int) -> list[slice]:
    return [slice(first, min(first + SPAN_COLUMNS, columns)) for first in range(0, columns, SPAN_COLUMNS)]


def order_columns(importance: np.ndarray) -> np.ndarray:
    """Return the columns in the order in which they are processed: by span, then by falling importance."""
    return np.concatenate(
        [part.start + np.argsort(-importance[part], kind="stable") for part in list_spans(len(importance))]
    )


def factorize(m: np.ndarray, threads: int) -> None:
    """Factor a positive definite matrix m = M M^T, float32 [n, n], into an upper triangular M, which replaces m.

    It works span by span, the last one first, which takes one copy less than LAPACK, uses all threads, and gives the
    same result for any number of threads.
    """
    with ThreadPoolExecutor(threads) as pool:
        for part in reversed(list_spans(len(m))):
            later, fixed = slice(part.stop, len(m)), m[part, part.stop :].T
            last = (m[part, part] - m[part, later] @ fixed).astype(np.float64)
            root = np.linalg.cholesky(last[::-1, ::-1])[::-1, ::-1]
            inverse = np.linalg.inv(root).T.astype(np.float32)

            def update_rows(rows: slice, part=part, later=later, fixed=fixed, inverse=inverse) -> None:
                m[rows, part] = (m[rows, part] - m[rows, later] @ fixed) @ inverse

            list(pool.map(update_rows, list_spans(part.start)))
            m[part, part], m[later, part] = root, 0


class GptqEncoder:
    """A GPTQ encoder for matrices with the same inputs. The bytes do not depend on the number of threads."""

    def __init__(self, moments: np.ndarray, damping: float, threads: int = 1):
        """Factor the moments, float32 or float64 [columns, columns].

        damping: see `shrink_correlations`; with 1 there is no error feedback.
        """
        self._threads, self._is_plain, self._is_known = threads, damping >= 1, bool(np.diagonal(moments).any())
        hessian = shrink_correlations(moments, damping)
        self._importance = np.diagonal(hessian).copy()
        if self._is_plain:
            return
        order = order_columns(self._importance)
        m, place, parts = hessian[np.ix_(order, order)], np.argsort(order), list_spans(len(hessian))
        factorize(m, threads)
        diagonal = np.diagonal(m).copy()
        self._order, self._alone = order, (diagonal**2)[place]
        self._vector_importance = np.concatenate([(m[part, part] ** 2).sum(axis=1) for part in parts])[place]
        for part in parts:  # permuted in place, because columns and rows move within their span only
            m[:, part] = m[:, place[part]] / diagonal[place[part]]
        for part in parts:
            m[part] = m[place[part]]
        self._unit = m  # [k, j]: M[k, j] / M[j, j], or 0 if j comes before k
        self._hessian = hessian

    def encode(self, name: str, weights: np.ndarray) -> np.ndarray:
        """Encode finite weights, float32 [rows, columns], to blocks, uint8 [rows, bytes]."""
        if self._is_plain:
            importance = self._importance if self._is_known else None
            return encode(name, weights, importance, self._threads)
        out = np.empty((len(weights), BY_NAME[name].row_bytes(weights.shape[1])), np.uint8)

        def encode_rows(first: int) -> None:
            self._encode(name, weights[first : first + THREAD_ROWS], out[first : first + THREAD_ROWS])

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(encode_rows, range(0, len(weights), THREAD_ROWS)))
        return out

    def _encode(self, name: str, weights: np.ndarray, out: np.ndarray) -> None:
        format, errors = BY_NAME[name], np.empty_like(weights)
        parts, codes = list_spans(weights.shape[1]), []
        for part in parts:
            before = slice(0, part.start)
            targets = weights[:, part] + errors[:, before] @ self._unit[before, part]
            # With one code per weight, later columns of the same span compensate, too.
            importance = (self._alone if name in FEEDBACK_FORMATS else self._vector_importance)[part]
            blocks = encode(name, targets, importance)
            out[:, format.row_bytes(part.start) : format.row_bytes(part.stop)] = blocks
            if name in FEEDBACK_FORMATS:
                span = CodedSpan(name, blocks, weights[:, part])
                span.choose_with_feedback(targets, self._unit[part, part], self._order[part] - part.start)
                codes.append(span)
                errors[:, part] = span.lost
            else:
                errors[:, part] = weights[:, part] - dequantize(name, blocks)
        for _ in range(SWEEPS):
            for part, span in zip(parts, codes, strict=False):  # `codes` is empty for codebook formats
                span.refine_codes(errors @ self._hessian[:, part], self._hessian[part, part])
                errors[:, part] = span.lost
        for part, span in zip(parts, codes, strict=False):
            span.write_codes(out[:, format.row_bytes(part.start) : format.row_bytes(part.stop)])


class CodedSpan:
    """A span of columns of a matrix, with its scales and codes.

    Attributes:
        lost: the errors of the weights, float32 [rows, columns].
    """

    def __init__(self, name: str, blocks: np.ndarray, weights: np.ndarray):
        """Read the scales of blocks, uint8 [rows, bytes], that encode weights, float32 [rows, columns]."""
        self._name, self._table = name, get_codes(name)
        self._weights = np.ascontiguousarray(weights)
        rows = len(weights)
        scales, offsets = read_scales(name, blocks.reshape(-1, BY_NAME[name].bytes))
        self._scales, self._offsets = scales.reshape(rows, -1), offsets.reshape(rows, -1)
        self._codes, self.lost = np.zeros(weights.shape, np.uint8), np.empty(weights.shape, np.float32)

    def choose_with_feedback(self, targets: np.ndarray, unit: np.ndarray, order: np.ndarray) -> None:
        """Choose codes one by one, with error feedback.

        targets: float32 [rows, columns]. unit: float32 [columns, columns], the share of a column's error that is added
        to each later target. order: int [columns].
        """
        choose_codes(np.ascontiguousarray(unit), order, *self._collect_arrays(targets))

    def refine_codes(self, slopes: np.ndarray, hessian: np.ndarray) -> None:
        """Improve codes by coordinate descent.

        slopes: float32 [rows, columns], the errors of all columns @ moments. hessian: moments of this span's columns.
        """
        improve_codes(np.ascontiguousarray(hessian), *self._collect_arrays(slopes))

    def write_codes(self, blocks: np.ndarray) -> None:
        """Write the codes into blocks, uint8 [rows, bytes]."""
        whole = np.ascontiguousarray(blocks).reshape(-1, BY_NAME[self._name].bytes)
        replace_codes(self._name, whole, self._table.stored[self._codes].reshape(len(whole), -1))
        blocks[:] = whole.reshape(blocks.shape)

    def _collect_arrays(self, moved: np.ndarray) -> tuple[FormatCodes, "SpanArrays"]:
        return self._table, SpanArrays(moved, self._weights, self._scales, self._offsets, self._codes, self.lost)


class SpanArrays(NamedTuple):
    """The arrays of a span, as compiled functions take them.

    Shapes: [rows, columns], scales and offsets [rows, groups]. moved: targets or slopes.
    """

    moved: np.ndarray
    weights: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray
    codes: np.ndarray  # uint8, output
    lost: np.ndarray  # errors, output


@compile_inline
def find_nearest_level(table, x):
    """Return the index of the level nearest to x."""
    last = table.levels.size - 1
    if table.is_even:
        return int(min(max(np.rint(x - table.levels[0]), np.float32(0)), np.float32(last)))
    index = 0
    for k in range(last):
        index += x > (table.levels[k] + table.levels[k + 1]) * np.float32(0.5)
    return index


@compile_cached
def choose_codes(unit, order, table, of):
    """Choose the codes of each row in order, each nearest to its target, and add its error to later targets."""
    columns = of.weights.shape[1]
    target = np.empty(columns, np.float32)
    for row in range(of.weights.shape[0]):
        target[:] = of.moved[row]
        for j in order:
            scale, offset = of.scales[row, j // table.group], of.offsets[row, j // table.group]
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            code = find_nearest_level(table, (target[j] - offset) * inverse)
            error = of.weights[row, j] - (table.levels[code] * scale + offset)
            of.codes[row, j], of.lost[row, j] = code, error
            for k in range(columns):
                target[k] += error * unit[j, k]


@compile_cached
def improve_codes(hessian, table, of):
    """Replace the codes of each row, one after another, by the code with the least cost while all others stay."""
    columns = of.weights.shape[1]
    slope = np.empty(columns, np.float32)
    for row in range(of.weights.shape[0]):
        slope[:] = of.moved[row]
        for j in range(columns):
            scale, offset = of.scales[row, j // table.group], of.offsets[row, j // table.group]
            if scale == 0 or hessian[j, j] <= 0:
                continue
            best = of.weights[row, j] - of.lost[row, j] + slope[j] / hessian[j, j]
            code = find_nearest_level(table, (best - offset) / scale)
            if code == of.codes[row, j]:
                continue
            error = of.weights[row, j] - (table.levels[code] * scale + offset)
            change = error - of.lost[row, j]
            of.codes[row, j], of.lost[row, j] = code, error
            for k in range(columns):
                slope[k] += change * hessian[j, k]
