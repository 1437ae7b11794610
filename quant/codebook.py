"""Search codebooks for the i-quants, whose codes are indices of vectors of 4 or 8 weights in a grid.

256 weights share one d; a group of 16 or 32 of them has an odd integer, its multiple:

    weight = d * multiple * (grid[code] + shift) * sign

Given a group's scale, the search rounds the weights of each vector to the levels of the grid, which gives a point, and
compares only the NEIGHBOURS grid vectors nearest to that point. Given the chosen vectors v, the best scale is Σwxv /
Σwv², which reduces the error Σwx² by (Σwxv)² / Σwv². Codes and scale are fitted in turns, first for each group alone,
then for d and the multiples together.

Encoders pack the results into the fields of blocks. IQ2 and IQ3 store signs separately from codes. In IQ2_XXS, IQ2_XS
and IQ3_XXS every 8 weights have an even number of minus signs, so only 7 signs are stored. The codes of IQ1_S and IQ1_M
represent weights of -1, 0 or 1, and a shift of all weights of a group replaces a minimum.

The grids are ggml's (ggml-common.h), read from the `gguf` package, which has them in packed form.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from gguf import quants

from localllm.quant.blocks import SMALLEST_HALF, normalize, round_to_float16
from localllm.quant.formats import BY_NAME, LAYOUTS
from localllm.quant.numba_cache import compile_cached, compile_inline

NEIGHBOURS = 16
MAX_TURNS = 6
MIN_GAIN = np.float32(1 + 2e-3)  # the search continues while a turn raises the gain by more than this factor
# Candidates for the multiple of the group with the largest scale, as fractions of the largest possible multiple.
MULTIPLE_SHARES = np.stack([np.arange(start, start + 0.2, 0.0125) for start in (0.68, 0.88)]).astype(np.float32)


class Codebook(NamedTuple):
    """A grid, and for each point the grid vectors nearest to it. A point is a vector of levels."""

    grid: np.ndarray  # float32 [codes, dimensions]
    nearest: np.ndarray  # uint16 [points, NEIGHBOURS], codes
    vectors: np.ndarray  # int8 [points, dimensions, NEIGHBOURS], the grid vectors of these codes
    first: np.float32  # the value of level 0; levels are about 1 / per_step apart
    per_step: np.float32
    last: np.float32  # the highest level; the lowest is 0
    places: np.ndarray  # float32 [dimensions]: the index of a point is Σ level * place


@cache
def load_codebook(name: str) -> Codebook:
    format = getattr(quants, name)
    format.init_grid()
    grid = format.grid.reshape(format.grid_shape).astype(np.float32)
    levels = np.unique(grid)
    count, dimensions = len(levels), grid.shape[1]
    points = levels[np.indices((count,) * dimensions).reshape(dimensions, -1).T]
    distances = (grid**2).sum(axis=1) - 2 * points @ grid.T
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :NEIGHBOURS].astype(np.uint16)
    vectors = np.ascontiguousarray(grid[nearest].astype(np.int8).transpose(0, 2, 1))
    last, places = np.float32(count - 1), (float(count) ** np.arange(dimensions)[::-1]).astype(np.float32)
    return Codebook(grid, nearest, vectors, levels[0], last / (levels[-1] - levels[0]), last, places)


class GroupState(NamedTuple):
    """The vectors chosen for a group of weights, and temporary arrays of the search."""

    codes: np.ndarray  # uint16 [vectors]
    chosen: np.ndarray  # uint8 [vectors], indices of shifts
    doubled: np.ndarray  # float32 [size of the group], 2 w value
    levels: np.ndarray  # float32 [size of the group]
    points: np.ndarray  # int32 [vectors]
    places: np.ndarray  # int32 [vectors], index among a point's neighbours
    sums: np.ndarray  # float32 [vectors, 2], Σwxv and Σwv²


@compile_inline
def round_to_levels(x, w, inverse, shift, book, group):
    """Round the weights of a group to levels, in group.levels, and write 2 w value to group.doubled.

    value = x * inverse - shift, with inverse = 1 / scale.
    """
    for i in range(group.levels.size):
        value = x[i] * inverse - shift
        group.doubled[i] = np.float32(2) * w[i] * value
        level = np.rint((value - book.first) * book.per_step)
        group.levels[i] = min(max(level, np.float32(0)), book.last)


@compile_inline
def find_best_neighbour(size, w, start, doubled, book, point):
    """Return the index of the neighbour v of a point with the least error, which has the greatest score.

    The score is Σ v (2 w value - w v). Its lowest 4 bits are replaced by the neighbour's index, so that one maximum of
    integers finds both.
    """
    most = np.int32(-0x80000000)
    for k in range(NEIGHBOURS):
        score = np.float32(0)
        for i in range(size):
            v = np.float32(book.vectors[point, i, k])
            score += v * (doubled[start + i] - w[start + i] * v)
        bits = np.float32(score).view(np.int32)
        most = max(most, np.int32((bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -16 | k))
    return np.int32(most & 15)


@compile_inline
def fit_vectors(size, x, w, inverse, shifts, book, group):
    """Do the work of `choose_vectors` for vectors of `size` weights, a constant for the compiler.

    Several short loops take 5 ns a weight, one long loop 8: the CPU overlaps the iterations of short ones.
    """
    vectors = group.codes.size
    for s in range(shifts.size):
        round_to_levels(x, w, inverse, shifts[s], book, group)
        for n in range(vectors):
            point = np.float32(0)
            for i in range(size):
                point += group.levels[n * size + i] * book.places[i]
            group.points[n] = np.int32(point)
        for n in range(vectors):
            group.places[n] = find_best_neighbour(size, w, n * size, group.doubled, book, group.points[n])
        for n in range(vectors):
            code = book.nearest[group.points[n], group.places[n]]
            product, square = np.float32(0), np.float32(0)
            for i in range(n * size, n * size + size):
                v = book.grid[code, i - n * size] + shifts[s]
                product += w[i] * x[i] * v
                square += w[i] * v * v
            two = np.float32(2) * inverse
            if s == 0 or two * product - square > two * group.sums[n, 0] - group.sums[n, 1]:
                group.codes[n], group.chosen[n] = code, s
                group.sums[n, 0], group.sums[n, 1] = product, square
    product, square = np.float32(0), np.float32(0)
    for n in range(vectors):
        product += group.sums[n, 0]
        square += group.sums[n, 1]
    return product, square


@compile_cached
def choose_vectors(x, w, inverse, shifts, book, group):
    """Choose the vectors v of a group for the scale 1 / inverse; return (Σwxv, Σwv²).

    A vector is the nearest grid vector plus the better of `shifts`. Codes and indices of shifts are written to `group`.
    """
    if book.vectors.shape[1] == 4:
        return fit_vectors(4, x, w, inverse, shifts, book, group)
    return fit_vectors(8, x, w, inverse, shifts, book, group)


@compile_cached
def search_scale(x, w, targets, shifts, book, group):
    """Return the scale that reduces the error of a group most, and its gain; both are 0 if all weights are 0."""
    largest = np.float32(0)
    for i in range(x.size):
        largest = max(largest, abs(x[i]) if w[i] > 0 else np.float32(0))
    scale, gain = np.float32(0), np.float32(0)
    if largest < np.float32(1e-20):
        return scale, gain
    for target in targets:
        product, square = choose_vectors(x, w, target / largest, shifts, book, group)
        if product > 0 and product * product > gain * square:
            scale, gain = product / square, product * product / square
    while gain > 0:
        product, square = choose_vectors(x, w, np.float32(1) / scale, shifts, book, group)
        if product <= 0 or product * product <= gain * MIN_GAIN * square:
            break
        scale, gain = product / square, product * product / square
    return scale, gain


@compile_inline
def round_to_multiple(ratio, largest):
    """Return the odd integer from 1 to `largest` nearest to a ratio."""
    half = np.rint((ratio - np.float32(1)) * np.float32(0.5))
    return np.float32(2) * min(max(half, np.float32(0)), np.float32((largest - 1) // 2)) + np.float32(1)


@compile_cached
def choose_d(scales, gains, largest, shares):
    """Return the d whose multiples, up to `largest`, approximate the scales of all groups best.

    Candidates: the greatest scale divided by each of `shares` times the largest multiple. With the scale multiple * d a
    group gains about gain * (1 - (1 - multiple * d / scale)²).
    """
    extreme = np.float32(0)
    for scale in scales:
        extreme = max(extreme, scale)
    best, most = np.float32(0), np.float32(-np.inf)
    for share in shares:
        d = extreme / (share * np.float32(largest))
        total = np.float32(0)
        for group in range(scales.size):
            if gains[group] > 0:
                off = np.float32(1) - round_to_multiple(scales[group] / d, largest) * d / scales[group]
                total += gains[group] * (np.float32(1) - off * off)
        if total > most:
            best, most = d, total
    return best


class BlockPlan(NamedTuple):
    """The choices for a block: the multiple of each group, the code and shift of each vector."""

    multiples: np.ndarray  # int32 [groups]
    codes: np.ndarray  # uint16 [vectors]
    chosen: np.ndarray  # uint8 [vectors], indices of shifts


@compile_cached
def choose_multiples(x, w, scales, d, largest, shifts, book, group, plan, is_open):
    """Choose codes for all groups, given d, and write them to `plan`; return the error and the best d for them.

    The error is without Σwx². is_open: choose the multiple of each group, too, as the one above or below its scale;
    otherwise the plan's multiples stay.
    """
    size, vectors = x.size // scales.size, group.codes.size
    error, product, square = np.float32(0), np.float32(0), np.float32(0)
    for g in range(scales.size):
        xs, ws = x[g * size : g * size + size], w[g * size : g * size + size]
        nearest = round_to_multiple(scales[g] / d, largest)
        beside = nearest + np.float32(2 if scales[g] > nearest * d else -2)
        least, best_product, best_square = np.float32(np.inf), np.float32(0), np.float32(0)
        beside = min(max(beside, np.float32(1)), np.float32(largest))
        first = nearest if is_open else np.float32(plan.multiples[g])
        for n in range(2 if is_open else 1):
            multiple = beside if n else first
            scale = d * multiple
            p, q = choose_vectors(xs, ws, np.float32(1) / scale, shifts[g], book, group)
            e = scale * (scale * q - np.float32(2) * p)
            if e < least:
                least, best_product, best_square = e, multiple * p, multiple * multiple * q
                plan.multiples[g] = int(multiple)
                plan.codes[g * vectors : g * vectors + vectors] = group.codes
                plan.chosen[g * vectors : g * vectors + vectors] = group.chosen
        error += least
        product += best_product
        square += best_square
    return error, product / square


@compile_cached
def copy_plan(source, target):
    target.multiples[:] = source.multiples
    target.codes[:] = source.codes
    target.chosen[:] = source.chosen


@compile_cached
def fit_block(x, w, unit, scales, gains, largest, shifts, book, group, plan, best_plan):
    """Return the best d for 256 weights divided by `unit`, and write multiples and codes to `best_plan`."""
    best, least, following = np.float32(0), np.float32(0), np.float32(0)
    for shares in MULTIPLE_SHARES:
        d = max(round_to_float16(choose_d(scales, gains, largest, shares) * unit), SMALLEST_HALF)
        error, next_d = choose_multiples(x, w, scales, d / unit, largest, shifts, book, group, plan, True)
        if error < least:
            best, least, following = d, error, next_d
            copy_plan(plan, best_plan)
    copy_plan(best_plan, plan)
    for _ in range(MAX_TURNS):
        d = round_to_float16(following * unit)
        if d <= 0:
            break
        error, next_d = choose_multiples(x, w, scales, d / unit, largest, shifts, book, group, plan, False)
        if error >= least:
            break
        best, least, following = d, error, next_d
        copy_plan(plan, best_plan)
    return best


@compile_inline
def split_signs(x, w, even, signs):
    """Make 256 weights positive, and write their signs to `signs`, one byte for each octet.

    even: the number of minus signs of an octet must be even. If it is odd, the sign of the least important weight is
    flipped, and that weight becomes negative.
    """
    for octet in range(32):
        bits, weakest, least = 0, 0, np.float32(np.inf)
        for i in range(8):
            value = x[8 * octet + i]
            bits |= (value < 0) << i
            x[8 * octet + i] = abs(value)
            if w[8 * octet + i] * value * value < least:
                weakest, least = i, w[8 * octet + i] * value * value
        odd = (bits ^ bits >> 4) & 15
        odd = (0x6996 >> odd) & 1
        if even and odd:
            bits ^= 1 << weakest
            x[8 * octet + weakest] = -x[8 * octet + weakest]
        signs[octet] = bits


class CodebookResult(NamedTuple):
    """The results of a search for all blocks. Where d is 0, the other fields of a block are undefined."""

    d: np.ndarray  # float32 [blocks, 1], values of float16
    scales: np.ndarray  # uint8 [blocks, groups]: multiple = 1 + 2 * scale
    codes: np.ndarray  # uint16 [blocks, vectors]
    shifts: np.ndarray  # uint8 [blocks, groups], rows of `shifts`
    chosen: np.ndarray  # uint8 [blocks, vectors], columns of `shifts`
    signs: np.ndarray  # uint8 [blocks, 32]: bit i of byte n for weight 8 n + i


@compile_cached
def allocate_group(vectors, size):
    return GroupState(
        np.zeros(vectors, np.uint16),
        np.zeros(vectors, np.uint8),
        np.zeros(size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(vectors, np.int32),
        np.zeros(vectors, np.int32),
        np.zeros((vectors, 2), np.float32),
    )


@compile_cached
def search_rows(weights, importance, book, targets, shifts, signed, even, largest, factor, result):
    """Search all blocks, and write the results to `result`; `search_codebook` explains the parameters."""
    groups, vectors, blocks = result.scales.shape[1], result.codes.shape[1], weights.shape[1] // 256
    size = 256 // groups
    x, scales, gains = np.empty(256, np.float32), np.empty(groups, np.float32), np.empty(groups, np.float32)
    group_shifts = np.empty((groups, shifts.shape[1]), np.float32)
    state = allocate_group(vectors // groups, size)
    plan = BlockPlan(np.zeros(groups, np.int32), np.zeros(vectors, np.uint16), np.zeros(vectors, np.uint8))
    best_plan = BlockPlan(np.ones(groups, np.int32), np.zeros(vectors, np.uint16), np.zeros(vectors, np.uint8))
    for n in range(weights.shape[0] * blocks):
        row, start = n // blocks, n % blocks * 256
        w = importance[start : start + 256]
        unit = normalize(weights, row, start, 256, x)
        if unit == 0:
            continue
        if signed:
            split_signs(x, w, even, result.signs[n])
        for group in range(groups):
            part = slice(group * size, group * size + size)
            result.shifts[n, group], scales[group], gains[group] = search_shift(
                x[part], w[part], targets, shifts, book, state
            )
            group_shifts[group] = shifts[result.shifts[n, group]]
        result.d[n] = fit_block(x, w, unit * factor, scales, gains, largest, group_shifts, book, state, plan, best_plan)
        result.codes[n] = best_plan.codes
        result.chosen[n] = best_plan.chosen
        for group in range(groups):
            result.scales[n, group] = best_plan.multiples[group] // 2


@compile_cached
def search_shift(x, w, targets, shifts, book, group):
    """Return the best row of `shifts` for a group, with its scale and gain."""
    best, scale, gain = 0, np.float32(0), np.float32(0)
    for s in range(shifts.shape[0]):
        this_scale, this_gain = search_scale(x, w, targets, shifts[s], book, group)
        if this_gain > gain:
            best, scale, gain = s, this_scale, this_gain
    return best, scale, gain


NO_SHIFT = np.zeros((1, 1), np.float32)


def search_codebook(
    weights: np.ndarray,
    importance: np.ndarray,
    grid: str,
    targets: np.ndarray,
    groups: int,
    scale_bits: int,
    factor: float,
    shifts: np.ndarray = NO_SHIFT,
    signed: bool = True,
    even: bool = False,
) -> CodebookResult:
    """Search codes, scales and signs for all blocks of weights, float32 [rows, columns].

    importance: float32 [columns]
    grid: the format whose codebook is used
    targets: candidates for (largest weight of a group) / scale, float32
    groups: number of groups in a block of 256
    scale_bits: bits of a group's scale; its multiple is 1 + 2 * scale
    factor: weight = d / factor * multiple * (grid[code] + shift) * sign
    shifts: float32 [rows, shifts]; a group chooses a row, each of its vectors a shift of that row
    signed: the grid has magnitudes, and signs are stored separately
    even: the number of minus signs of every 8 weights must be even
    """
    book = load_codebook(grid)
    blocks, vectors = weights.size // 256, 256 // book.grid.shape[1]
    result = CodebookResult(
        np.zeros((blocks, 1), np.float32),
        np.zeros((blocks, groups), np.uint8),
        np.zeros((blocks, vectors), np.uint16),
        np.zeros((blocks, groups), np.uint8),
        np.zeros((blocks, vectors), np.uint8),
        np.zeros((blocks, 32), np.uint8),
    )
    largest = (2 << scale_bits) - 1
    search_rows(weights, importance, book, targets, shifts, signed, even, largest, np.float32(factor), result)
    return result


# Candidates for (largest weight of a group) / scale. The largest values of the grids are 1 1/8 (with the shift), 43, 15
# and 62.
IQ1_TARGETS = np.array([1.1, 1.5, 2, 2.8], dtype=np.float32)
IQ2_TARGETS = np.array([24, 30, 36, 41, 46, 53, 63, 80], dtype=np.float32)
IQ3_S_TARGETS = np.array([8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18.5, 21], dtype=np.float32)
IQ3_XXS_TARGETS = np.array([32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 74, 84], dtype=np.float32)
SHIFT = np.float32(0.125)


Fields = Callable[[CodebookResult], dict[str, np.ndarray]]


def build_encoder(name: str, fields: Fields, *how, grid: str = "", **more) -> Callable:
    """Build the encoder of a format.

    fields: converts the search's results to the fields of blocks, by name, uint8 [blocks, bytes of the field]. grid:
    the format whose codebook is searched, `name` by default. how, more: arguments of `search_codebook` after `grid`.
    """
    layout, block_bytes = LAYOUTS[name], BY_NAME[name].bytes

    def encode(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
        result, blocks = search_codebook(weights, importance, grid or name, *how, **more), out.reshape(-1, block_bytes)
        if layout.d is not None:
            blocks[:, layout.d : layout.d + 2] = result.d.astype("<f2").view(np.uint8)
        for part, numbers in fields(result).items():
            at = layout.find_field(part)
            blocks[:, at : at + numbers.shape[1]] = numbers

    return encode


def pack_iq1_s(result: CodebookResult) -> dict[str, np.ndarray]:
    words = result.scales.astype(np.uint16) << 12 | result.shifts.astype(np.uint16) << 15
    return {"codes": take_low_bytes(result.codes), "scales": view_bytes(words | pack_words(result.codes >> 8, 4, 3))}


def pack_iq1_m(result: CodebookResult) -> dict[str, np.ndarray]:
    d = result.d.astype(np.float16).view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) << 12
    high = (result.codes >> 8).astype(np.uint8) | result.chosen << 3
    words = d | pack_words(result.scales.astype(np.uint16), 4, 3)
    return {"codes": take_low_bytes(result.codes), "high": pack_words(high, 2, 4), "scales": view_bytes(words)}


def pack_iq2_xxs(result: CodebookResult) -> dict[str, np.ndarray]:
    codes, rest = take_low_bytes(result.codes).reshape(-1, 8, 4), pack_signs_and_scales(result).reshape(-1, 8, 4)
    return {"codes": np.concatenate((codes, rest), axis=2).reshape(-1, 64)}


def pack_iq2_xs(result: CodebookResult) -> dict[str, np.ndarray]:
    codes = result.codes | (result.signs & 127).astype(np.uint16) << 9
    return {"codes": view_bytes(codes), "scales": pack_words(result.scales, 2, 4)}


def pack_iq2_s(result: CodebookResult) -> dict[str, np.ndarray]:
    high = pack_words((result.codes >> 8).astype(np.uint8), 4, 2)
    fields = {"codes": take_low_bytes(result.codes), "signs": result.signs, "high": high}
    return fields | {"scales": pack_words(result.scales, 2, 4)}


def pack_iq3_xxs(result: CodebookResult) -> dict[str, np.ndarray]:
    return {"codes": take_low_bytes(result.codes), "scales": pack_signs_and_scales(result)}


def pack_iq3_s(result: CodebookResult) -> dict[str, np.ndarray]:
    high = pack_words((result.codes >> 8).astype(np.uint8), 8, 1)
    fields = {"codes": take_low_bytes(result.codes), "signs": result.signs, "high": high}
    return fields | {"scales": pack_words(result.scales, 2, 4)}


def take_low_bytes(codes: np.ndarray) -> np.ndarray:
    return (codes & 255).astype(np.uint8)


def view_bytes(words: np.ndarray) -> np.ndarray:
    """View integers as little-endian bytes, uint8 [blocks, bytes]."""
    return words.astype(words.dtype.newbyteorder("<")).view(np.uint8)


def pack_words(numbers: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Pack every `count` values of `bits` bits, [blocks, n], into one of their type, the first lowest."""
    shifts = (np.arange(count) * bits).astype(numbers.dtype)
    return np.bitwise_or.reduce(numbers.reshape(len(numbers), -1, count) << shifts, axis=2)


def pack_signs_and_scales(result: CodebookResult) -> np.ndarray:
    """Pack four times 7 sign bits, the first lowest, and a scale of 4 bits above them: uint8 [blocks, 32]."""
    return view_bytes(pack_words((result.signs & 127).astype(np.uint32), 4, 7) | result.scales.astype(np.uint32) << 28)


ENCODERS = {  # the integers are groups in a block, bits of a scale, and the factor (see `search_codebook`)
    "IQ1_S": build_encoder(
        "IQ1_S", pack_iq1_s, IQ1_TARGETS, 8, 3, 1, np.array([[SHIFT], [-SHIFT]]), grid="IQ1_S", signed=False
    ),
    "IQ1_M": build_encoder(
        "IQ1_M", pack_iq1_m, IQ1_TARGETS, 16, 3, 1, np.array([[SHIFT, -SHIFT]]), grid="IQ1_S", signed=False
    ),
    "IQ2_XXS": build_encoder("IQ2_XXS", pack_iq2_xxs, IQ2_TARGETS, 8, 4, 8, even=True),
    "IQ2_XS": build_encoder("IQ2_XS", pack_iq2_xs, IQ2_TARGETS, 16, 4, 8, even=True),
    "IQ2_S": build_encoder("IQ2_S", pack_iq2_s, IQ2_TARGETS, 16, 4, 8),
    "IQ3_XXS": build_encoder("IQ3_XXS", pack_iq3_xxs, IQ3_XXS_TARGETS, 8, 4, 4, even=True),
    "IQ3_S": build_encoder("IQ3_S", pack_iq3_s, IQ3_S_TARGETS, 8, 4, 1),
}
