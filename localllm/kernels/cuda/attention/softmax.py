"""Online softmax of the scores that a thread has in its registers (Milakov and Gimelshein 2018)."""

from localllm.kernels.cuda.attention.shared import larger
from localllm.kernels.cuda.device import device, exp2
from localllm.kernels.cuda.reductions import plus
from localllm.kernels.cuda.unrolled import folded, unrolled


def make_softmax(scores, rows, row_of, over_lanes):
    """Make a function (scores, maxima, sums) -> (new maxima, new sums, fades, weights), all float32 tuples.

    Maxima and sums are those of each row before and after this piece of keys; fades: the factors of the rows' results
    so far; weights: 2 ** (score - new maximum). row_of: the row of score i; over_lanes: reduces the rows' maxima over
    the lanes that share these rows.
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
