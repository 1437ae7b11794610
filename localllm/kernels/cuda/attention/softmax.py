"""Online softmax of the scores that one thread has in its registers (Milakov and Gimelshein 2018).

Powers are of 2, for which the scores are scaled by log2(e).
"""

from localllm.kernels.cuda.attention.shared import larger
from localllm.kernels.cuda.device import device, exp2
from localllm.kernels.cuda.reductions import plus
from localllm.kernels.cuda.unrolled import folded, unrolled


def make_softmax(scores, rows, row_of, over_lanes):
    """Make a function of a piece's scores, and of each row's maximum and sum before it.

    It returns the new maximum and sum, the factor for the rows' results so far, and the piece's weights, all in
    float32.

    row_of: the row of score i.  over_lanes: reduces the row maxima of single lanes over the lanes that share a row.
    """
    of_rows = tuple(tuple(i for i in range(scores) if row_of(i) == one) for one in range(rows))
    row = device(row_of)
    largest, total = folded(of_rows, lambda x, y: larger(x, y)), folded(of_rows, lambda x, y: plus(x, y))
    larger_of_both = unrolled(rows, lambda i, x, y: larger(x, y))
    fading = unrolled(rows, lambda i, before, after: exp2(before - after))
    powers = unrolled(scores, lambda i, x, tops: exp2(x - tops[row(i)]))
    with_more = unrolled(rows, lambda i, before, fade, more: before * fade + more)

    @device
    def softmax(x, tops, sums):
        after = larger_of_both(tops, over_lanes(largest(x)))
        fade, weights = fading(tops, after), powers(x, after)
        return after, with_more(sums, fade, total(weights)), fade, weights

    return softmax
