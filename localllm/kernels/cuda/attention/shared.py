"""Functions and constants of both attention kernels.

These are for few tokens (attend_few.py) and for many (attend_many.py). The online softmax (Milakov and Gimelshein 2018)
is applied to scores that a thread has in its registers.
"""

import math

from numba import float32

from localllm.kernels.cuda.gpu import BLOCK, WARP, add, device, exp2, load_from_lane, load_i64
from localllm.kernels.cuda.unrolled import fold, unroll
from localllm.kernels.table import SEQUENCE

WARPS = min(4, BLOCK // WARP)  # warps of a block
THREADS = WARPS * WARP
LOWEST, MINUS_INFINITY, ZERO, ONE = float32(-1e30), float32(-math.inf), float32(0), float32(1)
NAN = float32(math.nan)
LOG2_E = float32(math.log2(math.e))
SEQUENCE_BYTES = 8 * len(SEQUENCE)


@device
def find_first_visible(position, window, chunked):
    """Return the position of the first key that a token sees.

    window: 0 if there is no window.
    """
    if window == 0:
        return 0
    return position // window * window if chunked == 1 else max(position + 1 - window, 0)


@device
def find_last_visible(position, lookahead, sequence):
    """Return the position of the last key that a token sees.

    lookahead: the maximum number of later tokens that it sees; sequence: address of its SEQUENCE.
    """
    if lookahead == 0:
        return position
    return min(position + lookahead, load_i64(sequence + 8 * SEQUENCE.length) - 1)


def make_lane_reduction(count, first, end, combine):
    """Build a function that reduces each of `count` values over some lanes of a warp.

    combine: combines two values; first, end: powers of two. Lanes whose indices differ only in the bits from `first` to
    before `end` are combined.
    """

    def reduce_lanes(i, x):
        mask = first
        while mask < end:
            x = combine(x, load_from_lane(x, mask))
            mask *= 2
        return x

    return unroll(count, reduce_lanes)


@device
def max_or_first(x, y):
    """Return the larger value, or x if one of them is NaN."""
    return y if y > x else x


def make_softmax(scores, rows, row_of, over_lanes):
    """Build a function (scores, maxima, sums) -> (new maxima, new sums, fades, weights).

    All are tuples of float32. Maxima and sums are those of each row before and after this tile of keys; fades: the
    factors of the rows' results so far; weights: 2 ** (score - new maximum). row_of: the row of score i; over_lanes:
    reduces the rows' maxima over the lanes that share these rows.
    """
    of_rows = tuple(tuple(i for i in range(scores) if row_of(i) == one) for one in range(rows))
    row = device(row_of)
    largest, total = fold(of_rows, lambda x, y: max_or_first(x, y)), fold(of_rows, lambda x, y: add(x, y))
    larger_of_both = unroll(rows, lambda i, x, y: max_or_first(x, y))
    fading = unroll(rows, lambda i, before, after: exp2(before - after))
    powers = unroll(scores, lambda i, x, tops: exp2(x - tops[row(i)]))
    with_more = unroll(rows, lambda i, before, fade, more: before * fade + more)

    @device
    def softmax(x, tops, sums):
        after = larger_of_both(tops, over_lanes(largest(x)))
        fade, weights = fading(tops, after), powers(x, after)
        return after, with_more(sums, fade, total(weights)), fade, weights

    return softmax
