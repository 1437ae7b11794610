"""Sums and maxima over a warp or a block."""

from numba import cuda, float32

from localllm.kernels.cuda.device import WARP, device, from_lane_xor, lane


@device
def plus(x, y):
    """Return x + y."""
    return x + y


@device
def larger_or_nan(x, y):
    """Return the larger number; NaN if one of them is NaN."""
    return y if y > x or y != y else x


def make_over_warp(two):
    """Make a function that reduces a float32 x of each lane of a warp to one number, which all lanes get.

    two: combines two numbers.
    """

    @device
    def over_warp(x):
        mask = WARP // 2
        while mask > 0:
            x = two(x, from_lane_xor(x, mask))
            mask //= 2
        return x

    return over_warp


def make_over_block(two):
    """Make a function that reduces a float32 x of each thread of a block to one number, which all threads get.

    two: combines two numbers. All threads of the block must call the function.
    """
    over_warp = make_over_warp(two)

    @device
    def over_block(x):
        of_warps = cuda.shared.array(32, float32)
        x = over_warp(x)
        cuda.syncthreads()  # an earlier result has been read
        if lane() == 0:
            of_warps[cuda.threadIdx.x // WARP] = x
        cuda.syncthreads()
        result = of_warps[0]
        for warp in range(1, cuda.blockDim.x // WARP):
            result = two(result, of_warps[warp])
        return result

    return over_block


warp_sum, warp_max = make_over_warp(plus), make_over_warp(larger_or_nan)
block_sum, block_max = make_over_block(plus), make_over_block(larger_or_nan)
