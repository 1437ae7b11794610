"""Makes compiled functions that pack numbers into the bytes of a block, by its layout."""

from collections.abc import Callable

import numpy as np

from localllm.quant.layouts import Field, Fields, Places
from localllm.quant.numba_cache import inlined


def putter(fields: Fields, together: int = 1) -> Callable:
    """Make a function (out, first, i, number) that packs number first + i into the bytes of a block.

    The bytes must be zero before. first: a multiple of `together`; i: less than `together`. Then the compiler
    vectorizes loops over i. fields: the first holds the lowest bits of a number.
    """
    if len(fields) == 1:
        return put_places(fields[0]) if isinstance(fields[0], Places) else put_field(fields[0], together)
    low, high, bits = putter(fields[:1], together), putter(fields[1:], together), fields[0].bits

    @inlined
    def put(out, first, i, number):
        low(out, first, i, number)
        high(out, first, i, number >> bits)

    return put


def put_field(field: Field, together: int) -> Callable:
    """Make the function of `putter` for one field."""
    at, bits, run = field
    each, mask, across = 8 // bits, (1 << bits) - 1, 8 // bits * run

    @inlined
    def anywhere(out, first, i, number):
        n = first + i
        out[at + n // across * run + n % run] |= (number & mask) << n // run % each * bits

    @inlined
    def of_runs(out, first, i, number):
        start, shift = at + first // across * run + first % run, first // run % each * bits
        out[start + i] |= (number & mask) << shift

    return anywhere if run % together else of_runs


def put_places(field: Places) -> Callable:
    """Make the function of `putter` for a field that lists the place of each number."""
    bytes_, shifts = np.array(field.places, np.int64).T.copy()
    mask = (1 << field.bits) - 1

    @inlined
    def put(out, first, i, number):
        out[bytes_[first + i]] |= (number & mask) << shifts[first + i]

    return put


def put_group(fields: Fields) -> Callable:
    """Make a function (out, group, number) that packs a number stored per group."""
    put = putter(fields)
    return inlined(lambda out, group, number: put(out, group, 0, number))
